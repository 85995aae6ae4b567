"""The interface of every measured system."""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.workloads import Client, Work


@dataclass(frozen=True)
class Running:
    """A running system that holds the initial values."""

    servers: Sequence[int]
    """Process ids of the servers, whose memory is measured."""
    base_bytes: int
    """Memory of the servers before they held the values."""
    connect: Callable[[Work, int], Client]
    """Make the client of a rank, in the worker's process; can be pickled."""
    others: Callable[[], Sequence[int]] = field(default=tuple)
    """Current process ids of helpers, whose CPU time counts as the servers'."""
    versions: dict[str, Any] = field(default_factory=dict)


class System(Protocol):
    """A system that can serve parameters."""

    @property
    def key(self) -> str:
        """Name on the command line and in the results."""

    @property
    def label(self) -> str:
        """Name in the tables."""

    def missing(self) -> str:
        """Return what must be installed before it can run here; empty if nothing."""

    def start(self, work: Work) -> AbstractContextManager[Running]:
        """Start servers for this work and stop them at the end of the block."""


def lacking(*packages: str) -> str:
    """Return the installation hint for those of these Python packages that are missing; empty if there are none."""
    gone = [p for p in packages if importlib.util.find_spec(p) is None]
    return f"needs {', '.join(gone)}: pip install 'paramserver[bench]'" if gone else ""
