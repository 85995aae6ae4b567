"""A push whose gradients are added one by one: complete partitions are sent while the next gradients are computed.

Backpropagation yields the last layer's gradient first, and the next forward pass needs the first layer's values first.
So of the complete partitions, those with the lowest numbers are sent first (after Jayarajan et al., "Priority-based
parameter propagation for distributed DNN training", 2019).  All requests carry the same push id: each partition gets
its part exactly once, however many requests there are.
"""

import asyncio
import heapq
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, Protocol

import numpy as np

from paramserver.client.encoding import Encoding
from paramserver.client.frames import PushTerms
from paramserver.client.pushed import DROPPED, Pushed, summed
from paramserver.client.session import Session
from paramserver.client.values import array_of
from paramserver.client.worker_base import of_another_process
from paramserver.core.layout import Layout
from paramserver.errors import InDoubt, PsError, Unavailable, combined, problem
from paramserver.net.calls import Call, Deadline
from paramserver.net.concurrent_requests import CallerInterrupted, Interruptible
from paramserver.net.retry import NOT_AGAIN

BUCKET_BYTES: Final = 4 << 20
"""Approximate size of one send; it bounds how long a more urgent partition that becomes complete meanwhile waits."""

ANOTHER: Final = "start a new push: with worker.stream() as push: ..."


class Run(Protocol):
    """Drives a call; see `BlockingTransport.run`."""

    def __call__(self, call: Call[Any], within: Interruptible | None = None, /) -> Any: ...


class Pieces:
    """The gradients put so far, and the complete partitions in the order in which they are to be sent."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._missing = [{layout.spec.params[s.param].name for s in segments} for segments in layout.segments]
        self._partitions: dict[str, list[int]] = {}
        for index, names in enumerate(self._missing):
            for name in names:
                self._partitions.setdefault(name, []).append(index)
        self._whole: list[int] = []
        self.grads: dict[str, Any] = {}
        """Gradients put so far, by parameter name."""

    def put(self, name: str, grad: Any) -> None:
        """Add a parameter's gradient.  Raises NotFoundError, or RequestError if it was put before."""
        if name not in self._layout.by_name:
            raise combined(self._layout.spec.unknown([str(name)]))
        if name in self.grads:
            raise problem("invalid_field", f"'{name}' has been put into this push already", where=name)
        self.grads[name] = grad
        for index in self._partitions[name]:
            self._missing[index].discard(name)
            if not self._missing[index]:
                heapq.heappush(self._whole, index)

    def take(self) -> frozenset[int]:
        """Take the complete partitions to send next, about `BUCKET_BYTES` in all; empty if there are none."""
        taken: set[int] = set()
        size = 0
        while self._whole and (not taken or size < BUCKET_BYTES):
            index = heapq.heappop(self._whole)
            taken.add(index)
            size += 4 * self._layout.partition_size(index)
        return frozenset(taken)

    def rest(self) -> frozenset[int]:
        """The incomplete partitions for which at least one gradient was put."""
        return frozenset(
            i for i, names in enumerate(self._missing) if names and any(s in self.grads for s in self._names(i))
        )

    def clear(self) -> None:
        """Forget the gradients; there is nothing to send then."""
        self.grads.clear()
        self._whole.clear()

    def names(self, partitions: frozenset[int]) -> list[str]:
        """Names of the parameters in these partitions whose gradients were put."""
        return sorted({n for i in partitions for n in self._names(i) if n in self.grads})

    def _names(self, index: int) -> list[str]:
        return [self._layout.spec.params[s.param].name for s in self._layout.segments[index]]


