"""The JSON of `GET /status`: what the status page, `psctl status` and people's scripts read.

Every number is of the moment of the request; ages and durations are in seconds, rates per second.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field


class ClusterStatus(BaseModel):
    """The cluster as a whole."""

    state: Literal["ok", "degraded"] = Field(description="degraded: something is missing, `problems` says what")
    problems: list[str] = Field(description="what is wrong, in plain words, with what to do", examples=[[]])
    version: str = Field(examples=["0.1.0"])
    term: int = Field(description="how often a scheduler has started on this Redis")
    map_epoch: int
    uptime_s: float
    redis: Literal["ok", "away"]
    now: float = Field(description="wall clock of the scheduler, seconds since 1970")


class NodeStatus(BaseModel):
    """One process that joined by a lease, or the scheduler itself."""

    name: str
    role: Literal["scheduler", "shard", "pool"]
    state: str = Field(examples=["active", "draining", "dead"])
    alive: bool
    addresses: list[str]
    epoch: int
    heartbeat_age_s: float
    partitions: int = Field(default=0)
    bytes: int = Field(default=0, description="bytes of parameters it owns")
    metrics: dict[str, Any] = Field(default={}, description="what its last heartbeat said")


class WorkerStatus(BaseModel):
    """One worker of a model."""

    worker: str
    epoch: int
    rank: int
    clock: int
    state: str = Field(examples=["active", "draining", "dead"])
    heartbeat_age_s: float
    metrics: dict[str, Any] = Field(
        default={}, description="what its last heartbeat said: loss, version lag, samples/s, ..."
    )


class Series(BaseModel):
    """The newest points of one metric, thinned out for drawing."""

    name: str = Field(examples=["loss"])
    points: list[tuple[float, float]] = Field(description="(seconds since 1970, value), oldest first")
    last: float | None


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
    parameters: int = Field(description="how many named parameters")
    elements: int
    partitions: int
    served: int = Field(description="partitions with a live owner that has loaded them")
    version: int = Field(description="the lowest over the partitions")
    durable_version: int = Field(description="the lowest over the partitions")
    clock: int = Field(description="sync: commits; otherwise the slowest live worker's clock")
    waiting_for: list[str] = Field(description="workers that the others wait for")
    updates_per_s: float = Field(description="versions applied, over the last seconds")
    pushes_per_s: float
    lag: float | None = Field(description="mean version lag that the workers report")
    workers: list[WorkerStatus]
    series: list[Series]


class RunStatus(BaseModel):
    """One run."""

    id: str
    name: str
    model: str
    state: str = Field(examples=["waiting", "running", "paused", "finished", "failed", "stopped"])
    reason: str = ""
    workers: int = Field(description="places wanted")
    placed: int = Field(description="places taken")


class EventStatus(BaseModel):
    """Something that happened."""

    at: float = Field(description="seconds since 1970")
    kind: str = Field(examples=["shard_joined"])
    text: str


class Status(BaseModel):
    """What the cluster is doing now."""

    cluster: ClusterStatus
    nodes: list[NodeStatus]
    models: list[ModelStatus]
    runs: list[RunStatus]
    events: list[EventStatus] = Field(description="the last 100, newest first")
