"""Concurrent requests of one blocking call, and the helper threads that perform them beside the calling thread.

An interrupted call (Ctrl-C) leaves nothing running: before the error reaches the caller, no thread reads its gradients
or writes into its `out` any more.  The interrupt may come at any point, so nothing here is a `threading.Condition` or
`Semaphore`: interrupted while being entered, these stay locked forever.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import Empty, SimpleQueue
from typing import TypeAlias

from paramserver.client.calls import Outcome, Request

Perform: TypeAlias = Callable[[Request, "Interruptible"], Outcome]
Work: TypeAlias = Callable[[], object]


class GivenUp(Exception):
    """Raised in helper threads when the caller has been interrupted: its memory must not be touched any more."""


class Helpers:
    """A thread pool that grows on demand; its threads end on `close`, or when this object is collected.

    `concurrent.futures` is not used, because its threads end with the main thread: others may go on training.
    """

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = SimpleQueue[None]()
        """One element per idle thread that no work has been assigned to yet."""
        self._asked = SimpleQueue[Work | None]()
        weakref.finalize(self, self._asked.put, None).atexit = False

    def ask(self, work: Work) -> None:
        """Have a thread do this work; if no thread is available, it is not done."""
        try:
            self._idle.get_nowait()
        except Empty:
            with self._lock:
                if self._threads == self._threads_max:
                    return
                args = (self._asked, self._idle)
                try:
                    threading.Thread(target=_help, args=args, name="paramserver", daemon=True).start()
                except RuntimeError:  # the system cannot start more threads, or the interpreter is shutting down
                    return
                self._threads += 1
        self._asked.put(work)

    def close(self) -> None:
        """End the threads once they have done the work that was submitted."""
        self._asked.put(None)


def _help(asked: "SimpleQueue[Work | None]", idle: "SimpleQueue[None]") -> None:
    while (work := asked.get()) is not None:
        work()
        del work  # it references the caller's memory
        idle.put(None)
    asked.put(None)  # for the next thread


class Interruptible:
    """Tracks which threads use a caller's memory, so that an interrupted caller can stop them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = SimpleQueue[None]()
        """Other threads put an element here to wake the caller when something has changed."""
        self._given_up = False
        self._touching: dict[int, Callable[[], object]] = {}
        """id of each thread that is using the caller's memory -> function that makes it stop."""

    @contextmanager
    def touching(self, cut: Callable[[], object]) -> Iterator[None]:
        """Mark this thread as using the caller's memory; `cut`, called by another thread, makes it stop soon.

        Raises GivenUp if the caller has been interrupted.
        """
        me = threading.get_ident()
        with self._lock:
            if self._given_up:
                raise GivenUp
            self._touching[me] = cut
        try:
            yield
        finally:
            with self._lock:
                self._touching.pop(me, None)
            self._changed.put(None)

    def give_up(self) -> None:
        """Stop all threads that use the caller's memory; when this returns, none does any more."""
        with self._lock:
            self._given_up = True
            self._touching.pop(threading.get_ident(), None)  # this thread may have been interrupted before it did so
            for cut in self._touching.values():
                cut()
        while self._touching:
            self._changed.get()


class Together(Interruptible):
    """Concurrent requests, each performed by the caller or a helper thread, whichever takes it first.

    The caller may itself be working for another thread, which can be interrupted, too (`within`).
    """

    def __init__(self, perform: Perform, requests: Sequence[Request], within: Interruptible | None = None) -> None:
        super().__init__()
        self._perform, self._requests, self._within = perform, requests, within
        self._waiting = deque(range(len(requests)))
        """Indices of the requests that no thread has begun."""
        self._outcomes: dict[int, Outcome] = {}
        self._error: BaseException | None = None

    def outcomes(self, helpers: Helpers) -> list[Outcome]:
        """Perform all requests and return the outcomes in order.  If it raises, no thread uses the caller's memory."""
        try:
            for _ in self._requests[1:]:
                helpers.ask(self._one_as_helper)
            while self._one(self._waiting.popleft):
                pass  # the caller performs the first request, and those that no helper has taken
            while len(self._outcomes) < len(self._requests) and self._error is None:
                self._changed.get()
            if self._error is not None:
                raise self._error
            return [self._outcomes[i] for i in range(len(self._requests))]
        except BaseException:
            self._waiting.clear()
            self.give_up()
            raise

    @contextmanager
    def touching(self, cut: Callable[[], object]) -> Iterator[None]:
        """See `Interruptible.touching`; also raises GivenUp if the thread behind `within` has been interrupted."""
        with touching(self._within, cut), super().touching(cut):
            yield

    def _one(self, which: Callable[[], int]) -> bool:
        """Perform one request that no thread has begun; return False if there is none."""
        try:
            index = which()
        except IndexError:
            return False
        self._outcomes[index] = self._perform(self._requests[index], self)
        self._changed.put(None)
        return True

    def _one_as_helper(self) -> None:
        try:
            self._one(self._waiting.pop)
        except GivenUp:
            self._error = GivenUp()  # a new one, because the traceback of the first references the request
            self._changed.put(None)
        except BaseException as e:  # `outcomes` raises it in the caller's thread
            self._error = e
            self._changed.put(None)


def touching(within: Interruptible | None, cut: Callable[[], object] = lambda: None) -> AbstractContextManager[None]:
    """See `Interruptible.touching`; a no-op without `within`, when the caller performs the only request by itself."""
    return nullcontext() if within is None else within.touching(cut)
