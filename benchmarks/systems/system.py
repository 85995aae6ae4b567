"""What every system that is measured looks like from outside."""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.workloads import Client, Work


@dataclass(frozen=True)
class Running:
    """A system that is up and holds the initial values."""

    servers: Sequence[int]
    """Process ids whose memory is the servers'."""
    base_bytes: int
    """What they held before the values were there."""
    connect: Callable[[Work, int], Client]
    """Makes the client of a rank, in the worker's own process; can be pickled."""
    others: Callable[[], Sequence[int]] = field(default=tuple)
    """Process ids, at the moment, of helpers whose processor time counts as the servers'."""
    versions: dict[str, Any] = field(default_factory=dict)


class System(Protocol):
    """One way to hold parameters."""

    @property
    def key(self) -> str:
        """Its name on the command line and in the results."""

    @property
    def label(self) -> str:
        """Its name in the tables."""

    def missing(self) -> str:
        """What to install before it can run here; empty if nothing."""

    def start(self, work: Work) -> AbstractContextManager[Running]:
        """Start servers for this work, and stop them at the end of the block."""


def lacking(*packages: str, extra: str = "bench") -> str:
    """What to say where one of these Python packages is not installed; empty if all are."""
    gone = [p for p in packages if importlib.util.find_spec(p) is None]
    return f"needs {', '.join(gone)}: pip install 'paramserver[{extra}]'" if gone else ""
