"""A small convolutional network in PyTorch that learns handwritten digits through a cluster.

    python -m paramserver.examples.digits_torch                                  one training: sync, int8, two workers
    python -m paramserver.examples.digits_torch --mode all --codec all           every mode in every codec, as a table
    psctl train paramserver.examples.digits_torch:train --model demo ...         the same training on pool workers

The first two start a private cluster and train with threads.  Needs `pip install '.[torch,demo]'` in a checkout.
"""

import argparse
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

import paramserver as ps
from paramserver.examples import digits
from paramserver.torch import ParameterServerOptimizer

MODES: Final = {"async": ps.Async(), "ssp": ps.SSP(2), "sync": ps.Sync(), "buffered": ps.Buffered(2, interval_ms=20)}
CODECS: Final = ("fp32", "fp16", "bf16", "int8", "topk:0.05", "fp32+zstd", "int8+lz4")
BEGIN_S: Final = 60.0
"""Longest wait of a worker for the others; one that cannot begin would keep them waiting."""
OPTIMIZER: Final = ps.Adam(lr=4e-3, schedule=ps.Exponential(gamma=0.998))


class Net(nn.Sequential):
    """Two convolutions and two linear layers on images [n, 64] in [0, 1]: 38,282 parameters; gives logits [n, 10]."""

    def __init__(self, seed: int = 0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            super().__init__(
                nn.Unflatten(1, (1, 8, 8)),
                nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
                nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
            )  # fmt: skip


def batch(rng: np.random.Generator, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return training images [size, 64], shifted and noisy, and their labels [size]."""
    x, y = digits.batch(rng, size)
    return torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)


def accuracy(net: nn.Module) -> float:
    """Return the fraction of the test images that are classified correctly."""
    x, y = digits.images("test")
    device = next(net.parameters()).device
    with torch.no_grad():
        return float((net(torch.from_numpy(x).to(device)).argmax(1).cpu().numpy() == y).mean())


def learn(net: nn.Module, opt: ParameterServerOptimizer, steps: int | None, batch_size: int, seed: int) -> None:
    """Train for `steps` steps, or until the worker is told to finish."""
    rng = np.random.default_rng((seed, opt.worker.rank, opt.worker.clock_number))
    device = next(net.parameters()).device
    done = 0
    while not opt.worker.draining and (steps is None or done < steps):
        x, y = batch(rng, batch_size, device)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        opt.step(lambda: loss)  # noqa: B023  the loss is known: the closure only hands it over, to be reported
        done += 1
        if opt.worker.evaluation_waits:
            opt.worker.evaluate(lambda _: {"accuracy": accuracy(net)})


def train(worker: ps.Worker, codec: str = "int8", batch_size: int = 64, seed: int = 0) -> None:
    """Train on a pool worker; the entry point `paramserver.examples.digits_torch:train`."""
    net = Net(seed).to("cuda" if torch.cuda.is_available() else "cpu")
    with ParameterServerOptimizer(net, worker, codec=codec) as opt:
        learn(net, opt, None, batch_size, seed)


def once(client: ps.Client, mode: str, codec: str, *, workers: int, steps: int, batch_size: int = 64) -> float:
    """Train a new model with worker threads, and return its test accuracy."""
    name = f"digits-{mode}-{codec.replace(':', '-').replace('+', '-').replace('.', '')}"
    ready = threading.Barrier(workers)

    def work(index: int) -> None:
        net = Net()
        options: dict[str, Any] = {"optimizer": OPTIMIZER, "consistency": MODES[mode], "codec": codec}
        with ParameterServerOptimizer(net, client.model(name), **options) as opt:
            ready.wait(BEGIN_S)  # otherwise the first worker would train alone for a while
            learn(net, opt, steps, batch_size, index)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    final, values = Net(), client.model(name).pull()
    final.load_state_dict({n: torch.from_numpy(a) for n, a in values.items()})
    client.model(name).delete()
    return accuracy(final)


def main() -> None:
    """Parse the command line, train, and print the accuracies."""
    parser = argparse.ArgumentParser(description="Digits in PyTorch over a private cluster.")
    parser.add_argument("--mode", default="sync", choices=[*MODES, "all"])
    parser.add_argument("--codec", default="int8", help=f"one of {', '.join(CODECS)}, or all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400, help="steps per worker")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    modes = list(MODES) if chosen.mode == "all" else [chosen.mode]
    codecs = CODECS if chosen.codec == "all" else [chosen.codec]
    with ps.local(shards=2) as client:
        for mode in modes:
            for codec in codecs:
                found = once(client, mode, codec, workers=chosen.workers, steps=chosen.steps)
                sys.stdout.write(f"{mode:9} {codec:10} accuracy {100 * found:.1f} %\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
