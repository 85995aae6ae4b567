"""A worker on asyncio: a session, and a task that sends its heartbeats."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

from paramserver.client.arrays import Params
from paramserver.client.gradient_arrays import GradientArrays
from paramserver.client.gradients import Grads
from paramserver.client.pushed import Pushed
from paramserver.client.reports import check_measure, measured
from paramserver.client.rows import Rows
from paramserver.client.streaming import AsyncPushStream
from paramserver.client.tasks import Task
from paramserver.client.worker_base import LEAVE_S, WorkerBase
from paramserver.codecs.codec import Codec
from paramserver.core.scheduler.tasks import EVALUATE
from paramserver.core.selection import Names, Ranges
from paramserver.errors import PsError, problem
from paramserver.net.calls import Call, Deadline
from paramserver.types import DTypeLike

if TYPE_CHECKING:
    from paramserver.client.aio import AsyncClient

T = TypeVar("T")
log = logging.getLogger("paramserver")


class AsyncWorker(WorkerBase):
    """One worker of one model: joins when its `async with` block begins, leaves when it ends; see `Worker`."""

    _client: "AsyncClient"

    def __init__(
        self,
        client: "AsyncClient",
        model: str,
        name: str | None,
        rank: int | None,
        timeout: float | None,
        codec: Codec | None,
    ) -> None:
        super().__init__(client, model, name, rank, timeout, codec)
        self._heartbeat: asyncio.Task[None] | None = None
        """Owned by this object: started by `__aenter__`, cancelled and awaited by `__aexit__`."""

    async def __aenter__(self) -> "AsyncWorker":
        if self._pid != -1:
            raise problem("conflict", "a worker can be opened only once", hint="model.worker() makes another")
        self._pid = os.getpid()
        joining = asyncio.ensure_future(self._client.run(self._session.join(self._deadline(None))))
        try:
            await asyncio.shield(joining)
        except asyncio.CancelledError:
            self._session.left = True
            await self._withdraw(joining)
            raise
        self._heartbeat = asyncio.create_task(self._keep_alive(), name=f"heartbeat {self.name}")
        try:
            await self._run(self._session.while_paused())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._pid != os.getpid():
            return  # a forked child leaves its parent's worker alone
        if self._session.left:
            return
        self._session.left = True
        try:
            if self._heartbeat is not None:
                self._heartbeat.cancel()
                await asyncio.wait([self._heartbeat])
        finally:  # also if this task is cancelled
            await self._client.run(self._session.leave(Deadline.after(LEAVE_S)))

    async def _withdraw(self, joining: "asyncio.Future[None]") -> None:
        """Leave once the join is granted: a member without heartbeats would hold the others up for a whole lease."""
        try:
            await asyncio.wait_for(joining, LEAVE_S)
            await self._client.run(self._session.leave(Deadline.after(LEAVE_S)))
        except (PsError, TimeoutError) as e:
            log.info("worker.withdraw_unheard worker=%s error=%r", self.name, e)

    @property
    def client(self) -> "AsyncClient":
        """See `Worker.client`."""
        return self._client

    async def pull(
        self,
        names: Names | None = None,
        *,
        ranges: Ranges | None = None,
        rows: Rows | None = None,
        out: Params | None = None,
        dtype: DTypeLike | None = None,
        min_version: int = 0,
        wait_s: float | None = None,
        copy: bool = True,
        timeout: float | None = None,
    ) -> Params:
        """See `Worker.pull`; without `wait_s` it waits for `min_version` up to its deadline, 60 s at most."""
        options: dict[str, Any] = {"names": names, "ranges": ranges, "rows": rows, "out": out, "dtype": dtype}
        options |= {"view": not copy, "min_version": min_version, "wait_s": wait_s}
        return await self._run(self._session.pull(self._deadline(timeout, wait_s), **options))

    async def gradients(self, *, timeout: float | None = None) -> GradientArrays:
        """See `Worker.gradients`."""
        return await self._run(self._session.cluster.gradients(self.model, self._deadline(timeout)))

    async def push(
        self,
        grads: Grads,
        *,
        base: Params | None = None,
        weight: float = 1.0,
        ranges: Ranges | None = None,
        rows: Rows | None = None,
        dtype: DTypeLike | None = None,
        codec: str | None = None,
        ack: str | None = None,
        timeout: float | None = None,
    ) -> Pushed:
        """See `Worker.push`; the arrays must not be changed before it returns."""
        terms = self._terms(codec, dtype, ranges, rows, base=base, weight=weight, ack=ack)
        return await self._run(self._session.push(grads, self._deadline(timeout), **terms))

    def stream(
        self,
        *,
        base: Params | None = None,
        weight: float = 1.0,
        dtype: DTypeLike | None = None,
        codec: str | None = None,
        ack: str | None = None,
        timeout: float | None = None,
    ) -> AsyncPushStream:
        """See `Worker.stream`."""
        terms = self._terms(codec, dtype, base=base, weight=weight, ack=ack)
        return AsyncPushStream(self._run, lambda: self._deadline(timeout), self._session, **terms)

    async def pushpull(
        self,
        grads: Grads,
        *,
        base: Params | None = None,
        out: Params | None = None,
        weight: float = 1.0,
        ranges: Ranges | None = None,
        rows: Rows | None = None,
        dtype: DTypeLike | None = None,
        codec: str | None = None,
        ack: str | None = None,
        timeout: float | None = None,
    ) -> Params:
        """See `Worker.pushpull`."""
        terms = self._terms(codec, dtype, ranges, rows, base=base, weight=weight, ack=ack)
        return await self._run(self._session.pushpull(grads, self._deadline(timeout), out=out, **terms))

    async def clock(self, *, timeout: float | None = None) -> int:
        """See `Worker.clock`."""
        return await self._run(self._iterations.advance(*self._deadlines(timeout)))

    async def step(
        self,
        grads: Grads,
        *,
        loss: SupportsFloat | None = None,
        base: Params | None = None,
        weight: float = 1.0,
        ranges: Ranges | None = None,
        rows: Rows | None = None,
        dtype: DTypeLike | None = None,
        codec: str | None = None,
        ack: str | None = None,
        timeout: float | None = None,
        **metrics: SupportsFloat | None,
    ) -> Pushed:
        """See `Worker.step`."""
        told = {"loss": loss, **self._metrics(metrics)}
        terms = self._terms(codec, dtype, ranges, rows, base=base, weight=weight, ack=ack)
        return await self._run(self._iterations.step(grads, told, *self._deadlines(timeout), **terms))

    async def exchange(
        self,
        grads: Grads,
        *,
        loss: SupportsFloat | None = None,
        base: Params | None = None,
        out: Params | None = None,
        copy: bool = True,
        weight: float = 1.0,
        dtype: DTypeLike | None = None,
        codec: str | None = None,
        ack: str | None = None,
        timeout: float | None = None,
        **metrics: SupportsFloat | None,
    ) -> Params:
        """See `Worker.exchange`."""
        told = {"loss": loss, **self._metrics(metrics)}
        terms = self._terms(codec, dtype, base=base, weight=weight, ack=ack)
        deadlines = self._deadlines(timeout)
        exchanging = self._iterations.exchange(grads, told, *deadlines, out=out, view=not copy, **terms)
        return await self._run(exchanging)

    async def report(self, *, timeout: float | None = None, **metrics: SupportsFloat | None) -> None:
        """See `Worker.report`."""
        await self._run(self._session.report(metrics, self._deadline(timeout)))

    async def tasks(self, dataset: str = "train") -> AsyncGenerator[Task, None]:
        """See `Worker.tasks`."""
        while (task := await self._run(self._tasks.lease(dataset))) is not None:
            try:
                yield task
                await self._run(self._tasks.done(task, self._deadline(None)))
            finally:
                self._session.holding.put_down(task)

    async def evaluate(
        self, measure: Callable[[Params], Mapping[str, SupportsFloat] | Awaitable[Mapping[str, SupportsFloat]]]
    ) -> dict[str, float] | None:
        """See `Worker.evaluate`; `measure` may be a coroutine function."""
        check_measure(measure)
        if not self._session.evaluation_waits:
            return None
        task = await self._run(self._tasks.lease(EVALUATE, wait=False))
        if task is None:
            return None
        try:
            found = measure(await self._run(self._session.pull(self._deadline(None), record=False)))
            metrics = measured(await found if isawaitable(found) else found)
            await self._run(self._tasks.done(task, self._deadline(None), metrics))
        finally:
            self._session.holding.put_down(task)
        return metrics

    async def _run(self, call: Call[T]) -> T:
        if (refusal := self._refusal("async with")) is not None:
            call.close()
            raise refusal
        return await self._client.run(call)

    async def _keep_alive(self) -> None:
        while not self._session.replaced:
            await asyncio.sleep(self._beat_pause_s())
            try:
                await self._client.run(self._beat())
            except Exception as e:  # whatever it is: without further heartbeats the lease would expire
                self._note_beat(e)
            else:
                self._note_beat()
