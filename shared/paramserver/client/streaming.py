"""One push whose gradients come one after the other: what is whole goes out while the next are being computed.

Back-propagation has the last layer's gradient first, and the next forward pass wants the first layer's values first.
So of the partitions that are whole, those with the lowest numbers are sent first (after Jayarajan et al.,
"Priority-based parameter propagation for distributed DNN training", 2019).  All pieces carry one push id: a partition
gets its part once, in however many requests the parts travelled.
"""

import asyncio
import heapq
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, Final, Protocol

from paramserver.client.calls import Call, Deadline
from paramserver.client.frames import PushTerms
from paramserver.client.pushed import DROPPED, Pushed, summed
from paramserver.client.session import Session
from paramserver.client.together import GivenUp, Interruptible
from paramserver.core.layout import Layout
from paramserver.core.selection import unknown
from paramserver.errors import InDoubt, Unavailable, combined, problem

BUCKET_BYTES: Final = 4 << 20
"""About how much is sent at once: what is more urgent and comes meanwhile waits no longer than for this."""

ANOTHER: Final = "with worker.stream() as push: begins another"


class Run(Protocol):
    """Drives a call; see `BlockingTransport.run`."""

    def __call__(self, call: Call[Any], within: Interruptible | None = None, /) -> Any: ...


class Pieces:
    """Which partitions have all their gradients, in the order in which they are wanted."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._missing = [{layout.spec.params[s.param].name for s in segments} for segments in layout.segments]
        self._partitions: dict[str, list[int]] = {}
        for index, names in enumerate(self._missing):
            for name in names:
                self._partitions.setdefault(name, []).append(index)
        self._whole: list[int] = []
        self.grads: dict[str, Any] = {}
        """All that has come."""

    def put(self, name: str, grad: Any) -> None:
        """That parameter's gradient is here.  Raises NotFoundError, or RequestError if it was here before."""
        if name not in self._layout.by_name:
            raise combined(unknown(self._layout, [name]))
        if name in self.grads:
            raise problem("invalid_field", f"'{name}' has been put into this push already", where=name)
        self.grads[name] = grad
        for index in self._partitions[name]:
            self._missing[index].discard(name)
            if not self._missing[index]:
                heapq.heappush(self._whole, index)

    def take(self) -> frozenset[int]:
        """The next partitions to be sent, about `BUCKET_BYTES` of them; empty while none is whole."""
        taken: set[int] = set()
        size = 0
        while self._whole and (not taken or size < BUCKET_BYTES):
            index = heapq.heappop(self._whole)
            taken.add(index)
            size += 4 * self._layout.partition_size(index)
        return frozenset(taken)

    def rest(self) -> frozenset[int]:
        """The partitions of which only a part has come."""
        return frozenset(
            i for i, names in enumerate(self._missing) if names and any(s in self.grads for s in self._names(i))
        )

    def names(self, partitions: frozenset[int]) -> list[str]:
        """The parameters in these partitions whose gradients are here."""
        return sorted({n for i in partitions for n in self._names(i) if n in self.grads})

    def _names(self, index: int) -> list[str]:
        return [self._layout.spec.params[s.param].name for s in self._layout.segments[index]]


