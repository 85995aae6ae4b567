"""Framed requests as they arrive: their bodies go into pooled memory, part by part, read straight into it.

What parts are whole is handed on at once, so that they are checked while the next ones are still on their way.  A body
that breaks off, or is longer or shorter than its header says, is refused without a trace.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from starlette.types import Message, Receive, Scope

from paramserver.errors import PsError, problem
from paramserver.limits import BODY_BYTES_MAX
from paramserver.types import AnyArray
from paramserver.wire.frame import PREFIX_BYTES, Header, decode_header, header_end
from paramserver.wire.sink import pour
from paramserver_node.stream import BODY, Arrival
from paramserver_shard.buffers import SMALL_BYTES, BufferPool
from paramserver_shard.inflight import account

Ready = Callable[[Sequence[tuple[int, AnyArray]]], None]
"""Takes (index, bytes) of each part that is whole since the last call, in order."""


def apart(sizes: Sequence[int]) -> bool:
    """Whether each part of a body gets memory of its own, worth it by its size."""
    return len(sizes) > 0 and sum(sizes) >= SMALL_BYTES * len(sizes)


class Body:
    """Where a body goes.  Parts that are worth it get memory of their own, which can then serve for something else."""

    def __init__(self, sizes: Sequence[int], ready: Ready | None = None) -> None:
        """A body of parts of these sizes in bytes; raises RequestError (`too_large`)."""
        self.size: Final = sum(sizes)
        if self.size > BODY_BYTES_MAX:
            raise problem("too_large", f"the body has {self.size} bytes; at most {BODY_BYTES_MAX} are taken")
        self.parts: list[AnyArray] = []
        """The parts, uint8; uninitialised before they have arrived."""
        self._sizes = sizes
        self._ready = ready
        self._whole: AnyArray | None = None
        """All parts, where they have no memory of their own."""
        self._index = 0
        self._at = 0
        self._received = 0

    def open(self, pool: BufferPool) -> None:
        """Take the memory."""
        if apart(self._sizes):
            self.parts = [pool.take_bytes(size, shared=True) for size in self._sizes]
            return
        self._whole = whole = pool.take_bytes(self.size)
        at = 0
        for size in self._sizes:
            self.parts.append(whole[at : at + size])
            at += size

    def feed(self, chunk: bytes | memoryview) -> None:
        """The next bytes; raises RequestError if they are too many."""
        if self._received + len(chunk) > self.size:
            raise problem("malformed", f"the body is longer than the {self.size} bytes that its header announces")
        pour(memoryview(chunk), self)

    def room(self) -> memoryview:
        """Where the next bytes belong, as far as they are of one part; empty when all is here."""
        return self.parts[self._index].data[self._at :] if self._index < len(self.parts) else memoryview(b"")

    def rest(self) -> list[memoryview]:
        """Where all the rest belongs, in order."""
        if self._whole is not None:
            return [self._whole.data[self._received :]]
        return [part.data[self._at if i == 0 else 0 :] for i, part in enumerate(self.parts[self._index :])]

    def filled(self, size: int) -> None:
        """So many bytes have been put there."""
        self._received += size
        self._at += size
        self._hand_on()

    def end(self) -> None:
        """All has arrived; raises RequestError if that is not so."""
        if self._received != self.size:
            raise problem("malformed", f"the body has {self._received} bytes, its header announces {self.size}")
        self._hand_on()

    def _hand_on(self) -> None:
        whole: list[tuple[int, AnyArray]] = []
        while self._index < len(self.parts) and self._at >= (size := self.parts[self._index].size):
            whole.append((self._index, self.parts[self._index]))
            self._index, self._at = self._index + 1, self._at - size
        if whole and self._ready is not None:
            self._ready(whole)


T = TypeVar("T")
H = TypeVar("H", bound=Header)
Sized = Callable[[H], Awaitable[tuple[T, Body]]]
"""Makes of a header what the request is, and where its body is to go.  Raises PsError."""


class FrameReader:
    """Reads framed requests."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    async def read(self, scope: Scope, receive: Receive, of: type[H], sized: Sized[H, T]) -> tuple[T, Body]:
        """What `sized` makes of the header, which is to be that of an `of`, and the body, whole.

        Raises RequestError for a body that breaks off or has another length, Unavailable when there is no room for it.
        """
        arrival: Arrival | None = scope.get("extensions", {}).get(BODY)
        if arrival is not None and (data := arrival.whole()) is not None:
            request, body = await self._begun(scope, data, of, sized)
            body.end()
            return request, body
        ended = False

        async def tracked() -> Message:
            nonlocal ended
            message = await receive()
            ended = not message.get("more_body", False)
            return message

        try:
            request, body = await self._arriving(scope, tracked, arrival, of, sized)
        except PsError:
            # The answer would be lost if it came before the end of a body, however big.
            while not ended:
                await tracked()
            raise
        body.end()  # nothing more comes of it, so nothing must be waited for where this fails
        return request, body

    async def _arriving(
        self, scope: Scope, receive: Receive, arrival: Arrival | None, of: type[H], sized: Sized[H, T]
    ) -> tuple[T, Body]:
        data, more = await _next(receive)
        while more and (len(data) < PREFIX_BYTES or len(data) < header_end(data)):
            chunk, more = await _next(receive)
            data += chunk
        request, body = await self._begun(scope, data, of, sized)
        if more and arrival is not None:
            if not await arrival.into(body):
                raise _cut_off()
            more = False
        while more:
            chunk, more = await _next(receive)
            body.feed(chunk)
        return request, body

    async def _begun(self, scope: Scope, data: bytes, of: type[H], sized: Sized[H, T]) -> tuple[T, Body]:
        """The request, and its body as far as it is in `data`, which holds the header."""
        header, offset = decode_header(data, of)
        request, body = await sized(header)
        account(scope).grow(body.size)
        body.open(self._pool)
        body.feed(memoryview(data)[offset:])
        return request, body


async def _next(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise _cut_off()
    return message.get("body", b""), bool(message.get("more_body", False))


def _cut_off() -> PsError:
    return problem("malformed", "the body was cut off")
