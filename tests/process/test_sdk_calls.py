"""Random calls of a worker, in every form of push and pull, against the same sums in NumPy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paramserver as ps
from paramserver.types import AnyArray

from .cluster import cluster

pytestmark = [pytest.mark.process, pytest.mark.slow]

SHAPES: dict[str, tuple[int, ...]] = {"a": (300, 900), "b": (700_001,), "c": (), "d": (5,), "e/f.g": (3, 4, 2)}
CALLS = 150
EXACT = ("fp32+zstd", "fp32+lz4", "fp16+zstd", "bf16+lz4")
"""Codecs that lose nothing of small whole numbers."""


class Sums:
    """A worker of a model that adds up what is pushed, and what the values have to be."""

    def __init__(self, worker: ps.Worker, model: ps.Model, seed: int) -> None:
        self.worker, self.model, self.random = worker, model, np.random.default_rng(seed)
        self.expected: dict[str, AnyArray] = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        self.held: ps.Params | None = None

    def check(self, found: ps.Params) -> None:
        """Assert that these are the values, to the last bit."""
        for name, values in self.expected.items():
            assert np.array_equal(found[name], values), name

    def numbers(self, *shape: int) -> Any:
        """Return whole numbers that every wire dtype holds, too varied to be packed into little."""
        return self.random.integers(-100, 101, shape).astype(np.float32)

    def gradient(self, *names: str) -> dict[str, Any]:
        """Return a gradient for these parameters (default: all), and expect it to be pushed."""
        made = {name: self.numbers(*SHAPES[name]) for name in names or SHAPES}
        for name, values in made.items():
            self.expected[name] = self.expected[name] + values
        return made

    # --- calls, one of which `call` chooses ---

    def push(self) -> None:
        self.worker.push(self.gradient(), dtype=self.random.choice(["float32", "float16", "bfloat16"]))

    def push_some(self) -> None:
        self.worker.push(self.gradient(*self.random.choice(list(SHAPES), 2, replace=False)))

    def push_ranges(self) -> None:
        cuts = np.sort(self.random.choice(SHAPES["b"][0], 8, replace=False)).tolist()
        ranges = list(zip(cuts[::2], cuts[1::2], strict=True))
        parts = [self.numbers(stop - start) for start, stop in ranges]
        self.expected["b"] = self.expected["b"].copy()
        for (start, stop), part in zip(ranges, parts, strict=True):
            self.expected["b"][start:stop] += part
        self.worker.push({"b": np.concatenate(parts)}, ranges={"b": ranges})

    def push_encoded(self) -> None:
        self.worker.push(self.gradient(), codec=str(self.random.choice(EXACT)))

    def push_in_place(self) -> None:
        place = self.worker.gradients()
        for name, values in self.gradient().items():
            place[name][...] = values
        self.worker.push(place)

    def push_in_pieces(self) -> None:
        made = self.gradient()
        with self.worker.stream() as pieces:
            for name in self.random.permutation(list(made)):
                pieces.put(str(name), made[str(name)])

    def pushpull(self) -> None:
        self.check(self.worker.pushpull(self.gradient()))

    def assign(self) -> None:
        name = str(self.random.choice(list(SHAPES)))
        self.expected[name] = np.asarray(self.numbers(*SHAPES[name]))
        self.model.assign({name: self.expected[name]})

    def pull(self) -> None:
        self.held = self.worker.pull(out=self.held)
        self.check(self.held)

    def pull_mapped(self) -> None:
        self.check(self.model.pull(copy=False))

    def pull_range(self) -> None:
        start, stop = np.sort(self.random.choice(SHAPES["b"][0], 2, replace=False)).tolist()
        assert np.array_equal(self.worker.pull(ranges={"b": [(start, stop)]})["b"], self.expected["b"][start:stop])

    def call(self) -> None:
        """Make one of the calls above."""
        calls: list[Callable[[], None]] = [
            self.push, self.push_some, self.push_ranges, self.push_encoded, self.push_in_place, self.push_in_pieces,
            self.pushpull, self.assign, self.pull, self.pull_mapped, self.pull_range,
        ]  # fmt: skip
        calls[self.random.integers(len(calls))]()


@pytest.mark.parametrize("memory", ["/dev/shm", ""], ids=["shared memory", "none"])
def test_whatever_is_called_the_values_are_the_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    """Each pull has to the last bit what was pushed and assigned; with a journal also after the death of a shard."""
    monkeypatch.setenv("PARAMSERVER_SHARED_MEMORY", memory)
    with cluster(tmp_path / "cluster") as running, ps.connect(running.url) as client:
        before = running.present()["pids"]["shards"]
        for ack in ("applied", "journaled"):
            model = client.create_model(ack, SHAPES, optimizer=ps.Sum(), ack=ack, partitions=7)
            with model.worker() as worker:
                sums = Sums(worker, model, seed=1)
                for i in range(CALLS):
                    if ack == "journaled" and i == CALLS // 2:
                        assert running.present()["pids"]["shards"] == before, "a shard has died by itself"
                        running.kill("shards")
                    sums.call()
                sums.pull()
