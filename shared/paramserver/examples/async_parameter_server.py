"""Asynchronous training in one file: workers pull, compute and push without waiting for each other.

    python -m paramserver.examples.async_parameter_server --num-workers=4

Starts a private cluster; every worker is a process.
"""

import argparse
import multiprocessing

import numpy as np

import paramserver as ps
from paramserver.examples import digits
from paramserver.types import F32

LEARNING_RATE = 0.1
BATCH = 50


class ParameterServer:
    """A key-value store whose values any client can add to."""

    def __init__(self, client: ps.Client, keys: list[str], values: list[F32]) -> None:
        start = dict(zip(keys, values, strict=True))
        self.model = client.create_model("async-example", start, optimizer=ps.Sum(), exist_ok=True)

    def push(self, keys: list[str], values: list[F32]) -> None:
        """Add each value to the one under its key."""
        self.model.push(dict(zip(keys, values, strict=True)))

    def pull(self, keys: list[str]) -> list[F32]:
        """Return the current values, in the order of `keys`."""
        p = self.model.pull(keys)
        return [p[k] for k in keys]


def initial() -> tuple[list[str], list[F32]]:
    """Return the keys and initial values of a network with one hidden layer."""
    shapes = {name: spec["shape"] for name, spec in digits.spec(hidden=(64,)).items()}
    rng = np.random.default_rng(0)
    return list(shapes), [rng.normal(0, 0.15, shape).astype(np.float32) for shape in shapes.values()]


def work(url: str, index: int, iterations: int) -> None:
    """Run one worker."""
    keys, values = initial()
    server = ParameterServer(ps.connect(url), keys, values)
    rng = np.random.default_rng(index)
    for _ in range(iterations):
        weights = dict(zip(keys, server.pull(keys), strict=True))
        _, grads = digits.loss_and_grads(weights, *digits.batch(rng, BATCH))
        server.push(keys, [-np.float32(LEARNING_RATE) * grads[k] for k in keys])


def main() -> None:
    """Start a cluster and the workers, and print the accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=400, help="iterations per worker")
    args = parser.parse_args()
    with ps.local(shards=2) as client:
        keys, values = initial()
        server = ParameterServer(client, keys, values)
        spawn = multiprocessing.get_context("spawn")
        workers = [spawn.Process(target=work, args=(client.url, i, args.iterations)) for i in range(args.num_workers)]
        for w in workers:
            w.start()
        alive = workers
        while alive:
            alive[0].join(1.0)
            alive = [w for w in workers if w.is_alive()]  # before the pull: the last line is of the final values
            now = dict(zip(keys, server.pull(keys), strict=True))
            print(f"accuracy {100 * digits.accuracy(now):.1f} %", flush=True)
        if any(w.exitcode for w in workers):
            raise SystemExit("a worker failed")


if __name__ == "__main__":
    main()
