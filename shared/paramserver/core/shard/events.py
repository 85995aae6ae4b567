"""Events of the shard's core.

`ShardCore.handle(event, now)` takes one event and returns effects (`effects`), which the runtime performs in
order; their outcome comes back as new events.  All of them are frozen; big arrays are passed by reference and never
written after they were handed over.  A `request` is a number chosen by the runtime, unique among its open requests.
"""

from collections.abc import Mapping
from typing import Any, Self, TypeAlias

from msgspec import Struct, field

from paramserver.core.commit import Commit
from paramserver.core.layout import Layout
from paramserver.core.partition_state import LoadedState, PartitionState
from paramserver.core.ranges import RangeArray
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError
from paramserver.types import F32, AnyArray, Coding, DType, ModelKey, PartitionKey, PushId, Token

Request: TypeAlias = int
"""Number by which the runtime identifies an open request."""


class Event(Struct, frozen=True):
    """What `ShardCore.handle` takes."""


class MapChanged(Event, frozen=True):
    """The cluster map has a new epoch; 421 replies carry it."""

    map_epoch: int


class CommitDecided(Event, frozen=True):
    """The leader has decided a commit."""

    model: ModelKey
    commit: Commit
    needs_report: bool = False
    """Whether workers must report this clock to the scheduler themselves, because it has something to tell them."""

    @classmethod
    def from_document(cls, doc: Mapping[str, Any]) -> Self:
        """Parse a feed document of type `commit`."""
        return cls(ModelKey(doc["model"], doc["generation"]), Commit.of(doc), bool(doc.get("asks")))


Source: TypeAlias = str | int
"""Where a partition's state is loaded from: "init", "snapshot" (the newest intact one), or the clock of a cut."""


class ModelView(Event, frozen=True):
    """All that this shard must know of one model, from the newest document of the feed (level-triggered)."""

    model: ModelKey
    spec: ModelSpec
    layout: Layout
    """Use one object per generation, because it caches what it computes."""
    revision: int
    timeline: int
    clock: int
    """sync: the next commit's `t`."""
    ready: bool
    """False while the initial values are incomplete."""
    owned: Mapping[int, Token]
    """Partitions of this shard, with their owner tokens."""
    source: Source
    workers: Mapping[str, int]
    """The live roster: worker -> epoch."""
    commits: tuple[Commit, ...] = ()
    """The newest commits of this timeline, oldest first."""
    release: Mapping[int, int] = field(default_factory=dict)
    """Partition -> release number, for those of `owned` that are to be handed over.

    Such a partition is suspended, stored whole and reported by `ShardCore.released` with this number, which
    distinguishes the request from an earlier one that was withdrawn.
    """
    kept_from: Mapping[int, Token] = field(default_factory=dict)
    """Partition -> token: a shard that holds it under this token or a higher one keeps its memory (emptied Redis)."""
    sources: Mapping[int, Source] = field(default_factory=dict)
    """Partition -> source, for those that have another one than `source`."""
    cut: int | None = None
    """sync: the clock of the newest cut that all partitions have stored; None if there is none."""
    cut_asked: int | None = None
    """sync: the clock of the pending cut, which each partition stores when it reaches that clock; None: none."""
    cut_urgent: bool = False
    """The pending cut is stored outside the budget: a shard that is about to stop waits for it."""
    began: int = 0
    """sync: the clock at which this timeline began; a partition at an earlier clock is still on an older timeline."""
    opening: bool = False
    """sync: whether the timeline's first commit is still to come, and will list nothing."""
    restored: bool = False
    """Whether a restore has given the model its first values, so that they cannot be drawn again."""
    term: int = 0
    """Term of the leader that says so."""

    @classmethod
    def from_document(cls, doc: Mapping[str, Any], shard: str, spec: ModelSpec, layout: Layout) -> Self:
        """Parse a feed document of type `model` for the shard of that name."""
        own = {i: owner for i, owner in enumerate(doc["owners"]) if owner[0] == shard}
        options = {i: owner[2] for i, owner in own.items() if len(owner) > 2}
        return cls(
            model=ModelKey(doc["name"], doc["generation"]),
            spec=spec,
            layout=layout,
            revision=doc["revision"],
            timeline=doc["timeline"],
            clock=doc["clock"],
            ready=doc["state"] == "ready",
            owned={i: owner[1] for i, owner in own.items()},
            source=_source(doc["source"]),
            workers={worker: epoch for worker, (epoch, _) in doc["workers"].items()},
            commits=tuple(Commit.of(c) for c in doc["commits"]),
            release={i: o["release"] for i, o in options.items() if "release" in o},
            kept_from={i: o["from"] for i, o in options.items() if "from" in o},
            sources={i: _source(o["source"]) for i, o in options.items() if "source" in o},
            cut=doc["cut"],
            cut_asked=doc["cut_asked"],
            cut_urgent=doc["cut_urgent"],
            began=doc["began"],
            opening=doc["opening"],
            restored=doc["restored"],
            term=doc["term"],
        )


