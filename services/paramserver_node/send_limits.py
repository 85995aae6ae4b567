"""What an HTTP/2 client lets the server send: its flow-control windows, and its settings."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from paramserver.wire import http2 as wire
from paramserver.wire.http2 import Http2Error

if TYPE_CHECKING:
    from paramserver_node.stream import Stream


class SendLimits:
    """The limits of one connection; each stream has a window of its own."""

    def __init__(self, frame_bytes_max: int) -> None:
        """`frame_bytes_max`: largest payload to send in one frame, whatever the client would take."""
        self._frame_bytes_max = frame_bytes_max
        self._granted_bytes = wire.WINDOW_BYTES
        """Bytes that the connection's window has ever allowed."""
        self.send_window = self.initial_send_window = wire.WINDOW_BYTES
        """Send windows, in bytes: the connection's, and that of a new stream."""
        self.frame_bytes = wire.PAYLOAD_BYTES_MAX
        """Largest payload to send in one frame."""
        self.block_prefix = b""
        """What precedes each header block."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of the bodies of answers that were sent so far."""
        return self._granted_bytes - self.send_window

    def widen(self, stream: "Stream | None", by: int, streams: "Collection[Stream]") -> None:
        """Widen the window of a stream; without one, that of the connection with these streams.  Raises Http2Error."""
        if not by:
            raise Http2Error(wire.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0")
        if stream is None:
            self.send_window += by
            self._granted_bytes += by
        else:
            stream.send_window += by
        if (self.send_window if stream is None else stream.send_window) > wire.WINDOW_MAX:
            raise Http2Error(wire.FLOW_CONTROL_ERROR, "a WINDOW_UPDATE beyond the largest window")
        for one in streams if stream is None else (stream,):
            one.wake()

    def apply_settings(self, values: dict[int, int], streams: "Collection[Stream]") -> None:
        """Apply the client's SETTINGS; raises Http2Error."""
        self.frame_bytes = min(self._frame_bytes_max, values.get(wire.MAX_FRAME_SIZE, self.frame_bytes))
        self.block_prefix = wire.block_prefix(values, self.block_prefix)
        window = values.get(wire.INITIAL_WINDOW_SIZE, self.initial_send_window)
        for stream in streams:
            stream.send_window += window - self.initial_send_window
            if stream.send_window > wire.WINDOW_MAX:
                raise Http2Error(wire.FLOW_CONTROL_ERROR, "a window that is too large")
            stream.wake()
        self.initial_send_window = window
