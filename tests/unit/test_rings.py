"""Rings: bounded series of samples at several resolutions."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver import limits
from paramserver_scheduler.rings import FRESH_S, RESOLUTIONS, Grid, Labels, Ring, Rings

NOW = 1_700_000_000


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(-1e6, 1e6)), max_size=60), st.integers(1, 7))
def test_a_ring_keeps_the_mean_of_each_step(points: list[tuple[int, float]], step: int) -> None:
    """A ring holds the mean of each of its newest steps, as a plain dictionary computes it, and NaN elsewhere."""
    ring, size = Ring(step, 10), 10
    kept: dict[int, list[float]] = {}
    for at, value in sorted(points, key=lambda p: p[0]):
        ring.add(NOW + at, value)
        kept.setdefault((NOW + at) // step, []).append(value)
    newest = max(kept, default=0)

    for slot in range(NOW // step - 2, (NOW + 310) // step):
        found = ring.read(slot, 1)[0]
        if slot in kept and slot > newest - size:
            assert found == pytest.approx(np.mean(kept[slot]))
        else:
            assert math.isnan(found)


def test_a_late_value_is_left_out() -> None:
    """A value older than the newest one, as from a clock that was set back, is left out."""
    ring = Ring(1, 10)
    ring.add(NOW, 5.0)
    ring.add(NOW - 3, 9.0)

    assert ring.read(NOW, 1).tolist() == [5.0]
    assert math.isnan(ring.read(NOW - 3, 1)[0])


def test_a_series_that_begins_costs_one_value() -> None:
    """The first value of a ring writes one slot, not all: a cluster that begins has thousands of rings."""
    written: list[int] = []

    class Watched(list[float]):
        def __setitem__(self, slot: Any, value: Any) -> None:
            written.append(slot)
            super().__setitem__(slot, value)

    ring = Ring(1, 1000)
    ring._values = Watched([0.0] * 1000)  # type: ignore[assignment]
    ring.add(NOW, 1.0)

    assert written == [NOW % 1000]


def read(rings: Rings, metric: str, only: dict[str, str], grid: Grid) -> list[tuple[Labels, list[float | None]]]:
    """Return the series that have a value in the grid."""
    return [(labels, values) for labels, values in rings.read(metric, only, grid) if set(values) != {None}]


def test_a_span_is_answered_from_the_ring_that_reaches_so_far() -> None:
    """A span is answered from the finest ring that reaches back far enough, with a bounded number of points.

    The steps are a second for minutes, 10 s for hours and a minute for a day.
    """
    rings = Rings()
    for second in range(0, 7200):
        rings.add("m", (), NOW - 7199 + second, float(second))

    for span_s, step_s, expected in ((300, 1, 1), (900, 3, 3), (3600, 1, 10), (3600, 30, 30), (80_000, 60, 60)):
        grid = Grid.of(NOW - span_s, NOW, step_s, NOW)
        ((_, values),) = read(rings, "m", {}, grid)
        assert grid.step_s == expected
        assert len(values) == grid.count == NOW // expected - (NOW - span_s) // expected + 1
        assert grid.count <= limits.STATUS_POINTS_MAX + 1
        known = [v for v in values if v is not None]
        assert known == sorted(known)
        assert known[-1] == pytest.approx(7199, abs=expected)
    huge = Grid.of(NOW - limits.STATUS_SPAN_S_MAX, NOW, 1, NOW)
    assert huge.count == pytest.approx(limits.STATUS_POINTS_MAX, rel=0.1)
    assert huge.step_s % RESOLUTIONS[-1][0] == 0


def test_series_are_bounded_and_the_oldest_goes_first() -> None:
    """A new series replaces the least recently written one, but never one that is still being written."""
    rings, grid = Rings(series_max=2), Grid.of(NOW - 800, NOW, 1, NOW)
    rings.add("old", (), NOW - 700, 1.0)
    rings.add("new", (), NOW - 1, 1.0)
    rings.add("third", (), NOW, 1.0)
    rings.add("fourth", (), NOW, 1.0)

    assert read(rings, "old", {}, grid) == []
    assert len(read(rings, "third", {}, grid)) == 1
    assert read(rings, "fourth", {}, grid) == []
    rings.add("fourth", (), NOW + FRESH_S, 1.0)
    assert len(read(rings, "fourth", {}, Grid.of(NOW, NOW + 90, 1, NOW + 90))) == 1


def test_only_finite_values_are_kept_and_labels_choose() -> None:
    """NaN, infinity and None are not kept, and a query by label leaves out series without that label."""
    rings, grid = Rings(), Grid.of(NOW - 10, NOW, 1, NOW)
    for value in (math.nan, math.inf, None):
        rings.add("m", (("model", "a"),), NOW, value)
    assert read(rings, "m", {}, grid) == []
    rings.add("m", (("model", "a"),), NOW, 1.0)
    rings.add("m", (("model", "b"),), NOW, 2.0)

    assert [labels for labels, _ in read(rings, "m", {"model": "b"}, grid)] == [(("model", "b"),)]
    assert read(rings, "m", {"node": "b"}, grid) == []
