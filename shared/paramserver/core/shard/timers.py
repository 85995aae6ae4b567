"""Calls due at a given time.  A caller that no longer needs one cancels it, or checks when the call comes."""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(slots=True, eq=False)
class Timer:
    """One pending call."""

    at: float
    call: Callable[[float], None] | None
    """None once it has been made or cancelled."""


class Timers:
    """The pending calls, earliest first; calls for the same time are made in the order they were set."""

    def __init__(self) -> None:
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = 0
        self._cancelled = 0
        """Cancelled timers that are still in the heap."""

    def at(self, at: float, call: Callable[[float], None]) -> Timer:
        """Schedule `call(now)` for that time or soon after."""
        self._count += 1
        timer = Timer(at, call)
        heappush(self._timers, (at, self._count, timer))
        return timer

    def cancel(self, timer: Timer) -> None:
        """Cancel a call that has not been made yet; what it references is released at once."""
        if timer.call is None:
            return
        timer.call = None
        self._cancelled += 1
        if 2 * self._cancelled > len(self._timers):
            self._timers = [entry for entry in self._timers if entry[2].call is not None]
            heapify(self._timers)
            self._cancelled = 0

    def run(self, now: float) -> None:
        """Make the calls that are due."""
        while (at := self.next) is not None and at <= now:
            timer = heappop(self._timers)[2]
            call, timer.call = timer.call, None
            assert call is not None
            call(now)

    @property
    def next(self) -> float | None:
        """Time of the next call; None if there is none."""
        while self._timers and self._timers[0][2].call is None:
            heappop(self._timers)
            self._cancelled -= 1
        return self._timers[0][0] if self._timers else None
