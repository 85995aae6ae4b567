"""Pushes and pulls of the client, without I/O: requests are answered in memory, no socket is opened."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from paramserver.client import transfer
from paramserver.client.arrays import Params
from paramserver.client.calls import Deadline, Outcome, Request, Response
from paramserver.client.cluster import Cluster
from paramserver.client.shared_arrays import KEPT_MAX, SharedArrays
from paramserver.core.spec import ConsistencySpec, ModelSpec
from paramserver.errors import ConflictError, InDoubt, RequestError, problem
from paramserver.wire.frame import MEDIA_TYPE, PullFrame, PullReply, PushReply, decode_header, encode_header

from .sharding import A, B, Now, Shards, drive, expected, grads, refusal, terms


@pytest.fixture
def shards() -> Shards:
    return Shards()


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(("http://given:1",))


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
    assert sorted(part for f in shards.pulls for part in f.parts) == [(0, [(3, 5)]), (2, [(8, 12)])]


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


def refused_by(shards: Shards, shard: str, code: str) -> None:
    """Make that shard refuse the next push; the others accept their parts."""
    shards.trouble.append(lambda r: refusal(code) if r.to == shard and r.path == "/push" else None)


def test_a_refusal_of_one_shard_is_in_doubt_where_another_has_taken_its_part(
    shards: Shards, now: Now, cluster: Cluster
) -> None:
    """A push refused by one shard and applied by another raises InDoubt with the refusal and the applied partitions.

    If it were pushed again, it would count twice on the applied ones.
    """
    refused_by(shards, B, "too_stale")
    with pytest.raises(InDoubt) as caught:
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)

    assert (caught.value.members["refused"], caught.value.members["partitions"]) == ("too_stale", [0, 2])


def test_a_refusal_beside_a_lost_answer_is_in_doubt(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A push refused by one shard raises InDoubt if the answer of another is lost, because that one may have it."""
    lost = problem("in_doubt", "the connection broke")
    shards.trouble.append(lambda r: lost if r.to == A and r.path == "/push" else None)
    refused_by(shards, B, "too_stale")

    with pytest.raises(InDoubt, match="may be applied") as caught:
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)

    assert caught.value.members["refused"] == "too_stale"


@pytest.mark.parametrize("call", [transfer.push, transfer.exchange])
@pytest.mark.parametrize(("lost", "known"), [(False, False), (False, True), (True, False)])
def test_a_push_goes_on_in_a_model_that_becomes_synchronous(
    shards: Shards, now: Now, cluster: Cluster, call: Callable[..., Any], lost: bool, known: bool
) -> None:
    """If one shard applies its part of a push and another has become synchronous meanwhile, that one stages its part.

    It is sent again under the same push id, with the new timeline and its clock, also if the answer of the first shard
    is lost, or if the client's map has shown the new mode before the first shard adopted it.
    """
    modes = {mode: replace(shards.spec, consistency=ConsistencySpec(mode)) for mode in ("async", "sync")}

    def became_sync(request: Request) -> Outcome | None:
        if request.to != B:
            return None
        shards.spec = modes["sync"]
        return refusal("rolled_back", timeline=3, clock=40)

    def answer_lost(request: Request) -> Outcome | None:
        if request.to != A or not request.body:
            return None
        shards.frame(request, bytes(request.body))
        return problem("in_doubt", "the connection broke")

    shards.spec = modes["sync" if known else "async"]
    drive(cluster.map_of("m", Deadline.after(30, now)), shards, now)
    shards.spec = modes["async"]
    shards.trouble += [became_sync, answer_lost] if lost else [became_sync]
    result = drive(call(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)

    pushed = result[0] if isinstance(result, tuple) else result
    assert pushed.state == "staged"
    assert shards.flat.tolist() == expected().tolist()
    first, last = shards.pushes[0], shards.pushes[-1]
    assert (last.timeline, last.clock) == (3, 40)
    assert (last.worker, last.epoch, last.seq) == (first.worker, first.epoch, first.seq)


def test_a_refusal_that_tells_of_parts_which_were_taken_is_in_doubt(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A refusal that names partitions already applied raises InDoubt with them.

    A shard that splits a push among the owners answers like this.
    """
    told = refusal("too_stale", partitions=[1, 3])
    shards.trouble += [lambda r: told if r.path == "/push" else None] * 2
    with pytest.raises(InDoubt) as caught:
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)

    assert (caught.value.members["refused"], caught.value.members["partitions"]) == ("too_stale", [1, 3])


def test_a_refusal_before_anything_was_taken_is_one(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A push that was applied nowhere raises the refusal itself.

    In sync that includes a push that only some shards have, because it counts for nothing.
    """
    for shard in (A, B):
        refused_by(shards, shard, "too_stale")
    with pytest.raises(ConflictError) as caught:
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)
    assert caught.value.code == "too_stale"
    shards.trouble.clear()
    shards.spec = ModelSpec.parse(shards.spec.document() | {"consistency": {"mode": "sync"}})
    cluster.forget("m")
    refused_by(shards, B, "rolled_back")
    with pytest.raises(ConflictError) as caught:
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)
    assert (caught.value.code, caught.value.members["partitions"]) == ("rolled_back", [0, 2])


