"""Events and effects of the scheduler's core.

`SchedulerCore.handle(event, now)` returns a list of effects, which the runtime performs in order: at most one `Store`,
then everything that may become visible only once that has succeeded.  So nobody outside ever learns of a commit, an
epoch or an owner that a restarted scheduler would not know.  Only a `Reply` with `waits=False` (to most
heartbeats, a refusal) comes before them and waits for no store: it reveals nothing that is not stored yet.

A `Request` is answered by exactly one `Reply` with the same number, at once or later (long polls), unless `RequestGone`
came first.  Fields have the types and bounds that the service's request bodies state; what these leave open (documents,
names, what the current state allows) the core checks, and refuses with a `PsError`.  Times are in seconds; `now` is
monotonic.  GET routes read from `SchedulerCore.read` (`core.scheduler.reading`) instead.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct, field

from paramserver.core.scheduler.event import Event as Event
from paramserver.core.scheduler.event import Request as Request
from paramserver.core.scheduler.model_events import CheckpointFailed as CheckpointFailed
from paramserver.core.scheduler.model_events import CheckpointRead as CheckpointRead
from paramserver.core.scheduler.model_events import CheckpointWritten as CheckpointWritten
from paramserver.core.scheduler.model_events import CreateModel as CreateModel
from paramserver.core.scheduler.model_events import DeleteCheckpoint as DeleteCheckpoint
from paramserver.core.scheduler.model_events import DeleteModel as DeleteModel
from paramserver.core.scheduler.model_events import FilesLoaded as FilesLoaded
from paramserver.core.scheduler.model_events import ModelRestored as ModelRestored
from paramserver.core.scheduler.model_events import ParameterUploaded as ParameterUploaded
from paramserver.core.scheduler.model_events import PatchModel as PatchModel
from paramserver.core.scheduler.model_events import RequestCheckpoint as RequestCheckpoint
from paramserver.core.scheduler.model_events import RestoreFinished as RestoreFinished
from paramserver.core.scheduler.model_events import StartRestore as StartRestore
from paramserver.core.scheduler.worker_events import ClockStaged as ClockStaged
from paramserver.core.scheduler.worker_events import DeleteDataset as DeleteDataset
from paramserver.core.scheduler.worker_events import DrainWorker as DrainWorker
from paramserver.core.scheduler.worker_events import JoinWorker as JoinWorker
from paramserver.core.scheduler.worker_events import LeaseTask as LeaseTask
from paramserver.core.scheduler.worker_events import LeaveWorker as LeaveWorker
from paramserver.core.scheduler.worker_events import RegisterDataset as RegisterDataset
from paramserver.core.scheduler.worker_events import ReportClock as ReportClock
from paramserver.core.scheduler.worker_events import ReportMetrics as ReportMetrics
from paramserver.core.scheduler.worker_events import RequestEvaluation as RequestEvaluation
from paramserver.core.scheduler.worker_events import TaskDone as TaskDone
from paramserver.core.scheduler.worker_events import WorkerHeartbeat as WorkerHeartbeat
from paramserver.errors import PsError
from paramserver.types import Json, ModelKey, PartitionKey, Token


class JoinShard(Request, frozen=True):
    """POST /internal/shards.

    Answer 201 {"name","epoch","lease_s","term"}; an older incarnation of the name is dead at once. 409 `conflict` if
    the shard's Redis is not the schedulers'.
    """

    name: str
    addresses: Sequence[str]
    version: str = ""
    redis_term: int | None = None
    """Leader term found in the shard's Redis, 0 if there is none; None if Redis did not answer."""
    other_leader: bool = False
    """Whether the shard's Redis names another leader than the scheduler that it asks."""


class ShardHeartbeat(Request, frozen=True):
    """PUT /internal/shards/{name}. Answer {"state":"active"|"draining"}; 409 `fenced` if dead or replaced."""

    name: str
    epoch: int
    metrics: Json = field(default_factory=dict)
    partitions: Sequence[Sequence[Any]] = ()
    """Of each partition it serves the fields of a `ServedRow`."""
    cuts: Sequence[Sequence[Any]] = ()
    """The fields of a `CutRow`; repeatable."""
    released: Sequence[Sequence[Any]] = ()
    """The fields of a `ReleasedRow`."""
    lost: Sequence[Sequence[Any]] = ()
    """The fields of a `LostRow`."""
    memory: Json = field(default_factory=dict)
    """{"limit_bytes": memory limit of the process (0: unknown), "used_bytes": memory in use}."""
    loads: Sequence[Sequence[Any]] = ()
    """[model, generation, index, bytes per second in and out]; partitions not listed have no traffic."""


