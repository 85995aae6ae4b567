"""A request to the scheduler that is answered later."""

from dataclasses import dataclass

from paramserver.errors import PsError, problem


@dataclass(slots=True)
class Waiter:
    """A request that is parked until something happens."""

    request: int
    deadline_s: float
    worker: str = ""
    epoch: int = 0
    clock: int = 0
    dataset: str = ""
    status: int = 200
    token: str | None = None


def no_member(waiter: Waiter) -> PsError:
    """What a parked worker is told when its lease has run out, or a newer one has its name."""
    what = f"worker '{waiter.worker}' of epoch {waiter.epoch}"
    return problem("fenced", f"{what} is no member any more", hint="join again")
