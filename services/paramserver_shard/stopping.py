"""Graceful shutdown of a shard: unready, partitions handed over or stored, then deregistered; within `stop_s`.

The shard serves each partition until another shard takes it over. When no more can be handed over it answers 503, so
that nothing is acknowledged after the last snapshot.
"""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final

from paramserver.core.shard.events import SaveAll
from paramserver.errors import PsError
from paramserver_shard.membership import Membership
from paramserver_shard.runtime import Runtime

log = logging.getLogger("paramserver.shard")

LEAVE_S: Final = 2.0
"""Of `stop_s`, what is kept for deregistering."""
GRACE_S: Final = 3.0
"""Of `stop_s`, what is kept for requests in flight once everything is handed over or stored."""
HAND_OVER: Final = 0.75
"""Share of the rest in which other shards may take over the partitions; all of it is for storing."""
AWAY_S: Final = 5.0
"""How long schedulers may fail to answer before the shard does without them: another one may be taking over."""
ASK_S: Final = 1.0
_LOOK_S: Final = 0.1


class Stopping:
    """Shuts one shard down."""

    def __init__(self, membership: Membership, runtime: Runtime, stop_s: float) -> None:
        """`stop_s` is the time from the request to stop to the end of the process, in seconds."""
        self.lost = False
        """Whether something that only this process held could not be stored in time."""
        self._membership = membership
        self._runtime = runtime
        self._store_s = stop_s - LEAVE_S - GRACE_S
        self._left = False
        self._trouble = ""
        """Why the scheduler was asked in vain the last time."""
        self._away_since_s: float | None = None
        """Since when every request to it was in vain."""

    async def run(self, asked: asyncio.Event, stop: asyncio.Event) -> None:
        """Wait for `asked`, shut the shard down, then set `stop` so that the server closes."""
        await asked.wait()
        began = stored_by = asyncio.get_running_loop().time()
        self._membership.stopping = True
        log.info("told to stop; %d partitions to hand over", self._owned)
        if self._membership.epoch:
            stored_by += self._store_s
            self._runtime.storage.hurry()  # moves of a model wait for the end of its cut
            await _until(began + HAND_OVER * self._store_s, self._hand_over())
            self._membership.serving.close()
            await _until(stored_by, self._store())
        self._membership.serving.close()
        if not self._left:
            self._tell_losses()
            await _until(stored_by + LEAVE_S, self._leave_without_storing())
        self._runtime.close()
        stop.set()

    async def _hand_over(self) -> None:
        """Have the scheduler move partitions away until none is left, or until no shard can take any."""
        while True:
            found = await self._drain(cut=False)  # also without partitions: one may be on its way here
            if found is None:
                if not self._owned:
                    return
                if self._given_up:
                    log.warning("cannot hand over: %s", self._trouble)
                    return
                await asyncio.sleep(ASK_S)
                continue
            targets, mapped = found
            if not self._owned and not mapped:
                return
            if not targets:
                log.info("no other shard can take %d partitions", max(self._owned, mapped))
                return
            for look in range(round(ASK_S / _LOOK_S)):
                if self._owned or not look:
                    await asyncio.sleep(_LOOK_S)

    async def _store(self) -> None:
        """Store in Redis everything that exists only in this process, then leave.

        Synchronous models at level `applied` need a cut of all owners for that, which the scheduler requests; it also
        knows of commits that have not come here yet.
        """
        loop, ask_at = asyncio.get_running_loop(), 0.0
        while True:
            if not (self._unsaved or self._runtime.writer.waiting or self._beyond_cuts):
                await self._leave(stored=True)
                if self._left or self._given_up:
                    return
            self._runtime.feed(SaveAll())
            if self._beyond_cuts and loop.time() >= ask_at:
                await self._drain(cut=True)
                ask_at = loop.time() + ASK_S
            await asyncio.sleep(_LOOK_S)

    async def _leave_without_storing(self) -> None:
        while True:
            await self._leave(stored=False)
            if self._left or self._given_up:
                return
            await asyncio.sleep(_LOOK_S)

    async def _leave(self, *, stored: bool) -> None:
        """Deregister, unless the scheduler has something stored first; a shard without partitions tries only once."""
        try:
            self._left = await self._membership.leave(stored=stored)
        except PsError as error:
            self._asked_in_vain(error)
            log.info("cannot deregister from the scheduler: %s", error)
            self._left = not self._owned
        else:
            self._answered()

    async def _drain(self, *, cut: bool) -> tuple[int, int] | None:
        """Ask the scheduler to move all partitions away; return what `Membership.drain` does, None if it refuses."""
        try:
            found = await self._membership.drain(cut=cut)
        except PsError as error:
            self._asked_in_vain(error)
            return None
        self._answered()
        return found

    def _asked_in_vain(self, error: PsError) -> None:
        self._trouble = str(error)
        if self._away_since_s is None:
            self._away_since_s = asyncio.get_running_loop().time()

    def _answered(self) -> None:
        self._trouble, self._away_since_s = "", None

    @property
    def _given_up(self) -> bool:
        """Whether the scheduler was asked in vain for `AWAY_S`."""
        since_s = self._away_since_s
        return since_s is not None and asyncio.get_running_loop().time() - since_s >= AWAY_S

    def _tell_losses(self) -> None:
        """Log what only this process holds, and which models will continue from before that."""
        why = self._runtime.storage.degraded or self._trouble or "no time"
        if unsaved := self._unsaved:
            log.error("%d partitions could not be stored: %s", unsaved, why)
        for name, (clock, cut) in self._beyond_cuts.items():
            back = "begins anew" if cut is None else f"goes back from clock {clock} to its previous cut, of clock {cut}"
            log.error("synchronous model '%s' %s: %s", name, back, why)
        self.lost = bool(unsaved or self._beyond_cuts)

    @property
    def _beyond_cuts(self) -> dict[str, tuple[int, int | None]]:
        """(clock, newest cut) of each model that is recovered from cuts and has partitions here beyond its newest.

        Beyond no cut at all are the first values, too, once they are complete.
        """
        cuts = self._membership.cuts()
        found = {}
        for model in self._runtime.core.models.values():
            here = any(p.by_cuts and p.state is not None for p in model.partitions.values())
            cut = cuts.get(model.key)
            # The model's clock: a commit that a partition has yet to apply is lost without a cut, too.
            if here and model.ready and model.clock > (-1 if cut is None else cut):
                found[model.key.name] = model.clock, cut
        return found

    @property
    def _owned(self) -> int:
        """Number of partitions of this shard, loaded or not."""
        return sum(len(m.partitions) for m in self._runtime.core.models.values())

    @property
    def _unsaved(self) -> int:
        """Number of partitions of which a snapshot or a cut that is due exists only in memory."""
        return sum(1 for _ in self._runtime.core.unsaved())


async def _until(at: float, work: Coroutine[Any, Any, None]) -> None:
    """Do the work; give it up at that time of the loop."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(at):
            await work
