"""What pushes make of a model on a real cluster, to the last bit, against the formulas written out in NumPy's float32.

A push covers random ranges of some parameters; what it leaves out must stay as it is: values, moments, step counts.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps
from paramserver.types import F32, AnyArray

from .cluster import get

pytestmark = pytest.mark.process

SIZES = {"a": 63, "scalar": 1, "c": 23}
SHAPES: dict[str, tuple[int, ...]] = {"a": (9, 7), "scalar": (), "c": (23,)}
STARTS = {"a": 0, "scalar": 63, "c": 64}
SIZE = 87
LR, DECAY, BETAS, EPS = 0.25, 0.125, (0.5, 0.75), 1e-8
f = np.float32


@dataclass
class Push:
    """A random push: what it says, and the same spread over the flat vector."""

    rng: np.random.Generator
    grads: dict[str, AnyArray] = field(default_factory=dict)
    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    flat: F32 = field(default_factory=lambda: np.zeros(SIZE, f))
    touched: AnyArray = field(default_factory=lambda: np.zeros(SIZE, bool))

    def __post_init__(self) -> None:
        self.weight = float(self.rng.choice([1.0, 0.5, 3.0, 1e-3]))
        for name in [n for n in SIZES if self.rng.integers(3)] or ["scalar"]:
            size, start, spans = SIZES[name], STARTS[name], [(0, SIZES[name])]
            if size > 1 and self.rng.integers(2):
                cuts = sorted(int(i) for i in self.rng.choice(size + 1, 4, replace=False))
                spans = self.ranges[name] = [(cuts[0], cuts[1]), (cuts[2], cuts[3])]
            at = np.concatenate([np.arange(start + a, start + b) for a, b in spans])
            values = (self.rng.standard_normal(at.size) * 10.0 ** self.rng.uniform(-3, 3)).astype(f)
            self.flat[at], self.touched[at] = values, True
            self.grads[name] = values if name in self.ranges else values.reshape(SHAPES[name])


def created(client: ps.Client, name: str, first: F32, **options: Any) -> ps.Model:
    values = {n: first[STARTS[n] : STARTS[n] + SIZES[n]].reshape(SHAPES[n]) for n in SIZES}
    return client.create_model(name, {n: ps.Param(v) for n, v in values.items()}, **options)


def push_json(url: str, body: dict[str, Any], key: str) -> bool:
    """Post a push; with its key it may be sent again where a machine that stood still leaves it in doubt."""
    answer = httpx.post(f"{url}/push", json=body, headers={"Idempotency-Key": key}, timeout=30)
    return answer.raise_for_status().is_success


@pytest.mark.parametrize("partitions", [1, 6])
def test_pushes_of_ranges_make_the_steps_of_adam(client: ps.Client, name: str, partitions: int) -> None:
    """Each push is the step of Adam (Kingma and Ba 2015) with weight decay, in JSON as well, where it has elements."""
    rng = np.random.default_rng(7)
    values, first, second = rng.standard_normal(SIZE).astype(f), np.zeros(SIZE, f), np.zeros(SIZE, f)
    optimizer = ps.Adam(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    model = created(client, name, values, optimizer=optimizer, partitions=partitions)
    bounds = get(f"{client.url}/models/{name}").json()["bounds"]
    cuts = sorted({*bounds, *STARTS.values(), SIZE})  # step counts are kept per parameter within a partition
    counts = np.zeros(SIZE, int)
    for i in range(40):
        push = Push(rng)
        if i % 2:
            model.push(push.grads, ranges=push.ranges, weight=push.weight)
        else:
            grads = {n: g.tolist() for n, g in push.grads.items()}
            body = {"model": name, "grads": grads, "ranges": push.ranges, "weight": push.weight}
            eventually(partial(push_json, client.url, body, key=f"{name}.{i}"))

        for start, stop in pairwise(cuts):
            counts[start:stop] += push.touched[start:stop].any()
        t = np.maximum(counts, 1)
        g = f(push.weight) * push.flat + f(DECAY) * values
        m = f(BETAS[0]) * first + f(1 - BETAS[0]) * g
        v = f(BETAS[1]) * second + f(1 - BETAS[1]) * (g * g)
        size, grow = (LR / (1 - BETAS[0] ** t)).astype(f), (1 / np.sqrt(1 - BETAS[1] ** t)).astype(f)
        new = values - size * (m / (np.sqrt(v) * grow + f(EPS)))
        values, first, second = (np.where(push.touched, *pair) for pair in ((new, values), (m, first), (v, second)))
        assert model.pull().flat.tobytes() == values.tobytes(), f"push {i}"


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_a_commit_is_the_mean_in_rank_order(client: ps.Client, name: str, workers: int) -> None:
    """A commit sums in order of ranks and pushes, whichever arrives first and however the model is partitioned."""
    rng = np.random.default_rng(workers)
    start = rng.standard_normal(SIZE).astype(f)
    script = [[[Push(rng) for _ in range(rng.integers(3))] for _ in range(workers)] for _ in range(4)]
    values, moment = start, np.zeros(SIZE, f)
    for clock in script:
        total, touched = np.zeros(SIZE, f), np.zeros(SIZE, bool)
        for push in [p for pushes in clock for p in pushes]:
            part = f(push.weight) * push.flat
            total = np.where(push.touched, np.where(touched, total + part, part), total)
            touched |= push.touched
        g = np.clip(total / f(workers), -f(0.5), f(0.5)) + f(DECAY) * values
        buffer = f(0.5) * moment + g
        values = np.where(touched, values - f(LR) * buffer, values)
        moment = np.where(touched, buffer, moment)

    optimizer = ps.Momentum(LR, momentum=0.5, weight_decay=DECAY, clip_value=0.5)
    for partitions in (1, 7):
        sync = ps.Sync(min_workers=workers)
        model = created(
            client, f"{name}.{partitions}", start, optimizer=optimizer, consistency=sync, partitions=partitions
        )

        def work(rank: int, model: ps.Model = model) -> None:
            with model.worker(rank=rank) as w:
                for clock in script:
                    for push in clock[rank]:
                        w.push(push.grads, ranges=push.ranges, weight=push.weight)
                    w.clock()

        with ThreadPoolExecutor(workers) as threads:
            list(threads.map(work, rng.permutation(workers).tolist()))
        assert model.pull(min_version=len(script), wait_s=30).flat.tobytes() == values.tobytes()