def test_a_part_that_was_applied_counts_whatever_the_mode_is_by_now(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A push refused by one shard and applied by another raises InDoubt even if the client's map says sync.

    The shard that applied its part had not learned of the new mode yet.
    """
    shards.spec = ModelSpec.parse(shards.spec.document() | {"consistency": {"mode": "sync"}})
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    shards.spec = ModelSpec.parse(shards.spec.document() | {"consistency": {"mode": "async"}})
    refused_by(shards, B, "too_stale")
    with pytest.raises(InDoubt) as caught:
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)
    assert (caught.value.members["refused"], caught.value.members["partitions"]) == ("too_stale", [0, 2])


def test_what_is_pushed_and_filled_at_once_is_sent_again_as_it_was(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A pushpull whose `out` is its own gradient sends a retry with the original gradient.

    By then the first shard's values may have overwritten it.
    """
    p = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    before = shards.flat.copy()
    shards.trouble.append(lambda r: refusal("unavailable") if r.to == B and r.path == "/pushpull" else None)

    drive(transfer.pushpull(cluster, "m", Deadline.after(30, now), p.flat, terms(), out=p), shards, now)

    assert shards.flat.tolist() == (2 * before).tolist()
    assert p.flat.tolist() == shards.flat.tolist()


def test_a_base_of_a_model_that_was_created_anew_is_refused(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A push whose base was pulled from an earlier creation of the model is refused and not sent."""
    p = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    shards.generation = 8
    cluster.forget("m")

    with pytest.raises(ConflictError) as caught:
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(base=p)), shards, now)
    assert caught.value.code == "model_replaced"
    assert not shards.pushes


def test_a_base_that_is_not_a_pull_is_refused(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A dict of a pull's arrays says nothing of its versions, so as a push's base it is refused, like other values."""
    p = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)

    for base in (dict(p), p.version, p.flat):
        with pytest.raises(RequestError, match=r"base must be what pull\(\) returned"):
            drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(base=base)), shards, now)
    assert not shards.pushes


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
    options = {"names": None, "ranges": None, "dtype": None, "min_version": 0}
    with pytest.raises(RequestError, match=said):
        SharedArrays(cluster).pull(
            "m",
            options | {k: v for k, v in wrong.items() if k in options},
            wrong.get("wait_s", 0.0),
            lambda call: drive(call, shards, now),
            Deadline.after(30, now),
        )
    assert not shards.log


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"weight": float("nan")}, r"weight: must be a number of at least 0 and below 1e\+38, not nan"),
        ({"weight": -1.0}, "weight: must be a number"),
        ({"weight": "2"}, "weight: must be a number .*, not '2'"),
        ({"ack": 5}, "ack: must be one of applied, journaled, fsynced, not 5"),
    ],
)
def test_what_a_push_cannot_say_is_refused(
    shards: Shards, now: Now, cluster: Cluster, wrong: dict[str, Any], said: str
) -> None:
    """An invalid `weight` or `ack` is refused by the argument's name in push and pushpull, and nothing is sent."""
    for call in (transfer.push, transfer.pushpull):
        with pytest.raises(RequestError, match=said):
            drive(call(cluster, "m", Deadline.after(30, now), grads(), terms(**wrong)), shards, now)
    assert not shards.pushes


def test_names_that_can_be_read_once_are_read_once(shards: Shards, now: Now, cluster: Cluster) -> None:
    """Shared arrays are found by equal names and ranges, whether these are generators or lists."""
    shared = SharedArrays(cluster)
    shards.versions = [1] * 4

    def pull(names: Any, ranges: Any) -> Params:
        options = {"names": names, "ranges": ranges, "dtype": None, "min_version": 1}
        return shared.pull("m", options, 0.0, lambda call: drive(call, shards, now), Deadline.after(30, now))

    first = pull((n for n in "w"), {"w": iter([(3, 5)])})

    assert first["w"].tolist() == [3, 4]
    assert pull(["w"], {"w": [(3, 5)]}) is first


