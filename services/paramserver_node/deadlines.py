"""Deadlines for requests, with one timer for all of them."""

import asyncio
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

CHECK_INTERVAL_S: Final = 0.5
"""Interval between checks; a wait may exceed its deadline by this much."""

_INTERRUPTED: Final = -1.0
T = TypeVar("T")


class Deadlines:
    """Interrupts tasks that wait beyond their deadlines.

    It checks all waiting tasks periodically: a timer for each wait would cost a small request a tenth of its time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop: Final = loop
        self._waits: dict[asyncio.Task[Any], float] = {}
        """Deadline of each waiting task, or `_INTERRUPTED`."""
        self._timer_set = False

    def now(self) -> float:
        """Return the event loop's time, in seconds."""
        return self.loop.time()

    async def within(self, due_s: float, step: Awaitable[T]) -> T:
        """Await `step` and return its result; raises TimeoutError after `due_s`, in the event loop's time."""
        task = asyncio.current_task(self.loop)
        assert task is not None
        self._waits[task] = due_s
        if not self._timer_set:
            self._timer_set = True
            self.loop.call_later(CHECK_INTERVAL_S, self._check)
        try:
            return await step
        except asyncio.CancelledError:
            if self._waits[task] == _INTERRUPTED and task.uncancel() == 0:
                raise TimeoutError from None
            raise
        finally:
            del self._waits[task]

    def _check(self) -> None:
        now = self.loop.time()
        for task, due_s in self._waits.items():
            if _INTERRUPTED < due_s <= now:
                self._waits[task] = _INTERRUPTED
                task.cancel()
        self._timer_set = bool(self._waits)
        if self._timer_set:
            self.loop.call_later(CHECK_INTERVAL_S, self._check)
