"""Pulls of the client, and pushes that pull, without I/O: requests are answered in memory, no socket is opened."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paramserver.client import transfer
from paramserver.client.arrays import Params
from paramserver.client.cluster import Cluster
from paramserver.client.encoding import Encoding
from paramserver.client.session import Session
from paramserver.client.shared_arrays import KEPT_MAX, SharedArrays
from paramserver.client.spec_builder import Param, model_document
from paramserver.errors import ConflictError, InDoubt, RequestError, Unavailable, problem
from paramserver.net.calls import Call, Deadline, Outcome, Request, Response
from paramserver.wire.frame import MEDIA_TYPE, PullFrame, PullReply, PushReply, decode_header, encode_header

from .session_node import Node
from .sharding import A, B, Now, Shards, drive, expected, grads, refusal, terms


def test_a_pull_puts_every_partition_in_its_place(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A pull asks each shard once and returns writable views of one vector in the model's order."""
    p = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)

    assert p.flat.tolist() == list(range(64))
    assert p["w"].shape == (10, 5)
    assert np.shares_memory(p["b"], p.flat)
    assert p["w"].flags.writeable
    assert sorted(to or "" for to, path in shards.log if path == "/pull") == [A, B]


def test_a_pull_of_names_and_ranges_is_packed(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A pull of name patterns and ranges asks for the selected elements only, and returns them end to end."""
    p = drive(
        transfer.pull(cluster, "m", Deadline.after(30, now), names="[w]", ranges={"w": [(3, 5), (40, 44)]}), shards, now
    )

    assert p["w"].tolist() == p.flat.tolist() == [3, 4, 40, 41, 42, 43]
    assert list(p) == ["w"]
    asked = [(p, ranges.tolist()) for f in shards.pulls for p, ranges in f.parts if ranges is not None]
    assert sorted(asked) == [(0, [[3, 5]]), (2, [[8, 12]])]


@pytest.mark.parametrize("dtype", ["float16", np.float16, np.dtype("float16")])
def test_a_dtype_may_be_numpys_own(shards: Shards, now: Now, cluster: Cluster, dtype: Any) -> None:
    """Pulls, pushes and parameters take a dtype by its name or as NumPy has it."""
    p = drive(transfer.pull(cluster, "m", Deadline.after(30, now), dtype=dtype), shards, now)
    drive(
        transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(), encoding=Encoding(dtype=dtype)),
        shards,
        now,
    )
    body, _ = model_document("m", {"w": Param((4,), dtype=dtype), "b": Param(np.ones(4), dtype=dtype)}, None, None, {})

    assert p.flat.dtype == np.float16
    assert {f.dtype for f in shards.pushes} == {"float16"}
    assert [spec["dtype"] for spec in body["params"].values()] == ["float16", "float16"]


def test_out_is_filled_and_returned(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A pull with `out` fills the arrays of an earlier pull in place, updates their version and returns them."""
    first = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    flat, b = first.flat, first["b"]
    drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)

    again = drive(transfer.pull(cluster, "m", Deadline.after(30, now), out=first), shards, now)

    assert again is first
    assert (first.version, flat.tolist(), b.tolist()) == (1, expected().tolist(), expected()[50:].tolist())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_is_filled_like_what_it_was_made_of(
    shards: Shards, now: Now, cluster: Cluster, copied: Callable[[Params], Params]
) -> None:
    """A pull into a copy fills the copy's own vector, of which its arrays are views, and not the original."""
    first = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    second = copied(first)
    drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)

    drive(transfer.pull(cluster, "m", Deadline.after(30, now), out=second), shards, now)

    assert (second.version, second.flat.tolist()) == (1, expected().tolist())
    assert np.array_equal(second["b"], expected()[50:])
    assert first.flat.tolist() == list(range(64))


