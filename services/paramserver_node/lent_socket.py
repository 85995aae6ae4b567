"""One connection's socket as the threads of a carrier have it: theirs, until they are back, whatever becomes of it."""

import logging
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from paramserver_node.pieces import Pieces

if TYPE_CHECKING:  # who has no carrier needs no kernels
    from paramserver.kernels.sockets import Received
    from paramserver_node.carrier import Carrier

log = logging.getLogger("paramserver.node")


class LentSocket:
    """At most one thread reads from it, and at most one writes; whoever else does waits for them."""

    def __init__(self, carrier: "Carrier | None", fd: int, failed: Callable[[], None]) -> None:
        """`fd` is the connection's descriptor; without a carrier there are no threads.

        `failed` is called when a thread could not say how far it came: nobody can go on with the connection then.
        """
        self._carrier = carrier
        self._fd = fd
        self._failed = failed
        self._socket: socket.socket | None = None
        """Of its own, so that nobody else gets its number while a thread is using it."""
        self.reads = self.writes = False
        """Whether a thread does."""

    def read(
        self, places: Pieces, frame: tuple[int, int, int], bytes_max: int, then: Callable[["Received"], None]
    ) -> bool:
        """Has the rest of a body read to its places, and `then` told what came; False where there is no thread."""

        def over(received: "Received | None") -> None:
            self.reads = False
            self._let_go()
            if received is None:
                self._failed()
            else:
                then(received)

        if self._carrier is not None and not self.reads and (own := self._own()) is not None:
            self.reads = self._carrier.receive(own.fileno(), places, frame, bytes_max, over)
            return self.reads
        return False

    def write(self, pieces: Pieces, then: Callable[[int], None]) -> bool:
        """Has the pieces written, and `then` told how many bytes went; False where there is no thread."""

        def over(went: int | None) -> None:
            self.writes = False
            self._let_go()
            if went is None:
                self._failed()
            then(went or 0)

        if self._carrier is not None and not self.writes and (own := self._own()) is not None:
            self.writes = self._carrier.send(own.fileno(), pieces, over)
            return self.writes
        return False

    def close(self) -> None:
        """The connection is lost: whoever is on the way comes back, and nobody goes any more."""
        self._carrier = None
        if self._socket is not None and (self.reads or self.writes):
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer was faster
        self._let_go()

    def _own(self) -> socket.socket | None:
        if self._socket is None:
            try:
                self._socket = socket.socket(fileno=os.dup(self._fd))
            except OSError as e:
                log.warning("http2.no_thread reason=%s: too many files are open", e)
        return self._socket

    def _let_go(self) -> None:
        if self._carrier is None and self._socket is not None and not (self.reads or self.writes):
            self._socket.close()
