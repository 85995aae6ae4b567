"""Calls that are due at a time; whoever sets one checks, when it comes, whether it still means anything."""

from collections.abc import Callable
from heapq import heappop, heappush


class Timers:
    """The calls to come, earliest first; of equal times the one set first."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0

    def at(self, at: float, call: Callable[[float], None]) -> None:
        """Have `call(now)` made at that time or soon after."""
        self._count += 1
        heappush(self._calls, (at, self._count, call))

    def run(self, now: float) -> None:
        """Make the calls that are due."""
        while self._calls and self._calls[0][0] <= now:
            heappop(self._calls)[2](now)

    @property
    def next(self) -> float | None:
        """When the next one is due."""
        return self._calls[0][0] if self._calls else None
