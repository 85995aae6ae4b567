"""What paces the transfers of snapshots: a budget of bytes per second, and turns on the line to Redis."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from paramserver.limits import STORE_PACE_BYTES_PER_S
from paramserver_node.redis import transfer_timeout


class Budget:
    """Rate limiter for writes: at most `bytes_per_s` over all partitions of this shard, until it is lifted."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float]) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0
        self._lifted = asyncio.Event()

    def lift(self) -> None:
        """Let everything pass at once from now on, also what waits already."""
        self._lifted.set()

    async def spend(self, size_bytes: int, *, urgent: bool) -> None:
        """Wait until `size_bytes` more may be written; urgent writes neither wait nor hold the others up."""
        if urgent:
            return
        now = self._clock()
        start = max(now, self._free_at)
        self._free_at = start + size_bytes / self._bytes_per_s
        if start > now:
            with suppress(TimeoutError):
                async with asyncio.timeout(start - now):
                    await self._lifted.wait()


class Line:
    """Turns for blocks on the line to Redis, in one direction: one full block at once, however many partitions wait.

    Without turns, transfers that share a slow line would all exceed their timeouts, begin again, and never end.
    """

    def __init__(self, block_bytes: int) -> None:
        """`block_bytes` is the size of a full block."""
        self._block_bytes = self._free_bytes = block_bytes
        self._next = asyncio.Lock()  # held by the first in line until it has its turn
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def turn(self, size_bytes: int) -> AsyncIterator[None]:
        """Wait for a turn to transfer a block of `size_bytes`; raises TimeoutError if the transfer is too slow then.

        Turns are in order of arrival. The wait for one has no limit, as each turn has one.
        """
        async with self._next:
            while self._free_bytes < size_bytes:
                self._freed.clear()
                await self._freed.wait()
            self._free_bytes -= size_bytes
        try:
            # What else has its turn shares the line, so each has the time that all of it may take.
            async with transfer_timeout(self._block_bytes, STORE_PACE_BYTES_PER_S):
                yield
        finally:
            self._free_bytes += size_bytes
            self._freed.set()
