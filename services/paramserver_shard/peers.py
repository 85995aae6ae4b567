"""Client for frames to other shards."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from paramserver.errors import PsError, Unavailable, Unreachable, problem
from paramserver.limits import JOURNAL_WAIT_S, LEASE_S, PACE_BYTES_PER_S
from paramserver.net.calls import Outcome, Request, Response, error_of
from paramserver.net.credentials import Credentials
from paramserver.net.direct import AsyncDirectTransport
from paramserver.types import U8, AnyArray
from paramserver.wire.frame import MEDIA_TYPE, PullFrame, PullReply, PushFrame, PushReply, decode_header, encode_header
from paramserver.wire.incoming_pull import IncomingPull
from paramserver.wire.state import SetFrame
from paramserver_shard.buffers import BufferPool

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
        if isinstance(outcome, Unreachable):
            raise _silent(address, outcome)
        response = _answered(outcome)
        try:
            return decode_header(response.body, PushReply)[0]
        except PsError as e:
            raise problem("in_doubt", f"the response of {address} cannot be read: {e.detail}") from e

    async def pull(self, address: str, frame: PullFrame, size_bytes: int) -> tuple[PullReply, U8]:
        """Send a pull; return the reply and the values, which have `size_bytes`.

        Without an answer of that size, raises Unavailable.
        """
        prefix, sink = encode_header(frame), _Pulled(self._pool, size_bytes)
        timeout_s = frame.wait_s + _timeout_s(len(prefix) + size_bytes)
        request = Request("POST", "/pull", prefix, _HEADERS, sink=sink, timeout_s=timeout_s)
        outcome = await self._transport.send(request, address)
        if isinstance(outcome, PsError):
            raise _silent(address, outcome)
        response = _answered(outcome)
        if sink.reply is None:
            raise problem("unavailable", f"{address} answered a pull with HTTP {response.status}")
        return sink.reply, sink.values


_HEADERS: Final = {"content-type": MEDIA_TYPE}


class _Pulled(IncomingPull):
    """The sink of a pull whose values go into pooled memory."""

    def __init__(self, pool: BufferPool, size_bytes: int) -> None:
        self._pool, self._size_bytes = pool, size_bytes
        self.values: U8 = np.empty(0, np.uint8)
        super().__init__()

    def _places_for(self, reply: PullReply) -> list[memoryview]:
        if not self._size_bytes:
            return []
        self.values = self._pool.take_bytes(self._size_bytes)
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
