"""What goes into the scheduler's core (events) and what comes out of it (effects).

`SchedulerCore.handle(event, now)` answers every event with a list of effects, which the runtime performs in that order:
first at most one `Store`, then `SetTokens`, then everything that may only be seen once those have succeeded.  So nobody
outside ever learns of a commit, an epoch or an owner that a restarted scheduler would not know.  A `Reply` with
`waits=False` alone may overtake (heartbeats, refusals): it tells nothing that is not stored yet.

An event with a `request` is answered by exactly one `Reply` with the same number, at once or later (long polls), unless
`RequestGone` came first.  Values are plain JSON as they arrived; the core checks them and refuses with a `PsError`.
Times are seconds; `now` is monotonic.  What GET routes need is in `SchedulerCore.read` (`core.reading`), not here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from paramserver.errors import PsError
from paramserver.types import ModelKey, PartitionKey, Token

Json: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JoinShard:
    """POST /internal/shards.

    Answer 201 {"name","epoch","lease_s","term"}; an older holder of the name is dead at once.
    """

    request: int
    name: str
    addresses: Sequence[str]
    version: str = ""


@dataclass(frozen=True, slots=True)
class ShardHeartbeat:
    """PUT /internal/shards/{name}.  Answer {"state":"active"|"draining"}; 409 `fenced` when dead or replaced."""

    request: int
    name: str
    epoch: int
    metrics: Json = field(default_factory=dict)
    partitions: Sequence[Sequence[Any]] = ()
    """[model, generation, index, token, version, durable_version] of each partition that is served."""
    cuts: Sequence[Sequence[Any]] = ()
    """[model, generation, index, token, version] of each snapshot stored at a commit with `cut`; repeatable.
    The number is the clock after that commit, t + 1."""


@dataclass(frozen=True, slots=True)
class LeaveShard:
    """DELETE /internal/shards/{name}?epoch=.  Answer 204; its partitions go to the others at once."""

    request: int
    name: str
    epoch: int


@dataclass(frozen=True, slots=True)
class OpenFeed:
    """GET /internal/feed.  Answer {"documents": [...]}, everything once; subscribe when performing that `Reply`.

    Every `Publish` after it continues the stream.  With `shard` given and dead or replaced: 409 `fenced`.
    """

    request: int
    shard: str | None = None
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class CreateModel:
    """POST /models.  Answer 201 (new) or 200 (the same spec) with the model document, when every partition is served.

    With `init.kind: upload` the document holds `upload_token` (201 always; 200 only when no other token is alive).
    `restore=True` (a checkpoint under a new name): the model stays `initializing` until `RestoreFinished`; a taken name
    is 409 `model_exists`, even with the same spec.
    """

    request: int
    spec: Any
    nonce: str
    """An unguessable string of the runtime's; becomes the upload token where one is needed."""
    restore: bool = False


@dataclass(frozen=True, slots=True)
class PatchModel:
    """PATCH /models/{m}, a JSON merge patch.  Answer 200 with the model document."""

    request: int
    model: str
    patch: Any


@dataclass(frozen=True, slots=True)
class DeleteModel:
    """DELETE /models/{m}.  Answer 204."""

    request: int
    model: str


@dataclass(frozen=True, slots=True)
class ParameterUploaded:
    """POST /internal/models/{m}/uploaded: all owners have that parameter's values.  Answer 200 {"missing":[...]}."""

    request: int
    model: str
    name: str
    token: str | None = None
    """The upload token quoted; None from a shard that has already compared it (see `upload` in the feed's document)."""


@dataclass(frozen=True, slots=True)
class FilesLoaded:
    """Completion of `LoadFiles`: the owners hold these parameters, or `error` says why not (the model is removed)."""

    model: ModelKey
    names: Sequence[str] = ()
    error: PsError | None = None


@dataclass(frozen=True, slots=True)
class StartRestore:
    """POST /models/{m}/restore onto the living model: commits pause.  Answer 200 with the model document.

    The service then sets every partition (`POST /internal/set/...`) and sends `RestoreFinished`.
    """

    request: int
    model: str


@dataclass(frozen=True, slots=True)
class RestoreFinished:
    """Every partition of the model was set (or not: `error`).  Answer 200 with the model document, or the error."""

    request: int
    model: ModelKey
    error: PsError | None = None


@dataclass(frozen=True, slots=True)
class JoinWorker:
    """POST /models/{m}/workers.

    Answer 201 {"worker","epoch","rank","lease_s","clock","timeline","generation","state"}.  The id is `{m}/{name}`, a
    name with a '/' is taken as it is (an id given out before, `run-7/w0`), without a name it is `{m}/wN`.  `state` is
    what the last incarnation under that id last sent as `state`, or null.
    """

    request: int
    model: str
    name: str | None = None
    rank: int | None = None
    above: int | None = None
    lease_s: float | None = None
    """Seconds it may be silent; None: the usual lease."""


