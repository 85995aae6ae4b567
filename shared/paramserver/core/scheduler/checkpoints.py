"""When a model's checkpoints are written, and which are kept.

One of a model is written at a time; by rule, one of all models.  A checkpoint of a sync model is of a single clock: a
cut (requested with the next commit) while training continues, the current state if the model is idle.  No commit is
made while the current state is read, and no cut or move of a model is begun while a checkpoint of it is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict

from paramserver.core.spec import CheckpointSpec
from paramserver.errors import PsError, problem

IDLE_S: Final = 1.0
"""A sync model without a commit for this long counts as idle."""
ALIASES: Final = ("latest", "best")
"""Reserved names for the newest checkpoint and for the one with the best metric."""


def creation_of(generation: int, created_s: float) -> str:
    """Identifier of one creation of a model, unique across clusters as well."""
    return f"{generation}-{created_s}"


def no_checkpoint(model: str, name: str) -> PsError:
    """Return the error for a checkpoint that the model's list does not name."""
    return problem("unknown_checkpoint", f"model '{model}' has no checkpoint {name!r:.80}")


class Record(Struct, frozen=True):
    """A complete checkpoint."""

    name: str
    number: int
    clock: int
    created_s: float
    """Unix time."""
    bytes: int
    versions: tuple[int, ...]
    metric: tuple[str, float] | None
    kept: bool
    """Whether a user named it; such a checkpoint is never removed by rule."""
    path: str = ""
    scheduler: str = ""
    """Name of the scheduler whose directory holds it; empty if that scheduler gave none."""

    def document(self) -> dict[str, Any]:
        """The document as stored and as clients get it."""
        metric = {"name": self.metric[0], "value": self.metric[1]} if self.metric else None
        return asdict(self) | {"versions": list(self.versions), "metric": metric}

    @classmethod
    def of(cls, doc: Mapping[str, Any]) -> "Record":
        """The record that a stored document describes."""
        metric = (doc["metric"]["name"], doc["metric"]["value"]) if doc["metric"] else None
        fields = {name: doc[name] for name in cls.__struct_fields__}
        return cls(**fields | {"versions": tuple(doc["versions"]), "metric": metric})


@dataclass(slots=True)
class PendingCheckpoint:
    """A requested checkpoint that is not complete yet."""

    since_s: float
    name: str | None = None
    """The name the user gave; None: the scheduler chooses one."""
    requests: list[int] = field(default_factory=list)
    written: str | None = None
    """The name under which it is being written; None until begun."""
    clock: int = 0
    """The model's clock at the request; once begun, the clock it captures."""
    metric: tuple[str, float] | None = None
    read: bool = False
    """The states of all partitions are read, and its files are being written."""
    void: bool = False
    """A new timeline began, or sync ended, while the current state was read, so the result is discarded."""


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints of one model."""

    records: dict[str, Record] = field(default_factory=dict)
    pending: list[PendingCheckpoint] = field(default_factory=list)
    """Queue; the first is the one being written, if any is."""
    number: int = 0
    last_clock: int = 0
    last_version: int = 0
    last_s: float = 0.0
    next_s: float = 0.0
    """None by rule begins before: so that partitions can move, as long after the last one as that took."""
    error: str = ""
    """Why the last one was not written; empty if it was."""
    reading_current: bool = False
    """sync: the current state is being read, so commits wait."""

    waiting: bool = False
    """sync: the first pending one waits for moves to end, or for a cut."""

    @property
    def writing(self) -> bool:
        """Whether one is being written now."""
        return bool(self.pending) and self.pending[0].written is not None

    @property
    def reading(self) -> bool:
        """Whether the partitions' owners are needed for the one that is being written."""
        return self.writing and not self.pending[0].read

    @property
    def asked(self) -> bool:
        """Whether a pending one was asked for, and is not due by rule alone."""
        return any(p.requests or p.name is not None for p in self.pending)

    def void_current(self) -> None:
        """Void a checkpoint of the current state: a new timeline has begun, or sync has ended; a cut stays valid."""
        if self.reading_current:
            self.pending[0].void, self.reading_current = True, False

    def created_s(self, unix_s: float) -> float:
        """Creation time of one at `unix_s`: later than all others, though the clock was set back meanwhile.

        Of a deleted model only these times tell which one is the newest.
        """
        return max([unix_s, *(r.created_s + 0.001 for r in self.records.values())])

    def due(self, spec: CheckpointSpec, every_clocks: int, clock: int, version: Callable[[], int], now: float) -> bool:
        """Whether the rule requires a checkpoint at this clock; never if the model has not changed since the last one.

        `version` takes the minimum over all partitions, so it is called only if the result depends on it.
        """
        if self.pending or now < self.next_s:
            return False
        if every_clocks and clock // every_clocks > self.last_clock // every_clocks:
            return True
        if spec.every_minutes <= 0 or now - self.last_s < 60.0 * spec.every_minutes:
            return False
        return clock > self.last_clock or version() != self.last_version

    def find(self, name: str, spec: CheckpointSpec) -> Record | None:
        """The checkpoint of that name; `latest` is the newest, `best` the one with the best metric."""
        if name not in ALIASES:
            return self.records.get(name)
        records = list(self.records.values())
        return _best(records, spec) if name == "best" else max(records, key=lambda r: r.number, default=None)

    def surplus(self, spec: CheckpointSpec) -> list[Record]:
        """Checkpoints without a user-given name that are neither among the newest `keep` of these nor their best."""
        own = sorted((r for r in self.records.values() if not r.kept), key=lambda r: r.number)
        best = _best(own, spec)
        return [r for r in own[: -spec.keep] if r is not best]


def _best(records: list[Record], spec: CheckpointSpec) -> Record | None:
    scored = [r for r in records if r.metric is not None and r.metric[0] == spec.metric]
    sign = 1.0 if spec.best == "max" else -1.0
    # Of equal ones the oldest: a later one may have the same value only because nothing was measured since.
    return max(scored, key=lambda r: (sign * r.metric[1] if r.metric else 0.0, -r.number), default=None)
