"""How far a partition's executed commands are durable, and which replies wait for more of them."""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paramserver.core.shard.effects import PushDone
from paramserver.core.shard.events import Request
from paramserver.core.shard.timers import Timer
from paramserver.types import LEVELS

if TYPE_CHECKING:
    from paramserver.core.shard.partition import Partition


@dataclass(slots=True, eq=False)
class Waiting:
    """A reply held back until what it acknowledges is durable."""

    request: Request
    done: PushDone
    partitions: list["Partition"]
    """In the order of the reply's parts."""
    left: int = 0
    """Partitions that are not durable enough yet."""
    answered: bool = False
    timer: Timer | None = None
    """Refuses it at its deadline."""


@dataclass(slots=True, eq=False)
class Watermark:
    """How far one partition's commands are durable, in lsns.  Mutated by `Durability` alone."""

    journaled: int = 0
    """Highest lsn confirmed to be in the journal."""
    stored: int = 0
    """lsn up to which everything is in Redis, by journal or snapshot."""
    synced: int = -1
    """lsn up to which everything is on disk; -1: unknown."""
    rebase: int | None = None
    """If set, the journal in Redis has a hole before this lsn and counts only after a snapshot of this lsn or later."""
    queued: deque[tuple[int, int, int, int]] = field(default_factory=deque)
    """(lsn, version, clock, bytes) of entries that are not durable yet."""
    since_snapshot_bytes: int = 0
    """Journal bytes since the last snapshot was captured."""
    waiting: deque[tuple[int, int, Waiting]] = field(default_factory=deque)
    """(lsn, level, reply) of each reply that waits for this partition, oldest first."""

    def durable(self, level: int) -> int:
        """The lsn up to which everything is durable at that level."""
        return self.synced if level == LEVELS["fsynced"] else self.stored
