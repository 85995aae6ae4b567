"""Consistency modes for `create_model` and `set`: when pushes are applied, and which workers wait."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from paramserver.client.choices import Choice


@dataclass(frozen=True, slots=True)
class Consistency(Choice):
    """Settings of all modes: how to treat a gradient computed from an old version."""

    tag: ClassVar[str] = "mode"
    mode: ClassVar[str]
    lag: Literal["ignore", "scale", "reject"] = field(default="ignore", kw_only=True)
    """Version lag: `ignore` it, `scale` the step by 1/(1+lag), or `reject` it beyond `lag_bound`."""
    lag_bound: int = field(default=16, kw_only=True)


@dataclass(frozen=True, slots=True)
class Async(Consistency):
    """Every push is applied at once; no worker waits."""

    mode: ClassVar[str] = "async"


@dataclass(frozen=True, slots=True)
class SSP(Consistency):
    """Pushes are applied at once; a worker waits while more than `staleness` clocks ahead of the slowest live one."""

    mode: ClassVar[str] = "ssp"
    staleness: int = 0
    min_workers: int = field(default=1, kw_only=True)
    """Until this many workers have joined, those that are missing count as workers at clock 0."""


@dataclass(frozen=True, slots=True)
class Sync(Consistency):
    """All workers' gradients of one clock are averaged and applied together."""

    mode: ClassVar[str] = "sync"
    quorum: float = 1.0
    """Fraction of the live workers whose gradients a commit needs, above 0 and at most 1."""
    quorum_count: int | None = field(default=None, kw_only=True)
    """Number of workers, instead of the fraction."""
    late: Literal["drop", "fold"] = field(default="drop", kw_only=True)
    """What happens to a gradient that misses its commit: dropped, or folded into the next one."""
    min_workers: int = field(default=1, kw_only=True)
    """Clock 0 opens when this many workers have joined."""


@dataclass(frozen=True, slots=True)
class Buffered(Consistency):
    """A partition applies the mean of every `count` pushes, or of those it holds after `interval_ms`."""

    mode: ClassVar[str] = "buffered"
    count: int = 8
    interval_ms: int = 1000
