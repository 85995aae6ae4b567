"""Deadlines for unread answers: a client that reads too slowly is disconnected, over HTTP/1.1 and HTTP/2 alike."""

import asyncio
from functools import partial
from typing import Final

from paramserver.limits import PACE_BYTES_PER_S, PATIENCE_S

_RECORDS: Final = 64
"""TLS adds at most one part in this many to the bytes that are left to send."""


class ReadDeadline:
    """The deadline of one connection, once an answer is written; until then, the middleware has its own."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.bytes_written = 0
        """Bytes given to the transport; a protocol that goes on writing after `start` must count them."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def start(self) -> None:
        """Start the deadline: an answer is written completely, or the transport will close once all is sent."""
        left = self._transport.get_write_buffer_size()
        if (left or self._transport.is_closing()) and self._timer is None and not self._closed:
            loop = asyncio.get_running_loop()
            due_s = PATIENCE_S + left / PACE_BYTES_PER_S
            self._timer = loop.call_later(due_s, partial(self._check, self.bytes_written, self._transport.is_closing()))

    def cancel(self) -> None:
        """Cancel the deadline: little is left to send, and nothing was written meanwhile."""
        if self._timer is not None and not self._transport.is_closing():
            self._timer.cancel()
            self._timer = None

    def _check(self, written_before: int, closing: bool) -> None:
        """Abort the connection if what was left is still unread; the arguments are of when the deadline was started."""
        self._timer = None
        left = self._transport.get_write_buffer_size()
        if closing or self.bytes_written - left + left // _RECORDS < written_before:
            self._transport.abort()
        else:
            self.start()  # what is left was written later: another answer, or one that is being read all the time

    def close(self) -> None:
        """Start no more deadlines: the connection has ended, though requests may still be being answered."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