def _source(value: Any) -> Source:
    source: Source = value["cut"] if isinstance(value, Mapping) else value
    return source


class RosterChanged(Event, frozen=True):
    """Workers have joined, left or died."""

    model: ModelKey
    workers: Mapping[str, int]
    """The live roster: worker -> epoch."""


class ModelGone(Event, frozen=True):
    """The model was deleted, or recreated under another generation."""

    model: ModelKey


class PartitionLoaded(Event, frozen=True):
    """`LoadPartition` succeeded."""

    key: PartitionKey
    token: Token
    loaded: LoadedState


class LoadFailed(Event, frozen=True):
    """`LoadPartition` failed: the requests that wait for it get the error, and it is retried after a second.

    State that stays corrupt is read ever less often.
    """

    key: PartitionKey
    token: Token
    error: PsError


class PushPart(Struct, frozen=True):
    """One partition's slice of a push."""

    partition: int
    data: AnyArray
    """1-D, little-endian, of `dtype` (bfloat16 as uint16; a codec's bytes as uint8): the ranges' elements end to end.

    Referenced until the push is applied or dropped; the memory must not be reused before the core drops the reference.
    """
    dtype: Coding
    """A codec only if `ranges` is None."""
    crc: int | None
    """`wire.tensor.slice_crc(dtype, ranges, data)`, with ranges ((0, size),) for a whole partition.

    None: the elements are not checked yet; the computation of the update does it, while they are in the CPU cache.
    """
    finite: bool
    """Whether all elements are finite; True if they are not checked yet."""
    ranges: RangeArray | None = None
    """Relative to the partition, sorted and disjoint; None: the whole partition."""
    base: tuple[int, int] | None = None
    """(version, incarnation) the gradient was computed from."""
    exclusive_buffer: bool = False
    """The memory of `data` holds nothing else and has no other user, so it may be reused once the push is applied."""


class PushReceived(Event, frozen=True):
    """A push, direct or by name, received completely and split into the parts that this shard owns."""

    model: str
    parts: tuple[PushPart, ...]
    """At least one; each partition at most once."""
    generation: int | None = None
    timeline: int | None = None
    push_id: PushId | None = None
    key: str | None = None
    """`Idempotency-Key`, used if there is no push id."""
    clock: int | None = None
    weight: float = 1.0
    norm: float | None = None
    """2-norm of the whole gradient before weighting, for `clip_norm`."""
    ack: str | None = None
    request: Request = 0
    """Set by the runtime."""


class PullReceived(Event, frozen=True):
    """A request for the current values of some partitions."""

    model: str
    parts: tuple[int, ...]
    """Partitions, each at most once; the runtime cuts ranges out of the states in the outcome."""
    generation: int | None = None
    timeline: int | None = None
    min_version: int = 0
    wait_s: float = 0.0
    min_clock: int = 0
    """sync: wait until each partition has reached this clock; in other modes there is nothing to wait for."""
    request: Request = 0
    """Set by the runtime."""


