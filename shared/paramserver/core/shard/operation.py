"""Operations that change partitions: push, assignment, commit, flush, change of settings.

An operation is in the queue of each partition it touches and starts when it is first in all of them. So operations that
share a partition run in order of arrival, and one that touches several partitions runs on all or none.
`start` decides on the state at that moment and returns the tasks to compute; `finish` makes the results visible.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paramserver.core.shard.effects import Task
from paramserver.core.shard.events import PushReceived, SetReceived, TaskResult
from paramserver.core.shard.journal import config_head
from paramserver.core.shard.partition import Partition
from paramserver.core.shard.served_model import ServedModel
from paramserver.errors import PsError

if TYPE_CHECKING:
    from paramserver.core.shard.core import ShardCore


@dataclass(slots=True, eq=False)
class Operation:
    """One entry in the queues of the partitions it touches."""

    model: ServedModel
    partitions: list[Partition] = field(default_factory=list)
    """Partitions it touches on this shard; looked up again each time it is queued."""
    running: bool = False

    def start(self, shard: "ShardCore", now: float) -> Sequence[Task]:
        """Begin, and return the tasks to compute; none if the operation is already complete.

        One that has none may set `running` to end with those that start at the same moment.
        """
        raise NotImplementedError

    def finish(self, shard: "ShardCore", results: Sequence[TaskResult], now: float) -> None:
        """Make the results visible; they are in the order of the tasks, and none if it had none."""
        raise NotImplementedError

    def refuse(self, shard: "ShardCore", error: PsError) -> None:
        """Reject the operation; nothing has changed."""


@dataclass(slots=True, eq=False)
class RequestOperation(Operation):
    """A client's push or assignment, which is parked while one of its partitions is not ready (`request_desk`)."""

    event: PushReceived | SetReceived = field(kw_only=True)
    expires: float = field(kw_only=True)
    """Deadline for its partitions to be loaded and not suspended."""

    def refuse(self, shard: "ShardCore", error: PsError) -> None:
        shard.reply(self.event.request, error)


def record_settings_change(shard: "ShardCore", p: Partition, now: float, *, fresh: bool, unstage: bool = False) -> None:
    """Count a change of the partition's settings as a command, and journal it if the model has a journal."""
    p.lsn += 1
    if p.level:
        head = config_head(p.settings(), p.version, p.clock, fresh=fresh, unstage=unstage)
        shard.durability.executed(p, "config", head)
        shard.plan.changed(p, now)
