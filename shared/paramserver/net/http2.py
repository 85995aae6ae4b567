"""The client's side of an HTTP/2 connection to a node, sans I/O: bytes to send, and the answers to the requests.

Two drivers move the bytes: `connection` blocks, with one request at a time; `aio_connection` runs many concurrent
requests on an event loop.  Request bodies do not pass through here: the driver sends them after the heads of their
frames.  Large response bodies are read straight into the memory that their sink provides.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from paramserver.errors import PsError
from paramserver.limits import BODY_BYTES_MAX
from paramserver.net.calls import Sink
from paramserver.wire import http2 as wire
from paramserver.wire.http2 import Header

SILENCE_S: Final = 5.0
"""How long a node may be silent before it is sent a PING, and how long it has to react to that."""
FRAME_BYTES: Final = 2 << 20
WINDOW_BYTES: Final = wire.WINDOW_MAX
"""Receive window of the connection and of each stream: the maximum, because a body goes straight to its destination."""
DIRECT_BYTES_MIN: Final = 16 << 10
"""At least this much of a body must be due for a read straight into the sink's memory."""
STREAMS_MAX: Final = 100
"""Limit on concurrent streams until the node's SETTINGS give one."""
_NOWHERE: Final = memoryview(b"")
_HEADER_BYTES_MAX: Final = 64 << 10
_PING: Final = wire.frame(wire.PING, 0, 0, bytes(8))
_HELLO: Final = (
    wire.PREFACE
    + wire.settings({
        wire.ENABLE_PUSH: 0, wire.INITIAL_WINDOW_SIZE: WINDOW_BYTES, wire.MAX_FRAME_SIZE: FRAME_BYTES
    })
    + wire.u32_frame(0, wire.WINDOW_UPDATE, WINDOW_BYTES - wire.WINDOW_BYTES)
)  # fmt: skip


class Refused(OSError):
    """Raised when the node has not processed the request: it can be sent again on another connection."""


def broken_off(error: Exception) -> Refused:
    """Return the error of a request whose connection ended before the node had all of it: it executes no other."""
    return Refused(f"the connection ended while the request was sent ({error})")


class NotSent(TimeoutError):
    """Raised when the node did not take the whole body of a request in time: it has not carried it out."""

    def __init__(self, sent_bytes: int, body_bytes: int) -> None:
        super().__init__(f"{sent_bytes} of {body_bytes} bytes were sent")


class Answer:
    """The answer to one request, as it arrives."""

    def __init__(self, sink: Sink | None) -> None:
        self.status = 0
        """0 until the headers have arrived."""
        self.headers: Mapping[str, str] = {}
        self.body = bytearray()
        self.ended = False
        self.failed: Exception | None = None
        """Why it ended, if it failed: an OSError, or what the sink raised."""
        self.send_window = 0
        """Send window of the stream: bytes of the request's body that may be sent now."""
        self.received = 0
        """Bytes of the stream's receive window used since the last window update."""
        self.request_sent = self.response_ended = False
        """Whether the request has been sent completely, and whether the node has ended its side of the stream."""
        self._due: int | None = None
        """Bytes of the body that are still to come, if its length was announced."""
        self._sink = sink
        self._to_sink = False

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Take the headers.  Trailers, which follow the body, are ignored."""
        if self.status >= 200:
            return
        self.status, self.headers = status, headers
        length = headers.get("content-length", "")
        self._due = int(length) if status == 200 and length.isdecimal() else None
        if self.status == 200 and self._sink is not None:
            self._to_sink = True
            self._sink.begin()

    def room(self) -> memoryview:
        """Return the sink's memory for the next bytes of the body; empty if there is none."""
        return self._sink.room() if self._to_sink and self._sink is not None else _NOWHERE

    def feed(self, data: memoryview, *, in_place: bool) -> None:
        """Take the next bytes of the body; `in_place`: they are already in the memory that `room` returned."""
        if self._due is not None:
            self._due -= len(data)
        if not self._to_sink:
            if len(self.body) + len(data) > BODY_BYTES_MAX:
                self.fail(OSError(f"a body without a place is limited to {BODY_BYTES_MAX} bytes"))
            else:
                self.body += data
            return
        assert self._sink is not None
        try:
            if in_place:
                self._sink.filled(len(data))
            else:
                self._sink.feed(data)
        except PsError as e:
            self.fail(e)

    def end(self) -> None:
        """Finish the answer: it is complete, or malformed (RFC 9113, 8.1.1 and 8.3.2)."""
        if self._due or self.status < 200:
            self.failed = ConnectionResetError("the answer has another length than it announced, or no status")
        elif self._to_sink:
            assert self._sink is not None
            try:
                self._sink.end()
            except PsError as e:
                self.failed = e
        self.on_end()

    def fail(self, error: Exception) -> None:
        """End the answer with an error, unless it has already ended."""
        if not self.ended:
            self.failed = error
            self.on_end()

    def on_end(self) -> None:
        """Mark the answer as ended.  A driver overrides this to wake the task that waits for it."""
        self.ended = True


