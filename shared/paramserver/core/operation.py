"""Operations that change partitions: push, assignment, commit, flush, change of settings.

An operation is in the queue of each partition it touches and starts when it is first in all of them. So operations that
share a partition run in order of arrival, and one that touches several partitions runs on all or none.
`start` decides on the state at that moment and returns the tasks to compute; `finish` makes the results visible.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paramserver.core.durability import Durability
from paramserver.core.journal import config_head
from paramserver.core.partition import Partition
from paramserver.core.partition_state import PartitionState
from paramserver.core.served_model import ServedModel
from paramserver.core.shard_effects import Effect, Outcome, Task
from paramserver.core.shard_events import PushPart, PushReceived, Request, SetReceived, TaskResult
from paramserver.core.snapshot_plan import SnapshotPlan
from paramserver.errors import PsError


class Shard(Protocol):
    """The part of the shard that operations use."""

    held_bytes: int
    """Bytes of staged and buffered gradients."""

    durability: Durability
    plan: SnapshotPlan

    def check_content(self, part: PushPart) -> PushPart:
        """Return the part with its checksum and whether its elements are finite."""

    def perform(self, effect: Effect) -> None:
        """Have the runtime perform an effect, after those before it."""

    def reply(self, request: Request, outcome: Outcome) -> None:
        """Answer a request."""

    def publish_version(self, partition: Partition, state: PartitionState, now: float) -> None:
        """Make `state` the partition's current version, one higher than the last."""

    def run_next(self, partition: Partition, operation: "Operation") -> None:
        """Run `operation` right after the current one, before everything that waits."""

    def flush_by(self, partition: Partition, at: float, now: float) -> None:
        """Flush the partition's buffer by time `at`; schedule a snapshot too, because snapshots include the buffer."""

    def committed(self, model: ServedModel, partition: Partition, now: float) -> None:
        """Go on after the partition applied a commit, skipped one of an older timeline, or entered a sync phase."""

    def settings_changed(self, partition: Partition, now: float) -> None:
        """Retry the pulls that wait for the partition and update its snapshot schedule after a change of settings."""


@dataclass(slots=True, eq=False)
class Operation:
    """One entry in the queues of the partitions it touches."""

    model: ServedModel
    partitions: list[Partition] = field(default_factory=list)
    """Partitions it touches on this shard; looked up again each time it is queued."""
    running: bool = False
    ended: bool = False

    def start(self, shard: Shard, now: float) -> Sequence[Task]:
        """Begin, and return the tasks to compute; none if the operation is already complete."""
        raise NotImplementedError

    def finish(self, shard: Shard, results: Sequence[TaskResult], now: float) -> None:
        """Make the results visible; they are in the order of the tasks."""
        raise NotImplementedError

    def refuse(self, shard: Shard, error: PsError) -> None:
        """Reject the operation; nothing has changed."""


@dataclass(slots=True, eq=False)
class RequestOperation(Operation):
    """A client's push or assignment, which is parked while one of its partitions is not ready (`requests`)."""

    event: PushReceived | SetReceived = field(kw_only=True)
    expires: float = field(kw_only=True)
    """Deadline for its partitions to be loaded and not held."""

    def refuse(self, shard: Shard, error: PsError) -> None:
        shard.reply(self.event.request, error)


def record_settings_change(shard: Shard, p: Partition, now: float, *, fresh: bool, unstage: bool = False) -> None:
    """Count a change of the partition's settings as a command, and journal it if the model has a journal."""
    p.lsn += 1
    if p.level:
        head = config_head(p.settings(), p.version, p.clock, fresh=fresh, unstage=unstage)
        shard.durability.executed(p, "config", head)
        shard.plan.changed(p, now)
