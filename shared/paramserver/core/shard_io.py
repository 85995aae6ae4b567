"""What goes into the shard's core and what comes out: every event and every effect.

`ShardCore.handle(event, now)` takes one event and returns effects, which the runtime performs in their order; what an
effect brings about comes back as an event.  All of them are frozen; big arrays travel by reference and are never
written after they were handed over.  A `request` is a number that the runtime chose, unique among those it has open.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from paramserver.core.layout import Layout, Range
from paramserver.core.optimizer import SegmentStep
from paramserver.core.partition_state import Capture as Capture
from paramserver.core.partition_state import HeldPart as HeldPart
from paramserver.core.partition_state import LoadedState as LoadedState
from paramserver.core.partition_state import PartitionState as PartitionState
from paramserver.core.spec import ModelSpec, OptimizerSpec
from paramserver.errors import PsError
from paramserver.types import F32, AnyArray, DType, ModelKey, PartitionKey, PushId, PushState, Token

Request: TypeAlias = int
"""The runtime's number of one request that waits for an outcome."""

# --- the events


@dataclass(frozen=True, slots=True)
class MapChanged:
    """The cluster map has a new epoch; 421 answers quote it."""

    map_epoch: int


@dataclass(frozen=True, slots=True)
class Contribution:
    """One entry of a commit's list: what (worker, epoch) pushed for `clock`."""

    worker: str
    epoch: int
    rank: int
    clock: int
    weight: float = 1.0
    """What it adds to the divisor."""


@dataclass(frozen=True, slots=True)
class CommitDecided:
    """The leader has decided commit `t`: exactly these contributions, in (rank, clock) order, on every partition."""

    model: ModelKey
    timeline: int
    t: int
    contributions: tuple[Contribution, ...]
    revision: int
    live_workers: int
    cut: bool
    """Whether every partition is to be snapshotted right after this commit."""

    @classmethod
    def from_document(cls, doc: Mapping[str, Any], model: ModelKey) -> Self:
        """The commit that a feed document of type `commit`, or an entry of a model's `commits`, describes."""
        return cls(
            model,
            int(doc["timeline"]),
            int(doc["t"]),
            tuple(Contribution(str(w), int(e), int(r), int(c), float(x)) for w, e, r, c, x in doc["contributions"]),
            int(doc["revision"]),
            int(doc["live_workers"]),
            bool(doc["cut"]),
        )


Source: TypeAlias = str | int
"""Where a partition's first state comes from: "init", "snapshot" (the newest good one), or the clock of a cut."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """All that this shard must know of one model, as the scheduler's feed says it now (level-triggered)."""

    model: ModelKey
    spec: ModelSpec
    layout: Layout
    """Keep one per generation: it caches what it computes."""
    revision: int
    timeline: int
    clock: int
    """sync: the next commit's `t`."""
    live_workers: int
    ready: bool
    """False while initial values are being uploaded."""
    owned: Mapping[int, Token]
    """Partitions of this shard, with their owner tokens."""
    source: Source
    workers: Mapping[str, tuple[int, int]]
    """The live roster: worker -> (epoch, rank)."""
    commits: tuple[CommitDecided, ...] = ()
    """The newest commits of this timeline, oldest first."""

    @classmethod
    def from_document(cls, doc: Mapping[str, Any], shard: str, spec: ModelSpec, layout: Layout) -> Self:
        """The view that a feed document of type `model` gives the shard of that name."""
        model = ModelKey(str(doc["name"]), int(doc["generation"]))
        source = doc.get("source", "snapshot")
        return cls(
            model,
            spec,
            layout,
            int(doc["revision"]),
            int(doc["timeline"]),
            int(doc["clock"]),
            int(doc["live_workers"]),
            doc["state"] == "ready",
            {i: int(owner[1]) for i, owner in enumerate(doc["owners"]) if owner and owner[0] == shard},
            int(source["cut"]) if isinstance(source, Mapping) else str(source),
            {str(w): (int(v[0]), int(v[1])) for w, v in doc.get("workers", {}).items()},
            tuple(CommitDecided.from_document(c, model) for c in doc.get("commits", ())),
        )


