"""Events that the workers of a model send to the scheduler's core; see `io`."""

from collections.abc import Sequence
from typing import Any

from msgspec import field

from paramserver.core.scheduler.event import Event, Request
from paramserver.types import Json


class JoinWorker(Request, frozen=True):
    """POST /models/{m}/workers.

    Answer 201 {"worker","epoch","rank","lease_s","clock","timeline","generation","state","asked","first"}.  The id is
    `{m}/{name}`; a name with a '/' is used as it is (an id issued before, `run-7/w0`); without a name it is `{m}/wN`.
    `state` is the last `state` that the previous incarnation under that id sent, or null.  `asked` is what it is asked
    to be, the `state` of the answer to a heartbeat.  `first` says whether its rank is the lowest of the live workers'.
    """

    model: str
    name: str | None = None
    rank: int | None = None
    above: int | None = None
    lease_s: float | None = None
    """Seconds it may be silent before it is declared dead; None: the default lease."""
    attempt: str | None = None
    """For a join without a name: any unique text.  Repeating it, after a lost answer, returns the same worker."""


class WorkerHeartbeat(Request, frozen=True):
    """PUT /models/{m}/workers/{w}.

    Answer {"state":"active"|"draining"|"paused"|"stop","clock","min_clock","timeline","evaluate","first",
    "state_kept","settings_tag"}: `clock` is what counts as the worker's, above the one it sent if it did an iteration
    while it rested, `evaluate` says that an evaluation task is waiting, `first` is as in the answer to a join,
    `state_kept` is false if the state may not be stored yet, because it is new or nothing can be stored: it is to be
    sent again, and `settings_tag` is the document's.  `stop` is told once the end of the run is stored; while nothing
    can be stored, it is `paused`.  Errors: 409 `fenced`, or `rolled_back` (members timeline and clock).
    """

    model: str
    worker: str
    epoch: int
    clock: int | None = None
    timeline: int | None = None
    """None: a plain client; one 409 tells it of a rollback, and from then on it is assumed to know."""
    metrics: Any = field(default_factory=dict)
    """Of the present clock, or a list of [clock, metrics], oldest first."""
    state: Any = None
    """Anything the worker wants kept with checkpoints (its iterator, its random state); None: unchanged."""
    since: int | None = None
    """As in `ReportClock`."""
    generation: int | None = None
    """That of the answer to its join, as in a worker's other requests: if it is not the model's, 409 `model_replaced`,
    whose member `epoch` is that of another worker who has joined under this id, if any.  None: a plain client."""


class LeaveWorker(Request, frozen=True):
    """DELETE /models/{m}/workers/{w}.  Answer 204; idempotent."""

    model: str
    worker: str
    epoch: int | None = None
    generation: int | None = None


class DrainWorker(Request, frozen=True):
    """Ask one worker to finish: its heartbeats answer `draining`.  Answer 200 {"worker","state"}."""

    model: str
    worker: str


class ClockStaged(Event, frozen=True):
    """A shard has accepted a push that ends its worker's iteration, and reports the clock on the worker's behalf.

    It counts as the worker's own report once all shards that the push went to have sent it.  No answer: late and stale
    reports are ignored, and the worker, which waits at the shard, asks the scheduler itself after a while.
    """

    shard: str
    shard_epoch: int
    model: str
    generation: int
    worker: str
    epoch: int
    seq: int
    """The push's seq."""
    clock: int
    """Iterations finished, as in `ReportClock`."""
    timeline: int
    shards: int
    """Number of shards that the push went to."""


class ReportClock(Request, frozen=True):
    """POST /models/{m}/clock: iterations finished, as an absolute number; idempotent.

    Answer {"released","late","clock","min_clock","version","waiting_for","timeline","state","evaluate"} when released,
    or after `wait_s` with `released` false.  `late`: the report came after the commit of the iteration, which has
    dropped what was pushed for it (sync with `late: drop`).  `clock` is the one to work on next: above the one reported
    if the others have gone on without this worker (sync with a quorum).  A worker whose request is parked here counts
    as alive.
    """

    model: str
    worker: str
    epoch: int
    clock: int
    timeline: int | None = None
    wait_s: float = 0.0
    since: int | None = None
    """The worker has skipped no clock from this one up to `clock`; None: from where it was last told to go on."""
    generation: int | None = None


class ReportMetrics(Request, frozen=True):
    """POST /models/{m}/metrics.  Answer 200 {"accepted": number of values}."""

    model: str
    metrics: Json
    worker: str | None = None
    clock: int | None = None
    timeline: int | None = None
    """The one that they were measured in; they do not count in another.  None: the model's."""
    generation: int | None = None
    """Likewise."""


class RegisterDataset(Request, frozen=True):
    """POST /models/{m}/tasks.  Answer 201 with the dataset's document, 200 if it exists, 409 `conflict` if it differs.

    Either `ranges` ([[start, stop], ...]) or `size` cut into pieces of `task_size`.
    """

    model: str
    dataset: str
    size: int | None = None
    task_size: int | None = None
    ranges: Sequence[Sequence[int]] | None = None
    uri: str | None = None
    assignment: str = "dynamic"
    """`dynamic`: the next free range; `static`: range i belongs to the (i mod workers)-th live rank."""
    passes: int | None = 1
    """Number of times the data is processed; None: forever."""


class DeleteDataset(Request, frozen=True):
    """DELETE /models/{m}/tasks/{dataset}: forget it and its progress.  Answer 204, 404 `unknown_task`."""

    model: str
    dataset: str


class LeaseTask(Request, frozen=True):
    """POST /models/{m}/tasks/lease.

    Answer 200 {"task": {...}|null, "finished": bool, "clock", "timeline"}; a task is {"id","kind":"range","dataset",
    "uri","pass","index","start","stop"} or, for the dataset named `evaluate`, {"id","kind":"evaluate","clock"}.
    Waits up to `wait_s` for a task as long as there may be one; meanwhile barriers do not wait for the worker, except
    with `evaluate`.
    """

    model: str
    worker: str
    epoch: int
    dataset: str
    wait_s: float = 0.0
    holding: Sequence[str] | None = None
    """Ids of the dataset's tasks that it still works on; its other leases are freed.  None: it keeps all leases."""
    generation: int | None = None


class TaskDone(Request, frozen=True):
    """POST /models/{m}/tasks/{id}/done.  Answer 200 {"id","done":true}; idempotent.

    `metrics`: the result of an evaluation.
    """

    model: str
    worker: str
    epoch: int
    task: str
    metrics: Json = field(default_factory=dict)
    generation: int | None = None


class RequestEvaluation(Request, frozen=True):
    """Request an evaluation at the current clock.  Answer 201 {"id","clock"}."""

    model: str
