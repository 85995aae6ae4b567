"""HTTP/2 for uvicorn: one client's connection, on the event loop that serves.

A shard mostly transfers bodies of many megabytes.  They are read straight into place (see `stream`), without a copy
here; everything else is read into one buffer that all connections share.  Large answers are not copied, either.

Limits: flow-control windows bound what a client may send before it is wanted; `UNSENT_BYTES_MAX` bounds what it may
leave unread, beyond which no more is written; its requests, headers and useless frames are counted.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.utils import is_ssl
from uvicorn.server import ServerState

from paramserver.limits import RECEIVE_LOW_WATER_BYTES
from paramserver.wire import http2 as wire
from paramserver.wire import tcp
from paramserver.wire.http2 import Http2Error
from paramserver_node.follies import WIDER_BYTES_MIN, Follies
from paramserver_node.lent_socket import LentSocket
from paramserver_node.pieces import Pieces, after, first
from paramserver_node.stream import BODY, TRIP_BYTES_MAX, UNREAD_BYTES_MAX, Stream, request_of, scope_of
from paramserver_node.unread import Unread

if TYPE_CHECKING:
    from paramserver.kernels.sockets import Received
    from paramserver_node.carrier import Carrier

log = logging.getLogger("paramserver.node")

FRAME_BYTES: Final = 2 << 20
CONNECTION_WINDOW_BYTES: Final = 8 << 20
"""Receive window of a connection; larger than a stream's, so that a body that waits does not block the others."""
STREAMS_MAX: Final = 256
HEADER_BYTES_MAX: Final = 64 << 10
UNSENT_BYTES_MAX: Final = 2 << 20
"""High-water mark of the transport's send buffer."""
SHORT_BYTES: Final = 4096
"""Largest payload that is copied, to be written in one piece with its frame header."""
TOGETHER: Final = 8
"""At most this many short answers share one write; with more, the first would wait for the last."""
READ_BYTES: Final = 1 << 20
"""Most that is read at once, so that other connections get their turn."""
DIRECT_BYTES_MIN: Final = 16 << 10
"""At least this much of a body must be due for a read straight into place."""
FIRST_BYTES: Final = 64 << 10
"""Size of the shared buffer: most that is read at once while the destination is unknown."""


