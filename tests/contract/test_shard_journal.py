"""Journals in a real Redis: fenced by the owner token, written idempotently, and checked for damage."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from redis.asyncio import Redis
from tests.chaos.proxy import Link
from tests.servers import running_redis

from paramserver.core.ranges import of_pairs
from paramserver.core.shard.events import Event, Journaled, JournalLost, JournalRefused, StorageChanged
from paramserver.core.shard.journal import JournalEntry
from paramserver.errors import CorruptState, RequestError
from paramserver.types import AnyArray, ModelKey, PartitionKey, Token
from paramserver_node import redis as node_redis
from paramserver_shard.journal import Batch, Journal, Verdict
from paramserver_shard.journal_writer import JournalWriter
from paramserver_shard.scripts import Script, ScriptRunner
from paramserver_shard.telemetry import JOURNALED

pytestmark = pytest.mark.process

KEY = PartitionKey(ModelKey("m", 3), 7)
OTHER = PartitionKey(ModelKey("m", 3), 8)
TOKEN = (1 << 32) | 5

Stream = list[tuple[bytes, dict[bytes, bytes]]]
"""A journal as Redis returns it: (entry id, fields)."""


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis server that can confirm that a write is on its disk."""
    with running_redis(tmp_path_factory.mktemp("redis"), more=("--appendfsync", "always")) as url:
        yield url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A Redis that contains only the owner tokens of the partitions."""
    client = node_redis.connect(redis_url, timeout_s=None)
    await client.flushall()
    await own(client, TOKEN)
    yield client
    await client.aclose()


async def own(redis: Redis, token: Token) -> None:
    """Store the owner token of both partitions, as the scheduler does."""
    for key in (KEY, OTHER):
        await redis.set(f"{{{key}}}:token", f"{token:020d}")


def journal_of(redis: Redis) -> Journal:
    return Journal(redis, ScriptRunner(redis))


def entry(lsn: int, *arrays: AnyArray, key: PartitionKey = KEY, token: Token = TOKEN) -> JournalEntry:
    head = {"version": lsn, "id": ["w", 1, lsn], "ranges": of_pairs([(0, 3)]), "rate": 0.1, "key": None}
    return JournalEntry(key, token, lsn, "push", head, arrays or (np.full(3, lsn, np.float32),))


def entries(first: int, last: int, **fields: object) -> list[JournalEntry]:
    return [entry(lsn, **fields) for lsn in range(first, last + 1)]  # type: ignore[arg-type]


async def append(redis: Redis, wanted: Sequence[JournalEntry], *, fsync: bool = False) -> Verdict:
    batch = Batch(wanted[0].key, wanted[0].token, wanted)
    return (await journal_of(redis).append([batch], fsync=fsync))[0]


def plain(entry: JournalEntry) -> tuple[Any, ...]:
    """All of an entry but its arrays, with ranges as lists."""
    ranges = entry.head.get("ranges")
    head = {**entry.head, "ranges": None if ranges is None else ranges.tolist()}
    return entry.key, entry.token, entry.lsn, entry.kind, head


def same(a: JournalEntry, b: JournalEntry) -> bool:
    """Whether two entries are equal, bit for bit."""
    arrays = [(x.dtype, x.tobytes()) for x in a.arrays] == [(x.dtype, x.tobytes()) for x in b.arrays]
    return plain(a) == plain(b) and arrays


async def test_what_is_written_is_read(redis: Redis) -> None:
    """Entries with any number of arrays of any dtype are read back bit for bit, after any lsn."""
    wanted = [
        entry(1, np.arange(5, dtype=np.float32)),
        entry(2, np.arange(5, dtype=np.uint16), np.array([np.nan, -0.0], np.float64)),
        JournalEntry(KEY, TOKEN, 3, "commit", {"version": 3, "contributions": [["w", 1, 0, 2, 0.5]], "rate": 1e-3}),
        entry(4, np.empty(0, np.float16), np.random.default_rng(1).standard_normal(700_000).astype(np.float32)),
    ]
    assert await append(redis, wanted) == Verdict.WRITTEN
    journal = journal_of(redis)
    for after in range(5):
        found = await journal.read(KEY, after)
        assert all(map(same, found, wanted[after:]))
        assert len(found) == 4 - after
    assert await journal.read(OTHER, 0) == []


async def test_many_and_big_entries_are_read_in_pages(redis: Redis) -> None:
    """Three thousand small entries and ten of 2 MiB take several scripts and pages, and are complete and in order."""
    big = np.zeros(1 << 19, np.float32)
    wanted = entries(1, 3000) + [entry(lsn, big + lsn) for lsn in range(3001, 3011)]
    assert await append(redis, wanted) == Verdict.WRITTEN
    found = await journal_of(redis).read(KEY, 0)
    assert [e.lsn for e in found] == list(range(1, 3011))
    assert found[-1].arrays[0][-1] == 3010


async def test_entries_larger_than_a_page_are_read_one_by_one(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry can be larger than a page is to be: pages then hold one entry each, not none."""
    monkeypatch.setattr("paramserver_shard.journal._PAGE_BYTES", 1)
    assert await append(redis, entries(1, 4)) == Verdict.WRITTEN
    assert [e.lsn for e in await journal_of(redis).read(KEY, 0)] == [1, 2, 3, 4]


