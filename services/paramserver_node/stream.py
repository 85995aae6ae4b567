"""One request over HTTP/2 and its answer, for an ASGI app.

An app may receive the body as ASGI messages, or through the `BodyTransfer` in the scope's extension `BODY`: it can have
the body put into place as it arrives, read straight into its memory, or take it whole if all of it has arrived already.
Until it does any of that, a client may send `UNREAD_BYTES_MAX` of it; then all of it if its memory is known, else
`READING_WINDOW_BYTES` ahead.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, TypeVar

from starlette.types import ASGIApp, Message, Scope

from paramserver.wire import http2 as wire
from paramserver.wire.sink import Destination
from paramserver_node.log import path_of
from paramserver_node.pieces import Pieces, after, split
from paramserver_node.request_head import OF_A_CONNECTION, RequestHead

if TYPE_CHECKING:
    from paramserver_node.http2 import Connection

T = TypeVar("T")
log = logging.getLogger("paramserver.node")

BODY: Final = "paramserver.body"
"""Key of the `BodyTransfer` in the scope's extensions."""
UNREAD_BYTES_MAX: Final = 512 << 10
"""Receive window of a stream until the app asks for the body; most bodies fit, and need no window updates."""
PIECE_BYTES_MIN: Final = 1 << 10
"""A shorter piece of an unread body is joined with the next one: each takes 50 bytes beside its own."""
READING_WINDOW_BYTES: Final = 4 << 20
"""Receive window of a body that is handed on as it arrives, for one at a time on a connection: a client far away would
mostly wait for window updates, and two that wait for a slow app would take the window of all."""
READ_AHEAD_MAX: Final = 32
"""Most bodies of the process that have that window at a time: slow apps may leave all of it in memory."""
PING_AFTER_S: Final = 2.0
"""Longest silence towards a client whose bodies are arriving, after which it is sent a PING: over a slow path window
updates are rare, and clients take a silent server for dead."""
TRANSFER_BYTES_MIN: Final = 1 << 20
"""At least this much of a body is worth one of the server's transfer threads, if it has any."""
TRANSFER_BYTES_MAX: Final = 16 << 20
"""Most that a thread transfers at a time, so that other requests on the connection get their turn."""

_NOWHERE: Final = memoryview(b"")


class BodyTransfer(Protocol):
    """A request's body as it arrives, and a way to send the answer's."""

    def whole(self) -> bytes | None:
        """Return the body if all of it has arrived, else None; only if none was taken before.  Nothing follows it."""

    async def into(self, sink: Destination) -> bool:
        """Put the rest of the body into `sink` as it arrives; returns whether all came.  Raises what `sink` does."""

    async def send_rest(self, pieces: Pieces) -> Pieces:
        """Send `pieces`, all the rest of an answer, as far as the client takes them at once; returns what is left."""


