"""The workloads, the same for every system: a worker's rounds, their duration, and the expected result.

W1  dense: pull the whole float32 vector, touch both ends, push a whole gradient of ones; the server does w -= lr*g
W3  the same with 256 elements (1 KB)
W4  handwritten digits: an MLP 64-128-10 in NumPy, batch size 32, until 95 % of 360 test images are classified correctly

`async`: each worker works independently.  `sync`: each worker exchanges a gradient for the next version, w - lr*mean.
The learning rate of W1 and W3 is a power of two, so the final vector is known to the last bit.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.sharedctypes import Synchronized
from typing import Any, Literal, Protocol

import numpy as np

from paramserver.types import F32

Parts = Sequence[F32]
"""A vector, in one piece per server."""
EVALUATE_EVERY = 5
ENOUGH = 0.95
GIVE_UP_S = 60.0
"""Time limit of W4."""


@dataclass(frozen=True)
class Work:
    """The work of one cell of the tables."""

    kind: Literal["W1", "W3", "W4"]
    elements: int
    workers: int = 1
    servers: int = 1
    mode: Literal["async", "sync"] = "async"
    streams: int = 1
    """Concurrent requests of one worker (W3)."""

    @property
    def rate(self) -> float:
        """Learning rate."""
        return 0.02 if self.kind == "W4" else 2.0**-10

    @property
    def model_bytes(self) -> int:
        return 4 * self.elements

    def initial(self) -> F32:
        """Return the initial values."""
        return Digits.initial() if self.kind == "W4" else np.zeros(self.elements, np.float32)

    def bounds(self) -> list[tuple[int, int]]:
        """Return the elements [start, stop) of each server."""
        n, s = self.elements, self.servers
        return [(n * i // s, n * (i + 1) // s) for i in range(s)]

    def split(self, vector: F32) -> list[F32]:
        """Return a view of the vector for each server."""
        return [vector[start:stop] for start, stop in self.bounds()]


class Client(Protocol):
    """The interface that a worker uses; created in its process."""

    fused: bool
    """Whether a round is one `exchange` instead of a pull and a push."""
    pairs: int
    """Pulls and pushes per round; 1 unless the client has several streams."""

    def pull(self) -> Parts:
        """Return the current values."""

    def push(self, gradient: F32) -> None:
        """Push a gradient; return once the server says that it is applied."""

    def exchange(self, gradient: F32) -> Parts:
        """Push a gradient and return the values after it; in sync, those after the gradients of all workers."""

    def close(self) -> None: ...


class Digits:
    """The network of W4 on one flat vector; all systems use this code."""

    inputs, hidden, classes = 64, 128, 10
    size = inputs * hidden + hidden + hidden * classes + classes

    @staticmethod
    @cache
    def images() -> tuple[F32, Any, F32, Any]:
        """Return training images in [0, 1] with labels, then 360 test images with labels."""
        from paramserver.examples.digits import images

        return (*images("train"), *images("test"))

    @classmethod
    def initial(cls) -> F32:
        rng = np.random.default_rng(1)
        w1 = rng.normal(0, (2 / cls.inputs) ** 0.5, cls.inputs * cls.hidden)
        w2 = rng.normal(0, (2 / cls.hidden) ** 0.5, cls.hidden * cls.classes)
        return np.concatenate([w1, np.zeros(cls.hidden), w2, np.zeros(cls.classes)]).astype(np.float32)

    @classmethod
    def _layers(cls, v: F32) -> tuple[F32, F32, F32, F32]:
        w1, b1, w2, b2 = np.split(v, np.cumsum([cls.inputs * cls.hidden, cls.hidden, cls.hidden * cls.classes]))
        return w1.reshape(cls.inputs, cls.hidden), b1, w2.reshape(cls.hidden, cls.classes), b2

    @classmethod
    def accuracy(cls, v: F32) -> float:
        """Return the fraction of test images classified correctly."""
        w1, b1, w2, b2 = cls._layers(v)
        _, _, x, y = cls.images()
        return float(((np.maximum(x @ w1 + b1, 0) @ w2 + b2).argmax(axis=1) == y).mean())

    @classmethod
    def gradient(cls, v: F32, rng: np.random.Generator) -> F32:
        """Return the gradient of the mean cross-entropy of 32 random images."""
        w1, b1, w2, b2 = cls._layers(v)
        images, labels, _, _ = cls.images()
        chosen = rng.integers(len(images), size=32)
        x, y = images[chosen], labels[chosen]
        z = np.maximum(x @ w1 + b1, 0)
        logits = z @ w2 + b2
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        p /= len(y)
        dz = (p @ w2.T) * (z > 0)
        return np.concatenate([(x.T @ dz).ravel(), dz.sum(axis=0), (z.T @ p).ravel(), p.sum(axis=0)]).astype(np.float32)


@dataclass
class Window:
    """The results of one worker in one window."""

    rounds: int
    seconds: float
    round_s: list[float]
    accuracy: float = 0.0


class Rounds:
    """The loop of one worker.

    `stop` is shared by all workers: the round after which all of them leave together, 0 while undecided.
    """

    def __init__(self, work: Work, client: Client, rank: int, stop: "Synchronized[int]") -> None:
        self.work, self.client, self.rank, self._stop = work, client, rank, stop
        self.done = 0
        """Number of pushes so far."""
        self._ones = np.ones(work.elements, np.float32)
        self._zeros = np.zeros(work.elements, np.float32)
        self._rng = np.random.default_rng(7 + rank)
        self._values: F32 | None = None
        if work.kind == "W4":
            Digits.images()  # loading them takes seconds, which must not count in a window

    def run(self, seconds: float, *, warm: bool) -> Window:
        """Run rounds for `seconds`, or in W4 until the digits are learned; if `warm`, W4 pushes zeros for `seconds`."""
        learn = self.work.kind == "W4" and not warm
        took: list[float] = []
        rounds, accuracy = 0, 0.0
        self._values = None
        began = time.perf_counter()
        end = began + (GIVE_UP_S if learn else seconds)
        while True:
            at = time.perf_counter()
            self._round(learn)
            now = time.perf_counter()
            took.append(now - at)
            rounds += 1
            over = now >= end
            if learn and self.rank == 0 and rounds % EVALUATE_EVERY == 0:
                assert self._values is not None
                accuracy = Digits.accuracy(self._values)
                over = over or accuracy >= ENOUGH
            if self._leave(rounds, over, learn):
                break
        rounds *= self.client.pairs
        self.done += rounds
        return Window(rounds, time.perf_counter() - began, took, accuracy)

    def _leave(self, rounds: int, over: bool, learn: bool) -> bool:
        if self.work.mode == "sync":  # no worker can be more than one round ahead of rank 0
            if self.rank == 0 and over and not self._stop.value:
                self._stop.value = rounds + 2
            return 0 < self._stop.value <= rounds
        if not learn:
            return over
        if self.rank == 0 and over:
            self._stop.value = rounds
        return self._stop.value > 0

    def _round(self, learn: bool) -> None:
        client, mode = self.client, self.work.mode
        if self.work.kind != "W4":
            if mode == "sync" or client.fused:
                touch(client.exchange(self._ones))
            else:
                touch(client.pull())
                client.push(self._ones)
            return
        if mode == "async" or self._values is None:
            self._values = whole(client.pull())
        gradient = Digits.gradient(self._values, self._rng)
        if not learn:
            gradient = self._zeros
        if mode == "sync":
            self._values = whole(client.exchange(gradient))
        else:
            client.push(gradient)


def touch(parts: Parts) -> None:
    """Read both ends of each piece."""
    for p in parts:
        float(p[0]) + float(p[-1])


def whole(parts: Parts) -> F32:
    """Return the pieces as one vector."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def verdict(work: Work, values: Parts, pushes: int) -> str:
    """Return `exact` if every element shows that `pushes` gradients were applied, else what is wrong."""
    steps = pushes / work.workers if work.mode == "sync" else pushes
    want = np.float32(-work.rate * steps)
    vector = whole(values)
    wrong = int((vector != want).sum()) if vector.shape == (work.elements,) else work.elements
    if wrong == 0:
        return "exact"
    return f"WRONG: {wrong} of {work.elements} elements; the first is {vector[0]!s}, not {want!s}"
