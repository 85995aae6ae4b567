"""Write torch.npz: trajectories of torch.optim and rates of torch.optim.lr_scheduler for the cases in cases.json.

    python -m venv /tmp/torch && /tmp/torch/bin/pip install torch==2.13.0 numpy
    /tmp/torch/bin/python tests/golden/optimizers/generate.py

The tests read torch.npz; where torch is installed, they also import the two `..._of_torch` functions.
"""

import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = json.loads((HERE / "cases.json").read_text())
STEPS, SIZE = 100, 24
KEPT = (0, 1, 2, 9, 49, 99)
"""Steps whose values are stored, counted from 0."""
RATE, UPDATES = 0.1, 60


def inputs() -> tuple[Any, Any]:
    """Return initial values [SIZE] and gradients [STEPS, SIZE], float32.

    The gradients have magnitudes from 1e-4 to 10, a column of zeros, a constant column, and steps that are all zero.
    """
    rng = np.random.Generator(np.random.PCG64(20))
    w = rng.standard_normal(SIZE).astype(np.float32)
    g = (rng.standard_normal((STEPS, SIZE)) * np.logspace(-4, 1, SIZE)).astype(np.float32)
    g[:, 3] = 0.0
    g[:, 5] = 0.25
    g[20:25] = 0.0
    return w, g


def trajectory_of_torch(case: dict[str, Any], w: Any, grads: Any) -> Any:
    """Return the values [STEPS, SIZE], float32, after each step of the case's torch optimizer with `foreach=False`."""
    torch: Any = importlib.import_module("torch")
    name, options = case["torch"]
    p = torch.nn.Parameter(torch.from_numpy(w.copy()))
    optimizer = getattr(torch.optim, name)([p], foreach=False, **options)
    out = np.empty_like(grads)
    for i, g in enumerate(grads):
        p.grad = torch.from_numpy(g.copy())
        optimizer.step()
        out[i] = p.detach().numpy()
    return out


def rates_of_torch(case: dict[str, Any]) -> Any:
    """Return the learning rates [UPDATES], float64, of torch's scheduler after a warm-up by LinearLR."""
    torch: Any = importlib.import_module("torch")
    lr_scheduler: Any = importlib.import_module("torch.optim.lr_scheduler")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    warmup = case["ours"].get("warmup", 0)
    name, options = case["torch"] or ("ConstantLR", {"factor": 1.0})
    stages: list[Any] = []
    if warmup:
        stages.append(lr_scheduler.LinearLR(optimizer, 1.0 / warmup, 1.0, warmup - 1))
    stages.append(getattr(lr_scheduler, name)(optimizer, **options))
    scheduler = lr_scheduler.SequentialLR(optimizer, stages, [warmup] if warmup else [])
    out = []
    for _ in range(UPDATES):
        out.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SequentialLR warns about its own use of step(epoch)
            scheduler.step()
    return np.array(out, np.float64)


def main() -> None:
    w, grads = inputs()
    arrays = {"w": w, "grads": grads}
    for name, case in CASES["steps"].items():
        arrays[f"steps/{name}"] = trajectory_of_torch(case, w, grads)[list(KEPT)]
    for name, case in CASES["schedules"].items():
        arrays[f"schedules/{name}"] = rates_of_torch(case)
    np.savez_compressed(HERE / "torch.npz", **arrays)


if __name__ == "__main__":
    main()
