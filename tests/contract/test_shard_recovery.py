"""How a shard loads stored state: in older and newer formats, and with every kind of damage."""

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY
from redis.asyncio import Redis
from tests.golden.stored import generate
from zlib_ng import zlib_ng

from paramserver.core.commit import Commit
from paramserver.core.layout import Layout
from paramserver.core.partition_state import Capture, LoadedState
from paramserver.core.shard.core import ShardCore
from paramserver.core.shard.effects import AskWorker, LoadPartition
from paramserver.core.shard.events import (
    CommitDecided,
    ModelGone,
    ModelView,
    PushPart,
    PushReceived,
    SaveAll,
    Tick,
    WorkerAnswered,
)
from paramserver.core.shard.push_operation import PushOperation
from paramserver.core.shard.window import EarlierAnswer, PushMemory
from paramserver.core.spec import ModelSpec
from paramserver.errors import CorruptState, Unavailable
from paramserver.types import ModelKey, PartitionKey, PushId, make_token
from paramserver.wire.tensor import slice_crc
from paramserver_node import redis as node_redis
from paramserver_shard.buffers import BufferPool
from paramserver_shard.directory import Directory
from paramserver_shard.journal import Journal
from paramserver_shard.loading import Loader
from paramserver_shard.runtime import Runtime
from paramserver_shard.scripts import ScriptRunner
from paramserver_shard.snapshot_format import pack_manifest, to_stored
from paramserver_shard.snapshot_store import SaveResult, SnapshotStore
from paramserver_shard.telemetry import show

pytestmark = pytest.mark.process

GOLDEN = Path(__file__).parents[1] / "golden" / "stored"
TOKEN = make_token(1, 5)
SIZE = 40


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """An empty Redis."""
    client = node_redis.connect(redis_url)
    await client.flushall()
    yield client
    await client.aclose()


class NoScheduler:
    """The scheduler of a shard that has none."""

    def report(self) -> None:
        """Ignore the report."""

    def resync(self) -> None:
        """Ignore the request."""

    async def ask_worker(self, effect: AskWorker) -> WorkerAnswered:
        """Answer that the worker has not joined."""
        return WorkerAnswered(effect.request, None)


def spec_of(**fields: Any) -> ModelSpec:
    document: dict[str, Any] = {
        "name": "m",
        "ack": "journaled",
        "params": {"w": {"shape": [SIZE], "init": {"kind": "normal"}}},
        "optimizer": {"name": "adam", "lr": 0.1},
        "partitions": 1,
    }
    return ModelSpec.parse(document | fields)


@dataclass(frozen=True, slots=True)
class Shard:
    """A real runtime on a real Redis that the test tells what it owns."""

    runtime: Runtime
    redis: Redis
    spec: ModelSpec
    layout: Layout
    seq: list[int]
    directory: Directory

    @property
    def key(self) -> PartitionKey:
        """Its only partition."""
        return PartitionKey(ModelKey("m", 3), 0)

    def load(self, source: str | int = "snapshot") -> LoadPartition:
        """The effect that loads the partition."""
        return LoadPartition(self.key, TOKEN, source, self.spec, self.layout)

    async def push(self, count: int) -> None:
        """Send so many pushes, and wait for each acknowledgement."""
        for _ in range(count):
            self.seq[0] += 1
            data = np.random.default_rng(self.seq[0]).standard_normal(SIZE).astype(np.float32)
            part = PushPart(0, data, "float32", slice_crc("float32", ((0, SIZE),), data), True)
            await self.runtime.push(PushReceived("m", (part,), push_id=PushId("w", 1, self.seq[0])))

    async def snapshot(self) -> None:
        """Store a snapshot of the current version."""
        (p,) = self.runtime.core.models["m"].partitions.values()
        self.runtime.core.plan.urgent(p)
        self.runtime.feed(Tick())
        key = f"{{{self.key}}}:saved"
        async with asyncio.timeout(20):
            while int(await self.redis.get(key) or -1) != p.version:
                await asyncio.sleep(0.005)

    async def refused_snapshot(self) -> None:
        """Try to store a snapshot, which Redis refuses."""
        (p,) = self.runtime.core.models["m"].partitions.values()
        self.runtime.core.plan.urgent(p)
        self.runtime.feed(Tick())
        async with asyncio.timeout(20):
            while not self.runtime.storage.degraded:
                await asyncio.sleep(0.005)

    async def commit(self, t: int, *, cut: bool = False) -> None:
        """Apply commit `t`, which changes no values, and store a snapshot."""
        self.runtime.feed(CommitDecided(self.key.model, Commit(t, 0, (), 0, 1, cut)))
        (p,) = self.runtime.core.models["m"].partitions.values()
        async with asyncio.timeout(20):
            while p.clock <= t:
                await asyncio.sleep(0.005)
        await self.snapshot()

    def state(self) -> Capture:
        """The partition's state in its owner's memory."""
        (p,) = self.runtime.core.models["m"].partitions.values()
        return p.capture()


