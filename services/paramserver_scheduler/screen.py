"""What open pages see: the newest status, written out once for all of them."""

import asyncio
from collections.abc import AsyncIterator

from paramserver import limits
from paramserver.errors import problem


class Screen:
    """The status of now as bytes, and the streams that show it."""

    def __init__(self) -> None:
        self._text = b""
        self._shown = asyncio.Event()
        self._readers = 0
        self._dark = False

    def show(self, text: bytes) -> None:
        """This is the status now."""
        self._text = text
        self._turn()

    def close(self) -> None:
        """Every stream ends: the scheduler is stopping, or leads no more."""
        self._dark = True
        self._turn()

    def _turn(self) -> None:
        self._shown.set()
        self._shown = asyncio.Event()

    async def stream(self) -> AsyncIterator[bytes]:
        """The status as server-sent events, the newest at once and then each new one; a slow reader skips some."""
        self._readers += 1
        try:
            while not self._dark:
                shown = self._shown
                if self._text:
                    yield b"event: status\ndata: " + self._text + b"\n\n"
                if shown is self._shown:
                    await shown.wait()
        finally:
            self._readers -= 1

    def check_room(self) -> None:
        """Raises Unavailable (`too_many_requests`) when as many pages are open as there may be."""
        if self._readers >= limits.STATUS_STREAMS_MAX:
            raise problem("too_many_requests", f"{self._readers} status streams are open, which is the bound")
