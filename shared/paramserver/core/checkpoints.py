"""When a model's checkpoints are written, and which of them stay.

One is written at a time.  Of a model in sync it is of one clock: a cut if the training goes on (asked for with the next
commit), the present state if it stands still; no commit or cut is made while it is being read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import Struct

from paramserver.core.spec import CheckpointSpec

IDLE_S: Final = 1.0
"""Without a commit for so long, a synchronous model counts as standing still."""
ALIASES: Final = ("latest", "best")
"""What stands for the newest checkpoint and for the one whose metric was best; none is called so."""


def creation_of(generation: int, created_s: float) -> str:
    """What no other creation of a model is called, also none of another cluster."""
    return f"{generation}-{created_s}"


class Record(Struct, frozen=True):
    """A checkpoint that is there."""

    name: str
    number: int
    clock: int
    created_s: float
    """Unix time."""
    bytes: int
    versions: tuple[int, ...]
    metric: tuple[str, float] | None
    kept: bool
    """Asked for by name: removed by nobody but its user."""
    path: str = ""
    scheduler: str = ""
    """The name of the scheduler in whose folder it is; empty: of one that did not say."""

    def document(self) -> dict[str, Any]:
        """As stored, and as readers get it."""
        return {
            "name": self.name,
            "number": self.number,
            "clock": self.clock,
            "created_s": self.created_s,
            "bytes": self.bytes,
            "versions": list(self.versions),
            "metric": {"name": self.metric[0], "value": self.metric[1]} if self.metric else None,
            "kept": self.kept,
            "path": self.path,
            "scheduler": self.scheduler,
        }

    @classmethod
    def of(cls, doc: Mapping[str, Any]) -> "Record":
        """The record that a stored document describes."""
        metric = (doc["metric"]["name"], doc["metric"]["value"]) if doc["metric"] else None
        return cls(
            doc["name"],
            doc["number"],
            doc["clock"],
            doc["created_s"],
            doc["bytes"],
            tuple(doc["versions"]),
            metric,
            doc["kept"],
            doc["path"],
            doc.get("scheduler", ""),
        )


@dataclass(slots=True)
class Wanted:
    """A checkpoint that was asked for and is not complete."""

    since_s: float
    name: str | None = None
    """As its user calls it; None: by the scheduler's rule."""
    requests: list[int] = field(default_factory=list)
    written: str | None = None
    """The name under which it is being written; None: not begun."""
    clock: int = 0
    """The model's clock when it was asked for; once begun, the clock that it is of."""
    metric: tuple[str, float] | None = None
    void: bool = False
    """The model has gone back while it was read."""


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints of one model."""

    records: dict[str, Record] = field(default_factory=dict)
    wanted: list[Wanted] = field(default_factory=list)
    """The first is the one at work."""
    number: int = 0
    last_clock: int = 0
    last_version: int = 0
    last_s: float = 0.0
    reading_still: bool = False
    """sync: the present state is being read, so no commit may change it."""

    @property
    def writing(self) -> bool:
        """Whether one is being written just now."""
        return bool(self.wanted) and self.wanted[0].written is not None

    def went_back(self) -> None:
        """A new timeline has begun: what is read of the present state is of no clock.  A cut stays what it is."""
        if self.reading_still:
            self.wanted[0].void, self.reading_still = True, False

    def due(self, spec: CheckpointSpec, every_clocks: int, clock: int, version: Callable[[], int], now: float) -> bool:
        """Whether the rule asks for one at this clock; never for a model that has not changed since the last.

        The version is that of all partitions, so it is asked for only where it decides.
        """
        if self.wanted:
            return False
        if every_clocks and clock // every_clocks > self.last_clock // every_clocks:
            return True
        if spec.every_minutes <= 0 or now - self.last_s < 60.0 * spec.every_minutes:
            return False
        return clock > self.last_clock or version() > self.last_version

    def find(self, name: str, spec: CheckpointSpec) -> Record | None:
        """The one of that name; with `latest` the newest, with `best` the one where the metric was best."""
        if name not in ALIASES:
            return self.records.get(name)
        records = list(self.records.values())
        return _best(records, spec) if name == "best" else max(records, key=lambda r: r.number, default=None)

    def surplus(self, spec: CheckpointSpec) -> list[Record]:
        """The checkpoints written by rule that are neither among the newest `keep` nor the best."""
        own = sorted((r for r in self.records.values() if not r.kept), key=lambda r: r.number)
        best = _best(own, spec)
        return [r for r in own[: -spec.keep] if r is not best]


def _best(records: list[Record], spec: CheckpointSpec) -> Record | None:
    scored = [r for r in records if r.metric is not None and r.metric[0] == spec.metric]
    sign = 1.0 if spec.best == "max" else -1.0
    return max(scored, key=lambda r: (sign * r.metric[1] if r.metric else 0.0, r.number), default=None)
