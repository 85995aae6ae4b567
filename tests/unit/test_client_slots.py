"""Pushes and pulls through memory of shards on the same machine, which lend real files but answer without I/O."""

import fcntl
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from paramserver.client import transfer
from paramserver.client.arrays import Origin
from paramserver.client.cluster import Cluster
from paramserver.client.encoding import Encoding
from paramserver.client.frames import PushTerms
from paramserver.client.membership import Membership
from paramserver.client.same_host import SameHost
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError, problem
from paramserver.limits import SHARED_LEASE_S
from paramserver.net.calls import Call, Deadline, Outcome, Request, Response
from paramserver.types import PushId
from paramserver.wire.board import UNTIL, WORDS, slot_index
from paramserver.wire.frame import MEDIA_TYPE, PullFrame, PullReply, PushFrame, PushReply, decode_header, encode_header

from .sharding import Now, drive, refusal

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is shared on Linux")

COUNT = 1 << 15
"""Elements of a partition: 128 KiB, which is worth a slot and fills whole pages."""
GRAD = np.arange(2 * COUNT, dtype=np.float32)


class Lenders:
    """Shards `a` and `b`, with one partition each, and a scheduler; what is scripted for a shard's path comes first."""

    def __init__(self, folder: Path, locks: ExitStack) -> None:
        spec = {"name": "m", "params": {"w": {"shape": [2 * COUNT]}}, "partitions": 2, "optimizer": {"name": "sgd"}}
        self.spec = ModelSpec.parse(spec)
        self.folder = folder
        self.near = {shard: f"unix://{folder}/{shard}/requests" for shard in "ab"}
        self.far = {shard: f"http://{shard}:1" for shard in "ab"}
        self.script: dict[tuple[str, str], list[Outcome]] = {}
        self.sent: list[tuple[str, str]] = []
        """(shard, path) of each request but probes, with a `!` if it was sent to the far address."""
        self.pushed: dict[str, Any] = {}
        """The elements that each shard was last pushed."""
        self.state, self.released, self.timeline = "applied", False, {"a": 0, "b": 0}
        self.lends = {"a", "b"}
        self.numbers = 0
        for shard in "ab":
            (folder / shard).mkdir()
            fcntl.flock(locks.enter_context(open(folder / shard / "lock", "wb")), fcntl.LOCK_EX)
            np.zeros(WORDS, "<i8").tofile(folder / shard / "board")
            self.board(shard)[UNTIL] = (1 << 63) - 1

    def board(self, shard: str) -> Any:
        """The words of the shard's board."""
        return np.memmap(self.folder / shard / "board", "<i8", "r+")

    def __call__(self, request: Request) -> Outcome:
        if request.path == "/models/m":
            return Response(200, {}, json.dumps(self.document()).encode())
        assert request.to is not None
        shard = next(s for s in "ab" if request.to in (self.near[s], self.far[s]))
        if request.path == "/livez":
            return Response(200, {})
        self.sent.append((shard, request.path + ("!" if request.to == self.far[shard] else "")))
        if scripted := self.script.get((shard, request.path)):
            return scripted.pop(0)
        body = bytes(request.body or b"") + b"".join(request.rest)
        if request.path == "/slots":
            name = f"s{len(list((self.folder / shard).glob('s*')))}"
            (self.folder / shard / name).write_bytes(bytes(json.loads(body)["bytes"]))
            return Response(200, {}, json.dumps({"slot": name}).encode())
        if request.path == "/push":
            return Response(200, {"content-type": MEDIA_TYPE}, encode_header(self.push(shard, body)))
        return self.pull(shard, request, body)

    def document(self) -> dict[str, Any]:
        """The model's document."""
        return {
            "name": "m", "generation": 7, "timeline": 0, "clock": 0, "map_epoch": 1, "spec": self.spec.document(),
            "partitions": [{"index": 0, "shard": "a"}, {"index": 1, "shard": "b"}],
            "shards": {s: {"addresses": [self.near[s], self.far[s]]} for s in "ab"},
        }  # fmt: skip

    def lease(self, shard: str, value: float) -> Any:
        """Lend the shard's partition, filled with that value, as the only current lease."""
        self.numbers += 1
        path = self.folder / shard / f"f{self.numbers}"
        path.write_bytes(np.full(COUNT, value, np.float32).tobytes())
        words = self.board(shard)
        words[slot_index(0) :] = 0
        words[slot_index(self.numbers)] = self.numbers
        return self.numbers, (path.name,)

    def push(self, shard: str, body: bytes) -> PushReply:
        """Take a push, from its slot or its body, and lend what it makes if that was asked for."""
        frame, offset = decode_header(body, PushFrame)
        data = body[offset:] if frame.slot is None else (self.folder / shard / frame.slot).read_bytes()
        self.pushed[shard] = np.frombuffer(data, np.float32)
        lease = self.lease(shard, 2.0) if frame.mapped and shard in self.lends else None
        parts = [("ab".index(shard), 1, 9, 0)]
        return PushReply(self.state, False, 1, 0, 9, self.timeline[shard], parts, lease=lease, released=self.released)

    def pull(self, shard: str, request: Request, body: bytes) -> Outcome:
        """Answer a pull or pushpull with the shard's partition of ones, lent if that was asked for."""
        push = self.push(shard, body) if request.path == "/pushpull" else None
        spec = decode_header(body, PullFrame)[0] if push is None else decode_header(body, PushFrame)[0].pull
        assert spec is not None
        assert request.sink is not None
        lease = self.lease(shard, 1.0) if spec.mapped and shard in self.lends else None
        parts = [("ab".index(shard), 1, 9)]
        reply = PullReply("m", 7, self.timeline[shard], 1, 9, "float32", parts, push, lease)
        values = b"" if lease else np.ones(COUNT, np.float32).tobytes()
        request.sink.begin()
        request.sink.feed(memoryview(encode_header(reply) + values))
        request.sink.end()
        return Response(200, {"content-type": MEDIA_TYPE})


