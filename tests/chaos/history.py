"""The history of a chaos run as seen by its clients and the nemesis (fault injector): JSON lines, written as it runs.

Times are seconds of the monotonic clock, which all processes of one machine share.  A push is recorded when it begins
and again when it ends.  Its result is one of

    ok          acknowledged
    fail        certainly not applied
    doubt       given up without an answer: may have been applied, or may be applied later
    open        not ended yet, or its process was killed
    dropped     the worker was told that its epoch or timeline is over, but a partition that learned of it later may
                have applied the push
"""

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal

RECORDS_MAX = 400_000
"""Most records in one file; a longer run is too big to be read back and judged."""

AFTER_ALL = -1

Result = Literal["ok", "fail", "doubt", "open", "dropped"]


@dataclass(frozen=True, slots=True)
class Push:
    """One push of 1.0 to every shared cell and to the sender's own cell of every partition."""

    model: str
    by: int
    """Number of the worker and of its own cell."""
    start: float
    end: float = inf
    """`inf` unless the result is `ok` or `fail`: the push may still be applied at any later time."""
    result: Result = "open"
    error: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """One partition as returned by one pull."""

    model: str
    by: int
    start: float
    end: float
    pull: int
    """Number of the pull, shared by all partitions that it returned."""
    timeline: int
    epoch: int
    """Epoch of the worker; 0 for a client that is no worker, `AFTER_ALL` after the load has ended."""
    partition: int
    version: int
    incarnation: int
    low: float
    """Smallest of the shared cells."""
    high: float
    """Largest of the shared cells."""
    cells: tuple[float, ...]
    """The workers' own cells."""


@dataclass(frozen=True, slots=True)
class Clock:
    """One successful `clock()` or `step()` of a synchronous worker: iteration `clock` may begin."""

    model: str
    by: int
    start: float
    end: float
    clock: int
    timeline: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Fault:
    """One action of the nemesis."""

    what: str
    at: float


@dataclass
class History:
    """All records of a run, each kind ordered by start time."""

    pushes: list[Push] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Failures of the load itself, such as an exception that a client must never raise."""
    failed_pulls: list[str] = field(default_factory=list)
    """Operation, model and error code of pulls and clocks that failed."""

    def of(self, model: str) -> "History":
        """Return the records of one model, with all faults, errors and failed pulls."""
        return History(
            [p for p in self.pushes if p.model == model],
            [s for s in self.seen if s.model == model],
            [c for c in self.clocks if c.model == model],
            self.faults,
            self.errors,
            self.failed_pulls,
        )

    def acknowledged(self) -> int:
        """Return the number of acknowledged pushes."""
        return sum(p.result == "ok" for p in self.pushes)

    def in_doubt(self) -> int:
        """Return the number of pushes given up without an answer."""
        return sum(p.result == "doubt" for p in self.pushes)

    def dropped(self) -> int:
        """Return the number of pushes that their workers were told are in none of the values, or in some only."""
        return sum(p.result == "dropped" for p in self.pushes)


class Recorder:
    """Writes one file of records; thread-safe."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()
        self._records = 0

    def write(self, **record: Any) -> None:
        """Add a record; raises OverflowError beyond `RECORDS_MAX` records."""
        line = json.dumps(record, separators=(",", ":"))
        with self._lock:
            self._records += 1
            if self._records > RECORDS_MAX:
                raise OverflowError(f"more than {RECORDS_MAX} records")
            self._file.write(line + "\n")

    def fault(self, what: str) -> None:
        """Record an action of the nemesis."""
        self.write(op="fault", what=what, at=time.monotonic())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(folder: Path) -> History:
    """Return the history merged from all files of a folder, up to now if they are still being written."""
    history, now = History(), time.monotonic()
    for number, path in enumerate(sorted(folder.glob("*.jsonl"))):
        lines = path.read_text().split("\n")
        # The last line of a killed process may be incomplete.
        _add(history, (json.loads(line) for line in lines[:-1] if line), number)
    history.pushes.sort(key=lambda p: p.start)
    # Drop pulls that ended after `now`: the pushes they show may be missing from a file that was read earlier.
    history.seen = sorted((s for s in history.seen if s.end <= now), key=lambda s: s.start)
    history.clocks.sort(key=lambda c: c.start)
    history.faults.sort(key=lambda f: f.at)
    return history


def _add(history: History, records: Iterable[dict[str, Any]], file: int) -> None:
    open_pushes: dict[str, Push] = {}
    for n, r in enumerate(records):
        match r["op"]:
            case "invoke":
                open_pushes[r["id"]] = Push(r["model"], r["by"], r["start"])
            case "push":
                began = open_pushes.pop(r["id"])
                end = r["end"] if r["result"] in ("ok", "fail") else inf
                history.pushes.append(Push(began.model, began.by, began.start, end, r["result"], r.get("error", "")))
            case "pull":
                for index, version, incarnation, low, high, cells in r["parts"]:
                    history.seen.append(
                        Seen(r["model"], r["by"], r["start"], r["end"], (file << 32) + n, r["timeline"], r["epoch"],
                             index, version, incarnation, low, high, tuple(cells))
                    )  # fmt: skip
            case "clock":
                history.clocks.append(
                    Clock(r["model"], r["by"], r["start"], r["end"], r["clock"], r["timeline"], r["epoch"])
                )
            case "fault":
                history.faults.append(Fault(r["what"], r["at"]))
            case "failed":
                history.failed_pulls.append(f"{r['what']} {r['model']}: {r['error']}")
            case "error":
                history.errors.append(r["error"])
    history.pushes.extend(open_pushes.values())
