"""What comes out of the shard's core: every effect, and what effects are made of."""

from typing import TypeAlias

from msgspec import Struct

from paramserver.core.journal import JournalEntry
from paramserver.core.layout import Layout
from paramserver.core.optimizer import SegmentStep
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.core.partition_state import Capture, PartitionState
from paramserver.core.shard_events import AssignPart, Request, Source
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError
from paramserver.types import AnyArray, Coding, ModelKey, PartitionKey, PushState, Token


class LoadPartition(Struct, frozen=True):
    """Read the partition's state from its source and answer with `PartitionLoaded` or `LoadFailed`.

    "init" and a "snapshot" that was never stored give the initial values of the spec at version 0.  Where the model's
    level is above `applied`, "snapshot" and "init" are followed by the journal after them (`core.replay`).
    """

    key: PartitionKey
    token: Token
    source: Source
    spec: ModelSpec
    layout: Layout


class Piece(Struct, frozen=True):
    """A range of a partition and the gradients whose weighted sum it gets."""

    start: int
    stop: int
    parts: tuple[tuple[AnyArray, Coding, float], ...]
    """(elements of [start, stop), their dtype, weight), to be summed in this order; an encoded one holds the whole
    partition."""


class UpdateTask(Struct, frozen=True):
    """One optimizer step of one partition.

    The gradient is, on each piece, the weighted sum of its parts over `divisor` (`kernels.mean`); elements outside
    all pieces are in inactive steps.  Where `direct` is given it is the whole gradient, taken as it is.
    """

    key: PartitionKey
    state: PartitionState
    """What it starts from."""
    optimizer: OptimizerSpec
    steps: tuple[SegmentStep, ...]
    """Cover the partition in order; for `kernels.apply`."""
    counts: tuple[int, ...]
    """`PartitionState.steps` of the result."""
    direct: tuple[AnyArray, Coding] | None
    pieces: tuple[Piece, ...] = ()
    divisor: float = 1.0
    spend: bool = False
    """Nobody needs `direct` once this task is done: its memory may take another task's result."""
    look: bool = False
    """Nobody has looked at `direct` yet: its checksum is part of the result."""


class AssignTask(Struct, frozen=True):
    """New values for ranges of one partition; everything else is kept."""

    key: PartitionKey
    state: PartitionState
    part: AssignPart


Task: TypeAlias = UpdateTask | AssignTask


class Apply(Struct, frozen=True):
    """Compute these tasks into new buffers and answer with `Applied`; the tasks are of different partitions.

    It is all that one event has made due: a push, or a commit on every partition.
    """

    job: int
    tasks: tuple[Task, ...]


class PartVersion(Struct, frozen=True):
    """Where one partition stands, as replies tell it."""

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
    version: int
    """The lowest over the parts; of a duplicate the original one; of a staged or buffered push the one before."""
    durable_version: int
    """The lowest over the parts, as of now."""
    incarnation: Token
    """The highest over the parts, as of now."""
    parts: tuple[PartVersion, ...]
    late: bool = False
    """sync with `late: drop`: its clock had been committed, so it was discarded."""
    lag_unknown: bool = False
    """A base version was of another incarnation, so its lag counts as 0."""


class PulledPart(Struct, frozen=True):
    """One partition of a pull."""

    partition: int
    state: PartitionState
    version: int
    incarnation: Token


class PullDone(Struct, frozen=True):
    """The values asked for, in the order asked; the states stay valid for as long as they are referenced."""

    model: ModelKey
    timeline: int
    version: int
    """The lowest over the parts."""
    incarnation: Token
    """The highest over the parts."""
    parts: tuple[PulledPart, ...]


Outcome: TypeAlias = PushDone | PullDone | Capture | PsError


class Reply(Struct, frozen=True):
    """Answer that request: exactly one for each; the runtime ignores one for a request whose client has gone."""

    request: Request
    outcome: Outcome


class StoreSnapshot(Struct, frozen=True):
    """Write that capture to Redis under its token; answer with `SnapshotStored` or `SnapshotFailed`."""

    capture: Capture
    cut: bool
    """Whether it is a cut of a synchronous model, known by `capture.clock`; the store keeps the last two cuts."""
    urgent: bool = False
    """Somebody waits for it (a move, an emptied Redis): write it at once, outside the budget."""
    fsync: bool = False
    """Stored means on disk, as at level `fsynced`."""


class Journal(Struct, frozen=True):
    """Append these to the journals of their partitions, in this order, and all `Journal` effects in theirs.

    Answer with `Journaled` for the last one of each partition when it is durable, or with `JournalRefused`.  While
    Redis is away they wait; those of a partition whose token Redis does not know (it was emptied) wait too, until the
    partition's token is renewed, which makes them void: `SnapshotStored` then speaks for them.
    """

    entries: tuple[JournalEntry, ...]
    """At least one; several of one partition follow each other without a hole."""
    fsync: bool
    """Durable means on disk (level `fsynced`)."""


class Report(Struct, frozen=True):
    """Send a heartbeat now: a partition is served, or a cut is stored."""


class AskWorker(Struct, frozen=True):
    """Ask the scheduler about a worker that the roster lacks; answer with `WorkerAnswered`."""

    request: Request
    model: ModelKey
    worker: str


class Resync(Struct, frozen=True):
    """A commit is missing: connect the feed again, which then tells everything once more."""

    model: ModelKey


Effect: TypeAlias = LoadPartition | Apply | Reply | StoreSnapshot | Journal | Report | AskWorker | Resync