@dataclass(frozen=True, slots=True)
class WorkerHeartbeat:
    """PUT /models/{m}/workers/{w}.

    Answer {"state":"active"|"draining"|"paused"|"stop","min_clock","timeline","evaluate"}: `evaluate` says that an
    evaluation task waits.  409 `fenced` or `rolled_back` (members timeline and clock).
    """

    request: int
    model: str
    worker: str
    epoch: int
    clock: int | None = None
    timeline: int | None = None
    """None: a plain client; it learns of a rollback by one 409, and is then taken to know."""
    metrics: Json = field(default_factory=dict)
    state: Any = None
    """Whatever the worker wants kept with checkpoints (its iterator, its random state); None: as before."""


@dataclass(frozen=True, slots=True)
class LeaveWorker:
    """DELETE /models/{m}/workers/{w}.  Answer 204; repeatable."""

    request: int
    model: str
    worker: str
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class DrainWorker:
    """Ask one worker to finish: its heartbeats answer `draining`.  Answer 200 with the worker's document."""

    request: int
    model: str
    worker: str


@dataclass(frozen=True, slots=True)
class ReportClock:
    """POST /models/{m}/clock: iterations finished, absolute and repeatable.

    Answer {"released","clock","min_clock","version","waiting_for","timeline","state","evaluate"} when released, or
    after `wait_s` with `released` false.  `clock` is the one to work on next: above the one reported when the
    others have gone on without this worker (sync with a quorum).  A worker parked here is alive.
    """

    request: int
    model: str
    worker: str
    epoch: int
    clock: int
    timeline: int | None = None
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReportMetrics:
    """POST /models/{m}/metrics.  Answer 200 {"accepted": number of values}."""

    request: int
    model: str
    metrics: Json
    worker: str | None = None
    clock: int | None = None


@dataclass(frozen=True, slots=True)
class RegisterDataset:
    """POST /models/{m}/tasks.  Answer 201 with the dataset's document; the same again 200, another one 409 `conflict`.

    Either `ranges` ([[start, stop], ...]) or `size` cut into pieces of `task_size`.
    """

    request: int
    model: str
    dataset: str
    size: int | None = None
    task_size: int | None = None
    ranges: Sequence[Sequence[int]] | None = None
    uri: str | None = None
    assignment: str = "dynamic"
    """`dynamic`: the next free range; `static`: range i belongs to the (i mod workers)-th live rank."""
    passes: int | None = 1
    """How often the data is worked through; None: for ever."""


@dataclass(frozen=True, slots=True)
class LeaseTask:
    """POST /models/{m}/tasks/lease.

    Answer 200 {"task": {...}|null, "finished": bool, "clock", "timeline"}; a task is {"id","kind":"range","dataset",
    "uri","pass","index","start","stop"} or, for the dataset named `evaluate`, {"id","kind":"evaluate","clock"}.
    Waits up to `wait_s` while there is none but may be one; meanwhile the worker holds no barrier up.
    """

    request: int
    model: str
    worker: str
    epoch: int
    dataset: str
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TaskDone:
    """POST /models/{m}/tasks/{id}/done.  Answer 200 {"id","done":true}; repeatable.

    `metrics`: an evaluation's result.
    """

    request: int
    model: str
    worker: str
    epoch: int
    task: str
    metrics: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestEvaluation:
    """An evaluation at the present clock, please.  Answer 201 {"id","clock"}."""

    request: int
    model: str


@dataclass(frozen=True, slots=True)
class RequestCheckpoint:
    """POST /models/{m}/checkpoints.  Answer 201 with the checkpoint's document once it is written.

    One with a name of the user's own is never removed by the rule of `keep`.
    """

    request: int
    model: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """Completion of `WriteCheckpoint`."""

    model: ModelKey
    name: str
    bytes: int
    versions: Sequence[int]
    """Of each partition, as written."""
    path: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """`WriteCheckpoint` did not succeed; nothing of it is left."""

    model: ModelKey
    name: str
    error: PsError


@dataclass(frozen=True, slots=True)
class CreateRun:
    """POST /runs.  Answer 201 with the run's document."""

    request: int
    model: str
    entry: str
    """`package.module:function`."""
    name: str | None = None
    args: Json = field(default_factory=dict)
    workers: int = 1
    stop: Json = field(default_factory=dict)
    """Any of {"clocks": int, "minutes": number, "metric": {"name", "at_least" | "at_most"}}; the first met ends it."""
    evaluate_every: int = 0
    checkpoint_every: int = 0


