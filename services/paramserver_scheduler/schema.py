"""JSON schema of `/status` and the paths below it, as read by the status page, `psctl status` and user scripts.

Numbers are those at the time of the request; ages and durations are in seconds, rates per second.  Request times are
those of the last ten seconds at the slowest shard; null if there were no requests.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field


class ClusterStatus(BaseModel):
    """The cluster as a whole."""

    state: Literal["ok", "degraded"] = Field(description="degraded: something is missing, `problems` says what")
    problems: list[str] = Field(description="what is wrong, in plain words, with what to do", examples=[[]])
    version: str = Field(examples=["0.1.0"])
    term: int = Field(description="how often a scheduler has become the leader")
    map_epoch: int
    uptime_s: float
    redis: Literal["ok", "away"]
    redis_bytes: int | None = Field(default=None, description="memory that Redis uses; null: not known")
    redis_limit_bytes: int | None = Field(
        default=None, description="its maxmemory, at which it refuses to store anything; null: none, or not known"
    )
    now: float = Field(description="wall clock of the scheduler, seconds since 1970")
    runs_ended: dict[str, int] = Field(
        default={}, description="runs that have ended since this scheduler began to lead, by state"
    )


class NodeStatus(BaseModel):
    """One scheduler, shard or pool worker process."""

    name: str
    role: Literal["scheduler", "shard", "pool"]
    state: str = Field(
        examples=["active", "draining", "left", "dead"],
        description="of a scheduler active (it leads) or standby; of a worker process active or idle",
    )
    alive: bool
    addresses: list[str]
    epoch: int
    heartbeat_age_s: float
    partitions: int = Field(default=0)
    bytes: int = Field(default=0, description="bytes of parameters it owns")
    cpu_cores: float | None = Field(default=None, description="processors it keeps busy; 1.0 is one")
    rss_bytes: float | None = Field(default=None, description="resident memory")
    memory_limit_bytes: float | None = Field(default=None, description="memory it may use; null: not known")
    in_bytes_per_s: float | None = Field(default=None, description="gradients received")
    out_bytes_per_s: float | None = Field(default=None, description="values sent")
    metrics: dict[str, Any] = Field(default={}, description="what its last heartbeat said")


class WorkerStatus(BaseModel):
    """One worker of a model."""

    worker: str
    epoch: int
    rank: int
    clock: int
    state: str = Field(examples=["active", "draining", "resting", "left", "dead"])
    alive: bool
    heartbeat_age_s: float
    lag: float | None = Field(
        default=None, description="versions applied between its pulls and its pushes, as the shards see it; mean"
    )
    metrics: dict[str, Any] = Field(
        default={}, description="what it last reported: loss, samples/s, ...; null stands for NaN or infinity"
    )


class ModelStatus(BaseModel):
    """One model."""

    name: str
    generation: int
    revision: int
    timeline: int
    state: str = Field(examples=["ready", "initializing", "creating"])
    mode: str = Field(examples=["async"])
    optimizer: str = Field(examples=["adam"])
    lr: float | None
    created_s: float = Field(description="seconds since 1970")
    parameters: int = Field(description="how many named parameters")
    elements: int
    partitions: int
    served: int = Field(description="partitions with a live owner that has loaded them")
    shards: list[str] = Field(description="names of its owners")
    owners: list[int] = Field(description="of each partition, its owner's place in `shards`; -1: none now")
    loading: list[int] = Field(description="partitions that no owner serves yet")
    moving: list[int] = Field(description="partitions on their way to another owner")
    version: int = Field(description="the lowest over the partitions")
    durable_version: int = Field(description="the lowest over the partitions")
    durable_behind: int = Field(description="versions that only the owner's memory has, of the partition with most")
    durable_behind_s: float = Field(description="for how long a partition has had some, without storing any more")
    clock: int = Field(description="sync: commits; otherwise the slowest live worker's clock")
    waiting_for: list[str] = Field(description="workers that the others wait for")
    updates_per_s: float = Field(description="versions applied, over the last seconds")
    pushes_per_s: float
    pulls_per_s: float
    in_bytes_per_s: float
    out_bytes_per_s: float
    push_p50_s: float | None
    push_p99_s: float | None
    pull_p50_s: float | None
    pull_p99_s: float | None
    lag: float | None = Field(description="mean version lag over the workers")
    workers: list[WorkerStatus]
    latest: dict[str, tuple[float, float]] = Field(description="reported metric -> (seconds since 1970, value)")
    not_finite: dict[str, tuple[float, str]] = Field(
        default={},
        description="reported metric whose newest value is NaN or infinite -> (since when, seconds since 1970; worker)",
    )
    values_kept: int = Field(
        default=0,
        description="how often the result of a commit or flush was not finite, so that a partition kept its values;"
        " 0 if not in the last minute",
    )


class RunStatus(BaseModel):
    """One run."""

    id: str
    name: str
    model: str
    entry: str = Field(examples=["paramserver.examples.digits:train"])
    state: str = Field(examples=["waiting", "running", "paused", "finished", "failed", "stopped"])
    reason: str = ""
    workers: int = Field(description="places wanted")
    placed: int = Field(description="places taken")
    restarts: int = Field(default=0, description="how often its functions were called again after an exception")
    error: str = Field(default="", description="last line of the newest exception under this leader, and whose")
    created_s: float = Field(description="seconds since 1970")
    ran_s: float = Field(description="seconds in state running, but for those in which the model waits for min_workers")
    clocks: int | None = Field(description="clocks since it began; null when it has ended")
    stop: dict[str, Any] = Field(description="when it ends", examples=[{"minutes": 10}])
    progress: float | None = Field(description="from 0 to 1; null when nothing says how long it is to run")


class EventStatus(BaseModel):
    """One event, such as a shard that joined or a run that failed."""

    at: float = Field(description="seconds since 1970")
    kind: str = Field(examples=["shard_joined"])
    text: str
    level: Literal["good", "info", "bad"] = "info"


class Status(BaseModel):
    """The current status of the cluster."""

    cluster: ClusterStatus
    nodes: list[NodeStatus]
    models: list[ModelStatus]
    runs: list[RunStatus]
    events: list[EventStatus] = Field(description="the last 100, newest first")


class Events(BaseModel):
    """Recent events."""

    items: list[EventStatus] = Field(description="newest first")


class SeriesValues(BaseModel):
    """One time series."""

    metric: str = Field(examples=["model.pushes_per_s"])
    unit: str = Field(examples=["1/s"])
    labels: dict[str, str] = Field(examples=[{"model": "demo"}])
    values: list[float | None] = Field(description="one for each step, its mean; null where nothing is known")


class SeriesAnswer(BaseModel):
    """Time series on a common grid: value `i` covers the `step_s` seconds from `start_s + i * step_s`."""

    start_s: int = Field(description="seconds since 1970")
    step_s: int
    count: int
    items: list[SeriesValues]