async def test_ranges_count_towards_a_page(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of many ranges and few elements, or none, are read in pages no larger than those of others."""
    monkeypatch.setattr("paramserver_shard.journal._PAGE_BYTES", 64 << 10)
    ranges = of_pairs([(2 * i, 2 * i + 1) for i in range(1024)])  # 16 KiB
    head = {"version": 1, "ranges": ranges, "late": True}
    assert await append(redis, [JournalEntry(KEY, TOKEN, lsn, "hold", head) for lsn in range(1, 13)]) == Verdict.WRITTEN
    counts: list[int] = []

    async def xrange(name: str, **options: Any) -> Any:
        counts.append(options["count"])
        return await redis.xrange(name, **options)

    counting: Any = SimpleNamespace(get=redis.get, xrange=xrange)
    found = await Journal(counting, ScriptRunner(redis)).read(KEY, 0)
    assert [e.lsn for e in found] == list(range(1, 13))
    assert max(counts) == 3


async def test_a_partition_with_much_to_write_takes_several_scripts(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large batch is split into scripts of at most the limit plus one entry; if the first is refused, all is."""
    monkeypatch.setattr("paramserver_shard.journal.JOURNAL_SCRIPT_BYTES", 8000)
    sizes: list[int] = []

    class Counting(ScriptRunner):
        async def run(self, scripts: Sequence[Script], **options: Any) -> list[Any]:
            for script in scripts:
                sizes.append(sum(memoryview(a).nbytes for a in script.args if isinstance(a, bytes | memoryview)))
            return await super().run(scripts, **options)

    thousand = np.ones(250, np.float32)
    mine = [entry(lsn, thousand) for lsn in range(1, 31)]
    journal = Journal(redis, Counting(redis))
    batches = [Batch(OTHER, TOKEN, entries(1, 2, key=OTHER)), Batch(KEY, TOKEN, mine)]
    assert await journal.append(batches, fsync=False) == [Verdict.WRITTEN] * 2
    assert len(sizes) >= 4
    assert max(sizes) < 8000 + 1500
    assert all(map(same, await journal.read(KEY, 0), mine))

    await redis.delete(f"{{{KEY}}}:lsn", f"{{{KEY}}}:journal")
    batches = [Batch(KEY, TOKEN, mine[1:]), Batch(OTHER, TOKEN, entries(1, 3, key=OTHER))]
    assert await journal.append(batches, fsync=False) == [Verdict.GAP, Verdict.WRITTEN]


async def test_a_write_is_repeatable(redis: Redis) -> None:
    """Writing a batch again, or one that overlaps with stored entries, adds each entry once."""
    for first, last in ((1, 4), (1, 4), (3, 6), (6, 6), (1, 2)):
        assert await append(redis, entries(first, last)) == Verdict.WRITTEN
    assert [e.lsn for e in await journal_of(redis).read(KEY, 0)] == [1, 2, 3, 4, 5, 6]


async def test_the_owner_token_decides(redis: Redis) -> None:
    """A newer token fences a write, an older or missing one means lost data; other partitions are written."""
    await append(redis, entries(1, 2))
    for stored, want in ((TOKEN + 1, Verdict.FENCED), (TOKEN - 1, Verdict.EMPTIED), (None, Verdict.EMPTIED)):
        name = f"{{{KEY}}}:token"
        await (redis.delete(name) if stored is None else redis.set(name, f"{stored:020d}"))
        batches = [Batch(KEY, TOKEN, entries(3, 3)), Batch(OTHER, TOKEN, entries(1, 1, key=OTHER))]
        assert await journal_of(redis).append(batches, fsync=False) == [want, Verdict.WRITTEN]
    assert [e.lsn for e in await journal_of(redis).read(KEY, 0)] == [1, 2]
    assert [e.lsn for e in await journal_of(redis).read(OTHER, 0)] == [1]


async def test_a_gap_is_not_written(redis: Redis) -> None:
    """Entries that do not follow the last stored one are refused, because Redis has lost those between."""
    await append(redis, entries(1, 2))
    assert await append(redis, entries(4, 5)) == Verdict.GAP
    assert await append(redis, [entry(2), entry(5)]) == Verdict.GAP
    assert [e.lsn for e in await journal_of(redis).read(KEY, 0)] == [1, 2]


async def test_fsync_waits_for_the_disk(tmp_path: Path) -> None:
    """With `fsync` entries are written where `appendfsync` is `always`; without a file it is refused."""
    with running_redis(tmp_path / "with", more=("--appendfsync", "always")) as url:
        client = node_redis.connect(url)
        await own(client, TOKEN)
        assert await append(client, entries(1, 3), fsync=True) == Verdict.WRITTEN
        await client.aclose()
    with running_redis(tmp_path / "without", more=("--appendonly", "no")) as url:
        client = node_redis.connect(url)
        await own(client, TOKEN)
        with pytest.raises(RequestError, match="fsynced"):
            await append(client, entries(1, 3), fsync=True)
        assert await append(client, entries(1, 3)) == Verdict.WRITTEN
        await client.aclose()


async def test_what_waitaof_confirms_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where WAITAOF is taken to wait for the disk, an entry that it confirms is written."""
    monkeypatch.setattr(node_redis, "are_early", lambda confirmed_s: False)
    with running_redis(tmp_path) as url:
        client = node_redis.connect(url)
        await own(client, TOKEN)
        assert await append(client, entries(1, 3), fsync=True) == Verdict.WRITTEN
        await client.aclose()


async def test_a_disk_that_is_too_slow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk does not confirm a write in time, the error says that it was the disk, not some transfer.

    Nor does it confirm the same write from another connection, to which it is nothing new.
    """
    monkeypatch.setattr("paramserver_shard.scripts.FSYNC_WAIT_MS", 50)
    with running_redis(tmp_path, more=("--appendfsync", "no")) as url:
        client = node_redis.connect(url)
        await own(client, TOKEN)
        await client.aclose()
        for _ in range(2):
            client = node_redis.connect(url)
            with pytest.raises(TimeoutError, match="the disk of Redis took longer than 50 ms"):
                await append(client, entries(1, 3), fsync=True)
            await client.aclose()


async def test_no_damage_is_read_silently(redis: Redis) -> None:
    """Each of 500 random damages to a stored journal raises `CorruptState`; the undamaged one is read."""
    rng = random.Random(20)
    count = 12
    wanted = [entry(n, np.arange(rng.randrange(1, 40), dtype=np.float32)) for n in range(1, count + 1)]
    journal, stream, counter = journal_of(redis), f"{{{KEY}}}:journal", f"{{{KEY}}}:lsn"
    await append(redis, wanted)
    good: Stream = await redis.xrange(stream)  # type: ignore[assignment]

    async def rewrite(changed: Stream) -> None:
        await redis.delete(stream)
        for name, fields in changed:
            await redis.xadd(stream, fields, id=name)  # type: ignore[arg-type]

    kinds: list[Callable[[Stream], object]] = [
        lambda e: flip(rng, e, b"h"),
        lambda e: flip(rng, e, b"d"),
        lambda e: cut_short(rng, e, b"h"),
        lambda e: cut_short(rng, e, b"d"),
        lambda e: e.pop(rng.randrange(count)),
        lambda e: exchange(rng, e),
        lambda e: rng.choice(e)[1].pop(rng.choice([b"h", b"d"])),
    ]
    for i in range(500):
        changed = [(name, dict(fields)) for name, fields in good]
        kinds[i % len(kinds)](changed)
        await rewrite(changed)
        with pytest.raises(CorruptState, match="the journal of partition"):
            await journal.read(KEY, 0)
    await rewrite(good)
    await redis.delete(counter)
    with pytest.raises(CorruptState):
        await journal.read(KEY, 3)
    await redis.set(counter, count)
    assert all(map(same, await journal.read(KEY, 0), wanted))


def flip(rng: random.Random, stream: Stream, field: bytes) -> None:
    """Flip one bit of one entry."""
    _, fields = rng.choice(stream)
    data = bytearray(fields[field])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    fields[field] = bytes(data)


def cut_short(rng: random.Random, stream: Stream, field: bytes) -> None:
    """Cut off the end of one entry."""
    _, fields = rng.choice(stream)
    fields[field] = fields[field][: rng.randrange(len(fields[field]))]


def exchange(rng: random.Random, stream: Stream) -> None:
    """Swap the content of two entries."""
    a, b = rng.sample(range(len(stream)), 2)
    (name_a, fields_a), (name_b, fields_b) = stream[a], stream[b]
    stream[a], stream[b] = (name_a, fields_b), (name_b, fields_a)


class Shard:
    """A journal writer, and the events that it reported."""

    def __init__(self, redis: Redis) -> None:
        self.events: list[Event] = []
        self.owned: set[tuple[PartitionKey, Token]] = {(KEY, TOKEN), (OTHER, TOKEN)}
        self.writer = JournalWriter(journal_of(redis), self.events.append, lambda *o: o in self.owned)

    async def until(self, event: Event) -> None:
        """Wait for that event."""
        async with asyncio.timeout(20):
            while event not in self.events:
                await asyncio.sleep(0.01)


@pytest.fixture
async def shard(redis: Redis) -> AsyncIterator[Shard]:
    """A running journal writer."""
    shard = Shard(redis)
    task = asyncio.create_task(shard.writer.run())
    yield shard
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def scripts_run(redis: Redis) -> int:
    stats = await redis.info("commandstats")
    return int(stats.get("cmdstat_eval", {}).get("calls", 0))


async def test_what_comes_during_a_write_goes_with_the_next(redis: Redis, shard: Shard) -> None:
    """A thousand entries of two partitions take fewer than 20 scripts, and the last of each is confirmed."""
    before = await scripts_run(redis)
    for lsn in range(1, 501):
        shard.writer.add([entry(lsn), entry(lsn, key=OTHER)], fsync=False)
        if lsn % 100 == 0:
            await asyncio.sleep(0)
    await shard.until(Journaled(KEY, TOKEN, 500))
    await shard.until(Journaled(OTHER, TOKEN, 500))
    assert not shard.writer.waiting
    assert await scripts_run(redis) - before < 20
    assert len(await journal_of(redis).read(OTHER, 0)) == 500


async def test_entries_wait_while_redis_is_away(redis: Redis, shard: Shard) -> None:
    """The core is told when Redis is away and when it is back, and waiting entries are written once."""
    pid = int((await redis.info("server"))["process_id"])
    shard.writer.add(entries(1, 2), fsync=False)
    await shard.until(Journaled(KEY, TOKEN, 2))
    os.kill(pid, signal.SIGSTOP)
    try:
        shard.writer.add(entries(3, 4), fsync=False)
        async with asyncio.timeout(20):
            while not any(isinstance(e, StorageChanged) and e.reason for e in shard.events):
                await asyncio.sleep(0.05)
        shard.writer.add(entries(5, 5), fsync=False)
    finally:
        os.kill(pid, signal.SIGCONT)
    await shard.until(Journaled(KEY, TOKEN, 5))
    async with asyncio.timeout(20):
        while [e for e in shard.events if isinstance(e, StorageChanged)][-1] != StorageChanged(""):
            await asyncio.sleep(0.05)  # whether it can fsync is asked apart
    assert [e.lsn for e in await journal_of(redis).read(KEY, 0)] == [1, 2, 3, 4, 5]


async def test_what_is_large_has_the_time_that_it_takes(
    redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a slow link large entries may take longer than the timeout; a cut link is still noticed."""
    monkeypatch.setattr(node_redis, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(node_redis, "PACE_BYTES_PER_S", 256 * 1024)
    link = Link("redis", urlsplit(redis_url).port or 0)
    await link.start()
    slow = node_redis.connect(f"redis://127.0.0.1:{link.port}/0", timeout_s=None)
    shard = Shard(slow)
    writing = asyncio.create_task(shard.writer.run())
    try:
        wanted = [entry(lsn, np.full(1 << 19, lsn, np.float32)) for lsn in (1, 2)]
        await slow.ping()
        link.delay_s = 0.02  # per 64 KiB: 1.3 s for both entries, more than the timeout of 0.5 s
        shard.writer.add(wanted, fsync=False)
        await shard.until(Journaled(KEY, TOKEN, 2))
        assert not any(isinstance(e, StorageChanged) for e in shard.events)
        assert all(map(same, await journal_of(slow).read(KEY, 0), wanted))
        link.cut()
        shard.writer.add([entry(3)], fsync=False)
        async with asyncio.timeout(20):
            while not any(isinstance(e, StorageChanged) and e.reason for e in shard.events):
                await asyncio.sleep(0.01)
        link.heal()
        await shard.until(Journaled(KEY, TOKEN, 3))
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await slow.aclose()
        await link.stop()


async def test_an_owner_that_was_replaced_is_told(redis: Redis, shard: Shard) -> None:
    """If the owner token is newer, the partition's entries are dropped and reported; others are written."""
    await redis.set(f"{{{KEY}}}:token", f"{TOKEN + 1:020d}")
    shard.writer.add([entry(1), entry(1, key=OTHER)], fsync=False)
    await shard.until(JournalRefused(KEY, TOKEN))
    await shard.until(Journaled(OTHER, TOKEN, 1))
    assert not shard.writer.waiting


async def test_nobody_waits_for_the_journal_of_what_was_given_up(redis: Redis) -> None:
    """A snapshot that waits for journal entries of a partition that was given up continues at once."""
    shard = Shard(redis)
    shard.writer.add([entry(1)], fsync=False)
    waiting = asyncio.create_task(shard.writer.written(KEY, 1, 60.0))
    await asyncio.sleep(0)
    shard.owned.discard((KEY, TOKEN))
    writing = asyncio.create_task(shard.writer.run())
    async with asyncio.timeout(20):
        await waiting
    assert await journal_of(redis).read(KEY, 0) == []
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)


async def test_an_emptied_redis_is_waited_for(redis: Redis, shard: Shard) -> None:
    """Without an owner token nothing is written, reported or counted; entries of partitions given up are dropped."""
    counted = JOURNALED.labels("journaled")
    before_bytes = counted.total
    await redis.flushall()
    shard.writer.add([entry(1), entry(1, key=OTHER)], fsync=False)
    shard.owned.discard((OTHER, TOKEN))
    before = await scripts_run(redis)
    async with asyncio.timeout(10):
        while await scripts_run(redis) < before + 2:
            await asyncio.sleep(0.01)
    assert shard.events == []
    await own(redis, TOKEN)
    await shard.until(Journaled(KEY, TOKEN, 1))
    assert not shard.writer.waiting
    assert counted.total - before_bytes == entry(1).nbytes
    assert await journal_of(redis).read(OTHER, 0) == []


async def test_a_redis_that_came_back_shorter_is_told(redis: Redis, shard: Shard) -> None:
    """If Redis lost entries the core is told, and writing resumes when a snapshot has set the journal's lsn."""
    shard.writer.add(entries(1, 3), fsync=False)
    await shard.until(Journaled(KEY, TOKEN, 3))
    await redis.delete(f"{{{KEY}}}:journal", f"{{{KEY}}}:lsn")
    shard.writer.add(entries(4, 4), fsync=False)
    await shard.until(JournalLost(KEY, TOKEN))
    await redis.set(f"{{{KEY}}}:lsn", 3)  # as a snapshot does when it switches the manifest
    await shard.until(Journaled(KEY, TOKEN, 4))
    assert [e.lsn for e in await journal_of(redis).read(KEY, 3)] == [4]


async def test_a_disk_that_cannot_be_asked_stops_one_level_alone(redis: Redis, shard: Shard) -> None:
    """Without an append-only file `fsynced` entries wait, the core is told, and other entries are written."""
    await redis.config_set("appendonly", "no")
    try:
        shard.writer.add([entry(1)], fsync=True)
        async with asyncio.timeout(20):
            while not any(isinstance(e, StorageChanged) and e.fsync_refused for e in shard.events):
                await asyncio.sleep(0.05)
        shard.writer.add([entry(1, key=OTHER)], fsync=False)
        await shard.until(Journaled(OTHER, TOKEN, 1))
        assert shard.writer.waiting
    finally:
        await redis.config_set("appendonly", "yes")
    await shard.until(Journaled(KEY, TOKEN, 1))


async def test_a_snapshot_waits_for_the_entries_before_it_alone(redis: Redis) -> None:
    """A wait ends if no entry up to that lsn is left, when its time is over, or once Redis cannot be written."""
    writer = Shard(redis).writer
    writer.add([entry(2)], fsync=False)
    async with asyncio.timeout(20):
        await writer.written(KEY, 1, 60.0)
        await writer.written(OTHER, 2, 60.0)
        await writer.written(KEY, 2, 0.01)
        waiting = asyncio.create_task(writer.written(KEY, 2, 60.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        writer.note_failure("Redis does not answer")
        await waiting
