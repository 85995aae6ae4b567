"""Client for frames to other shards."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from paramserver.errors import PsError, Unavailable, Unreachable, problem
from paramserver.limits import JOURNAL_WAIT_S, LEASE_S, PACE_BYTES_PER_S
from paramserver.net.calls import Outcome, Request, Response, TakenTooSlowly, error_of
from paramserver.net.credentials import Credentials
from paramserver.net.direct import AsyncDirectTransport
from paramserver.types import U8, AnyArray
from paramserver.wire.frame import MEDIA_TYPE, PullFrame, PullReply, PushFrame, PushReply, decode_header, encode_header
from paramserver.wire.incoming_pull import IncomingPull
from paramserver.wire.state import SetFrame
from paramserver_shard.buffers import INLINE_BYTES_MAX, BufferPool, unavailable_if_full

REQUEST_BASE_TIMEOUT_S: Final = LEASE_S + JOURNAL_WAIT_S + 5.0
"""Base timeout of a request: at its owner a push waits for its turn, then for the journal; the rest is network."""


class PeerClient:
    """The client side of shard-to-shard requests; close it with `aclose()`.

    Its methods raise the PsError that the other shard answered.
    """

    def __init__(self, pool: BufferPool, credentials: Credentials) -> None:
        self._pool = pool
        self._transport = AsyncDirectTransport(credentials)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def push(self, address: str, path: str, frame: PushFrame | SetFrame, body: Sequence[AnyArray]) -> PushReply:
        """Send a frame that changes something, and its body; return the reply.

        Without an answer, raises Unavailable, or InDoubt if the other shard may have changed something all the same.
        """
        prefix, rest = encode_header(frame), [a.data for a in body]
        timeout_s = _timeout_s(len(prefix) + sum(a.nbytes for a in rest))
        request = Request("POST", path, prefix, _HEADERS, timeout_s=timeout_s, rest=rest)
        outcome = await self._transport.send(request, address)
        if isinstance(outcome, Unreachable | TakenTooSlowly):  # their hints are for the user's own requests
            raise _silent(address, outcome)
        response = _answered(outcome)
        try:
            return decode_header(response.body, PushReply)[0]
        except PsError as e:
            raise problem("in_doubt", f"the response of {address} cannot be read: {e.detail}") from e

    async def pull(
        self, address: str, frame: PullFrame, size_bytes: int, make_room: Callable[[int], None] = lambda _: None
    ) -> tuple[PullReply, U8]:
        """Send a pull; return the reply and the values, which have `size_bytes`.

        `make_room` is called with that size before they take memory, and may refuse them.  Without an answer of that
        size, raises Unavailable.
        """
        prefix, sink = encode_header(frame), _Pulled(self._pool, size_bytes, make_room)
        if not frame.wait_s:  # else it would have the memory all the time that it waits
            await sink.allocate()
        timeout_s = frame.wait_s + _timeout_s(len(prefix) + size_bytes)
        request = Request("POST", "/pull", prefix, _HEADERS, sink=sink, timeout_s=timeout_s)
        outcome = await self._transport.send(request, address)
        if sink.refused is not None:
            raise sink.refused
        if isinstance(outcome, PsError):
            raise _silent(address, outcome)
        response = _answered(outcome)
        if sink.reply is None:
            raise problem("unavailable", f"{address} answered a pull with HTTP {response.status}")
        return sink.reply, sink.values


_HEADERS: Final = {"content-type": MEDIA_TYPE}


class _Pulled(IncomingPull):
    """The sink of a pull; its values go into pooled memory, unless that would hold up the event loop."""

    def __init__(self, pool: BufferPool, size_bytes: int, make_room: Callable[[int], None]) -> None:
        self._pool, self._size_bytes, self._make_room = pool, size_bytes, make_room
        self._what = f"{size_bytes} bytes of values of another shard"
        self.values: U8 = np.empty(0, np.uint8)
        self.refused: PsError | None = None
        """Why the values of the answer have no room."""
        super().__init__()

    async def allocate(self) -> None:
        """Take the memory before the answer comes.  Raises what `make_room` does, or Unavailable."""
        self._make_room(self._size_bytes)
        with unavailable_if_full(self._what):
            if self._is_quick():
                self.values = self._pool.take_bytes(self._size_bytes)
            else:
                self.values = await asyncio.to_thread(self._pool.take_bytes, self._size_bytes)

    def _is_quick(self) -> bool:
        """Whether the pool has the memory, or makes it in no time."""
        return self._size_bytes <= INLINE_BYTES_MAX or self._pool.keeps([self._size_bytes], shared=False)

    def _places_for(self, reply: PullReply) -> list[memoryview]:
        if not self._size_bytes:
            return []
        if not self.values.size:  # else it has it, perhaps since an earlier attempt
            # The event loop cannot wait for a thread here.  Memory that is not pooled is faulted in piece by piece.
            quick, size = self._is_quick(), self._size_bytes
            try:
                self._make_room(size)
                with unavailable_if_full(self._what):
                    self.values = self._pool.take_bytes(size) if quick else np.empty(size, np.uint8)
            except PsError as error:
                self.refused = error
                raise
        return [self.values.data]


def _timeout_s(size_bytes: int) -> float:
    """Return the timeout of an exchange of so many bytes."""
    return REQUEST_BASE_TIMEOUT_S + size_bytes / PACE_BYTES_PER_S


def _silent(address: str, error: PsError) -> PsError:
    return problem("unavailable", f"the shard at {address} does not answer ({error.detail})")


def _answered(outcome: Outcome) -> Response:
    """Return a response of status 2xx; raise the error of any other."""
    if isinstance(outcome, Response):
        if outcome.status < 300:
            return outcome
        outcome = error_of(outcome)
        if outcome.status >= 500 and not isinstance(outcome, Unavailable):
            outcome = problem("unavailable", f"another shard failed: {outcome.detail}")
    raise outcome