@dataclass(frozen=True, slots=True)
class RosterChanged:
    """Workers have joined, left or died."""

    model: ModelKey
    workers: Mapping[str, tuple[int, int]]
    """worker -> (epoch, rank), all that are live."""
    live_workers: int


@dataclass(frozen=True, slots=True)
class ModelGone:
    """The model was deleted, or created anew under another generation."""

    model: ModelKey


@dataclass(frozen=True, slots=True)
class PartitionLoaded:
    """`LoadPartition` has succeeded."""

    key: PartitionKey
    token: Token
    loaded: LoadedState


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """`LoadPartition` has failed; it is asked for again after a second, and requests are told the reason."""

    key: PartitionKey
    token: Token
    error: PsError


@dataclass(frozen=True, slots=True)
class PushPart:
    """One partition's slice of a push."""

    partition: int
    data: AnyArray
    """1-D, little-endian, of `dtype` (bfloat16 as uint16): the ranges' elements end to end.  It is kept until the push
    is applied or dropped: its memory must not be used again before the core lets go of it."""
    dtype: DType
    crc: int
    """`wire.tensor.slice_crc(dtype, ranges, data)`, with ranges ((0, size),) for a whole partition."""
    finite: bool
    """Whether all elements are finite, tested by the runtime in the same pass as the checksum."""
    ranges: tuple[Range, ...] | None = None
    """Relative to the partition, sorted and disjoint; None: the whole partition."""
    base: tuple[int, int] | None = None
    """(version, incarnation) the gradient was computed from."""


@dataclass(frozen=True, slots=True)
class PushReceived:
    """A push, direct or by name, with its body read to the end, split into the parts this shard owns."""

    request: Request
    model: str
    parts: tuple[PushPart, ...]
    """At least one; each partition at most once."""
    generation: int | None = None
    timeline: int | None = None
    push_id: PushId | None = None
    key: str | None = None
    """`Idempotency-Key`, used where there is no push id."""
    clock: int | None = None
    weight: float = 1.0
    norm: float | None = None
    """2-norm of the whole gradient before weighting, for `clip_norm`."""
    ack: str | None = None


@dataclass(frozen=True, slots=True)
class PullReceived:
    """A request for the present values of some partitions."""

    request: Request
    model: str
    parts: tuple[int, ...]
    """Partitions, each at most once; the runtime cuts ranges out of the states it gets."""
    generation: int | None = None
    timeline: int | None = None
    min_version: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AssignPart:
    """New values for ranges of one partition."""

    partition: int
    data: AnyArray
    """1-D, of `dtype`: the ranges' elements end to end."""
    dtype: DType
    finite: bool
    ranges: tuple[Range, ...] | None = None
    """Relative to the partition; None: the whole partition."""
    slots: tuple[F32, ...] | None = None
    """Restores: the optimizer's state of the whole partition; None keeps what is there."""
    steps: tuple[int, ...] | None = None
    """Restores: step counts per segment; None keeps what is there."""


@dataclass(frozen=True, slots=True)
class SetReceived:
    """Values are assigned (`PUT params`, a restore, an upload): version + 1, or still 0 while the model initializes."""

    request: Request
    model: str
    parts: tuple[AssignPart, ...]
    generation: int | None = None
    restore: bool = False
    """A restore also drops what is staged or buffered."""


@dataclass(frozen=True, slots=True)
class CaptureReceived:
    """A request for one partition's whole state (checkpoints): the present one, or that of the newest cut."""

    request: Request
    model: str
    partition: int
    generation: int | None = None
    cut: int | None = None
    """The clock of a cut; None: the present state."""


@dataclass(frozen=True, slots=True)
class RequestGone:
    """The client of that request has gone; a waiting pull is dropped, a push runs its course unanswered."""

    request: Request


@dataclass(frozen=True, slots=True)
class WorkerAnswered:
    """The answer to `AskWorker`."""

    request: Request
    epoch: int | None
    """The newest epoch issued to that worker; None: it never joined."""
    rank: int = 0
    live: bool = False
    error: PsError | None = None
    """The scheduler could not be asked."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What one task of a job gave."""

    state: PartitionState | None
    """None: a value that was to be written is not finite."""


