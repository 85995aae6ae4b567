"""Threads that transfer large bodies, so that the event loop stays free to answer small requests.

A thread gets one direction of one connection for one transfer: as much of one body as the peer sends or takes without a
pause.  The event loop transfers the rest, and anything that is not worth a thread, as usual (see `lent_socket`).
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

THREADS_MAX: Final = 16
"""Concurrent transfers.  They are short; if no thread is free, the event loop transfers the body."""
ALTERNATION_S: Final = 1.0
"""How long threads are used after a request that came on another connection than the one before.  For a single
connection the event loop is faster, as it saves the thread switches, and no other client waits for it."""


class TransferThreads:
    """The transfer threads of one server.  Linux only."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(THREADS_MAX, "transfer")
        self._in_progress = 0
        self._last_fd = 0
        self._last_alternation_s = -ALTERNATION_S
        """Time of the last request that came on another connection than the one before."""

    @classmethod
    def if_supported(cls) -> Self | None:
        """Return the threads, or None on systems other than Linux, for which there are no transfer loops."""
        return cls() if sys.platform == "linux" else None

    def note_request(self, fd: int) -> None:
        """Note a request on the connection with the file descriptor `fd`."""
        if self._last_fd not in (fd, 0):
            self._last_alternation_s = self._loop.time()
        self._last_fd = fd

    def send(self, fd: int, pieces: Pieces, then: Callable[[int | None], None]) -> bool:
        """Start `sockets.send` in a thread, and call `then` with its result, or with None if it raised.

        Returns False if no thread is free, or none is used because only one connection is active.
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
        """Start `sockets.receive` likewise; `frame` is (stream, bytes due of the current frame, its flags)."""
        return self._begin(partial(sockets.receive, fd, places, *frame, bytes_max), then)

    def _begin(self, transfer: Callable[[], T], then: Callable[[T | None], None]) -> bool:
        if self._in_progress == THREADS_MAX or self._loop.time() - self._last_alternation_s >= ALTERNATION_S:
            return False
        self._in_progress += 1

        def ended(done: asyncio.Future[T]) -> None:
            self._in_progress -= 1
            error = done.exception()
            if error is None:
                then(done.result())
            else:
                log.error("http2.transfer_failed", exc_info=error)
                then(None)

        self._loop.run_in_executor(self._threads, transfer).add_done_callback(ended)
        return True

    def close(self) -> None:
        """Start no more transfers; those in progress end by themselves."""
        self._threads.shutdown(wait=False)