class AssignPart(Struct, frozen=True):
    """New values for ranges of one partition."""

    partition: int
    data: AnyArray
    """1-D, of `dtype`: the ranges' elements end to end."""
    dtype: DType
    finite: bool
    ranges: RangeArray | None = None
    """Relative to the partition; None: the whole partition."""
    slots: tuple[F32, ...] | None = None
    """Restores: optimizer state of the whole partition; None: unchanged."""
    steps: tuple[int, ...] | None = None
    """Restores: step counts per segment; None: unchanged."""
    expected: tuple[int, int] | None = None
    """(version, owner token) that the partition must have, else no part of the request is assigned; None: any."""
    version: int = 0
    """Restores: the partition's version afterwards is at least this."""


class SetReceived(Event, frozen=True):
    """An assignment of values: `PUT params`, a restore or an upload.

    It raises the version by one, and to at least the version that the part gives; while the model initializes, only one
    above that.
    """

    model: str
    parts: tuple[AssignPart, ...]
    generation: int | None = None
    restore: bool = False
    """Restores also drop staged and buffered gradients."""
    timeline: int | None = None
    """The timeline it is meant for; None: any."""
    slot_names: tuple[str, ...] | None = None
    """Names of the optimizer state that its parts bring; None: not known, so only their number is compared."""
    first: bool = False
    """Uploads change nothing once the model is complete."""
    request: Request = 0
    """Set by the runtime."""


class CaptureReceived(Event, frozen=True):
    """A request for one partition's whole state (checkpoints): the current one, or that of the newest cut."""

    model: str
    partition: int
    generation: int | None = None
    cut: int | None = None
    """The clock of a cut; None: the current state."""
    request: Request = 0
    """Set by the runtime."""


class RequestGone(Event, frozen=True):
    """The client of a request has disconnected: a waiting pull is dropped, a push completes without an answer."""

    request: Request


class WorkerAnswered(Event, frozen=True):
    """The answer to `AskWorker`."""

    request: Request
    epoch: int | None
    """The newest epoch issued to that worker; None: it never joined."""
    live: bool = False
    error: PsError | None = None
    """Why the scheduler could not be asked."""
    generation: int | None = None
    """Of the model that it is or was a worker of; None: not known."""


class TaskResult(Struct, frozen=True):
    """The result of one task of a job."""

    state: PartitionState | None
    """None: a resulting value is not finite."""
    crc: int | None = None
    """Checksum of the gradient, if the task has `needs_check`."""
    bad_gradient: bool = False
    """The gradient itself is not finite."""


class Applied(Event, frozen=True):
    """`Apply` succeeded: all its tasks are computed, but no result is visible yet."""

    job: int
    results: tuple[TaskResult, ...]
    """One for each task, in their order."""


class SnapshotDone(Event, frozen=True):
    """`StoreSnapshot` has ended."""

    key: PartitionKey
    token: Token
    stored: bool
    """Whether the capture is durable; otherwise Redis is away, or the token is no longer the owner's."""
    urgent: bool = False
    """As in `StoreSnapshot`."""


class Journaled(Event, frozen=True):
    """Everything of that partition up to `lsn` is durable at its model's level."""

    key: PartitionKey
    token: Token
    lsn: int


class JournalRefused(Event, frozen=True):
    """Redis has another owner's token for the partition, so this shard stops serving it."""

    key: PartitionKey
    token: Token


class JournalLost(Event, frozen=True):
    """Redis has lost some of the partition's stored data, so a snapshot is due at once.

    If journal entries are missing, no later ones can be appended before that snapshot; they stay queued, and this event
    is repeated until they can be written.
    """

    key: PartitionKey
    token: Token
    restarted: bool = False
    """Redis was restarted without it: a loss of its own, even while another one is being made good."""


class StorageChanged(Event, frozen=True):
    """Whether commands can be made durable now has changed; initially they can."""

    reason: str
    """Why nothing can be made durable now; empty if Redis answers."""
    fsync_refused: str = ""
    """Why this Redis cannot confirm level `fsynced`; empty if it can."""


class SaveAll(Event, frozen=True):
    """The process is about to stop: store `ShardCore.unsaved`, at once; repeatable."""


class Tick(Event, frozen=True):
    """Time has passed; sent at `ShardCore.deadline()`, or harmlessly earlier."""
