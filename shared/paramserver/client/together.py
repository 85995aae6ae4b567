"""Requests of one call that are under way at the same time, and the threads that help whoever waits for them.

A call that is interrupted (Ctrl-C) leaves nobody behind: before the error goes on to the caller, no thread reads its
gradients or writes into its `out` any more.  The interrupt itself may come anywhere, so nothing here is a condition or
a semaphore of `threading`: interrupted while they are entered, these stay locked for ever.
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
    """The caller has been interrupted: its memory is not to be touched any more."""


class Helpers:
    """Threads that do what others ask for, made when they are needed; they end with this object, or `close`.

    Not a pool of `concurrent.futures`, whose threads end with the main one: other threads may train on for long.
    """

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = SimpleQueue[None]()
        """Has an element for each thread that waits for work, and is promised none."""
        self._asked = SimpleQueue[Work | None]()
        weakref.finalize(self, self._asked.put, None).atexit = False

    def ask(self, work: Work) -> None:
        """Have a thread do this; where none can be had, nobody does."""
        try:
            self._idle.get_nowait()
        except Empty:
            with self._lock:
                if self._threads == self._threads_max:
                    return
                args = (self._asked, self._idle)
                try:
                    threading.Thread(target=_help, args=args, name="paramserver", daemon=True).start()
                except RuntimeError:  # the system has no more of them, or the interpreter is ending
                    return
                self._threads += 1
        self._asked.put(work)

    def close(self) -> None:
        """The threads end when they have done what was asked for."""
        self._asked.put(None)


def _help(asked: "SimpleQueue[Work | None]", idle: "SimpleQueue[None]") -> None:
    while (work := asked.get()) is not None:
        work()
        del work  # and with it the caller's memory
        idle.put(None)
    asked.put(None)  # for the next thread


class Interruptible:
    """What other threads do with a caller's memory, until it is over or the caller is interrupted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = SimpleQueue[None]()
        """What another thread does gives it an element, for the caller to look again."""
        self._given_up = False
        self._touching: dict[int, Callable[[], object]] = {}
        """Which threads are using the caller's memory, and how to keep each from going on."""

    @contextmanager
    def touching(self, cut: Callable[[], object]) -> Iterator[None]:
        """While this thread uses the caller's memory; `cut`, called by another one, ends that soon.

        Raises GivenUp where it may not.
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
        """The caller's memory is the caller's alone when this returns."""
        with self._lock:
            self._given_up = True
            self._touching.pop(threading.get_ident(), None)  # it may have been interrupted before it said so itself
            for cut in self._touching.values():
                cut()
        while self._touching:
            self._changed.get()


class Together(Interruptible):
    """Some requests, each performed by whoever is there first: the caller, or a helper.

    The caller itself may do that for another thread, which is interrupted (`within`).
    """

    def __init__(self, perform: Perform, requests: Sequence[Request], within: Interruptible | None = None) -> None:
        super().__init__()
        self._perform, self._requests, self._within = perform, requests, within
        self._waiting = deque(range(len(requests)))
        """Which ones nobody has begun."""
        self._outcomes: dict[int, Outcome] = {}
        self._error: BaseException | None = None

    def outcomes(self, helpers: Helpers) -> list[Outcome]:
        """All outcomes, in order.  Whatever it raises, the caller's memory is the caller's alone then."""
        try:
            for _ in self._requests[1:]:
                helpers.ask(self._one_as_helper)
            while self._one(self._waiting.popleft):
                pass  # the first one always, and all that no helper has come to
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
        """See `Interruptible.touching`; whoever this is done for may have been interrupted too."""
        with touching(self._within, cut), super().touching(cut):
            yield

    def _one(self, which: Callable[[], int]) -> bool:
        """Perform one that nobody has begun; False: there is none."""
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
            self._error = GivenUp()  # without what it knows of the request
            self._changed.put(None)
        except BaseException as e:  # raised in the caller's thread
            self._error = e
            self._changed.put(None)


def touching(within: Interruptible | None, cut: Callable[[], object] = lambda: None) -> AbstractContextManager[None]:
    """See `Interruptible.touching`; a request that is alone is performed by the caller, and ends with it."""
    return nullcontext() if within is None else within.touching(cut)
