"""Passes events to the scheduler's core and performs the effects, in order.

One event loop, no locks: routes call `ask` with an event and wait for its reply.  A decision becomes visible only once
it is in Redis: effects behind a `Store` wait, and one task writes all pending stores in one script (group commit), then
releases the replies and documents behind them.  While Redis is away, nothing pending is released and events that would
decide something are refused with 503 after a short wait; reads, heartbeats and open feeds continue.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from starlette.types import Receive

from paramserver import limits
from paramserver.core.scheduler import io
from paramserver.core.scheduler.core import SchedulerCore
from paramserver.errors import PsError, as_problem, problem
from paramserver.types import PartitionKey, Token
from paramserver_node.crash import crash_point
from paramserver_node.race import while_there
from paramserver_scheduler.hub import Hub
from paramserver_scheduler.lease import Deposed, RedisDataLost
from paramserver_scheduler.store import StateStore

if TYPE_CHECKING:
    from paramserver_scheduler.jobs import Jobs

log = logging.getLogger("paramserver.scheduler")

STORE_WAIT_S: Final = 2.0
"""How long a request waits for Redis before it is answered 503."""
FINISH_S: Final = 1.0
"""How long a scheduler that is told to stop goes on storing what it has decided."""
RETRY_S: Final = 0.25
TICK_S: Final = 0.5

_ACCEPTED_WHILE_AWAY: Final = (
    io.ShardHeartbeat,
    io.WorkerHeartbeat,
    io.PoolHeartbeat,
    io.OpenFeed,
    io.LeaseTask,
    io.ReportClock,
)
"""Events of requests that are accepted while Redis is away: they keep leases alive, or can wait."""

_TAKE_LONG: Final = (*_ACCEPTED_WHILE_AWAY, io.RequestCheckpoint)
"""Events whose reply may wait for much else.

