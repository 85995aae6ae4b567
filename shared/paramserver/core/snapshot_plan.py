"""When which partition is written to Redis: one at a time, oldest change first, within a budget of bytes per second."""

from collections import deque

from paramserver import limits
from paramserver.core.partition import Partition
from paramserver.core.shard_io import Capture, StoreSnapshot

_RETRY_S = 1.0


class SnapshotPlan:
    """Chooses the next snapshot.  Synchronous models are written at cuts only, everything else 5 s after a change."""

    def __init__(self) -> None:
        self._cuts: deque[Capture] = deque()
        self._due: dict[Partition, float] = {}  # changed since their last snapshot; the first is due first
        self._storing: tuple[Capture, bool] | None = None
        self._free_at = 0.0
        self.failed = 0
        """Failures since the last success."""

    def changed(self, partition: Partition, now: float) -> None:
        """The partition has a new version."""
        if partition.spec.consistency.mode != "sync":
            self._due.setdefault(partition, now + limits.SNAPSHOT_INTERVAL_S)

    def first(self, partition: Partition, now: float) -> None:
        """The partition has values that are in memory alone: uploaded ones cannot be drawn again, so it is due at once.

        In sync they are the cut to which a recovery before the first commit goes back.
        """
        if partition.spec.consistency.mode == "sync":
            self.cut(partition)
        else:
            self._due.pop(partition, None)
            self._due = {partition: now, **self._due}

    def cut(self, partition: Partition) -> None:
        """Capture the partition as it is now, to be stored under its clock.

        Of the cuts of one partition that wait, the oldest and the newest are kept: so one completes however fast
        they come.
        """
        capture = partition.capture()
        partition.cut = capture
        for extra in [c for c in self._cuts if c.key == capture.key][1:]:
            self._cuts.remove(extra)
        self._cuts.append(capture)

    def next(self, now: float) -> StoreSnapshot | None:
        """The snapshot to write now, if one is due and none is being written."""
        if self._storing is not None or now < self._free_at:
            return None
        if self._cuts:
            return self._begin(self._cuts.popleft(), True, now)
        first = next(iter(self._due), None)
        if first is None or now < self._due[first]:
            return None
        del self._due[first]
        return self._begin(first.capture(), False, now)

    def _begin(self, capture: Capture, cut: bool, now: float) -> StoreSnapshot:
        self._storing = (capture, cut)
        self._free_at = now + capture.nbytes / limits.SNAPSHOT_BYTES_PER_S
        return StoreSnapshot(capture, cut)

    def done(self, stored: bool, partition: Partition | None, now: float) -> bool:
        """The snapshot being written has come to its end; `partition` is None if it is no longer owned.

        Returns whether it was a cut that is stored now.
        """
        if self._storing is None:
            return False
        (capture, cut), self._storing = self._storing, None
        if partition is None or partition.token != capture.token:
            return False
        if stored:
            self.failed = 0
            partition.durable_version = max(partition.durable_version, capture.version)
            if cut:
                partition.cut_stored = capture.clock
            return cut
        self.failed += 1
        self._free_at = max(self._free_at, now + _RETRY_S)
        if cut:
            self._cuts.appendleft(capture)
        elif partition.spec.consistency.mode != "sync":
            self._due.pop(partition, None)
            self._due = {partition: now, **self._due}
        return False

    def forget(self, partition: Partition, *, cuts: bool = True) -> None:
        """That ownership has ended, or (without `cuts`) the model is synchronous now: what waits of it is dropped."""
        self._due.pop(partition, None)
        if cuts:
            self._cuts = deque(c for c in self._cuts if (c.key, c.token) != (partition.key, partition.token))

    def deadline(self) -> float | None:
        """When `next` may have something; None while a snapshot is being written or nothing has changed."""
        if self._storing is not None:
            return None
        if self._cuts:
            return self._free_at
        first = next(iter(self._due.values()), None)
        return None if first is None else max(first, self._free_at)
