"""One scheduler's time as leader: it renews the lease, and after a pause it asks Redis before it answers anything.

A process that was suspended (stopped, swapped out) may have been replaced without noticing, so it answers nothing until
it has tried to renew its lease.  (The clock stands still while a machine sleeps: such a pause is noticed at the next
renewal, within a second.)  An outage of Redis deposes nobody: heartbeats of shards and workers are still answered.  But
Redis may be unreachable for this leader alone, so once its lease has expired, it asks the other schedulers whether one
of them leads.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Final

from paramserver.errors import PsError
from paramserver.limits import LEADER_LEASE_S
from paramserver_scheduler.lease import Deposed, Lease, RedisDataLost

log = logging.getLogger("paramserver.scheduler")

RENEW_S: Final = 1.0
BEAT_S: Final = 0.2
PAUSE_S: Final = 1.0
"""An event loop that has not run for this long counts as paused."""


@asynccontextmanager
async def kept(lease: Lease) -> AsyncIterator[None]:
    """Renew the lease during a block that may last longer than it; whether it was lost is seen at the next renewal."""

    async def renew() -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            with suppress(PsError, Deposed, RedisDataLost):
                await lease.renew()

    renewing = asyncio.ensure_future(renew())
    try:
        yield
    finally:
        renewing.cancel()


class Leadership:
    """One term as leader, from winning the lease to losing it."""

    def __init__(
        self,
        lease: Lease,
        note_redis: Callable[[str], None],
        on_data_lost: Callable[[], None],
        newer_leader_exists: Callable[[], Awaitable[bool]],
    ) -> None:
        self._lease = lease
        self._newer_leader_exists = newer_leader_exists
        self._renewed_s = monotonic()
        self._note_redis = note_redis
        """Called after each renewal with why Redis is away ('': it answered)."""
        self._on_data_lost = on_data_lost
        self._ran_s = monotonic()
        """When the event loop was last known to run."""
        self._paused_s = float("-inf")
        """When a pause of the event loop was last noticed."""
        self._unconfirmed = True
        """Whether no renewal has begun and ended since the last pause, or since the state was read."""
        self._renewal: asyncio.Task[None] | None = None
        self.over = False
        """Whether a newer leader is known, or `run` has ended for another reason."""

    async def run(self) -> None:
        """Renew the lease until cancelled.  Raises Deposed when another scheduler leads."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_for_pauses())
                while True:
                    await self._renew_shared()
                    if self.over:
                        raise Deposed(f"a newer scheduler than term {self._lease.term} leads")
                    await asyncio.sleep(RENEW_S)
        finally:
            self.over = True
            if self._renewal is not None:
                self._renewal.cancel()

    async def confirm(self) -> bool:
        """Whether this scheduler may still answer; asks Redis first if the process was just paused."""
        self._record_running()
        while self._unconfirmed and not self.over:
            await self._renew_shared()  # again if one was in flight already: its answer may be older than the pause
        return not self.over

    async def _renew_shared(self) -> None:
        """Renew the lease once; concurrent callers share one renewal and return when it ends or is cancelled."""
        if self._renewal is None:
            self._renewal = asyncio.ensure_future(self._renew())
            self._renewal.add_done_callback(self._renewal_done)
        renewal = self._renewal
        await asyncio.wait({renewal})
        if not renewal.cancelled():
            renewal.result()

    def _renewal_done(self, _: "asyncio.Task[None]") -> None:
        self._renewal = None

    async def _renew(self) -> None:
        asked_s = monotonic()
        try:
            await self._lease.renew()
        except Deposed:
            self.over = True
        except RedisDataLost:
            self._note_redis("")
            self._on_data_lost()
        except PsError as away:
            self._note_redis(away.detail)
            if monotonic() - self._renewed_s > LEADER_LEASE_S and await self._newer_leader_exists():
                self.over = True
        else:
            self._renewed_s = asked_s
            self._note_redis("")
        self._record_running()
        # A pause during the request leaves it unconfirmed, because the answer may be older than the pause.
        if self._paused_s <= asked_s:
            self._unconfirmed = False

    def _record_running(self) -> None:
        """Record that the event loop runs; detects that it was paused before."""
        now = monotonic()
        if now - self._ran_s > PAUSE_S:
            log.warning("scheduler.paused s=%.1f", now - self._ran_s)
            self._paused_s, self._unconfirmed = now, True
        self._ran_s = now

    async def _watch_for_pauses(self) -> None:
        while True:
            self._record_running()
            await asyncio.sleep(BEAT_S)