class LeaveShard(Request, frozen=True):
    """DELETE /internal/shards/{name}?epoch=. Answer 204; its partitions go to other shards at once.

    With `stored`, it has stored all that it knows of and serves no more. If a model would still lose commits, because
    they or the partition have not been heard of, the answer is {"left": false}, and that model's clock becomes a cut.
    """

    name: str
    epoch: int
    stored: bool = False


class SetShardState(Request, frozen=True):
    """PUT /shards/{name}, or POST /internal/shards/{name}/drain?epoch= by the shard itself.

    `draining`: its partitions move to other shards, a few at a time (`limits.MOVES_AT_ONCE`), and it gets no new ones
    until it is `active` again or its name joins anew. Answer 200 with its entry of `Reading.shards` and `targets`, the
    number of other shards that may take partitions; 404 `unknown_node`; 409 `not_enough_memory` with `needed_bytes` and
    `free_bytes` if the others cannot hold its partitions. A shard that asks for itself (`epoch` given) stops in any
    case, so it is not refused for memory.
    """

    name: str
    state: str
    epoch: int | None = None
    cut: bool = False
    """The shard stops and serves no more: have its synchronous models cut where they stand, as not all may move."""


class OpenFeed(Request, frozen=True):
    """GET /internal/feed. Answer {"documents": [...]}, the whole state; subscribe when performing that `Reply`.

    Every later `Publish` continues the stream. 409 `fenced` if `shard` is given and dead or replaced.
    """

    shard: str | None = None
    epoch: int | None = None


class RedisEmptied(Event, frozen=True):
    """Redis lost all data, and this leader has taken a new and higher term.

    All fields and fences are stored again, with a new token for each owned partition. The model's document names the
    token under which the owner held the partition (`from`), so the owner keeps its memory and stores it at once.
    """

    term: int
    unseen: Collection[PartitionKey] = ()
    """Partitions whose newest token was not stored yet, so no shard has been told of it."""


class StorageChanged(Event, frozen=True):
    """Redis has stopped answering (`reason` says why) or answers again (""); no moves while it is away."""

    reason: str


class CreateRun(Request, frozen=True):
    """POST /runs.  Answer 201 with the run's document."""

    model: str
    entry: str
    """`package.module:function`."""
    name: str | None = None
    args: Json = field(default_factory=dict)
    workers: int = 1
    stop: Json = field(default_factory=dict)
    """Any of {"clocks": int, "minutes": number, "metric": {"name", "at_least" | "at_most"}}, whichever is met first."""
    evaluate_every: int = 0
    checkpoint_every: int = 0


class PatchRun(Request, frozen=True):
    """PATCH /runs/{id}: state `paused`, `running` or `stopped`, number of workers, stopping rule.  Answer 200."""

    run: str
    state: str | None = None
    workers: int | None = None
    stop: Json | None = None


class JoinPool(Request, frozen=True):
    """POST /pool.  Answer 201 {"member","epoch","lease_s"}."""

    name: str | None = None
    allow: Sequence[str] = ()


class PoolHeartbeat(Request, frozen=True):
    """PUT /pool/{member}.

    Answer {"state":"idle"|"assigned"|"stop","run":null or {"id","name","model","entry","args","place","attempt",
    "worker","rank","workers"}}.  An assigned member joins the model under the name `worker`, with that `rank`.
    409 `fenced` if dead or replaced.
    """

    member: str
    epoch: int
    metrics: Any = None
    """Resource usage of its process: `cpu_cores`, `rss_bytes`; None: not reported."""


class LeavePool(Request, frozen=True):
    """DELETE /pool/{member}.  Answer 204; its place is free again."""

    member: str
    epoch: int | None = None


class PlaceDone(Request, frozen=True):
    """POST /runs/{id}/places/{place}/done.  Answer 200 with the run's document."""

    run: str
    place: int
    member: str
    epoch: int
    error: str | None = None
    """Traceback if the entry raised; None if it returned."""
    attempt: int | None = None
    """The assignment's `attempt`, so that a repeated request cannot end a later attempt; None: not checked."""


class RequestGone(Event, frozen=True):
    """The client of a parked request has disconnected; it gets no `Reply`."""

    request: int


