"""One scheduler's time as leader: the lease is renewed, and after a pause Redis is asked before anything is answered.

A process that stood still (stopped, swapped out, its machine asleep) may have been replaced without knowing.  So it
says nothing until it has tried to renew its lease.  A Redis that does not answer deposes nobody: shards and workers get
their heartbeats answered.  But it may be silent to this one alone; so beyond the lease's end the other schedulers are
asked whether one of them leads by now.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final

from paramserver.errors import PsError
from paramserver.limits import LEADER_LEASE_S
from paramserver_scheduler.lease import Deposed, Emptied, Lease

log = logging.getLogger("paramserver.scheduler")

RENEW_S: Final = 1.0
BEAT_S: Final = 0.2
PAUSE_S: Final = 1.0
"""A loop that has not run for so long counts as paused."""


class Reign:
    """The lease of one leader, from its winning to its loss."""

    def __init__(
        self,
        lease: Lease,
        redis_answers: Callable[[bool], None],
        emptied: Callable[[], None],
        newer_leads: Callable[[], Awaitable[bool]],
    ) -> None:
        self._lease = lease
        self._newer_leads = newer_leads
        self._renewed_s = monotonic()
        self._redis_answers = redis_answers
        """Told after each renewal whether Redis answered."""
        self._emptied = emptied
        self._beat_s = monotonic()
        """When the loop last ran, as far as is known."""
        self._paused_s = float("-inf")
        """When it was noticed last that it had not for a while."""
        self._doubt = False
        """Whether Redis has not been asked since."""
        self._asking: asyncio.Task[None] | None = None
        self.over = False
        """Whether a newer leader is known, or this one has ended for another reason."""

    async def run(self) -> None:
        """Renew the lease until cancelled.  Raises Deposed when another scheduler leads."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_the_clock())
                while True:
                    await self._ask()
                    if self.over:
                        raise Deposed(f"a newer scheduler than term {self._lease.term} leads")
                    await asyncio.sleep(RENEW_S)
        finally:
            self.over = True
            if self._asking is not None:
                self._asking.cancel()

    async def confirm(self) -> bool:
        """Whether this scheduler may still answer; asks Redis first if the process has just stood still."""
        self._beat()
        while self._doubt and not self.over:
            await self._ask()  # once more where that was under way already: its answer may be older than the pause
        return not self.over

    async def _ask(self) -> None:
        """One renewal; whoever needs one while it is under way waits for the same, and is let go with its end."""
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._renew())
            self._asking.add_done_callback(self._asked)
        asking = self._asking
        await asyncio.wait({asking})
        if not asking.cancelled():
            asking.result()

    def _asked(self, _: "asyncio.Task[None]") -> None:
        self._asking = None

    async def _renew(self) -> None:
        asked_s = monotonic()
        try:
            await self._lease.renew()
        except Deposed:
            self.over = True
        except Emptied:
            self._redis_answers(True)
            self._emptied()
        except PsError:
            self._redis_answers(False)
            if monotonic() - self._renewed_s > LEADER_LEASE_S and await self._newer_leads():
                self.over = True
        else:
            self._renewed_s = asked_s
            self._redis_answers(True)
        self._beat()
        # A pause in the middle of the question leaves the doubt: the answer is older than it.
        if self._paused_s <= asked_s:
            self._doubt = False

    def _beat(self) -> None:
        """The loop runs; notices when it has not for a while."""
        now = monotonic()
        if now - self._beat_s > PAUSE_S:
            log.warning("scheduler.paused s=%.1f", now - self._beat_s)
            self._paused_s, self._doubt = now, True
        self._beat_s = now

    async def _watch_the_clock(self) -> None:
        while True:
            self._beat()
            await asyncio.sleep(BEAT_S)