@dataclass(frozen=True, slots=True)
class Applied:
    """`Apply` is done: all its tasks have been computed, none is visible yet."""

    job: int
    results: tuple[TaskResult, ...]
    """One for each task, in their order."""


@dataclass(frozen=True, slots=True)
class SnapshotStored:
    """`StoreSnapshot` has succeeded: that version is durable."""

    key: PartitionKey
    token: Token
    version: int


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """`StoreSnapshot` has failed (Redis away, or its token is no longer the owner's)."""

    key: PartitionKey
    token: Token
    version: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: sent at `ShardCore.deadline(now)`, or earlier without harm."""


Event: TypeAlias = (
    MapChanged
    | ModelView
    | RosterChanged
    | CommitDecided
    | ModelGone
    | PartitionLoaded
    | LoadFailed
    | PushReceived
    | PullReceived
    | SetReceived
    | CaptureReceived
    | RequestGone
    | WorkerAnswered
    | Applied
    | SnapshotStored
    | SnapshotFailed
    | Tick
)

# --- the effects


@dataclass(frozen=True, slots=True)
class LoadPartition:
    """Read the partition's state from its source and answer with `PartitionLoaded` or `LoadFailed`.

    "init" and a "snapshot" that was never stored give the initial values of the spec at version 0.
    """

    key: PartitionKey
    token: Token
    source: Source
    spec: ModelSpec
    layout: Layout


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a partition and the gradients whose weighted sum it gets."""

    start: int
    stop: int
    parts: tuple[tuple[AnyArray, DType, float], ...]
    """(elements of [start, stop), their dtype, weight), to be summed in this order."""


@dataclass(frozen=True, slots=True)
class UpdateTask:
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
    direct: tuple[AnyArray, DType] | None
    pieces: tuple[Piece, ...] = ()
    divisor: float = 1.0


@dataclass(frozen=True, slots=True)
class AssignTask:
    """New values for ranges of one partition; everything else is kept."""

    key: PartitionKey
    state: PartitionState
    part: AssignPart


Task: TypeAlias = UpdateTask | AssignTask


@dataclass(frozen=True, slots=True)
class Apply:
    """Compute these tasks into new buffers and answer with `Applied`; the tasks are of different partitions."""

    job: int
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class PartVersion:
    """Where one partition stands, as replies tell it."""

    partition: int
    version: int
    incarnation: Token
    durable_version: int


@dataclass(frozen=True, slots=True)
class PushDone:
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


@dataclass(frozen=True, slots=True)
class PulledPart:
    """One partition of a pull."""

    partition: int
    state: PartitionState
    version: int
    incarnation: Token


@dataclass(frozen=True, slots=True)
class PullDone:
    """The values asked for, in the order asked; the states stay valid for as long as they are referenced."""

    model: ModelKey
    timeline: int
    version: int
    """The lowest over the parts."""
    incarnation: Token
    """The highest over the parts."""
    parts: tuple[PulledPart, ...]


Outcome: TypeAlias = PushDone | PullDone | Capture | PsError


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer that request: exactly one for each; the runtime ignores one for a request whose client has gone."""

    request: Request
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """Write that capture to Redis under its token; answer with `SnapshotStored` or `SnapshotFailed`."""

    capture: Capture
    cut: bool
    """Whether it is a cut of a synchronous model, known by `capture.clock`; the store keeps the last two cuts."""


@dataclass(frozen=True, slots=True)
class Report:
    """Send a heartbeat now: a partition is served, or a cut is stored."""


@dataclass(frozen=True, slots=True)
class AskWorker:
    """Ask the scheduler about a worker that the roster lacks; answer with `WorkerAnswered`."""

    request: Request
    model: ModelKey
    worker: str


@dataclass(frozen=True, slots=True)
class Resync:
    """A commit is missing: connect the feed again, which then tells everything once more."""

    model: ModelKey


Effect: TypeAlias = LoadPartition | Apply | Reply | StoreSnapshot | Report | AskWorker | Resync