def terms(seq: int = 1, **more: Any) -> PushTerms:
    return PushTerms(PushId("c-1", 1, seq), **more)


@pytest.fixture
def lenders() -> Iterator[Lenders]:
    """Two shards whose folder has a short path, as for sockets."""
    with TemporaryDirectory() as name, ExitStack() as locks:
        yield Lenders(Path(name), locks)


def push(cluster: Cluster, now: Now, seq: int = 1) -> Call[Any]:
    """A push of the whole gradient."""
    return transfer.push(cluster, "m", Deadline.after(30, now), {"w": GRAD}, terms(seq))


def idle(cluster: Cluster, lenders: Lenders) -> list[tuple[str, str]]:
    """Take all idle slots; return the shard and file of each."""
    return sorted((s.address[len(str(lenders.folder)) + 8], s.file) for s in cluster.same_host.take_idle())


def test_a_gradient_lies_in_a_slot_of_each_shard(lenders: Lenders, now: Now, cluster: Cluster) -> None:
    """A push asks each shard for a slot and writes its part there; the next push uses the same slots."""
    for seq in (1, 2):
        drive(push(cluster, now, seq), lenders, now)
        assert np.array_equal(np.concatenate([lenders.pushed["a"], lenders.pushed["b"]]), GRAD)

    assert [path for _, path in lenders.sent] == ["/slots"] * 2 + ["/push"] * 4
    assert idle(cluster, lenders) == [("a", "s0"), ("b", "s0")]


def pull(cluster: Cluster, lenders: Lenders, now: Now) -> None:
    """A pull of the whole model, which makes requests."""
    cluster.lease_cache.drop()
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), lenders, now)


def beat(cluster: Cluster, lenders: Lenders, now: Now) -> None:
    """A heartbeat of a worker."""
    worker = Membership(cluster, "m", None, None, silence_s=30.0)
    told = Response(200, {}, b"{}")
    drive(worker.beat(Deadline.after(30, now)), lambda r: lenders(r) if r.path == "/models/m" else told, now)


