"""The JSON request bodies of the control routes, field by field.

Types and bounds are checked here, and every wrong field is reported.  What is within a field of type `Any`, and whether
a value is allowed in the current state, in a spec or in a run, is decided by the core.  Its events have the same fields
under the same names, beside those that the path and the query give.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from paramserver import limits
from paramserver.core.fields import INTEGER_MAX, WORKER_NAME
from paramserver.core.near import near
from paramserver.errors import PsError, combined, problem

Count = Annotated[int, Field(ge=0, le=INTEGER_MAX)]
Seconds = Annotated[float, Field(ge=0, le=limits.WAIT_S_MAX, allow_inf_nan=False)]
Id = Annotated[str, StringConstraints(min_length=1, max_length=limits.WORKER_NAME_BYTES_MAX)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=1024)]

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list of which only the first wrong element is reported, because there may be a million."""
Row = Annotated[T, Field(strict=False)]
"""A tuple that comes as a list; its elements are as strict as all else."""


class Body(BaseModel):
    """Base of the request bodies; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


B = TypeVar("B", bound=Body)


class Nothing(Body):
    """The body of a request that says everything by its path: none, or an empty object."""


class JoinWorker(Body):
    """A worker that joins a model."""

    name: Id | None = Field(
        None,
        description=f"at most {limits.BARE_NAME_BYTES_MAX} characters, or the id that a join returned, with a '/'; "
        "default: the scheduler chooses one",
        examples=["w0"],
        json_schema_extra={"pattern": f"^{WORKER_NAME.pattern}$"},
    )
    rank: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="its position in sums and data; default: the name's last one if free, else the lowest free"
    )
    above: Annotated[int, Field(ge=0, le=INTEGER_MAX // 2)] | None = Field(  # leaves epochs for all joins after it
        None, description="lower bound, at most 2^52: the issued epoch is greater than this"
    )
    lease_s: Annotated[float, Field(ge=limits.LEASE_S, le=limits.WORKER_LEASE_S_MAX)] | None = Field(
        None, description="duration of its lease: 5 s, or up to 3600 s for interactive use"
    )
    attempt: Id | None = Field(None, description="for a join without a name: a repeated text returns the same worker")


class OfWorker(Body):
    """Base of what a worker that has joined sends."""

    generation: Count | None = Field(
        None, description="that of the answer to its join: if the model was created again since, 409 `model_replaced`"
    )


class WorkerHeartbeat(OfWorker):
    """A worker's heartbeat."""

    epoch: Count
    clock: Count | None = Field(None, description="iterations finished")
    since: Count | None = Field(None, description="as in POST /models/{m}/clock")
    timeline: Count | None = Field(None, description="the last one heard of; an old one gets 409 `rolled_back`")
    metrics: Any = Field(
        {},
        description="current values, or a list of [clock, values], oldest first, of up to "
        f"{limits.METRIC_POINTS_AT_ONCE_MAX} clocks",
        examples=[{"loss": 0.3, "samples_per_s": 900.0}, [[5, {"loss": 0.4}], [6, {"loss": 0.3}]]],
    )
    state: Any = Field(None, description="JSON that checkpoints keep and the worker's next incarnation gets")


class Clock(OfWorker):
    """Report of finished iterations as an absolute number, so repeating it is harmless."""

    worker: Id
    epoch: Count
    clock: Count
    since: Count | None = Field(
        None,
        description="it has worked on every clock from this one on; default: since it was last told where to continue",
    )
    wait_s: Seconds = 0.0
    timeline: Count | None = Field(None, description="the last one heard of; an old one gets 409 `rolled_back`")


class Dataset(Body):
    """A dataset, divided into ranges that are leased to workers."""

    dataset: Id = "train"
    size: Count | None = Field(None, description="elements, cut into pieces of `task_size`")
    task_size: Count | None = None
    ranges: Many[Many[Count]] | None = Field(None, description="[start, stop) pairs, in place of `size`")
    uri: Text | None = Field(None, description="what the worker's own code opens")
    assignment: str = Field(
        "dynamic", description="static: range i to live worker i modulo their number", examples=["dynamic", "static"]
    )
    passes: Count | None = Field(1, description="passes over the data; null: endless")


class Lease(OfWorker):
    """A worker's request for its next task."""

    worker: Id
    epoch: Count
    dataset: Id = "train"
    wait_s: Seconds = 0.0
    holding: Many[Text] | None = Field(
        None, description="ids of the dataset's tasks that it still works on; its other ones are released"
    )


class TaskDone(OfWorker):
    """Completion of a data range or an evaluation."""

    worker: Id
    epoch: Count
    metrics: dict[str, Any] = {}


class Metrics(Body):
    """Current values of metrics."""

    metrics: dict[str, Any] = Field(examples=[{"loss": 0.31, "accuracy": 0.9}])
    worker: Id | None = None
    clock: Count | None = None
    timeline: Count | None = Field(
        None, description="the model's when they were measured: in another they do not count"
    )
    generation: Count | None = Field(None, description="likewise")


class Checkpoint(Body):
    """Request for a checkpoint."""

    name: str | None = Field(None, description="folder name; checkpoints you name are never deleted automatically")


class Restore(Body):
    """Which checkpoint of the model in the path to restore, and into which model."""

    checkpoint: str = Field("latest", description="its name, or `latest` or `best`", examples=["latest"])
    into: str | None = Field(
        None, alias="as", description="the model to restore into, created if missing; default: the same model"
    )
    partitions: Annotated[int, Field(ge=1, le=limits.PARTITIONS_MAX)] | None = Field(
        None, description="partitions of a newly created model; default: as in the checkpoint"
    )
    exist_ok: bool = Field(True, description="false: refuse to set a model other than this one that exists")


