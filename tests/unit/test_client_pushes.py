"""Pushes of the client, without I/O: what goes to which shard, and what a refusal or a lost answer means."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.refusals import refused_with

from paramserver.client import sends, transfer
from paramserver.client.cluster import Cluster
from paramserver.client.encoding import Encoding
from paramserver.core.spec import ConsistencySpec, ModelSpec
from paramserver.errors import ConflictError, InDoubt, RequestError, problem
from paramserver.limits import RANGES_PER_REQUEST_MAX
from paramserver.net.calls import Deadline, Outcome, Request, Response
from paramserver.types import AnyArray

from .sharding import A, B, Now, Shards, drive, expected, grads, refusal, terms


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
    with refused_with("too_stale", ConflictError):
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)
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


class Foreign:
    """An array of another library that shares its memory, as torch.from_numpy() makes them."""

    def __init__(self, array: AnyArray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> AnyArray:
        """Return its memory as an array."""
        return self.array


@pytest.mark.parametrize("of", [np.asarray, Foreign])
def test_what_lies_elsewhere_in_out_is_sent_again_as_it_was(
    shards: Shards, now: Now, cluster: Cluster, of: Any
) -> None:
    """A gradient that shares the memory of other parameters of `out` is not changed by values that arrive there."""
    p = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    sums = shards.flat + np.roll(shards.flat, -14)
    gradient = {"b": of(p.flat[:14]), "w": of(p.flat[14:].reshape(10, 5))}
    shards.trouble.append(lambda r: refusal("unavailable") if r.to == B and r.path == "/pushpull" else None)

    drive(transfer.pushpull(cluster, "m", Deadline.after(30, now), gradient, terms(), out=p), shards, now)

    assert shards.flat.tolist() == sums.tolist()
    assert p.flat.tolist() == sums.tolist()


def test_a_base_of_a_model_that_was_created_anew_is_refused(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A push whose base was pulled from an earlier creation of the model is refused and not sent."""
    p = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    shards.generation = 8
    cluster.forget("m")

    with refused_with("model_replaced", ConflictError):
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(base=p)), shards, now)
    assert not shards.pushes


