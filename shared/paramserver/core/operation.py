"""What changes partitions: a push, an assignment, a commit, a flush, a change of settings.

An operation stands in the line of each partition it touches and starts when it is first in all of them, so operations
that share a partition run in order of arrival and one of several partitions runs on all or on none.  `start` decides
by the state of that moment and returns what is to be computed; `finish` makes the results visible.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paramserver.core.durability import Durability
from paramserver.core.journal import config_head
from paramserver.core.partition import Partition
from paramserver.core.served_model import ServedModel
from paramserver.core.shard_io import Outcome, PartitionState, PushPart, Request, Task, TaskResult
from paramserver.errors import PsError


class Shard(Protocol):
    """What an operation does to the shard it runs in."""

    held_bytes: int
    """Bytes of staged and buffered gradients."""
    not_finite: int
    """Commits and flushes that changed nothing because their result was not finite."""

    durability: Durability

    def look(self, part: PushPart) -> PushPart:
        """The part, with what is in its elements."""

    def reply(self, request: Request, outcome: Outcome) -> None:
        """Answer a request."""

    def flip(self, partition: Partition, state: PartitionState, now: float) -> None:
        """The partition's next version becomes the present one."""

    def precede(self, partition: Partition, operation: "Operation") -> None:
        """Run that operation as soon as the present one is over, before all that waits."""

    def flush_by(self, partition: Partition, at: float, now: float) -> None:
        """Apply what the partition has buffered at that time at the latest; it is part of what a snapshot keeps."""

    def cut(self, partition: Partition) -> None:
        """Store the partition as it is now as a cut."""

    def committed(self, model: ServedModel, partition: Partition, now: float) -> None:
        """The partition has taken a commit, has passed over one of an older timeline, or begins a synchronous phase."""

    def remembers(self, partition: Partition, now: float) -> None:
        """The partition has changed otherwise than by a version, so that a snapshot of it is due."""

    def settings_changed(self, partition: Partition, now: float) -> None:
        """The partition has other settings now."""


@dataclass(slots=True, eq=False)
class Operation:
    """One entry of the partitions' lines."""

    model: ServedModel
    partitions: list[Partition] = field(default_factory=list)
    """Those it touches on this shard; resolved anew whenever it is put into the lines."""
    running: bool = False
    over: bool = False

    def start(self, shard: Shard, now: float) -> Sequence[Task]:
        """What is to be computed; nothing if the operation is over already."""
        raise NotImplementedError

    def finish(self, shard: Shard, results: Sequence[TaskResult], now: float) -> None:
        """The results are there, in the order of the tasks."""
        raise NotImplementedError

    def refuse(self, shard: Shard, error: PsError) -> None:
        """It cannot be done; nothing has changed."""


def configured(shard: Shard, p: Partition, now: float, *, fresh: bool, unstage: bool = False) -> None:
    """The partition has other settings in force."""
    p.lsn += 1
    if p.level:
        head = config_head(p.settings(), p.version, p.clock, fresh=fresh, unstage=unstage)
        shard.durability.executed(p, "config", head)
        shard.remembers(p, now)
