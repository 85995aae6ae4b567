"""Updates of ranges, such as the rows of an embedding table: the arrays of ranges, their steps and their means."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.test_kernels import ALL, DTYPES, encoded, every_optimizer, state, vector

from paramserver import kernels
from paramserver.core import ranges as range_arrays
from paramserver.core.layout import Layout
from paramserver.core.optimizer import SegmentStep, slot_count
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.core.partition_state import HeldPart, PartitionState
from paramserver.core.ranges import RangeArray, of_pairs
from paramserver.core.selection import select
from paramserver.core.shard.update import UpdateInput, mean_task, single_task
from paramserver.core.spec import ModelSpec
from paramserver.errors import RequestError
from paramserver.testing.shard_driver import perform
from paramserver.types import F32, AnyArray, Coding, ModelKey, PartitionKey
from paramserver_shard.buffers import INLINE_BYTES_MAX, BufferPool
from paramserver_shard.computing import compute, task_elements
from paramserver_shard.exchange import slices

F = np.float32
WIDTH = 16
ROWS = 9000

some_ranges = st.sets(st.integers(0, 60), min_size=2, max_size=20).map(
    lambda cuts: of_pairs(list(zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False)))
)


def places(ranges: RangeArray) -> AnyArray:
    """Return the elements of the ranges, in order."""
    return np.concatenate([np.arange(a, b) for a, b in ranges.tolist()])


def rows(seed: int, count: int) -> RangeArray:
    """Return the ranges of that many random rows."""
    chosen = np.sort(np.random.default_rng(seed).choice(ROWS, count, replace=False))
    return of_pairs(np.column_stack((chosen, chosen + 1)) * WIDTH)


@given(st.lists(some_ranges, min_size=1, max_size=5))
def test_a_union_holds_the_elements_of_each(several: list[RangeArray]) -> None:
    """A union holds exactly the elements of any of the ranges; those that touch are one."""
    found = range_arrays.union(several)

    assert places(found).tolist() == sorted({p for ranges in several for p in places(ranges).tolist()})
    assert (found[1:, 0] > found[:-1, 1]).all()
    assert range_arrays.elements(found) == len(places(found))
    assert range_arrays.joined(several[0]).tolist() == range_arrays.union(several[:1]).tolist()


@given(some_ranges, st.sets(st.integers(1, 59), max_size=6))
def test_what_ranges_touch_is_told_for_each_segment(ranges: RangeArray, cuts: set[int]) -> None:
    """A segment is touched if one of its elements is in the ranges."""
    ends = [0, *sorted(cuts), 61]
    bounds = list(pairwise(ends))
    held = set(places(ranges).tolist())

    assert range_arrays.touched(ranges, bounds) == [bool(held & set(range(a, b))) for a, b in bounds]


@pytest.mark.parametrize(
    ("pairs", "wrong"),
    [
        ([(0, 3), (3, 4), (9, 12)], None),
        ([(0, 3), (2, 4)], 1),
        ([(5, 6), (2, 4)], 1),
        ([(0, 3), (3, 3)], 1),
        ([(-1, 3)], 0),
        ([], None),
    ],
)
def test_ranges_that_are_not_sorted_and_disjoint_are_found(pairs: list[tuple[int, int]], wrong: int | None) -> None:
    """The first range that is empty, out of order, overlapping or below zero is found."""
    assert range_arrays.first_wrong(of_pairs(pairs)) == wrong


@pytest.mark.parametrize(
    "bad",
    [
        5,
        [5],
        [(1, 2, 3)],
        [(0, 1.5)],
        np.zeros((2, 3), int),
        np.zeros((2, 2)),
        [(0, 1 << 63)],
        [(1 << 63, (1 << 64) - 1)],
    ],
)
def test_what_is_no_pair_of_integers_is_no_range(bad: Any) -> None:
    """Numbers, triples and fractions are no ranges."""
    with pytest.raises((TypeError, ValueError, OverflowError)):
        of_pairs(bad)


@pytest.mark.parametrize("partitions", [1, 3, 7])
def test_a_selection_of_ranges_has_their_elements_in_order(partitions: int) -> None:
    """However the model is cut, a selection's parts are its elements, in one piece for each parameter and partition."""
    params = {"a": {"shape": [40]}, "b": {"shape": [5]}, "c": {"shape": [60]}}
    layout = Layout(ModelSpec.parse({"name": "m", "params": params, "partitions": partitions}))

    found = select(layout, ["b"], {"a": [(0, 7), (7, 9), (20, 40)], "c": np.array([[3, 4], [8, 60]])})

    flat = [*range(9), *range(20, 40), *range(40, 45), 48, *range(53, 105)]
    got: list[int] = []
    for part in found.parts:
        base = layout.bounds[part.partition]
        own = of_pairs([(0, layout.partition_size(part.partition))]) if part.ranges is None else part.ranges
        got += (places(own) + base).tolist()
        assert (part.start, part.stop) == (len(got) - range_arrays.elements(own), len(got))
        assert (own[1:, 0] > own[:-1, 1]).all()
        assert len({piece.param for piece in part.pieces}) == len(part.pieces)
    assert got == flat
    assert found.shape(0) == (29,)


