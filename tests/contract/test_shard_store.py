"""Snapshots in a real Redis: the owner token decides, two are kept, damage is noticed."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from paramserver.errors import CorruptState
from paramserver.types import F32, ModelKey, PartitionKey
from paramserver_node import redis as node_redis
from paramserver_node import redis_server
from paramserver_shard.buffers import BufferPool
from paramserver_shard.store import SnapshotStore

pytestmark = [pytest.mark.process, pytest.mark.asyncio]

KEY = PartitionKey(ModelKey("m", 3), 7)
TOKEN = (1 << 32) | 5


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server for this module."""
    folder: Path = tmp_path_factory.mktemp("redis")
    with redis_server.running(folder) as url:
        yield url


@pytest_asyncio.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """An empty Redis that says who owns the partition."""
    client = node_redis.connect(redis_url)
    await client.flushall()
    await client.set(f"{{{KEY}}}:token", f"{TOKEN:020d}")
    yield client
    await client.aclose()


def store_of(redis: Redis) -> SnapshotStore:
    return SnapshotStore(redis, BufferPool(), asyncio.get_running_loop().time, 1e12)


def values(version: int, count: int = 1000) -> F32:
    return np.full(count, version, np.float32)


async def save(
    store: SnapshotStore, version: int, *, token: int = TOKEN, cut: int | None = None, pinned: int | None = None
) -> bool:
    return await store.save(KEY, token, version, cut, pinned, {"version": version}, [values(version)])


async def blocks(redis: Redis) -> list[str]:
    return sorted(bytes(k).decode().split(":snap:")[1] for k in await redis.keys("*:snap:*") if isinstance(k, bytes))


async def test_two_snapshots_are_kept_and_the_newest_is_read(redis: Redis) -> None:
    """After three saves the manifest names the last two, newest first, and nothing of the first is left."""
    store = store_of(redis)
    assert await store.load(KEY) is None
    for version in (1, 2, 3):
        assert await save(store, version)
    manifest = json.loads(await redis.get(f"{{{KEY}}}:manifest") or "")
    assert [e["version"] for e in manifest] == [3, 2]
    assert {e["format"] for e in manifest} == {1}
    assert len(await blocks(redis)) == 2
    stored = await store.load(KEY)
    assert stored is not None
    assert (stored.version, stored.newest, dict(stored.head)) == (3, True, {"version": 3})
    assert np.array_equal(stored.arrays[0], values(3))


async def test_blocks_are_bounded(redis: Redis) -> None:
    """A snapshot of 9 MB is three blocks of at most 4 MiB, and comes back bit for bit."""
    store = store_of(redis)
    array = np.random.default_rng(1).standard_normal(2_250_000).astype(np.float32)
    assert await store.save(KEY, TOKEN, 1, None, None, {}, [array, array[:3]])
    sizes = [await redis.strlen(f"{{{KEY}}}:snap:{name}") for name in await blocks(redis)]
    assert len(sizes) == 3
    assert max(sizes) == 4 << 20
    stored = await store.load(KEY)
    assert stored is not None
    assert np.array_equal(stored.arrays[0], array)
    assert np.array_equal(stored.arrays[1], array[:3])


async def test_a_former_owner_cannot_switch_the_manifest(redis: Redis) -> None:
    """Once another token is written, a save under the old one is refused and leaves nothing behind."""
    store = store_of(redis)
    assert await save(store, 1)
    await redis.set(f"{{{KEY}}}:token", f"{TOKEN + 1:020d}")
    before = await blocks(redis)
    assert not await save(store, 2)
    assert await blocks(redis) == before
    assert await save(store, 2, token=TOKEN + 1)
    await redis.delete(f"{{{KEY}}}:token")
    assert not await save(store, 3, token=TOKEN + 1)


async def test_a_damaged_snapshot_gives_way_to_the_one_before(redis: Redis) -> None:
    """A flipped bit or a missing block of the newest is noticed; when both are damaged it is CorruptState."""
    store = store_of(redis)
    await save(store, 1)
    await save(store, 2)
    newest, older = (e["name"] for e in json.loads(await redis.get(f"{{{KEY}}}:manifest") or ""))
    await redis.setrange(f"{{{KEY}}}:snap:{newest}:0", 900, "x")
    stored = await store.load(KEY)
    assert stored is not None
    assert (stored.version, stored.newest) == (1, False)
    await redis.delete(f"{{{KEY}}}:snap:{older}:0")
    with pytest.raises(CorruptState):
        await store.load(KEY)


async def test_a_pinned_cut_outlives_newer_ones(redis: Redis) -> None:
    """The cut that all partitions have is kept beside the newest, and found by its clock."""
    store = store_of(redis)
    for version, pinned in ((5, None), (10, 5), (15, 5)):
        assert await save(store, version, cut=version, pinned=pinned)
    pinned_one = await store.load(KEY, 5)
    newest = await store.load(KEY, 15)
    assert pinned_one is not None
    assert newest is not None
    assert (pinned_one.version, newest.version) == (5, 15)
    with pytest.raises(CorruptState):
        await store.load(KEY, 10)


async def test_what_a_killed_writer_left_is_swept(redis: Redis) -> None:
    """Blocks that no manifest names, noted before they were written, go with the next save."""
    store = store_of(redis)
    await redis.sadd(f"{{{KEY}}}:pending", "9-1-1:2")
    for i in range(2):
        await redis.set(f"{{{KEY}}}:snap:9-1-1:{i}", b"x")
    assert await save(store, 1)
    assert len(await blocks(redis)) == 1
    assert await redis.scard(f"{{{KEY}}}:pending") == 0