def test_out_that_does_not_fit_is_refused(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A pull into arrays of another selection is refused."""
    part = drive(transfer.pull(cluster, "m", Deadline.after(30, now), names="b"), shards, now)

    with pytest.raises(RequestError, match="out cannot take"):
        drive(transfer.pull(cluster, "m", Deadline.after(30, now), out=part), shards, now)


@pytest.mark.parametrize("shape", [(5, 10), (2, 5), (20, 5)])
@pytest.mark.parametrize("partitions", [1, 4])
def test_out_of_an_earlier_creation_in_other_shapes_is_refused(
    shards: Shards, now: Now, cluster: Cluster, shape: tuple[int, ...], partitions: int
) -> None:
    """Arrays from before a model was created again in other shapes are refused as `out`, and nothing is pushed."""
    before = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    anew = Shards(w=shape, partitions=partitions)
    cluster.forget("m")
    gradient = {"w": np.ones(shape), "b": np.ones(14)}

    with pytest.raises(RequestError, match="out cannot take"):
        drive(transfer.pull(cluster, "m", Deadline.after(30, now), out=before), anew, now)
    with pytest.raises(RequestError, match="out cannot take"):
        drive(transfer.pushpull(cluster, "m", Deadline.after(30, now), gradient, terms(), out=before), anew, now)
    assert not anew.pushes


@pytest.mark.parametrize(
    ("names", "ranges", "said"),
    [
        ([], None, "names: is empty"),
        (5, None, "names: must be parameter names or patterns, not 5"),
        (["w", 5], None, "names: must be parameter names or patterns"),
        (None, {"w": 5}, "ranges of 'w' must be pairs"),
        (None, {"w": slice(0, 4)}, "ranges of 'w' must be pairs"),
        (None, {"w": [(0, 5.5)]}, r"ranges of 'w' must be pairs \(start, stop\) of integers, not \[\(0, 5.5\)\]"),
        (None, {"w": [(0, 4, 2)]}, "ranges of 'w' must be pairs"),
        (None, [(0, 4)], "ranges must be pairs .* by parameter name"),
    ],
)
def test_what_cannot_name_parameters_is_refused(
    shards: Shards, now: Now, cluster: Cluster, names: Any, ranges: Any, said: str
) -> None:
    """Empty or malformed names and ranges are refused, with an error that says what is expected."""
    with pytest.raises(RequestError, match=said):
        drive(transfer.pull(cluster, "m", Deadline.after(30, now), names=names, ranges=ranges), shards, now)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"min_version": -1}, "min_version: must be an integer from 0 to .*, not -1"),
        ({"min_version": 1.5}, "min_version: must be an integer"),
        ({"min_version": 1 << 70}, "min_version: must be an integer"),
        ({"wait_s": "x"}, "wait_s is seconds, from 0 to .*, not 'x'"),
        ({"wait_s": float("nan")}, "wait_s is seconds"),
    ],
)
def test_what_cannot_be_waited_for_is_refused(
    shards: Shards, now: Now, cluster: Cluster, wrong: dict[str, Any], said: str
) -> None:
    """An invalid `min_version` or `wait_s` is refused by the argument's name before any request is sent."""
    with pytest.raises(RequestError, match=said):
        drive(transfer.pull(cluster, "m", Deadline.after(30, now), **wrong), shards, now)
    with pytest.raises(RequestError, match=said):
        drive(SharedArrays(cluster).pull("m", Deadline.after(30, now), **wrong), shards, now)
    assert not shards.log


def test_names_that_can_be_read_once_are_read_once(shards: Shards, now: Now, cluster: Cluster) -> None:
    """Shared arrays are found by equal names and ranges, whether these are generators or lists."""
    shared = SharedArrays(cluster)
    shards.versions = [1] * 4

    def pull(names: Any, ranges: Any) -> Params:
        call = shared.pull("m", Deadline.after(30, now), names=names, ranges=ranges, min_version=1)
        return drive(call, shards, now)

    first = pull((n for n in "w"), {"w": iter([(3, 5)])})

    assert first["w"].tolist() == [3, 4]
    assert pull(["w"], {"w": [(3, 5)]}) is first


def test_shared_arrays_in_use_are_kept_longest(shards: Shards, now: Now, cluster: Cluster) -> None:
    """Shared arrays that are read again and again are not evicted, however many others are pulled in between."""
    shared = SharedArrays(cluster)
    shards.versions = [1] * 4

    def pull(start: int) -> Params:
        call = shared.pull("m", Deadline.after(30, now), names=["w"], ranges={"w": [(start, start + 1)]}, min_version=1)
        return drive(call, shards, now)

    first = pull(0)
    for start in range(1, KEPT_MAX + 2):
        pull(start)
        assert pull(0) is first


def test_only_what_was_asked_for_by_version_is_kept(shards: Shards, now: Now, cluster: Cluster) -> None:
    """Values pulled without `min_version` are their caller's alone, unless they are newer than those that are kept."""
    shared = SharedArrays(cluster)
    shards.versions = [1] * 4

    def pull(min_version: int) -> Params:
        return drive(shared.pull("m", Deadline.after(30, now), min_version=min_version), shards, now)

    alone, kept = pull(0), pull(1)
    assert kept is not alone
    newer = pull(0)
    assert newer is not kept
    assert pull(1) is newer


def test_numbers_of_numpy_are_numbers(shards: Shards, now: Now, cluster: Cluster) -> None:
    """Weights, versions, waits and timeouts may be NumPy numbers."""
    second: Any = np.float32(1)
    version: Any = np.int64(1)
    deadline = Deadline.after(30 * second, now)
    weighted = transfer.push(cluster, "m", deadline, grads(), terms(weight=np.float32(0.5)))
    drive(weighted, shards, now)
    assert [frame.weight for frame in shards.pushes] == [0.5] * 2

    waiting = transfer.pull(cluster, "m", deadline, min_version=version, wait_s=second)
    assert drive(waiting, shards, now).version == 1
    assert type(deadline.at) is float


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_values_travel_in_the_dtype_asked_for(shards: Shards, now: Now, cluster: Cluster, dtype: str) -> None:
    """Pulled values have the requested dtype, but bfloat16 arrives as float32; small integers are exact in all."""
    p = drive(transfer.pull(cluster, "m", Deadline.after(30, now), dtype=dtype), shards, now)

    assert [f.dtype for f in shards.pulls] == [dtype] * 2
    assert p.flat.dtype == ("float32" if dtype == "bfloat16" else dtype)
    assert p.flat.tolist() == list(range(64))


def test_a_client_under_tls_sends_nothing_in_the_clear(shards: Shards, now: Now) -> None:
    """A client given an https URL ignores http addresses in the map and sends everything to that URL."""
    drive(transfer.push(Cluster(("https://given:1",)), "m", Deadline.after(30, now), grads(), terms(1)), shards, now)

    assert [to for to, path in shards.log if path == "/push"] == [None]
    assert not any(path == "/livez" for _, path in shards.log)


def test_a_shard_of_another_cluster_at_an_advertised_address_is_sent_nothing(shards: Shards, now: Now) -> None:
    """An address that answers a probe with another cluster's id is not used: requests go to the URL that was given."""
    document, cluster = shards.document, Cluster(("http://given:1",))
    shards.document = lambda: {**document(), "cluster": "mine"}  # type: ignore[method-assign]
    shards.clusters = {A: "mine", B: "another's"}
    drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(1)), shards, now)

    assert sorted(str(to) for to, path in shards.log if path == "/push") == sorted([A, "None"])


