"""The example network: its gradients are right, and it learns."""

from itertools import pairwise
from typing import Any

import numpy as np

from paramserver.core.spec import ModelSpec
from paramserver.examples import digits

Values = dict[str, Any]


def _values(hidden: tuple[int, ...]) -> Values:
    rng = np.random.default_rng(0)
    values: Values = {}
    for i, (fan_in, fan_out) in enumerate(pairwise((64, *hidden, 10))):
        values[f"layers.{i}.weight"] = rng.normal(0, np.sqrt(2 / fan_in), (fan_in, fan_out))
        values[f"layers.{i}.bias"] = np.zeros(fan_out)
    return values


def test_gradients_match_finite_differences() -> None:
    """Each parameter's gradient equals the slope of the loss, checked in float64 at a few elements."""
    p = _values((16, 12))
    rng = np.random.default_rng(1)
    x: Any = rng.random((8, 64))
    y = rng.integers(10, size=8)
    _, grads = digits.loss_and_grads(p, x, y)
    step = 1e-6
    for name, value in p.items():
        for at in rng.integers(value.size, size=4):
            losses = []
            for sign in (1, -1):
                moved = value.copy()
                moved.flat[at] += sign * step
                losses.append(digits.loss_and_grads({**p, name: moved}, x, y)[0])
            slope = (losses[0] - losses[1]) / (2 * step)
            assert abs(slope - grads[name].flat[at]) < 1e-6


def test_test_images_are_never_trained_on() -> None:
    """Training and test images are disjoint and 1,797 in all; a batch has the shape and dtype of images."""
    (train_x, train_y), (test_x, test_y) = digits.images("train"), digits.images("test")
    assert len(train_x) + len(test_x) == len(train_y) + len(test_y) == 1797
    assert not {x.tobytes() for x in train_x} & {x.tobytes() for x in test_x}
    x, y = digits.batch(np.random.default_rng(0), 32)
    assert (x.shape, x.dtype.name, y.shape) == ((32, 64), "float32", (32,))


def test_the_spec_is_one_a_server_takes() -> None:
    """The shipped spec can be parsed, and its names and shapes are those that the network uses."""
    spec = ModelSpec.parse({"name": "digits", "params": digits.spec()})
    assert {p.name: p.shape for p in spec.params} == {n: v.shape for n, v in _values(digits.HIDDEN).items()}


def test_it_learns() -> None:
    """A hundred SGD steps raise the accuracy on the test images from below 35 % to above 70 %."""
    p = {n: v.astype(np.float32) for n, v in _values((64,)).items()}
    rng = np.random.default_rng(0)
    before = digits.accuracy(p)
    for _ in range(100):
        _, grads = digits.loss_and_grads(p, *digits.batch(rng, 128))
        p = {n: v - np.float32(0.3) * grads[n] for n, v in p.items()}
    assert before < 0.35
    assert digits.accuracy(p) > 0.7
