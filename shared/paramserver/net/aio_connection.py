"""One HTTP/2 connection to a node on an event loop, with many concurrent requests.

What all requests queue in one turn of the event loop is sent with one write, and everything that a read returns is
processed at once: with many requests in flight, neither side is woken for each.  Bodies are copied into the send buffer
piece by piece, because a caller may abandon a request at any time and then change the memory it was sent from.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from paramserver.net import http2
from paramserver.net.calls import Sink
from paramserver.net.http2 import Answer, Client, NotSent, Refused, broken_off
from paramserver.wire import tcp
from paramserver.wire.http2 import Header

RESTED_S: Final = 1.0
_READ_BYTES: Final = 256 << 10
_PIECE_BYTES_MAX: Final = 256 << 10
"""Bytes of a body copied at a time, and unsent bytes that force a flush.

Other requests get their turn when the transport then pauses writing, or the send window is used up.
"""


class _Awaited(Answer):
    """An answer that a task awaits."""

    def __init__(self, sink: Sink | None, connection: "AsyncConnection") -> None:
        super().__init__(sink)
        self._connection = connection
        self.future = connection.loop.create_future()

    def on_end(self) -> None:
        """Wake the task, even if it is still sending."""
        super().on_end()
        self._connection.may_continue.set()
        if not self.future.done():
            self.future.set_result(None)


class AsyncConnection(asyncio.BufferedProtocol):
    """An open connection, made by `loop.create_connection`."""

    def __init__(self) -> None:
        self.loop: Final = asyncio.get_running_loop()
        self.may_continue: Final = asyncio.Event()
        """Set when a sending task should check whether it can continue."""
        self._client = Client()
        self._read_buffer = memoryview(bytearray(_READ_BYTES))
        self._sink_buffer: memoryview | None = None
        """Destination of the current read, in a body's own memory; None: `_read_buffer`."""
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()
        self._writable = True
        self._flushes = False
        """Whether a flush is scheduled for the end of this turn of the event loop."""
        self._last_read_s = 0.0
        self._pinged = False
        self._liveness_timer: asyncio.TimerHandle | None = None

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on this connection."""
        return self._client.usable

    @property
    def is_closed(self) -> bool:
        """Whether the connection has ended."""
        return self._lost.is_set()

    @property
    def full(self) -> bool:
        """Whether the node's limit on concurrent streams is reached."""
        return len(self._client.open) >= self._client.streams_max

    @property
    def rested(self) -> bool:
        """Whether no request is in flight, and nothing has been read for `RESTED_S`."""
        return not self._client.open and self.loop.time() - self._last_read_s > RESTED_S

    def hang_up(self) -> None:
        """Abort the connection; requests in flight fail."""
        self._client.usable = False
        if self._transport is not None:
            self._transport.abort()

    async def closed(self) -> None:
        """Wait until the connection has ended."""
        await self._lost.wait()

    async def ask(
        self, headers: Sequence[Header], body: Sequence[memoryview], sink: Sink | None, timeout_s: float
    ) -> Answer:
        """Send one request and return its answer; the body of a 200 goes to `sink`, if given.

        Raises TimeoutError after `timeout_s` or when the node is found dead (NotSent if some of the body was still to
        be sent), Refused, other OSErrors, and what the sink raises.
        """
        if self._transport is None or self._transport.is_closing():
            raise Refused("it was closed before the request was sent")
        client, answer = self._client, _Awaited(sink, self)
        left = whole = sum(map(len, body))
        begun_s = self.loop.time()
        if self._liveness_timer is None:
            self._last_read_s, self._pinged = begun_s, False
            self._liveness_timer = self.loop.call_later(http2.SILENCE_S, self._check_liveness)
        stream = client.start_stream(headers, answer, bodyless=not left)
        ends = self.loop.call_later(timeout_s, answer.fail, TimeoutError())
        try:
            for piece in body:
                at = 0
                while at < len(piece) and not answer.ended:
                    n = client.allowed(answer, min(len(piece) - at, _PIECE_BYTES_MAX))
                    if n <= 0 or not self._writable:
                        await self._wait_to_continue()
                        continue
                    left -= n
                    client.start_data_frame(stream, n, ends=not left)
                    client.unsent += piece[at : at + n]
                    at += n
                    if len(client.unsent) >= _PIECE_BYTES_MAX:
                        self._flush()
            self._flush_soon()
            await answer.future
        finally:
            ends.cancel()
            client.close(stream)
            if isinstance(answer.failed, TimeoutError) and self._last_read_s <= begun_s:
                client.usable = False  # the network may have lost this connection alone: others go on a new one
            if not client.usable and not client.open:
                self.hang_up()
            self._flush_soon()
        if left and isinstance(answer.failed, TimeoutError):
            raise NotSent(whole - left, whole)
        if left and isinstance(answer.failed, ConnectionError) and self.is_closed:
            raise broken_off(answer.failed)
        if answer.failed is not None:
            raise answer.failed
        return answer

    # Callbacks of asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Keep the transport.  The HTTP/2 preface goes out with the first request."""
        self._transport = transport
        tcp.prepare(transport.get_extra_info("socket"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the requests in flight, and wake the tasks that wait in `closed`."""
        self._client.usable = False
        self._fail(ConnectionResetError("closed before it answered" if exc is None else str(exc)))
        if self._liveness_timer is not None:
            self._liveness_timer.cancel()
        self._lost.set()

    def pause_writing(self) -> None:
        """Stop sending: the write buffer is full, because the node reads more slowly than we write."""
        self._writable = False

    def resume_writing(self) -> None:
        """Continue sending: the write buffer has drained."""
        self._writable = True
        self.may_continue.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next read: a body's own if it is known, else `_read_buffer`."""
        self._sink_buffer = self._client.sink_buffer()
        return self._read_buffer if self._sink_buffer is None else self._sink_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Process the bytes that were read."""
        sink_buffer, self._sink_buffer = self._sink_buffer, None
        self._last_read_s, self._pinged = self.loop.time(), False
        try:
            if sink_buffer is None:
                self._client.feed(self._read_buffer[:nbytes])
            else:
                self._client.sink_buffer_filled(sink_buffer[:nbytes])
        except (OSError, ValueError) as e:  # not valid HTTP/2
            self._fail(e)
            self.hang_up()
        self.may_continue.set()
        self._flush_soon()

    # Sending

    async def _wait_to_continue(self) -> None:
        self._flush()
        self.may_continue.clear()
        await self.may_continue.wait()

    def _flush_soon(self) -> None:
        if self._client.unsent and not self._flushes:
            self._flushes = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushes = False
        data, self._client.unsent = self._client.unsent, b""
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    # Liveness: a stalled node keeps its socket open

    def _check_liveness(self) -> None:
        """Ping the node if it is silent while requests are in flight; hang up if it does not answer that either."""
        self._liveness_timer = None
        if not self._client.open:
            return
        silent_s = self.loop.time() - self._last_read_s
        if silent_s >= http2.SILENCE_S:
            if self._pinged:
                self._fail(TimeoutError())
                self.hang_up()
                return
            self._pinged = True
            self._client.ping()
            self._flush_soon()
            silent_s = 0.0
        self._liveness_timer = self.loop.call_later(http2.SILENCE_S - silent_s, self._check_liveness)

    def _fail(self, error: Exception) -> None:
        for answer in self._client.open.values():
            answer.fail(error)
