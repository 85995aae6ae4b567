"""Receives framed requests: their bodies are read straight into pooled memory, part by part.

Complete parts are handed on at once, so that they are checked while later ones still arrive. A body that is cut off, or
longer or shorter than its header announces, is refused and has no effect.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from starlette.types import Message, Receive, Scope

from paramserver.errors import PsError, problem
from paramserver.limits import BODY_BYTES_MAX
from paramserver.types import AnyArray
from paramserver.wire.frame import PREFIX_BYTES, Header, decode_header, header_end
from paramserver.wire.sink import pour
from paramserver_node.stream import BODY, BodyTransfer
from paramserver_shard.accounts import account
from paramserver_shard.buffers import INLINE_BYTES_MAX, SMALL_BYTES, BufferPool, unavailable_if_full

Ready = Callable[[Sequence[tuple[int, AnyArray]]], None]
"""Called with (index, bytes) of each part completed since the last call, in order."""


def has_own_buffers(sizes: Sequence[int]) -> bool:
    """Return whether each part of a body gets its own buffer: if they average at least `SMALL_BYTES`."""
    return sum(sizes) >= SMALL_BYTES * len(sizes)


class Body:
    """The receive buffer of one body. Parts that are large on average get a buffer each, which can be reused alone."""

    def __init__(self, sizes: Sequence[int], ready: Ready | None = None, unpacked_bytes: int = 0) -> None:
        """`sizes` are the bytes of each part (none is empty), `unpacked_bytes` what they take once a stage is undone.

        Raises RequestError (`too_large`).
        """
        self.size: Final = sum(sizes)
        self.memory_bytes: Final = self.size + unpacked_bytes
        if self.size > BODY_BYTES_MAX:
            raise problem("too_large", f"the body has {self.size} bytes; the limit is {BODY_BYTES_MAX}")
        self.parts: list[AnyArray] = []
        """The parts as uint8, uninitialized until they have arrived."""
        self._sizes = sizes
        self._ready = ready
        self._whole: AnyArray | None = None
        """One buffer for all parts, unless each has its own."""
        self._index = 0
        self._at = 0
        self._received = 0

    def has_memory(self, pool: BufferPool) -> bool:
        """Whether the pool keeps the memory for `allocate`, so that it has to make none."""
        if has_own_buffers(self._sizes):
            return pool.keeps(self._sizes, shared=True)
        return pool.keeps([self.size], shared=False)

    def allocate(self, pool: BufferPool) -> None:
        """Allocate the buffers."""
        if has_own_buffers(self._sizes):
            self.parts = [pool.take_bytes(size, shared=True) for size in self._sizes]
            return
        self._whole = whole = pool.take_bytes(self.size)
        at = 0
        for size in self._sizes:
            self.parts.append(whole[at : at + size])
            at += size

    def feed(self, chunk: bytes | memoryview) -> None:
        """Append the next bytes; raises RequestError if the body gets too long."""
        if self._received + len(chunk) > self.size:
            raise problem("malformed", f"the body is longer than the {self.size} bytes that its header announces")
        pour(memoryview(chunk), self)

    def room(self) -> memoryview:
        """Return the memory for the next bytes, up to the end of their part; empty when the body is complete."""
        return self.parts[self._index].data[self._at :] if self._index < len(self.parts) else memoryview(b"")

    def rest(self) -> list[memoryview]:
        """Return the memory for all remaining bytes, in order."""
        if self._whole is not None:
            return [self._whole.data[self._received :]]
        return [part.data[self._at if i == 0 else 0 :] for i, part in enumerate(self.parts[self._index :])]

    def filled(self, size: int) -> None:
        """Note that `size` more bytes were written to that memory."""
        self._received += size
        self._at += size
        whole: list[tuple[int, AnyArray]] = []
        while self._index < len(self.parts) and self._at >= (part_bytes := self.parts[self._index].size):
            whole.append((self._index, self.parts[self._index]))
            self._index, self._at = self._index + 1, self._at - part_bytes
        if whole and self._ready is not None:
            self._ready(whole)

    def end(self) -> None:
        """Finish the body; raises RequestError if it is incomplete."""
        if self._received != self.size:
            raise problem("malformed", f"the body has {self._received} bytes, its header announces {self.size}")


T = TypeVar("T")
H = TypeVar("H", bound=Header)
HeaderHandler = Callable[[H], Awaitable[tuple[T, Body]]]
"""Turns a header into (request, receive buffer for its body). Raises PsError."""


class FrameReader:
    """Reads framed requests."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    async def read(self, scope: Scope, receive: Receive, of: type[H], handle_header: HeaderHandler[H, T]) -> T:
        """Read one request and its body; returns what `handle_header` makes of its header, decoded as `of`.

        Raises RequestError for a body that is cut off or has the wrong length, Unavailable if there is no room for it.
        """
        arrival: BodyTransfer | None = scope.get("extensions", {}).get(BODY)
        if arrival is not None and (data := arrival.whole()) is not None:
            request, body = await self._start(scope, data, of, handle_header)
            body.end()
            return request
        ended = False

        async def tracked() -> Message:
            nonlocal ended
            message = await receive()
            ended = not message.get("more_body", False)
            return message

        try:
            request, body = await self._arriving(scope, tracked, arrival, of, handle_header)
        except PsError:
            # Drain the body, whatever its size: a response sent before the end of the body would be lost.
            while not ended:
                await tracked()
            raise
        body.end()  # outside the try: the body has ended, so nothing is left to drain
        return request

    async def _arriving(
        self,
        scope: Scope,
        receive: Receive,
        arrival: BodyTransfer | None,
        of: type[H],
        handle_header: HeaderHandler[H, T],
    ) -> tuple[T, Body]:
        data, more = await _next(receive)
        while more and (len(data) < PREFIX_BYTES or len(data) < header_end(data)):
            chunk, more = await _next(receive)
            data += chunk
        request, body = await self._start(scope, data, of, handle_header)
        if more and arrival is not None:
            if not await arrival.into(body):
                raise _cut_off()
            more = False
        while more:
            chunk, more = await _next(receive)
            body.feed(chunk)
        return request, body

    async def _start(
        self, scope: Scope, data: bytes, of: type[H], handle_header: HeaderHandler[H, T]
    ) -> tuple[T, Body]:
        """Return the request and its body, filled with what `data` holds after the complete header."""
        header, offset = decode_header(data, of)
        request, body = await handle_header(header)
        account(scope).grow(body.memory_bytes)
        with unavailable_if_full(f"a body of {body.size} bytes"):
            if body.size <= INLINE_BYTES_MAX or body.has_memory(self._pool):
                body.allocate(self._pool)
            else:
                await asyncio.to_thread(body.allocate, self._pool)
        body.feed(memoryview(data)[offset:])
        return request, body


async def _next(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise _cut_off()
    return message.get("body", b""), bool(message.get("more_body", False))


def _cut_off() -> PsError:
    return problem("malformed", "the body was cut off")
