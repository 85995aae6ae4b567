"""What Redis holds of this shard's partitions: snapshots are stored here, and why something is not stored is known."""

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from redis.exceptions import RedisError

from paramserver.core.shard.core import ShardCore
from paramserver.core.shard.effects import StoreSnapshot
from paramserver.core.shard.events import Event, JournalLost, SnapshotDone
from paramserver.errors import PsError
from paramserver.types import PartitionKey, Token
from paramserver_node.crash import crash_point
from paramserver_node.redis import AWAY, leave_after, trouble
from paramserver_shard.directory import Directory
from paramserver_shard.journal_writer import JournalWriter
from paramserver_shard.snapshot_format import to_stored
from paramserver_shard.snapshot_store import SaveResult, SnapshotStore

log = logging.getLogger("paramserver.shard")

JOURNAL_AHEAD_S: Final = 10.0
"""Longest wait of a snapshot for the journal entries it includes; written before them, it could leave a hole."""
_WHY: Final = {
    SaveResult.EMPTIED: "Redis has no owner token of it, because its model was deleted or Redis was emptied",
    SaveResult.FENCED: "another shard owns it now",
    SaveResult.BLOCKS_GONE: "Redis lost a part while it was written",
}
"""Why a snapshot that Redis answered is not stored."""


class Storage:
    """Stores snapshots, and feeds to the core what came of it."""

    def __init__(
        self,
        core: ShardCore,
        directory: Directory,
        store: SnapshotStore,
        writer: JournalWriter,
        feed: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`spawn` runs work in a task of its own."""
        self._core = core
        self._directory = directory
        self._store = store
        self._writer = writer
        self._feed = feed
        self._spawn = spawn
        self._snapshot_errors: dict[tuple[PartitionKey, Token], str] = {}
        """Why the newest snapshot of a partition is not stored, by ownership; whatever else Redis answers meanwhile."""
        self._redis_error = ""
        self._redis_run_id = ""

    @property
    def degraded(self) -> str:
        """Reason why writes cannot be made durable now; empty when they can."""
        for ownership in [o for o in self._snapshot_errors if not self._core.owns(*o)]:
            del self._snapshot_errors[ownership]
        return self._redis_error or next(iter(self._snapshot_errors.values()), "")

    @property
    def redis_away(self) -> bool:
        """Whether Redis did not answer when it was last asked, so that no partition can be handed over or loaded."""
        return bool(self._redis_error)

    def hurry(self) -> None:
        """Write snapshots as fast as Redis takes them from now on."""
        self._store.hurry()

    async def store_snapshot(self, effect: StoreSnapshot) -> None:
        """Store a snapshot once the journal entries that it includes are written."""
        capture = effect.capture
        key, token, version = capture.key, capture.token, capture.version
        await self._writer.written(key, capture.lsn, JOURNAL_AHEAD_S)
        head, arrays = to_stored(capture)
        cut = capture.clock if effect.cut else None
        known = self._directory.models.get(key.model.name)
        pinned = known.pinned if known is not None and known.key == key.model else None
        saved: SaveResult | None = None
        try:
            saved = await self._store.save(
                key,
                token,
                version,
                head,
                arrays,
                lsn=capture.lsn,
                cut=cut,
                pinned=pinned,
                urgent=effect.urgent,
                fsync=effect.fsync,
            )
        except PsError as error:
            if self._snapshot_errors.get((key, token)) != str(error):
                log.error("partition %s cannot be snapshotted: %s", key, error)
            self._snapshot_errors[key, token] = str(error)
        except (RedisError, OSError) as error:
            if effect.urgent and not effect.cut and isinstance(error, AWAY):  # a move that waits may be called off
                self.redis_failed(error)
            else:
                self._note_failure(error)
                self._snapshot_errors[key, token] = trouble(error)
        else:
            if saved is SaveResult.EMPTIED:
                self._snapshot_errors[key, token] = "Redis was emptied"
            else:
                self._snapshot_errors.pop((key, token), None)
            if saved is not SaveResult.STORED:
                log.warning("partition %s: its snapshot of version %d is not stored: %s", key, version, _WHY[saved])
        if effect.urgent:
            crash_point("shard.release_stored")
        self._feed(SnapshotDone(key, token, saved is SaveResult.STORED, effect.urgent))

    def redis_failed(self, error: Exception) -> None:
        """Note that Redis did not answer a request, or refused it: nothing counts as durable until it answers."""
        self._note_failure(error)
        self._redis_error = trouble(error)

    def _note_failure(self, error: Exception) -> None:
        """Log what Redis did not do, unless its last failure is not over, and tell the journals."""
        reasons = (self._redis_error, *self._snapshot_errors.values(), self._writer.reason)
        if not any(reason.startswith("Redis ") for reason in reasons):
            log.warning("writes are not durable for now: %s", trouble(error))
        self._writer.note_failure(trouble(error))
        self.leave_idle(error)

    def leave_idle(self, error: Exception) -> None:
        """After an error that may be that of every connection to Redis, close the idle ones."""
        self._spawn(leave_after(error, *self._store.clients))

    def redis_answered(self, run_id: str) -> None:
        """Note that Redis has answered; a `run_id` other than before means that it was restarted."""
        self._redis_error = ""
        if run_id != self._redis_run_id:
            if self._redis_run_id:
                self._spawn(self.check_after_restart())
            self._redis_run_id = run_id

    async def check_after_restart(self) -> None:
        """After a restart of Redis, have partitions stored again of which it has lost something."""
        parts = [p for m in self._core.models.values() for p in m.partitions.values() if p.state is not None]
        known = [(p.key, p.token, p.mark.stored) for p in parts]
        try:
            found = await self._store.last_lsns([key for key, _, _ in known])
        except (RedisError, OSError) as error:
            self.redis_failed(error)
            self._redis_run_id = "?"  # matches no process, so this runs again when Redis answers
            return
        for (key, token, lsn), in_redis in zip(known, found, strict=True):
            if in_redis < lsn:
                log.error("partition %s: Redis restarted without its latest data; storing it again", key)
                self._feed(JournalLost(key, token, restarted=True))
