"""Requests of one call that are under way at the same time, and the threads that help whoever waits for them."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeAlias

from paramserver.client.calls import Outcome, Request

Perform: TypeAlias = Callable[[Request], Outcome]
Work: TypeAlias = Callable[[], object]


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
        self._changed = threading.Condition(threading.Lock())
        self._outcomes: dict[int, Outcome] = {}
        self._error: BaseException | None = None

    def outcomes(self, helpers: Helpers) -> list[Outcome]:
        """All outcomes, in order."""
        for _ in self._requests[1:]:
            helpers.ask(self._one_as_helper)
        while self._one(self._waiting.popleft):
            pass  # the first one always, and all that no helper has come to
        with self._changed:
            while len(self._outcomes) < len(self._requests) and self._error is None:
                self._changed.wait()
        if self._error is not None:
            raise self._error
        return [self._outcomes[i] for i in range(len(self._requests))]

    def _one(self, which: Callable[[], int]) -> bool:
        """Perform one that nobody has begun; False: there is none."""
        try:
            index = which()
        except IndexError:
            return False
        outcome = self._perform(self._requests[index])
        with self._changed:
            self._outcomes[index] = outcome
            self._changed.notify()
        return True

    def _one_as_helper(self) -> None:
        try:
            self._one(self._waiting.pop)
        except BaseException as e:  # raised in the caller's thread
            with self._changed:
                self._error = e
                self._changed.notify()