def test_a_client_that_was_started_in_an_outage_finds_the_shards_after_it(
    shards: Shards, now: Now, cluster: Cluster
) -> None:
    """Addresses that never answered are probed each minute, with the map that a heartbeat fetches; no pull waits."""
    shards.answering = set()
    for _ in range(4):
        drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
        now.s += 60.0
    shards.answering = {A, B}
    shards.log.clear()
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    assert shards.log == [(None, "/pull")]

    drive(cluster.fetch_map("m", Deadline.after(2, now)), shards, now)
    shards.log.clear()
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)

    assert {to for to, path in shards.log} == {A, B}


def test_a_socket_that_was_not_connected_to_in_time_is_tried_again(
    shards: Shards, now: Now, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard's Unix socket that could not be connected to is probed again after 5 s, as the client may be at fault.

    One whose memory cannot be mapped here is not.
    """
    near, document = f"unix://{tmp_path}/socket", shards.document
    addresses = {"shards": {"a": {"addresses": [A, near]}, "b": {"addresses": [B]}}}
    monkeypatch.setattr(shards, "document", lambda: document() | addresses)
    shards.answering.add(near)

    def route() -> str | None:
        return cluster.route(drive(cluster.map_of("m", Deadline.after(30, now)), shards, now), 0)

    assert route() == near
    cluster.lost(near, now.s)
    assert route() == A
    now.s += 6.0
    assert route() == near
    cluster.lost(near, now.s, for_good=True)
    now.s += 60.0
    assert route() == A


def test_a_heartbeat_gives_a_probe_all_the_time_that_it_has(now: Now) -> None:
    """The probe of a heartbeat that nothing follows has the whole rest of its timeout; another one has half.

    After that of a worker that leaves, the scheduler is still to be told.
    """
    node, probes = Node(), list[float]()

    def answer(request: Request) -> Outcome:
        if request.path != "/livez":
            return node(request)
        probes.append(request.timeout_s)
        return problem("unreachable", "far away")

    session = Session(Cluster(("http://given:1",)), "m", None, None, 30.0)
    drive(session.join(Deadline.after(2.5, now)), answer, now)
    now.s += 100.0
    drive(session.beat(Deadline.after(2.5, now), last=True), answer, now)
    now.s += 100.0
    drive(session.leave(Deadline.after(2.5, now)), answer, now)

    assert probes == [1.25, 2.5, 1.25]


def test_pushpull_does_both_in_one_round(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A pushpull takes one request to each shard and returns the values after the push."""
    call = transfer.pushpull(cluster, "m", Deadline.after(30, now), grads(), terms())
    done, p = drive(call, shards, now)

    assert (done.version, p.version) == (1, 1)
    assert p.flat.tolist() == expected().tolist()
    assert [path for _, path in shards.log if path.startswith("/pu")] == ["/pushpull"] * 2


@pytest.mark.parametrize("gradient", [{"b": np.ones(14)}, grads()])
def test_out_is_looked_at_before_a_push_is_made(
    shards: Shards, now: Now, cluster: Cluster, gradient: dict[str, Any]
) -> None:
    """A pushpull into arrays that cannot take the values pushes nothing, whatever its gradient covers."""
    part = drive(transfer.pull(cluster, "m", Deadline.after(30, now), names="b"), shards, now)

    wrong: Any
    for wrong in (part, np.empty(64), {"w": np.empty(50)}):
        with pytest.raises(RequestError, match=r"out (cannot take|must be what)"):
            drive(transfer.pushpull(cluster, "m", Deadline.after(30, now), gradient, terms(), out=wrong), shards, now)

    assert not shards.pushes


def test_ranges_of_a_pushpull_may_be_ones_that_can_be_read_once(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A pushpull takes ranges from iterators, pushes to their elements and pulls the whole model."""
    ranges: Any = {"w": iter([iter((3, 5))])}
    encoding = Encoding().of_call(ranges=ranges)
    call = transfer.pushpull(cluster, "m", Deadline.after(30, now), {"w": np.ones(2)}, terms(), encoding=encoding)
    _, p = drive(call, shards, now)

    assert (p.flat - np.arange(64)).nonzero()[0].tolist() == [3, 4]


def received(request: Request, reply: PullReply) -> Response:
    """Return the answer to a pull or pushpull that has only this header."""
    assert request.sink is not None
    request.sink.begin()
    request.sink.feed(memoryview(encode_header(reply)))
    request.sink.end()
    return Response(200, {"content-type": MEDIA_TYPE})


def lent(request: Request, number: int, *, timeline: int = 0, push: PushReply | None = None) -> Response:
    """Return the answer of shard A to a pull or pushpull: a lease of its values."""
    lease = (number, ("f0", "f2"))
    return received(request, PullReply("m", 7, timeline, 1, 9, "float32", [(0, 1, 9), (2, 1, 9)], push, lease))


@pytest.mark.parametrize("path", ["/pull", "/pushpull"])
def test_what_was_lent_to_a_call_that_is_interrupted_is_given_back(
    shards: Shards, now: Now, cluster: Cluster, path: str
) -> None:
    """A pull or exchange that is interrupted ends the leases in the answers that it has received by then."""

    def interrupted(request: Request) -> Outcome:
        if request.path != path:
            return shards(request)
        if request.to == A:
            return lent(request, 5)
        raise KeyboardInterrupt

    deadline = Deadline.after(30, now)
    pulling = transfer.pull(cluster, "m", deadline)
    call: Call[Any] = pulling if path == "/pull" else transfer.exchange(cluster, "m", deadline, grads(), terms())
    with pytest.raises(KeyboardInterrupt):
        drive(call, interrupted, now)
    assert cluster.same_host.take_ended(A) == (5,)


def test_what_was_lent_to_a_pull_from_two_timelines_is_given_back(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A pull whose shards answer from different timelines until its deadline ends all leases."""
    numbers: list[int] = []

    def divided(request: Request) -> Outcome:
        if request.path != "/pull" or request.to != A:
            return shards(request)
        numbers.append(len(numbers) + 1)
        return lent(request, numbers[-1])

    shards.timelines[B] = [1]
    with pytest.raises(Unavailable):
        drive(transfer.pull(cluster, "m", Deadline.after(30, now)), divided, now)
    assert numbers
    assert sorted(cluster.same_host.take_ended(A)) == numbers


def test_what_was_lent_to_a_push_that_another_shard_refuses_is_given_back(
    shards: Shards, now: Now, cluster: Cluster
) -> None:
    """A push that a shard refuses ends the lease with which another one has accepted it."""

    def divided(request: Request) -> Outcome:
        if request.path != "/push":
            return shards(request)
        if request.to != A:
            return refusal("invalid_field")
        parts = [(0, 1, 9, 0), (2, 1, 9, 0)]
        reply = PushReply("applied", False, 1, 0, 9, 0, parts, lease=(5, ("f0", "f2")))
        return Response(200, {"content-type": MEDIA_TYPE}, encode_header(reply))

    with pytest.raises(InDoubt):
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), divided, now)
    assert cluster.same_host.take_ended(A) == (5,)