class Run(Body):
    """A training run of one model."""

    model: str
    entry: Text = Field(examples=["paramserver.examples.digits:train"])
    name: Id | None = None
    args: dict[str, Any] = {}
    workers: int = 1
    stop: dict[str, Any] = Field({}, examples=[{"minutes": 10}])
    evaluate_every: Count = 0
    checkpoint_every: Count = 0


class RunPatch(Body):
    """Changes to a run; omitted fields stay as they are."""

    state: str | None = Field(None, examples=["paused", "running", "stopped"])
    workers: int | None = None
    stop: dict[str, Any] | None = None


class JoinPool(Body):
    """A worker process that offers itself for places in runs."""

    name: Id | None = None
    allow: Many[Text] = Field([], description="prefixes of entries it may import")


class MemberHeartbeat(Body):
    """A pool member's heartbeat."""

    epoch: Count
    metrics: Any = Field(None, description="resource use of its process: cpu_cores, rss_bytes")


class PlaceDone(Body):
    """The entry function of a place has returned or raised."""

    member: Id
    epoch: Count
    error: str | None = Field(None, description="the traceback; null when it returned")
    attempt: Count | None = Field(None, description="number of the assignment, so that a repeated report counts once")


class JoinShard(Body):
    """A shard process that joins the cluster."""

    name: Id
    addresses: Many[Text]
    version: str = ""


class ShardHeartbeat(Body):
    """A shard's heartbeat: what it serves and has stored."""

    epoch: Count
    metrics: dict[str, Any] = {}
    partitions: Many[Row[tuple[str, int, int, int, int, int, int, int, int, int]]] = Field(
        [],
        description="[model, generation, index, token, version, durable_version, revision, commits_from, from_version,"
        " from_lsn]",
    )
    cuts: Many[Row[tuple[str, int, int, int, int]]] = Field([], description="[model, generation, index, token, clock]")
    released: Many[Row[tuple[str, int, int, int, int, int, int]]] = Field(
        [], description="[model, generation, index, token, version, release, lsn]"
    )
    lost: Many[Row[tuple[str, int, int, int, bool]]] = Field(
        [], description="[model, generation, index, token, given_up]"
    )
    memory: dict[str, Count] = Field({}, examples=[{"limit_bytes": 8589934592, "used_bytes": 734003200}])
    loads: Many[Row[tuple[str, int, int, Annotated[float, Field(allow_inf_nan=False)]]]] = Field(
        [], description="[model, generation, index, bytes per second]"
    )


class ShardState(Body):
    """The requested state of a shard."""

    state: str = Field(examples=["draining"], description="draining, or active again")


class Uploaded(Body):
    """Report that the owners of these partitions now have a parameter's values."""

    name: str
    token: str | None = None
    given: Many[Many[int]] = Field([], description="[index, owner token] of each partition that took them")
    partial: bool = Field(False, description="whether other partitions get theirs by other requests")


class Restored(Body):
    """Report by a client that it has set every partition to a checkpoint of its own."""

    generation: Count
    timeline: Count | None = Field(
        None,
        description="the model's timeline once every partition was set; one that has changed since is kept; "
        "omit if more requests follow",
    )
    version: Annotated[int, Field(ge=0, le=limits.VERSION_MAX)] = Field(
        0, description="the greatest version in the checkpoint"
    )
    workers: dict[str, Any] = Field(
        {}, description="state of each worker that joins from now on", examples=[{"demo/w0": {"seen": 12}}]
    )
    given: Many[Row[tuple[int, int]]] = Field(
        [], description="[index, owner token] of each partition, under which it was set; with `timeline`"
    )


def known_fields(kind: type[Body]) -> list[str]:
    """The names under which a body's fields are sent, sorted."""
    return sorted(f.alias or name for name, f in kind.model_fields.items())


def check(kind: type[B], value: Any) -> B:
    """Return `value` (plain JSON) as a validated body.

    Raises RequestError: `malformed` if it is not an object, `too_large` if it has too many fields, else `invalid_field`
    naming each wrong field, with the nearest known name for an unknown one.
    """
    if not isinstance(value, dict):
        raise problem("malformed", f"the body must be an object, not {type(value).__name__}")
    if len(value) > limits.FIELDS_MAX:
        detail = f"the body has {len(value)} fields; at most {limits.FIELDS_MAX} are allowed"
        raise problem("too_large", detail)
    try:
        return kind.model_validate(value)
    except ValidationError as e:
        wrong = e.errors(include_url=False)[: limits.ERRORS_LISTED_MAX]
        errors = [_explain(kind, item, hints=i < limits.HINTS_MAX) for i, item in enumerate(wrong)]
        raise combined(errors, e.error_count()) from None


def _explain(kind: type[Body], item: Any, *, hints: bool) -> PsError:
    where = ".".join(str(part)[:200] for part in item["loc"])[:200]
    if item["type"] == "extra_forbidden":
        found = near(str(item["loc"][-1]), known_fields(kind)) if hints else None
        known = ", ".join(known_fields(kind))
        hint = f"did you mean '{found}'?" if found else f"known fields: {known}" if known else "this route accepts none"
        return problem("invalid_field", f"{where}: is not a known field", hint=hint, where=where)
    return problem("invalid_field", f"{where}: {item['msg'][:200]}", where=where)
