"""Rows of tables by number, without I/O: what a pull returns, what a push sends, and what is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refused_with

from paramserver.client import transfer
from paramserver.client.arrays import Params
from paramserver.client.cluster import Cluster
from paramserver.client.encoding import Encoding
from paramserver.client.gradients import prepare
from paramserver.client.shared_arrays import SharedArrays
from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
from paramserver.net.calls import Deadline
from paramserver.types import AnyArray

from .sharding import Now, Shards, drive, terms

F = np.float32
TABLE = np.arange(50, dtype=F).reshape(10, 5)
"""The values of `w`; those of `b` follow."""


def pulled(shards: Shards, now: Now, cluster: Cluster, **options: Any) -> Params:
    return drive(transfer.pull(cluster, "m", Deadline.after(30, now), **options), shards, now)


def pushed(shards: Shards, now: Now, cluster: Cluster, grads: Any, **how: Any) -> AnyArray:
    """Push, and return by how much each element has changed."""
    before = shards.flat.copy()
    encoding = Encoding().of_call(**how)
    drive(transfer.push(cluster, "m", Deadline.after(30, now), grads, terms(), encoding=encoding), shards, now)
    return shards.flat - before


@pytest.mark.parametrize("ids", [[3], [0, 1, 2], [7, 2, 7, 9, 2], list(range(10)), [9, 0], range(2, 9, 3)])
def test_a_pull_of_rows_returns_them_in_the_order_asked(shards: Shards, now: Now, cluster: Cluster, ids: Any) -> None:
    """A pull of rows has each of them where it was asked for, repeated ones too, and sends each once."""
    p = pulled(shards, now, cluster, rows={"w": ids})

    assert list(p) == ["w"]
    assert p["w"].tolist() == TABLE[list(ids)].tolist()
    assert p.flat.tolist() == p["w"].ravel().tolist()
    assert np.shares_memory(p["w"], p.flat)
    assert p["w"].flags.writeable
    asked = [r for f in shards.pulls for _, ranges in f.parts if ranges is not None for r in ranges.tolist()]
    if len(set(ids)) < 10:
        assert sum(b - a for a, b in asked) == 5 * len(set(ids))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int64])
def test_rows_are_beside_names_and_ranges(shards: Shards, now: Now, cluster: Cluster, dtype: Any) -> None:
    """What `names` and `ranges` name is pulled with the rows, in the model's order; the ids are any integers."""
    ids = np.array([4, 4, 1], dtype)
    p = pulled(shards, now, cluster, rows={"w": ids}, ranges={"b": [(2, 4)]})
    q = pulled(shards, now, cluster, rows={"w": ids}, names="b", dtype="bfloat16")

    assert {n: a.tolist() for n, a in p.items()} == {"w": TABLE[[4, 4, 1]].tolist(), "b": [52.0, 53.0]}
    assert {n: a.shape for n, a in q.items()} == {"w": (3, 5), "b": (14,)}
    assert q["w"].tolist() == TABLE[[4, 4, 1]].tolist()
    assert p.version == 0


def test_a_batch_may_have_no_rows(shards: Shards, now: Now, cluster: Cluster) -> None:
    """No rows of one table, or of any, are arrays without rows; a push of none at all is refused, as one of nothing."""
    p = pulled(shards, now, cluster, rows={"w": []})
    q = pulled(shards, now, cluster, rows={"w": np.empty(0, int), "b": [13, 0]})
    r = pulled(shards, now, cluster, rows={"w": []}, names="b")

    assert (p["w"].shape, p.flat.size, p.version) == ((0, 5), 0, 0)
    assert (q["w"].shape, q["b"].tolist()) == ((0, 5), [63.0, 50.0])
    assert (r["w"].shape, r["b"].shape) == ((0, 5), (14,))
    change = pushed(shards, now, cluster, {"w": np.empty((0, 5)), "b": [1.0]}, rows={"w": [], "b": [2]})
    assert np.flatnonzero(change).tolist() == [52]
    for how, shape in (("rows", (0, 5)), ("ranges", (0,))):
        with refused_with("empty_push", match=r"clock\(\) ends an iteration"):
            pushed(shards, now, cluster, {"w": np.empty(shape)}, **{how: {"w": []}})