def test_a_base_that_is_not_a_pull_is_refused(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A dict of a pull's arrays says nothing of its versions, so as a push's base it is refused, like other values."""
    p = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)

    for base in (dict(p), p.version, p.flat, {}, {0: (1, 1)}, dict(p.origin.versions)):
        with pytest.raises(RequestError, match=r"base must be what pull\(\) returned"):
            drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(base=base)), shards, now)
    assert not shards.pushes


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

    done = drive(
        transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(), encoding=Encoding(dtype=dtype)),
        shards,
        now,
    )

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
    done = drive(
        transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(), encoding=Encoding(dtype=dtype)),
        shards,
        now,
    )

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
    only = Encoding(ranges={"w": [(0, 1), (49, 50)]})
    drive(
        transfer.push(cluster, "m", Deadline.after(30, now), {"w": [5.0, 7.0]}, terms(), encoding=only),
        shards,
        now,
    )

    change = shards.flat - np.arange(64)
    assert {int(i): float(change[i]) for i in np.flatnonzero(change)} == {0: 5.0, 49: 7.0}
    assert sum(shards.versions) == 2
    assert sorted((p.partition, p.ranges.tolist()) for f in shards.pushes for p in f.parts if p.ranges is not None) == [
        (0, [[0, 1]]), (3, [[1, 2]]),
    ]  # fmt: skip


def test_no_request_names_more_ranges_than_a_shard_takes(
    now: Now, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What exceeds the ranges of one request follows under the same id: it was refused when other shards had theirs."""
    monkeypatch.setattr(sends, "RANGES_PER_REQUEST_MAX", 4)
    shards = Shards(w=(100, 1))  # 4 partitions of 28 or 29, every second one on a
    ranges = {"w": [(i, i + 1) for i in (0, 2, 4, 30, 32, 34, 60, 62, 64, 90, 92, 94)]}
    only = Encoding(ranges=ranges)
    call = transfer.push(cluster, "m", Deadline.after(30, now), {"w": np.ones(12)}, terms(), encoding=only)

    pushed = drive(call, shards, now)

    assert np.flatnonzero(shards.flat - np.arange(114)).tolist() == [a for a, _ in ranges["w"]]
    assert [len(f.parts) for f in shards.pushes] == [1] * 4
    assert len({f.push_id for f in shards.pushes}) == 1
    assert pushed.version == 1
    pulled = drive(transfer.pull(cluster, "m", Deadline.after(30, now), ranges=ranges), shards, now)
    assert pulled["w"].tolist() == [a + 1.0 for a, _ in ranges["w"]]
    assert [len(f.parts) for f in shards.pulls] == [1] * 4


def test_a_partition_with_more_ranges_than_a_request_names_is_refused_before_anything_is_sent(
    now: Now, cluster: Cluster
) -> None:
    """A push reaches a partition at most once, so one that names too many ranges of it is refused whole."""
    shards = Shards(w=(4 * RANGES_PER_REQUEST_MAX, 1), partitions=1)
    ranges = np.arange(RANGES_PER_REQUEST_MAX + 1)[:, None] * 2 + [0, 1]
    only = Encoding(ranges={"w": ranges})
    call = transfer.push(cluster, "m", Deadline.after(30, now), {"w": np.ones(len(ranges))}, terms(), encoding=only)

    with pytest.raises(RequestError, match=f"{len(ranges)} ranges lie in partition 0") as e:
        drive(call, shards, now)
    assert (e.value.code, shards.pushes) == ("too_large", [])


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

    with refused_with("non_finite", RequestError, match=f"'w' {why}"):
        drive(
            transfer.push(cluster, "m", Deadline.after(30, now), bad, terms(), encoding=Encoding(dtype=dtype)),
            shards,
            now,
        )
    assert shards.pushes == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_one_shard_alone_refuses_is_named(now: Now, cluster: Cluster, value: float) -> None:
    """If a model's only shard refuses a push as non-finite, the error names the parameter.

    The gradient is not scanned before: the shard finds NaN and infinity itself.
    """
    shards, bad = Shards(partitions=1), {n: a.astype(np.float32) for n, a in grads().items()}
    bad["w"][9, 4] = value
    shards.wrong_once("/push", refusal("non_finite"))

    with refused_with("non_finite", RequestError, match="'w' holds NaN or infinity"):
        drive(transfer.push(cluster, "m", Deadline.after(30, now), bad, terms()), shards, now)
    assert [path for _, path in shards.log if path == "/push"] == ["/push"]


def test_one_shard_alone_gets_the_norm_too(now: Now, cluster: Cluster) -> None:
    """If the model clips, a gradient for its only shard is scanned first, too: its norm is sent, and NaN is refused."""
    shards, bad = Shards(partitions=1, clip=True), {n: a.astype(np.float32) for n, a in grads().items()}
    drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)
    bad["w"][9, 4] = np.nan

    with pytest.raises(RequestError, match="'w' holds NaN or infinity"):
        drive(transfer.push(cluster, "m", Deadline.after(30, now), bad, terms()), shards, now)

    assert [f.norm for f in shards.pushes] == [pytest.approx((50 + 14 * 4) ** 0.5)]


def test_base_versions_go_with_each_partition(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A push with a pull as its base gives version and incarnation for every partition."""
    p = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)

    drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(base=p)), shards, now)

    assert {(part.partition, part.base) for f in shards.pushes for part in f.parts} == {(i, (0, 9)) for i in range(4)}


NO_SCHEDULERS = [
    Response(404, {}, b"<html>not here</html>"),
    Response(200, {}, b""),
    Response(200, {}, b'{"status":"ok"}'),
    Response(500, {}, b"oops"),
    refusal("unauthorized"),
    problem("unreachable", "cannot reach it"),
]


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("answer", NO_SCHEDULERS)
def test_what_answers_in_a_schedulers_place_ends_no_push_that_a_shard_has(
    shards: Shards, now: Now, cluster: Cluster, answer: Outcome, mode: str
) -> None:
    """A push that one shard has accepted is in doubt, whatever is answered instead of a map with the others' owners.

    A gateway whose nodes are away answers for itself, and a token may be revoked meanwhile.
    """
    shards.spec = replace(shards.spec, consistency=ConsistencySpec(mode))

    def one_is_away(request: Request) -> Outcome:
        if request.path == "/models/m" and shards.pushes:
            return answer
        away = request.to == B and request.path == "/push"
        return problem("unreachable", "cannot reach it") if away else shards(request)

    with pytest.raises(InDoubt):
        drive(transfer.push(cluster, "m", Deadline.after(5, now), grads(), terms()), one_is_away, now)

    assert len(shards.pushes) == 1


def test_a_push_to_a_model_that_is_gone_says_so(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A push whose model is deleted while a shard is away raises that at once: its parts are gone as well."""

    def one_is_away(request: Request) -> Outcome:
        if request.path == "/models/m" and shards.pushes:
            return refusal("unknown_model")
        away = request.to == B and request.path == "/push"
        return problem("unreachable", "cannot reach it") if away else shards(request)

    with refused_with("unknown_model"):
        drive(transfer.push(cluster, "m", Deadline.after(5, now), grads(), terms()), one_is_away, now)
