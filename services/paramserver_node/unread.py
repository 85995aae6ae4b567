"""What is written and not read: who leaves it unread for too long is hung up on."""

import asyncio
from functools import partial

from paramserver.limits import PACE_BYTES_PER_S, PATIENCE_S


class Unread:
    """Of one connection, once an answer is on its way; while one is being handed over, its own time counts."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._answers = 0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """All of an answer has been written."""
        self._answers += 1
        left = self._transport.get_write_buffer_size()
        if left and self._timer is None:
            loop = asyncio.get_running_loop()
            due_s = PATIENCE_S + left / PACE_BYTES_PER_S
            self._timer = loop.call_later(due_s, partial(self._look, self._answers))

    def _look(self, answers: int) -> None:
        self._timer = None
        if answers != self._answers:
            self.watch()  # it has read some, else nobody could have answered more
        elif self._transport.get_write_buffer_size():
            self._transport.abort()

    def close(self) -> None:
        """The connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
