"""Effects of the shard's core, and the structs they consist of; see `events`."""

from typing import TypeAlias

from msgspec import Struct

from paramserver.core.layout import Layout
from paramserver.core.optimizer import SegmentStep
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.core.partition_state import Capture, PartitionState
from paramserver.core.ranges import RangeArray
from paramserver.core.shard.events import AssignPart, Request, Source
from paramserver.core.shard.journal import JournalEntry
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError
from paramserver.types import AnyArray, Coding, ModelKey, PartitionKey, PushState, Token


class LoadPartition(Struct, frozen=True):
    """Read the partition's state from its source and answer with `PartitionLoaded` or `LoadFailed`.

    "init", and "snapshot" if none was ever stored, give the initial values of the spec at version 0; only "init" does
    if the spec does not tell them.  If the model's level is above `applied`, the journal is replayed on top of either
    (`core.shard.replay`).
    """

    key: PartitionKey
    token: Token
    source: Source
    spec: ModelSpec
    layout: Layout
    restored: bool = False
    """Whether a restore has given the model its first values, which the spec does not tell."""


GradientPart: TypeAlias = tuple[AnyArray, Coding, float, RangeArray | None]
"""A summand of a mean: (data, dtype, weight, ranges), of which the last is as in `PushPart`."""


class UpdateTask(Struct, frozen=True):
    """One optimizer step of one partition.

    If `direct` is given, it is the gradient, used unchanged: that of `ranges`, or of the whole partition.  Else the
    gradient is the weighted sum of `parts`, in their order, over `divisor` (`kernels.mean`).  Elements of which there
    is no gradient stay as they are.
    """

    key: PartitionKey
    state: PartitionState
    """The state before the step."""
    optimizer: OptimizerSpec
    steps: tuple[SegmentStep, ...]
    """Steps that cover the partition in order, one for each segment, for `kernels.apply`."""
    counts: tuple[int, ...]
    """`PartitionState.steps` of the result."""
    direct: tuple[AnyArray, Coding] | None
    ranges: RangeArray | None = None
    """Those of `direct`; None: the whole partition."""
    parts: tuple[GradientPart, ...] = ()
    divisor: float = 1.0
    reuse_direct: bool = False
    """`direct` is not needed once this task is done: its memory may be reused for another task's result."""
    needs_check: bool = False
    """`direct` has not been checked yet: do so, and return its checksum with the result."""


class AssignTask(Struct, frozen=True):
    """New values for ranges of one partition; everything else is kept."""

    key: PartitionKey
    state: PartitionState
    part: AssignPart


Task: TypeAlias = UpdateTask | AssignTask


class Apply(Struct, frozen=True):
    """Compute these tasks, each of a different partition, into new buffers and answer with `Applied`.

    They are all the tasks that one event has made due: those of a push, or of a commit on every partition.
    """

    job: int
    tasks: tuple[Task, ...]


class PartVersion(Struct, frozen=True):
    """Versions and incarnation of one partition, for replies."""

    partition: int
    version: int
    incarnation: Token
    durable_version: int


class PushDone(Struct, frozen=True):
    """The push is accepted (200 if `applied`, else 202); also the answer to a `SetReceived`."""

    model: ModelKey
    timeline: int
    state: PushState
    duplicate: bool
    """Whether every part was a duplicate."""
    parts: tuple[PartVersion, ...]
    """A duplicate's have the original version, a staged or buffered push's the one before it; the rest is as of now."""
    late: bool = False
    """sync: it was discarded, as its clock was committed without it."""

    @property
    def version(self) -> int:
        """The lowest over the parts; 0 if there are none."""
        return min([p.version for p in self.parts], default=0)

    @property
    def durable_version(self) -> int:
        """The lowest over the parts; 0 if there are none."""
        return min([p.durable_version for p in self.parts], default=0)

    @property
    def incarnation(self) -> Token:
        """The highest over the parts; 0 if there are none."""
        return max([p.incarnation for p in self.parts], default=0)


class PulledPart(Struct, frozen=True):
    """One partition of a pull."""

    partition: int
    state: PartitionState
    version: int
    incarnation: Token


class PullDone(Struct, frozen=True):
    """The requested partitions, in the requested order; their states stay valid while they are referenced."""

    model: ModelKey
    timeline: int
    parts: tuple[PulledPart, ...]

    @property
    def version(self) -> int:
        """The lowest over the parts."""
        return min([p.version for p in self.parts])

    @property
    def incarnation(self) -> Token:
        """The highest over the parts."""
        return max([p.incarnation for p in self.parts])


Outcome: TypeAlias = PushDone | PullDone | Capture | PsError


class Reply(Struct, frozen=True):
    """Answer a request; each gets exactly one, which the runtime ignores if the client has gone."""

    request: Request
    outcome: Outcome


class StoreSnapshot(Struct, frozen=True):
    """Write the capture to Redis, fenced by its token; answer with `SnapshotDone`."""

    capture: Capture
    cut: bool
    """Whether it is a cut of a sync model, identified by `capture.clock`; kept as `core.shard.retention` says."""
    urgent: bool = False
    """Write it at once, outside the budget: a move, a shutdown or an emptied Redis waits for it."""
    fsync: bool = False
    """It counts as stored only when it is on disk, as at level `fsynced`."""


class Journal(Struct, frozen=True):
    """Append entries to the journals of their partitions, in order, within and across `Journal` effects.

    Answer with `Journaled` for the last entry of each partition once it is durable, or with `JournalRefused`.  Entries
    wait while Redis is away.  If Redis does not know a partition's token (it was emptied), its entries wait until the
    token is renewed, which voids them: `SnapshotDone` then covers their commands.
    """

    entries: tuple[JournalEntry, ...]
    """At least one; those of one partition have consecutive lsns."""
    fsync: bool
    """They are durable only when they are on disk (level `fsynced`)."""


class Report(Struct, frozen=True):
    """Send a heartbeat now: a partition is served or released, or a cut is stored."""


class ValuesKept(Struct, frozen=True):
    """Report that a commit or flush left the values of a partition as they were, as its result was not finite."""

    key: PartitionKey


class AskWorker(Struct, frozen=True):
    """Ask the scheduler about a worker that the roster lacks; answer with `WorkerAnswered`."""

    request: Request
    model: ModelKey
    worker: str


class Resync(Struct, frozen=True):
    """Reconnect the feed, which then sends everything again: a commit is missing."""


Effect: TypeAlias = LoadPartition | Apply | Reply | StoreSnapshot | Journal | Report | ValuesKept | AskWorker | Resync