@asynccontextmanager
async def running(redis: Redis, **fields: Any) -> AsyncIterator[Shard]:
    """Run a shard that owns the only partition of a new model."""
    spec = spec_of(**fields)
    layout, model = Layout(spec), ModelKey("m", 3)
    await redis.set(f"{{{PartitionKey(model, 0)}}}:token", f"{TOKEN:020d}")
    async with asyncio.TaskGroup() as group:
        scripts, pool = ScriptRunner(redis), BufferPool()
        store = SnapshotStore(redis, scripts, pool, asyncio.get_running_loop().time, 1e12)
        directory = Directory("s")
        runtime = Runtime(ShardCore(), directory, pool, store, Journal(redis, scripts), group)
        runtime.scheduler = NoScheduler()
        runtime.feed(ModelView(model, spec, layout, 0, 0, 0, True, {0: TOKEN}, "init", {}))
        try:
            yield Shard(runtime, redis, spec, layout, [0], directory)
        finally:
            runtime.close()


def loader_of(redis: Redis) -> Loader:
    """The loader with which the next owner reads."""

    async def submit(work: Callable[[], Any]) -> Any:
        return work()

    scripts, pool = ScriptRunner(redis), BufferPool()
    store = SnapshotStore(redis, scripts, pool, asyncio.get_running_loop().time, 1e12)
    return Loader(store, Journal(redis, scripts), pool, submit, lambda *_: True)


def content(state: Capture | LoadedState) -> tuple[object, ...]:
    """All relevant state of a partition, with arrays as bytes."""
    arrays = (state.state.values, *state.state.slots, *(h.data for h in (*state.buffered, *state.staged)))
    memory = [tuple(w) for w in state.memory["windows"]], state.memory["keys"]
    return (state.version, state.clock, state.lsn, state.state.steps, [a.tobytes() for a in arrays], memory)


async def test_snapshots_and_journal_give_the_same_bytes(redis: Redis) -> None:
    """The next owner loads exactly the last owner's state, with a journal and no, one or two snapshots."""
    async with running(redis) as shard:
        await shard.push(3)
        for _ in range(3):
            loaded = await loader_of(redis).load(shard.load())
            assert content(loaded) == content(shard.state())
            assert loaded.stored
            await shard.snapshot()
            await shard.push(5)
        assert loaded.version == 13


async def test_a_model_that_was_deleted_during_a_snapshot_leaves_no_complaint(redis: Redis) -> None:
    """A shard is degraded by a partition that it cannot store only while it owns it, whatever others are stored."""
    async with running(redis) as shard:
        await shard.push(1)
        await redis.delete(f"{{{shard.key}}}:token")  # the leader deletes it before the shard hears of it
        await shard.refused_snapshot()
        assert shard.runtime.storage.degraded == "Redis was emptied"

        shard.runtime.feed(ModelGone(shard.key.model))
        assert shard.runtime.storage.degraded == ""


