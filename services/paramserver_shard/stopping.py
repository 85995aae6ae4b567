"""The end of a shard that is told to stop: not ready, its partitions handed over or stored, goodbye, within 25 s.

It serves what it still owns until somebody else does.  Where nobody else is there it answers 503 from then on, so that
nothing is acknowledged after what is stored last.
"""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import Final

from paramserver.core.shard_io import SaveAll
from paramserver.errors import PsError
from paramserver_shard.membership import Membership
from paramserver_shard.runtime import Runtime

log = logging.getLogger("paramserver.shard")

HAND_OVER_S: Final = 15.0
"""How long it waits for others to take its partitions."""
SAVE_S: Final = 20.0
"""After so long since it was told it goes, stored or not: whoever told it kills it after 25 to 30 s."""
CUT_S: Final = 4.0
"""How long it waits at most for synchronous models at level `applied` to be stored as they stand, by all who have a
part of them."""
ASK_S: Final = 1.0
_LOOK_S: Final = 0.1


class Stopping:
    """Brings one shard to its end."""

    def __init__(self, membership: Membership, runtime: Runtime) -> None:
        self._membership = membership
        self._runtime = runtime

    async def run(self, asked: asyncio.Event, stop: asyncio.Event) -> None:
        """Waits until it is asked to stop, and sets `stop` when the server may close."""
        await asked.wait()
        began = monotonic()
        self._membership.stopping = True
        log.info("told to stop; %d partitions to hand over", self._owned)
        if self._membership.epoch:
            await self._drain(lambda: self._owned > 0, began + HAND_OVER_S)
            self._membership.close()
            # Where nobody can take anything, the scheduler has everybody store a cut.
            await self._drain(lambda: self._beyond_cuts, monotonic() + CUT_S, alone=True)
            await self._save(began + SAVE_S)
            await self._membership.leave()
        self._membership.close()
        self._runtime.close()
        stop.set()

    async def _drain(self, left: Callable[[], bool], until: float, *, alone: bool = False) -> None:
        """Ask for takers until nothing is `left`, no scheduler answers, or the time is over.

        Unless it may be `alone`, also only while somebody can take something.
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
        """Until everything that this process alone holds is in Redis, or the time is over."""
        while self._unsaved or self._runtime.writer.waiting:
            if monotonic() >= until:
                log.error("%d partitions could not be stored: %s", self._unsaved, self._runtime.degraded or "no time")
                return
            self._runtime.feed(SaveAll())
            await asyncio.sleep(_LOOK_S)

    @property
    def _beyond_cuts(self) -> bool:
        """Whether a partition that goes back to cuts has come further than the newest one."""
        cuts = self._membership.cuts()
        models = self._runtime.core.models.values()
        return any(p.by_cuts and p.clock > (cuts.get(m.key) or 0) for m in models for p in m.partitions.values())

    @property
    def _owned(self) -> int:
        """Partitions of this shard, loaded or not."""
        return sum(len(m.partitions) for m in self._runtime.core.models.values())

    @property
    def _unsaved(self) -> int:
        """Partitions of which memory alone holds something that a snapshot would keep."""
        return sum(p.unsaved for m in self._runtime.core.models.values() for p in m.partitions.values())
