"""The JSON answers of the control routes, field by field: their schemas and examples in the OpenAPI document.

Routes send what the core returns, and make no instances of these; tests/contract/test_openapi.py compares the two.
"""

import re
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema

from paramserver import __version__, limits
from paramserver.core.spec import ModelSpec
from paramserver_scheduler import spec_schema

T = TypeVar("T")

SPEC = {
    "name": "demo",
    "params": {"w": {"shape": [64, 10], "dtype": "float32", "init": {"kind": "zeros"}}},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "consistency": {"mode": "async"},
    "partitions": 8,
    "ack": "applied",
}
"""The spec of the example, as a request has it."""
_REF: Final = "#/components/schemas/{model}"


def _of(example: Any, description: str | None = None) -> Any:
    """A field with its value in the example."""
    return Field(examples=[example], description=description)


class Answer(BaseModel):
    """Base of the answers; only their schemas are made, and those when the document is asked for."""

    model_config = ConfigDict(defer_build=True)
    known: ClassVar[list[type[BaseModel]]] = []

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        Answer.known.append(cls)

    @classmethod
    def ref(cls) -> dict[str, str]:
        """Return a reference to its schema among those of `schemas`."""
        return {"$ref": _REF.format(model=re.sub(r"\W", "_", cls.__name__))}

    @classmethod
    def example(cls) -> dict[str, Any]:
        """Return an answer as a client might get it, without what only some answers have."""
        return {f.alias or name: _example(f) for name, f in cls.model_fields.items() if f.is_required()}


def _example(field: FieldInfo) -> Any:
    """The value of a field in the example: its own, or that of the answers that it holds."""
    if field.examples:
        return field.examples[0]
    kind, *_ = get_args(field.annotation) or (field.annotation,)
    part: dict[str, Any] = kind.example()
    return part if kind is field.annotation else [part]


def schemas() -> dict[str, Any]:
    """Return the schemas of all answers by name, as components of the OpenAPI document."""
    named: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (kind, "validation") for kind in Answer.known if kind not in (Page, Spec)
    ]
    defined: dict[str, Any] = models_json_schema(named, ref_template=_REF)[1]["$defs"]
    return defined | {"Spec": spec_schema.SPEC}


class Page(Answer, Generic[T]):
    """One page of a list."""

    items: list[T]
    next: str | None = _of(None, "`?after=` of the next page; null: this is the last one")


# --- models ---


class Spec(Answer):
    """A model's settings, of which `spec_schema` has the schema."""


class Partition(Answer):
    """A range of a model's flat vector, with the shard that owns it."""

    index: int = _of(0)
    shard: str | None = _of("shard-0", "its owner; null: none now")
    incarnation: int = _of(4294967297, "the owner's token: another one after each change of owner")
    version: int = _of(0)
    durable_version: int = _of(0)
    from_version: int | None = _of(0, "where its owner began to serve it; null: not yet")
    served: bool = _of(True)


class Addresses(Answer):
    """Where a shard is."""

    addresses: list[str] = _of(["http://127.0.0.1:8701"])


class Model(Answer):
    """A model: its settings, its versions, and which shard owns each partition."""

    name: str = _of("demo")
    generation: int = _of(1, "of this creation: of a later one of the same name it is higher")
    revision: int = _of(1, "of its settings")
    settings_tag: int = _of(2159345977, "another one if settings have changed that clients go by")
    timeline: int = _of(0, "higher after each loss of values and each restore")
    clock: int = _of(0, "sync: commits decided")
    min_clock: int = _of(0, "the lowest clock of its live workers")
    version: int = _of(0, "the lowest over the partitions")
    cut: int | None = _of(None, "sync: the newest clock that is stored on all partitions")
    state: Literal["ready", "initializing"] = _of("ready")
    missing: list[str] = _of([], "parameters whose first values are awaited")
    files_error: str | None = _of(None, "why a file with first values cannot be read")
    served: bool = _of(True, "whether all its partitions are")
    live_workers: int = _of(0)
    created_s: float = _of(1763700000.0, "seconds since 1970")
    spec: Spec = _of(ModelSpec.parse(SPEC).document())
    bounds: list[int] = _of([0, 80, 160, 240, 320, 400, 480, 560, 640], "where partitions begin in the flat vector")
    cluster: str = _of("6f1c90b2a4d3e857")
    map_epoch: int = _of(3)
    partitions: list[Partition]
    shards: dict[str, Addresses] = _of({"shard-0": Addresses.example()}, "the owners, by name")
    upload_token: str | None = Field(
        default=None, description="of a new model with `init.kind: upload` only: for the header X-Upload-Token"
    )


