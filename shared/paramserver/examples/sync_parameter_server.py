"""Synchronous training in one file: workers compute at the same weights, and the mean of their gradients is applied.

    python -m paramserver.examples.sync_parameter_server --num-workers=4

With n workers the batch is n times larger, so the server multiplies the learning rate by n (the linear scaling rule,
Goyal et al. 2017).  Starts a private cluster; every worker is a process.
"""

import argparse
import multiprocessing
import multiprocessing.connection

import numpy as np

import paramserver as ps
from paramserver.examples import digits

LEARNING_RATE = 0.1
BATCH = 50
MODEL = "sync-example"


def work(url: str, index: int, iterations: int) -> None:
    """Run one worker, which draws its data with `index` as the seed."""
    rng = np.random.default_rng(index)
    with ps.connect(url).model(MODEL).worker(rank=index) as worker:
        for i in range(iterations):
            weights = worker.pull()
            loss, grads = digits.loss_and_grads(weights, *digits.batch(rng, BATCH))
            worker.step(grads, loss=loss)  # push, then wait until everybody's gradient of this iteration is applied
            if index == 0 and i % 25 == 0:
                print(f"iteration {i:4}  loss {loss:.3f}  accuracy {100 * digits.accuracy(weights):.1f} %", flush=True)


def main() -> None:
    """Start a cluster and the workers, and print the accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=300)
    args = parser.parse_args()
    with ps.local(shards=2) as client:
        model = client.create_model(
            MODEL,
            digits.spec(hidden=(64,)),
            optimizer=ps.SGD(lr=LEARNING_RATE, linear_scaling=True),
            consistency=ps.Sync(min_workers=args.num_workers),
        )
        spawn = multiprocessing.get_context("spawn")
        workers = [spawn.Process(target=work, args=(client.url, i, args.iterations)) for i in range(args.num_workers)]
        for w in workers:
            w.start()
        while (alive := [w for w in workers if w.is_alive()]) and not any(w.exitcode for w in workers):
            multiprocessing.connection.wait([w.sentinel for w in alive])
        if any(w.exitcode for w in workers):
            for w in workers:
                w.terminate()  # the others would wait for the one that is missing
            raise SystemExit("a worker failed")
        print(f"accuracy {100 * digits.accuracy(model.pull()):.1f} %")


if __name__ == "__main__":
    main()
