"""One blocking HTTP/2 connection to a shard, used by one request at a time.

A body goes from the caller's memory into the socket, an answer from the socket to where it is wanted; nothing else is
copied, and no second thread is woken.  Against a general client that saves what counts here: a small round trip costs
two system calls.

A shard that stands still keeps its socket open.  So one that is silent for a while is sent a ping; if nothing comes
of it either, its answer is waited for no longer.
"""

import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from paramserver.client.calls import Sink
from paramserver.wire import http2 as wire
from paramserver.wire.http2 import Header

T = TypeVar("T")

SILENCE_S: Final = 5.0
"""How long a shard may be silent before it is asked whether it lives, and how long it has for saying so."""
FRAME_BYTES: Final = 2 << 20
WINDOW_BYTES: Final = wire.WINDOW_MAX
"""What a shard may send ahead: its answer goes straight to where it is wanted."""
_READ_BYTES: Final = 256 << 10
_AWAITED_BYTES_MAX: Final = 1 << 20
"""How much of a body is waited for: it is dear to either side to be woken for a little."""
_DIRECT_BYTES_MIN: Final = 16 << 10
"""What is worth a read to where it belongs."""
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
        if there:
            self._sink.filled(len(data))
        else:
            self._sink.feed(data)

    def end(self) -> None:
        """All is here; raises InDoubt where the sink has too little."""
        self.ended = True
        if self._to_sink:
            assert self._sink is not None
            self._sink.end()


def _said(headers: Sequence[Header]) -> tuple[int, Mapping[str, str]]:
    """The status, 0 where there is none, and the headers."""
    texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    return int(texts.pop(":status", "0")), texts


