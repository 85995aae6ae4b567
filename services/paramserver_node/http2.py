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

from uvicorn.config import Config
from uvicorn.protocols.utils import is_ssl
from uvicorn.server import ServerState

from paramserver.limits import RECEIVE_LOW_WATER_BYTES
from paramserver.wire import http2 as wire
from paramserver.wire import tcp
from paramserver.wire.http2 import Http2Error
from paramserver_node.frame_abuse import FRAMES_MAX, FrameAbuseLimit
from paramserver_node.lent_socket import LentSocket
from paramserver_node.pieces import Pieces, after, first, frames_begun
from paramserver_node.read_deadline import ReadDeadline
from paramserver_node.receive_limits import CONNECTION_WINDOW_BYTES, ReceiveLimits
from paramserver_node.request_head import TRAILERS, RequestHead, request_of, scope_of
from paramserver_node.send_limits import SendLimits
from paramserver_node.stream import BODY, TRANSFER_BYTES_MAX, UNREAD_BYTES_MAX, Stream

if TYPE_CHECKING:
    from paramserver.kernels.sockets import Received
    from paramserver_node.transfer_threads import TransferThreads

log = logging.getLogger("paramserver.node")

FRAME_BYTES: Final = 2 << 20
STREAMS_MAX: Final = 256
HEADER_BYTES_MAX: Final = 64 << 10
UNSENT_BYTES_MAX: Final = 2 << 20
"""High-water mark of the transport's send buffer."""
SHORT_BYTES: Final = 4096
"""Largest payload that is copied, to be written with its frame header; and size of a short read."""
SHORT_ANSWERS_MAX: Final = 8
"""At most this many short answers share one write; with more, the first would wait for the last."""
LINGER_S: Final = 2.0
"""How long a connection that has said its last word waits for its client to close it."""
READ_BYTES: Final = 1 << 20
"""Most that is read at once, so that other connections get their turn."""
DIRECT_BYTES_MIN: Final = 16 << 10
"""At least this much of a body must be due for a read straight into place."""
FIRST_BYTES: Final = 64 << 10
"""Size of the shared buffer: most that is read at once while the destination is unknown."""


