"""What is written and not read: who leaves it unread for too long is hung up on, over HTTP/1.1 and HTTP/2 alike."""

import asyncio
from functools import partial

from paramserver.limits import PACE_BYTES_PER_S, PATIENCE_S


class Unread:
    """Of one connection, once an answer is on its way; while one is being handed over, its own time counts."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._answers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def watch(self) -> None:
        """All of an answer has been written, or the transport is closing, which it does when all is sent."""
        self._answers += 1
        left = self._transport.get_write_buffer_size()
        if (left or self._transport.is_closing()) and self._timer is None and not self._over:
            loop = asyncio.get_running_loop()
            due_s = PATIENCE_S + left / PACE_BYTES_PER_S
            self._timer = loop.call_later(due_s, partial(self._look, self._answers))

    def _look(self, answers: int) -> None:
        self._timer = None
        if answers != self._answers:
            self.watch()  # the newest has its own time; how much may lie unread is bounded by who writes
        elif self._transport.get_write_buffer_size() or self._transport.is_closing():
            self._transport.abort()

    def close(self) -> None:
        """The connection has ended; what is still being answered ends later."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