@dataclass(frozen=True, slots=True)
class PatchRun:
    """PATCH /runs/{id}: state `paused`, `running` or `stopped`, number of workers, stopping rule.  Answer 200."""

    request: int
    run: str
    state: str | None = None
    workers: int | None = None
    stop: Json | None = None


@dataclass(frozen=True, slots=True)
class JoinPool:
    """POST /pool.  Answer 201 {"member","epoch","lease_s"}."""

    request: int
    name: str | None = None
    allow: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PoolHeartbeat:
    """PUT /pool/{member}.

    Answer {"state":"idle"|"assigned"|"stop","run":{"id","name","model","entry","args","place","worker","rank"}|null};
    join the model under the name `worker` and with `rank`.  409 `fenced` when dead or replaced.
    """

    request: int
    member: str
    epoch: int


@dataclass(frozen=True, slots=True)
class LeavePool:
    """DELETE /pool/{member}.  Answer 204; its place is free again."""

    request: int
    member: str
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class PlaceDone:
    """POST /runs/{id}/places/{place}/done.  Answer 200 with the run's document."""

    request: int
    run: str
    place: int
    member: str
    epoch: int
    error: str | None = None
    """The traceback when the entry raised; None when it returned."""


@dataclass(frozen=True, slots=True)
class RequestGone:
    """The client of a parked request hung up; it gets no `Reply`."""

    request: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed.  Send one whenever `SchedulerCore.deadline()` is reached, and at least each second."""


Event: TypeAlias = (
    JoinShard | ShardHeartbeat | LeaveShard | OpenFeed | CreateModel | PatchModel | DeleteModel | ParameterUploaded
    | FilesLoaded | StartRestore | RestoreFinished | JoinWorker | WorkerHeartbeat | LeaveWorker | DrainWorker
    | ReportClock | ReportMetrics | RegisterDataset | LeaseTask | TaskDone | RequestEvaluation | RequestCheckpoint
    | CheckpointWritten | CheckpointFailed | CreateRun | PatchRun | JoinPool | PoolHeartbeat | LeavePool | PlaceDone
    | RequestGone | Tick
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Store:
    """Write these fields of the hash `ps:state` in one script guarded by the term; None deletes a field.

    Redis away: retry, in order.  Another term found: this process is no leader any more and must stop.
    """

    fields: Mapping[str, Json | None]


@dataclass(frozen=True, slots=True)
class SetTokens:
    """Write the owner tokens of these partitions (`{NAME.GEN/INDEX}:token`, 20 digits)."""

    tokens: Sequence[tuple[PartitionKey, Token]]


@dataclass(frozen=True, slots=True)
class Publish:
    """A document for every open feed; all are level-triggered, so one that is lost is healed by reconnecting.

    Types: `map`, `model`, `roster`, `commit`, `gone`.  Beyond the usual fields a `model` document has
    `cut` (the newest clock stored on all partitions, null if none) and `upload` ({"token","missing":[names]} while
    initial values are awaited, else null); a `roster` document has the `revision` too.  `clock` of a model in sync is
    the `t` of the next commit: entering sync raises the timeline, and partitions then take the
    document's clock for theirs.
    A commit without contributions changes no value; it exists for its `cut`.
    """

    document: Json


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request: a JSON body (None: empty) with its status, or an error."""

    request: int
    outcome: Json | PsError | None
    status: int = 200
    waits: bool = True
    """False: need not wait for the stores before it."""


@dataclass(frozen=True, slots=True)
class LoadFiles:
    """Read these parameters from safetensors files and set them on their owners; completed by `FilesLoaded`."""

    model: ModelKey
    files: Mapping[str, str]
    """Parameter name -> file name (one path component below the state directory)."""


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Write a checkpoint; completed by `CheckpointWritten` or `CheckpointFailed`."""

    model: ModelKey
    name: str
    cut: int | None
    """Sync: fetch the state of this cut's clock from every partition; None: the present one (in sync no commit is made
    until the completion, so it too is of one clock)."""
    document: Json
    """For the manifest: spec, generation, revision, timeline, clock, metric (name and value or null), created_s (Unix),
    workers {id: {"rank","clock","state"}}."""


@dataclass(frozen=True, slots=True)
class RemoveCheckpoint:
    """Delete a checkpoint's files; no completion."""

    model: str
    name: str


@dataclass(frozen=True, slots=True)
class ForgetModel:
    """Delete every Redis key of that creation's partitions; no completion."""

    model: ModelKey
    partitions: int


Effect: TypeAlias = Store | SetTokens | Publish | Reply | LoadFiles | WriteCheckpoint | RemoveCheckpoint | ForgetModel
