"""Snapshots in a real Redis: fenced by the owner token, two are kept, and damage is detected."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from tests.chaos.proxy import Link
from tests.refusals import refused_with

from paramserver.core.partition_state import Capture, LoadedState, PartitionState
from paramserver.errors import CorruptState
from paramserver.limits import MIB
from paramserver.types import F32, U8, AnyArray, ModelKey, PartitionKey
from paramserver_node import redis as node_redis
from paramserver_shard import snapshot_store
from paramserver_shard.buffers import BufferPool
from paramserver_shard.pacing import Budget
from paramserver_shard.scripts import ScriptRunner
from paramserver_shard.snapshot_format import to_stored
from paramserver_shard.snapshot_store import SaveResult, SnapshotStore

pytestmark = pytest.mark.process

KEY = PartitionKey(ModelKey("m", 3), 7)
TOKEN = (1 << 32) | 5


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A Redis that contains only the partition's owner token."""
    client = node_redis.connect(redis_url)
    await client.flushall()
    await client.set(f"{{{KEY}}}:token", f"{TOKEN:020d}")
    yield client
    await client.aclose()


def store_of(redis: Redis, pool: BufferPool | None = None) -> SnapshotStore:
    return SnapshotStore(redis, ScriptRunner(redis), pool or BufferPool(), asyncio.get_running_loop().time, 1e12)


def values(version: int, count: int = 1000) -> F32:
    return np.full(count, version, np.float32)


def stored(version: int, *arrays: F32) -> tuple[dict[str, Any], tuple[AnyArray, ...]]:
    """Return the stored form of a partition with these values and optimizer state."""
    state = PartitionState(arrays[0], arrays[1:], ())
    return to_stored(Capture(state, version, key=KEY, token=TOKEN))


async def save(
    store: SnapshotStore, version: int, *, token: int = TOKEN, cut: int | None = None, pinned: int | None = None
) -> SaveResult:
    return await store.save(KEY, token, version, *stored(version, values(version)), cut=cut, pinned=pinned)


async def newest(store: SnapshotStore) -> LoadedState | None:
    """Return the first intact snapshot of the manifest, as a loading shard does."""
    for entry in await store.manifest(KEY):
        if (loaded := await store.read(KEY, entry)) is not None:
            return loaded
    return None


async def names(redis: Redis) -> list[str]:
    """The snapshots that the stored manifest names, newest first."""
    return [e["name"] for e in json.loads(await redis.get(f"{{{KEY}}}:manifest") or "")["snapshots"]]


async def blocks(redis: Redis) -> list[str]:
    return sorted(bytes(k).decode().split(":snap:")[1] for k in await redis.keys("*:snap:*") if isinstance(k, bytes))


async def test_two_snapshots_are_kept_and_the_newest_is_read(redis: Redis) -> None:
    """After three saves the manifest names the last two, newest first, and the first one's blocks are gone."""
    store = store_of(redis)
    assert await store.manifest(KEY) == []
    for version in (1, 2, 3):
        assert await save(store, version) == SaveResult.STORED
    assert [e["version"] for e in await store.manifest(KEY)] == [3, 2]
    assert len(await blocks(redis)) == 2
    loaded = await newest(store)
    assert loaded is not None
    assert loaded.version == 3
    assert np.array_equal(loaded.state.values, values(3))


async def test_what_is_stored_of_a_model_that_is_deleted_meanwhile_goes_with_it(redis: Redis) -> None:
    """A snapshot that ends after the model's keys were deleted leaves no key."""
    await redis.flushall()
    assert await save(store_of(redis), 1) == SaveResult.EMPTIED
    assert await redis.keys("*") == []


async def test_what_is_read_back_leaves_no_other_memory_in_the_pool(redis: Redis) -> None:
    """Reading a snapshot leaves no free buffers in the pool.

    A buffer for a whole snapshot has a size that no push asks for, and would displace those that serve pushes.
    """
    pool = BufferPool()
    store = store_of(redis, pool)
    await store.save(KEY, TOKEN, 1, *stored(1, values(1, 1 << 18), values(2, 1 << 18)))
    loaded = await newest(store)
    assert loaded is not None
    assert pool.lent_bytes >= 2 << 20
    assert pool.kept_bytes == 0


async def test_blocks_are_bounded(redis: Redis) -> None:
    """A snapshot of 9 MB is stored as three blocks of at most 4 MiB and read back bit for bit."""
    store = store_of(redis)
    array = np.random.default_rng(1).standard_normal(2_250_000).astype(np.float32)
    assert await store.save(KEY, TOKEN, 1, *stored(1, array, array[:3])) == SaveResult.STORED
    sizes = [await redis.strlen(f"{{{KEY}}}:snap:{name}") for name in await blocks(redis)]
    assert len(sizes) == 3
    assert max(sizes) == 4 << 20
    loaded = await newest(store)
    assert loaded is not None
    assert np.array_equal(loaded.state.values, array)
    assert np.array_equal(loaded.state.slots[0], array[:3])


