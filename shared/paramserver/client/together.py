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
from typing import Any, TypeAlias

from paramserver.client.calls import Outcome, Request

Perform: TypeAlias = Callable[[Request, "Together"], Outcome]
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


class Together:
    """Some requests, each performed by whoever is there first: the caller, or a helper."""

    def __init__(self, perform: Perform, requests: Sequence[Request]) -> None:
        self._perform, self._requests = perform, requests
        self._waiting = deque(range(len(requests)))
        """Which ones nobody has begun."""
        self._lock = threading.Lock()
        self._changed = SimpleQueue[None]()
        """What a helper does gives it an element, for the caller to look again."""
        self._outcomes: dict[int, Outcome] = {}
        self._error: BaseException | None = None
        self._given_up = False
        self._touching: dict[int, Callable[[], None]] = {}
        """Which threads are using the caller's memory, and how to keep each from going on."""

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
            self._give_up()
            raise

    @contextmanager
    def touching(self, cut: Callable[[], None]) -> Iterator[None]:
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
            pass
        except BaseException as e:  # raised in the caller's thread
            self._error = e
            self._changed.put(None)

    def _give_up(self) -> None:
        self._waiting.clear()
        with self._lock:
            self._given_up = True
            self._touching.pop(threading.get_ident(), None)  # it may have been interrupted before it said so itself
            for cut in self._touching.values():
                cut()
        while self._touching:
            self._changed.get()


def touching(together: Together | None, cut: Callable[[], Any] = lambda: None) -> AbstractContextManager[None]:
    """See `Together.touching`; a request that is alone is performed by the caller, and ends with it."""
    return nullcontext() if together is None else together.touching(cut)
