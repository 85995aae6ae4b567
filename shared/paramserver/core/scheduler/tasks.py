"""Data as ranges that workers lease: every range of every pass is processed at least once (semantics 10).

A dataset is a list of ranges, processed `passes` times.  A range is free, leased to one worker, or done; leases of a
dead worker are freed.  The next pass begins when the current one has no free range for the worker that asks, so that
nobody idles behind a straggler; at most two passes are open at once.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict

from paramserver import limits
from paramserver.core.fields import Reader, is_integer, is_name
from paramserver.errors import problem

OPEN_PASSES: Final = 2
EVALUATE: Final = "evaluate"
"""Dataset name under which evaluation tasks are leased; no real dataset may have it."""


class RangeSet:
    """A set of small integers as sorted, disjoint [start, stop) runs; a set that fills from below stays tiny."""

    def __init__(self, runs: Sequence[Sequence[int]] = ()) -> None:
        self.runs: list[list[int]] = [[a, b] for a, b in runs]

    def __contains__(self, n: int) -> bool:
        i = bisect_right(self.runs, n, key=lambda r: r[0]) - 1
        return i >= 0 and n < self.runs[i][1]

    def __len__(self) -> int:
        return sum(b - a for a, b in self.runs)

    def add(self, n: int) -> None:
        """Add one number."""
        if n in self:
            return
        i = bisect_right(self.runs, n, key=lambda r: r[0])
        joins_left = i > 0 and self.runs[i - 1][1] == n
        joins_right = i < len(self.runs) and self.runs[i][0] == n + 1
        if joins_left and joins_right:
            self.runs[i - 1][1] = self.runs.pop(i)[1]
        elif joins_left:
            self.runs[i - 1][1] = n + 1
        elif joins_right:
            self.runs[i][0] = n
        else:
            self.runs.insert(i, [n, n + 1])

    def missing(self, start: int, stop: int) -> Iterator[int]:
        """Yield the numbers of [start, stop) that are not in the set, ascending; all in the set are below `stop`."""
        for a, b in self.runs:
            yield from range(start, a)
            start = max(start, b)
        yield from range(start, stop)


class DatasetSpec(Struct, frozen=True):
    """A dataset as registered."""

    name: str
    ranges: tuple[tuple[int, int], ...]
    uri: str | None = None
    assignment: str = "dynamic"
    passes: int | None = 1

    @classmethod
    def check(
        cls,
        name: Any,
        size: int | None,
        task_size: int | None,
        ranges: Sequence[Sequence[int]] | None,
        uri: str | None,
        assignment: str,
        passes: int | None,
    ) -> "DatasetSpec":
        """Return the dataset with these fields; raises RequestError naming each wrong one."""
        given = {"dataset": name, "size": size, "task_size": task_size, "ranges": ranges}
        r = Reader(given | {"uri": uri, "assignment": assignment, "passes": passes}, "", [])
        r.take("dataset", "", _is_dataset_name, "a name: letters, digits, '.', '_' and '-'; not 'evaluate'")
        r.take("uri", None, _is_uri, "at most 4096 printable characters")
        r.choice("assignment", "dynamic", ("dynamic", "static"))
        r.take("passes", None, _is_optional_count, "a positive integer, or null for passes without end")
        pieces: list[tuple[int, int]] = []
        if ranges is None:
            pieces = _equal_ranges(r)
        elif size is not None or task_size is not None:
            r.fail("ranges", "cannot be given together with size or task_size")
        else:
            listed = f"a list of 1 to {limits.TASKS_PER_DATASET_MAX} ranges [start, stop] with 0 <= start < stop"
            pieces = [(start, stop) for start, stop in r.take("ranges", (), _are_ranges, listed)]
        r.tell()
        return cls(name, tuple(pieces), uri, assignment, passes)

    def document(self) -> dict[str, Any]:
        """Return the document stored in Redis."""
        return asdict(self) | {"ranges": [list(r) for r in self.ranges]}

    @classmethod
    def of(cls, doc: Mapping[str, Any]) -> "DatasetSpec":
        """Return the dataset that a stored document describes."""
        fields = {name: doc[name] for name in cls.__struct_fields__}
        return cls(**fields | {"ranges": tuple((a, b) for a, b in doc["ranges"])})


def _equal_ranges(r: Reader) -> list[tuple[int, int]]:
    """Return the ranges of `task_size` elements, or else about 64 equal ones, that make up [0, size)."""
    size = r.take("size", 0, lambda v: is_integer(v, 1), "a positive integer", "or give `ranges`")
    step = r.take("task_size", None, _is_optional_count, "a positive integer") or max(1, -(-size // 64))
    if -(-size // step) > limits.TASKS_PER_DATASET_MAX:
        r.fail("task_size", f"would make more than {limits.TASKS_PER_DATASET_MAX} tasks")
        return []
    return [(a, min(a + step, size)) for a in range(0, size, step)]


def _is_dataset_name(value: Any) -> bool:
    return is_name(value) and value != EVALUATE


def _is_uri(value: Any) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= 4096 and value.isprintable())


def _is_optional_count(value: Any) -> bool:
    return value is None or is_integer(value, 1)


def _are_ranges(value: Any) -> bool:
    fits = isinstance(value, Sequence) and 0 < len(value) <= limits.TASKS_PER_DATASET_MAX
    return fits and all(map(_is_range, value))


def _is_range(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) == 2
        and is_integer(value[0])
        and is_integer(value[1], 1)
        and bool(value[0] < value[1])
    )


@dataclass(slots=True)
class Dataset:
    """A dataset and its progress."""

    spec: DatasetSpec
    number: int = 0
    """Its place in the order in which the model's datasets were registered."""
    complete: int = 0
    """Passes finished, which is also the number of the oldest open pass."""
    opened: int = 1
    """Passes started."""
    done: dict[int, RangeSet] = field(default_factory=lambda: {0: RangeSet()})
    """Indexes done in each open pass."""
    leases: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    """(pass, index) -> (worker, epoch)."""
    cursor: dict[int, dict[int, int]] = field(default_factory=dict)
    """pass -> worker's position -> index below which no range of that pass is free for it."""
    workers: int = 1
    """Number of workers among whom `cursor` divides the ranges; dynamic: one, as each range is for everyone."""

    @property
    def finished(self) -> bool:
        """Whether every range of every pass is done."""
        return self.spec.passes is not None and self.complete >= self.spec.passes

    @property
    def static(self) -> bool:
        """Whether a range is for one worker alone."""
        return self.spec.assignment == "static"

    def _free(self, number: int, position: int) -> int | None:
        done, cursor, end = self.done[number], self.cursor.setdefault(number, {}), len(self.spec.ranges)
        first = cursor.get(position, position)
        own = range(first, end, self.workers)
        missing = done.missing(first, end) if self.workers == 1 else (i for i in own if i not in done)
        found = next((i for i in missing if (number, i) not in self.leases), None)
        cursor[position] = end if found is None else found
        return found

    def lease(self, worker: str, epoch: int, position: int, workers: int) -> dict[str, Any] | None:
        """Lease the next range to the worker; None if it has none for now.

        `position`: if `static`, the worker's among the live ranks.
        """
        if not self.static:
            position, workers = 0, 1
        if workers != self.workers:
            self.workers = workers
            self.cursor.clear()
        while True:
            for number in range(self.complete, self.opened):
                index = self._free(number, position)
                if index is not None:
                    self.leases[number, index] = (worker, epoch)
                    return self.task(number, index)
            more = self.spec.passes is None or self.opened < self.spec.passes
            if not more or self.opened - self.complete >= OPEN_PASSES:
                return None
            self.done[self.opened] = RangeSet()
            self.opened += 1

    def _id(self, number: int, index: int) -> str:
        return f"{self.spec.name}:{number}:{index}"

    def task(self, number: int, index: int) -> dict[str, Any]:
        """Return the task that a worker is sent for a range."""
        start, stop = self.spec.ranges[index]
        return {
            "id": self._id(number, index),
            "kind": "range",
            "dataset": self.spec.name,
            "uri": self.spec.uri,
            "pass": number,
            "index": index,
            "start": start,
            "stop": stop,
        }

    def finish(self, number: int, index: int) -> None:
        """Mark a range as done; idempotent.  Raises NotFoundError (`unknown_task`)."""
        if index >= len(self.spec.ranges) or number >= self.opened:
            raise problem("unknown_task", f"dataset '{self.spec.name}' has no task {number}:{index}")
        if number < self.complete:
            return
        self.leases.pop((number, index), None)
        self.done[number].add(index)
        while self.complete < self.opened and len(self.done[self.complete]) == len(self.spec.ranges):
            del self.done[self.complete]
            self.cursor.pop(self.complete, None)
            self.complete += 1

    def release(self, worker: str, epoch: int, holding: Collection[str] = ()) -> bool:
        """Free the worker's leases, except the task ids in `holding`; return whether there were any."""
        held = [k for k, v in self.leases.items() if v == (worker, epoch) and self._id(*k) not in holding]
        for number, index in held:
            del self.leases[number, index]
            cursor, position = self.cursor.get(number, {}), index % self.workers
            cursor[position] = min(cursor.get(position, position), index)
        return bool(held)

    def progress(self) -> dict[str, Any]:
        """Return the progress document stored in Redis."""
        return {
            "number": self.number,
            "complete": self.complete,
            "opened": self.opened,
            "done": {str(n): d.runs for n, d in self.done.items()},
            "leases": [[n, i, w, e] for (n, i), (w, e) in self.leases.items()],
        }

    @classmethod
    def of(cls, spec: Mapping[str, Any], progress: Mapping[str, Any]) -> "Dataset":
        """Return the dataset that its two stored documents describe."""
        return cls(
            DatasetSpec.of(spec),
            progress["number"],
            progress["complete"],
            progress["opened"],
            {int(n): RangeSet(runs) for n, runs in progress["done"].items()},
            {(n, i): (w, e) for n, i, w, e in progress["leases"]},
        )

    def document(self) -> dict[str, Any]:
        """Return the document that clients see."""
        return {
            "dataset": self.spec.name,
            "tasks": len(self.spec.ranges),
            "uri": self.spec.uri,
            "assignment": self.spec.assignment,
            "passes": self.spec.passes,
            "passes_done": self.complete,
            "done": self.complete * len(self.spec.ranges) + sum(len(d) for d in self.done.values()),
            "leased": len(self.leases),
            "finished": self.finished,
        }


@dataclass(slots=True)
class Evaluation:
    """A request to evaluate the model at about this clock, to be leased by one worker."""

    clock: int
    timeline: int
    """The model's: after a rollback, the same clock comes again with other values."""
    leased: tuple[str, int] | None = None

    @property
    def id(self) -> str:
        """Task id."""
        return f"{EVALUATE}:{self.clock}:{self.timeline}"

    def task(self) -> dict[str, Any]:
        """Return the task that a worker is sent."""
        return {"id": self.id, "kind": "evaluate", "clock": self.clock}


def parse_task(task: str) -> tuple[str, list[int]]:
    """Return the dataset and the numbers of a task id; raises NotFoundError (`unknown_task`)."""
    name, *numbers = task.split(":")
    if not numbers or len(numbers) > 2 or not all(n.isascii() and n.isdigit() and len(n) < 17 for n in numbers):
        raise problem("unknown_task", f"no task {task!r:.80}")
    return name, [int(n) for n in numbers]
