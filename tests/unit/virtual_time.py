"""An event loop whose time passes at once wherever it would wait for a timer."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWaiting(selectors.DefaultSelector):
    """Moves the loop's time on instead of waiting, unless something has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(None if timeout is None else 0.0)
        if not found and timeout is not None:
            self.now_s += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._waits = _NoWaiting()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.now_s


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine on virtual time, which begins at 0 s; return its result."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work)
