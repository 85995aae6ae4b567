"""Runs of model m, and members of the pool, at a `Driver`."""

from typing import Any

from paramserver.core.scheduler import io

from .scheduling import Driver

ENTRY = "paramserver.examples.digits:train"


def run(d: Driver, **fields: Any) -> Any:
    """Create a run of model m."""
    return d.ask(lambda n: io.CreateRun(n, "m", ENTRY, **fields))


def member(d: Driver, name: str, *allow: str) -> Any:
    """Let a process join the pool."""
    return d.ask(lambda n: io.JoinPool(n, name, allow or ("paramserver.examples",)))


def beat(d: Driver, m: Any) -> Any:
    """Send the member's heartbeat; return the answer."""
    return d.ask(lambda n: io.PoolHeartbeat(n, m["member"], m["epoch"]))


def done(d: Driver, m: Any, place: int = 0, error: str | None = None, attempt: int | None = None) -> Any:
    """Report that the member has finished its place in run-1, or failed there."""
    return d.ask(lambda n: io.PlaceDone(n, "run-1", place, m["member"], m["epoch"], error, attempt))


def state(d: Driver) -> tuple[str, str]:
    """Return state and reason of run-1."""
    doc = d.core.read.run("run-1")
    return doc["state"], doc["reason"]