class Stream:
    """One request and its answer."""

    _ahead: ClassVar[set["Stream"]] = set()
    """The streams of the process whose bodies may be read ahead of their apps, and have not been taken completely."""

    def __init__(self, client: "Connection", number: int, body_ended: bool, head: RequestHead) -> None:
        self._client, self._number, self._bodyless = client, number, head.scope["method"] == "HEAD"
        self.body_ended = body_ended
        """Whether the client has sent all of the body."""
        self._due = head.length
        """Bytes of the body that are still to come, if its length was announced."""
        self._client_waits = head.waits and not body_ended
        """Whether the client waits for an interim answer, 100, before it sends the body."""
        self.send_window = client.initial_send_window
        """Send window of the stream, in bytes."""
        self._receive_window = self._window_size = UNREAD_BYTES_MAX
        """Receive window: bytes that the client may still send, and its size when nothing is held."""
        self._used = 0
        self._began_s = client.loop.time()
        self._pieces: list[bytes] = []
        self._sink: Destination | None = None
        self._failed: Exception | None = None
        """The exception that `_sink` raised."""
        self._end_delivered = False
        self.is_new = True
        """Whether the app has not been started yet."""
        self._slow = False
        """Whether a thread read less than asked for, as the client paused or sent another frame: it was the last thread
        that is used for this body."""
        self._cut = False
        self._answered = False
        self._head = b""
        """HEADERS frame of the answer, which is sent with its first piece."""
        self._may_continue = asyncio.Event()
        """Set when some of the body has arrived, or there may be room for the answer."""

    # Called by the connection

    def takes(self, size: int) -> bool:
        """Count `size` bytes against the receive window; returns whether the client was allowed to send them."""
        self._receive_window -= size
        return self._receive_window >= 0

    def room(self) -> memoryview:
        """Return the memory for the next bytes of the body; empty if it is not known."""
        return _NOWHERE if self._sink is None or self._failed is not None else self._sink.room()

    def arrived(self, data: memoryview, ends: bool) -> None:
        """Take the next bytes of the body."""
        if self._refused(len(data), ends):
            return
        self.body_ended = ends
        if self._sink is not None and self._failed is None and data:
            self._into_sink(self._sink.feed, data)
            self.used(len(data))
        elif self._failed is not None or self._answered:
            self.used(len(data))
        elif data and self._pieces and len(self._pieces[-1]) < PIECE_BYTES_MIN:
            self._pieces[-1] += data
        elif data:
            self._pieces.append(bytes(data))
        if self._sink is None or ends or self._failed is not None:
            self._may_continue.set()

    def filled(self, size: int, *, ends: bool) -> None:
        """Note that `size` bytes of the body were written into the sink's memory."""
        if self._refused(size, ends):
            return
        self.body_ended = ends
        if self._sink is not None and self._failed is None:
            self._into_sink(self._sink.filled, size)
        self.used(size)
        if ends or self._failed is not None:
            self._may_continue.set()

    def _refused(self, size: int, ends: bool) -> bool:
        """Return whether to drop the body: its length is not the announced one (RFC 9113, 8.1.1), or it was cut.

        In the first case the stream is reset, so that the app never sees the end of the body.
        """
        if self._due is not None and not self._cut:
            self._due -= size
            if self._due < 0 or (ends and self._due):
                self._client.queue_frame(wire.u32_frame(self._number, wire.RST_STREAM, wire.PROTOCOL_ERROR))
                self.cut()
        if self._cut:
            self._client.used(size)
        return self._cut

    def _into_sink(self, put: Callable[[T], None], what: T) -> None:
        try:
            put(what)
        except Exception as e:
            self._failed = e

    def fetched(self, size: int, *, ends: bool, paused: bool) -> None:
        """Note that a thread has put `size` bytes into place; `paused`: it was asked for more than that."""
        self._receive_window -= size
        self._slow = paused
        self.filled(size, ends=ends)
        self._may_continue.set()

    def cut(self) -> None:
        """End the request: the client has disconnected or cancelled it, or it was reset."""
        self._cut = True
        self._ahead.discard(self)
        if self._pieces:  # without them it is no whole body, least of all an empty one
            self.body_ended = False
        self._drop()
        self._may_continue.set()

    def wake(self) -> None:
        """Wake the sender of the answer, for which there may be more room."""
        self._may_continue.set()

    def used(self, size: int) -> None:
        """Return `size` bytes to the receive windows, as they are no longer held; send a PING if one is due."""
        self._client.used(size)
        self._used += size
        if self._used >= self._window_size // 2 and not self._ends():
            self._widen(self._used)
            self._used = 0
        elif not self.body_ended:
            silent_s = self._client.loop.time() - max(self._began_s, self._client.last_body_frame_s)
            if silent_s >= PING_AFTER_S:
                self._queue_frame(wire.frame(wire.PING, 0, 0, bytes(8)))

    def _ends(self) -> bool:
        """Whether the client needs no more window: the body has arrived, or its last frame is being received."""
        return self.body_ended or self._client.ends(self._number)

    def _drop(self) -> None:
        self._client.used(sum(map(len, self._pieces)))
        self._pieces.clear()

    def _widen(self, size: int) -> None:
        self._receive_window += size
        self._queue_frame(wire.u32_frame(self._number, wire.WINDOW_UPDATE, size))

    def _queue_frame(self, frame: bytes) -> None:
        self._client.last_body_frame_s = self._client.loop.time()
        self._client.queue_frame(frame)

    # Called by the app

    def whole(self) -> bytes | None:
        """See `BodyTransfer`."""
        if not self.body_ended or self._end_delivered or self._cut:
            return None
        self._end_delivered = True
        return self._take_pieces()

    async def into(self, sink: Destination) -> bool:
        """See `BodyTransfer`; can be cancelled and called again."""
        while self._pieces:
            piece = self._pieces.pop(0)
            self.used(len(piece))
            sink.feed(memoryview(piece))
        self._sink = sink
        self._tell_to_send()
        try:
            while not (self.body_ended or self._cut or self._failed is not None):
                self._fetch(sink)
                await _clear_and_wait(self._may_continue)
        finally:
            self._sink = None
            if self.body_ended:
                self._ahead.discard(self)
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        self._end_delivered = self.body_ended
        return self.body_ended

    def _fetch(self, sink: Destination) -> None:
        """Let the client send all the rest of the body, for which there is memory; have a thread read it if one can."""
        places = sink.rest()
        size = sum(map(len, places))
        if size >= TRANSFER_BYTES_MIN and not self._slow:
            self._client.fetch(self._number, places, size)
        self._client.allow(size)
        if (missing := size - self._receive_window) > 0:
            self._used -= missing
            self._widen(missing)
        self._client.flush_soon()

    def _read_ahead(self) -> None:
        """Widen the receive window to `READING_WINDOW_BYTES` if the app waits for more of a body than may come."""
        ahead, fits = self._ahead, self._due is not None and self._due <= self._receive_window
        if not (fits or self._ends() or len(ahead) >= READ_AHEAD_MAX or any(s._client is self._client for s in ahead)):
            ahead.add(self)
            self._widen(READING_WINDOW_BYTES - self._window_size)
            self._window_size = READING_WINDOW_BYTES

    async def receive(self) -> Message:
        """Return the next ASGI event."""
        while not self._pieces and not self._cut and (self._end_delivered or not self.body_ended):
            self._tell_to_send()
            self._read_ahead()
            self._client.flush_soon()
            await _clear_and_wait(self._may_continue)
        if self._cut and (self._end_delivered or not self.body_ended):
            return {"type": "http.disconnect"}
        self._end_delivered = self.body_ended
        return {"type": "http.request", "body": self._take_pieces(), "more_body": not self._end_delivered}

    def _tell_to_send(self) -> None:
        """Send the interim answer that the client waits for, now that its body is wanted."""
        if self._client_waits and not self.body_ended:
            block = self._client.block_prefix + wire.encoded([(b":status", b"100")])
            self._client.queue_frame(wire.frame(wire.HEADERS, wire.END_HEADERS, self._number, block))
            self._client.flush_soon()
        self._client_waits = False

    def _take_pieces(self) -> bytes:
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self.body_ended:
            self._ahead.discard(self)
        self.used(len(body))  # the window update is sent when the app wants more
        return body

    async def send(self, message: Message) -> None:
        """Send the next ASGI message of the answer; dropped if the client has gone."""
        if self._cut:
            return
        if message["type"] == "http.response.start":
            self._client_waits = False
            own = [h for h in message.get("headers", ()) if h[0] not in OF_A_CONNECTION]
            block = wire.encoded([(b":status", b"%d" % message["status"]), *self._client.server.default_headers, *own])
            block = self._client.block_prefix + block
            self._head = wire.frame(wire.HEADERS, wire.END_HEADERS, self._number, block)
        elif message["type"] == "http.response.body":
            ends = not message.get("more_body", False)
            data = memoryview(b"" if self._bodyless else message.get("body", b"")).cast("B")
            if data or ends:
                await self._send(data, ends)

    async def send_rest(self, pieces: Pieces) -> Pieces:
        """See `BodyTransfer`."""
        client, left = self._client, list(pieces)
        rest = sum(map(len, left))
        while rest and not self._cut:
            payloads = split(left, client.frame_bytes, min(TRANSFER_BYTES_MAX, self.send_window, client.send_window))
            size = sum(map(len, payloads))
            if size < min(rest, TRANSFER_BYTES_MIN):
                break
            heads = [wire.head(len(data), wire.DATA, 0, self._number) for data in payloads]
            if size == rest:
                heads[-1] = wire.head(len(payloads[-1]), wire.DATA, wire.END_STREAM, self._number)
            heads[0] = self._head + heads[0]
            sent = client.send_by_thread(list(zip(heads, payloads, strict=True)))
            if sent is None:
                break
            self._head = b""
            written = sum(map(len, payloads[: await sent]))
            self.send_window -= written
            rest -= written
            self._answered = not rest
            left = after(left, written)
            if written < size:
                break
        return left

    async def _send(self, data: memoryview, ends: bool) -> None:
        client, head, at = self._client, self._head, 0
        self._head = b""
        while not self._cut:
            window = max(0, min(self.send_window, client.send_window))  # windows can be negative
            n = min(len(data) - at, client.frame_bytes, window)
            if n == 0 and at < len(data):
                client.queue_frame(head)
                client.flush()
                head = b""
                await _clear_and_wait(self._may_continue)
                continue
            if not client.writable:  # a client that does not read gets no more, and soon reaches the limit of streams
                await client.drained()
                continue
            last = at + n == len(data)
            self.send_window -= n
            client.send_window -= n
            self._answered = ends and last
            flags = wire.END_STREAM if self._answered else 0
            head += wire.head(n, wire.DATA, flags, self._number)
            flushed = client.send(head, data[at : at + n], more=not self._answered)
            head, at = b"", at + n
            if flushed and not self._answered:
                await client.drained()
            if last:
                return

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Run the app for this request, from beginning to end."""
        self.is_new = False
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            log.debug("http2.broken path=%s", path_of(scope), exc_info=True)  # the app has reported it
        finally:
            self._ahead.discard(self)
            if not self._cut:
                if not self._answered:
                    self._client.queue_frame(wire.u32_frame(self._number, wire.RST_STREAM, wire.INTERNAL_ERROR))
                elif not self.body_ended:
                    self._client.queue_frame(wire.u32_frame(self._number, wire.RST_STREAM, wire.NO_ERROR))
                self._drop()
            self._client.ended(self._number, answered=self._answered)


async def _clear_and_wait(event: asyncio.Event) -> None:
    """Clear the event, then wait until it is set again."""
    event.clear()
    await event.wait()
