"""How much of what a partition executed is durable, and which replies wait for more of it."""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from paramserver.core.shard_io import PushDone, Request

if TYPE_CHECKING:
    from paramserver.core.partition import Partition

LEVELS: Final[dict[str, int]] = {"applied": 0, "journaled": 1, "fsynced": 2}
"""What survives: nothing but the process, the loss of the process, the loss of Redis's machine's memory."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A reply that waits until what it acknowledges is durable."""

    request: Request
    done: PushDone
    partitions: list["Partition"]
    """In the order of the reply's parts."""
    until: float
    left: int = 0
    """Partitions that are not durable enough yet."""
    over: bool = False
    """It was answered."""


@dataclass(slots=True, eq=False)
class Watermark:
    """The durable part of one partition's commands, by lsn.  Mutated by `Durability` alone."""

    journaled: int = 0
    """Up to here the journal reaches, as far as it was told."""
    stored: int = 0
    """Up to here everything is in Redis, by journal or snapshot."""
    synced: int = -1
    """Up to here everything is on disk; -1: not known to be."""
    rebase: int | None = None
    """The journal in Redis has a hole before this lsn: it counts again with a snapshot of this lsn or later."""
    queued: deque[tuple[int, int, int, int]] = field(default_factory=deque)
    """(lsn, version, clock, bytes) of entries that are not durable yet."""
    since_snapshot_bytes: int = 0
    """Journal since the last snapshot was captured."""
    waiting: list[tuple[int, int, Waiting]] = field(default_factory=list)
    """(lsn, level, reply)."""

    def durable(self, level: int) -> int:
        """The lsn up to which everything is durable at that level."""
        return self.synced if level == LEVELS["fsynced"] else self.stored
