"""Deadlines for unread answers: a client that reads too slowly is disconnected, over HTTP/1.1 and HTTP/2 alike."""

import asyncio
from functools import partial
from typing import Final

from paramserver.limits import PACE_BYTES_PER_S, PATIENCE_S

_RECORDS: Final = 64
"""TLS adds at most one part in this many to the bytes that are left to send."""


class Unread:
    """The deadline of one connection, once an answer is written; until then, the middleware has its own."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.handed = 0
        """Bytes given to the transport; a protocol that goes on writing after `watch` must count them."""
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def watch(self) -> None:
        """Start the deadline: an answer is written completely, or the transport will close once all is sent."""
        left = self._transport.get_write_buffer_size()
        if (left or self._transport.is_closing()) and self._timer is None and not self._over:
            loop = asyncio.get_running_loop()
            due_s = PATIENCE_S + left / PACE_BYTES_PER_S
            self._timer = loop.call_later(due_s, partial(self._look, self.handed, self._transport.is_closing()))

    def caught_up(self) -> None:
        """Cancel the deadline: little is left to send, and nothing was written meanwhile."""
        if self._timer is not None and not self._transport.is_closing():
            self._timer.cancel()
            self._timer = None

    def _look(self, handed: int, closing: bool) -> None:
        """Abort the connection if what was left is still unread; `handed`, `closing`: when the deadline was started."""
        self._timer = None
        left = self._transport.get_write_buffer_size()
        if closing or self.handed - left + left // _RECORDS < handed:
            self._transport.abort()
        else:
            self.watch()  # what is left was written later: another answer, or one that is being read all the time

    def close(self) -> None:
        """Start no more deadlines: the connection has ended, though requests may still be being answered."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