class ListedModel(Answer):
    """A model in brief."""

    name: str = _of("demo")
    generation: int = _of(1)
    revision: int = _of(1)
    timeline: int = _of(0)
    clock: int = _of(0)
    version: int = _of(0)
    state: Literal["ready", "initializing"] = _of("ready")
    mode: Literal["async", "ssp", "sync", "buffered"] = _of("async")
    optimizer: str = _of("sgd")
    size: int = _of(640, "elements")
    partitions: int = _of(8)
    served: bool = _of(True)
    live_workers: int = _of(0)


# --- workers ---


class JoinedWorker(Answer):
    """What a worker begins with."""

    worker: str = _of("demo/w0", "its id")
    epoch: int = _of(1, "of this incarnation: what it sends has it")
    rank: int = _of(0, "its position in sums and in static data")
    lease_s: float = _of(limits.LEASE_S)
    clock: int = _of(0, "the iteration to start at")
    timeline: int = _of(0)
    generation: int = _of(1)
    state: Any = _of(None, "what the previous worker of that name last stored; null: nothing")
    asked: Literal["active", "paused", "stop"] = _of("active", "what it is asked to be, as in a heartbeat's `state`")
    first: bool = _of(True, "whether its rank is the lowest of the live workers'")


class Worker(Answer):
    """A worker of a model."""

    worker: str = _of("demo/w0")
    epoch: int = _of(1)
    alive: bool = _of(True)
    state: Literal["active", "draining", "resting", "left", "dead", "restored"] = _of("active")
    heartbeat_age_s: float = _of(0.4)
    rank: int = _of(0)
    clock: int = _of(6, "iterations finished")
    next_clock: int = _of(6, "the iteration that it is to work on")
    metrics: dict[str, float | None] = _of({"loss": 0.3}, "what it last reported; null stands for NaN or infinity")
    kept: Any = _of(None, "the state that is stored for it")


class WorkerBeat(Answer):
    """What a worker is told with each heartbeat."""

    state: Literal["active", "draining", "paused", "stop"] = _of("active", "what it is asked to be")
    clock: int = _of(6, "what counts as its clock: higher than it said if it did an iteration while it rested")
    min_clock: int = _of(5, "the lowest clock of the live workers")
    timeline: int = _of(0)
    evaluate: bool = _of(False, "an evaluation waits for a worker")
    first: bool = _of(True, "whether its rank is the lowest of the live workers'")
    state_kept: bool = _of(True, "false: send `state` with the next heartbeat, too")
    settings_tag: int = _of(2159345977, "that of the model")


class WorkerState(Answer):
    """A worker that was asked to leave."""

    worker: str = _of("demo/w0")
    state: Literal["draining", "paused", "stop"] = _of("draining", "what it is asked to be")


class Released(Answer):
    """Whether a worker may go on, and where."""

    released: bool = _of(True, "false: `wait_s` is over; report the clock again before going on")
    late: bool = _of(False, "sync: the reported clock was committed without this worker")
    clock: int = _of(1, "the iteration to work on next")
    min_clock: int = _of(1, "the lowest clock of the live workers")
    version: int = _of(1, "pull at least this one")
    waiting_for: list[str] = _of([], "workers, or in words what it waits for")
    timeline: int = _of(0)
    state: Literal["active", "draining", "paused", "stop"] = _of("active", "what it is asked to be")
    evaluate: bool = _of(False, "an evaluation waits for a worker")


