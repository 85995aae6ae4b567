"""One HTTP/2 connection to a shard on an event loop, with many requests at a time.

What requests of one turn of the loop say goes out in one piece, and all that a read brings is worked off at once: with
many requests under way, neither side is woken for each.  Bodies are copied on their way out, in pieces: a caller may
give a request up at any time, and then change the memory that it was sent from.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from paramserver.client import http2
from paramserver.client.calls import Sink
from paramserver.client.http2 import Answer, Client, Refused
from paramserver.wire import tcp
from paramserver.wire.http2 import Header

_READ_BYTES: Final = 256 << 10
_PIECE_BYTES_MAX: Final = 256 << 10
"""Of a body; between two of them others have their turn."""


class _Awaited(Answer):
    """An answer that a task waits for."""

    def __init__(self, sink: Sink | None, connection: "AsyncConnection") -> None:
        super().__init__(sink)
        self._connection = connection
        self.future = connection.loop.create_future()

    def over(self) -> None:
        """Wakes the task, also where it is still sending."""
        super().over()
        self._connection.moved.set()
        if not self.future.done():
            self.future.set_result(None)


class AsyncConnection(asyncio.BufferedProtocol):
    """An open connection; `loop.create_connection` makes it."""

    def __init__(self) -> None:
        self.loop: Final = asyncio.get_running_loop()
        self.moved: Final = asyncio.Event()
        """Set when a task that is sending should look again."""
        self._client = Client()
        self._room = memoryview(bytearray(_READ_BYTES))
        self._place: memoryview | None = None
        """Where the bytes that are read next belong."""
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()
        self._writable = True
        self._flushes = False
        """Whether what is unsent goes out at the end of this turn of the loop."""
        self._heard_s = 0.0
        self._pinged = False
        self._watch: asyncio.TimerHandle | None = None

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on it."""
        return self._client.usable

    @property
    def is_closed(self) -> bool:
        """Whether it is no more."""
        return self._lost.is_set()

    @property
    def full(self) -> bool:
        """Whether the shard takes no more requests on it until one has been answered."""
        return len(self._client.open) >= self._client.streams_max

    def hang_up(self) -> None:
        """Requests that are under way fail."""
        self._client.usable = False
        if self._transport is not None:
            self._transport.abort()

    async def closed(self) -> None:
        """Returns when it is."""
        await self._lost.wait()

    async def ask(
        self, headers: Sequence[Header], body: Sequence[memoryview], sink: Sink | None, timeout_s: float
    ) -> Answer:
        """Sends one request and gives its answer, whose body goes to `sink` if it is a 200.

        Raises TimeoutError after `timeout_s` or when the shard is dead, Refused, other OSErrors, and what the sink
        raises.
        """
        if self._transport is None or self._transport.is_closing():
            raise Refused("closed before it was asked")
        client, answer, left = self._client, _Awaited(sink, self), sum(map(len, body))
        if self._watch is None:
            self._heard_s, self._pinged = self.loop.time(), False
            self._watch = self.loop.call_later(http2.SILENCE_S, self._look)
        stream = client.begin(headers, answer, bodyless=not left)
        ends = self.loop.call_later(timeout_s, answer.fail, TimeoutError())
        try:
            for piece in body:
                at = 0
                while at < len(piece) and not answer.ended:
                    n = client.allowed(answer, min(len(piece) - at, _PIECE_BYTES_MAX))
                    if n <= 0 or not self._writable:
                        await self._until_moved()
                        continue
                    left -= n
                    client.body(stream, n, ends=not left)
                    client.unsent += piece[at : at + n]
                    at += n
                    if len(client.unsent) >= _PIECE_BYTES_MAX:
                        self._flush()
            self._flush_soon()
            await answer.future
        finally:
            ends.cancel()
            client.close(stream)
            if not client.usable and not client.open:
                self.hang_up()
            self._flush_soon()
        if answer.failed is not None:
            raise answer.failed
        return answer

    # Of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The client has the first word; it goes with the first request."""
        self._transport = transport
        tcp.prepare(transport.get_extra_info("socket"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits learns of it."""
        self._client.usable = False
        self._fail(ConnectionResetError("closed before it answered" if exc is None else str(exc)))
        if self._watch is not None:
            self._watch.cancel()
        self._lost.set()

    def pause_writing(self) -> None:
        """The shard reads slower than is written."""
        self._writable = False

    def resume_writing(self) -> None:
        """It has caught up."""
        self._writable = True
        self.moved.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        self._place = self._client.place()
        return self._room if self._place is None else self._place

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes are here."""
        place, self._place = self._place, None
        self._heard_s, self._pinged = self.loop.time(), False
        try:
            if place is None:
                self._client.feed(self._room[:nbytes])
            else:
                self._client.filled(place[:nbytes])
        except (OSError, ValueError) as e:  # no HTTP/2
            self._fail(e)
            self.hang_up()
        self.moved.set()
        self._flush_soon()

    # What goes

    async def _until_moved(self) -> None:
        self._flush()
        self.moved.clear()
        await self.moved.wait()

    def _flush_soon(self) -> None:
        if self._client.unsent and not self._flushes:
            self._flushes = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushes = False
        said, self._client.unsent = self._client.unsent, b""
        if said and self._transport is not None and not self._transport.is_closing():
            self._transport.write(said)

    # A shard that stands still keeps its socket open

    def _look(self) -> None:
        """While requests are under way, a shard that is silent is asked whether it lives."""
        self._watch = None
        if not self._client.open:
            return
        silent_s = self.loop.time() - self._heard_s
        if silent_s >= http2.SILENCE_S:
            if self._pinged:
                self._fail(TimeoutError())
                self.hang_up()
                return
            self._pinged = True
            self._client.ping()
            self._flush_soon()
            silent_s = 0.0
        self._watch = self.loop.call_later(http2.SILENCE_S - silent_s, self._look)

    def _fail(self, error: Exception) -> None:
        for answer in self._client.open.values():
            answer.fail(error)
