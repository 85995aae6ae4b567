"""What is written and not read: who leaves it unread for too long is hung up on, over HTTP/1.1 and HTTP/2 alike."""

import asyncio
from functools import partial
from typing import Final

from paramserver.limits import PACE_BYTES_PER_S, PATIENCE_S

_RECORDS: Final = 64
"""One part in so many, or less, is what TLS adds to what is left."""


class Unread:
    """Of one connection, once an answer is on its way; while one is being handed over, its own time counts."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.handed = 0
        """Bytes that the transport has been given; whoever goes on writing after `watch` counts them."""
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def watch(self) -> None:
        """All of an answer has been written, or the transport is closing, which it does when all is sent."""
        left = self._transport.get_write_buffer_size()
        if (left or self._transport.is_closing()) and self._timer is None and not self._over:
            loop = asyncio.get_running_loop()
            due_s = PATIENCE_S + left / PACE_BYTES_PER_S
            self._timer = loop.call_later(due_s, partial(self._look, self.handed, self._transport.is_closing()))

    def caught_up(self) -> None:
        """Little is left, and nothing was written meanwhile."""
        if self._timer is not None and not self._transport.is_closing():
            self._timer.cancel()
            self._timer = None

    def _look(self, handed: int, closing: bool) -> None:
        """`handed`, `closing`: as they were when the time began."""
        self._timer = None
        left = self._transport.get_write_buffer_size()
        if closing or self.handed - left + left // _RECORDS < handed:
            self._transport.abort()
        else:
            self.watch()  # what is left came later: another answer, or one that is being read all the while

    def close(self) -> None:
        """The connection has ended; what is still being answered ends later."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
