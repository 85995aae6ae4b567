"""Conversion between partitions and named arrays, for any partitioning."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refused_with

from paramserver.core.assembly import gather, scatter, versions
from paramserver.core.layout import Layout
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.core.partition_state import PartitionState
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError


def _layout(shapes: list[list[int]], partitions: int) -> Layout:
    params = {f"p{i}": {"shape": s} for i, s in enumerate(shapes)}
    return Layout(
        ModelSpec.parse({"name": "m", "params": params, "partitions": partitions, "optimizer": {"name": "adam"}})
    )


shapes = st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=5)


@given(shapes, st.data())
def test_other_partition_counts_hold_the_same(shapes: list[list[int]], data: st.DataObject) -> None:
    """Values, optimizer state and step counts survive a restore into another number of partitions."""
    size = sum(int(np.prod(s)) for s in shapes)
    first = _layout(shapes, data.draw(st.integers(1, size)))
    second = _layout(shapes, data.draw(st.integers(1, size)))
    rng = np.random.default_rng(size)
    params = {p.name: rng.random(p.shape, dtype=np.float32) for p in first.spec.params}
    slots = {n: [v + 1, v + 2] for n, v in params.items()}
    steps = {n: i + 1 for i, n in enumerate(params)}

    def through(layout: Layout, params: dict[str, Any], slots: dict[str, list[Any]], steps: dict[str, int]) -> Any:
        own = dict(params), {n: list(arrays) for n, arrays in slots.items()}  # `scatter` empties them
        return gather(layout, scatter(layout, *own, steps, first.spec.optimizer))

    once = through(first, params, slots, steps)
    twice = through(second, *once)

    for got in (once, twice):
        assert got[2] == steps
        for name, value in params.items():
            np.testing.assert_array_equal(got[0][name], value)
            np.testing.assert_array_equal(got[1][name], slots[name])


@pytest.mark.parametrize("counts", [(1, 7, 4), (7, 1, 4), (1, 4, 7)])
def test_of_different_step_counts_of_a_parameter_the_highest_counts(counts: tuple[int, ...]) -> None:
    """Pushes of ranges give the partitions of one parameter different step counts: a restore gives the highest to all.

    Another parameter in the last of these partitions keeps its own.
    """
    layout, other = _layout([[5], [1]], 3), _layout([[5], [1]], 2)
    two = np.ones(2, np.float32)
    held = [PartitionState(two, (two, two), (n,)) for n in counts]
    held[2] = PartitionState(two, (two, two), (counts[2], 9))

    params, slots, steps = gather(layout, held)
    restored = scatter(other, params, slots, steps, layout.spec.optimizer)

    assert steps == {"p0": 7, "p1": 9}
    assert [s.steps for s in restored] == [(7,), (7, 9)]


def test_a_schedule_goes_on_where_it_was() -> None:
    """Restored partitions keep their versions if bounds and parameters are the same, else all get the highest.

    In sync they get one less than the highest, because the first commit of the new phase adds one.
    """
    two, three = _layout([[8]], 2), _layout([[8]], 3)
    sync = Layout(two.spec.patched({"consistency": {"mode": "sync"}}))

    assert versions(two, _layout([[8]], 2), [3, 5]) == [3, 5]
    assert versions(two, _layout([[2], [6]], 2), [3, 5]) == [5, 5]
    assert versions(three, two, [3, 5]) == [5, 5, 5]
    assert versions(sync, two, [3, 5]) == [4, 4]
    assert versions(sync, two, [0, 0]) == [0, 0]
    assert versions(two, two, []) == [0, 0]


@pytest.mark.parametrize("source", ["momentum", "adam"])
def test_named_arrays_are_given_up_as_they_are_copied(source: str) -> None:
    """No named array is left once the partitions are made, so that a restored model is in memory once."""
    params = {"p0": np.ones(4, np.float32)}
    slots = {"p0": [np.ones(4, np.float32)]}

    scatter(_layout([[4]], 2), params, slots, {"p0": 9}, OptimizerSpec(source))

    assert (params, slots) == ({}, {})


@pytest.mark.parametrize(("source", "arrays"), [("momentum", 1), ("adam", 1), ("ftrl", 2)])
def test_another_optimizer_starts_afresh(source: str, arrays: int) -> None:
    """Optimizer state that is not what the model's optimizer keeps is dropped, with its step counts."""
    layout, one = _layout([[4]], 2), np.ones(4, np.float32)

    states = scatter(layout, {"p0": one}, {"p0": [one] * arrays}, {"p0": 9}, OptimizerSpec(source))

    for state in states:
        assert [s.tolist() for s in state.slots] == [[0.0, 0.0], [0.0, 0.0]]
    assert [s.steps for s in states] == [(0,), (0,)]


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({}, "unknown_parameter"),
        ({"p0": np.ones(3, np.float32)}, "invalid_shape"),
        ({"p0": np.ones(4, np.float32), "x": np.ones(1, np.float32)}, "unknown_parameter"),
    ],
)
def test_arrays_of_another_model_are_refused(params: dict[str, np.ndarray], code: str) -> None:
    """Arrays whose names or shapes are not those of the model are refused."""
    with refused_with(code):
        scatter(_layout([[4]], 1), params, {}, {}, OptimizerSpec("adam"))


def test_a_changing_optimizer_is_noticed() -> None:
    """Partitions with different numbers of optimizer arrays cannot be combined in one checkpoint."""
    layout = _layout([[2]], 2)
    one = np.ones(1, np.float32)

    with pytest.raises(PsError, match="try again"):
        gather(layout, [PartitionState(one, (one,), (1,)), PartitionState(one, (), (1,))])
