"""Pieces of work that the cluster hands out."""

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