class Connection:
    """An open connection.  Raises OSError, also for what is no HTTP/2."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket: Final = connected
        self._gathers = type(connected) is socket.socket and hasattr(connected, "sendmsg")
        """Whether it takes several pieces at once; under TLS it does not."""
        self._can_wait = (
            sys.platform == "linux" and type(connected) is socket.socket and connected.family != socket.AF_UNIX
        )
        """Whether the kernel takes more than a byte for too little; under TLS nobody knows how much it is."""
        self._awaited = 1
        """How many bytes must be here before they are read."""
        self._slow = False
        """Whether they came far between, so that each counts."""
        self.usable = True
        """Whether another request can be sent on it."""
        self._unsent = _HELLO
        """Goes with the next frame."""
        self._room = memoryview(bytearray(_READ_BYTES))
        self._scanner = wire.Scanner(FRAME_BYTES, _HEADER_BYTES_MAX)
        self._decoder = wire.HeaderDecoder(_HEADER_BYTES_MAX, _said)
        self._block: bytearray | None = None
        self._block_ends = False
        self._stream = -1
        self._answer = Answer(None)
        self._credit = self._stream_window = self._stream_credit = wire.WINDOW_BYTES
        """What may be sent of all bodies, of a new one, and of the present one."""
        self._frame_bytes = wire.PAYLOAD_BYTES_MAX
        self._received = self._stream_received = 0
        """Of the windows of the connection and of the present stream, since they were widened."""
        self._give_up_at = 0.0
        self._pinged = False
        self.socket.settimeout(SILENCE_S)
        # Of a client that was dropped, not closed, nothing is left open.  No __del__: if the client is in a cycle, the
        # socket may be collected first, and complain.
        weakref.finalize(self, connected.close).atexit = False

    def close(self) -> None:
        """Hang up."""
        self.usable = False
        self.socket.close()

    def ask(self, headers: Sequence[Header], body: Sequence[memoryview], sink: Sink | None, timeout_s: float) -> Answer:
        """Sends one request and gives its answer, whose body goes to `sink` if it is a 200.

        Raises TimeoutError after `timeout_s` or when the shard is dead, Refused, and what the sink raises.
        """
        self._give_up_at = time.monotonic() + timeout_s
        self.socket.settimeout(min(SILENCE_S, timeout_s))
        self._pinged = self._slow = False
        self._stream += 2
        self._stream_credit, self._stream_received = self._stream_window, 0
        answer = self._answer = Answer(sink)
        try:
            self._send(headers, body)
            while not answer.ended:
                self._read()
        except BaseException:
            self.usable = False  # half a request, or an answer that would be taken for the next one's
            raise
        finally:
            self._answer = Answer(None)  # an idle connection keeps nobody's sink alive
        if self._stream > wire.WINDOW_MAX - 2:
            self.usable = False
        return answer

    # What goes

    def _send(self, headers: Sequence[Header], body: Sequence[memoryview]) -> None:
        left = sum(map(len, body))
        flags = wire.END_HEADERS if left else wire.END_HEADERS | wire.END_STREAM
        self._unsent += wire.frame(wire.HEADERS, flags, self._stream, wire.encoded(headers))
        for piece in body:
            while piece and not self._answer.ended:
                n = min(len(piece), self._frame_bytes, self._credit, self._stream_credit)
                if n <= 0:
                    self._flush()
                    self._read()
                    continue
                left -= n
                self._unsent += wire.head(n, wire.DATA, 0 if left else wire.END_STREAM, self._stream)
                self._credit -= n
                self._stream_credit -= n
                if left and len(self._unsent) + n <= wire.PAYLOAD_BYTES_MAX:
                    self._unsent += piece[:n]  # it goes with what follows
                else:
                    self._flush(piece[:n])
                piece = piece[n:]
        self._flush()
        if left:
            self.usable = False  # it has answered before it has heard all

    def _flush(self, payload: memoryview | None = None) -> None:
        first, self._unsent = self._unsent, b""
        if payload is not None and len(payload) <= wire.PAYLOAD_BYTES_MAX:
            first, payload = first + payload, None
        if payload is None or not self._gathers:
            self._all(memoryview(first))
        else:
            sent = self._patiently(self.socket.sendmsg, (first, payload))
            self._all(memoryview(first)[sent:])
            payload = payload[max(0, sent - len(first)) :]
        if payload is not None:
            self._all(payload)

    def _all(self, data: memoryview) -> None:
        while data:
            data = data[self._patiently(self.socket.send, data) :]

    def _patiently(self, send: Callable[[T], int], what: T) -> int:
        """How much was sent; raises TimeoutError at the request's end, or when the shard has read nothing for long."""
        while True:
            try:
                return send(what)
            except TimeoutError:
                if self._pinged or time.monotonic() >= self._give_up_at:
                    raise
                self._pinged = True

    # What comes

    def _read(self) -> None:
        left_s = self._give_up_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if left_s < SILENCE_S:
            self.socket.settimeout(left_s)
        place = self._place()
        try:
            self._await(1 if place is None or self._slow else min(len(place), _AWAITED_BYTES_MAX))
            if place is None:
                n = self.socket.recv_into(self._room)
            elif self._gathers:  # what follows it is another frame's head
                n = self.socket.recvmsg_into((place, self._room[: wire.HEAD_BYTES]))[0]
            else:
                n = self.socket.recv_into(place)
        except TimeoutError:
            if self._awaited > 1:
                self._slow = True
                return
            if self._pinged:
                raise
            self._pinged = True
            self._all(memoryview(_PING))
            return
        if n == 0:
            raise ConnectionResetError("closed before it answered")
        self._pinged = False
        if place is not None:
            there = min(n, len(place))
            self._data(self._scanner.passed(there), self._stream, place[:there], there, there=True)
            n -= there
        try:
            for kind, flags, stream, payload, cost in self._scanner.scan(self._room[:n]):
                if kind == wire.DATA and self._block is None:
                    self._data(flags, stream, payload, cost)
                else:
                    self._frame(kind, flags, stream, payload)
        except wire.Http2Error as e:
            raise OSError(str(e)) from None
        if self._unsent:
            self._flush()

    def _await(self, size: int) -> None:
        """So many bytes must be here before any are read; they will be: a frame that has begun has its window."""
        if size != self._awaited and self._can_wait:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._awaited = size

    def _place(self) -> memoryview | None:
        """Where what is read next belongs, if it is of the present answer's body and not little."""
        due = self._scanner.due
        if due < _DIRECT_BYTES_MIN or self._scanner.due_stream != self._stream:
            return None
        room = self._answer.room()
        return room[:due] if len(room) >= _DIRECT_BYTES_MIN else None

    def _data(self, flags: int, stream: int, data: memoryview, cost: int, *, there: bool = False) -> None:
        self._received += cost
        if self._received > WINDOW_BYTES // 2:
            self._unsent += wire.word(0, wire.WINDOW_UPDATE, self._received)
            self._received = 0
        if stream == self._stream and not self._answer.ended:
            self._stream_received += cost
            if self._stream_received > WINDOW_BYTES // 2 and not flags & wire.END_STREAM:
                self._unsent += wire.word(stream, wire.WINDOW_UPDATE, self._stream_received)
                self._stream_received = 0
            if data:
                self._answer.feed(data, there=there)
            if flags & wire.END_STREAM:
                self._answer.end()

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
                if stream == self._stream:
                    self._answer.begin(status, said)
                    if self._block_ends:
                        self._answer.end()
        elif kind == wire.WINDOW_UPDATE:
            if stream == 0:
                self._credit += wire.word_in(payload)
            elif stream == self._stream:
                self._stream_credit += wire.word_in(payload)
        elif kind == wire.SETTINGS and not flags & wire.ACK:
            values = wire.settings_in(payload)
            window = values.get(wire.INITIAL_WINDOW_SIZE, self._stream_window)
            self._stream_credit += window - self._stream_window
            self._stream_window = window
            self._frame_bytes = min(FRAME_BYTES, values.get(wire.MAX_FRAME_SIZE, self._frame_bytes))
            self._unsent += wire.frame(wire.SETTINGS, wire.ACK, 0)
        elif kind == wire.PING and not flags & wire.ACK:
            self._unsent += wire.frame(wire.PING, wire.ACK, 0, bytes(payload))
        elif kind == wire.GOAWAY:
            self.usable = False
            if len(payload) >= 8 and wire.word_in(payload[:4]) < self._stream:
                raise Refused("it takes no more requests on this connection")
        elif kind == wire.RST_STREAM and stream == self._stream and not self._answer.ended:
            if wire.word_in(payload) == wire.REFUSED_STREAM:
                raise Refused("it did not take the request")
            raise ConnectionResetError("it gave the request up")
