"""The journal writer on virtual time, with a journal that answers as the test says."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from prometheus_client import REGISTRY
from redis.exceptions import ResponseError

from paramserver.core.shard.events import Event, Journaled, JournalLost, StorageChanged
from paramserver.core.shard.journal import JournalEntry
from paramserver.errors import PsError, problem
from paramserver.types import ModelKey, PartitionKey
from paramserver_shard.journal import Batch, Verdict
from paramserver_shard.journal_writer import JournalWriter

from . import virtual_time

KEY, OTHER = (PartitionKey(ModelKey("m", 1), index) for index in range(2))
TOKEN = 5
GONE = StorageChanged("Redis does not answer: gone")


def entry(lsn: int, key: PartitionKey = KEY) -> JournalEntry:
    return JournalEntry(key, TOKEN, lsn, "drop", {}, ())


def now_s() -> float:
    return round(asyncio.get_running_loop().time(), 3)


class Shard:
    """A journal writer, the journal that it writes to, and the core that it tells of it."""

    def __init__(self, *, writes: Iterable[Exception] = (), probes: Iterable[Exception | None] = ()) -> None:
        """The next plain writes and the next probes fail with these errors; those after them succeed."""
        self.errors, self.refusals = deque(writes), deque(probes)
        self.verdicts: dict[PartitionKey, deque[Verdict]] = {}
        """What becomes of the next writes of a partition; those after them are written."""
        self.takes_s = {False: 0.0, True: 0.0}
        """How long a write takes, by `fsync`."""
        self.writes: list[tuple[float, list[tuple[int, list[int]]]]] = []
        """When each write began, and the lsns of each partition in it."""
        self.probes: list[tuple[float, bool]] = []
        self.events: list[tuple[float, Event]] = []
        self.given_up: set[PartitionKey] = set()
        journal: Any = self
        self.writer = JournalWriter(
            journal, lambda event: self.events.append((now_s(), event)), lambda key, _: key not in self.given_up
        )

    async def append(self, batches: Sequence[Batch], *, fsync: bool) -> list[Verdict]:
        self.writes.append((now_s(), [(b.key.index, [e.lsn for e in b.entries]) for b in batches]))
        await asyncio.sleep(self.takes_s[fsync])
        if self.errors and (not fsync or isinstance(self.errors[0], PsError)):
            raise self.errors.popleft()
        return [found.popleft() if (found := self.verdicts.get(b.key)) else Verdict.WRITTEN for b in batches]

    async def probe(self, *, fsync: bool) -> None:
        self.probes.append((now_s(), fsync))
        if self.refusals and (refusal := self.refusals.popleft()) is not None:
            raise refusal

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the writer for the block."""
        task = asyncio.ensure_future(self.writer.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    def run(self, *steps: tuple[float, Callable[[], object]]) -> None:
        """Run the writer for 10 s; take each step at its time."""

        async def run() -> None:
            async with self.running():
                for at_s, step in (*steps, (10.0, lambda: None)):
                    await asyncio.sleep(at_s - asyncio.get_running_loop().time())
                    step()

        virtual_time.run(run())

    def add(self, *entries: JournalEntry, fsync: bool = False) -> Callable[[], None]:
        return lambda: self.writer.add(entries, fsync)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_write_that_fails_is_repeated_until_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    """A failed write is repeated every 0.2 s, with what has come meanwhile; the core hears why, the log once."""
    shard = Shard(writes=[OSError("gone"), ResponseError("full"), problem("not_built", "no file")])
    shard.run((0.0, shard.add(entry(1))), (0.3, shard.add(entry(2), entry(3))))

    one, all_three = [(0, [1])], [(0, [1, 2, 3])]
    assert shard.writes == [(0.0, one), (0.2, one), (0.4, all_three), (0.6, all_three)]
    assert shard.events == [
        (0.0, GONE),
        (0.2, StorageChanged("Redis refuses: full")),
        (0.4, StorageChanged("no file")),
        (0.6, StorageChanged("")),
        (0.6, Journaled(KEY, TOKEN, 3)),
    ]
    assert told(caplog) == ["pushes cannot be journaled: Redis does not answer: gone"]
    assert not shard.writer.waiting


def test_redis_is_probed_while_it_is_away_and_nothing_waits(caplog: pytest.LogCaptureFixture) -> None:
    """After a failure that others met, and logged, Redis is probed every 0.5 s until it answers; an entry is tried."""
    shard = Shard(probes=[None, ResponseError("full"), OSError("gone")])  # the first one is of the level `fsynced`
    reasons: list[str] = []
    fails = (0.1, lambda: shard.writer.note_failure(GONE.reason))
    looks = [(at_s, lambda: reasons.append(shard.writer.reason)) for at_s in (1.0, 2.0)]
    more = (0.2, lambda: shard.writer.note_failure("another meets it, too"))
    again = (3.0, lambda: shard.writer.note_failure(GONE.reason))
    shard.run(fails, more, *looks, again, (3.2, shard.add(entry(1))))

    assert shard.probes == [(0.0, True), (0.6, False), (1.1, False), (1.6, False)]
    assert reasons == ["Redis refuses: full", ""]
    assert shard.writes == [(3.2, [(0, [1])])]
    full, back = StorageChanged("Redis refuses: full"), StorageChanged("")
    assert shard.events[:4] == [(0.1, GONE), (0.6, full), (1.1, GONE), (1.6, back)]
    assert shard.events[4:] == [(3.0, GONE), (3.2, back), (3.2, Journaled(KEY, TOKEN, 1))]
    assert told(caplog) == []


def test_a_level_that_redis_cannot_offer_is_known_before_it_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    """Whether Redis can confirm that an entry is on its disk is asked at the start, and again until it can.

    The log says nothing of it: who asks for the level is told, and pushes at `journaled` are fine.
    """
    shard = Shard(probes=[problem("not_built", "no file")] * 2)
    shard.run((21.0, lambda: None))

    assert shard.probes == [(0.0, True), (10.0, True), (20.0, True)]
    assert shard.events == [(0.0, StorageChanged("", "no file")), (20.0, StorageChanged(""))]
    assert told(caplog) == []


def test_a_level_that_is_needed_and_cannot_be_offered_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """An entry that waits for it makes it a warning; Redis is asked again when another one comes, or after 10 s."""
    shard = Shard(probes=[problem("not_built", "no file")], writes=[problem("not_built", "no file")] * 2)
    shard.run((1.0, shard.add(entry(1), fsync=True)), (2.0, shard.add(entry(2), fsync=True)), (12.1, lambda: None))

    assert shard.writes == [(1.0, [(0, [1])]), (2.0, [(0, [1, 2])]), (12.0, [(0, [1, 2])])]
    assert shard.probes == [(0.0, True), (12.0, True)]
    assert shard.events[-1] == (12.0, Journaled(KEY, TOKEN, 2))
    assert told(caplog) == ["pushes cannot be fsynced: no file"]


def test_a_cause_that_stays_is_logged_after_one_that_passed(caplog: pytest.LogCaptureFixture) -> None:
    """If Redis comes back and cannot offer a level that is needed, the log does not end with its absence."""
    no_file = problem("not_built", "no file")
    shard = Shard(writes=[problem("storage_unavailable", "gone"), no_file])
    shard.run((1.0, shard.add(entry(1), fsync=True)))

    assert told(caplog) == [f"pushes cannot be fsynced: {why}" for why in ("gone", "no file")]


def test_an_outage_is_no_trouble_of_a_level_that_nobody_uses(caplog: pytest.LogCaptureFixture) -> None:
    """While no entry has to be on disk, the log says nothing of that level, whatever Redis answers or does not."""
    no_file = problem("not_built", "no file")
    shard = Shard(probes=[no_file, OSError("gone"), no_file])
    shard.run((21.0, lambda: None))

    assert [at_s for at_s, _ in shard.probes] == [0.0, 10.0, 10.5, 20.5]
    assert told(caplog) == []


def test_entries_that_are_held_up_hold_up_no_others(caplog: pytest.LogCaptureFixture) -> None:
    """What Redis cannot take of a partition is tried again every 0.2 s, and what comes of others written meanwhile."""
    shard = Shard()
    shard.verdicts[KEY] = deque([Verdict.EMPTIED] * 3 + [Verdict.GAP] * 2)
    shard.verdicts[OTHER] = deque([Verdict.GAP])
    shard.run((0.0, shard.add(entry(1))), (0.1, shard.add(entry(1, OTHER))), (1.1, shard.add(entry(2))))

    mine, others = [(0, [1])], [(1, [1])]
    assert shard.writes == [
        (0.0, mine), (0.1, others), (0.2, mine), (0.3, others), (0.4, mine), (0.6, mine), (0.8, mine), (1.0, mine),
        (1.1, [(0, [2])]),
    ]  # fmt: skip
    assert shard.events == [
        (0.1, JournalLost(OTHER, TOKEN)),
        (0.3, Journaled(OTHER, TOKEN, 1)),
        (0.6, JournalLost(KEY, TOKEN)),
        (0.8, JournalLost(KEY, TOKEN)),
        (1.0, Journaled(KEY, TOKEN, 1)),
        (1.1, Journaled(KEY, TOKEN, 2)),
    ]
    assert shard.probes == [(0.0, True)]
    emptied, gap = "its journal is not written", "Redis lost part of its journal; storing a snapshot instead"
    assert [line.split(": ")[:2] for line in told(caplog)] == [
        [f"partition {key}", why] for key, why in ((KEY, emptied), (OTHER, gap), (KEY, gap), (KEY, gap))
    ]


def test_what_is_held_up_of_a_partition_that_is_given_up_is_dropped() -> None:
    """Entries of a partition that this shard no longer owns are tried no more, and nothing is left of them."""
    shard = Shard()
    shard.verdicts[KEY] = deque([Verdict.EMPTIED] * 100)
    shard.run((0.0, shard.add(entry(1))), (0.3, lambda: shard.given_up.add(KEY)))

    assert [at_s for at_s, _ in shard.writes] == [0.0, 0.2]
    assert not shard.writer.waiting


def test_a_write_takes_no_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write takes so much and no more; what is left of a partition waits behind the entries of the others."""
    monkeypatch.setattr("paramserver_shard.journal_writer.JOURNAL_GROUP_BYTES", 2 * entry(1).nbytes)
    shard = Shard()
    shard.run((0.0, shard.add(*map(entry, range(1, 6)), entry(1, OTHER), entry(2, OTHER))))

    assert [write for _, write in shard.writes] == [[(0, [1, 2])], [(1, [1, 2])], [(0, [3, 4])], [(0, [5])]]


@pytest.mark.parametrize("becomes", [*Verdict, OSError("gone")], ids=str)
def test_who_waits_for_entries_hears_what_became_of_them(becomes: Verdict | OSError) -> None:
    """A wait for entries whose write is under way ends with it, and with no other, whatever becomes of them."""
    shard = Shard(writes=[becomes] if isinstance(becomes, OSError) else ())
    if isinstance(becomes, Verdict):
        shard.verdicts[KEY] = deque([becomes])
    shard.takes_s = {False: 1.0, True: 0.75}

    async def waited() -> float:
        async with shard.running():
            shard.writer.add([entry(1)], fsync=False)
            shard.writer.add([entry(1, OTHER)], fsync=True)
            await asyncio.sleep(0.5)
            await shard.writer.written(KEY, 1, 5.0)
            return now_s()

    assert virtual_time.run(waited()) == 1.0


def test_a_disk_keeps_only_those_waiting_who_need_it() -> None:
    """A write that waits for the disk holds up no entries of the other level; both count as waiting and are metered."""

    def metered(what: str) -> list[float]:
        found = [REGISTRY.get_sample_value(f"paramserver_{what}", {"level": v}) for v in ("journaled", "fsynced")]
        return [value or 0.0 for value in found]

    shard, size = Shard(), entry(1).nbytes
    shard.takes_s = {False: 0.25, True: 1.0}
    names = ("journaled_bytes_total", "journal_seconds_sum", "journal_seconds_count")
    before = {name: metered(name) for name in names}
    waiting: list[bool] = []
    shard.run(
        (0.0, shard.add(entry(1), entry(2), fsync=True)),
        (0.5, shard.add(entry(1, OTHER))),
        (0.9, lambda: waiting.append(shard.writer.waiting)),
        (1.1, lambda: waiting.append(shard.writer.waiting)),
    )

    assert shard.events == [(0.75, Journaled(OTHER, TOKEN, 1)), (1.0, Journaled(KEY, TOKEN, 2))]
    assert waiting == [True, False]
    since = {name: [b - a for a, b in zip(before[name], metered(name), strict=True)] for name in names}
    assert since["journaled_bytes_total"] == [size, 2 * size]
    assert since["journal_seconds_sum"] == pytest.approx([0.25, 1.0])
    assert since["journal_seconds_count"] == [1, 1]


class Deaf(Shard):
    """A shard whose Redis client swallows the cancellation of a write in progress."""

    async def append(self, batches: Sequence[Batch], *, fsync: bool) -> list[Verdict]:
        with suppress(asyncio.CancelledError):
            await super().append(batches, fsync=fsync)
        return [Verdict.WRITTEN] * len(batches)


def test_it_ends_though_the_client_of_redis_has_lost_the_cancellation() -> None:
    """A cancelled writer ends even if the Redis client swallows the cancellation; else its process would never end.

    The client sends by `asyncio.wait_for`, which can do so in Python 3.11.
    """
    shard = Deaf()
    shard.takes_s[False] = 60.0

    async def stopped() -> float:
        async with asyncio.timeout(30.0), shard.running():
            shard.writer.add([entry(1)], fsync=False)
            await asyncio.sleep(1.0)
        return now_s()

    assert virtual_time.run(stopped()) == 1.0
