"""Journaling of commands, and replies that wait until what they acknowledge is durable (semantics 3 and 7).

A command is applied in memory, then journaled; its reply waits for the watermark of every partition it touched.  The
reply to a duplicate waits for everything its partitions have executed so far.  A reply above the model's own level
waits for a snapshot, which is scheduled at once.  A push at level `applied` pays for none of this.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from paramserver import limits
from paramserver.core.partition_state import Capture
from paramserver.core.shard.effects import Journal, Outcome, PushDone
from paramserver.core.shard.events import Request
from paramserver.core.shard.journal import JournalEntry
from paramserver.core.shard.partition import Partition
from paramserver.core.shard.timers import Timers
from paramserver.core.shard.watermark import Waiting
from paramserver.errors import PsError, problem
from paramserver.types import LEVELS, AnyArray

if TYPE_CHECKING:
    from paramserver.core.shard.core import ShardCore

_FSYNCED = LEVELS["fsynced"]


class Durability:
    """The journal of one shard's partitions and the replies that wait for it."""

    def __init__(self, shard: "ShardCore", timers: Timers) -> None:
        self.storage = ""
        """Why nothing can be made durable now; empty if it can."""
        self.fsync_refused = ""
        """Why level `fsynced` cannot be reached now; empty if it can."""
        self.queued_bytes = 0
        """Bytes of entries that are not durable yet."""
        self._shard = shard
        self._timers = timers
        self._entries: tuple[list[JournalEntry], list[JournalEntry]] = ([], [])  # at level journaled; at level fsynced

    # --- executed commands

    def admit(self, level: int, nbytes: int) -> None:
        """Raise Unavailable if a command that must become durable at that level cannot be accepted now."""
        reason = self.storage or (self.fsync_refused if level == _FSYNCED else "")
        if reason:
            raise problem("storage_unavailable", reason, hint="nothing was changed; send it again")
        if self.queued_bytes and self.queued_bytes + nbytes > limits.JOURNAL_QUEUE_BYTES_MAX:
            raise problem("queue_full", f"the shard's journal queue is full ({self.queued_bytes} bytes)")

    def executed(self, p: Partition, kind: str, head: Mapping[str, Any], arrays: tuple[AnyArray, ...] = ()) -> None:
        """Queue the journal entry of the command just executed as `p.lsn`."""
        entry = JournalEntry(p.key, p.token, p.lsn, kind, head, arrays)
        self._entries[p.level == _FSYNCED].append(entry)
        size = entry.nbytes
        p.mark.queued.append((p.lsn, p.version, p.clock, size))
        self.queued_bytes += size
        p.mark.since_snapshot_bytes += size
        if p.mark.since_snapshot_bytes >= limits.SNAPSHOT_JOURNAL_BYTES:
            self._shard.plan.due_now(p)

    def effects(self) -> list[Journal]:
        """Return and clear the journal entries queued since the last call."""
        if not any(self._entries):
            return []
        (stored, synced), self._entries = self._entries, ([], [])
        return [Journal(tuple(e), fsync) for e, fsync in ((stored, False), (synced, True)) if e]

    # --- waiting replies

    def acknowledge(
        self, request: Request, done: PushDone, partitions: Sequence[Partition], level: int, now: float
    ) -> None:
        """Answer once everything these partitions have executed so far is durable at that level."""
        waiting = Waiting(request, done, list(partitions))
        for p in partitions:
            if level and p.lsn > p.mark.durable(level):
                waiting.left += 1
                p.mark.waiting.append((p.lsn, level, waiting))
                if level > p.level or not p.mark.queued:  # no journal entry will make it so
                    self._shard.plan.due_now(p, fsync=level == _FSYNCED)
        if waiting.left:
            waiting.timer = self._timers.at(now + limits.JOURNAL_WAIT_S, lambda now: self._give_up(waiting))
        else:
            self._answer(waiting)

    def _answer(self, waiting: Waiting) -> None:
        """Send the reply, with the current durable versions and incarnations."""
        done = waiting.done
        parts = tuple(p.part_version(part.version) for p, part in zip(waiting.partitions, done.parts, strict=True))
        self._end(waiting, replace(done, parts=parts))

    def _refuse(self, waiting: Waiting, error: PsError) -> None:
        """Answer with an error.

        Its member `push` says that the push was accepted, so its memory may still be read and must not be reused.
        """
        done = {"state": waiting.done.state, "duplicate": waiting.done.duplicate, "version": waiting.done.version}
        self._end(waiting, error.plus(push=done))

    def _give_up(self, waiting: Waiting) -> None:
        reason = self.storage or "Redis did not make it durable in time"
        hint = "the push is in doubt: send it again under its id; without one it may count twice"
        self._refuse(waiting, problem("storage_unavailable", reason, hint=hint))
        for p in waiting.partitions:  # nothing else would clear them while no write succeeds
            while p.mark.waiting and p.mark.waiting[0][2].answered:
                p.mark.waiting.popleft()

    def _end(self, waiting: Waiting, outcome: Outcome) -> None:
        waiting.answered = True
        if waiting.timer is not None:
            self._timers.cancel(waiting.timer)
        self._shard.reply(waiting.request, outcome)

    # --- progress of durability

    def journaled(self, p: Partition, lsn: int) -> None:
        """Note that the journal reaches that lsn."""
        p.mark.journaled = max(p.mark.journaled, lsn)
        if p.mark.rebase is None:
            self._advance(p, lsn, synced=p.level == _FSYNCED)

    def snapshot(self, p: Partition, capture: Capture, fsync: bool) -> None:
        """Note that a snapshot is stored."""
        mark, lsn = p.mark, capture.lsn
        if mark.rebase is not None and lsn >= mark.rebase:
            mark.rebase, lsn = None, max(lsn, mark.journaled)
        p.durable_version = max(p.durable_version, capture.version)
        p.durable_clock = max(p.durable_clock, capture.clock)
        self._advance(p, lsn, synced=fsync)

    def rebase(self, p: Partition) -> None:
        """Require a full snapshot before the journal, or a move, goes on: Redis lost data of this partition."""
        p.mark.rebase, p.mark.stored, p.mark.synced = p.lsn, -1, -1
        p.released = False
        self._shard.plan.restore_lost(p)

    def _advance(self, p: Partition, lsn: int, *, synced: bool) -> None:
        mark = p.mark
        mark.stored = max(mark.stored, lsn)
        if synced:
            mark.synced = max(mark.synced, lsn)
        while mark.queued and mark.queued[0][0] <= lsn:
            _, version, clock, size = mark.queued.popleft()
            p.durable_version = max(p.durable_version, version)
            p.durable_clock = max(p.durable_clock, clock)
            self.queued_bytes -= size
        if mark.waiting:
            self._progress(p)

    def _progress(self, p: Partition) -> None:
        waiting, p.mark.waiting = p.mark.waiting, deque()
        for lsn, level, reply in waiting:
            if reply.answered:
                continue
            if lsn > p.mark.durable(level):
                p.mark.waiting.append((lsn, level, reply))
                continue
            reply.left -= 1
            if not reply.left:
                self._answer(reply)

    def refuse(self, p: Partition, error: PsError) -> None:
        """Refuse the waiting replies of a partition that is no longer served here."""
        waiting, p.mark.waiting = p.mark.waiting, deque()
        for _, _, reply in waiting:
            if not reply.answered:
                self._refuse(reply, error)
        self.queued_bytes -= sum(size for *_, size in p.mark.queued)
        p.mark.queued.clear()
        p.mark.rebase = None
