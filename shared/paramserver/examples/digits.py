"""A NumPy network that learns scikit-learn's handwritten digits (1,797 real images of 8 by 8 pixels).

`psctl demo` and the pool workers run `train`.  The images of each batch are shifted at random and noise is added, so
that there is more to learn than the 1,437 training images and the learning curve has something to climb.  The other
360 images are the test set.
"""

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

import paramserver as ps
from paramserver.types import F32

TEST_IMAGES = 360
HIDDEN = (256, 128)
SHIFT_PIXELS = 1
NOISE_STD = 0.15
"""Pixels range from 0 to 1."""
PARTITIONS = 8
"""One would do for 200 KB; with more, they can be seen moving when shards join and leave."""

Values = Mapping[str, F32]


def spec(hidden: tuple[int, ...] = HIDDEN) -> dict[str, dict[str, Any]]:
    """Return the parameters: per layer i, `layers.I.weight` (in, out), drawn by the server, `layers.I.bias` (out,)."""
    sizes = (64, *hidden, 10)
    params: dict[str, dict[str, Any]] = {}
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        # Shapes are (in, out) here, but torch counts fans by (out, in, ...): the number of inputs is `fan_out`.
        init = {"kind": "kaiming_normal", "mode": "fan_out", "nonlinearity": "relu", "seed": i}
        params[f"layers.{i}.weight"] = {"shape": [fan_in, fan_out], "init": init}
        params[f"layers.{i}.bias"] = {"shape": [fan_out]}
    return params


@cache
def images(part: str) -> tuple[F32, Any]:
    """Return the images (n, 64), float32 in [0, 1], and the labels (n,) of `part`, which is "train" or "test"."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    chosen = order[:-TEST_IMAGES] if part == "train" else order[-TEST_IMAGES:]
    return (x[chosen] / 16.0).astype(np.float32), y[chosen]


def batch(rng: np.random.Generator, size: int) -> tuple[F32, Any]:
    """Return `size` training images (size, 64), each shifted by up to one pixel and noisy, and their labels."""
    x, y = images("train")
    chosen = rng.integers(len(x), size=size)
    padded = np.pad(x[chosen].reshape(size, 8, 8), ((0, 0), (SHIFT_PIXELS, SHIFT_PIXELS), (SHIFT_PIXELS, SHIFT_PIXELS)))
    row, column = rng.integers(2 * SHIFT_PIXELS + 1, size=(2, size, 1, 1))
    pixels = np.arange(8)
    shifted = padded[np.arange(size)[:, None, None], row + pixels[:, None], column + pixels]
    noise = rng.standard_normal((size, 64), dtype=np.float32) * np.float32(NOISE_STD)
    return shifted.reshape(size, 64) + noise, y[chosen]


def forward(p: Values, x: F32) -> list[F32]:
    """Return the input of each layer, then the logits (n, 10)."""
    layers = sum(name.endswith(".weight") for name in p)
    seen = [x]
    for i in range(layers):
        z = seen[-1] @ p[f"layers.{i}.weight"] + p[f"layers.{i}.bias"]
        seen.append(np.maximum(z, 0) if i + 1 < layers else z)
    return seen


def loss_and_grads(p: Values, x: F32, y: Any) -> tuple[float, dict[str, F32]]:
    """Return the mean cross-entropy of a batch, and its gradient by parameter."""
    *inputs, logits = forward(p, x)
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    rows = np.arange(len(y))
    delta = np.exp(log_p)
    delta[rows, y] -= 1
    delta /= len(y)
    grads: dict[str, F32] = {}
    for i in reversed(range(len(inputs))):
        grads[f"layers.{i}.weight"] = inputs[i].T @ delta
        grads[f"layers.{i}.bias"] = delta.sum(axis=0)
        if i:
            delta = (delta @ p[f"layers.{i}.weight"].T) * (inputs[i] > 0)
    return float(-log_p[rows, y].mean()), grads


def accuracy(p: Values) -> float:
    """Return the fraction of the test images that are classified correctly."""
    x, y = images("test")
    return float((forward(p, x)[-1].argmax(axis=1) == y).mean())


def train(worker: ps.Worker, batch_size: int = 64, seed: int = 0) -> None:
    """Train until the run is over; the entry point `paramserver.examples.digits:train`.

    A worker that replaces a dead one draws different batches, because the clock it starts at is part of the seed.
    """
    rng = np.random.default_rng((seed, worker.rank, worker.clock_number))
    params, lag = None, None
    while not worker.draining:
        params = worker.pull(out=params)
        loss, grads = loss_and_grads(params, *batch(rng, batch_size))
        done = worker.step(grads, loss=loss, lag=lag)
        # In async: the number of other pushes applied between this worker's pull and its push.
        lag = float(max(0, done.version - 1 - params.version)) if done.state == "applied" else None
        worker.evaluate(lambda p: {"accuracy": accuracy(p)})
