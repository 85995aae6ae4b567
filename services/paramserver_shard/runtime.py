"""Feeds events to the shard's core and performs its effects; every request waits here for its outcome.

Everything runs on the event loop's thread except the computation of big jobs. All tasks belong to the task group of the
process: an unexpected exception ends the group and with it the process, which is restarted from its snapshots. If it
occurs in a request that has not changed anything yet, the core answers that request with 500 and goes on instead.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeAlias, TypeVar

from msgspec.structs import replace
from redis.exceptions import RedisError

from paramserver.core.partition_state import Capture, PartitionState
from paramserver.core.ranges import RangeArray
from paramserver.core.shard.core import ShardCore
from paramserver.core.shard.effects import (
    Apply,
    AskWorker,
    Effect,
    Journal,
    LoadPartition,
    Outcome,
    PullDone,
    PushDone,
    Reply,
    Report,
    Resync,
    StoreSnapshot,
    ValuesKept,
)
from paramserver.core.shard.events import (
    Applied,
    CaptureReceived,
    Event,
    LoadFailed,
    PartitionLoaded,
    PullReceived,
    PushReceived,
    Request,
    RequestGone,
    SetReceived,
    TaskResult,
    Tick,
    WorkerAnswered,
)
from paramserver.errors import PsError, problem
from paramserver.types import PartitionKey, Token
from paramserver_node.crash import crash_point
from paramserver_node.redis import trouble
from paramserver_shard.buffers import BufferPool
from paramserver_shard.computing import (
    INLINE_ELEMENTS_MAX,
    compute,
    exceeds_cache,
    processors,
    shares,
    take_outputs,
    task_elements,
)
from paramserver_shard.directory import Directory
from paramserver_shard.journal import Journal as JournalStore
from paramserver_shard.journal_writer import JournalWriter
from paramserver_shard.loading import Loader
from paramserver_shard.loads import Loads
from paramserver_shard.snapshot_store import SnapshotStore
from paramserver_shard.storage import Storage

log = logging.getLogger("paramserver.shard")
T = TypeVar("T")
Asked: TypeAlias = PushReceived | SetReceived | PullReceived | CaptureReceived
"""A request of which the core sends an outcome."""


class Scheduler(Protocol):
    """What the core asks of the scheduler, as the membership implements it."""

    def report(self) -> None:
        """Send a heartbeat now."""

    def resync(self) -> None:
        """Reconnect the feed, which then repeats the complete state."""

    async def ask_worker(self, effect: AskWorker) -> WorkerAnswered:
        """Ask about a worker; if the scheduler fails to answer, the result carries the error."""


class Runtime:
    """Runs one shard's core."""

    def __init__(
        self,
        core: ShardCore,
        directory: Directory,
        pool: BufferPool,
        store: SnapshotStore,
        journal: JournalStore,
        group: asyncio.TaskGroup,
    ) -> None:
        self.core = core
        self.pool = pool
        self.scheduler: Scheduler
        """Set before the first event."""
        self.on_superseded: list[Callable[[Sequence[PartitionState]], None]] = []
        """Called with values that pulls no longer return, before any reply announces their successors."""
        self.on_values_kept: Callable[[str], None] = lambda _: None
        """Called with a model's name when the result of a commit or flush of a partition was not finite."""
        self.lost: dict[PartitionKey, Token] = {}
        """Owned partitions with uploaded or file values that were never stored, with their owner tokens."""
        self._loader = Loader(store, journal, pool, self.submit, core.owns)
        self._group = group
        self._loop = asyncio.get_running_loop()
        self.loads = Loads(self._loop.time)
        self.threads = processors()
        """Number of compute threads."""
        self._executor = ThreadPoolExecutor(self.threads, "compute")
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: deque[Event] = deque()
        self._draining = False
        self._closed = False
        self._open: dict[Request, tuple[asyncio.Future[Outcome], Asked]] = {}
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self.writer = JournalWriter(journal, self.feed, core.owns)
        self.storage = Storage(core, directory, store, self.writer, self.feed, self._spawn)
        self._spawn(self.writer.run())

    @property
    def degraded(self) -> str:
        """Why something cannot be stored now, or a partition not be loaded; empty if nothing is wrong."""
        return self.storage.degraded or self.core.load_trouble()

    # -- requests and events

    async def push(self, event: PushReceived | SetReceived) -> PushDone:
        """Submit a push or an assignment; returns the outcome. Raises PsError."""
        outcome = await self._ask(event)
        assert isinstance(outcome, PushDone)
        if isinstance(event, PushReceived):
            self.loads.pushed(event, outcome)
        return outcome

    async def pull(self, event: PullReceived, ranges: Sequence[RangeArray | None] | None = None) -> PullDone:
        """Submit a pull and return its outcome. Raises PsError.

        `ranges` are those that the caller takes of each partition, for the load statistics (None: all of it).
        """
        outcome: Outcome = self.core.pulls.at_once(event) or await self._ask(event)
        assert isinstance(outcome, PullDone)
        self.loads.pulled(outcome, ranges)
        return outcome

    async def capture(self, event: CaptureReceived) -> Capture:
        """Submit a request for a partition's state and return it. Raises PsError."""
        outcome = await self._ask(event)
        assert isinstance(outcome, Capture)
        return outcome

    async def _ask(self, event: Asked) -> Outcome:
        """Hand the event to the core under a number of its own; return the outcome."""
        self._check_open()
        number = next(self._numbers)
        future: asyncio.Future[Outcome] = self._loop.create_future()
        self._open[number] = future, event
        self.feed(replace(event, request=number))
        try:
            outcome: Outcome = future.result() if future.done() else await future
        except asyncio.CancelledError:
            self.feed(RequestGone(number))
            raise
        finally:
            self._open.pop(number, None)
        if isinstance(outcome, PsError):
            raise outcome
        return outcome

    def feed(self, event: Event) -> None:
        """Hand one event to the core and perform its effects before returning; nothing happens any more once closed."""
        if self._closed:
            return
        self._events.append(event)
        if self._draining:
            return  # called from an effect: the outer call's loop takes it next, so effects stay in order
        self._draining = True
        try:
            while self._events:
                effects = self.core.handle(self._events.popleft(), self._loop.time())
                if self.core.superseded:
                    for note in self.on_superseded:
                        note(self.core.superseded)
                    self.core.superseded.clear()  # drops the references, which frees their memory
                for effect in effects:
                    if isinstance(effect, Apply):
                        self._apply(effect)  # first, so that the threads compute during the rest
                for effect in effects:
                    self._perform(effect)
        except Exception as error:
            # Some effects may be half done, and their partitions would wait forever. `_draining` stays set, so nothing
            # more is done or answered here; a new process starts from the snapshots.
            self._spawn(_end(error))
            return
        self._draining = False
        self._set_timer()

    def _set_timer(self) -> None:
        at = self.core.deadline()
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = None if at is None else self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_at = None
        self.feed(Tick())

    # -- effects

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Reply(request, outcome):
                future, _ = self._open.get(request, (None, None))
                if future is not None and not future.done():
                    if isinstance(outcome, PushDone):
                        crash_point("shard.before_reply")
                    future.set_result(outcome)
            case LoadPartition():
                self._spawn(self._load(effect))
            case StoreSnapshot():
                self._spawn(self.storage.store_snapshot(effect))
            case Journal(entries, fsync):
                self.writer.add(entries, fsync)
            case AskWorker(request):
                self._spawn(self._ask_worker(effect))
            case Report():
                self.scheduler.report()
            case Resync():
                self.scheduler.resync()
            case ValuesKept(key):
                self.on_values_kept(key.model.name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Start `work` in a compute thread; returns a future.  Raises Unavailable once closed."""
        self._check_open()
        return self._loop.run_in_executor(self._executor, work)

    def _apply(self, due: Apply) -> None:
        """Compute a job, in threads if it is big enough."""
        if sum(map(task_elements, due.tasks)) <= INLINE_ELEMENTS_MAX:
            self._apply_here(due)
            return
        chunks = shares(due.tasks, self.threads)
        outputs = take_outputs(chunks, self.pool)
        run = partial(compute, pool=self.pool, nontemporal=exceeds_cache(due.tasks))
        work = [self.submit(partial(run, chunk, outputs=out)) for chunk, out in zip(chunks, outputs, strict=True)]
        self._spawn(self._applied(due.job, work))

    def _apply_here(self, due: Apply) -> None:
        crash_point("shard.before_apply")
        self._events.append(Applied(due.job, compute(due.tasks, self.pool)))
        crash_point("shard.after_apply")

    async def _applied(self, job: int, work: Sequence[asyncio.Future[tuple[TaskResult, ...]]]) -> None:
        self.feed(Applied(job, tuple(chain.from_iterable(await asyncio.gather(*work)))))

    async def _load(self, effect: LoadPartition) -> None:
        key, token = effect.key, effect.token
        try:
            crash_point("shard.before_load")
            loaded = await self._loader.load(effect)
            crash_point("shard.after_load")
        except PsError as error:
            _, p = self.core.find(key, token)
            if p is not None and str(p.load_error or "") != str(error):  # else the last attempt has said so
                log.warning("partition %s cannot be loaded: %s", key, error)
            if error.members.get("never_stored"):
                self.lost[key] = token
                self.scheduler.report()
            self.feed(LoadFailed(key, token, error))
        except (RedisError, OSError) as error:
            self.storage.redis_failed(error)
            self.feed(LoadFailed(key, token, problem("storage_unavailable", trouble(error))))
        else:
            self.lost.pop(key, None)
            self.feed(PartitionLoaded(key, token, loaded))

    async def _ask_worker(self, effect: AskWorker) -> None:
        self.feed(await self.scheduler.ask_worker(effect))

    def close(self) -> None:
        """Cancel all tasks and take no more events; requests that still wait are answered 503, as are later ones.

        A push or an assignment may have been done, and only wait to be durable: it is in doubt.
        """
        self._closed = True
        for task in tuple(self._tasks):
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for future, event in self._open.values():
            if not future.done():
                future.set_result(_cut_short(event) if isinstance(event, PushReceived | SetReceived) else _stopping())
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _check_open(self) -> None:
        if self._closed:
            raise _stopping()


def _stopping() -> PsError:
    return problem("unavailable", "this shard is stopping")


def _cut_short(event: PushReceived | SetReceived) -> PsError:
    push = isinstance(event, PushReceived)
    hint = "send it again under its id; without one it may count twice" if push else "send it again"
    return problem("in_doubt", "this shard is stopping, and may have done this", hint=hint)


async def _end(error: Exception) -> None:
    """Raise the error in a task, which ends the task group and with it the process."""
    raise error
