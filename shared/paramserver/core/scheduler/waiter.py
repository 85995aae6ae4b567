"""Requests to the scheduler that are parked and answered later."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that is parked until its condition holds or its deadline passes."""

    request: int
    deadline_s: float
    worker: str = ""
    epoch: int = 0
    clock: int = 0
    dataset: str = ""
    status: int = 200
    token: str | None = None
