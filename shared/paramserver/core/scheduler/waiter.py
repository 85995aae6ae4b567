"""Requests to the scheduler that are parked and answered later."""

from dataclasses import dataclass

from paramserver.core.scheduler.membership import Roster
from paramserver.errors import PsError, problem


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


def not_a_member(waiter: Waiter, roster: Roster) -> PsError:
    """Return the error for a parked worker whose lease has expired, or whose name a newer incarnation has taken."""
    what = f"worker '{waiter.worker}' of epoch {waiter.epoch}"
    newest = roster.workers.get(waiter.worker)
    epoch = waiter.epoch if newest is None else newest.epoch
    return problem("fenced", f"{what} is no longer a member", hint="join again", epoch=epoch)
