"""What goes into the shard's core: every event."""

from collections.abc import Mapping
from typing import Any, Self, TypeAlias

from msgspec import Struct, field

from paramserver.core.layout import Layout, Range
from paramserver.core.partition_state import LoadedState, PartitionState
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError
from paramserver.types import F32, AnyArray, Coding, DType, ModelKey, PartitionKey, PushId, Token

Request: TypeAlias = int
"""The runtime's number of one request that waits for an outcome."""


class MapChanged(Struct, frozen=True):
    """The cluster map has a new epoch; 421 answers quote it."""

    map_epoch: int


class Contribution(Struct, frozen=True):
    """One entry of a commit's list: what (worker, epoch) pushed for `clock`."""

    worker: str
    epoch: int
    rank: int
    clock: int
    weight: float = 1.0
    """What it adds to the divisor."""


class CommitDecided(Struct, frozen=True):
    """The leader has decided commit `t`: exactly these contributions, in (rank, clock) order, on every partition."""

    model: ModelKey
    timeline: int
    t: int
    contributions: tuple[Contribution, ...]
    revision: int
    live_workers: int
    cut: bool
    """Whether every partition is to be snapshotted right after this commit."""
    asks: bool = False
    """Whether the scheduler has something to tell the workers, who are to report this clock to it themselves."""

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
            bool(doc.get("asks")),
        )


Source: TypeAlias = str | int
"""Where a partition's first state comes from: "init", "snapshot" (the newest good one), or the clock of a cut."""


class ModelView(Struct, frozen=True):
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
    release: Mapping[int, int] = field(default_factory=dict)
    """Of `owned` those that are to be handed over: held, written whole and reported by `ShardCore.released` with this
    number, which tells one intent from another that was withdrawn."""
    renewed: Mapping[int, Token] = field(default_factory=dict)
    """Partition -> the token: who holds it under that one or a higher one keeps its memory (Redis was emptied)."""
    sources: Mapping[int, Source] = field(default_factory=dict)
    """Partitions whose first state comes from elsewhere than `source` says."""
    cut_asked: int | None = None
    """sync: the clock of the cut that is to be stored now; None where none is."""
    began: int = 0
    """sync: the clock at which this timeline began."""

    @classmethod
    def from_document(cls, doc: Mapping[str, Any], shard: str, spec: ModelSpec, layout: Layout) -> Self:
        """The view that a feed document of type `model` gives the shard of that name."""
        model = ModelKey(str(doc["name"]), int(doc["generation"]))
        own = {i: owner for i, owner in enumerate(doc["owners"]) if owner and owner[0] == shard}
        options = {i: owner[2] for i, owner in own.items() if len(owner) > 2}
        return cls(
            model,
            spec,
            layout,
            int(doc["revision"]),
            int(doc["timeline"]),
            int(doc["clock"]),
            int(doc["live_workers"]),
            doc["state"] == "ready",
            {i: int(owner[1]) for i, owner in own.items()},
            _source(doc.get("source", "snapshot")),
            {str(w): (int(v[0]), int(v[1])) for w, v in doc.get("workers", {}).items()},
            tuple(CommitDecided.from_document(c, model) for c in doc.get("commits", ())),
            {i: int(o["release"]) for i, o in options.items() if o.get("release")},
            {i: int(o["from"]) for i, o in options.items() if o.get("from") is not None},
            {i: _source(o["source"]) for i, o in options.items() if o.get("source") is not None},
            None if doc.get("cut_asked") is None else int(doc["cut_asked"]),
            int(doc["began"]),
        )


def _source(value: Any) -> Source:
    return int(value["cut"]) if isinstance(value, Mapping) else str(value)


class RosterChanged(Struct, frozen=True):
    """Workers have joined, left or died."""

    model: ModelKey
    workers: Mapping[str, tuple[int, int]]
    """worker -> (epoch, rank), all that are live."""
    live_workers: int


class ModelGone(Struct, frozen=True):
    """The model was deleted, or created anew under another generation."""

    model: ModelKey


class PartitionLoaded(Struct, frozen=True):
    """`LoadPartition` has succeeded."""

    key: PartitionKey
    token: Token
    loaded: LoadedState


class LoadFailed(Struct, frozen=True):
    """`LoadPartition` has failed; it is asked for again after a second, and requests are told the reason."""

    key: PartitionKey
    token: Token
    error: PsError