class Stream:
    """The calls of one streamed push.  Safe between the thread that puts and the one that sends."""

    def __init__(self, session: Session, encoding: Encoding | None = None, **terms: Any) -> None:
        """`terms` are those of `Session.begin`."""
        self._session, self._encoding, self._given_terms = session, encoding, terms
        self._lock = threading.Lock()
        self._pieces: Pieces | None = None
        self._terms: PushTerms | None = None
        self._done: list[Pushed] = []
        self._taken: frozenset[int] = frozenset()
        """Partitions that shards have accepted."""
        self._opened = self._in_sync = self._sent = self.over = False

    def open(self, deadline: Deadline) -> Call[None]:
        """Begin the push.

        Raises ConflictError if it was begun before, and RequestError if the optimizer clips by the norm of the whole
        gradient.
        """
        if self._opened:
            raise problem("conflict", "a stream is a single push, and this one has been started already", hint=ANOTHER)
        self._opened, self._in_sync = True, self._session.mode == "sync"
        layout, self._terms = yield from self._session.begin(deadline, streamed=True, **self._given_terms)
        self._pieces = Pieces(layout)

    def put(self, name: str, grad: Any) -> None:
        """See `Pieces.put`."""
        grad = np.asarray(array_of(f"'{name}'", grad, name), order="C")  # else each send would copy it whole
        with self._lock:  # which the last sends take, too, once the block is over
            if self._pieces is None or self.over:
                when = "has ended" if self.over else "has not begun"
                raise problem("conflict", f"the `with` block of this stream {when}", hint=ANOTHER)
            self._pieces.put(name, grad)

    def send(self, deadline: Deadline, *, last: bool = False) -> Call[bool]:
        """Send the most urgent complete partitions, or with `last` the incomplete ones; False if there are none."""
        assert self._pieces is not None
        with self._lock:
            partitions = self._pieces.rest() if last else self._pieces.take()
            grads = {name: self._pieces.grads[name] for name in self._pieces.names(partitions)}
        if not partitions:
            return False
        if self._terms is not None:
            self._sent = True
            try:
                done = yield from self._session.deliver(
                    self._terms, grads, deadline, encoding=self._encoding, partitions=partitions
                )
            except PsError as error:
                counts = isinstance(error, Unavailable) or any(piece.state != "staged" for piece in self._done)
                if self._done and isinstance(error, InDoubt):
                    taken = self._taken.union(error.members.get("partitions", ()))
                    raise error.plus(partitions=sorted(taken)) from error
                if self._done and counts:
                    what = f"a part of the push was accepted, this one was not: {error.detail}"
                    more: dict[str, Any] = {} if isinstance(error, Unavailable) else {"refused": error.code}
                    raise self._in_doubt(what, **more) from error
                raise  # what is only staged is torn as the block ends, and counts nowhere
            if done.state == "dropped":
                staged = all(piece.state == "staged" for piece in self._done)  # then they are dropped as well
                # But what began outside sync may have been carried into the timeline in which the model is synchronous.
                self.give_up(torn=not (staged and self._in_sync))  # the rest is not sent either
                if not staged:
                    what = "a part of the push was applied, the rest dropped"
                    raise self._in_doubt(what)
            self._done.append(done)
            self._taken |= partitions
        return True

    def _in_doubt(self, what: str, **members: Any) -> PsError:
        """Return the error for a push of which a part was accepted."""
        taken = sorted(self._taken)
        return problem("in_doubt", what, hint=NOT_AGAIN, retryable=False, partitions=taken, **members)

    def close(self) -> Pushed:
        """End the push and return its result.  Raises RequestError (`empty_push`) if nothing was put."""
        assert self._pieces is not None
        terms, self._terms = self._terms, None
        if terms is None:
            return DROPPED
        self._session.numbers.settle(terms.push_id)
        if not self._done:
            raise problem("empty_push", "the push holds no gradients", hint="put() one before the block ends")
        return summed(self._done)

    def give_up(self, *, torn: bool = True) -> None:
        """Send nothing more, and keep no gradient: the block has ended or failed, or the push was dropped.

        `torn`: what was sent of a push that has not ended may count.
        """
        if self._terms is not None:
            if self._sent and torn:
                self._session.mark_torn(self._terms)
            self._session.numbers.settle(self._terms.push_id)
            self._terms = None
        with self._lock:
            if self._pieces is not None:
                self._pieces.clear()

    def abandon(self) -> None:
        """Do what `give_up` does, for finalizers: it takes no lock, as the number is free once nothing refers to it."""
        terms, self._terms, self.over = self._terms, None, True
        if terms is not None and self._sent:
            self._session.mark_torn(terms)