def test_a_push_adds_up_the_gradients_of_a_row_in_their_order(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A row that is named more than once gets the float32 sum in the order given; the others are moved to theirs."""
    ids, g = [6, 2, 6, 6, 9], np.ones((5, 5), F)
    g[:, 0] = [1e8, 5.0, 1.0, -1e8, 7.0]  # in float32, 1e8 + 1 - 1e8 is 0

    change = pushed(shards, now, cluster, {"w": g}, rows={"w": ids})[:50].reshape(10, 5)

    assert change[6].tolist() == [0.0, 3.0, 3.0, 3.0, 3.0]
    assert change[2].tolist() == [5.0, 1.0, 1.0, 1.0, 1.0]
    assert change[9].tolist() == [7.0, 1.0, 1.0, 1.0, 1.0]
    assert not change[[0, 1, 3, 4, 5, 7, 8]].any()
    assert (
        sum(b - a for f in shards.pushes for p in f.parts if p.ranges is not None for a, b in p.ranges.tolist()) == 15
    )


LAYOUT = Layout(ModelSpec.parse({"name": "m", "params": {"b": {"shape": [3]}, "t": {"shape": [20, 2, 3]}}}))


@given(
    st.lists(st.integers(0, 19), min_size=1, max_size=40), st.integers(0, 99), st.sampled_from([F, np.float16, float])
)
def test_rows_of_any_order_are_what_numpy_adds_up(ids: list[int], seed: int, dtype: Any) -> None:
    """The elements sent are those of a table to which NumPy adds each row in turn, in the dtype of a whole gradient."""
    g = np.random.default_rng(seed).standard_normal((len(ids), 2, 3)).astype(dtype)
    table = np.full((20, 2, 3), -0.0, F)
    for i, row in zip(ids, g, strict=True):
        table[i] = table[i] + row.astype(F)

    made = prepare(LAYOUT, {"t": g}, rows={"t": ids})

    repeated = len(set(ids)) < len(ids)
    assert made.dtype == ("float16" if dtype is np.float16 and not repeated else "float32")
    assert np.concatenate(made.sources).astype(F).tobytes() == table[sorted(set(ids))].tobytes()


@pytest.mark.parametrize(
    ("rows", "code", "said"),
    [
        ({"w": [10]}, "invalid_range", "10 is not one of its 10 rows"),
        ({"w": [3, -1]}, "invalid_range", "-1 is not one of its 10 rows"),
        ({"w": [1.0]}, "invalid_range", "rows of 'w' must be integers, not float64"),
        ({"w": [True]}, "invalid_range", "must be integers, not bool"),
        ({"w": 3}, "invalid_range", r"rows of 'w' have shape \[\], not one dimension"),
        ({"w": [[1, 2]]}, "invalid_range", r"rows of 'w' have shape \[1, 2\]"),
        ([1, 2], "invalid_range", "rows must be row numbers by parameter name"),
        ({"v": [1]}, "unknown_parameter", "no parameter 'v'"),
    ],
)
def test_rows_that_the_model_lacks_are_refused(
    shards: Shards, now: Now, cluster: Cluster, rows: Any, code: str, said: str
) -> None:
    """Negative numbers and ones beyond the last row, fractions and matrices of them are refused by what they are."""
    with refused_with(code, match=said):
        pulled(shards, now, cluster, rows=rows)
    grads = {"v" if code == "unknown_parameter" else "w": np.ones((1, 5))}
    with refused_with(code, match=said):
        pushed(shards, now, cluster, grads, rows=rows)
    assert not shards.pulls
    assert not shards.pushes


@pytest.mark.parametrize(
    ("grads", "how", "code", "said"),
    [
        ({"w": np.ones(10)}, {"rows": {"w": [1, 2]}}, "invalid_shape", r"has shape \[10\], and 2 rows of it \[2, 5\]"),
        ({"w": np.ones((2, 5))}, {"ranges": {"w": [(0, 10)]}}, "invalid_shape", r"\[2, 5\], its ranges are \[10\]"),
        ({"b": np.ones(14)}, {"rows": {"w": [1]}}, "invalid_range", "rows name 'w', which has no array"),
        ({"w": np.ones((1, 5))}, {"rows": {"w": [1]}, "ranges": {"w": [(0, 5)]}}, "invalid_range", "in ranges= and in"),
        (np.ones(64), {"rows": {"w": [1]}}, "invalid_range", "need gradients by parameter name"),
    ],
)
def test_gradients_that_are_not_of_their_rows_are_refused(
    shards: Shards, now: Now, cluster: Cluster, grads: Any, how: Any, code: str, said: str
) -> None:
    """A gradient in another shape than its rows or ranges, or without them, is refused by what it should be."""
    with refused_with(code, match=said):
        pushed(shards, now, cluster, grads, **how)
    assert shards.pushes == []


def test_a_number_has_no_rows() -> None:
    """A parameter of no dimensions has no rows."""
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"a": {"shape": []}}}))
    with refused_with("invalid_range", match="single number"):
        prepare(layout, {"a": np.ones(1)}, rows={"a": [0]})


def test_rows_go_into_arrays_of_their_own(shards: Shards, now: Now, cluster: Cluster) -> None:
    """`out` is refused with rows; and rows pulled once are not where ranges of as many elements can go."""
    p = pulled(shards, now, cluster, rows={"w": [1, 2]})
    with refused_with("invalid_field", match="out= and rows="):
        pulled(shards, now, cluster, rows={"w": [1, 2]}, out=p)
    with refused_with("invalid_shape", match="cannot take"):
        pulled(shards, now, cluster, ranges={"w": [(5, 15)]}, out=p)


def test_shared_arrays_of_rows_are_found_by_their_order(shards: Shards, now: Now, cluster: Cluster) -> None:
    """Read-only pulls of rows are kept by the rows asked for, in their order."""
    shared = SharedArrays(cluster)
    shards.versions = [1] * 4

    def pull(ids: list[int]) -> Params:
        call = shared.pull("m", Deadline.after(30, now), rows={"w": ids}, min_version=1)
        return drive(call, shards, now)

    p = pull([4, 1])
    assert pull([4, 1]) is p
    assert pull([1, 4])["w"].tolist() == p["w"][::-1].tolist()
    assert not p["w"].flags.writeable
