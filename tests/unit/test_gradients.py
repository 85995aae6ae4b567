"""The pass that writes a gradient into a frame body, and the views that replace it."""

from typing import Any

import numpy as np
import pytest

from paramserver.client.gradients import Scan, prepare
from paramserver.client.values import values_of
from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec


@pytest.mark.parametrize("exact", [True, False])
def test_large_finite_gradients_are_not_taken_for_infinite(exact: bool) -> None:
    """Elements whose squares overflow float32 are accepted with their true norm; a NaN among them is reported."""
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4, 3]}}}))
    gradient = prepare(layout, {"w": np.full((4, 3), 1e30, np.float32)})
    scan, body = Scan(exact=exact), np.empty(48, np.uint8)
    gradient.write(gradient.selection.parts, body.data, scan)
    assert not scan.bad
    assert scan.norm == pytest.approx(1e30 * 12**0.5)
    bad = np.full((4, 3), 1e30, np.float32)
    bad[2, 1] = np.nan
    scan = Scan(exact=exact)
    gradient = prepare(layout, {"w": bad})
    gradient.write(gradient.selection.parts, body.data, scan)
    assert list(scan.bad) == ["w"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("source", [np.float32, np.float64])
def test_tiny_values_are_rounded_whatever_numpy_is_told(dtype: str, source: type[np.floating[Any]]) -> None:
    """Values too small for the type in which they are sent become zero, also after `np.seterr(all="raise")`."""
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}}))
    tiny = np.full(4, 1e-42, source)
    with np.errstate(all="raise"):
        gradient = prepare(layout, {"w": values_of("w", tiny)}, dtype=dtype)
        parts = gradient.selection.parts
        for scan in Scan(exact=True), Scan(exact=False):
            gradient.write(parts, memoryview(bytearray(gradient.body_bytes(parts))), scan)
            assert not scan.bad


def test_a_gradient_that_lies_as_it_travels_is_looked_at_and_left_there() -> None:
    """A large float32 gradient is sent as views of its arrays, with the bytes and the norm of a written body.

    There are no views if it must be converted, needs an exact norm, has infinities, or is small.
    """
    params = {name: {"shape": [size]} for name, size in (("a", 200_000), ("b", 7), ("c", 300_000))}
    layout = Layout(ModelSpec.parse({"name": "m", "params": params}))
    rng = np.random.default_rng(1)
    arrays = {name: rng.standard_normal(spec["shape"][0], np.float32) for name, spec in params.items()}
    gradient = prepare(layout, arrays)
    written, seen = Scan(exact=False), Scan(exact=False)
    for parts in (gradient.selection.parts, gradient.selection.parts[2:5]):
        body = np.empty(gradient.body_bytes(parts), np.uint8)
        gradient.write(parts, body.data, written)
        views = gradient.views(parts, seen)
        assert views is not None
        assert b"".join(views) == body.tobytes()
        assert len(views) <= 3
        assert all(any(np.shares_memory(np.frombuffer(v, np.uint8), a) for a in arrays.values()) for v in views)
        assert seen.norm == pytest.approx(written.norm, rel=1e-6)

    parts = gradient.selection.parts
    assert gradient.views(parts, Scan(exact=True)) is None
    assert prepare(layout, arrays, dtype="float16").views(parts, seen) is None
    assert prepare(layout, arrays | {"c": np.ones(300_000)}).views(parts, seen) is None
    arrays["c"][5] = np.inf
    assert prepare(layout, arrays).views(parts, seen) is None
    small = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [1000]}}}))
    gradient = prepare(small, np.ones(1000, np.float32))
    assert gradient.views(gradient.selection.parts, seen) is None
