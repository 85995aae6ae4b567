"""Time series of the last day in ring buffers of fixed size: fine resolution for recent values, coarse for older ones.

A ring has one slot per step of Unix time, which holds the mean of the values in that step.  Three rings with different
steps make a series.  `Rings` holds all series, and evicts the least recently written ones when there are too many.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, isfinite, nan
from typing import Final

import numpy as np

from paramserver import limits
from paramserver.types import AnyArray

RESOLUTIONS: Final = ((1, 960), (10, 1140), (60, 1500))
"""(seconds per slot, slots): a quarter of an hour, three hours and a day, each with a margin for late queries."""
FRESH_S: Final = 10.0
"""A series written within this time is never evicted for a new one."""

Labels = tuple[tuple[str, str], ...]


class Ring:
    """The newest `size` means, one for each `step_s` seconds."""

    def __init__(self, step_s: int, size: int) -> None:
        self.step_s = step_s
        # Filled slot by slot: a cluster that begins has thousands of rings to make at once.
        self._values = np.empty(size)
        self._first = self._slot = -1
        """Numbers of the first and the newest slot, which are their Unix times in steps; -1 while there is none."""
        self._sum = 0.0
        self._count = 0

    def add(self, unix_s: float, value: float) -> None:
        """Add a value; one older than the newest slot is dropped."""
        slot, size = int(unix_s) // self.step_s, len(self._values)
        if slot < self._slot:
            return
        if slot > self._slot:
            if self._first < 0:
                self._first = slot
            else:
                for skipped in range(max(self._slot + 1, slot - size + 1), slot):
                    self._values[skipped % size] = nan
            self._slot, self._sum, self._count = slot, 0.0, 0
        self._sum, self._count = self._sum + value, self._count + 1
        self._values[slot % size] = self._sum / self._count

    def read(self, first: int, count: int) -> AnyArray:
        """Return the float64 means of `count` slots from slot number `first`; NaN where there is none."""
        size = len(self._values)
        slots = np.arange(first, first + count)
        known = (slots >= self._first) & (slots <= self._slot) & (slots > self._slot - size)
        return np.where(known, self._values[slots % size], nan)


class _Series:
    """One time series in every resolution."""

    def __init__(self) -> None:
        self.rings = tuple(Ring(step_s, size) for step_s, size in RESOLUTIONS)
        self.written_s = 0.0

    def add(self, unix_s: float, value: float) -> None:
        self.written_s = unix_s
        for ring in self.rings:
            ring.add(unix_s, value)


@dataclass(frozen=True, slots=True)
class Grid:
    """The time axis of an answer: `count` steps of `step_s` seconds from Unix time `start_s`."""

    start_s: int
    step_s: int
    count: int

    @classmethod
    def of(cls, from_s: float, to_s: float, step_s: float, now_s: float) -> "Grid":
        """Return a grid that covers the span, with the requested step or a coarser one.

        It is coarser if no ring with such short slots reaches back that far, or to keep to about
        `limits.STATUS_POINTS_MAX` points.
        """
        step = max(1, ceil(step_s), ceil((to_s - from_s) / limits.STATUS_POINTS_MAX))
        for slot_s, slots in RESOLUTIONS:
            if from_s >= now_s - slot_s * slots:
                step = max(step, slot_s)
                break
        else:
            step = max(step, RESOLUTIONS[-1][0])
        # A step is made of whole slots of the ring that will be read.
        slot_s = max(s for s, _ in RESOLUTIONS if s <= step)
        step = ceil(step / slot_s) * slot_s
        start = int(from_s) // step * step
        return cls(start, step, max(1, int(to_s) // step - start // step + 1))

    @property
    def ring(self) -> int:
        """Index in `RESOLUTIONS` of the ring that the grid is read from."""
        return max(
            i for i, (slot_s, _) in enumerate(RESOLUTIONS) if self.step_s % slot_s == 0 and slot_s <= self.step_s
        )

    def means(self, times_s: AnyArray, values: AnyArray) -> list[float | None]:
        """Return the mean of the finite values in each step; None for a step without one."""
        slots = times_s.astype(np.int64) // self.step_s - self.start_s // self.step_s
        inside = (slots >= 0) & (slots < self.count) & np.isfinite(values)
        counts = np.bincount(slots[inside], minlength=self.count)
        sums = np.bincount(slots[inside], values[inside], self.count)
        return [s / n if n else None for s, n in zip(sums.tolist(), counts.tolist(), strict=True)]


class Rings:
    """All time series, by metric and labels."""

    def __init__(self, series_max: int = limits.STATUS_SERIES_MAX) -> None:
        self._series: dict[tuple[str, Labels], _Series] = {}
        """Least recently written first."""
        self._max = series_max

    @property
    def crowded(self) -> bool:
        """Whether more than three quarters of the bound are used, so that idle models should not be recorded."""
        return len(self._series) > self._max * 3 // 4

    def add(self, metric: str, labels: Labels, unix_s: float, value: float | None) -> None:
        """Add a value; None and non-finite ones are ignored.

        At the bound, a new series evicts the least recently written one, or is dropped if that one is fresh.
        """
        if value is None or not isfinite(value):
            return
        key = metric, labels
        series = self._series.pop(key, None)
        if series is None:
            if len(self._series) >= self._max:
                oldest = next(iter(self._series))
                if self._series[oldest].written_s > unix_s - FRESH_S:
                    return
                del self._series[oldest]
            series = _Series()
        self._series[key] = series
        series.add(unix_s, value)

    def read(self, metric: str, only: Mapping[str, str], grid: Grid) -> Iterator[tuple[Labels, list[float | None]]]:
        """Yield (labels, values) of each series of the metric that has the labels `only`, in the order of labels.

        Values may be added between one and the next.
        """
        slot_s, _ = RESOLUTIONS[grid.ring]
        slots = grid.count * grid.step_s // slot_s
        times = np.arange(slots) * slot_s + grid.start_s
        found = [(k[1], s) for k, s in self._series.items() if k[0] == metric and only.items() <= dict(k[1]).items()]
        for labels, series in sorted(found, key=lambda f: f[0]):
            yield labels, grid.means(times, series.rings[grid.ring].read(grid.start_s // slot_s, slots))
