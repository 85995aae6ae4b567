"""Schedules snapshots to Redis: one at a time, oldest change first, within a byte budget that their writer enforces.

Cuts go first, but while other snapshots are due too, both kinds get the same number of bytes.  A failed snapshot is
retried after a second: behind everything else that is due or, while other writes succeed, alternating with it.  So a
partition that Redis refuses does not hold up the others.

Urgent snapshots have a lane of their own, one at a time and outside the budget, because somebody waits for them.  Two
snapshots of the same partition are never in flight together, so the newest is the last one written.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from paramserver import limits
from paramserver.core.partition_state import Capture
from paramserver.core.shard.effects import StoreSnapshot
from paramserver.core.shard.partition import Partition
from paramserver.types import LEVELS, PartitionKey

_RETRY_S = 1.0


@dataclass(slots=True)
class _Lane:
    """At most one snapshot in flight."""

    storing: StoreSnapshot | None = None
    void: bool = False
    """The snapshot in flight does not count: Redis lost data meanwhile, perhaps parts of it."""
    retry_at: float = 0.0
    """No write before this time; set after failures in a row, when Redis itself is away and each attempt is costly."""
    failures: int = 0
    """Failures since the last success."""

    @property
    def key(self) -> PartitionKey | None:
        return None if self.storing is None else self.storing.capture.key


@dataclass(slots=True)
class _Failed:
    """A partition whose last snapshot failed."""

    partition: Partition
    at: float
    """Not retried before this time."""
    whole: bool
    """Its current state is due too, not only a cut."""


class SnapshotPlan:
    """Chooses the next snapshot.

    Synchronous models at level `applied` are written at cuts only, all others 5 s after a change.
    """

    def __init__(self) -> None:
        self._cuts: OrderedDict[PartitionKey, list[StoreSnapshot]] = OrderedDict()
        """Pending cuts of each partition, oldest first; the first partition is next."""
        self._due_now: dict[Partition, None] = {}  # due at once
        self._due: dict[Partition, float] = {}  # changed since their last snapshot, in order of due time
        self._failed: dict[PartitionKey, _Failed] = {}  # in neither _due_now nor _due; the oldest failure first
        self._was_retry = False  # whether the last snapshot of the normal lane was a retry
        self._urgent: dict[Partition, None] = {}
        self._fsync: set[Partition] = set()  # whose next snapshot must be on disk
        self._ahead_bytes = 0  # bytes of cuts minus bytes of others, while both are due
        self._normal_lane = _Lane()
        self._urgent_lane = _Lane()

    def changed(self, partition: Partition, now: float) -> None:
        """Note that the partition has a new version or remembers more pushes; ignored where only cuts are written."""
        if partition.by_cuts or partition in self._due_now:
            return
        if (failed := self._failed.get(partition.key)) is not None:
            failed.whole = True
        else:
            self._due.setdefault(partition, now + limits.SNAPSHOT_INTERVAL_S)

    def settings_changed(self, partition: Partition, now: float) -> None:
        """Note that the partition's settings have changed, perhaps its mode."""
        if partition.by_cuts:
            self.forget(partition, cuts=False)
        else:
            self.changed(partition, now)
        if partition.spec.consistency.mode != "sync":
            # No recovery goes back to its cuts any more, and one stored now would pass for the newest state.
            partition.cut = partition.cut_stored = None
            self._cuts.pop(partition.key, None)

    def initialized(self, partition: Partition) -> None:
        """Note that the partition has its initial values, which only memory holds.

        Assigned values cannot be drawn again, so they are due at once, as is every journaled partition.  Random values
        are stored once they change; otherwise thousands of partitions would be written only to repeat their spec.
        Where recoveries go back to cuts, the initial values are the first cut.
        """
        if partition.by_cuts:
            self.cut(partition)
        elif partition.lsn or partition.level:
            self.due_now(partition)

    def due_now(self, partition: Partition, *, fsync: bool = False) -> None:
        """Make the partition due at once, before those that have only changed."""
        self._due.pop(partition, None)
        if (failed := self._failed.get(partition.key)) is not None:
            failed.whole = True
        else:
            self._due_now[partition] = None
        if fsync:
            self._fsync.add(partition)

    def urgent(self, partition: Partition) -> None:
        """Have the partition written now, outside the budget; only its cuts, where recoveries go back to cuts.

        One that is suspended is written whole.
        """
        self._urgent[partition] = None

    def restore_lost(self, partition: Partition) -> None:
        """Write the whole partition now, because Redis has lost what it held; a snapshot of it in flight is void.

        A cut that is not stored yet is written first: the leader waits for it.
        """
        for lane, store in self._in_flight(partition):
            lane.void = True
            if partition.level:
                self._requeue_cut(partition, store)
        self.urgent(partition)

    def cut(self, partition: Partition, *, urgent: bool = False) -> None:
        """Capture the partition as it is now and store it as the cut of its clock; if `urgent`, outside the budget."""
        self.store_cut(partition, partition.capture(cut=True))
        if urgent:
            self.urgent(partition)

    def at_cut(self, partition: Partition) -> bool:
        """sync: whether a cut of the partition's current clock is stored, in flight or pending."""
        if partition.spec.consistency.mode != "sync":
            return False
        written = [store for lane, store in self._in_flight(partition) if not lane.void]
        stores = [*self._cuts.get(partition.key, ()), *written]
        about = {s.capture.clock for s in stores if s.cut and s.capture.token == partition.token}
        return partition.clock == partition.cut_stored or partition.clock in about

    def cut_waits(self, partition: Partition) -> bool:
        """Whether a cut of the partition is pending or in flight."""
        return partition.key in self._cuts or any(store.cut for _, store in self._in_flight(partition))

    def _in_flight(self, partition: Partition) -> list[tuple[_Lane, StoreSnapshot]]:
        """The partition's snapshots in flight, of which there is one at most, each with its lane."""
        lanes = (self._normal_lane, self._urgent_lane)
        return [(n, n.storing) for n in lanes if n.storing is not None and n.key == partition.key]

    def store_cut(self, partition: Partition, capture: Capture) -> None:
        """Store this cut of the partition.

        Only the oldest and the newest of its pending cuts are kept, so that one completes however fast they come.  Of
        two of the same clock, the newer one has values assigned since, and takes the other's place.
        """
        partition.cut = capture
        oldest = [s for s in self._cuts.get(capture.key, ())[:1] if s.capture.clock != capture.clock]
        self._cuts[capture.key] = [*oldest, StoreSnapshot(capture, True, fsync=partition.level == LEVELS["fsynced"])]

    def next(self, now: float) -> StoreSnapshot | None:
        """Return a snapshot to write now, if one is due and its lane is free; call until it returns None."""
        if self._urgent and (store := self._urgent_next(now)) is not None:
            self._urgent_lane.storing = store
            return store
        if self._normal_lane.storing is not None or now < self._normal_lane.retry_at:
            return None
        store = self._normal_next(now)
        if store is not None:
            self._normal_lane.storing = store
        return store

    def _urgent_next(self, now: float) -> StoreSnapshot | None:
        if self._urgent_lane.storing is not None or now < self._urgent_lane.retry_at:
            return None
        while (partition := self._first(self._urgent_ready(now), self._normal_lane)) is not None:
            if partition.key in self._cuts:
                # The cut is older than the whole state.  Written after it, the cut would be the newest snapshot: what
                # a new owner starts from, although the journal from there on is lost, or was never kept.
                return self._waiting_cut(partition.key, urgent=True)
            del self._urgent[partition]
            if partition.suspended or not partition.by_cuts or partition.mark.rebase is not None:
                return self._captured(partition, urgent=True)
            # Only its cuts were urgent, or its move was called off; a whole snapshot now would displace a cut.
        return None

    def _urgent_ready(self, now: float) -> Iterator[Partition]:
        """The urgent partitions, without those whose retry is not due yet."""
        return (p for p in self._urgent if (failed := self._failed.get(p.key)) is None or failed.at <= now)

    def _first(self, waiting: Iterable[Partition], other: _Lane) -> Partition | None:
        """The first waiting partition that the other lane is not writing."""
        for partition in waiting:
            if other.storing is None or partition.key != other.key:
                return partition
        return None

    def _normal_next(self, now: float) -> StoreSnapshot | None:
        cut, whole, failed = self._cut_next(), self._whole_next(now), self._retry_next()
        turn = (cut is None and whole is None) or (self._normal_lane.failures == 0 and not self._was_retry)
        if failed is not None and failed.at <= now and turn:
            self._was_retry = True
            key = failed.partition.key
            return self._waiting_cut(key) if key in self._cuts else self._captured(failed.partition)
        self._was_retry = False
        if cut is None or whole is None:
            self._ahead_bytes = 0
        if cut is not None and self._ahead_bytes <= 0:
            store = self._waiting_cut(cut)
        elif whole is not None:
            # A pending cut of it is older; written later, it would pass for the newest state.
            store = self._waiting_cut(whole.key) if whole.key in self._cuts else self._captured(whole)
        else:
            return None
        self._ahead_bytes += store.capture.nbytes if store.cut else -store.capture.nbytes
        return store

    def _cut_next(self) -> PartitionKey | None:
        """The next partition whose cut may be written; those of the urgent lane and failed ones are left out."""
        if not self._cuts:
            return None
        excluded = {self._urgent_lane.key, *(p.key for p in self._urgent)}
        return next((key for key in self._cuts if key not in excluded and key not in self._failed), None)

    def _retry_next(self) -> _Failed | None:
        """The oldest failure that has something to write and is not urgent."""
        for key, failed in self._failed.items():
            if (
                (failed.whole or key in self._cuts)
                and key != self._urgent_lane.key
                and failed.partition not in self._urgent
            ):
                return failed
        return None

    def _whole_next(self, now: float) -> Partition | None:
        """The partition whose current state is due."""
        partition = self._first(self._due_now, self._urgent_lane) if self._due_now else None
        if partition is None:
            partition = self._first(self._due, self._urgent_lane)
            if partition is None or now < self._due[partition]:
                return None
        return partition

    def _waiting_cut(self, key: PartitionKey, *, urgent: bool = False) -> StoreSnapshot:
        """Take the partition's oldest pending cut; its next one queues behind those of other partitions."""
        waiting = self._cuts[key]
        store = waiting.pop(0)
        if waiting:
            self._cuts.move_to_end(key)
        else:
            del self._cuts[key]
        return replace(store, urgent=urgent)

    def _captured(self, partition: Partition, *, urgent: bool = False) -> StoreSnapshot:
        """Capture the partition as it is now; nothing of it is due any more."""
        self._due_now.pop(partition, None)
        self._due.pop(partition, None)
        if (failed := self._failed.get(partition.key)) is not None:
            failed.whole = False
        partition.mark.since_snapshot_bytes = 0
        fsync = partition in self._fsync or partition.level == LEVELS["fsynced"]
        self._fsync.discard(partition)
        return StoreSnapshot(partition.capture(), False, urgent, fsync)

    def done(self, stored: bool, urgent: bool, partition: Partition | None, now: float) -> StoreSnapshot | None:
        """End the snapshot in flight and return it if it is stored and counts.

        `partition` is None if it is no longer owned.
        """
        lane = self._urgent_lane if urgent else self._normal_lane
        store, lane.storing = lane.storing, None
        void, lane.void = lane.void, False
        if store is None or partition is None or partition.token != store.capture.token:
            return None
        if store.fsync and (void or not stored):
            self._fsync.add(partition)
        if void:
            return None
        failed = self._failed.pop(partition.key, None)
        if stored:
            lane.failures = 0
            if failed is not None and failed.whole:
                self.due_now(partition)
            if store.cut and partition.cut is not None:  # else the model left sync meanwhile
                partition.cut_stored = store.capture.clock
            return store
        lane.failures += 1
        if lane.failures > 1:
            lane.retry_at = now + _RETRY_S
        due = partition in self._due_now or partition in self._due or (failed is not None and failed.whole)
        self._due_now.pop(partition, None)
        self._due.pop(partition, None)
        if urgent:  # behind the others
            self._urgent.pop(partition, None)
            self.urgent(partition)
        whole = not self._requeue_cut(partition, store) and not urgent and not partition.by_cuts
        self._failed[partition.key] = _Failed(partition, now + _RETRY_S, whole or due)
        return None

    def _requeue_cut(self, partition: Partition, store: StoreSnapshot) -> bool:
        """Make an unstored cut its partition's next one again, if it still counts; return whether it does."""
        mine = store.capture.token == partition.token
        counts = store.cut and mine and partition.cut is not None and not partition.suspended
        if counts:
            self._cuts.setdefault(partition.key, []).insert(0, store)
        return counts

    def forget(self, partition: Partition, *, cuts: bool = True) -> None:
        """Drop what is pending: the ownership has ended or is suspended, or (without `cuts`) the model is in sync."""
        self._due.pop(partition, None)
        self._due_now.pop(partition, None)
        if (failed := self._failed.get(partition.key)) is not None and failed.partition is partition:
            failed.whole = False
            if cuts:
                del self._failed[partition.key]
        if not partition.mark.waiting:
            self._fsync.discard(partition)
        if cuts:
            if partition.mark.rebase is None:
                self._urgent.pop(partition, None)
            self._cuts.pop(partition.key, None)

    def deadline(self) -> float | None:
        """When `next` may have something; None while all that is pending is in flight, or nothing has changed."""
        normal = self._normal_deadline() if self._normal_lane.storing is None else None
        urgent = self._urgent_deadline() if self._urgent and self._urgent_lane.storing is None else None
        return urgent if normal is None else normal if urgent is None else min(normal, urgent)

    def _urgent_deadline(self) -> float | None:
        soonest: float | None = None
        for p in self._urgent:
            if self._normal_lane.storing is not None and p.key == self._normal_lane.key:
                continue
            failed = self._failed.get(p.key)
            if failed is None:
                return self._urgent_lane.retry_at
            soonest = failed.at if soonest is None else min(soonest, failed.at)
        return None if soonest is None else max(soonest, self._urgent_lane.retry_at)

    def _normal_deadline(self) -> float | None:
        if self._cut_next() is not None:
            return self._normal_lane.retry_at
        if self._due_now and self._first(self._due_now, self._urgent_lane) is not None:
            return self._normal_lane.retry_at
        first, failed = self._first(self._due, self._urgent_lane), self._retry_next()
        times = [*(() if first is None else (self._due[first],)), *(() if failed is None else (failed.at,))]
        return max(min(times), self._normal_lane.retry_at) if times else None