@pytest.mark.parametrize("quiet", [pull, beat])
def test_a_client_that_no_longer_pushes_unmaps_its_slots(
    lenders: Lenders, now: Now, cluster: Cluster, quiet: Callable[[Cluster, Lenders, Now], None]
) -> None:
    """Slots that shards may have taken back are unmapped by a pull, or by a worker's heartbeat."""
    cluster.same_host = SameHost(now)
    drive(push(cluster, now), lenders, now)
    after = []
    for _ in range(2):
        quiet(cluster, lenders, now)
        slots = re.findall(rf"{lenders.folder}/[ab]/s0$", Path("/proc/self/maps").read_text(), re.MULTILINE)
        after.append(len(slots))
        now.s += SHARED_LEASE_S
    assert after == [2, 0]


def test_many_pushes_at_once_use_the_slots_of_those_before(lenders: Lenders, now: Now, cluster: Cluster) -> None:
    """Bursts of pushes that overlap ask shards for no more slots than one burst needs."""
    for burst in range(3):
        pushes = [push(cluster, now, seq=10 * burst + i) for i in range(6)]
        outgoing = []
        for call in pushes:
            requests: Any = next(call)
            while requests[0].path != "/push":
                requests = call.send([lenders(r) for r in requests])
            outgoing.append(requests)
        for call, requests in zip(pushes, outgoing, strict=True):
            with pytest.raises(StopIteration):
                call.send([lenders(r) for r in requests])

    paths = [path for _, path in lenders.sent]
    assert (paths.count("/push"), paths.count("/slots")) == (36, 12)


@pytest.mark.parametrize(
    ("outcome", "kept", "pauses"),
    [
        (refusal("invalid_field"), ["s0"], False),
        (refusal("slot_gone"), ["s1"], False),
        (refusal("unavailable"), ["s1"], True),
        (problem("in_doubt", "the answer was lost"), ["s1"], True),
        (problem("unreachable", "nobody there"), [], True),
        (refusal("internal"), [], False),
        (refusal("conflict", push={"version": 1}), [], False),
    ],
)
def test_a_slot_is_used_again_only_if_its_shard_is_done_with_it(
    lenders: Lenders, now: Now, cluster: Cluster, outcome: Outcome, kept: list[str], pauses: bool
) -> None:
    """A slot serves on after an accepted push or a refusal for good; if the shard may still read it, it never does."""
    lenders.script["a", "/push"] = [outcome]
    started = now.s
    try:
        drive(push(cluster, now), lenders, now)
        pushed = [*lenders.pushed["a"], *lenders.pushed["b"]]
        assert np.array_equal(pushed, GRAD)
    except PsError:
        assert kept != ["s1"]

    assert (now.s > started) == pauses
    assert [file for shard, file in idle(cluster, lenders) if shard == "a"] == kept


@pytest.mark.parametrize(
    "answer", [refusal("unavailable"), problem("unreachable", "nobody"), Response(200, {}, b'{"slot":"gone"}')]
)
def test_without_a_slot_a_gradient_travels(lenders: Lenders, now: Now, cluster: Cluster, answer: Outcome) -> None:
    """A shard that lends no slot, or one that cannot be mapped, gets its part in the request; others use slots."""
    lenders.script["a", "/slots"] = [answer]
    drive(push(cluster, now), lenders, now)

    assert np.array_equal(np.concatenate([lenders.pushed["a"], lenders.pushed["b"]]), GRAD)
    assert idle(cluster, lenders) == [("b", "s0")]


@pytest.mark.parametrize("name", ["../a/mine", "/dev/shm/mine", "", "s0/../mine", "s" * 65])
def test_the_name_of_a_slot_is_no_path(lenders: Lenders, now: Now, cluster: Cluster, name: str) -> None:
    """A slot whose name is not a plain file name is not mapped: what it leads to is not overwritten."""
    lenders.script["a", "/slots"] = [Response(200, {}, json.dumps({"slot": name}).encode())]
    mine = lenders.folder / "a" / "mine"
    mine.write_bytes(bytes(4 * COUNT))
    drive(push(cluster, now), lenders, now)

    assert not any(mine.read_bytes())
    assert np.array_equal(lenders.pushed["a"], GRAD[:COUNT])