A checkpoint, once begun, is written whatever Redis does meanwhile.  One whose beginning waits for Redis waits on with
its request: it is not refused after `STORE_WAIT_S`, and begins when Redis is back.
"""

_LEASES: Final = (io.ShardHeartbeat, io.WorkerHeartbeat, io.PoolHeartbeat)
"""Events that can only postpone the core's deadlines."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The core's reply to a request."""

    status: int
    body: Mapping[str, Any] | None


@dataclass(slots=True)
class _Waiter:
    future: asyncio.Future[Answer]
    on_reply: Callable[[Answer], None] | None
    since: float | None
    """Since when it depends on Redis: from the start, or, if it may take long, since its reply waits."""
    changes: bool
    """Whether its sender must know if it may have been done."""
    decided: bool = False
    """Whether it is decided, although the core replies later."""


@dataclass(slots=True)
class _Batch:
    """Pending stores, which are written all at once, and the effects that wait for them."""

    fields: dict[str, Any] = field(default_factory=dict)
    tokens: dict[PartitionKey, Token] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)
    effects: list[io.Effect] = field(default_factory=list)

    @property
    def stored(self) -> bool:
        """Whether there is something to write."""
        return bool(self.fields or self.tokens or self.fences)

    def __bool__(self) -> bool:
        return self.stored or bool(self.effects)

    def add(self, later: "_Batch") -> None:
        """Merge a later batch into this one; its values win where both have a field."""
        self.fields.update(later.fields)
        self.tokens.update(later.tokens)
        self.fences.update(later.fences)
        self.effects += later.effects


class Runtime:
    """One leader's core with its store, its feeds and its pending requests."""

    def __init__(self, core: SchedulerCore, store: StateStore, hub: Hub) -> None:
        self.core = core
        self.hub = hub
        self.confirm: Callable[[], Awaitable[bool]] | None = None
        """Called before each `Tick`: whether this scheduler still leads (see `Leadership.confirm`)."""
        self.jobs: Jobs | None = None
        self.redis_away = ""
        """Why nothing can be stored now; empty while Redis accepts writes."""
        self.stopped: PsError | None = None
        """Why no more events are accepted; None while they are."""
        self._store = store
        self._request_numbers = itertools.count(1)
        self._waiters: dict[int, _Waiter] = {}
        self._writing = _Batch()
        self._next = _Batch()
        """Pending behind `_writing`: a single merged batch, so that it stays bounded while Redis is away."""
        self._queued = asyncio.Event()
        self._settled = asyncio.Event()
        """Nothing is pending."""
        self._settled.set()
        self._redis_back = asyncio.Event()
        self._redis_back.set()
        self._wake = asyncio.Event()
        self._wake_at = 0.0
        self._failures: asyncio.Queue[Exception] = asyncio.Queue()

    async def check_leads(self) -> None:
        """Raise Unavailable (`no_leader`) if another scheduler leads, which this one may have to ask after a pause."""
        if self.confirm is not None and not await self.confirm():
            raise problem("no_leader", "this scheduler is no longer the leader")

    # --- events in ---

    async def ask(
        self,
        make: Callable[[int], io.Event],
        receive: Receive | None = None,
        on_reply: Callable[[Answer], None] | None = None,
        *,
        changes: bool = False,
    ) -> Answer:
        """Pass the core the event that `make` builds from a request number, and return its reply.

        Args:
            make: builds the event.
            receive: tells when the client hangs up (ASGI); the wait then ends with Unavailable.
            on_reply: called with the answer at the moment it becomes visible, before any later document is published.
            changes: InDoubt is raised if what was decided is or may be stored when the wait ends without a reply.

        Raises the PsError that the core replied or `on_reply` raised, the reason for which the runtime was closed, or
        Unavailable: `storage_unavailable` if Redis is away for too long, `too_many_requests` if too many requests are
        pending, except for heartbeats: whoever parks long polls must not end the leases of all others.
        """
        number = next(self._request_numbers)
        event = make(number)
        if self.stopped is not None:
            raise self.stopped
        if self.redis_away and not isinstance(event, _ACCEPTED_WHILE_AWAY):
            await self._wait_for_redis()
            if self.stopped is not None:
                raise self.stopped
        if len(self._waiters) >= limits.WAITERS_MAX and not isinstance(event, _LEASES):  # those end soon
            raise problem("too_many_requests", f"{limits.WAITERS_MAX} requests are already waiting")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        harmless = isinstance(event, _ACCEPTED_WHILE_AWAY)
        since = None if isinstance(event, _TAKE_LONG) else monotonic()
        waiter = self._waiters[number] = _Waiter(future, on_reply, since, changes and not harmless)
        try:
            self.send(event)
            waiter.decided = isinstance(event, io.CreateModel)  # stored at once, and answered once shards serve it
            return await (future if receive is None or future.done() else while_there(receive, future))
        finally:
            if self._waiters.pop(number, None) is not None and (not future.done() or future.cancelled()):
                self.send(io.RequestGone(number))

    def send(self, event: io.Event) -> None:
        """Pass an event to the core and perform or queue its effects; does nothing once closed."""
        if self.stopped is not None:
            return
        try:
            effects = self.core.handle(event, monotonic())
        except Exception as error:
            self._fail(event, error)
            return
        self._take(effects)
        if not isinstance(event, _LEASES) and self.core.deadline() < self._wake_at:
            self._wake.set()

    def _fail(self, event: io.Event, error: Exception) -> None:
        """Stop after an exception in the core: its state may be inconsistent and must never be stored.

        The next leader starts from the stored state.
        """
        if isinstance(event, io.Request):
            self._answer(event.request, as_problem(error), 500)
        self.close(problem("unavailable", "this scheduler hit an internal error and is restarting; see its log"))
        self._failures.put_nowait(error)

    def _take(self, effects: list[io.Effect]) -> None:
        batch = _Batch()
        for effect in effects:
            match effect:
                case io.Store(fields, tokens, fences):
                    batch.fields.update(fields)
                    batch.tokens.update(tokens)
                    batch.fences.update(fences)
                case io.Reply(waits=False):
                    self._perform(effect)
                case _:
                    batch.effects.append(effect)
        if not batch.stored and not self._writing and not self._next:
            for effect in batch.effects:
                self._perform(effect)
            return
        for effect in batch.effects:
            waiter = self._waiters.get(effect.request) if isinstance(effect, io.Reply) else None
            if waiter is not None and waiter.since is None:
                waiter.since = monotonic()
        self._next.add(batch)
        self._settled.clear()
        self._queued.set()

    # --- effects out ---

    def _perform(self, effect: io.Effect) -> None:
        match effect:
            case io.Reply(request, outcome, status):
                self._answer(request, outcome, status)
            case io.Publish(document):
                commit = document["type"] == "commit"
                if commit:
                    crash_point("scheduler.commit_stored")
                self.hub.publish(document)
                if commit:
                    crash_point("scheduler.commit_published")
            case _:
                assert self.jobs is not None
                self.jobs.start(effect)

    def _answer(self, request: int, outcome: Any, status: int) -> None:
        waiter = self._waiters.pop(request, None)
        if waiter is None or waiter.future.done():
            return
        if isinstance(outcome, PsError):
            waiter.future.set_exception(outcome)
            return
        answer = Answer(status, outcome)
        try:
            if waiter.on_reply is not None:
                waiter.on_reply(answer)
        except PsError as error:
            waiter.future.set_exception(error)
        else:
            waiter.future.set_result(answer)

    async def _wait_for_redis(self) -> None:
        try:
            async with asyncio.timeout(STORE_WAIT_S):
                await self._redis_back.wait()
        except TimeoutError:
            raise _storage_away(self.redis_away) from None

    # --- the tasks ---

    async def run(self) -> None:
        """Send ticks to the core and write the state until cancelled.

        Raises, in an exception group, Deposed if a newer scheduler leads, and any exception of the core.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._raise_failures())
            group.create_task(self._tick_loop())
            group.create_task(self._store_loop())

    async def finish(self, reason: PsError) -> None:
        """Accept no more events, refused with `reason`, and store and answer what is decided, if Redis takes it."""
        self.stopped = reason
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                await self._settled.wait()

    def close(self, reason: PsError) -> None:
        """Answer every pending request with `reason`, end the feeds, and accept no more events."""
        self.stopped = reason
        self._refuse(list(self._waiters), reason)
        self.hub.close()

    def _refuse(self, numbers: Sequence[int], reason: PsError) -> None:
        """Answer these requests with `reason`, or as in doubt if what they change is decided: it may be stored."""
        replies = [e for b in (self._writing, self._next) for e in b.effects if isinstance(e, io.Reply)]
        decided = {r.request for r in replies if not isinstance(r.outcome, PsError)}
        doubt = problem("in_doubt", f"{reason.detail}; this request may have been done")
        for number in numbers:
            waiter = self._waiters[number]
            in_doubt = waiter.changes and (waiter.decided or number in decided)
            self._answer(number, doubt if in_doubt else reason, 503)

    async def _raise_failures(self) -> None:
        raise await self._failures.get()

    async def _tick_loop(self) -> None:
        while True:
            now = monotonic()
            # A deadline that stays in the past must not turn into a busy loop.
            wait_s = min(TICK_S, max(0.002, self.core.deadline() - now))
            self._wake_at = now + wait_s
            self._wake.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                if self.confirm is None or await self.confirm():
                    self.send(io.Tick())

    async def _store_loop(self) -> None:
        while True:
            await self._queued.wait()
            self._queued.clear()
            while self._next:
                self._writing, self._next = self._next, _Batch()
                if await self._try_write(self._writing):
                    for effect in self._writing.effects:
                        self._perform(effect)
                else:
                    self._writing.add(self._next)
                    self._next = self._writing
                self._writing = _Batch()
            self._settled.set()

    async def _try_write(self, batch: _Batch) -> bool:
        """Write the batch in one script; False if it must be written again, merged with what has come since."""
        crash_point("scheduler.before_store")
        try:
            if batch.stored:
                await self._store.write(batch.fields, batch.tokens.items(), batch.fences.items())
                crash_point("scheduler.after_tokens" if batch.tokens else "scheduler.after_store")
        except Deposed as e:
            self.close(problem("no_leader", str(e)))
            raise
        except RedisDataLost:
            if self.stopped is not None:  # the next leader begins the new term
                await asyncio.sleep(RETRY_S)
            self.redis_data_lost()
            return False
        except PsError as e:
            self._redis_failed(e)
            await asyncio.sleep(RETRY_S)
            return False
        self._set_redis_away("")
        return True

    def _redis_failed(self, why: PsError) -> None:
        self._set_redis_away(why.detail)
        before = monotonic() - STORE_WAIT_S
        late = [n for n, w in self._waiters.items() if w.since is not None and w.since < before]
        self._refuse(late, _storage_away(why.detail))
        for batch in (self._writing, self._next):
            batch.effects = [e for e in batch.effects if not isinstance(e, io.Reply) or e.request in self._waiters]

    def note_redis(self, away: str) -> None:
        """Note why the last renewal failed ('': it did not): an outage is noticed even if nothing is written."""
        if not self._writing and not self._next:  # otherwise the writer notices
            self._set_redis_away(away)

    def redis_data_lost(self) -> None:
        """Begin a new term and write everything again, because Redis has lost it."""
        if self.stopped is None and self._store.begin_new_term():
            log.error("redis.emptied: writing everything again in term %d", self._store.term)
            unseen = {*self._writing.tokens, *self._next.tokens}
            self.send(io.RedisEmptied(self._store.term, unseen))

    def _set_redis_away(self, away: str) -> None:
        """Set why Redis is away ('': it answers); on a change, log it and tell the core."""
        before, self.redis_away = self.redis_away, away
        if bool(away) == bool(before):
            return
        if away:
            log.warning("redis.away %s", away)
            self._redis_back.clear()
        else:
            log.info("redis.back")
            self._redis_back.set()
        self.send(io.StorageChanged(away))


def _storage_away(why: str) -> PsError:
    return problem(
        "storage_unavailable",
        f"nothing can be decided now: {why or 'Redis does not answer'}",
        hint="training in async and buffered mode continues; send this request again",
    )
