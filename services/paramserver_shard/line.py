"""The line to Redis, on which partitions wait for their turn to be stored or loaded."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paramserver.limits import SNAPSHOT_BLOCK_BYTES, STORE_PACE_BYTES_PER_S
from paramserver_node.redis import transfer_timeout


class Line:
    """Turns for blocks in one direction: the bytes of one full block at once, however many partitions are waiting.

    Without turns, transfers that share a slow line would all exceed their timeouts, begin again, and never end.
    """

    def __init__(self) -> None:
        self._free_bytes = SNAPSHOT_BLOCK_BYTES
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
            async with transfer_timeout(SNAPSHOT_BLOCK_BYTES, STORE_PACE_BYTES_PER_S):
                yield
        finally:
            self._free_bytes += size_bytes
            self._freed.set()