def test_a_small_gradient_travels(lenders: Lenders, now: Now, cluster: Cluster) -> None:
    """Less than 64 KiB for a shard is sent in the request, without a slot."""
    for size, slots in ((1 << 14, 1), ((1 << 14) - 1, 0)):
        lenders.sent.clear()
        cluster.same_host.take_idle()
        grads, only = {"w": GRAD[:size]}, Encoding(ranges={"w": [(0, size)]})
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads, terms(size), encoding=only), lenders, now)
        assert np.array_equal(lenders.pushed["a"], GRAD[:size])
        assert lenders.sent.count(("a", "/slots")) == slots


@pytest.mark.parametrize(("until", "kept"), [("/slots", ["a"]), ("/push", [])])
def test_an_interrupted_push_keeps_the_slots_that_nobody_reads(
    lenders: Lenders, now: Now, cluster: Cluster, until: str, kept: list[str]
) -> None:
    """An interrupted push keeps the slots it had found, unless its requests were on the way: shards may read them."""
    lenders.script["b", "/slots"] = [refusal("unavailable")]
    drive(push(cluster, now), lenders, now)
    pushing = push(cluster, now, 2)
    effect = next(pushing)
    while isinstance(effect, list) and effect[0].path != until:
        effect = pushing.send([lenders(r) for r in effect])
    with pytest.raises(KeyboardInterrupt):
        pushing.throw(KeyboardInterrupt())

    assert [shard for shard, _ in idle(cluster, lenders)] == kept


@pytest.mark.parametrize(
    ("state", "released", "kept"),
    [("applied", False, ["a", "b"]), ("staged", False, []), ("buffered", False, []), ("staged", True, ["a", "b"])],
)
def test_a_pushpull_gives_a_slot_back_that_its_gradient_has_left(
    lenders: Lenders, now: Now, cluster: Cluster, state: str, released: bool, kept: list[str]
) -> None:
    """After a pushpull a slot serves on if its gradient is applied or its commit came; a staged one is read later."""
    lenders.state, lenders.released = state, released
    call = transfer.exchange(cluster, "m", Deadline.after(30, now), {"w": GRAD}, terms(clock=3))
    done, values = drive(call, lenders, now)

    assert done.state == state
    assert values is not None
    assert values.flat.tolist() == [1.0] * len(GRAD)
    assert [shard for shard, _ in idle(cluster, lenders)] == kept


def pulled(cluster: Cluster, lenders: Lenders, now: Now) -> tuple[float, float, list[str]]:
    """Pull; return the first and last value, and the paths of the requests that this took."""
    lenders.sent.clear()
    values = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), lenders, now)
    return float(values.flat[0]), float(values.flat[-1]), [path for _, path in lenders.sent]


def test_a_push_brings_the_values_of_the_next_pull(lenders: Lenders, now: Now, cluster: Cluster) -> None:
    """If every shard lends what a push has made, the next pull takes no request."""
    assert pulled(cluster, lenders, now) == (1.0, 1.0, ["/pull"] * 2)
    assert pulled(cluster, lenders, now) == (1.0, 1.0, [])
    drive(push(cluster, now), lenders, now)

    assert pulled(cluster, lenders, now) == (2.0, 2.0, [])


def test_values_of_some_partitions_are_not_the_models(lenders: Lenders, now: Now, cluster: Cluster) -> None:
    """If only some shards lend what a push has made, the next pull asks all, and the leases are over."""
    pulled(cluster, lenders, now)
    lenders.lends = {"b"}
    drive(push(cluster, now), lenders, now)
    lenders.lends = {"a", "b"}

    assert cluster.same_host.take_ended(lenders.near["b"]) == (lenders.numbers,)
    assert pulled(cluster, lenders, now) == (1.0, 1.0, ["/pull"] * 2)


