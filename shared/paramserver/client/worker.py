"""A worker of the blocking client: a session, and a thread that sends its heartbeats."""

import os
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

from paramserver.client.arrays import Params
from paramserver.client.gradient_arrays import GradientArrays
from paramserver.client.gradients import Grads
from paramserver.client.pushed import Pushed
from paramserver.client.reports import check_measure, measured
from paramserver.client.rows import Rows
from paramserver.client.streaming import PushStream
from paramserver.client.tasks import Task
from paramserver.client.worker_base import LEAVE_S, WorkerBase
from paramserver.codecs.codec import Codec
from paramserver.core.scheduler.tasks import EVALUATE
from paramserver.core.selection import Names, Ranges
from paramserver.errors import problem
from paramserver.net.calls import Call, Deadline
from paramserver.net.concurrent_requests import Interruptible
from paramserver.types import DTypeLike

if TYPE_CHECKING:
    from paramserver.client.client import Client

T = TypeVar("T")


class Worker(WorkerBase):
    """One worker of one model: joins when its `with` block begins, leaves when it ends.

    The block of one that joins a paused run begins once that goes on.

    Inside the block it renews its lease from a background thread, numbers its pushes and clocks, and follows rollbacks
    and requests of the scheduler (see `docs/sdk.md`).  It belongs to the process that opened it.  In sync its
    iterations follow one another: threads need workers of their own.
    """

    _client: "Client"

    def __init__(
        self,
        client: "Client",
        model: str,
        name: str | None,
        rank: int | None,
        timeout: float | None,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(client, model, name, rank, timeout, codec)
        self._stop = threading.Event()
        """Ends the pause of the heartbeat's thread."""
        self._thread: threading.Thread | None = None
        self._joining = Interruptible()

    def __enter__(self) -> "Worker":
        if self._pid != -1:
            raise problem("conflict", "a worker can be opened only once", hint="model.worker() makes another")
        self._pid = os.getpid()
        joined = Future[None]()
        self._thread = threading.Thread(
            target=self._take_part, args=(joined,), name=f"worker of {self.model}", daemon=True
        )
        try:
            self._thread.start()
            joined.result()
            self._run(self._session.while_paused())
        except BaseException:  # also Ctrl-C: a member without heartbeats would hold the others up for a whole lease
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pid != os.getpid():
            return  # a forked child must not end its parent's worker
        if self._session.left:
            return
        try:
            self._session.left = True
            self._stop.set()
            if self._thread is not None and self._thread.is_alive():
                self._thread.join(LEAVE_S)
        finally:  # also if Ctrl-C ends the wait: the others would wait for this worker for a whole lease
            self._joining.revoke()
            if self._session.joined:
                self._client.run(self._session.leave(Deadline.after(LEAVE_S)))

    @property
    def client(self) -> "Client":
        """The client that made it: `w.client.model(w.model)` is its model.  Whoever connected closes it."""
        return self._client

    def pull(
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
        """Pull the current values (see `Model.pull`); in sync they include the commit that released this clock.

        Without `wait_s` it waits for `min_version`, unlike `Model.pull`: up to its deadline, 60 s at most.
        """
        options: dict[str, Any] = {"names": names, "ranges": ranges, "rows": rows, "out": out, "dtype": dtype}
        options |= {"view": not copy, "min_version": min_version, "wait_s": wait_s}
        return self._run(self._session.pull(self._deadline(timeout, wait_s), **options))

    def push(
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
        """Push a gradient for the current clock (see `Model.push`); several pushes in one clock add up.

        `base` defaults to what this worker pulled last.  The result's `state` is `dropped` if the model went back to an
        earlier clock meanwhile, or the worker lost its lease.
        """
        terms = self._terms(codec, dtype, ranges, rows, base=base, weight=weight, ack=ack)
        return self._run(self._session.push(grads, self._deadline(timeout), **terms))

    def gradients(self, *, timeout: float | None = None) -> GradientArrays:
        """Return arrays to compute gradients in, which `step`, `exchange` and `push` need not copy.

        See `Model.gradients`.
        """
        return self._run(self._session.cluster.gradients(self.model, self._deadline(timeout)))

    def stream(
        self,
        *,
        base: Params | None = None,
        weight: float = 1.0,
        dtype: DTypeLike | None = None,
        codec: str | None = None,
        ack: str | None = None,
        timeout: float | None = None,
    ) -> PushStream:
        """Begin a push whose gradients are put one by one; complete partitions are sent while the next is computed.

            with worker.stream() as push:
                for name, gradient in backward():        # the last layer first
                    push.put(name, gradient)
            push.result.state

        It counts as a single push.  The model's optimizer must not have `clip_norm`.  See `PushStream`.
        """
        terms = self._terms(codec, dtype, base=base, weight=weight, ack=ack)
        return PushStream(self._run, lambda: self._deadline(timeout), self._session, **terms)

    def pushpull(
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
        """Push a gradient, then pull, in one round trip except in sync; the clock does not advance."""
        terms = self._terms(codec, dtype, ranges, rows, base=base, weight=weight, ack=ack)
        return self._run(self._session.pushpull(grads, self._deadline(timeout), out=out, **terms))

    def clock(self, *, timeout: float | None = None) -> int:
        """Report this iteration finished, wait until the next may begin, and return its number.

        In sync and ssp it waits for the other workers, for as long as it takes or for `timeout` seconds.  Raises
        Unavailable, naming the workers it waited for.
        """
        return self._run(self._iterations.advance(*self._deadlines(timeout)))

    def step(
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
        """Finish one iteration: push the gradient, report the metrics, and end the clock.

        Metrics travel with the heartbeat; with many steps per second, only some of the points are kept.
        """
        told = {"loss": loss, **self._metrics(metrics)}
        terms = self._terms(codec, dtype, ranges, rows, base=base, weight=weight, ack=ack)
        return self._run(self._iterations.step(grads, told, *self._deadlines(timeout), **terms))

    def exchange(
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
        """Finish one iteration like `step`, and return the values for the next one: in one round trip, in ssp in two.

            values = worker.pull()
            while training:
                values = worker.exchange(gradients(values), out=values)

        In sync these are the values after the commit of this clock.  `out` and `copy` are as in `Model.pull`.
        """
        told = {"loss": loss, **self._metrics(metrics)}
        terms = self._terms(codec, dtype, base=base, weight=weight, ack=ack)
        deadlines = self._deadlines(timeout)
        exchanging = self._iterations.exchange(grads, told, *deadlines, out=out, view=not copy, **terms)
        return self._run(exchanging)

    def report(self, *, timeout: float | None = None, **metrics: SupportsFloat | None) -> None:
        """Report metrics of the current clock now: `report(accuracy=0.97)`."""
        self._run(self._session.report(metrics, self._deadline(timeout)))

    def tasks(self, dataset: str = "train") -> Generator[Task, None, None]:
        """Iterate over ranges of a dataset, leased one at a time; each counts as done when the next one is requested.

        Ends when the dataset is finished or the worker is asked to finish.  Ranges that a worker leaves undone go to
        others, so a range may be worked on twice, but none is lost.  If the loop is left (`break`, an exception), its
        range is free again once this worker requests the next one.  A loop inside another one over the same dataset
        raises ConflictError (`conflict`) once it would wait for the range of the outer one.
        """
        while (task := self._run(self._tasks.lease(dataset))) is not None:
            try:
                yield task
                self._run(self._tasks.done(task, self._deadline(None)))
            finally:
                self._session.holding.put_down(task)

    def evaluate(self, measure: Callable[[Params], Mapping[str, SupportsFloat]]) -> dict[str, float] | None:
        """Perform the pending evaluation, if any: `measure` gets the current values and returns metrics.

        Cheap to call at every step: if none is pending, it sends no request and returns None.  If `measure` raises, the
        evaluation stays pending.
        """
        check_measure(measure)
        if not self._session.evaluation_waits:
            return None
        task = self._run(self._tasks.lease(EVALUATE, wait=False))
        if task is None:
            return None
        try:
            values = self._run(self._session.pull(self._deadline(None), record=False))
            metrics = measured(measure(values))
            self._run(self._tasks.done(task, self._deadline(None), metrics))
        finally:
            self._session.holding.put_down(task)
        return metrics

    def _run(self, call: Call[T], within: Interruptible | None = None) -> T:
        if (refusal := self._refusal("with")) is not None:
            call.close()
            raise refusal
        return self._client.transport.run(call, within)

    def _take_part(self, joined: Future[None]) -> None:
        """Join, tell the outcome, and send heartbeats until the worker leaves or is replaced; its thread does this."""
        if self._stop.is_set():
            return  # the caller was interrupted while it started this thread
        try:
            self._client.transport.run(self._session.join(self._deadline(None)), self._joining)
        except BaseException as e:
            joined.set_exception(e)
            return
        joined.set_result(None)
        while not self._session.replaced and not self._stop.wait(self._beat_pause_s()):
            try:
                self._client.run(self._beat())
            except Exception as e:  # whatever it is, the heartbeats must continue
                self._note_beat(e)
            else:
                self._note_beat()
