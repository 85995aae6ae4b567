"""What the scheduler's core hears from workers of a model; see `scheduler_io`."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct, field

Json: TypeAlias = Mapping[str, Any]


class JoinWorker(Struct, frozen=True):
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
    attempt: str | None = None
    """Without a name: any text of its own.  The same again is the same worker, which has not heard its answer."""


class WorkerHeartbeat(Struct, frozen=True):
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
    since: int | None = None
    """As in `ReportClock`."""


class LeaveWorker(Struct, frozen=True):
    """DELETE /models/{m}/workers/{w}.  Answer 204; repeatable."""

    request: int
    model: str
    worker: str
    epoch: int | None = None


class DrainWorker(Struct, frozen=True):
    """Ask one worker to finish: its heartbeats answer `draining`.  Answer 200 with the worker's document."""

    request: int
    model: str
    worker: str


class ClockStaged(Struct, frozen=True):
    """A shard has accepted a push that ends its worker's iteration, which it so reports for the worker.

    It counts as the worker's own report once all the shards have said so that the push went to.  No answer: what comes
    too late or from the past is left alone, and the worker, which waits at the shard, asks for itself after a while.
    """

    shard: str
    shard_epoch: int
    model: str
    generation: int
    worker: str
    epoch: int
    seq: int
    """Of the push."""
    clock: int
    """Iterations finished, as in `ReportClock`."""
    timeline: int
    shards: int
    """To how many the push went."""


class ReportClock(Struct, frozen=True):
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
    since: int | None = None
    """The first of the clocks that it has worked on without leaving one out, up to `clock`; None: as it was told."""


class ReportMetrics(Struct, frozen=True):
    """POST /models/{m}/metrics.  Answer 200 {"accepted": number of values}."""

    request: int
    model: str
    metrics: Json
    worker: str | None = None
    clock: int | None = None


class RegisterDataset(Struct, frozen=True):
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


class LeaseTask(Struct, frozen=True):
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
    holding: Sequence[str] | None = None
    """Ids of the dataset's tasks that it still works on: its others are free again.  None: it does not say."""


class TaskDone(Struct, frozen=True):
    """POST /models/{m}/tasks/{id}/done.  Answer 200 {"id","done":true}; repeatable.

    `metrics`: an evaluation's result.
    """

    request: int
    model: str
    worker: str
    epoch: int
    task: str
    metrics: Json = field(default_factory=dict)


class RequestEvaluation(Struct, frozen=True):
    """An evaluation at the present clock, please.  Answer 201 {"id","clock"}."""

    request: int
    model: str
