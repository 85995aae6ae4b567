"""The newest status for open status pages, serialized once for all of them."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Final
from weakref import WeakSet

from paramserver import limits
from paramserver.errors import problem

ALIVE_S: Final = 2.0
"""Interval between comments in a stream without news: pages take six seconds of silence as the loss of their node."""


class _Place:
    """One of the streams that may be open at once; a stream that is given up before it begins lets go of it, too."""


class StatusBroadcast:
    """The current status as bytes, and the streams that send it to pages."""

    def __init__(self) -> None:
        self._text = b""
        self._updated = asyncio.Event()
        self._places = WeakSet[_Place]()
        self._closed = False

    def publish(self, text: bytes) -> None:
        """Send a new status to all streams."""
        self._text = text
        self._wake_streams()

    def close(self) -> None:
        """End every stream, because the scheduler stops or no longer leads."""
        self._closed = True
        self._wake_streams()

    def _wake_streams(self) -> None:
        self._updated.set()
        self._updated = asyncio.Event()

    def stream(self) -> AsyncGenerator[bytes, None]:
        """Return the status as server-sent events: the newest at once, then each new one; a slow reader skips some.

        In a large cluster the status comes less often than once a second; a comment fills the time in between.  Raises
        Unavailable (`too_many_requests`) if the maximum number of streams is open.
        """
        if len(self._places) >= limits.STATUS_STREAMS_MAX:
            raise problem(
                "too_many_requests", f"the limit of {limits.STATUS_STREAMS_MAX} open status streams is reached"
            )
        place = _Place()
        self._places.add(place)
        return self._events(place)

    async def _events(self, place: _Place) -> AsyncGenerator[bytes, None]:
        try:
            while not self._closed:
                updated = self._updated
                if self._text:
                    yield b"event: status\ndata: " + self._text + b"\n\n"
                while updated is self._updated:
                    try:
                        async with asyncio.timeout(ALIVE_S):
                            await updated.wait()
                    except TimeoutError:
                        yield b": alive\n\n"
        finally:
            self._places.discard(place)