def test_shared_arrays_in_use_are_kept_longest(shards: Shards, now: Now, cluster: Cluster) -> None:
    """Shared arrays that are read again and again are not evicted, however many others are pulled in between."""
    shared = SharedArrays(cluster)
    shards.versions = [1] * 4

    def pull(start: int) -> Params:
        options = {"names": ["w"], "ranges": {"w": [(start, start + 1)]}, "dtype": None, "min_version": 1}
        return shared.pull("m", options, 0.0, lambda call: drive(call, shards, now), Deadline.after(30, now))

    first = pull(0)
    for start in range(1, KEPT_MAX + 2):
        pull(start)
        assert pull(0) is first


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


def clips_from_now_on(shards: Shards, missed_by: str) -> None:
    """Let the model clip by norm, which that shard knows and the client's map does not."""
    shards.spec = Shards(clip=True).spec
    told = refusal("invalid_field", where="norm")
    shards.trouble.append(lambda r: told if r.to == missed_by and r.path == "/push" else None)


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_a_shard_that_has_begun_to_clip_gets_the_norm_of_the_whole_gradient(
    shards: Shards, now: Now, cluster: Cluster, dtype: str | None
) -> None:
    """A push refused for its missing norm is sent again with that of the whole gradient, accepted parts included."""
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    clips_from_now_on(shards, B)

    done = drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(), dtype=dtype), shards, now)

    assert done.state == "applied"
    assert [f.norm for f in shards.pushes] == [None, pytest.approx((50 + 14 * 4) ** 0.5)]
    assert shards.flat.tolist() == expected().tolist()


def test_a_piece_of_a_push_is_refused_by_a_shard_that_has_begun_to_clip(
    shards: Shards, now: Now, cluster: Cluster
) -> None:
    """A piece of a streamed push is not sent with its own norm as that of the whole, even once the setting is known."""
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    clips_from_now_on(shards, A)
    piece = frozenset({0})

    with pytest.raises(RequestError):
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(), partitions=piece), shards, now)
    drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(), partitions=piece), shards, now)

    assert [f.norm for f in shards.pushes] == [None]
    clips = drive(cluster.map_of("m", Deadline.after(30, now)), shards, now).spec.optimizer.clip_norm
    assert clips is not None


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16", "float64"])
def test_a_push_reaches_all_owners_with_one_norm(now: Now, cluster: Cluster, dtype: str | None, clip: bool) -> None:
    """A push sends each shard one frame in that dtype, with the gradient's norm if the model clips by it."""
    shards = Shards(clip=clip)
    done = drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(), dtype=dtype), shards, now)

    assert (done.state, done.version, done.duplicate) == ("applied", 1, False)
    assert shards.flat.tolist() == expected().tolist()
    norm = pytest.approx((50 + 14 * 4) ** 0.5) if clip else None
    assert [(f.dtype, f.norm) for f in shards.pushes] == [(dtype or "float32", norm)] * 2


