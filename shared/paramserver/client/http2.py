"""The client's side of an HTTP/2 connection to a shard, without any I/O: what is to be sent, and what came of it.

Two drivers move the bytes: `connection` blocks and has one request at a time, `aio_connection` has many on an event
loop.  A body goes from the caller's memory, an answer to where it is wanted; nothing else is copied.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from paramserver.client.calls import Sink
from paramserver.errors import PsError
from paramserver.wire import http2 as wire
from paramserver.wire.http2 import Header

SILENCE_S: Final = 5.0
"""How long a shard may be silent before it is asked whether it lives, and how long it has for saying so."""
FRAME_BYTES: Final = 2 << 20
WINDOW_BYTES: Final = wire.WINDOW_MAX
"""What a shard may send ahead: its answer goes straight to where it is wanted."""
DIRECT_BYTES_MIN: Final = 16 << 10
"""What is worth a read to where it belongs."""
STREAMS_MAX: Final = 100
"""Requests that may be open at once until the shard says how many."""
_NOWHERE: Final = memoryview(b"")
_HEADER_BYTES_MAX: Final = 64 << 10
_PING: Final = wire.frame(wire.PING, 0, 0, bytes(8))
_HELLO: Final = (
    wire.PREFACE
    + wire.settings({
        wire.ENABLE_PUSH: 0, wire.INITIAL_WINDOW_SIZE: WINDOW_BYTES, wire.MAX_FRAME_SIZE: FRAME_BYTES
    })
    + wire.word(0, wire.WINDOW_UPDATE, WINDOW_BYTES - wire.WINDOW_BYTES)
)  # fmt: skip


class Refused(OSError):
    """Raised where the shard has not looked at the request: it can be sent again on another connection."""


class Answer:
    """The answer to one request, as it arrives."""

    def __init__(self, sink: Sink | None) -> None:
        self.status = 0
        """0 until its headers are here."""
        self.headers: Mapping[str, str] = {}
        self.body = bytearray()
        self.ended = False
        self.failed: Exception | None = None
        """Why it ended, if not well: OSError, or what the sink raised."""
        self.credit = 0
        """What may be sent of the request's body."""
        self.received = 0
        """Of its stream's window, since that was widened."""
        self.asked = self.heard = False
        """Whether all of the request has been said, and whether the shard has said all that it will."""
        self._sink = sink
        self._to_sink = False

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Its headers, or what follows its body."""
        if self.status >= 200:
            return
        self.status, self.headers = status, headers
        if self.status == 200 and self._sink is not None:
            self._to_sink = True
            self._sink.begin()

    def room(self) -> memoryview:
        """Where the next bytes of its body belong, as far as that is known."""
        return self._sink.room() if self._to_sink and self._sink is not None else _NOWHERE

    def feed(self, data: memoryview, *, there: bool) -> None:
        """The next bytes of its body; `there`: they have been put where `room` said."""
        if not self._to_sink:
            self.body += data
            return
        assert self._sink is not None
        try:
            if there:
                self._sink.filled(len(data))
            else:
                self._sink.feed(data)
        except PsError as e:
            self.fail(e)

    def end(self) -> None:
        """All is here."""
        if self._to_sink:
            assert self._sink is not None
            try:
                self._sink.end()
            except PsError as e:
                self.failed = e
        self.over()

    def fail(self, error: Exception) -> None:
        """There is no more to come."""
        if not self.ended:
            self.failed = error
            self.over()

    def over(self) -> None:
        """It has ended; whoever waits may be told."""
        self.ended = True


def _said(headers: Sequence[Header]) -> tuple[int, Mapping[str, str]]:
    """The status, 0 where there is none, and the headers."""
    texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    return int(texts.pop(":status", "0")), texts


class Client:
    """What is said on one connection."""

    def __init__(self) -> None:
        self.unsent = _HELLO
        """Goes next."""
        self.usable = True
        """Whether another request can be sent on it."""
        self.streams_max = STREAMS_MAX
        self.open: dict[int, Answer] = {}
        """By their streams."""
        self._scanner = wire.Scanner(FRAME_BYTES, _HEADER_BYTES_MAX)
        self._decoder = wire.HeaderDecoder(_HEADER_BYTES_MAX, _said)
        self._block: bytearray | None = None
        self._block_ends = False
        self._newest = -1
        self._credit = self._new_credit = wire.WINDOW_BYTES
        """What may be sent of all bodies, and of a new one."""
        self._frame_bytes = wire.PAYLOAD_BYTES_MAX
        self._received = 0
        """Of the window of the connection, since it was widened."""

    # What goes

    def begin(self, headers: Sequence[Header], answer: Answer, *, bodyless: bool) -> int:
        """A request whose answer is to go there; its stream."""
        self._newest = stream = self._newest + 2
        if stream > wire.WINDOW_MAX - 2:
            self.usable = False
        answer.credit, answer.asked = self._new_credit, bodyless
        self.open[stream] = answer
        flags = wire.END_HEADERS | wire.END_STREAM if bodyless else wire.END_HEADERS
        self.unsent += wire.frame(wire.HEADERS, flags, stream, wire.encoded(headers))
        return stream

    def allowed(self, answer: Answer, size: int) -> int:
        """How many of so many bytes the next frame of that request's body may hold."""
        return min(size, self._frame_bytes, self._credit, answer.credit)

    def body(self, stream: int, size: int, *, ends: bool) -> None:
        """A frame of a request's body; so many bytes must follow `unsent`."""
        self.unsent += wire.head(size, wire.DATA, wire.END_STREAM if ends else 0, stream)
        self._credit -= size
        answer = self.open[stream]
        answer.credit -= size
        answer.asked = ends

    def ping(self) -> None:
        """Asks whether the shard lives."""
        self.unsent += _PING

    def close(self, stream: int) -> None:
        """Nobody waits for that answer; if there is more to come of it, or of the request, the shard is told so."""
        answer = self.open.pop(stream)
        if not (answer.asked and answer.heard):
            self.unsent += wire.word(stream, wire.RST_STREAM, wire.CANCEL)

    # What comes

    def place(self) -> memoryview | None:
        """Where what is read next belongs, if it is of a body and not little."""
        due = self._scanner.due
        if due < DIRECT_BYTES_MIN or (answer := self.open.get(self._scanner.due_stream)) is None or answer.ended:
            return None
        room = answer.room()
        return room[:due] if len(room) >= DIRECT_BYTES_MIN else None

    def filled(self, data: memoryview) -> None:
        """Those bytes have been put in `place`."""
        stream = self._scanner.due_stream
        self._data(self._scanner.passed(len(data)), stream, data, len(data), there=True)

    def feed(self, data: memoryview) -> None:
        """The next bytes; raises OSError for what is no HTTP/2."""
        try:
            for kind, flags, stream, payload, cost in self._scanner.scan(data):
                if kind == wire.DATA and self._block is None:
                    self._data(flags, stream, payload, cost)
                else:
                    self._frame(kind, flags, stream, payload)
        except wire.Http2Error as e:
            raise OSError(str(e)) from None

    def _data(self, flags: int, stream: int, data: memoryview, cost: int, *, there: bool = False) -> None:
        self._received += cost
        if self._received > WINDOW_BYTES // 2:
            self.unsent += wire.word(0, wire.WINDOW_UPDATE, self._received)
            self._received = 0
        answer = self.open.get(stream)
        if answer is None:
            return
        if flags & wire.END_STREAM:
            answer.heard = True
        if answer.ended:
            return
        answer.received += cost
        if answer.received > WINDOW_BYTES // 2 and not flags & wire.END_STREAM:
            self.unsent += wire.word(stream, wire.WINDOW_UPDATE, answer.received)
            answer.received = 0
        if data:
            answer.feed(data, there=there)
        if flags & wire.END_STREAM and not answer.ended:
            answer.end()

    def _frame(self, kind: int, flags: int, stream: int, payload: memoryview) -> None:
        if kind in (wire.HEADERS, wire.CONTINUATION):
            if kind == wire.HEADERS:
                self._block, self._block_ends = bytearray(wire.block_in(flags, payload)), bool(flags & wire.END_STREAM)
            elif self._block is None or len(self._block) > _HEADER_BYTES_MAX:
                raise wire.Http2Error(wire.PROTOCOL_ERROR, "headers without a beginning, or without an end")
            else:
                self._block += payload
            if flags & wire.END_HEADERS:
                block, self._block = bytes(self._block), None
                status, said = self._decoder.decode(block)
                answer = self.open.get(stream)
                if answer is not None and not answer.ended:
                    answer.begin(status, said)
                    if self._block_ends:
                        answer.heard = True
                        answer.end()
        elif kind == wire.WINDOW_UPDATE:
            if stream == 0:
                self._credit += wire.word_in(payload)
            elif (answer := self.open.get(stream)) is not None:
                answer.credit += wire.word_in(payload)
        elif kind == wire.SETTINGS and not flags & wire.ACK:
            self._set(wire.settings_in(payload))
            self.unsent += wire.frame(wire.SETTINGS, wire.ACK, 0)
        elif kind == wire.PING and not flags & wire.ACK:
            self.unsent += wire.frame(wire.PING, wire.ACK, 0, bytes(payload))
        elif kind == wire.GOAWAY:
            self.usable = False
            last = wire.word_in(payload[:4]) if len(payload) >= 8 else wire.WINDOW_MAX
            for number, answer in self.open.items():
                if number > last:
                    answer.fail(Refused("it takes no more requests on this connection"))
        elif kind == wire.RST_STREAM and (answer := self.open.get(stream)) is not None:
            answer.asked = answer.heard = True
            if wire.word_in(payload) == wire.REFUSED_STREAM:
                answer.fail(Refused("it did not take the request"))
            else:
                answer.fail(ConnectionResetError("it gave the request up"))

    def _set(self, values: dict[int, int]) -> None:
        window = values.get(wire.INITIAL_WINDOW_SIZE, self._new_credit)
        for answer in self.open.values():
            answer.credit += window - self._new_credit
        self._new_credit = window
        self._frame_bytes = min(FRAME_BYTES, values.get(wire.MAX_FRAME_SIZE, self._frame_bytes))
        self.streams_max = values.get(wire.MAX_CONCURRENT_STREAMS, self.streams_max)