def _status_and_headers(headers: Sequence[Header]) -> tuple[int, Mapping[str, str]]:
    """Return the status (0 if there is none, as in trailers) and the headers."""
    texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    return int(texts.pop(":status", "0")), texts


class Client:
    """The state of one connection; the driver sends `unsent` and passes on what it reads."""

    def __init__(self) -> None:
        self.unsent = _HELLO
        """Bytes to send next."""
        self.usable = True
        """Whether another request can be sent on this connection."""
        self.streams_max = STREAMS_MAX
        self.open: dict[int, Answer] = {}
        """stream -> its answer."""
        self._scanner = wire.Scanner(FRAME_BYTES, _HEADER_BYTES_MAX)
        self._heads = wire.BlockReader(_HEADER_BYTES_MAX, _status_and_headers)
        self._newest = -1
        self._send_window = self._new_send_window = wire.WINDOW_BYTES
        """Send windows, in bytes: the connection's, and that of a new stream."""
        self._frame_bytes = wire.PAYLOAD_BYTES_MAX
        self._block_prefix = b""
        """What precedes each header block."""
        self._received = 0
        """Bytes of the connection's receive window used since the last window update."""

    # Sending

    def start_stream(self, headers: Sequence[Header], answer: Answer, *, bodyless: bool) -> int:
        """Begin a request and return its stream; `answer` receives the response."""
        self._newest = stream = self._newest + 2
        if stream > wire.WINDOW_MAX - 2:
            self.usable = False
        answer.send_window, answer.request_sent = self._new_send_window, bodyless
        self.open[stream] = answer
        flags = wire.END_HEADERS | wire.END_STREAM if bodyless else wire.END_HEADERS
        self.unsent += wire.frame(wire.HEADERS, flags, stream, self._block_prefix + wire.encoded(headers))
        return stream

    def allowed(self, answer: Answer, size: int) -> int:
        """Return how many of `size` bytes of the request's body fit into a DATA frame and the send windows now."""
        return min(size, self._frame_bytes, self._send_window, answer.send_window)

    def start_data_frame(self, stream: int, size: int, *, ends: bool) -> None:
        """Append the head of a DATA frame; the driver must send `size` bytes of the body after `unsent`."""
        self.unsent += wire.head(size, wire.DATA, wire.END_STREAM if ends else 0, stream)
        self._send_window -= size
        answer = self.open[stream]
        answer.send_window -= size
        answer.request_sent = ends

    def ping(self) -> None:
        """Send a PING, to find out whether the node is alive."""
        self.unsent += _PING

    def close(self, stream: int) -> None:
        """Forget the stream; reset it (RST_STREAM) if the request or the answer is not complete."""
        answer = self.open.pop(stream)
        if not (answer.request_sent and answer.response_ended):
            self.unsent += wire.u32_frame(stream, wire.RST_STREAM, wire.CANCEL)

    # Receiving

    def sink_buffer(self) -> memoryview | None:
        """Return the sink's memory for the next read if enough of a body is due (`DIRECT_BYTES_MIN`), else None."""
        due = self._scanner.due
        if due < DIRECT_BYTES_MIN or (answer := self.open.get(self._scanner.due_stream)) is None or answer.ended:
            return None
        room = answer.room()
        return room[:due] if len(room) >= DIRECT_BYTES_MIN else None

    def sink_buffer_filled(self, data: memoryview) -> None:
        """Process bytes that were read into the memory that `sink_buffer` returned."""
        stream = self._scanner.due_stream
        self._data(self._scanner.consumed(len(data)), stream, data, len(data), in_place=True)

    def feed(self, data: memoryview) -> None:
        """Process the next bytes.  Raises OSError if they are not valid HTTP/2."""
        try:
            for kind, flags, stream, payload, cost in self._scanner.scan(data):
                self._heads.check(kind)
                if kind == wire.DATA:
                    self._data(flags, stream, payload, cost)
                else:
                    self._frame(kind, flags, stream, payload)
        except wire.Http2Error as e:
            raise OSError(str(e)) from None

    def _data(self, flags: int, stream: int, data: memoryview, cost: int, *, in_place: bool = False) -> None:
        self._received += cost
        if self._received > WINDOW_BYTES // 2:
            self.unsent += wire.u32_frame(0, wire.WINDOW_UPDATE, self._received)
            self._received = 0
        answer = self.open.get(stream)
        if answer is None:
            return
        if flags & wire.END_STREAM:
            answer.response_ended = True
        if answer.ended:
            return
        answer.received += cost
        if answer.received > WINDOW_BYTES // 2 and not flags & wire.END_STREAM:
            self.unsent += wire.u32_frame(stream, wire.WINDOW_UPDATE, answer.received)
            answer.received = 0
        if data:
            answer.feed(data, in_place=in_place)
        if flags & wire.END_STREAM and not answer.ended:
            answer.end()

    def _frame(self, kind: int, flags: int, stream: int, payload: memoryview) -> None:
        if kind in (wire.HEADERS, wire.CONTINUATION):
            self._headers(flags, stream, payload)
        elif kind == wire.WINDOW_UPDATE:
            if stream == 0:
                self._send_window += wire.parse_u31(payload)
            elif (answer := self.open.get(stream)) is not None:
                answer.send_window += wire.parse_u31(payload)
        elif kind == wire.SETTINGS and not flags & wire.ACK:
            self._set(wire.parse_settings(payload))
            self.unsent += wire.frame(wire.SETTINGS, wire.ACK, 0)
        elif kind == wire.PING and not flags & wire.ACK:
            self.unsent += wire.frame(wire.PING, wire.ACK, 0, bytes(payload))
        elif kind == wire.GOAWAY:
            self.usable = False
            last = wire.parse_u31(payload[:4]) if len(payload) >= 8 else wire.WINDOW_MAX
            for number, answer in self.open.items():
                if number > last:
                    answer.fail(Refused("the node is closing this connection"))
        elif kind == wire.RST_STREAM and (answer := self.open.get(stream)) is not None:
            answer.request_sent = answer.response_ended = True
            if wire.parse_u32(payload) == wire.REFUSED_STREAM:
                answer.fail(Refused("the node refused the stream"))
            else:
                answer.fail(ConnectionResetError("the node reset the stream"))

    def _headers(self, flags: int, stream: int, payload: memoryview) -> None:
        """Process a frame of a header block: when it is complete, it begins an answer, or ends one as its trailers."""
        if (block := self._heads.read(stream, flags, payload)) is None:
            return
        (status, headers), ends = block
        answer = self.open.get(stream)
        if answer is None or answer.ended:
            return
        answer.begin(status, headers)
        if ends:
            answer.response_ended = True
            answer.end()

    def _set(self, values: dict[int, int]) -> None:
        window = values.get(wire.INITIAL_WINDOW_SIZE, self._new_send_window)
        for answer in self.open.values():
            answer.send_window += window - self._new_send_window
        self._new_send_window = window
        self._frame_bytes = min(FRAME_BYTES, values.get(wire.MAX_FRAME_SIZE, self._frame_bytes))
        self._block_prefix = wire.block_prefix(values, self._block_prefix)
        self.streams_max = values.get(wire.MAX_CONCURRENT_STREAMS, self.streams_max)