def test_what_was_lent_by_some_shards_alone_is_given_back_at_once(shards: Shards, now: Now, cluster: Cluster) -> None:
    """An exchange that only some shards released in time returns no values and ends their leases at once.

    All values are pulled later.
    """

    def one_released(request: Request) -> Outcome:
        if request.path != "/pushpull":
            return shards(request)
        lends = request.to == A
        push = PushReply("staged", False, int(lends), 0, 9, 0, [(0, int(lends), 9, 0)], released=lends)
        return (
            lent(request, 5, push=push) if lends else received(request, PullReply("m", 7, 0, 0, 9, "float32", [], push))
        )

    call = transfer.exchange(cluster, "m", Deadline.after(30, now), grads(), terms(commit_wait_s=1.0))
    done, values = drive(call, one_released, now)

    assert (done.released, values) == (False, None)
    assert cluster.same_host.take_ended(A) == (5,)


def test_waiting_for_a_version_is_asked_for_in_short_pieces(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A pull that waits for a version sends requests that wait for 2 s at most, and as long as asked in total.

    Ctrl-C takes effect between them.
    """
    waits: list[float] = []

    def patient(request: Request) -> Outcome:
        if request.path != "/pull" or request.to != A:
            return shards(request)
        assert request.body is not None
        waits.append(decode_header(bytes(request.body), PullFrame)[0].wait_s)
        now.s += waits[-1]
        return refusal("version_not_reached")

    with pytest.raises(ConflictError):
        drive(transfer.pull(cluster, "m", Deadline.after(30, now), min_version=9, wait_s=5.0), patient, now)

    assert waits == pytest.approx([2.0, 2.0, 1.0], abs=0.05)


@pytest.mark.parametrize("timeout", [0.2, 1.0, 30.0])
def test_a_wait_beyond_the_timeout_ends_with_the_nodes_answer(
    shards: Shards, now: Now, cluster: Cluster, timeout: float
) -> None:
    """A pull whose `wait_s` exceeds its timeout ends in time with `version_not_reached`, not as unanswered."""

    def patient(request: Request) -> Outcome:
        if request.path != "/pull" or request.to != A:
            return shards(request)
        assert request.body is not None
        wait_s = decode_header(bytes(request.body), PullFrame)[0].wait_s
        now.s += min(wait_s + 0.01, request.timeout_s)
        return refusal("version_not_reached") if wait_s + 0.01 < request.timeout_s else problem("in_doubt", "silent")

    began = now.s
    with pytest.raises(ConflictError) as e:
        drive(transfer.pull(cluster, "m", Deadline.after(timeout, now), min_version=9, wait_s=60.0), patient, now)
    assert e.value.code == "version_not_reached"
    assert now.s - began <= timeout