class Connection(asyncio.BufferedProtocol):
    """One client's HTTP/2 connection, after the preface."""

    _room = memoryview(bytearray(FIRST_BYTES))
    """Shared by all connections: its contents are processed before the next read."""

    def __init__(
        self, config: Config, server: ServerState, app: ASGIApp, state: dict[str, Any], carrier: "Carrier | None" = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._carrier = carrier
        self._app, self._state, self._server, self._root_path = app, state, server, config.root_path
        self._greeted = False
        self._scanner = wire.Scanner(FRAME_BYTES, HEADER_BYTES_MAX)
        self._requests = wire.HeaderDecoder(HEADER_BYTES_MAX, request_of)
        self._streams: dict[int, Stream] = {}
        self._running = 0
        """Requests being answered, including those that the client has cancelled."""
        self._newest = 0
        self._place: memoryview | None = None
        """Destination of the current read, if it goes straight into place."""
        self._awaited = 1
        """Bytes that must have arrived before the next read."""
        self._head_next = False
        """Whether a DATA frame has just ended in place and the body goes on, so that a frame header comes next."""
        self._block: tuple[int, int, bytearray] | None = None
        """An incomplete header block: its stream, its flags, and what has arrived of it."""
        self._window = CONNECTION_WINDOW_BYTES
        """Receive window of the connection: bytes of bodies that the client may still send."""
        self._used = 0
        """Bytes consumed but not yet returned to the client as window updates."""
        self._follies = Follies(self.loop.time)
        self.spoke_s = self.loop.time()
        """When the client was last sent a frame about one of its bodies."""
        self._said: list[bytes] = []
        """Frames that the next `flush` writes."""
        self._flushes = False
        """Whether a flush is scheduled for the end of this turn of the event loop."""
        self._stopping = False
        self._writable = asyncio.Event()
        self._writable.set()
        self.credit = self.new_credit = wire.WINDOW_BYTES
        """Send windows, in bytes: the connection's, and that of a new stream."""
        self.frame_bytes = wire.PAYLOAD_BYTES_MAX
        """Largest payload to send in one frame."""

    # Transport callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send the server's SETTINGS, and widen the connection's receive window."""
        self.transport = transport
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        self._socket = transport.get_extra_info("socket")
        tcp.prepare(self._socket)  # asyncio sets no TCP_NODELAY if it was given the listening socket
        over_tcp = self._socket.family != socket.AF_UNIX
        self._can_wait = sys.platform == "linux" and over_tcp and not is_ssl(transport)
        self._unread = Unread(transport)
        self._lent = LentSocket(self._carrier if self._can_wait else None, self._socket.fileno(), self.abort)
        self._server.connections.add(self)  # type: ignore[arg-type]
        self._scope = scope_of(transport, self._root_path)
        values = {
            wire.MAX_CONCURRENT_STREAMS: STREAMS_MAX,
            wire.INITIAL_WINDOW_SIZE: UNREAD_BYTES_MAX,
            wire.MAX_FRAME_SIZE: FRAME_BYTES,
            wire.MAX_HEADER_LIST_SIZE: HEADER_BYTES_MAX,
        }
        self.say(wire.settings(values))
        self.say(wire.u32_frame(0, wire.WINDOW_UPDATE, CONNECTION_WINDOW_BYTES - wire.WINDOW_BYTES))
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify all requests in flight."""
        self._server.connections.discard(self)
        self._writable.set()
        self._unread.close()
        self._lent.close()
        for stream in self._streams.values():
            stream.cut()
        self._streams.clear()

    def pause_writing(self) -> None:
        """Note that the send buffer is full: the client reads too slowly."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Note that the client has caught up."""
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next read: straight into place if possible, else the shared buffer."""
        self._place, due = None, self._scanner.due
        if due >= DIRECT_BYTES_MIN and (stream := self._streams.get(self._scanner.due_stream)) is not None:
            place = stream.room()
            if len(place) >= DIRECT_BYTES_MIN:
                self._place = place[: min(due, READ_BYTES)]
                return self._place
        if self._head_next:
            self._head_next = False
            return self._room[: wire.HEAD_BYTES]  # no more, so that the payload can be read straight into place
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        """Process what was read, and set up the next read."""
        place, self._place = self._place, None  # an idle connection must not keep this memory from being reused
        if place is None:
            self.feed(self._room[:nbytes])
        else:
            self.feed(place[:nbytes], there=True)
        due = self._scanner.due
        stream = self._streams.get(self._scanner.due_stream) if due >= DIRECT_BYTES_MIN else None
        if self._can_wait:
            worth = nbytes >= DIRECT_BYTES_MIN and stream is not None  # a slow client's bytes are read as they come
            wanted = RECEIVE_LOW_WATER_BYTES if worth and due >= RECEIVE_LOW_WATER_BYTES else 1
            if wanted != self._awaited and not self.transport.is_closing():
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
                self._awaited = wanted
        if place is None and stream is not None and stream.is_new and not self.transport.is_closing():
            self.transport.pause_reading()  # so that the app can say first where the rest belongs
            self.loop.call_soon(self._resume)

    def _resume(self) -> None:
        if not self.transport.is_closing() and not self._lent.reads:
            self.transport.resume_reading()

    def eof_received(self) -> None:
        """Return None: the transport then closes."""

    def shutdown(self) -> None:
        """Take no new requests; those in flight are finished."""
        if not self._stopping:
            self._stopping = True
            self.say(wire.goaway(self._newest, wire.NO_ERROR))
            self.flush()
            self._close_if_idle()

    # Receiving

    def feed(self, data: memoryview, *, there: bool = False) -> None:
        """Process the next bytes from the client; `there`: they are of a body, and already in place."""
        try:
            if there:
                ends = bool(self._scanner.consumed(len(data)) & wire.END_STREAM)
                self._head_next = self._scanner.due == 0 and not ends
                self._data(self._scanner.due_stream, data, len(data), ends, there=True)
            else:
                self._feed(data)
        except Http2Error as e:
            log.info("http2.refused client=%s reason=%s", self._scope["client"], e)
            self.say(wire.goaway(self._newest, e.code))
            self._hang_up()
        else:
            self.flush()

    def _feed(self, data: memoryview) -> None:
        for kind, flags, number, payload, cost in self._scanner.scan(data):
            if not self._greeted and (kind != wire.SETTINGS or flags & wire.ACK):
                raise Http2Error(wire.PROTOCOL_ERROR, "settings come first")
            if (self._block is None) != (kind != wire.CONTINUATION):
                raise Http2Error(wire.PROTOCOL_ERROR, "headers that are interrupted, or go on without a beginning")
            if kind == wire.DATA:
                self._data(number, payload, cost, bool(flags & wire.END_STREAM))
            elif kind == wire.HEADERS:
                if number % 2 == 0:
                    raise Http2Error(wire.PROTOCOL_ERROR, "a request on a stream that is not the client's")
                self._heads(number, flags, bytearray(wire.header_fragment(flags, payload)))
            else:
                self._control(kind, flags, number, payload)

    def _data(self, number: int, data: memoryview, cost: int, ends: bool, *, there: bool = False) -> None:
        """Process a piece of a body."""
        stream = self._streams.get(number)
        if stream is None and (number > self._newest or number % 2 == 0):
            raise Http2Error(wire.PROTOCOL_ERROR, "a body without a request")
        self._window -= cost
        if self._window < 0 or (stream is not None and not stream.takes(cost)):
            raise Http2Error(wire.FLOW_CONTROL_ERROR, "more than the window allows")
        if not data and not ends and not self._scanner.due:
            self._follies.one()
        if stream is None:
            self.used(cost)
            return
        if stream.body_ended:
            raise Http2Error(wire.STREAM_CLOSED, "a body that goes on after its end")
        if cost > len(data):
            stream.used(cost - len(data))  # padding
        if there:
            stream.filled(len(data), ends=ends)
        else:
            stream.arrived(data, ends)

    def fetch(self, number: int, places: Pieces, size: int) -> bool:
        """Have a thread read the rest of a body, `size` bytes, into `places`; returns False if none can."""
        at, asked = self._scanner.position(number), min(size, TRIP_BYTES_MAX)
        if at is None or self._lent.writes or self.transport.is_closing():
            return False
        then = partial(self._fetched, number, asked)
        if not self._lent.read(first(places, asked), (number, *at), FRAME_BYTES, then):
            return False
        self.transport.pause_reading()
        if size > self._window:
            self._used -= size - self._window
            self.say(wire.u32_frame(0, wire.WINDOW_UPDATE, size - self._window))
            self._window = size
        return True

    def _fetched(self, number: int, asked: int, received: "Received") -> None:
        """Continue after a thread has read some of a body."""
        self._scanner.resume_after(number, received.due, received.flags, received.head)
        self._awaited = 1
        self._window -= received.size
        stream = self._streams.get(number)
        if stream is None:
            self.used(received.size)
        else:
            ends = not received.due and bool(received.flags & wire.END_STREAM)
            stream.fetched(received.size, ends=ends, paused=received.size < asked)
        self.flush()
        self._resume()

    def _control(self, kind: int, flags: int, number: int, payload: memoryview) -> None:
        if kind in (wire.SETTINGS, wire.PING, wire.GOAWAY) and number != 0:
            raise Http2Error(wire.PROTOCOL_ERROR, "what concerns the connection, on a stream")
        if kind == wire.WINDOW_UPDATE:
            self._widen(number, wire.parse_u32(payload))
        elif kind == wire.CONTINUATION:
            assert self._block is not None
            begun, first_flags, block = self._block
            if begun != number:
                raise Http2Error(wire.PROTOCOL_ERROR, "headers that are interrupted")
            self._follies.one()
            self._block = None
            self._heads(number, flags & wire.END_HEADERS | first_flags & wire.END_STREAM, block + payload)
        elif kind == wire.RST_STREAM:
            wire.parse_u32(payload)
            if number == 0 or number > self._newest:
                raise Http2Error(wire.PROTOCOL_ERROR, "a stream that never was is cut")
            self._follies.one()
            if (stream := self._streams.pop(number, None)) is not None:
                stream.cut()
                self._close_if_idle()
        elif kind == wire.SETTINGS:
            self._greeted = True
            self._follies.one()
            if not flags & wire.ACK:
                self._set(wire.parse_settings(payload))
                self.say(wire.frame(wire.SETTINGS, wire.ACK, 0))
        elif kind == wire.PING:
            if len(payload) != 8:
                raise Http2Error(wire.FRAME_SIZE_ERROR, "a ping that is not eight bytes")
            self._follies.one()
            if not flags & wire.ACK:
                self.say(wire.frame(wire.PING, wire.ACK, 0, bytes(payload)))
        elif kind == wire.PUSH_PROMISE:
            raise Http2Error(wire.PROTOCOL_ERROR, "clients do not push")
        else:
            self._follies.one()  # frames that need no reaction

    def _heads(self, number: int, flags: int, block: bytearray) -> None:
        """Process a header block, as far as it has arrived."""
        if len(block) > HEADER_BYTES_MAX:
            raise Http2Error(wire.ENHANCE_YOUR_CALM, "headers that are too long")
        if not flags & wire.END_HEADERS:
            self._block = (number, flags, block)
            return
        asked = self._requests.decode(bytes(block))
        ends = bool(flags & wire.END_STREAM)
        if number <= self._newest:  # trailers
            stream = self._streams.get(number)
            if stream is not None:
                if not ends or stream.body_ended:
                    raise Http2Error(wire.PROTOCOL_ERROR, "headers in the middle of a body")
                stream.arrived(memoryview(b""), True)
            else:
                self._follies.one()
            return
        self._newest = number
        if asked is not None and ends and asked.length:
            asked = None  # it announces a body, and has none
        if asked is None or self._stopping or self._running >= STREAMS_MAX:
            self._follies.one()
            code = wire.PROTOCOL_ERROR if asked is None else wire.REFUSED_STREAM
            self.say(wire.u32_frame(number, wire.RST_STREAM, code))
            return
        stream = self._streams[number] = Stream(self, number, ends, asked)
        own = {"headers": list(asked.scope["headers"]), "state": dict(self._state), "extensions": {BODY: stream}}
        scope = self._scope | asked.scope | own
        self._running += 1
        if self._carrier is not None:
            self._carrier.asked(self._socket.fileno())
        task = self.loop.create_task(stream.run(self._app, scope))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def _widen(self, number: int, by: int) -> None:
        if by < WIDER_BYTES_MIN:
            self._follies.one()
        stream = self._streams.get(number)
        if number == 0:
            self.credit += by
        elif stream is not None:
            stream.credit += by
        else:
            return
        if not by or (self.credit if stream is None else stream.credit) > wire.WINDOW_MAX:
            raise Http2Error(wire.FLOW_CONTROL_ERROR, "a window that is too large, or no wider")
        for one in self._streams.values() if stream is None else (stream,):
            one.wake()

    def _set(self, values: dict[int, int]) -> None:
        self.frame_bytes = min(FRAME_BYTES, values.get(wire.MAX_FRAME_SIZE, self.frame_bytes))
        credit = values.get(wire.INITIAL_WINDOW_SIZE, self.new_credit)
        for stream in self._streams.values():
            stream.credit += credit - self.new_credit
            if stream.credit > wire.WINDOW_MAX:
                raise Http2Error(wire.FLOW_CONTROL_ERROR, "a window that is too large")
            stream.wake()
        self.new_credit = credit

    # Sending

    def say(self, frame: bytes) -> None:
        """Queue a frame for the next `flush`."""
        self._said.append(frame)

    def flush(self) -> None:
        """Write the queued frames in one piece, unless a thread is writing: then they follow when it is done."""
        if self._said and not self._lent.writes:
            said, self._said = self._said, []
            if not self.transport.is_closing():
                data = said[0] if len(said) == 1 else b"".join(said)
                self._unread.handed += len(data)
                self.transport.write(data)

    def flush_soon(self, *, more: bool = False) -> bool:
        """Flush now, or at the end of this turn of the event loop; returns whether it was done now.

        It waits, so that short frames share a write, if several requests are being answered or there is `more` of this
        one, and fewer than `TOGETHER` frames are queued.
        """
        if (self._running <= 1 and not more) or len(self._said) >= TOGETHER:
            self.flush()
            return True
        if not self._flushes:
            self._flushes = True
            self.loop.call_soon(self._turned)
        return False

    def _turned(self) -> None:
        self._flushes = False
        self.flush()

    def send(self, head: bytes, data: memoryview, *, more: bool) -> bool:
        """Send a piece of an answer after the queued frames, with `more` to come; `data` is copied only if it is short.

        Returns False if it was queued: a short piece may wait until the end of this turn of the event loop, to share a
        write with others.
        """
        if len(data) <= SHORT_BYTES:
            self.say(head + data)
            return self.flush_soon(more=more)
        said, self._said = self._said, []
        if not self.transport.is_closing():
            before = b"".join(said) + head
            self._unread.handed += len(before) + len(data)
            self.transport.writelines((before, data))
        return True

    def deliver(self, frames: Sequence[tuple[bytes, memoryview]]) -> "asyncio.Future[int] | None":
        """Have a thread write frames, each a (header, payload), after the queued ones; returns None if it cannot.

        The future's result is the number of frames that are sent, or left to the transport to send: all of them, unless
        the client pauses, and at least one.
        """
        if not self.writable or self.transport.is_closing() or self.transport.get_write_buffer_size():
            return None
        parts = [memoryview(part) for frame in frames for part in frame]
        parts[0] = memoryview(b"".join((*self._said, parts[0])))
        sizes = [len(head) + len(payload) for head, payload in zip(parts[::2], parts[1::2], strict=True)]
        delivered = self.loop.create_future()
        if not self._lent.write(parts, partial(self._delivered, parts, sizes, delivered)):
            return None
        self._said = []
        self._writable.clear()
        return delivered

    def _delivered(self, parts: Pieces, sizes: Sequence[int], delivered: "asyncio.Future[int]", went: int) -> None:
        """Continue after a thread has written; if it stopped within a frame, the rest of that is written here."""
        count, end = 1, sizes[0]
        while end < went:
            end += sizes[count]
            count += 1
        self.credit -= sum(map(len, parts[1 : 2 * count : 2]))
        self._writable.set()
        if went < end and not self.transport.is_closing():
            self._unread.handed += end - went
            self.transport.writelines(first(after(parts, went), end - went))
        self.flush()
        for stream in self._streams.values():
            stream.wake()  # no thread could read its body meanwhile
        if not delivered.done():
            delivered.set_result(count)

    @property
    def writable(self) -> bool:
        """Whether more may be written: the send buffer has room, and no thread is writing."""
        return self._writable.is_set()

    async def drained(self) -> None:
        """Give other tasks their turn, then wait until `writable`."""
        await asyncio.sleep(0)
        while not self.writable:  # a task that was woken earlier may have filled the buffer again
            await self._writable.wait()

    def ends(self, number: int) -> bool:
        """Whether the last frame of that request is being received."""
        return self._scanner.ends(number)

    def used(self, size: int) -> None:
        """Return `size` bytes to the connection's receive window, as they are no longer held."""
        self._used += size
        if self._used >= max(1, self._window):  # at least half of what waiting bodies do not hold
            self._window += self._used
            self.say(wire.u32_frame(0, wire.WINDOW_UPDATE, self._used))
            self._used = 0

    def ended(self, number: int, *, answered: bool) -> None:
        """Forget a request that is over; `answered`: with a complete answer."""
        self._running -= 1
        self._follies.made_up(answered)
        self.flush_soon()
        self._streams.pop(number, None)
        self._unread.watch()
        self._close_if_idle()

    def abort(self) -> None:
        """Close the connection at once, discarding unsent data."""
        self.transport.abort()

    def _close_if_idle(self) -> None:
        if self._stopping and not self._streams:
            self._hang_up()

    def _hang_up(self) -> None:
        """Close the connection when all is sent, or when the client has not read it in time."""
        self.flush()
        self.transport.close()
        self._unread.watch()
