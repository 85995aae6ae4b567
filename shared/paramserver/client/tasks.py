"""Pieces of work that the cluster hands out."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

EVALUATE: Final = "evaluate"
"""The dataset whose tasks are evaluations."""


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work: a range of a dataset."""

    id: str
    dataset: str
    start: int
    """First element of the range."""
    stop: int
    """One past the last element."""
    index: int
    """Which range of the dataset this is."""
    pass_: int
    """How often the dataset was worked through before."""
    uri: str | None
    """What the dataset was registered with, for the worker's own code to open."""
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_document(cls, doc: Mapping[str, Any]) -> "Task":
        """The task that an answer describes."""
        return cls(
            str(doc["id"]),
            str(doc.get("dataset", doc.get("kind", ""))),
            int(doc.get("start", 0)),
            int(doc.get("stop", 0)),
            int(doc.get("index", 0)),
            int(doc.get("pass", 0)),
            doc.get("uri"),
            doc,
        )


class Holding:
    """The tasks that one worker works on; safe between its threads.

    Each request for another task names them, and what else the scheduler has leased to the worker is free again: a
    range whose loop was left, or whose lease was answered to nobody.  So that it is never one that is just being
    leased, a worker asks for one task of a dataset at a time.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}
        self._asking: set[str] = set()
        self._lock = threading.Lock()
        self.evaluation_failed = False
        """An evaluation was begun and not made: it is still this worker's, which may ask for it again."""

    def begin(self, dataset: str) -> bool:
        """Whether this dataset may be asked for a task now; who is told so calls `end`."""
        with self._lock:
            mine = dataset not in self._asking
            self._asking.add(dataset)
            return mine

    def ids(self, dataset: str) -> list[str]:
        """The tasks of that dataset."""
        with self._lock:
            return [t.id for t in self._tasks.values() if t.dataset == dataset]

    def take(self, dataset: str, doc: Mapping[str, Any]) -> Task | None:
        """The task that an answer brings, if any."""
        task = Task.from_document(doc["task"]) if doc.get("task") else None
        with self._lock:
            if task is not None:
                self._tasks[task.id] = task
            if dataset == EVALUATE:
                self.evaluation_failed = False
        return task

    def end(self, dataset: str) -> None:
        """The answer is here, or given up."""
        with self._lock:
            self._asking.discard(dataset)

    def done(self, task: Task) -> None:
        """It is worked through."""
        with self._lock:
            self._tasks.pop(task.id, None)

    def put_down(self, task: Task) -> None:
        """It is not worked on any more, done or not."""
        with self._lock:
            left = self._tasks.pop(task.id, None)
            if left is not None and left.dataset == EVALUATE:
                self.evaluation_failed = True
