"""psctl new: creates a project of two files that `psctl train` can run as they are."""

import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from paramserver.core.fields import check_model_name
from paramserver_cli.launch import Failed

TRAIN = '''"""What each worker of {name} runs: `psctl train {script} --model {name} --workers 2`."""

import numpy as np

import paramserver as ps

STEPS = 300


def batch(rng: np.random.Generator, size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Your data goes here: inputs (size, 10) and what is to be predicted from them (size, 1)."""
    x = rng.standard_normal((size, 10), dtype=np.float32)
    truth = np.arange(10, dtype=np.float32)[:, None] / 10
    return x, x @ truth + 0.5


def train(worker: ps.Worker) -> None:
    """Pull, compute, push, until the run is over; each worker has a rank of its own, so it draws other data."""
    rng = np.random.default_rng(worker.rank)
    for _ in range(STEPS):
        if worker.draining:
            break
        p = worker.pull()
        x, y = batch(rng)
        error = x @ p["w"] + p["b"] - y
        worker.step({{"w": x.T @ error / len(x), "b": error.mean(axis=0)}}, loss=float((error**2).mean()))
'''
MODEL = """# The model {name}; the fields are those of POST /models.
params:
  w: {{shape: [10, 1], init: {{kind: normal, std: 0.1, seed: 1}}}}
  b: {{shape: [1]}}
optimizer: {{name: adam, lr: 0.02}}
consistency: {{mode: sync}}
"""


def new(
    name: Annotated[str, typer.Argument(help="Name of the project's folder and of its model.")],
) -> None:
    """Create a project of two files that trains as it is; adapt it to your data.

    psctl new my-model && psctl train my-model/train.py --model my-model --workers 2
    """
    folder = Path(name)
    model = check_model_name(folder.name)
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise Failed(f"{folder} already exists and is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    script = shlex.quote(f"{folder}/train.py")
    with ExitStack() as undo:
        for file, text in (("train.py", TRAIN), ("model.yaml", MODEL)):
            undo.callback((folder / file).unlink, missing_ok=True)
            (folder / file).write_text(text.format(name=model, script=script), encoding="utf-8")
        undo.pop_all()
    typer.echo(f"wrote {folder}/train.py and {folder}/model.yaml")
    typer.echo("next: psctl up --detach")
    typer.echo(f"      psctl train {script} --model {model} --workers 2")
