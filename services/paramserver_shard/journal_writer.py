"""Group commit: what waits to be journaled goes to Redis in one write while the next group gathers.

Two lanes, one for entries that have to be on the disk: one `appendfsync everysec` may take a second, which the others
need not wait for.  A model keeps its level, so all entries of a partition take the same.  One write of each lane is in
flight; one that fails is repeated, however long it takes.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from redis.exceptions import RedisError

from paramserver.core.journal import JournalEntry
from paramserver.core.shard_io import Event, Journaled, JournalLost, JournalRefused, StorageChanged
from paramserver.errors import PsError
from paramserver.limits import JOURNAL_GROUP_BYTES
from paramserver.types import PartitionKey, Token
from paramserver_node.crash import crash_point
from paramserver_node.redis import stop_if_cancelled
from paramserver_shard.journal import Batch, Journal, Verdict
from paramserver_shard.telemetry import JOURNAL_S, JOURNALED

log = logging.getLogger("paramserver.shard")

RETRY_S: Final = 0.2
PROBE_S: Final = 0.5
"""How often Redis is asked while it cannot be written and nothing waits."""

Ownership = tuple[PartitionKey, Token]


class JournalWriter:
    """The journal entries of this shard on their way to Redis."""

    def __init__(
        self, journal: Journal, feed: Callable[[Event], None], owns: Callable[[PartitionKey, Token], bool]
    ) -> None:
        """`owns` tells whether this shard still has a partition under a token; what it gave up is forgotten."""
        self._feed = feed
        self._reasons: dict[bool, str] = {}
        self._settled = asyncio.Event()
        self._lanes = {fsync: _Lane(journal, fsync, self, owns) for fsync in (False, True)}

    def add(self, entries: Iterable[JournalEntry], fsync: bool) -> None:
        """Queue entries; those of one partition come in the order of their lsn."""
        self._lanes[fsync].add(entries)

    async def run(self) -> None:
        """Writes until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes.values():
                group.create_task(lane.run())

    def suspect(self, reason: str) -> None:
        """Redis did not answer somebody else: nothing is taken for durable until it does."""
        self._lanes[False].suspect(reason)

    async def written(self, key: PartitionKey, lsn: int, within_s: float) -> None:
        """Waits until entries of the partition up to `lsn` are written, or cannot be for now."""
        try:
            async with asyncio.timeout(within_s):
                while any(lane.writes(key, lsn) for lane in self._lanes.values()):
                    await self._settled.wait()
        except TimeoutError:
            pass

    @property
    def waiting(self) -> bool:
        """Whether something is not written yet."""
        return any(lane.queues for lane in self._lanes.values())

    def tell(self, event: Event) -> None:
        """Something has come of it."""
        self.look_again()
        self._feed(event)

    def look_again(self) -> None:
        """Those that wait for something to be written see how it stands."""
        self._settled.set()
        self._settled = asyncio.Event()

    def storage(self, fsync: bool, reason: str) -> None:
        """Whether a lane can write now; the core hears of changes alone."""
        before = self._told()
        self._reasons[fsync] = reason
        if self._told() != before:
            if reason:
                log.warning("journals cannot be written: %s", reason)
            self.look_again()
            self._feed(StorageChanged(*self._told()))

    def _told(self) -> tuple[str, str]:
        return self._reasons.get(False, ""), self._reasons.get(True, "")


class _Lane:
    """The queues of one durability, by ownership."""

    def __init__(
        self,
        journal: Journal,
        fsync: bool,
        writer: JournalWriter,
        owns: Callable[[PartitionKey, Token], bool],
    ) -> None:
        self.queues: dict[Ownership, deque[JournalEntry]] = {}  # whoever waits longest is first
        self._journal = journal
        self._fsync = fsync
        level = "fsynced" if fsync else "journaled"
        self._seconds, self._bytes = JOURNAL_S.labels(level), JOURNALED.labels(level)
        self._writer = writer
        self._owns = owns
        self._later: dict[Ownership, float] = {}  # not before then
        self._wake = asyncio.Event()
        self._reason = ""

    def add(self, entries: Iterable[JournalEntry]) -> None:
        for entry in entries:
            self.queues.setdefault((entry.key, entry.token), deque()).append(entry)
        self._wake.set()

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        if self._fsync:
            await self._probe()  # whether this Redis can do it at all is asked for before it is needed
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
                self._failed(error)
                await asyncio.sleep(RETRY_S)
                continue
            self._works()
            self._seconds.observe(clock() - began)
            self._bytes.inc(sum(e.nbytes for b in batches for e in b.entries))
            for batch, verdict in zip(batches, verdicts, strict=True):
                self._settle(batch, verdict, clock())

    def _group(self, now: float) -> list[Batch]:
        """What the next write carries: of each partition in turn all there is, until it is full."""
        batches: list[Batch] = []
        room = JOURNAL_GROUP_BYTES
        for ownership in list(self.queues):
            if room <= 0:
                break
            if self._later.get(ownership, now) > now:
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
                self.queues[ownership] = queue  # behind those that wait longer now
            self._later.pop(ownership, None)
            self._writer.tell(Journaled(batch.key, batch.token, batch.entries[-1].lsn))
        elif verdict == Verdict.FENCED:
            self._drop(ownership)
            log.warning("partition %s: its journal is refused, another owner took its place", batch.key)
            self._writer.tell(JournalRefused(batch.key, batch.token))
        else:
            if verdict == Verdict.EMPTIED and ownership not in self._later:
                log.warning("partition %s: Redis lost its owner token; its journal waits for a new one", batch.key)
            self._later[ownership] = now + RETRY_S
            if verdict == Verdict.GAP:
                log.error("partition %s: Redis lost part of its journal; a snapshot takes its place", batch.key)
                self._writer.tell(JournalLost(batch.key, batch.token))

    def _drop(self, ownership: Ownership) -> None:
        self.queues.pop(ownership, None)
        self._later.pop(ownership, None)
        self._writer.look_again()

    def writes(self, key: PartitionKey, lsn: int) -> bool:
        """Whether entries of the partition up to `lsn` are on their way, and not held up."""
        return not self._reason and any(
            o[0] == key and queue[0].lsn <= lsn and o not in self._later for o, queue in self.queues.items()
        )

    def suspect(self, reason: str) -> None:
        if not self._reason:
            self._reason = reason
            self._writer.storage(self._fsync, reason)
            self._wake.set()

    async def _rest(self, now: float) -> None:
        """Waits for entries, for the time of those that are to be tried again, or for Redis to be back."""
        until_s = min((at for o, at in self._later.items() if o in self.queues), default=None)
        timeout_s = None if until_s is None else max(0.0, until_s - now)
        if self._reason:
            timeout_s = PROBE_S
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            if self._reason:
                await self._probe()

    async def _probe(self) -> None:
        try:
            await self._journal.probe(fsync=self._fsync)
        except (RedisError, OSError, PsError) as error:
            self._failed(error)
        else:
            self._works()

    def _failed(self, error: Exception) -> None:
        self._reason = f"Redis does not answer: {error}" if not isinstance(error, PsError) else str(error)
        self._writer.storage(self._fsync, self._reason)

    def _works(self) -> None:
        self._reason = ""
        self._writer.storage(self._fsync, "")