class Tick(Event, frozen=True):
    """Time has passed.  Sent whenever `SchedulerCore.deadline()` is reached, and at least once a second."""


class ClockStepped(Event, frozen=True):
    """The clock of this machine was set, or the machine has slept: Unix time is `now` plus this from here on."""

    wall_offset_s: float


class Store(Struct, frozen=True):
    """Write all of this in one script guarded by the term, or nothing.

    While Redis is away: retry, in order.  If Redis has another term, this process no longer leads and must stop.
    """

    fields: Mapping[str, Json | None]
    """For the hash `ps:state`; None deletes a field."""
    tokens: Sequence[tuple[PartitionKey, Token]]
    """The owner tokens of these partitions (`{NAME.GEN/INDEX}:token`, 20 digits)."""
    fences: Sequence[tuple[str, int]]
    """(shard, highest fenced epoch) for the hash `ps:fence`; epoch 0 deletes the field."""


class Publish(Struct, frozen=True):
    """Send a document to every open feed.

    Documents are level-triggered: reconnecting makes up for a lost one.  Types: `map`, `model`, `roster`, `commit`,
    `gone`.  `map` and `model` documents have the leader's `term`; a node that has seen a higher one ignores them,
    because a deposed leader that has not noticed may name other owners.  Fields of a `model` document:

    - `owners`: [shard, token] or [shard, token, options] for each partition.  Options are any of `{"release": number}`
      (hand it over: suspend it, store its whole state, report it in `released` with that number), `{"from": token}` (an
      owner that holds it under that token or a higher one keeps its memory, adopts the new token and stores everything
      at once) and `{"source": ...}` (replaces the model's `source`).
    - `cut`: the newest clock stored on all partitions, null if none.
    - `cut_asked`: the clock of the cut that is being made, null if none; with `cut_urgent`, to be stored at once.
    - `upload`: {"token","missing":[names],"lost":[partitions]} while initial values are incomplete, else null.
    - `restored`: whether a restore has given it its first values, which cannot be drawn again.
    - `clock`: in sync the `t` of the next commit.
    - `began`: the clock at which the timeline began.  Entering sync begins one; partitions move to that clock.
    - `opening`: whether that phase has yet to begin, with a commit that lists nothing.
    - `commits`: the newest ones, as in `commit` documents; all that are kept in the state that a feed begins with.
    - `workers`: {id: [epoch, rank]} of the live ones.

    A commit without contributions changes no value; it exists for its `cut`.
    """

    document: Json


class Reply(Struct, frozen=True):
    """The answer to a request: a JSON body (None: empty) with its status, or an error."""

    request: int
    outcome: Json | PsError | None
    status: int = 200
    waits: bool = True
    """Whether it must wait until all stores before it have succeeded."""


class LoadFiles(Struct, frozen=True):
    """Read these parameters from safetensors files and set them on their owners; completed by `FilesLoaded`."""

    model: ModelKey
    files: Mapping[str, str]
    """Parameter name -> file name (one path component below the state directory)."""
    partitions: Sequence[int] = ()
    """Partitions to set; empty: all."""


class WriteCheckpoint(Struct, frozen=True):
    """Write a checkpoint; `CheckpointRead` may come, and `CheckpointWritten` or `CheckpointFailed` completes it."""

    model: ModelKey
    name: str
    cut: int | None
    """sync: clock of the cut to fetch from every partition.

    None: their current state.  In sync no commit is made until completion, so that state is of one clock as well.
    """
    document: Json
    """For the manifest: spec, generation, creation, revision, timeline, clock, metric (name and value or null),
    created_s (Unix), workers {id: {"rank","clock","state"}}."""


class RemoveCheckpoint(Struct, frozen=True):
    """Delete a checkpoint's files if they come from that creation of the model; no event follows."""

    model: str
    name: str
    creation: str


class ForgetOthers(Struct, frozen=True):
    """Delete the Redis keys of partitions of all models that it `concerns`; no event follows.

    A later one concerns all that this one does.
    """

    kept: frozenset[ModelKey]
    newest: int
    """The last generation that was given out; models that have been created since are not concerned."""

    def concerns(self, model: ModelKey) -> bool:
        """Whether that model is gone."""
        return model.generation <= self.newest and model not in self.kept


Effect: TypeAlias = Store | Publish | Reply | LoadFiles | WriteCheckpoint | RemoveCheckpoint | ForgetOthers
