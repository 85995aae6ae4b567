"""What an HTTP/2 client may send of its bodies: the flow-control window of its connection."""

from typing import Final

from paramserver.wire import http2 as wire

CONNECTION_WINDOW_BYTES: Final = 8 << 20
"""Receive window of a connection; larger than a stream's, so that a body that waits does not block the others."""


class ReceiveLimits:
    """The limits of one connection; each stream has a window of its own."""

    def __init__(self) -> None:
        self._receive_window = CONNECTION_WINDOW_BYTES
        """Receive window of the connection: bytes of bodies that the client may still send."""
        self._used = 0
        """Bytes consumed but not yet returned to the client as window updates."""

    def queue_frame(self, frame: bytes) -> None:
        """Queue a frame for the client."""
        raise NotImplementedError

    def used(self, size: int) -> None:
        """Return `size` bytes to the connection's receive window, as they are no longer held."""
        self._used += size
        if self._used >= max(1, self._receive_window):  # at least half of what waiting bodies do not hold
            self._receive_window += self._used
            self.queue_frame(wire.u32_frame(0, wire.WINDOW_UPDATE, self._used))
            self._used = 0

    def allow(self, size: int) -> None:
        """Let the client send at least `size` bytes, for which there is memory besides what the window stands for."""
        if (missing := size - self._receive_window) > 0:
            self._used -= missing
            self._receive_window = size
            self.queue_frame(wire.u32_frame(0, wire.WINDOW_UPDATE, missing))