class PushPart(Struct, frozen=True):
    """One partition's slice of a push."""

    partition: int
    data: AnyArray
    """1-D, little-endian, of `dtype` (bfloat16 as uint16; a codec's bytes as uint8): the ranges' elements end to end.
    It is kept until the push is applied or dropped: its memory must not be used again before the core lets go of it."""
    dtype: Coding
    """A codec only where `ranges` is None."""
    crc: int | None
    """`wire.tensor.slice_crc(dtype, ranges, data)`, with ranges ((0, size),) for a whole partition.  None: nobody has
    looked at the elements yet; who computes the update does, while they are in the cache."""
    finite: bool
    """Whether all elements are finite, as far as is known."""
    ranges: tuple[Range, ...] | None = None
    """Relative to the partition, sorted and disjoint; None: the whole partition."""
    base: tuple[int, int] | None = None
    """(version, incarnation) the gradient was computed from."""
    owned: bool = False
    """`data` is all there is in its memory and nobody else's: once applied it may hold something else."""


class PushReceived(Struct, frozen=True):
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


class PullReceived(Struct, frozen=True):
    """A request for the present values of some partitions."""

    request: Request
    model: str
    parts: tuple[int, ...]
    """Partitions, each at most once; the runtime cuts ranges out of the states it gets."""
    generation: int | None = None
    timeline: int | None = None
    min_version: int = 0
    wait_s: float = 0.0
    min_clock: int = 0
    """sync: the clock that each partition has reached at least; no other mode has one that could be waited for."""


class AssignPart(Struct, frozen=True):
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
    expected: tuple[int, int] | None = None
    """(version, owner token) that the partition must have, or nothing is assigned anywhere; None: whichever it has."""
    version: int = 0
    """Restores: the version that the partition has afterwards at least."""


class SetReceived(Struct, frozen=True):
    """Values are assigned (`PUT params`, a restore, an upload): version + 1, or still the same while the model
    initializes; what a part says goes beyond that."""

    request: Request
    model: str
    parts: tuple[AssignPart, ...]
    generation: int | None = None
    restore: bool = False
    """A restore also drops what is staged or buffered."""
    timeline: int | None = None
    """The one it is meant for; None: whichever there is."""


class CaptureReceived(Struct, frozen=True):
    """A request for one partition's whole state (checkpoints): the present one, or that of the newest cut."""

    request: Request
    model: str
    partition: int
    generation: int | None = None
    cut: int | None = None
    """The clock of a cut; None: the present state."""


class RequestGone(Struct, frozen=True):
    """The client of that request has gone; a waiting pull is dropped, a push runs its course unanswered."""

    request: Request


class WorkerAnswered(Struct, frozen=True):
    """The answer to `AskWorker`."""

    request: Request
    epoch: int | None
    """The newest epoch issued to that worker; None: it never joined."""
    rank: int = 0
    live: bool = False
    error: PsError | None = None
    """The scheduler could not be asked."""


class TaskResult(Struct, frozen=True):
    """What one task of a job gave."""

    state: PartitionState | None
    """None: a value that was to be written is not finite."""
    crc: int | None = None
    """The gradient's, where the task says to look."""
    bad_gradient: bool = False
    """The gradient itself is not finite."""


class Applied(Struct, frozen=True):
    """`Apply` is done: all its tasks have been computed, none is visible yet."""

    job: int
    results: tuple[TaskResult, ...]
    """One for each task, in their order."""


class SnapshotStored(Struct, frozen=True):
    """`StoreSnapshot` has succeeded: that version is durable."""

    key: PartitionKey
    token: Token
    version: int
    urgent: bool = False
    """As in the effect."""


class SnapshotFailed(Struct, frozen=True):
    """`StoreSnapshot` has failed (Redis away, or its token is no longer the owner's)."""

    key: PartitionKey
    token: Token
    version: int
    urgent: bool = False
    """As in the effect."""


class Journaled(Struct, frozen=True):
    """Everything of that partition up to `lsn` is durable at its model's level."""

    key: PartitionKey
    token: Token
    lsn: int


class JournalRefused(Struct, frozen=True):
    """Another owner has the partition's token: nothing more is served for it."""

    key: PartitionKey
    token: Token


class JournalLost(Struct, frozen=True):
    """Redis came back without something that it once had of the partition: a snapshot is due at once.

    Where journal entries are missing it takes no later ones before that; what waits stays queued, and the event is
    repeated until it can be written.
    """

    key: PartitionKey
    token: Token


class StorageChanged(Struct, frozen=True):
    """Whether anything can be made durable now; the first one may be left out while all is well."""

    reason: str
    """Empty: Redis answers; else why nothing can be made durable."""
    fsync_refused: str = ""
    """Why this Redis cannot acknowledge `fsynced`; empty: it can."""


class SaveAll(Struct, frozen=True):
    """The process is about to end: store each `Partition.unsaved`, outside the budget; may be repeated."""


class Tick(Struct, frozen=True):
    """Time has passed: sent at `ShardCore.deadline()`, or earlier without harm."""


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
    | Journaled
    | JournalRefused
    | JournalLost
    | StorageChanged
    | SaveAll
    | Tick
)
