"""Graceful shutdown of a shard: unready, partitions handed over or stored, then deregistered; within 25 s.

The shard serves each partition until another shard takes it over. When no more can be handed over it answers 503, so
that nothing is acknowledged after the last snapshot.
"""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import Final

from paramserver.core.shard_events import SaveAll
from paramserver.errors import PsError
from paramserver_shard.membership import Membership
from paramserver_shard.runtime import Runtime

log = logging.getLogger("paramserver.shard")

HAND_OVER_S: Final = 15.0
"""Longest wait for other shards to take over the partitions."""
SAVE_S: Final = 20.0
"""Deadline for storing, from the stop request on; supervisors kill the process after 25 to 30 s."""
CUT_S: Final = 4.0
"""Longest wait until all owners have stored synchronous models of level `applied` at their present clock."""
ASK_S: Final = 1.0
_LOOK_S: Final = 0.1


class Stopping:
    """Shuts one shard down."""

    def __init__(self, membership: Membership, runtime: Runtime) -> None:
        self._membership = membership
        self._runtime = runtime

    async def run(self, asked: asyncio.Event, stop: asyncio.Event) -> None:
        """Wait for `asked`, shut the shard down, then set `stop` so that the server closes."""
        await asked.wait()
        began = monotonic()
        self._membership.stopping = True
        log.info("told to stop; %d partitions to hand over", self._owned)
        if self._membership.epoch:
            await self._drain(lambda: self._owned > 0, began + HAND_OVER_S)
            self._membership.serving.close()
            # If no shard can take anything, the scheduler has all owners store a cut.
            await self._drain(lambda: self._beyond_cuts, monotonic() + CUT_S, alone=True)
            await self._save(began + SAVE_S)
            await self._membership.leave()
        self._membership.serving.close()
        self._runtime.close()
        stop.set()

    async def _drain(self, left: Callable[[], bool], until: float, *, alone: bool = False) -> None:
        """Ask the scheduler to move partitions away until nothing is `left`, the request fails, or `until` is reached.

        Unless `alone`, give up when no other shard can take any.
        """
        ask_at = 0.0
        while left() and monotonic() < until:
            if monotonic() >= ask_at:
                try:
                    targets = await self._membership.drain()
                except PsError as error:
                    log.warning("cannot hand over: %s", error)
                    return
                if not targets and not alone:
                    log.info("no other shard can take %d partitions", self._owned)
                    return
                ask_at = monotonic() + ASK_S
            await asyncio.sleep(_LOOK_S)

    async def _save(self, until: float) -> None:
        """Store in Redis everything that exists only in this process, or give up at `until`."""
        while self._unsaved or self._runtime.writer.waiting:
            if monotonic() >= until:
                why = self._runtime.storage.degraded or "no time"
                log.error("%d partitions could not be stored: %s", self._unsaved, why)
                return
            self._runtime.feed(SaveAll())
            await asyncio.sleep(_LOOK_S)

    @property
    def _beyond_cuts(self) -> bool:
        """Whether a partition that is recovered from cuts is beyond its model's newest cut."""
        cuts = self._membership.cuts()
        models = self._runtime.core.models.values()
        return any(p.by_cuts and p.clock > (cuts.get(m.key) or 0) for m in models for p in m.partitions.values())

    @property
    def _owned(self) -> int:
        """Number of partitions of this shard, loaded or not."""
        return sum(len(m.partitions) for m in self._runtime.core.models.values())

    @property
    def _unsaved(self) -> int:
        """Number of partitions with changes that exist only in memory and that a snapshot would store."""
        return sum(p.unsaved for m in self._runtime.core.models.values() for p in m.partitions.values())