def test_values_of_two_timelines_are_not_kept(lenders: Lenders, now: Now, cluster: Cluster) -> None:
    """If shards lend what a push has made on different timelines, the next pull asks all."""
    pulled(cluster, lenders, now)
    lenders.timeline["b"] = 1
    drive(push(cluster, now), lenders, now)
    lenders.timeline["b"] = 0

    assert pulled(cluster, lenders, now) == (1.0, 1.0, ["/pull"] * 2)


def unmapped(lenders: Lenders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let shards lend files that cannot be mapped here, as between containers."""
    lease: Callable[[str, float], Any] = lenders.lease
    monkeypatch.setattr(lenders, "lease", lambda shard, value: (lease(shard, value)[0], ("gone",)))


def test_values_that_cannot_be_mapped_are_pulled_from_afar(
    lenders: Lenders, now: Now, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pull whose leased values cannot be mapped is repeated at the shards' other addresses, used from then on."""
    unmapped(lenders, monkeypatch)

    assert pulled(cluster, lenders, now) == (1.0, 1.0, ["/pull"] * 2 + ["/pull!"] * 2)
    assert [cluster.same_host.take_ended(lenders.near[s]) for s in "ab"] == [(1,), (2,)]
    assert pulled(cluster, lenders, now) == (1.0, 1.0, ["/pull!"] * 2)


def test_values_after_a_push_that_cannot_be_mapped_are_pulled(
    lenders: Lenders, now: Now, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pushpull whose leased values cannot be mapped has pushed once, and pulls from the shards' other addresses."""
    unmapped(lenders, monkeypatch)
    call = transfer.pushpull(cluster, "m", Deadline.after(30, now), {"w": GRAD}, terms())
    done, values = drive(call, lenders, now)

    assert (done.state, values.flat.tolist()) == ("applied", [1.0] * len(GRAD))
    assert [path for _, path in lenders.sent] == ["/slots"] * 2 + ["/pushpull"] * 2 + ["/pull!"] * 2


def test_values_of_two_timelines_are_no_answer_to_a_pushpull(lenders: Lenders, now: Now, cluster: Cluster) -> None:
    """A pushpull answered from different timelines has pushed once, and pulls values of one."""
    lenders.timeline["b"] = 1

    def one_timeline(request: Request) -> Outcome:
        if request.path == "/pull":
            lenders.timeline["a"] = 1
        return lenders(request)

    call = transfer.pushpull(cluster, "m", Deadline.after(30, now), {"w": GRAD}, terms())
    done, values = drive(call, one_timeline, now)

    assert (done.state, values.origin.timeline) == ("applied", 1)
    assert [path for _, path in lenders.sent] == ["/slots"] * 2 + ["/pushpull"] * 2 + ["/pull"] * 2


def test_values_are_as_old_as_their_oldest_part() -> None:
    """The version of values is the lowest of their partitions, and their incarnation the highest."""
    origin = Origin.of("m", 7, 2, {0: (3, 8), 1: (2, 9), 2: (5, 7)})

    assert (origin.version, origin.incarnation, origin.timeline) == (2, 9, 2)


@pytest.mark.parametrize("way", ["pull", "exchange", "kept"])
def test_values_are_the_shards_memory_only_if_that_is_asked_for(
    lenders: Lenders, now: Now, cluster: Cluster, way: str
) -> None:
    """Leased values are read in place with `view` alone; else, or into `out`, they are a writable copy."""

    def values(seq: int, **how: Any) -> Any:
        deadline = Deadline.after(30, now)
        if way == "exchange":
            return drive(transfer.exchange(cluster, "m", deadline, {"w": GRAD}, terms(seq), **how), lenders, now)[1]
        if way == "pull":
            cluster.lease_cache.drop()
        return drive(transfer.pull(cluster, "m", deadline, **how), lenders, now)

    mine, seen = values(1), values(2, view=True)
    assert mine.flat.flags.writeable
    assert not seen.flat.flags.writeable
    assert seen.flat.tolist() == mine.flat.tolist() == [1.0] * len(GRAD)
    mine.flat[:] = 0.0
    assert values(3, view=True, out=mine) is mine
    assert mine.flat.flags.writeable
    assert mine.flat.tolist() == [1.0] * len(GRAD)
