"""A connection's socket, lent to transfer threads: they keep it until they are done, even if the connection ends."""

import logging
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from paramserver_node.pieces import Pieces

if TYPE_CHECKING:  # without threads, no kernels are needed
    from paramserver.kernels.sockets import Received
    from paramserver_node.transfer_threads import TransferThreads

log = logging.getLogger("paramserver.node")


class LentSocket:
    """The socket, for at most one reading and one writing thread; while one does, nobody else may."""

    def __init__(self, threads: "TransferThreads | None", fd: int, failed: Callable[[], None]) -> None:
        """`fd` is the connection's file descriptor; without `threads`, the event loop transfers everything.

        `failed` is called if a thread raised: its progress is unknown, so the connection cannot go on.
        """
        self._threads = threads
        self._fd = fd
        self._failed = failed
        self._socket: socket.socket | None = None
        """A duplicate, so that the descriptor's number is not reused while a thread uses it."""
        self.reads = self.writes = False
        """Whether a thread is reading, and whether one is writing."""

    def read(
        self, places: Pieces, frame: tuple[int, int, int], bytes_max: int, then: Callable[["Received"], None]
    ) -> bool:
        """Have a thread read the rest of a body into `places`, then call `then`; returns False if there is none."""

        def done(received: "Received | None") -> None:
            self.reads = False
            self._close_if_unused()
            if received is None:
                self._failed()
            else:
                then(received)

        if self._threads is not None and not self.reads and (duplicate := self._duplicate()) is not None:
            self.reads = self._threads.receive(duplicate.fileno(), places, frame, bytes_max, done)
            return self.reads
        return False

    def write(self, pieces: Pieces, then: Callable[[int], None]) -> bool:
        """Have a thread write `pieces`, then call `then` with the bytes written; returns False if there is none."""

        def done(went: int | None) -> None:
            self.writes = False
            self._close_if_unused()
            if went is None:
                self._failed()
            then(went or 0)

        if self._threads is not None and not self.writes and (duplicate := self._duplicate()) is not None:
            self.writes = self._threads.send(duplicate.fileno(), pieces, done)
            return self.writes
        return False

    def close(self) -> None:
        """Stop lending, as the connection is lost; threads that use the socket return early."""
        self._threads = None
        if self._socket is not None and (self.reads or self.writes):
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # disconnected already
        self._close_if_unused()

    def _duplicate(self) -> socket.socket | None:
        if self._socket is None:
            try:
                self._socket = socket.socket(fileno=os.dup(self._fd))
            except OSError as e:
                log.warning("http2.no_thread reason=%s", e)
        return self._socket

    def _close_if_unused(self) -> None:
        if self._threads is None and self._socket is not None and not (self.reads or self.writes):
            self._socket.close()