def test_ranges_that_adjoin_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a partition has too many ranges is told once those that touch are one."""
    monkeypatch.setattr("paramserver.limits.RANGES_PER_REQUEST_MAX", 2)
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"a": {"shape": [40]}}, "partitions": 1}))

    (part,) = select(layout, None, {"a": [(i, i + 1) for i in range(30)] + [(35, 36)]}).parts
    assert part.range_count == 2
    with pytest.raises(RequestError, match="3 ranges lie in partition 0") as e:
        select(layout, None, {"a": [(i, i + 1) for i in (0, 2, 4)]})
    assert e.value.code == "too_large"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nontemporal", [False, True])
@every_optimizer
def test_a_step_of_ranges_is_that_of_the_whole_on_their_elements(
    o: OptimizerSpec, dtype: str, nontemporal: bool
) -> None:
    """A step of ranges has the bytes of a step of everything on their elements, and leaves all others as they are."""
    ranges = of_pairs([(0, 1), (5, 90), (90, 96), (1500, 3601), (4000, 4016), (4032, 4048), (4999, 5000)])
    at = places(ranges)
    w, slots, g = vector(0), state(o), encoded(vector(1), dtype)
    steps = [
        SegmentStep(0, 60, 0.1, 0.01, 2, 2.0, 0.5),
        SegmentStep(60, 92, 0.2, active=False),
        SegmentStep(92, 2000, 0.1, 0.01, 2),
        SegmentStep(2000, 5000, 0.3),
    ]
    whole, some = ([np.full(5000, 7e7, F) for _ in range(1 + len(slots))] for _ in range(2))

    assert kernels.apply(o, steps, w, slots, g, dtype, whole[0], whole[1:])
    few = np.ascontiguousarray(g[at])
    assert kernels.apply(o, steps, w, slots, few, dtype, some[0], some[1:], ranges=ranges, nontemporal=nontemporal)

    for before, after, want in zip((w, *slots), some, whole, strict=True):
        expected = before.copy()
        expected[at] = want[at]
        assert after.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("pairs", "size"), [([(0, 4)], 3), ([(2, 9)], 7), ([(3, 4), (0, 2)], 3), ([(0, 0)], 0), ([], 0)]
)
def test_ranges_that_do_not_fit_raise(pairs: list[tuple[int, int]], size: int) -> None:
    """Ranges that are not those of the gradient, or not within the partition, raise ValueError before a write."""
    out, g = np.zeros(8, F), np.ones(size, F)
    with pytest.raises(ValueError, match="ranges"):
        kernels.apply(ALL[0], [SegmentStep(0, 8, 0.1)], out, (), g, "float32", out, (), ranges=of_pairs(pairs))
    touched = of_pairs([(0, 8)])
    with pytest.raises(ValueError, match="ranges"):
        kernels.mean([(g, "float32", 1.0, of_pairs(pairs))], 1.0, out, touched)
    with pytest.raises(ValueError, match="within those touched"):
        kernels.mean([(np.ones(2, F), "float32", 1.0, of_pairs([(3, 5)]))], 1.0, out[:6], of_pairs([(0, 4), (5, 7)]))
    assert not out.any()


def table(optimizer: dict[str, Any], **params: Any) -> UpdateInput:
    """Return one partition of a table, then of what else the model has."""
    spec = ModelSpec.parse(
        {"name": "m", "params": {"e": {"shape": [ROWS, WIDTH]}, **params}, "partitions": 1, "optimizer": optimizer}
    )
    slots = tuple(np.abs(vector(90 + i, spec.size)) for i in range(slot_count(spec.optimizer)))
    layout = Layout(spec)
    before = PartitionState(vector(9, spec.size), slots, (3,) * len(layout.segments[0]))
    return UpdateInput(PartitionKey(ModelKey("m", 1), 0), before, spec, layout.segments[0])


def held(seed: int, ranges: RangeArray | None, size: int, dtype: Coding = "float32") -> HeldPart:
    data = vector(seed, size)
    data[::7] = -0.0
    return HeldPart(f"w{seed}", 1, 0, seed, None, 1.0, ranges, encoded(data, dtype), dtype)


def as_float32(data: AnyArray, dtype: str) -> F32:
    return (data.astype(np.uint32) << 16).view(F) if dtype == "bfloat16" else data.astype(F)


def mean_in_order(parts: Sequence[tuple[HeldPart, float]], divisor: float, size: int) -> tuple[F32, AnyArray]:
    """Return the weighted mean, added up in NumPy in the order given, and which elements have one."""
    total, has = np.zeros(size, F), np.zeros(size, bool)
    for part, weight in parts:
        at = np.arange(size) if part.ranges is None else places(part.ranges)
        new = F(weight) * as_float32(part.data, part.dtype)
        total[at] = np.where(has[at], total[at] + new, new)
        has[at] = True
    return total / F(divisor), has


@pytest.mark.parametrize("optimizer", [{"name": "sgd", "lr": 0.5}, {"name": "adam", "weight_decay": 0.1}])
@pytest.mark.parametrize("whole", [None, 0, 40])
def test_a_mean_of_many_rows_is_the_sum_in_their_order(optimizer: dict[str, Any], whole: int | None) -> None:
    """The mean of 64 pushes of 4,000 rows has the bytes of a sum in their order, with or without a whole one."""
    inputs = table(optimizer, b={"shape": [5]})
    size, dtypes = inputs.size, ("float32", "bfloat16", "float16", "float64")
    parts: list[tuple[HeldPart, float]] = []
    for i in range(64):
        ranges = None if i == whole else rows(i, 4000)
        dtype: Any = dtypes[i % 4]
        parts.append((held(i, ranges, size if ranges is None else 4000 * WIDTH, dtype), 0.5 + i / 64))
    mean, has = mean_in_order(parts, 64.0, size)

    task = mean_task(inputs, parts, 64.0, 0.25)
    (result,) = compute([task], BufferPool())

    steps, counts = inputs.steps(inputs.touched([h.ranges for h, _ in parts]), 1.0, 0.25)
    assert counts == (4, 3 if whole is None else 4)
    new = [np.empty(size, F) for _ in range(1 + len(inputs.state.slots))]
    assert kernels.apply(
        inputs.spec.optimizer,
        steps,
        inputs.state.values,
        inputs.state.slots,
        np.where(has, mean, F(0.0)),
        "float32",
        new[0],
        new[1:],
    )
    assert result.state is not None
    for before, after, expected in zip(
        (inputs.state.values, *inputs.state.slots), (result.state.values, *result.state.slots), new, strict=True
    ):
        assert after.tobytes() == np.where(has, expected, before).tobytes()
    alike = perform(task).state
    assert alike is not None
    assert alike.values.tobytes() == result.state.values.tobytes()
    assert task_elements(task) == size + sum(h.data.size for h, _ in parts)


def test_the_mean_of_negative_zeros_is_one() -> None:
    """An element whose gradients are all -0.0 has the mean -0.0, as in a mean of whole partitions."""
    out = np.ones(4, F)
    parts = [(np.full(n, -0.0, F), "float32", 1.0, of_pairs([(2, 2 + n)])) for n in (4, 3)]

    kernels.mean(parts, 2.0, out, of_pairs([(2, 6)]))

    assert out.tobytes() == np.full(4, -0.0, F).tobytes()


def test_a_push_of_rows_names_its_ranges_once() -> None:
    """A task of one push hands on its ranges, and steps and counts only those parameters that it touches."""
    frozen = {"shape": [4], "trainable": False}
    inputs = table({"name": "adam"}, b={"shape": [5]}, f=frozen)
    ranges = rows(1, 4000)

    task = single_task(inputs, vector(0, 4000 * WIDTH), "float32", ranges, 1.0, 0.1, reuse_direct=True)

    assert task.ranges is ranges
    assert [(s.start, s.stop, s.active) for s in task.steps] == [
        (0, ROWS * WIDTH, True), (ROWS * WIDTH, ROWS * WIDTH + 5, False), (ROWS * WIDTH + 5, ROWS * WIDTH + 9, False),
    ]  # fmt: skip
    assert (task.counts, task.reuse_direct) == ((4, 3, 3), False)


def test_what_waits_is_counted_with_its_ranges() -> None:
    """A gradient that waits to be applied counts 16 bytes for each of its ranges, beside its elements."""
    assert held(1, rows(1, 100), 100 * WIDTH).nbytes == 100 * (WIDTH * 4 + 16)
    assert held(1, None, 100).nbytes == 400


@pytest.mark.parametrize("width", [1, 16, 50_000])
def test_the_elements_of_ranges_are_pulled_end_to_end(width: int) -> None:
    """Of many ranges a pull has the elements in one piece, of large ones views."""
    values = vector(0, 200 * width)
    ranges = of_pairs([(i * width, (i + 1) * width) for i in (0, 3, 4, 9, 150, 199)])

    found = slices(values, ranges)

    assert np.concatenate(found).tobytes() == values[places(ranges)].tobytes()
    assert (len(found) == 1) is (ranges.shape[0] * width * 4 <= INLINE_BYTES_MAX)