async def test_writes_are_spread_over_time(redis: Redis) -> None:
    """Blocks of several snapshots keep to the write rate; urgent ones do not wait."""
    clock, rate = asyncio.get_running_loop().time, 100 * MIB
    store = SnapshotStore(redis, ScriptRunner(redis), BufferPool(), clock, rate)
    began = clock()
    for version in (1, 2):
        assert await store.save(KEY, TOKEN, version, *stored(version, values(version, 2 * MIB))) == SaveResult.STORED
    assert clock() - began >= 12 * MIB / rate, "the last block of 16 MiB waits for those before it"
    assert await store.save(KEY, TOKEN, 3, *stored(3, values(3, 2 * MIB)), urgent=True) == SaveResult.STORED


async def test_urgent_writes_do_not_hold_up_the_others() -> None:
    """What is written outside the budget is not charged to it: another owner's stop may wait for a cut within it."""
    budget = Budget(1.0, lambda: 0.0)
    await budget.spend(1 << 30, urgent=True)
    async with asyncio.timeout(10.0):
        await budget.spend(1, urgent=False)


async def test_a_former_owner_cannot_switch_the_manifest(redis: Redis) -> None:
    """A save under an older token is fenced and leaves nothing behind; under one unknown to Redis, it is `EMPTIED`."""
    store = store_of(redis)
    assert await save(store, 1) == SaveResult.STORED
    await redis.set(f"{{{KEY}}}:token", f"{TOKEN + 1:020d}")
    before = await blocks(redis)
    assert await save(store, 2) == SaveResult.FENCED
    assert await blocks(redis) == before
    assert await save(store, 2, token=TOKEN + 1) == SaveResult.STORED
    assert await save(store, 3, token=TOKEN + 2) == SaveResult.EMPTIED, (
        "a token that Redis never heard of is newer than it"
    )
    await redis.delete(f"{{{KEY}}}:token")
    assert await save(store, 3, token=TOKEN + 1) == SaveResult.EMPTIED


async def test_a_damaged_snapshot_is_noticed(redis: Redis) -> None:
    """If the newest snapshot has a flipped bit or lacks a block, the one before is read, or none."""
    store = store_of(redis)
    await save(store, 1)
    await save(store, 2)
    new, old = await names(redis)
    await redis.setrange(f"{{{KEY}}}:snap:{new}:0", 900, "x")
    loaded = await newest(store)
    assert loaded is not None
    assert loaded.version == 1
    await save(store, 3)
    assert [e["version"] for e in await store.manifest(KEY)] == [3, 1], "what is damaged is not kept beside the new one"
    assert len(await blocks(redis)) == 2
    await redis.delete(f"{{{KEY}}}:snap:{old}:0", f"{{{KEY}}}:snap:{(await names(redis))[0]}:0")
    assert await newest(store) is None


async def test_a_snapshot_for_which_memory_is_lacking_is_not_damaged(redis: Redis) -> None:
    """A snapshot for which a shard lacks the memory can be read later, and the next save keeps it."""

    class Full(BufferPool):
        def take_bytes(self, size_bytes: int, *, shared: bool = False, after: AnyArray | None = None) -> U8:
            raise MemoryError

    store = store_of(redis, Full())
    for version in (1, 2):
        await save(store, version)
    with pytest.raises(MemoryError):
        await newest(store)
    await save(store, 3)
    assert [e["version"] for e in await store.manifest(KEY)] == [3, 2]


async def test_nothing_is_written_of_what_cannot_be_fsynced(redis: Redis) -> None:
    """Where Redis cannot confirm that a snapshot is on its disk, one that must be is refused before it is written."""
    with refused_with("not_built"):
        await store_of(redis).save(KEY, TOKEN, 1, *stored(1, values(1)), fsync=True)
    assert await blocks(redis) == []


async def test_a_manifest_that_is_gone_was_there(redis: Redis) -> None:
    """A missing manifest of a partition that was stored before raises `CorruptState`."""
    store = store_of(redis)
    await save(store, 4)
    await redis.delete(f"{{{KEY}}}:manifest")
    with pytest.raises(CorruptState, match="version 4"):
        await store.manifest(KEY)


