"""Group commit: all entries waiting to be journaled go to Redis in one write while the next group gathers.

There are two lanes, one of them for entries that must be on disk: with `appendfsync everysec` that may take a second,
for which the others need not wait.  A model never changes its level, so all entries of a partition use the same lane.
Each lane has one write in flight; a failed write is retried until it succeeds.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from redis.exceptions import RedisError

from paramserver.core.shard.events import Event, Journaled, JournalLost, JournalRefused, StorageChanged
from paramserver.core.shard.journal import JournalEntry
from paramserver.errors import PsError, RequestError
from paramserver.limits import JOURNAL_GROUP_BYTES
from paramserver.types import PartitionKey, Token
from paramserver_node.crash import crash_point
from paramserver_node.redis import stop_if_cancelled, trouble
from paramserver_shard.journal import Batch, Journal, Verdict
from paramserver_shard.telemetry import JOURNAL_S, JOURNALED

log = logging.getLogger("paramserver.shard")

RETRY_S: Final = 0.2
PROBE_S: Final = 0.5
"""Interval of write probes while Redis cannot be written and no entry waits."""
REFUSED_S: Final = 10.0
"""The same while Redis cannot confirm that a write is on its disk; asking takes a second, and writes."""

Ownership = tuple[PartitionKey, Token]


class JournalWriter:
    """Queues this shard's journal entries and writes them to Redis."""

    def __init__(
        self, journal: Journal, feed: Callable[[Event], None], owns: Callable[[PartitionKey, Token], bool]
    ) -> None:
        """`owns` tells whether this shard still owns a partition under a token; entries of others are dropped."""
        self._feed = feed
        self._settled = asyncio.Event()
        self._lanes = {fsync: _Lane(journal, fsync, self, owns) for fsync in (False, True)}

    def add(self, entries: Iterable[JournalEntry], fsync: bool) -> None:
        """Queue entries; those of one partition must come in lsn order."""
        self._lanes[fsync].add(entries)

    async def run(self) -> None:
        """Write queued entries until cancelled."""
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes.values():
                group.create_task(lane.run())

    @property
    def reason(self) -> str:
        """Why nothing can be journaled now; "" if it can."""
        return self._lanes[False].reason

    def note_failure(self, reason: str) -> None:
        """Note that Redis did not answer another caller, who logs it: nothing is durable until a write succeeds."""
        self._lanes[False].note_failure(reason)

    async def written(self, key: PartitionKey, lsn: int, within_s: float) -> None:
        """Wait until entries of the partition up to `lsn` are written or held up, at most `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                while any(lane.writes(key, lsn) for lane in self._lanes.values()):
                    await self._settled.wait()
        except TimeoutError:
            pass

    @property
    def waiting(self) -> bool:
        """Whether any entry is not written yet."""
        return any(lane.queues for lane in self._lanes.values())

    def emit(self, event: Event) -> None:
        """Feed an event about written or refused entries to the core."""
        self.wake_waiters()
        self._feed(event)

    def wake_waiters(self) -> None:
        """Wake the callers of `written`, which then check their entries again."""
        self._settled.set()
        self._settled = asyncio.Event()

    def lane_changed(self) -> None:
        """Feed to the core why the lanes cannot write, or that they can again."""
        self.wake_waiters()
        self._feed(StorageChanged(self._lanes[False].reason, self._lanes[True].reason))


class _Lane:
    """The queues of one durability level, by ownership."""

    def __init__(
        self,
        journal: Journal,
        fsync: bool,
        writer: JournalWriter,
        owns: Callable[[PartitionKey, Token], bool],
    ) -> None:
        self.queues: dict[Ownership, deque[JournalEntry]] = {}  # longest waiting first
        self._journal = journal
        self._fsync = fsync
        self._level = "fsynced" if fsync else "journaled"
        self._seconds, self._bytes = JOURNAL_S.labels(self._level), JOURNALED.labels(self._level)
        self._writer = writer
        self._owns = owns
        self._retry_at: dict[Ownership, float] = {}  # loop time of the next attempt
        self._wake = asyncio.Event()
        self.reason = ""
        """Why nothing can be written now; "" if it can."""
        self._refused = False
        """Whether that is because this Redis cannot do it."""
        self._told = False
        """Whether the log has it."""

    def add(self, entries: Iterable[JournalEntry]) -> None:
        for entry in entries:
            self.queues.setdefault((entry.key, entry.token), deque()).append(entry)
        self._wake.set()

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        if self._fsync:
            await self._probe()  # find out whether this Redis supports it before it is needed
        while True:
            stop_if_cancelled()
            self._wake.clear()
            batches = self._group(clock())
            if not batches:
                await self._rest(clock())
                continue
            crash_point("shard.before_journal")
            began = clock()
            try:
                verdicts = await self._journal.append(batches, fsync=self._fsync)
                crash_point("shard.after_journal")
            except (RedisError, OSError, PsError) as error:
                self._note(error)
                await (self._rest(clock()) if self._refused else asyncio.sleep(RETRY_S))
                continue
            self._set_reason("")
            self._seconds.observe(clock() - began)
            for batch, verdict in zip(batches, verdicts, strict=True):
                self._settle(batch, verdict, clock())

    def _group(self, now: float) -> list[Batch]:
        """Collect the next write: all entries of each partition in turn, until it is full."""
        batches: list[Batch] = []
        room = JOURNAL_GROUP_BYTES
        for ownership in list(self.queues):
            if room <= 0:
                break
            if self._retry_at.get(ownership, now) > now:
                continue
            if not self._owns(*ownership):
                self._drop(ownership)
                continue
            entries: list[JournalEntry] = []
            for entry in self.queues[ownership]:
                if room <= 0:
                    break
                entries.append(entry)
                room -= entry.nbytes
            batches.append(Batch(*ownership, entries))
        return batches

    def _settle(self, batch: Batch, verdict: Verdict, now: float) -> None:
        ownership = (batch.key, batch.token)
        if verdict == Verdict.WRITTEN:
            queue = self.queues.pop(ownership)
            for _ in batch.entries:
                queue.popleft()
            if queue:
                self.queues[ownership] = queue  # behind those that have waited longer
            self._bytes.inc(sum(e.nbytes for e in batch.entries))
            self._retry_at.pop(ownership, None)
            self._writer.emit(Journaled(batch.key, batch.token, batch.entries[-1].lsn))
        elif verdict == Verdict.FENCED:
            self._drop(ownership)
            log.warning("partition %s: journal write refused: another shard owns it now", batch.key)
            self._writer.emit(JournalRefused(batch.key, batch.token))
        else:
            if verdict == Verdict.EMPTIED and ownership not in self._retry_at:
                log.warning(
                    "partition %s: its journal is not written: Redis has no owner token of it, because its model was "
                    "deleted or Redis was emptied",
                    batch.key,
                )
            self._retry_at[ownership] = now + RETRY_S
            self._writer.wake_waiters()
            if verdict == Verdict.GAP:
                log.error("partition %s: Redis lost part of its journal; storing a snapshot instead", batch.key)
                self._writer.emit(JournalLost(batch.key, batch.token))

    def _drop(self, ownership: Ownership) -> None:
        self.queues.pop(ownership, None)
        self._retry_at.pop(ownership, None)
        self._writer.wake_waiters()

    def writes(self, key: PartitionKey, lsn: int) -> bool:
        """Whether entries of the partition up to `lsn` are waiting to be written and not held up."""
        return not self.reason and any(
            o[0] == key and queue[0].lsn <= lsn and o not in self._retry_at for o, queue in self.queues.items()
        )

    def note_failure(self, reason: str) -> None:
        if not self.reason:
            self._set_reason(reason, logged=True)
            self._wake.set()

    async def _rest(self, now: float) -> None:
        """Wait for new entries, for the next attempt of those held up, or, with probes, for Redis to come back."""
        probe_s = REFUSED_S if self._refused else PROBE_S
        until_s = now + probe_s if self.reason else min(self._retry_at.values(), default=None)
        try:
            async with asyncio.timeout_at(until_s):
                await self._wake.wait()
        except TimeoutError:
            if self.reason:
                await self._probe()

    async def _probe(self) -> None:
        try:
            await self._journal.probe(fsync=self._fsync)
        except (RedisError, OSError, PsError) as error:
            self._note(error)
        else:
            self._set_reason("")

    def _note(self, error: Exception) -> None:
        refused = self._fsync and isinstance(error, RequestError)
        self._told = self._told and refused == self._refused
        self._refused = refused
        self._set_reason(str(error) if isinstance(error, PsError) else trouble(error))

    def _set_reason(self, reason: str, *, logged: bool = False) -> None:
        if not reason or logged:
            self._told, self._refused = logged, False
        elif not self._told and (self.queues or not self._fsync):  # nobody misses a level that nobody uses
            self._told = True
            log.warning("pushes cannot be %s: %s", self._level, reason)
        if reason != self.reason:
            self.reason = reason
            self._writer.lane_changed()
