"""Tasks that the cluster hands out, and those that a worker is working on."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paramserver.client.turns import Held, Turn
from paramserver.core.scheduler.tasks import EVALUATE


@dataclass(frozen=True, slots=True)
class Task:
    """A unit of work: a range of a dataset, or an evaluation."""

    id: str
    dataset: str
    start: int
    """First element of the range."""
    stop: int
    """One past the last element."""
    index: int
    """Number of the range within the dataset."""
    pass_: int
    """Number of passes over the dataset before this one."""
    uri: str | None
    """URI that the dataset was registered with, for the worker's own code to open."""

    @classmethod
    def from_document(cls, doc: Mapping[str, Any]) -> "Task":
        """Return the task that a JSON document describes."""
        return cls(
            str(doc["id"]),
            str(doc.get("dataset", doc.get("kind", ""))),
            int(doc.get("start", 0)),
            int(doc.get("stop", 0)),
            int(doc.get("index", 0)),
            int(doc.get("pass", 0)),
            doc.get("uri"),
        )


def _caller() -> object:
    """Return what tells the asyncio task or thread that runs this from all others."""
    try:
        return asyncio.current_task() or threading.get_ident()
    except RuntimeError:  # no event loop runs in this thread
        return threading.get_ident()


class Holding:
    """The tasks that one worker is working on.  Safe between its threads.

    Each request for another task names them, and the scheduler frees whatever else it has leased to the worker: a range
    whose loop was left, or whose lease got lost on the way.  A worker has at most one such request per dataset in
    flight; a second one would free the task that the first is just receiving.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, tuple[Task, object]] = {}
        """By id, each with who works on it (see `_caller`)."""
        self._asking = defaultdict[str, Turn](Turn)
        self._lock = threading.RLock()  # a garbage collection at any point may close a loop, which puts down its task
        self.evaluation_failed = False
        """Whether an evaluation was taken but not finished, or asked for without an answer yet: it may be leased to
        this worker, which can ask again, but no heartbeat says so."""

    def begin(self, dataset: str, held: Held) -> bool:
        """Return whether the caller has the turn to request a task of this dataset now, until `held` is over."""
        with self._lock:
            turn = self._asking[dataset]
            if turn.taken:
                return False
            turn.take(held)
            if dataset == EVALUATE:
                self.evaluation_failed = True  # until the answer is here
            return True

    def ids(self, dataset: str) -> list[str]:
        """Ids of the tasks of that dataset that are being worked on."""
        with self._lock:
            return [t.id for t, _ in list(self._tasks.values()) if t.dataset == dataset]

    def take(self, dataset: str, doc: Mapping[str, Any]) -> Task | None:
        """Record and return the task in an answer, if any."""
        task = Task.from_document(doc["task"]) if doc.get("task") else None
        with self._lock:
            if task is not None:
                self._tasks[task.id] = task, _caller()
            if dataset == EVALUATE:
                self.evaluation_failed = False
        return task

    def nested(self, dataset: str) -> bool:
        """Whether the caller itself is working on a task of that dataset, in a loop around the present one."""
        caller = _caller()
        with self._lock:
            return any(t.dataset == dataset and who == caller for t, who in list(self._tasks.values()))

    def done(self, task: Task) -> None:
        """Remove a task that is done."""
        with self._lock:
            self._tasks.pop(task.id, None)

    def put_down(self, task: Task) -> None:
        """Remove a task that is no longer worked on, done or not; an unfinished evaluation counts as failed."""
        with self._lock:
            left = self._tasks.pop(task.id, None)
            if left is not None and task.dataset == EVALUATE:
                self.evaluation_failed = True
