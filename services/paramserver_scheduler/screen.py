"""The newest status for open status pages, serialized once for all of them."""

import asyncio
from collections.abc import AsyncIterator

from paramserver import limits
from paramserver.errors import problem


class Screen:
    """The current status as bytes, and the streams that send it to pages."""

    def __init__(self) -> None:
        self._text = b""
        self._shown = asyncio.Event()
        self._readers = 0
        self._dark = False

    def show(self, text: bytes) -> None:
        """Send a new status to all streams."""
        self._text = text
        self._turn()

    def close(self) -> None:
        """End every stream, because the scheduler stops or no longer leads."""
        self._dark = True
        self._turn()

    def _turn(self) -> None:
        self._shown.set()
        self._shown = asyncio.Event()

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the status as server-sent events: the newest at once, then each new one; a slow reader skips some."""
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
        """Raise Unavailable (`too_many_requests`) if the maximum number of streams is open."""
        if self._readers >= limits.STATUS_STREAMS_MAX:
            raise problem("too_many_requests", f"{self._readers} status streams are open, which is the limit")