async def test_a_pinned_cut_outlives_newer_ones(redis: Redis) -> None:
    """A pinned cut is kept beside the newest snapshot, although newer ones were stored since."""
    store = store_of(redis)
    for version, pinned in ((5, None), (10, 5), (15, 5)):
        assert await save(store, version, cut=version, pinned=pinned) == SaveResult.STORED
    assert [e["cut"] for e in await store.manifest(KEY)] == [15, 5]


async def test_a_whole_state_displaces_no_cut_that_may_count(redis: Redis) -> None:
    """Beside a whole state the pinned cut and another one are kept, and nothing else once a newer cut is stored.

    A leader may go back to either: to a newer cut that the shard has not been told to count, or to an older one if
    Redis has lost that the pinned one counts.
    """
    store = store_of(redis)
    for version, cut, pinned in ((1, 1, None), (2, 2, 1), (3, None, 1), (4, None, 1)):
        assert await save(store, version, cut=cut, pinned=pinned) == SaveResult.STORED
    assert [(e["version"], e["cut"]) for e in await store.manifest(KEY)] == [(4, None), (2, 2), (1, 1)]
    assert await save(store, 5, pinned=2) == SaveResult.STORED
    assert [e["version"] for e in await store.manifest(KEY)] == [5, 2, 1]
    assert await save(store, 6, cut=6, pinned=2) == SaveResult.STORED
    assert [e["version"] for e in await store.manifest(KEY)] == [6, 2]
    assert len(await blocks(redis)) == 2


async def test_blocks_that_redis_lost_are_not_named(redis: Redis) -> None:
    """If Redis loses a block before the manifest switches, as in a restart, the snapshot does not count."""
    store = store_of(redis)
    await save(store, 1)

    async def forgetful(*args: object, **kwargs: object) -> list[object]:
        for key in await redis.keys(f"{{{KEY}}}:snap:2-*"):
            await redis.delete(key)
        return await ScriptRunner(redis).run(*args, **kwargs)  # type: ignore[arg-type]

    runner = ScriptRunner(redis)
    runner.run = forgetful  # type: ignore[method-assign]
    forgetting = SnapshotStore(redis, runner, BufferPool(), asyncio.get_running_loop().time, 1e12)
    assert await save(forgetting, 2) == SaveResult.BLOCKS_GONE
    assert [e["version"] for e in await store.manifest(KEY)] == [1]


async def test_what_a_killed_writer_left_is_swept(redis: Redis) -> None:
    """Pending blocks that no manifest names, left by a killed writer, are deleted by the next save.

    A name there that is damaged goes, too; it ended the process, and the next owner's.
    """
    store = store_of(redis)
    await redis.sadd(f"{{{KEY}}}:pending", "9-1-1:2", "9-1-1", "9-1-1:", b"\xff:\xff")
    for i in range(2):
        await redis.set(f"{{{KEY}}}:snap:9-1-1:{i}", b"x")
    assert await save(store, 1) == SaveResult.STORED
    assert len(await blocks(redis)) == 1
    assert await redis.scard(f"{{{KEY}}}:pending") == 0


