"""Events of the scheduler's core about runs and the worker pool; see `scheduler_io`."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from paramserver.types import Json


class CreateRun(Struct, frozen=True):
    """POST /runs.  Answer 201 with the run's document."""

    request: int
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


class PatchRun(Struct, frozen=True):
    """PATCH /runs/{id}: state `paused`, `running` or `stopped`, number of workers, stopping rule.  Answer 200."""

    request: int
    run: str
    state: str | None = None
    workers: int | None = None
    stop: Json | None = None


class JoinPool(Struct, frozen=True):
    """POST /pool.  Answer 201 {"member","epoch","lease_s"}."""

    request: int
    name: str | None = None
    allow: Sequence[str] = ()


class PoolHeartbeat(Struct, frozen=True):
    """PUT /pool/{member}.

    Answer {"state":"idle"|"assigned"|"stop","run":null or {"id","name","model","entry","args","place","attempt",
    "worker","rank","workers"}}.  An assigned member joins the model under the name `worker`, with that `rank`.
    409 `fenced` if dead or replaced.
    """

    request: int
    member: str
    epoch: int
    metrics: Any = None
    """Resource usage of its process: `cpu_cores`, `rss_bytes`; None: not reported."""


class LeavePool(Struct, frozen=True):
    """DELETE /pool/{member}.  Answer 204; its place is free again."""

    request: int
    member: str
    epoch: int | None = None


class PlaceDone(Struct, frozen=True):
    """POST /runs/{id}/places/{place}/done.  Answer 200 with the run's document."""

    request: int
    run: str
    place: int
    member: str
    epoch: int
    error: str | None = None
    """Traceback if the entry raised; None if it returned."""
    attempt: int | None = None
    """The assignment's `attempt`, so that a repeated request cannot end a later attempt; None: not checked."""
