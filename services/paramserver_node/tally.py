"""Prometheus counters and histograms for use by one thread.

Those of `prometheus_client` are thread-safe, which takes a lock for every update; a small request makes eight of them.
These are only for the event loop's thread, and cost a dictionary lookup and an addition.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, Generic, TypeVar

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

S = TypeVar("S")


class _Family(Collector, Generic[S]):
    """One metric: a series for each set of label values."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str]) -> None:
        self.name: Final = name
        self.documentation: Final = documentation
        self._labels = tuple(labels)
        self._series: dict[tuple[str, ...], S] = {}
        REGISTRY.register(self)

    def _made(self) -> S:
        raise NotImplementedError

    def labels(self, *values: str) -> S:
        """Return the series of these label values, in the order of the names; raises ValueError for a wrong number."""
        found = self._series.get(values)
        if found is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self.name} has the labels {self._labels}, not {values}")
            found = self._series[values] = self._made()
        return found

    def remove(self, *values: str) -> None:
        """Remove the series of these label values, if there is one."""
        self._series.pop(values, None)


class Count:
    """One count."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0

    def inc(self, amount: int = 1) -> None:
        """Add `amount`."""
        self.total += amount


class Counter(_Family[Count]):
    """A metric of counts that only rise; `name` ends in `_total`."""

    def _made(self) -> Count:
        return Count()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric for Prometheus."""
        family = CounterMetricFamily(self.name, self.documentation, labels=self._labels)
        for values, series in self._series.items():
            family.add_metric(values, series.total)
        yield family


class Spread:
    """One distribution: how many values are in each bucket, and their sum."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Add a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class Histogram(_Family[Spread]):
    """A metric of distributions over the same ascending bounds."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], *, buckets: Sequence[float]) -> None:
        self._bounds = tuple(buckets)
        super().__init__(name, documentation, labels)

    def _made(self) -> Spread:
        return Spread(self._bounds)

    def collect(self) -> Iterator[Metric]:
        """Yield the metric for Prometheus, with cumulative buckets."""
        family = HistogramMetricFamily(self.name, self.documentation, labels=self._labels)
        names = [*(f"{float(b)}" for b in self._bounds), "+Inf"]
        for values, series in self._series.items():
            below, buckets = 0, []
            for name, count in zip(names, series.counts, strict=True):
                below += count
                buckets.append((name, float(below)))
            family.add_metric(values, buckets, series.total)
        yield family