# --- data, evaluations, metrics ---


class Dataset(Answer):
    """A dataset and how far it is."""

    dataset: str = _of("train")
    tasks: int = _of(50, "ranges of one pass")
    uri: str | None = _of(None)
    assignment: Literal["dynamic", "static"] = _of("dynamic")
    passes: int | None = _of(1, "null: endless")
    passes_done: int = _of(0)
    done: int = _of(0, "ranges of all passes")
    leased: int = _of(0)
    finished: bool = _of(False)


class RangeTask(Answer):
    """A range of a dataset to work on."""

    id: str = _of("train:0:0")
    kind: Literal["range"] = _of("range")
    dataset: str = _of("train")
    uri: str | None = _of(None)
    pass_: int = Field(alias="pass", examples=[0])
    index: int = _of(0)
    start: int = _of(0)
    stop: int = _of(1000, "the first element that is not in the range")


class EvaluationTask(Answer):
    """An evaluation to make."""

    id: str = _of("evaluate:12:0")
    kind: Literal["evaluate"] = _of("evaluate")
    clock: int = _of(12)


class LeasedTask(Answer):
    """A task for a worker, or none."""

    task: RangeTask | EvaluationTask | None = _of(RangeTask.example(), "null: there is none now")
    finished: bool = _of(False, "the worker will get no more")
    clock: int = _of(0, "the iteration to go on with")
    timeline: int = _of(0)


class DoneTask(Answer):
    """A task that is done."""

    id: str = _of("train:0:0")
    done: Literal[True] = _of(True)


class Evaluation(Answer):
    """An evaluation that waits for a worker."""

    id: str = _of("evaluate:12:0")
    clock: int = _of(12)


class Accepted(Answer):
    """What was kept of a report of metrics."""

    accepted: int = _of(1, "points added")


class Metric(Answer):
    """The time series of one metric."""

    name: str = _of("loss")
    points: list[tuple[float, int | None, str, float]] = _of(
        [[1763700000.0, 6, "demo/w0", 0.31]], "[seconds since 1970, clock or null, worker, value], oldest first"
    )


# --- checkpoints ---


class MetricValue(Answer):
    """The newest value of the metric by which the best checkpoint is found."""

    name: str = _of("accuracy")
    value: float = _of(0.97)


class Checkpoint(Answer):
    """A checkpoint on a scheduler's disk."""

    name: str = _of("000012-clock-400")
    number: int = _of(12)
    clock: int = _of(400)
    created_s: float = _of(1763700000.0, "seconds since 1970")
    bytes: int = _of(5120)
    versions: list[int] = _of([400, 400], "of each partition")
    metric: MetricValue | None = _of(MetricValue.example())
    kept: bool = _of(False, "it was asked for by name, and is never removed by rule")
    path: str = _of("/var/lib/paramserver/checkpoints/demo/000012-clock-400")
    scheduler: str = _of("scheduler", "whose disk it is on")


# --- shards ---


class Move(Answer):
    """A partition on its way to another shard."""

    model: str = _of("demo")
    partition: int = _of(3)
    to: str | None = _of("shard-1")


class Memory(Answer):
    """A shard's memory."""

    limit_bytes: int = _of(8589934592, "0: not known")
    used_bytes: int = _of(734003200, "0: not known")


class Shard(Answer):
    """A shard, what it owns, and how busy it is."""

    name: str = _of("shard-0")
    epoch: int = _of(1)
    alive: bool = _of(True)
    state: Literal["active", "draining", "left", "dead"] = _of("active")
    heartbeat_age_s: float = _of(0.4)
    addresses: list[str] = _of(["http://127.0.0.1:8701"])
    version: str = _of(__version__)
    partitions: int = _of(4)
    bytes: int = _of(2560, "of the parameters it owns")
    bytes_per_s: float = _of(51200.0, "gradients received and values sent")
    memory: Memory
    moves: list[Move] = _of([Move.example()], "of partitions away from it")
    metrics: dict[str, Any] = _of({}, "what its last heartbeat said")