class Stream:
    """The calls of one such push; safe between the thread that puts and the one that sends."""

    def __init__(self, session: Session, options: Mapping[str, Any]) -> None:
        self._session, self._options = session, dict(options)
        self._lock = threading.Lock()
        self._pieces: Pieces | None = None
        self._terms: PushTerms | None = None
        self._done: list[Pushed] = []
        self._opened = self._sent = self.over = False

    def open(self, deadline: Deadline) -> Call[None]:
        """Begin the push.  Raises ConflictError where it was begun before, RequestError where its optimizer wants the
        norm of the whole gradient first."""
        if self._opened:
            raise problem("conflict", "a stream is one push, and this one was begun before", hint=ANOTHER)
        self._opened = True
        layout, self._terms = yield from self._session.begin(deadline, streamed=True, **self._terms_options())
        self._pieces = Pieces(layout)

    def put(self, name: str, grad: Any) -> None:
        """See `Pieces.put`."""
        if self._pieces is None or self.over:
            when = "is over, and this would not be sent" if self.over else "has not begun"
            raise problem("conflict", f"the block of this stream {when}", hint=ANOTHER)
        with self._lock:
            self._pieces.put(name, grad)

    def send(self, deadline: Deadline, *, last: bool = False) -> Call[bool]:
        """Send what is most urgent, or with `last` the partitions that did not become whole.  False: nothing is."""
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
                    self._terms, grads, deadline, partitions=partitions, **self._values_options()
                )
            except Unavailable as error:
                if self._done and not isinstance(error, InDoubt):
                    what = f"a part of the push was accepted, this one was not: {error.detail}"
                    raise problem("in_doubt", what, hint=error.hint) from error
                raise
            self._done.append(done)
            if done.state == "dropped":
                self.give_up()  # nor is anything that comes after
        return True

    def close(self) -> Pushed:
        """What became of all of it; raises RequestError (`empty_push`) where nothing was put."""
        assert self._pieces is not None
        terms, self._terms = self._terms, None
        if terms is None:
            return DROPPED
        self._session.numbers.settle(terms.push_id)
        if not self._done:
            raise problem("empty_push", "the push holds no gradients", hint="put() one before the block ends")
        return summed(self._done)

    def give_up(self) -> None:
        """No more is sent: the block has failed."""
        if self._terms is not None:
            if self._sent:
                self._session.tear(self._terms)
            self._session.numbers.settle(self._terms.push_id)
            self._terms = None

    def _terms_options(self) -> dict[str, Any]:
        return {k: v for k, v in self._options.items() if k in ("base", "weight", "ack")}

    def _values_options(self) -> dict[str, Any]:
        return {k: v for k, v in self._options.items() if k in ("dtype", "codec")}


class PushStream:
    """`with worker.stream() as push: push.put(name, grad)`; afterwards `push.result` says what became of it.

    A gradient must not be changed before the block ends.  What was not put is not touched.  If the block raises, what
    has been sent by then stays sent, as with a worker that dies in the middle of a push, and no gradient is read any
    more, as with Ctrl-C at its end.
    """

    def __init__(self, run: Run, deadline: Callable[[], Deadline], session: Session, **options: Any) -> None:
        self._run, self._deadline = run, deadline
        self._stream = Stream(session, options)
        self._more = SimpleQueue[None]()  # no semaphore: see `together`
        self._reading = Interruptible()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._send, name="push stream", daemon=True)
        self.result = DROPPED
        """What became of the push; known when the block has ended."""

    def __enter__(self) -> "PushStream":
        self._run(self._stream.open(self._deadline()))
        try:
            self._thread.start()
        except BaseException:  # no block follows that would do so; the thread may be there
            self._end()
            raise
        return self

    def put(self, name: str, grad: Any) -> None:
        """One parameter's gradient, whole; may be called from any thread.

        Raises NotFoundError (`unknown_parameter`), or RequestError for one that was put before.  What a push refuses is
        raised when the block ends.
        """
        self._stream.put(name, grad)
        self._more.put(None)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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
        """Nothing is sent any more, and the thread ends: when this returns it reads no gradient."""
        self._stream.over = True
        self._more.put(None)
        self._reading.give_up()
        self._stream.give_up()

    def _send(self) -> None:
        over = False
        try:
            while not over:
                self._more.get()
                over = self._stream.over  # then nothing is put after what is sent now
                while self._run(self._stream.send(self._deadline()), self._reading):
                    pass
        except GivenUp:
            pass
        except BaseException as e:  # raised in the thread that the block belongs to
            self._error = e


class AsyncPushStream:
    """The same on asyncio: `async with worker.stream() as push: push.put(name, grad)`."""

    def __init__(
        self, run: Callable[[Call[Any]], Any], deadline: Callable[[], Deadline], session: Session, **options: Any
    ) -> None:
        self._run, self._deadline = run, deadline
        self._stream = Stream(session, options)
        self._more = asyncio.Event()
        self._failed = False
        self._task: asyncio.Task[None] | None = None
        self.result = DROPPED
        """What became of the push; known when the block has ended."""

    async def __aenter__(self) -> "AsyncPushStream":
        await self._run(self._stream.open(self._deadline()))
        self._task = asyncio.create_task(self._send(), name="push stream")
        return self

    def put(self, name: str, grad: Any) -> None:
        """See `PushStream.put`; what is whole is sent while the event loop gets its turn."""
        self._stream.put(name, grad)
        self._more.set()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._task is not None
        self._failed, self._stream.over = kind is not None, True
        self._more.set()
        try:
            if kind is not None:
                self._task.cancel()  # whoever is cancelled does not wait for a shard
                await asyncio.gather(self._task, return_exceptions=True)  # the block's own error counts
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
