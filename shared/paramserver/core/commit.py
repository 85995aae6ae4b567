"""Commits of synchronous models: decided by the scheduler, stored, published, and applied by every shard."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from msgspec import Struct
from msgspec.structs import astuple

from paramserver.types import ModelKey


class Contribution(Struct, frozen=True):
    """One entry of a commit's list: what (worker, epoch) pushed for `clock`."""

    worker: str
    epoch: int
    rank: int
    clock: int

    @classmethod
    def of(cls, row: Sequence[Any]) -> Self:
        """The contribution that a row of a record or a journal describes."""
        return cls(*row)


class Commit(Struct, frozen=True):
    """The decision on one clock: exactly these contributions, in (rank, clock) order, on every partition."""

    t: int
    """The clock, which ends with it."""
    timeline: int
    contributions: tuple[Contribution, ...]
    revision: int
    live_workers: int
    cut: bool
    """Whether every partition must store a cut right after this commit."""
    settings: Mapping[str, Any] | None = None
    """The settings of `revision` (`core.settings`), unless the commit before names the same one: then None."""

    @property
    def rows(self) -> list[list[Any]]:
        """The contributions as records and journals have them: [worker, epoch, rank, clock]."""
        return [list(astuple(c)) for c in self.contributions]

    def document(self, model: ModelKey) -> dict[str, Any]:
        """The record as it is stored and published."""
        return {
            "type": "commit",
            "model": model.name,
            "generation": model.generation,
            "timeline": self.timeline,
            "t": self.t,
            "contributions": self.rows,
            "revision": self.revision,
            "live_workers": self.live_workers,
            "cut": self.cut,
            **({} if self.settings is None else {"settings": self.settings}),
        }

    @classmethod
    def of(cls, doc: Mapping[str, Any]) -> Self:
        """The commit that a record describes."""
        listed = tuple(map(Contribution.of, doc["contributions"]))
        numbers = doc["revision"], doc["live_workers"], doc["cut"]
        return cls(doc["t"], doc["timeline"], listed, *numbers, doc.get("settings"))
