"""Calls that are due at a time.  Whoever waits no longer takes his back, or checks when it comes."""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(slots=True, eq=False)
class Timer:
    """One call to come."""

    at: float
    call: Callable[[float], None] | None
    """None once it is made or taken back."""


class Timers:
    """The calls to come, earliest first; of equal times the one set first."""

    def __init__(self) -> None:
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = 0
        self._cancelled = 0
        """How many of them were taken back."""

    def __len__(self) -> int:
        return len(self._timers)

    def at(self, at: float, call: Callable[[float], None]) -> Timer:
        """Have `call(now)` made at that time or soon after."""
        self._count += 1
        timer = Timer(at, call)
        heappush(self._timers, (at, self._count, timer))
        return timer

    def cancel(self, timer: Timer) -> None:
        """Take it back, if it was not made yet: what it refers to is let go of at once."""
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
        """When the next one is due."""
        while self._timers and self._timers[0][2].call is None:
            heappop(self._timers)
            self._cancelled -= 1
        return self._timers[0][0] if self._timers else None
