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
from typing import Final, TypeAlias

from paramserver.net.calls import Outcome, Request

Perform: TypeAlias = Callable[[Request, "Interruptible"], Outcome]
Work: TypeAlias = Callable[[], object]


class CallerInterrupted(Exception):
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
        self._work = SimpleQueue[Work | None]()
        weakref.finalize(self, self._work.put, None).atexit = False

    def submit(self, work: Work) -> None:
        """Have a thread do this work; if no thread is available, it is not done."""
        try:
            self._idle.get_nowait()
        except Empty:
            with self._lock:
                if self._threads == self._threads_max:
                    return
                args = (self._work, self._idle)
                try:
                    threading.Thread(target=_help, args=args, name="paramserver", daemon=True).start()
                except RuntimeError:  # the system cannot start more threads, or the interpreter is shutting down
                    return
                self._threads += 1
        self._work.put(work)

    def close(self) -> None:
        """End the threads once they have done the work that was submitted."""
        self._work.put(None)


def _help(work_queue: "SimpleQueue[Work | None]", idle: "SimpleQueue[None]") -> None:
    while (work := work_queue.get()) is not None:
        work()
        del work  # it references the caller's memory
        idle.put(None)
    work_queue.put(None)  # for the next thread


class Interruptible:
    """Tracks which threads use a caller's memory, so that an interrupted caller can stop them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = SimpleQueue[None]()
        """Other threads put an element here to wake the caller when something has changed."""
        self._revoked = False
        self._users: dict[int, Callable[[], object]] = {}
        """id of each thread that is using the caller's memory -> function that makes it stop."""

    @contextmanager
    def using_memory(self, cut: Callable[[], object]) -> Iterator[None]:
        """Mark this thread as using the caller's memory; `cut`, called by another thread, makes it stop soon.

        Raises CallerInterrupted if the caller has been interrupted.
        """
        me = threading.get_ident()
        with self._lock:
            if self._revoked:
                raise CallerInterrupted
            self._users[me] = cut
        try:
            yield
        finally:
            with self._lock:
                self._users.pop(me, None)
            self._changed.put(None)

    def revoke(self) -> None:
        """Stop all threads that use the caller's memory; when this returns, none does any more."""
        with self._lock:
            self._revoked = True
            self._users.pop(threading.get_ident(), None)  # this thread may have been interrupted before it could
            for cut in self._users.values():
                cut()
        while self._users:
            self._changed.get()


class ConcurrentRequests(Interruptible):
    """Concurrent requests, each performed by the caller or a helper thread, whichever takes it first.

    The caller may itself be working for another thread, which can be interrupted, too (`within`).
    """

    def __init__(self, perform: Perform, requests: Sequence[Request], within: Interruptible | None) -> None:
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
                helpers.submit(self._one_as_helper)
            while self._one(self._waiting.popleft):
                pass  # the caller performs the first request, and those that no helper has taken
            while len(self._outcomes) < len(self._requests) and self._error is None:
                self._changed.get()
            if self._error is not None:
                raise self._error
            return [self._outcomes[i] for i in range(len(self._requests))]
        except BaseException:
            self._waiting.clear()
            self.revoke()
            raise

    @contextmanager
    def using_memory(self, cut: Callable[[], object]) -> Iterator[None]:
        """See `Interruptible.using_memory`; an interrupt of the thread behind `within` counts, too."""
        with using_memory(self._within, cut), super().using_memory(cut):
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
        except CallerInterrupted:
            self._error = CallerInterrupted()  # a new one, because the traceback of the first references the request
            self._changed.put(None)
        except BaseException as e:  # `outcomes` raises it in the caller's thread
            self._error = e
            self._changed.put(None)


def using_memory(
    within: Interruptible | None, cut: Callable[[], object] = lambda: None
) -> AbstractContextManager[None]:
    """See `Interruptible.using_memory`; a no-op without `within`, when the caller performs its only request itself."""
    return _ALONE if within is None else within.using_memory(cut)


_ALONE: Final = nullcontext[None]()