class PushStream:
    """`with worker.stream() as push: push.put(name, grad)`; afterwards `push.result` is the result.

    A gradient must not be changed before the block ends.  Parameters without a gradient are not changed.  If the block
    raises, or is interrupted at its end, what has been sent by then stays sent, as if the worker had died in the middle
    of the push, and no gradient is read any more.
    """

    def __init__(self, run: Run, deadline: Callable[[], Deadline], session: Session, **options: Any) -> None:
        self._run, self._deadline = run, deadline
        self._stream = Stream(session, **options)
        self._more = SimpleQueue[None]()  # not a semaphore: see `concurrent_requests`
        self._reading = Interruptible()
        self._error: BaseException | None = None
        # An interrupt can come before the block is entered, or its end begun: then nothing else refers to this object.
        args = (weakref.ref(self), self._more)
        self._thread = threading.Thread(target=_send_all, args=args, name="push stream", daemon=True)
        weakref.finalize(self, _abandon, self._stream, self._more).atexit = False
        self._pid = os.getpid()
        self.result = DROPPED
        """The result of the push, set when the block has ended."""

    def __enter__(self) -> "PushStream":
        self._run(self._stream.open(self._deadline()))
        try:
            self._thread.start()
        except BaseException:  # __exit__ will not be called, and the thread may have started
            self._end()
            raise
        return self

    def put(self, name: str, grad: Any) -> None:
        """Add the whole gradient of one parameter; may be called from any thread.

        Raises NotFoundError (`unknown_parameter`), RequestError if it was put before, ConflictError in a forked child.
        Errors of the push itself are raised when the block ends.
        """
        if self._pid != os.getpid():
            raise of_another_process()
        self._stream.put(name, grad)
        self._more.put(None)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pid != os.getpid():
            return  # a forked child has no thread that sends, and must not cut its parent's off
        try:
            if kind is None:
                self._stream.over = True
                self._more.put(None)
                self._thread.join()
                if self._error is not None:
                    raise self._error
                self._run(self._stream.send(self._deadline(), last=True))
                self.result = self._stream.close()
        finally:
            self._end()

    def _end(self) -> None:
        """Stop sending and let the thread end; when this returns, it reads no gradient any more."""
        self._stream.over = True
        self._more.put(None)
        self._reading.revoke()
        self._stream.give_up()

    def _send(self) -> bool:
        """Send what is complete; return whether more may come."""
        over = self._stream.over  # if set, nothing is put after this, and the sends below are the last
        try:
            while self._run(self._stream.send(self._deadline()), self._reading):
                pass
        except CallerInterrupted:
            return False
        except BaseException as e:  # __exit__ raises it in the block's thread
            self._error = e
            return False
        return not over


def _send_all(found: "weakref.ref[PushStream]", more: SimpleQueue[None]) -> None:
    """Send what is put into a stream, until it ends or nobody has it any more; the work of its own thread."""
    going_on = True
    while going_on:
        more.get()
        stream = found()
        going_on = stream is not None and stream._send()
        del stream


def _abandon(stream: Stream, more: SimpleQueue[None]) -> None:
    """Give up a stream that nobody has any more, and let its thread end."""
    stream.abandon()
    more.put(None)


class AsyncPushStream:
    """`PushStream` on asyncio: `async with worker.stream() as push: push.put(name, grad)`."""

    def __init__(
        self, run: Callable[[Call[Any]], Any], deadline: Callable[[], Deadline], session: Session, **options: Any
    ) -> None:
        self._run, self._deadline = run, deadline
        self._stream = Stream(session, **options)
        self._more = asyncio.Event()
        self._failed = False
        self._task: asyncio.Task[None] | None = None
        self._pid = os.getpid()
        self.result = DROPPED
        """The result of the push, set when the block has ended."""

    async def __aenter__(self) -> "AsyncPushStream":
        await self._run(self._stream.open(self._deadline()))
        self._task = asyncio.create_task(self._send(), name="push stream")
        return self

    def put(self, name: str, grad: Any) -> None:
        """See `PushStream.put`; complete partitions are sent whenever the event loop runs."""
        if self._pid != os.getpid():
            raise of_another_process()
        self._stream.put(name, grad)
        assert self._task is not None
        self._task.get_loop().call_soon_threadsafe(self._more.set)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pid != os.getpid():
            return  # the event loop and its tasks are the parent's
        assert self._task is not None
        self._failed, self._stream.over = kind is not None, True
        self._more.set()
        try:
            if kind is not None:
                self._task.cancel()  # a cancelled block must not wait for a shard
                await asyncio.gather(self._task, return_exceptions=True)  # the block's own error is the one to raise
            else:
                await self._task
                await self._run(self._stream.send(self._deadline(), last=True))
                self.result = self._stream.close()
        finally:
            self._stream.give_up()

    async def _send(self) -> None:
        over = False
        while not over:
            await self._more.wait()
            self._more.clear()
            over = self._stream.over
            while not self._failed and await self._run(self._stream.send(self._deadline())):
                pass