async def test_a_shard_is_degraded_until_redis_is_no_longer_full(redis: Redis) -> None:
    """A full Redis answers what only reads; the shard is degraded nevertheless, until it has stored the snapshot."""
    async with running(redis, ack="applied") as shard:
        await shard.push(1)
        await redis.config_set("maxmemory", 1)
        try:
            await shard.refused_snapshot()
            shard.runtime.storage.redis_answered("its run id")
            assert shard.runtime.storage.degraded.startswith("Redis refuses: ")
        finally:
            await redis.config_set("maxmemory", 0)

        await shard.snapshot()
        async with asyncio.timeout(20):
            while shard.runtime.storage.degraded:  # what is in Redis is known here before its answer has come
                await asyncio.sleep(0.005)


async def test_a_redis_too_slow_for_a_snapshot_is_told_once(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A shard whose snapshot takes too long is degraded until that is stored, and warns once, though Redis answers."""
    async with running(redis) as shard:
        await shard.push(1)
        storage = shard.runtime.storage
        with monkeypatch.context() as slow:
            save = AsyncMock(side_effect=TimeoutError("4194304 bytes took longer than 6 s"))
            slow.setattr(SnapshotStore, "save", save)
            (p,) = shard.runtime.core.models["m"].partitions.values()
            shard.runtime.core.plan.due_now(p)
            shard.runtime.feed(Tick())
            for tries in (1, 2, 3):
                async with asyncio.timeout(20):
                    while save.await_count < tries or shard.runtime.writer.reason:  # a write has shown that it answers
                        await asyncio.sleep(0.005)
                storage.redis_answered("its run id")
                assert storage.degraded == "Redis does not answer: 4194304 bytes took longer than 6 s"
        async with asyncio.timeout(20):
            while storage.degraded:
                await asyncio.sleep(0.005)
        assert await redis.exists(f"{{{shard.key}}}:saved")
    assert [r.levelname for r in caplog.records] == ["WARNING"], caplog.text


async def test_the_older_snapshot_and_the_journal_lose_nothing(redis: Redis) -> None:
    """The journal starts after the older of two snapshots, so a damaged newest one loses nothing."""
    async with running(redis) as shard:
        for _ in range(4):
            await shard.push(4)
            await shard.snapshot()
        await shard.push(2)
        journal = f"{{{shard.key}}}:journal"
        manifest = json.loads(await redis.get(f"{{{shard.key}}}:manifest") or "")["snapshots"]
        entries: Any = await redis.xrange(journal)
        assert [e["version"] for e in manifest] == [16, 12]
        assert int(entries[0][0].split(b"-")[0]) == manifest[1]["lsn"] + 1
        await redis.setrange(f"{{{shard.key}}}:snap:{manifest[0]['name']}:0", 100, "broken")
        assert content(await loader_of(redis).load(shard.load())) == content(shard.state())
        await redis.delete(f"{{{shard.key}}}:snap:{manifest[1]['name']}:0")
        with pytest.raises(CorruptState):
            await loader_of(redis).load(shard.load())


@pytest.mark.parametrize("ack", ["journaled", "applied"])
async def test_an_old_cut_is_kept_only_where_a_recovery_goes_back_to_it(redis: Redis, ack: str) -> None:
    """However old its newest cut is, a synchronous model keeps that at `applied`; above, its journal is truncated.

    Above `applied`, a model is restored from its newest snapshots, never from the cut of a checkpoint.
    """
    async with running(redis, consistency={"mode": "sync"}, ack=ack) as shard:
        await shard.commit(0, cut=True)
        model = {"type": "model", "name": "m", "generation": 3, "spec": shard.spec.document(), "timeline": 0}
        shard.directory.update(model | {"state": "ready", "owners": [["s", TOKEN]], "cut": 1, "restored": False})
        for t in range(1, 5):
            await shard.commit(t, cut=ack == "applied")
        if ack == "applied":
            assert (await loader_of(redis).load(shard.load(1))).clock == 1
            return
        entries: Any = await redis.xrange(f"{{{shard.key}}}:journal")
        assert [name for name, _ in entries] == [f"{shard.state().lsn}-0".encode()]
        assert content(await loader_of(redis).load(shard.load())) == content(shard.state())


async def test_a_journal_from_the_beginning_stands_in_for_a_lost_snapshot(redis: Redis) -> None:
    """If the only snapshot is lost, initial values and the whole journal give the same state."""
    async with running(redis) as shard:
        await shard.push(6)
        async with asyncio.timeout(20):
            while await redis.get(f"{{{shard.key}}}:manifest") is None:
                await asyncio.sleep(0.005)
        await redis.delete(*await redis.keys("*:snap:*"))
        assert len(json.loads(await redis.get(f"{{{shard.key}}}:manifest") or "")["snapshots"]) == 1
        assert content(await loader_of(redis).load(shard.load())) == content(shard.state())


async def test_a_partition_whose_snapshots_are_all_damaged_does_not_begin_anew(redis: Redis) -> None:
    """Without a journal, a partition whose snapshots are both damaged is refused, and the error names their versions.

    Its initial values, which can be drawn again, would silently undo the training.
    """
    async with running(redis, ack="applied") as shard:
        for _ in range(2):
            await shard.push(4)
            await shard.snapshot()
        await redis.delete(*await redis.keys("*:snap:*"))
        with pytest.raises(CorruptState, match=r"cannot be restored: .*version 8 is damaged; .*version \d+ is damaged"):
            await loader_of(redis).load(shard.load())


async def test_why_a_partition_cannot_be_loaded_is_logged_once(redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    """Each attempt to load it may find the same damage; only another reason is logged again.  The shard is degraded."""
    manifest = f"{{{PartitionKey(ModelKey('m', 3), 0)}}}:manifest"
    await redis.set(manifest, "damaged")
    async with running(redis) as shard, asyncio.timeout(20):
        (p,) = shard.runtime.core.models["m"].partitions.values()
        while p.load_again_s < 4.0:  # two attempts have failed
            await asyncio.sleep(0.005)
        assert [r.levelname for r in caplog.records] == ["WARNING"], caplog.text
        show(shard.runtime, (), 0)
        assert REGISTRY.get_sample_value("paramserver_shard_degraded") == 1
        await redis.delete(manifest)
        await redis.set(f"{{{shard.key}}}:saved", "7")
        while p.load_again_s < 8.0:
            await asyncio.sleep(0.005)
        assert ["is damaged" in r.message for r in caplog.records] == [True, False], caplog.text


@pytest.mark.parametrize("source", ["snapshot", 3])
@pytest.mark.parametrize(("kind", "restored"), [("upload", False), ("zeros", True), ("uniform", True)])
async def test_values_that_were_never_stored_are_not_made_up(
    redis: Redis, kind: str, restored: bool, source: str | int
) -> None:
    """A partition of uploaded or restored values that was never stored is refused: nothing can give it those values."""
    async with running(redis, ack="applied") as shard:
        params = {"w": {"shape": [SIZE], "init": {"kind": kind}}}
        spec = spec_of(ack="applied", params=params)
        effect = LoadPartition(shard.key, TOKEN, source, spec, Layout(spec), restored)
        with pytest.raises(CorruptState, match="initial values were never stored") as caught:
            await loader_of(redis).load(effect)
    assert caught.value.members["never_stored"]


async def test_a_rollback_loads_the_cut_of_its_clock_or_nothing(redis: Redis) -> None:
    """A load of a cut gives the state at its clock though there is a newer one; a cut that is not there is refused."""
    async with running(redis, ack="applied", consistency={"mode": "sync"}) as shard:
        async with asyncio.timeout(20):
            while await redis.get(f"{{{shard.key}}}:saved") is None:  # its first cut
                await asyncio.sleep(0.005)
        store = SnapshotStore(redis, ScriptRunner(redis), BufferPool(), asyncio.get_running_loop().time, 1e12)
        for clock in (3, 6):
            head, arrays = to_stored(replace(shard.state(), clock=clock))
            saved = await store.save(shard.key, TOKEN, clock, head, arrays, cut=clock)
            assert saved == SaveResult.STORED

        assert (await loader_of(redis).load(shard.load(3))).clock == 3
        with pytest.raises(CorruptState, match="the cut at clock 5 of partition"):
            await loader_of(redis).load(shard.load(5))


async def test_a_redis_without_the_token_is_not_read(redis: Redis) -> None:
    """A load from a Redis without the owner token raises `Unavailable` instead of starting a new partition."""
    async with running(redis) as shard:
        await shard.push(2)
        await redis.flushall()
        with pytest.raises(Unavailable, match="lost its state"):
            await loader_of(redis).load(shard.load())


@pytest.mark.parametrize("ack", ["journaled", "applied"])
async def test_a_thousand_kinds_of_damage(redis: Redis, ack: str) -> None:
    """With each of 500 random damages to stored state, a load gives a correct state or is refused.

    Correct is the owner's exact state; at level `applied`, that of one of the two snapshots.
    """
    rng = random.Random(f"damage-{ack}")
    async with running(redis, ack=ack) as shard:
        right = []
        for _ in range(3):
            await shard.push(4)
            await shard.snapshot()
            right.append(content(shard.state()))
        await shard.push(4)
        right = right[1:] if ack == "applied" else [content(shard.state())]
    found = [bytes(k).decode() for k in await redis.keys("{m.3/0}:*") if isinstance(k, bytes)]
    keys = sorted(k for k in found if not k.endswith(":pending"))  # there if the end met a snapshot
    pristine = {k: bytes(await redis.dump(k) or b"") for k in keys}
    loaded = refused = 0
    for _ in range(500):
        key = rng.choice(keys)
        await damage(rng, redis, key, keys)
        try:
            got = content(await loader_of(redis).load(shard.load()))
        except (CorruptState, Unavailable):
            refused += 1
        else:
            assert got in right, f"damage to {key} was loaded silently"
            loaded += 1
        for name, dump in pristine.items():
            await redis.restore(name, 0, dump, replace=True)
    assert loaded > 50
    assert refused > 50
    assert content(await loader_of(redis).load(shard.load())) in right


async def damage(rng: random.Random, redis: Redis, key: str, keys: list[str]) -> None:
    """Damage that key at random."""
    if rng.random() < 0.1:
        await redis.delete(key)
        return
    if key.endswith(":journal"):
        stream: Any = await redis.xrange(key)
        lsn, fields = rng.choice(stream)
        await redis.xdel(key, lsn)
        if lsn == stream[-1][0] and rng.random() < 0.7:  # write it again, damaged
            await redis.delete(key)
            field = rng.choice([b"h", b"d"])
            for name, there in stream:
                await redis.xadd(key, there if name != lsn else {**fields, field: changed(rng, fields[field])}, id=name)
        return
    data: Any = await redis.get(key)
    if key.endswith((":token", ":saved", ":lsn")) and rng.random() < 0.5:
        await redis.set(key, str(rng.randrange(30)))
    elif ":snap:" in key and rng.random() < 0.2:
        other: Any = await redis.get(rng.choice([k for k in keys if ":snap:" in k]))
        await redis.set(key, other)
    else:
        await redis.set(key, changed(rng, data))


def changed(rng: random.Random, data: bytes) -> bytes:
    """Return other bytes: a bit flipped, the end cut off, bytes appended, or a piece overwritten."""
    out = bytearray(data)
    kind = rng.randrange(4)
    if kind == 0 or not out:
        out = out or bytearray(1)
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del out[rng.randrange(len(out)) :]
    elif kind == 2:
        out += rng.randbytes(rng.randrange(1, 20))
    else:
        at = rng.randrange(len(out))
        piece = rng.randbytes(rng.randrange(1, 20))
        out[at : at + len(piece)] = piece
    return bytes(out)


async def restore(redis: Redis, name: str) -> None:
    """Write a golden file, what one version stored, to Redis."""
    for key, text in json.loads((GOLDEN / f"{name}.json").read_text()).items():
        data = base64.b64decode(text)
        stream, _, rest = key.partition(" ")
        if not rest:
            await redis.set(key, data)
        elif rest.endswith(" h"):
            body = json.loads((GOLDEN / f"{name}.json").read_text())[f"{key[:-2]} d"]
            await redis.xadd(stream, {"h": data, "d": base64.b64decode(body)}, id=rest[:-2])


@pytest.mark.parametrize("name", ["1.3"])
async def test_what_is_stored_in_a_known_format_is_read(redis: Redis, name: str) -> None:
    """Snapshots and journals in a format that this version knows are read."""
    await restore(redis, name)
    key = PartitionKey(ModelKey("golden", 2), 1)
    scripts = ScriptRunner(redis)
    store = SnapshotStore(redis, scripts, BufferPool(), asyncio.get_running_loop().time, 1e12)
    manifest = await store.manifest(key)
    assert [e["version"] for e in manifest] == [7, 6]
    for entry in manifest:
        loaded, version = await store.read(key, entry), entry["version"]
        assert loaded is not None
        values = (np.arange(12, dtype=np.float32) + version).astype(np.float32)
        assert np.array_equal(loaded.state.values, values)
        assert [s.tolist() for s in loaded.state.slots] == [(values * 0.5).tolist(), (values * 0.25).tolist()]
        assert (loaded.version, loaded.state.steps) == (version, (version, version - 1))
        memory = PushMemory.restore(loaded.memory)
        assert memory.check(PushId("run/w0", 2, version), None, 1234) == EarlierAnswer(version, False)
        (held,) = loaded.buffered
        assert held.ranges is not None
        assert (held.worker, held.ranges.tolist()) == ("run/w0", [[2, 5]])
        assert (held.data.tolist(), held.dtype) == ([0, 1, 2], "float16")
        (staged,) = loaded.staged
        assert (loaded.lsn, staged.worker, staged.data.dtype.str) == (version + 1, "run/w1", "<u2")
        assert loaded.settings is not None
        assert loaded.settings["revision"] == 5
    entries = await Journal(redis, scripts).read(key, 7)
    assert [(e.lsn, len(e.arrays), e.head["id"]) for e in entries] == [
        (n, 1 + n % 2, ["run/w0", 2, n]) for n in (8, 9, 10)
    ]
    assert entries[1].arrays[1].tolist() == list(range(9))
    assert np.array_equal(entries[1].head["ranges"], [[0, 3]])


async def test_what_is_written_today_is_what_the_golden_file_says(redis: Redis, redis_url: str) -> None:
    """Storing the golden partition gives the bytes of the golden file: a change needs a new format number."""
    assert await generate.write(redis_url) == json.loads((GOLDEN / "1.3.json").read_text())


@pytest.mark.parametrize("newer", ["1.4", "2.0"])
async def test_newer_formats_are_refused_by_name(redis: Redis, newer: str) -> None:
    """A manifest, snapshot or journal entry of a newer format raises `CorruptState` that names the format."""
    key = PartitionKey(ModelKey("golden", 2), 1)
    scripts = ScriptRunner(redis)
    store = SnapshotStore(redis, scripts, BufferPool(), asyncio.get_running_loop().time, 1e12)
    await restore(redis, "1.3")
    text: Any = await redis.get(f"{{{key}}}:manifest")
    await redis.set(f"{{{key}}}:manifest", text.replace(b'{"format":"1.3"', f'{{"format":"{newer}"'.encode(), 1))
    with pytest.raises(CorruptState, match=f"format {newer}"):
        await store.manifest(key)
    entry = json.loads(text)["snapshots"][0]
    await redis.set(f"{{{key}}}:manifest", pack_manifest([entry | {"format": newer}]))
    with pytest.raises(CorruptState, match=f"a snapshot in .* has format {newer}"):
        await store.manifest(key)
    block: Any = await redis.get(f"{{{key}}}:snap:{entry['name']}:0")
    block = block.replace(b"\xa31.3", b"\xa3" + newer.encode(), 1)
    await redis.set(f"{{{key}}}:snap:{entry['name']}:0", block)
    with pytest.raises(CorruptState, match=f"a snapshot has format {newer}"):
        await store.read(key, entry | {"crc32": [zlib_ng.crc32(block)]})
    name = f"{{{key}}}:journal"
    stream: Any = await redis.xrange(name)
    await redis.delete(name)
    for lsn, fields in stream:
        await redis.xadd(name, {**fields, b"h": fields[b"h"].replace(b"\xa31.2", b"\xa3" + newer.encode(), 1)}, id=lsn)
    with pytest.raises(CorruptState, match=newer):
        await Journal(redis, scripts).read(key, 7)


async def test_everything_is_saved_at_the_end(redis: Redis) -> None:
    """`SaveAll` stores everything that changed since the last snapshot at level `applied`."""
    async with running(redis, ack="applied") as shard:
        await shard.push(3)
        (p,) = shard.runtime.core.models["m"].partitions.values()
        assert p.unsaved
        async with asyncio.timeout(10):
            while p.unsaved:
                shard.runtime.feed(SaveAll())
                await asyncio.sleep(0.01)
        assert content(await loader_of(redis).load(shard.load())) == content(shard.state())


@pytest.mark.parametrize("ack", ["journaled", "applied"])
async def test_a_redis_that_started_anew_is_looked_over(redis: Redis, ack: str) -> None:
    """What a restarted Redis has lost is stored again without a push; what it still has is not rewritten."""
    async with running(redis, ack=ack) as shard:
        await shard.push(3)
        await shard.snapshot()
        shard.runtime.storage.redis_answered("one run")
        manifest = await redis.get(f"{{{shard.key}}}:manifest")
        await shard.runtime.storage.check_after_restart()
        lost = [k for k in await redis.keys("{m.3/0}:*") if not bytes(k).endswith(b":token")]  # type: ignore[arg-type]
        assert await redis.get(f"{{{shard.key}}}:manifest") == manifest
        await redis.delete(*lost)
        shard.runtime.storage.redis_answered("a third run")
        async with asyncio.timeout(20):
            while await redis.get(f"{{{shard.key}}}:manifest") is None:
                await asyncio.sleep(0.01)
        assert content(await loader_of(redis).load(shard.load())) == content(shard.state())


async def test_a_bug_that_leaves_something_half_done_ends_the_process(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in the middle of an operation ends the process, and its push raises `Unavailable`.

    Otherwise its partitions would wait forever. Repeating the push id tells whether the push was applied.
    """
    pushing: list[asyncio.Task[None]] = []

    async def until_it_ends() -> None:
        async with running(redis) as shard, asyncio.timeout(20):
            await shard.push(1)
            monkeypatch.setattr(PushOperation, "finish", Mock(side_effect=ZeroDivisionError))
            pushing.append(asyncio.ensure_future(shard.push(1)))
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as ended:
        await until_it_ends()
    assert ended.group_contains(ZeroDivisionError)
    with pytest.raises(Unavailable):
        await pushing[0]