def test_a_flat_vector_is_a_gradient_too(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A gradient may be a flat vector in the order of `Params.flat`."""
    vector = np.r_[np.ones(50), np.full(14, 2.0)]

    drive(transfer.push(cluster, "m", Deadline.after(30, now), vector, terms()), shards, now)

    assert shards.flat.tolist() == expected().tolist()


def test_a_push_of_ranges_touches_only_them(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A push of ranges sends only their elements, to the partitions that contain them."""
    drive(
        transfer.push(
            cluster, "m", Deadline.after(30, now), {"w": [5.0, 7.0]}, terms(), ranges={"w": [(0, 1), (49, 50)]}
        ),
        shards,
        now,
    )

    change = shards.flat - np.arange(64)
    assert {int(i): float(change[i]) for i in np.flatnonzero(change)} == {0: 5.0, 49: 7.0}
    assert sum(shards.versions) == 2
    assert sorted((part.partition, part.ranges) for f in shards.pushes for part in f.parts) == [
        (0, [(0, 1)]), (3, [(1, 2)]),
    ]  # fmt: skip


def test_a_client_under_tls_sends_nothing_in_the_clear(shards: Shards, now: Now) -> None:
    """A client given an https URL ignores http addresses in the map and sends everything to that URL."""
    drive(transfer.push(Cluster(("https://given:1",)), "m", Deadline.after(30, now), grads(), terms(1)), shards, now)

    assert [to for to, path in shards.log if path == "/push"] == [None]
    assert not any(path == "/livez" for _, path in shards.log)


def test_wrong_gradients_are_listed_and_not_sent(shards: Shards, now: Now, cluster: Cluster) -> None:
    """All wrong names, shapes and dtypes of a gradient are reported in one error, and nothing is sent."""
    bad = {"v": np.ones(3), "w": np.ones((5, 10)), "b": np.array(["x"] * 14)}

    with pytest.raises(RequestError) as e:
        drive(transfer.push(cluster, "m", Deadline.after(30, now), bad, terms()), shards, now)

    assert {(x["where"], x["code"]) for x in e.value.errors} == {
        ("v", "unknown_parameter"), ("w", "invalid_shape"), ("b", "invalid_dtype"),
    }  # fmt: skip
    assert shards.pushes == []


@pytest.mark.parametrize(
    ("value", "dtype", "why"),
    [
        (np.nan, None, "holds NaN or infinity"),
        (np.inf, "bfloat16", "holds NaN or infinity"),
        (1e300, None, "holds numbers that are too large for float32"),
        (1e300, "float64", "holds numbers that are too large for float32"),
        (3.41e38, "float64", "holds numbers that are too large for float32"),
        (np.inf, "float64", "holds NaN or infinity"),
        (1e6, "float16", "holds numbers that are too large for float16"),
    ],
)
def test_values_that_are_not_finite_on_the_way_are_refused(
    shards: Shards, now: Now, cluster: Cluster, value: float, dtype: str | None, why: str
) -> None:
    """NaN, infinity and values that overflow the dtype they are sent in are refused by the parameter's name."""
    bad = grads()
    bad["w"][9, 4] = value

    with pytest.raises(RequestError, match=f"'w' {why}") as e:
        drive(transfer.push(cluster, "m", Deadline.after(30, now), bad, terms(), dtype=dtype), shards, now)

    assert e.value.code == "non_finite"
    assert shards.pushes == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_one_shard_alone_refuses_is_named(now: Now, cluster: Cluster, value: float) -> None:
    """If a model's only shard refuses a push as non-finite, the error names the parameter.

    The gradient is not scanned before: the shard finds NaN and infinity itself.
    """
    shards, bad = Shards(partitions=1), {n: a.astype(np.float32) for n, a in grads().items()}
    bad["w"][9, 4] = value
    shards.wrong_once("/push", refusal("non_finite"))

    with pytest.raises(RequestError, match="'w' holds NaN or infinity") as e:
        drive(transfer.push(cluster, "m", Deadline.after(30, now), bad, terms()), shards, now)

    assert e.value.code == "non_finite"
    assert [path for _, path in shards.log if path == "/push"] == ["/push"]


def test_one_shard_alone_gets_the_norm_too(now: Now, cluster: Cluster) -> None:
    """If the model clips, a gradient for its only shard is scanned first, too: its norm is sent, and NaN is refused."""
    shards, bad = Shards(partitions=1, clip=True), {n: a.astype(np.float32) for n, a in grads().items()}
    drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)
    bad["w"][9, 4] = np.nan

    with pytest.raises(RequestError, match="'w' holds NaN or infinity"):
        drive(transfer.push(cluster, "m", Deadline.after(30, now), bad, terms()), shards, now)

    assert [f.norm for f in shards.pushes] == [pytest.approx((50 + 14 * 4) ** 0.5)]


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
    call = transfer.pushpull(cluster, "m", Deadline.after(30, now), {"w": np.ones(2)}, terms(), ranges=ranges)
    _, p = drive(call, shards, now)

    assert (p.flat - np.arange(64)).nonzero()[0].tolist() == [3, 4]


def test_what_was_lent_by_some_shards_alone_is_given_back_at_once(shards: Shards, now: Now, cluster: Cluster) -> None:
    """An exchange that only some shards released in time returns no values and ends their leases at once.

    All values are pulled later.
    """

    def one_released(request: Request) -> Outcome:
        if request.path != "/pushpull":
            return shards(request)
        lends = request.to == A
        push = PushReply("staged", False, int(lends), 0, 9, 0, [(0, int(lends), 9, 0)], released=lends)
        parts, lease = ([(0, 1, 9), (2, 1, 9)], (5, ("f0", "f2"))) if lends else ([], None)
        assert request.sink is not None
        request.sink.begin()
        reply = PullReply("m", 7, 0, int(lends), 9, "float32", parts, push, lease)
        request.sink.feed(memoryview(encode_header(reply)))
        request.sink.end()
        return Response(200, {"content-type": MEDIA_TYPE})

    call = transfer.exchange(cluster, "m", Deadline.after(30, now), grads(), terms(commit_wait_s=1.0))
    done, values = drive(call, one_released, now)

    assert (done.released, values) == (False, None)
    assert cluster.same_host.take_ended(A) == (5,)


def test_base_versions_go_with_each_partition(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A push with a pull as its base gives version and incarnation for every partition."""
    p = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)

    drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(base=p)), shards, now)

    assert {(part.partition, part.base) for f in shards.pushes for part in f.parts} == {(i, (0, 9)) for i in range(4)}


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