class ShardWithTargets(Shard):
    """A shard whose state was set."""

    targets: int = _of(1, "of one that drains: other shards that can take its partitions")


class MapEntry(Addresses):
    """A shard in the map."""

    alive: bool = _of(True)


class Map(Answer):
    """The shards with their addresses."""

    term: int = _of(1, "of the leading scheduler")
    cluster: str = _of("6f1c90b2a4d3e857")
    map_epoch: int = _of(3)
    shards: dict[str, MapEntry] = _of({"shard-0": MapEntry.example()}, "by name")


# --- runs ---


class Place(Answer):
    """One worker's place in a run."""

    place: int = _of(0)
    worker: str = _of("run-7/w0")
    member: str | None = _of("pool-0", "the process that has it; null: none")
    restarts: int = _of(0)
    done: bool = _of(False)


class Run(Answer):
    """A training by workers of the pool."""

    id: str = _of("run-7")
    name: str = _of("run-7")
    model: str = _of("demo")
    entry: str = _of("paramserver.examples.digits:train")
    args: dict[str, Any] = _of({})
    workers: int = _of(4)
    stop: dict[str, Any] = _of({"minutes": 5})
    evaluate_every: int = _of(0)
    checkpoint_every: int = _of(0)
    state: Literal["waiting", "running", "paused", "finished", "failed", "stopped"] = _of("running")
    reason: str = _of("", "why it ended")
    error: str = _of("", "the last line of its newest exception, and whose")
    from_clock: int = _of(0)
    ran_s: float = _of(12.5)
    created_s: float = _of(1763700000.0, "seconds since 1970")
    places: list[Place]


class PoolMember(Answer):
    """A process of the worker pool."""

    member: str = _of("pool-0")
    epoch: int = _of(1)
    alive: bool = _of(True)
    state: Literal["active", "dead"] = _of("active")
    heartbeat_age_s: float = _of(0.4)
    allow: list[str] = _of(["paramserver.examples"], "what it may import")
    run: str | None = _of("run-7", "null: it is idle")
    place: int | None = _of(0)
    metrics: dict[str, float] = _of({"cpu_cores": 0.5})


class JoinedPool(Answer):
    """What a process of the pool begins with."""

    member: str = _of("pool-0")
    epoch: int = _of(1)
    lease_s: float = _of(limits.LEASE_S)


class Assigned(Answer):
    """The place of a process in a run."""

    id: str = _of("run-7")
    name: str = _of("run-7")
    model: str = _of("demo")
    entry: str = _of("paramserver.examples.digits:train")
    args: dict[str, Any] = _of({})
    place: int = _of(0)
    attempt: int = _of(0)
    worker: str = _of("run-7/w0")
    rank: int = _of(0)
    workers: int = _of(4)


class PoolBeat(Answer):
    """What a process of the pool is told with each heartbeat."""

    state: Literal["idle", "assigned", "stop"] = _of("assigned", "stop: leave that place")
    run: Assigned | None = _of(Assigned.example())


# --- between nodes ---


class JoinedShard(Answer):
    """What a shard begins with."""

    name: str = _of("shard-0")
    epoch: int = _of(1)
    lease_s: float = _of(limits.LEASE_S)
    term: int = _of(1)


class ShardBeat(Answer):
    """What a shard is told with each heartbeat."""

    state: str = _of("active")
    term: int = _of(1)


class Targets(Answer):
    """Shards that can take the partitions of one that stops."""

    targets: int = _of(1)


class Membership(Answer):
    """The newest incarnation of a worker."""

    worker: str = _of("demo/w0")
    epoch: int = _of(1)
    alive: bool = _of(True)
    generation: int = _of(1)