class Connection(SendLimits, ReceiveLimits, asyncio.BufferedProtocol):
    """One client's HTTP/2 connection, after the preface."""

    _read_buffer = memoryview(bytearray(FIRST_BYTES))
    """Shared by all connections: its contents are processed before the next read."""

    def __init__(
        self, config: Config, server: ServerState, state: dict[str, Any], threads: "TransferThreads | None" = None
    ) -> None:
        SendLimits.__init__(self, FRAME_BYTES)
        ReceiveLimits.__init__(self)
        self.loop = asyncio.get_running_loop()
        self._threads = threads
        self._app, self._state, self.server, self._root_path = config.loaded_app, state, server, config.root_path
        self._settings_received = False
        self._scanner = wire.Scanner(FRAME_BYTES, HEADER_BYTES_MAX)
        self._heads = wire.BlockReader(HEADER_BYTES_MAX, request_of)
        self._streams: dict[int, Stream] = {}
        self._running = 0
        """Requests being answered, including those that the client has cancelled."""
        self._newest = 0
        self._sink_buffer: memoryview | None = None
        """Destination of the current read, if it goes straight into place."""
        self._low_watermark = 1
        """Bytes that must have arrived before the next read."""
        self._head_next = False
        """Whether a DATA frame has just ended in place and the body goes on, so that a frame header comes next."""
        self._abuse_limit = FrameAbuseLimit(self.loop.time)
        self.last_body_frame_s = self.loop.time()
        """When the client was last sent a frame about one of its bodies."""
        self._queued: list[bytes] = []
        """Frames that the next `flush` writes."""
        self._flush_scheduled = False
        """Whether a flush is scheduled for the end of this turn of the event loop."""
        self._stopping = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._over = False
        """Whether nothing more is read or written: the client has only to read what was sent."""

    # Transport callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send the server's SETTINGS, and widen the connection's receive window."""
        self.transport = transport
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        self._socket = transport.get_extra_info("socket")
        tcp.prepare(self._socket)  # asyncio sets no TCP_NODELAY if it was given the listening socket
        self._can_wait = sys.platform == "linux" and self._socket.family != socket.AF_UNIX and not is_ssl(transport)
        self._read_deadline = ReadDeadline(transport)
        self._lent = LentSocket(self._threads if self._can_wait else None, self._socket.fileno(), self.abort)
        self.server.connections.add(self)  # type: ignore[arg-type]
        self._scope = scope_of(transport, self._root_path)
        values = {
            wire.MAX_CONCURRENT_STREAMS: STREAMS_MAX,
            wire.INITIAL_WINDOW_SIZE: UNREAD_BYTES_MAX,
            wire.MAX_FRAME_SIZE: FRAME_BYTES,
            wire.MAX_HEADER_LIST_SIZE: HEADER_BYTES_MAX,
        }
        self.queue_frame(wire.settings(values))
        self.queue_frame(wire.u32_frame(0, wire.WINDOW_UPDATE, CONNECTION_WINDOW_BYTES - wire.WINDOW_BYTES))
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify all requests in flight."""
        self.server.connections.discard(self)
        self._writable.set()
        self._read_deadline.close()
        self._lent.close()
        self._cut_streams()

    def _cut_streams(self) -> None:
        for stream in self._streams.values():
            stream.cut()
        self._streams.clear()

    def pause_writing(self) -> None:
        """Note that the send buffer is full: the client reads too slowly, whatever it was sent."""
        self._writable.clear()
        self._read_deadline.start()

    def resume_writing(self) -> None:
        """Note that the client has caught up."""
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next read: straight into place if possible, else the shared buffer."""
        self._sink_buffer, due = None, self._scanner.due
        if due >= DIRECT_BYTES_MIN and (stream := self._streams.get(self._scanner.due_stream)) is not None:
            place = stream.room()
            if len(place) >= DIRECT_BYTES_MIN:
                self._sink_buffer = place[: min(due, READ_BYTES)]
                return self._sink_buffer
        if self._head_next:
            self._head_next = False
            return self._read_buffer[: wire.HEAD_BYTES]  # no more, so that the payload can be read straight into place
        return self._read_buffer if self._scanner.frames <= FRAMES_MAX else self._read_buffer[:SHORT_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Process what was read, and set up the next read."""
        if self._over:
            return
        sink_buffer, self._sink_buffer = self._sink_buffer, None  # an idle connection would keep it from being reused
        if sink_buffer is None:
            self.feed(self._read_buffer[:nbytes])
        else:
            self.feed(sink_buffer[:nbytes], in_place=True)
        due = self._scanner.due
        stream = self._streams.get(self._scanner.due_stream) if due >= DIRECT_BYTES_MIN else None
        if self._can_wait:
            worth = nbytes >= DIRECT_BYTES_MIN and stream is not None  # a slow client's bytes are read as they come
            wanted = RECEIVE_LOW_WATER_BYTES if worth and due >= RECEIVE_LOW_WATER_BYTES else 1
            if wanted != self._low_watermark and not self.transport.is_closing():
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
                self._low_watermark = wanted
        others_first = self._scanner.frames > FRAMES_MAX or (stream is not None and stream.is_new)
        if sink_buffer is None and others_first and not self.transport.is_closing():
            self.transport.pause_reading()  # a new stream's app can say first where the rest belongs
            self.loop.call_soon(self._resume)

    def _resume(self) -> None:
        if not self.transport.is_closing() and not self._lent.reads:
            self.transport.resume_reading()

    def shutdown(self) -> None:
        """Take no new requests; those in flight are finished."""
        if not self._stopping:
            self._stopping = True
            unsent = self._queued or self.transport.get_write_buffer_size() or tcp.unacknowledged_bytes(self._socket)
            self.queue_frame(wire.goaway(self._newest, wire.NO_ERROR))
            self.flush()
            if not self._streams:
                self._hang_up(linger=bool(unsent))  # a client that has all need not be waited for

    # Receiving

    def feed(self, data: memoryview, *, in_place: bool = False) -> None:
        """Process the next bytes from the client; `in_place`: they are of a body, and already in place."""
        try:
            if in_place:
                ends = bool(self._scanner.consumed(len(data)) & wire.END_STREAM)
                self._head_next = self._scanner.due == 0 and not ends
                self._data(self._scanner.due_stream, data, len(data), ends, in_place=True)
            else:
                self._feed(data)
        except Http2Error as e:
            log.info("http2.refused client=%s reason=%s", self._scope["client"], e)
            self.queue_frame(wire.goaway(self._newest, e.code))
            self._cut_streams()
            self._hang_up(linger=True)
        else:
            self.flush()

    def _feed(self, data: memoryview) -> None:
        for kind, flags, number, payload, cost in self._scanner.scan(data):
            if not self._settings_received and (kind != wire.SETTINGS or flags & wire.ACK):
                raise Http2Error(wire.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            self._heads.check(kind)
            if kind == wire.DATA:
                self._data(number, payload, cost, bool(flags & wire.END_STREAM))
            elif kind in (wire.HEADERS, wire.CONTINUATION):
                self._headers(kind, flags, number, payload)
            else:
                self._control(kind, flags, number, payload)

    def _data(self, number: int, data: memoryview, cost: int, ends: bool, *, in_place: bool = False) -> None:
        """Process a piece of a body."""
        stream = self._streams.get(number)
        if stream is None:
            self._check_opened(number)
        self._receive_window -= cost
        if self._receive_window < 0 or (stream is not None and not stream.takes(cost)):
            raise Http2Error(wire.FLOW_CONTROL_ERROR, "more DATA than the flow-control window allows")
        if not data and not ends and not self._scanner.due:
            self._abuse_limit.count()
        if stream is None:
            self.used(cost)
            return
        if stream.body_ended:
            raise Http2Error(wire.STREAM_CLOSED, "DATA after END_STREAM")
        if cost > len(data):
            stream.used(cost - len(data))  # padding
        if in_place:
            stream.filled(len(data), ends=ends)
        else:
            stream.arrived(data, ends)

    def fetch(self, number: int, places: Pieces, size: int) -> bool:
        """Have a thread read the rest of a body, `size` bytes, into `places`; returns False if none can."""
        at, requested = self._scanner.position(number), min(size, TRANSFER_BYTES_MAX)
        if at is None or self._lent.writes or self.transport.is_closing():
            return False
        then = partial(self._fetched, number, requested)
        if not self._lent.read(first(places, requested), (number, *at), FRAME_BYTES, then):
            return False
        self.transport.pause_reading()
        return True

    def _fetched(self, number: int, requested: int, received: "Received") -> None:
        """Continue after a thread has read some of a body."""
        self._scanner.resume_after(number, received.due, received.flags, received.head)
        self._low_watermark = 1
        self._receive_window -= received.size
        stream = self._streams.get(number)
        if stream is None:
            self.used(received.size)
        else:
            ends = not received.due and bool(received.flags & wire.END_STREAM)
            stream.fetched(received.size, ends=ends, paused=received.size < requested)
        self.feed(memoryview(b""))  # the thread may have read a whole frame of another kind, if that is empty
        self._resume()

    def _control(self, kind: int, flags: int, number: int, payload: memoryview) -> None:
        if kind in (wire.SETTINGS, wire.PING, wire.GOAWAY) and number != 0:
            raise Http2Error(wire.PROTOCOL_ERROR, "a frame for the connection on a stream")
        if kind == wire.WINDOW_UPDATE:
            by, stream = wire.parse_u31(payload), self._streams.get(number)
            self._abuse_limit.count_update(by, self.sent_bytes)
            if stream is not None or number == 0:
                self.widen(stream, by, self._streams.values())
            else:
                self._check_opened(number)
        elif kind == wire.RST_STREAM:
            wire.parse_u32(payload)
            self._check_opened(number)
            self._abuse_limit.count()
            if (stream := self._streams.pop(number, None)) is not None:
                stream.cut()
                self._close_if_idle()
        elif kind == wire.SETTINGS:
            self._settings_received = True
            self._abuse_limit.count()
            if flags & wire.ACK and payload:
                raise Http2Error(wire.FRAME_SIZE_ERROR, "SETTINGS that acknowledge and set")
            if not flags & wire.ACK:
                self.apply_settings(wire.parse_settings(payload), self._streams.values())
                self.queue_frame(wire.frame(wire.SETTINGS, wire.ACK, 0))
        elif kind == wire.PING:
            if len(payload) != 8:
                raise Http2Error(wire.FRAME_SIZE_ERROR, "a PING that is not eight bytes long")
            self._abuse_limit.count()
            if not flags & wire.ACK:
                self.queue_frame(wire.frame(wire.PING, wire.ACK, 0, bytes(payload)))
        elif kind == wire.PUSH_PROMISE:
            raise Http2Error(wire.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:
            self._abuse_limit.count()  # frames that need no reaction

    def _check_opened(self, number: int) -> None:
        if number > self._newest or number % 2 == 0:
            raise Http2Error(wire.PROTOCOL_ERROR, "a frame for a stream that was never opened")

    def _headers(self, kind: int, flags: int, number: int, payload: memoryview) -> None:
        """Process a frame of a header block: when it is complete, it begins a request or ends one as its trailers."""
        if kind == wire.CONTINUATION:
            self._abuse_limit.count()
        elif number % 2 == 0:
            raise Http2Error(wire.PROTOCOL_ERROR, "a request on a stream with an even number")
        if (block := self._heads.read(number, flags, payload)) is None:
            return
        head, ends = block
        if number > self._newest:
            self._newest = number
            self._begin(number, head, ends)
        elif (stream := self._streams.get(number)) is None:
            self._abuse_limit.count()
            self.queue_frame(wire.u32_frame(number, wire.RST_STREAM, wire.STREAM_CLOSED))
        elif not ends or stream.body_ended:
            raise Http2Error(wire.PROTOCOL_ERROR, "HEADERS in the middle of a body")
        elif head is not TRAILERS:
            self.queue_frame(wire.u32_frame(number, wire.RST_STREAM, wire.PROTOCOL_ERROR))
            stream.cut()
        else:
            stream.arrived(memoryview(b""), True)

    def _begin(self, number: int, head: RequestHead | None, ends: bool) -> None:
        """Start the app for a request, or refuse it; `ends`: it has no body."""
        if head is TRAILERS or (head is not None and ends and head.length):
            head = None  # it is no request's, or announces a body and has none
        if head is None or self._stopping or self._running >= STREAMS_MAX:
            self._abuse_limit.count()
            code = wire.PROTOCOL_ERROR if head is None else wire.REFUSED_STREAM
            self.queue_frame(wire.u32_frame(number, wire.RST_STREAM, code))
            return
        stream = self._streams[number] = Stream(self, number, ends, head)
        own = {"headers": list(head.scope["headers"]), "state": dict(self._state), "extensions": {BODY: stream}}
        scope = self._scope | head.scope | own
        self._running += 1
        if self._threads is not None:
            self._threads.note_request(self._socket.fileno())
        task = self.loop.create_task(stream.run(self._app, scope))
        self.server.tasks.add(task)
        task.add_done_callback(self.server.tasks.discard)

    # Sending

    def queue_frame(self, frame: bytes) -> None:
        """Queue a frame for the next `flush`."""
        self._queued.append(frame)

    def flush(self) -> None:
        """Write the queued frames in one piece, unless a thread is writing: then they follow when it is done."""
        if self._queued and not self._lent.writes:
            queued, self._queued = self._queued, []
            if not self._over and not self.transport.is_closing():
                data = queued[0] if len(queued) == 1 else b"".join(queued)
                self._read_deadline.bytes_written += len(data)
                self.transport.write(data)

    def flush_soon(self, *, more: bool = False) -> bool:
        """Flush now, or at the end of this turn of the event loop; returns whether it was done now.

        It waits, so that short frames share a write, if several requests are being answered or there is `more` of this
        one, and fewer than `SHORT_ANSWERS_MAX` frames are queued.
        """
        if (self._running <= 1 and not more) or len(self._queued) >= SHORT_ANSWERS_MAX:
            self.flush()
            return True
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self.loop.call_soon(self._scheduled_flush)
        return False

    def _scheduled_flush(self) -> None:
        self._flush_scheduled = False
        self.flush()

    def send(self, head: bytes, data: memoryview, *, more: bool) -> bool:
        """Send a piece of an answer after the queued frames, with `more` to come; `data` is copied only if it is short.

        Returns False if it was queued: a short piece may wait until the end of this turn of the event loop, to share a
        write with others.
        """
        if len(data) <= SHORT_BYTES:
            self.queue_frame(head + data)
            return self.flush_soon(more=more)
        queued, self._queued = self._queued, []
        if not self.transport.is_closing():
            before = b"".join(queued) + head
            self._read_deadline.bytes_written += len(before) + len(data)
            self.transport.writelines((before, data))
        return True

    def send_by_thread(self, frames: Sequence[tuple[bytes, memoryview]]) -> "asyncio.Future[int] | None":
        """Have a thread write frames, each a (header, payload), after the queued ones; returns None if it cannot.

        The future's result is the number of frames that are sent, or left to the transport to send: all of them, unless
        the client pauses, and at least one.
        """
        if not self.writable or self.transport.is_closing() or self.transport.get_write_buffer_size():
            return None
        parts = [memoryview(part) for frame in frames for part in frame]
        parts[0] = memoryview(b"".join((*self._queued, parts[0])))
        sent = self.loop.create_future()
        if not self._lent.write(parts, partial(self._sent_by_thread, parts, sent)):
            return None
        self._queued = []
        self._writable.clear()
        return sent

    def _sent_by_thread(self, parts: Pieces, sent: "asyncio.Future[int]", written: int) -> None:
        """Continue after a thread has written; if it stopped within a frame, the rest of that is written here."""
        count, end = frames_begun(parts, written)
        self.send_window -= sum(map(len, parts[1 : 2 * count : 2]))
        self._writable.set()
        if written < end and not self.transport.is_closing():
            self._read_deadline.bytes_written += end - written
            self.transport.writelines(first(after(parts, written), end - written))
        self.flush()
        for stream in self._streams.values():
            stream.wake()  # no thread could read its body meanwhile
        if not sent.done():
            sent.set_result(count)

    @property
    def writable(self) -> bool:
        """Whether more may be written: the send buffer has room, and no thread is writing."""
        return self._writable.is_set()

    async def drained(self) -> None:
        """Give other tasks their turn, then wait until `writable`."""
        await asyncio.sleep(0)
        while not self.writable:  # a task that was woken earlier may have filled the buffer again
            await self._writable.wait()

    @property
    def unfinished(self) -> tuple[int, int]:
        """Numbers of the header block and the frame that have begun to arrive, as the scanner has them; or 0."""
        return self._heads.unfinished, self._scanner.unfinished

    def ends(self, number: int) -> bool:
        """Whether the last frame of that request is being received."""
        return self._scanner.ends(number)

    def ended(self, number: int, *, answered: bool) -> None:
        """Forget a request that is over; `answered`: with a complete answer."""
        self._running -= 1
        self._abuse_limit.request_ended(answered=answered)
        self.flush_soon()
        self._streams.pop(number, None)
        self._read_deadline.start()
        self._close_if_idle()

    def abort(self) -> None:
        """Close the connection at once, discarding unsent data."""
        self.transport.abort()

    def _close_if_idle(self) -> None:
        if self._stopping and not self._streams:
            self._hang_up(linger=True)

    def _hang_up(self, *, linger: bool) -> None:
        """Close the connection when all is sent, or when the client has not read it in time.

        `linger`: wait for the client to close it.  If anything comes after we have closed, be it a window update, the
        system drops what it has not sent yet of the last answer (RFC 9112, 9.6).
        """
        self.flush()
        if not linger or self._lent.writes or self.transport.is_closing():
            self.transport.close()
        elif not self._over:
            self._over = True
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.loop.call_later(LINGER_S, partial(self._hang_up, linger=False))
            self._resume()
        self._read_deadline.start()
