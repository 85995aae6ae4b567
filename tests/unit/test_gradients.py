"""Gradients on their way out: what the one pass over them finds."""

import numpy as np
import pytest

from paramserver.client.gradients import Scan, prepare, write
from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec


@pytest.mark.parametrize("exact", [True, False])
def test_large_finite_gradients_are_not_taken_for_infinite(exact: bool) -> None:
    """Elements whose squares float32 cannot hold pass with their true norm; a single NaN among them is named."""
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4, 3]}}}))
    gradient = prepare(layout, {"w": np.full((4, 3), 1e30, np.float32)})
    scan, body = Scan(exact=exact), np.empty(48, np.uint8)
    write(gradient, gradient.selection.parts, body.data, scan)
    assert not scan.bad
    assert scan.norm == pytest.approx(1e30 * 12**0.5)
    bad = np.full((4, 3), 1e30, np.float32)
    bad[2, 1] = np.nan
    scan = Scan(exact=exact)
    gradient = prepare(layout, {"w": bad})
    write(gradient, gradient.selection.parts, body.data, scan)
    assert scan.bad == ["w"]
