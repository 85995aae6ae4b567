"""Bounds on the large bodies that a scheduler reads and parses at the same time.

Otherwise a client could fill its memory, or hold up its event loop until it loses its lease.  Small bodies, such as
those of heartbeats, are not counted, so that a flood of large ones holds up none of them.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from fastapi import Request

from paramserver.limits import CONTROL_BODIES_BYTES_MAX
from paramserver_node.in_flight import InFlight
from paramserver_node.negotiate import announced

SMALL_BYTES: Final = 64 << 10
"""A body that is announced with at most this length does not count."""


class LargeBodies:
    """The large bodies that are being read or parsed."""

    def __init__(self) -> None:
        self._in_flight = InFlight(CONTROL_BODIES_BYTES_MAX)
        self._parsing = asyncio.Lock()

    @contextmanager
    def reading(self, request: Request, size_max: int) -> Iterator[None]:
        """Count the request's body while it is read; at the maximum, if its length is not announced.

        Raises Unavailable: `too_many_requests` if this client reads too much at once, `queue_full` if all together do.
        """
        size = announced(request)
        if size is None:
            size = size_max
        if not SMALL_BYTES < size <= size_max:  # a larger one is refused before it is read
            yield
            return
        with self._in_flight.request(request.client.host if request.client else "") as account:
            account.grow(size)
            yield

    async def parsed(self, body: bytes, parse: Callable[[bytes], Any]) -> Any:
        """Return `parse(body)`; large bodies, which take up to a second, are parsed in a thread, one at a time."""
        if len(body) <= SMALL_BYTES:
            return parse(body)
        async with self._parsing:
            return await asyncio.to_thread(parse, body)