@pytest.mark.parametrize("by", [TOKEN, TOKEN + 1])
async def test_what_a_switch_displaced_is_swept_though_its_answer_was_lost(
    redis: Redis, by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a writer never learns that it has switched the manifest, the next save deletes what it displaced.

    Whether it goes on itself, or has died and another owner writes.
    """
    store = store_of(redis)
    for version in (1, 2):
        assert await save(store, version) == SaveResult.STORED
    with monkeypatch.context() as patch:
        run = ScriptRunner.run

        async def lost(*args: Any, **kwargs: Any) -> list[Any]:
            await run(*args, **kwargs)
            raise TimeoutError("the disk of Redis took longer than 3000 ms")

        patch.setattr(ScriptRunner, "run", lost)
        with pytest.raises(TimeoutError):
            await save(store, 3)
    assert [name.split("-")[0] for name in await names(redis)] == ["3", "2"]

    await redis.set(f"{{{KEY}}}:token", f"{by:020d}")
    writer = store if by == TOKEN else store_of(redis)
    assert await save(writer, 4, token=by) == SaveResult.STORED
    assert [name.split("-")[0] for name in await blocks(redis)] == ["3", "4"]
    assert await redis.scard(f"{{{KEY}}}:pending") == 0
    loaded = await newest(writer)
    assert loaded is not None
    assert loaded.version == 4


async def test_blocks_that_a_replaced_owner_writes_after_a_sweep_are_swept_too(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a replaced owner goes on writing is pending again, so the next save deletes it if that owner dies."""
    former, steps = store_of(redis), iter(range(3))
    spend = former._budget.spend

    async def overtaken(size: int, *, urgent: bool) -> None:
        step = next(steps)
        if step == 1:
            await redis.set(f"{{{KEY}}}:token", f"{TOKEN + 1:020d}")
            assert await save(store_of(redis), 2, token=TOKEN + 1) == SaveResult.STORED
        elif step == 2:
            raise ConnectionError("it dies")
        await spend(size, urgent=urgent)

    monkeypatch.setattr(former._budget, "spend", overtaken)
    with pytest.raises(ConnectionError, match="it dies"):
        await former.save(KEY, TOKEN, 1, *stored(1, values(1, 9 * MIB // 4)))
    assert [name.split("-")[0] for name in await blocks(redis)] == ["1", "2"]

    assert await save(store_of(redis), 3, token=TOKEN + 1) == SaveResult.STORED
    assert [name.split("-")[0] for name in await blocks(redis)] == ["2", "3"]
    assert await redis.scard(f"{{{KEY}}}:pending") == 0


async def test_no_block_is_written_that_cannot_be_named(redis_url: str, redis: Redis) -> None:
    """If Redis refuses to note a snapshot as pending, as it may once it is full, it gets no block of it either."""
    allowed: dict[str, Any] = {"keys": ["*"], "categories": ["+@all"], "commands": ["-sadd"]}
    await redis.acl_setuser("limited", enabled=True, passwords=["+x"], **allowed)
    limited = node_redis.connect(redis_url.replace("redis://", "redis://limited:x@"))
    try:
        with pytest.raises(ResponseError, match="sadd"):
            await save(store_of(limited), 1)
        assert await blocks(redis) == []
    finally:
        await limited.aclose()
        await redis.acl_deluser("limited")


async def test_the_last_number_goes_back_with_a_state_that_has_no_journal(redis: Redis) -> None:
    """After a return to a cut, what Redis has is compared with the new snapshots; a journal's end stays the last."""
    store = store_of(redis)
    for lsn in (9, 4):
        assert await store.save(KEY, TOKEN, lsn, *stored(lsn, values(lsn)), lsn=lsn) == SaveResult.STORED
        assert await store.last_lsns([KEY]) == [lsn]
    await redis.xadd(f"{{{KEY}}}:journal", {"h": b""}, id="5-0")
    await redis.set(f"{{{KEY}}}:lsn", 5)
    assert await store.save(KEY, TOKEN, 4, *stored(4, values(4)), lsn=4) == SaveResult.STORED
    assert await store.last_lsns([KEY]) == [5]


async def test_a_former_owner_sweeps_nothing(redis: Redis) -> None:
    """A former owner deletes no pending blocks, because they may be the new owner's."""
    store = store_of(redis)
    await redis.set(f"{{{KEY}}}:token", f"{TOKEN + 1:020d}")
    name = f"9-{TOKEN + 1}-1"
    await redis.sadd(f"{{{KEY}}}:pending", f"{name}:1")
    await redis.set(f"{{{KEY}}}:snap:{name}:0", b"x")
    assert await save(store, 2) == SaveResult.FENCED
    assert await blocks(redis) == [f"{name}:0"]
    assert await redis.sismember(f"{{{KEY}}}:pending", f"{name}:1")


async def test_partitions_that_share_a_slow_line_are_stored_and_loaded_in_turn(
    redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a line that carries one block within the timeout, but not all, every partition is stored and loaded."""
    size, keys = 1 << 20, [PartitionKey(ModelKey("m", 3), i) for i in range(11)]
    monkeypatch.setattr(snapshot_store, "SNAPSHOT_BLOCK_BYTES", 2 * size - 1)
    await redis.mset({f"{{{key}}}:token": f"{TOKEN:020d}" for key in keys})
    link = Link("redis", urlsplit(redis_url).port or 0)
    await link.start()
    slow = node_redis.connect(f"redis://127.0.0.1:{link.port}/0", timeout_s=4.8)
    store = store_of(slow)
    link.bytes_per_s = 2 * size  # 0.5 s for each of them, 5.5 s for all
    try:
        arrays = [np.full(size // 4, key.index, np.float32) for key in keys]
        saved = [store.save(key, TOKEN, 1, *stored(1, a)) for key, a in zip(keys, arrays, strict=True)]
        assert await asyncio.gather(*saved) == [SaveResult.STORED] * len(keys)

        async def loaded(key: PartitionKey) -> LoadedState | None:
            return await store.read(key, (await store.manifest(key))[0])

        for found, wanted in zip(await asyncio.gather(*map(loaded, keys)), arrays, strict=True):
            assert found is not None
            assert np.array_equal(found.state.values, wanted)
    finally:
        await slow.aclose()
        await link.stop()
