"""Threads that move large bodies, so that the event loop need not: it has the small requests of everybody to answer.

A thread has one direction of one connection for one trip: as much of one body as its peer sends or takes without a
pause.  What is left then, or was never worth a thread, the event loop moves as it moves all else (see `lent_socket`).
"""

import asyncio
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, Self, TypeVar

from paramserver.kernels import sockets
from paramserver.kernels.sockets import Received
from paramserver_node.pieces import Pieces

T = TypeVar("T")
log = logging.getLogger("paramserver.node")

THREADS: Final = 16
"""Trips at a time; they are short, and what finds no thread the event loop does."""
SEVERAL_S: Final = 1.0
"""So long after two connections have asked in turn there are trips.  For one alone the event loop is faster by what it
costs to change threads, and it keeps nobody waiting."""


class Carrier:
    """The threads of one server, for Linux."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(THREADS, "carrier")
        self._away = 0
        self._asker = 0
        self._in_turn_s = -SEVERAL_S
        """When it was another connection that asked than the one before."""

    @classmethod
    def here(cls) -> Self | None:
        """None where the loops that move bodies are not to be had."""
        return cls() if sys.platform == "linux" else None

    def asked(self, by: int) -> None:
        """A request has come on the connection with that descriptor."""
        if self._asker not in (by, 0):
            self._in_turn_s = self._loop.time()
        self._asker = by

    def send(self, fd: int, pieces: Pieces, then: Callable[[int | None], None]) -> bool:
        """Begins `sockets.send`, of which `then` is told, with None if it failed.

        False where no thread is free, or none is needed.
        """
        return self._begin(partial(sockets.send, fd, pieces), then)

    def receive(
        self,
        fd: int,
        places: Pieces,
        frame: tuple[int, int, int],
        bytes_max: int,
        then: Callable[[Received | None], None],
    ) -> bool:
        """The same with `sockets.receive`; `frame` is the stream, what is due of a frame, and its flags."""
        return self._begin(partial(sockets.receive, fd, places, *frame, bytes_max), then)

    def _begin(self, trip: Callable[[], T], then: Callable[[T | None], None]) -> bool:
        if self._away == THREADS or self._loop.time() - self._in_turn_s >= SEVERAL_S:
            return False
        self._away += 1

        def over(done: asyncio.Future[T]) -> None:
            self._away -= 1
            error = done.exception()
            if error is None:
                then(done.result())
            else:
                log.error("http2.trip_failed", exc_info=error)
                then(None)

        self._loop.run_in_executor(self._threads, trip).add_done_callback(over)
        return True

    def close(self) -> None:
        """No more trips; those under way end by themselves."""
        self._threads.shutdown(wait=False)
