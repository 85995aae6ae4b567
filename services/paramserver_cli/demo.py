"""psctl demo: starts a cluster, trains on real images in sync and then in async mode, and shows the progress."""

from __future__ import annotations  # client classes are named, but not imported until used

import importlib.util
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import paramserver as ps
from paramserver.errors import PsError
from paramserver_cli import launch
from paramserver_cli.config import connect
from paramserver_cli.display import Show, at_terminal, display
from paramserver_cli.launch import Failed
from paramserver_cli.state_directory import Plan, StateDir
from paramserver_cli.training import Training
from paramserver_node import unwind

SHARDS: Final = 2
WORKERS: Final = 4
TARGET_ACCURACY: Final = 0.96
LIMIT_S: Final = 600.0
"""Time limit of a training; one that has not reached the target by then has failed."""
EVALUATE_EVERY: Final = 10
POLL_S: Final = 0.4
CHECK_RUN_EVERY_S: Final = 2.0
SETTLE_POLLS_MAX: Final = 100
CALL_TIMEOUT_S: Final = 60.0
"""Long enough to span the crash and restart of any process."""

ADAM: Final = {"name": "adam", "lr": 2e-3, "schedule": {"kind": "exponential", "gamma": 0.999}}
MODES: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "sync": (ADAM, {"mode": "sync", "min_workers": WORKERS}),
    # Four gradients are in flight at once and each is an update of its own: smaller steps, slower decay per update.
    "async": ({**ADAM, "lr": 1e-3, "schedule": {"kind": "exponential", "gamma": 0.9995}}, {"mode": "async"}),
}
"""Optimizer and consistency of each training."""


@dataclass(frozen=True)
class Result:
    """How one training ended."""

    training: Training
    accuracy: float
    """Test accuracy of the final values, measured by this process."""
    checkpoint: Path


def demo(
    seconds: Annotated[float, typer.Option(min=1.0, help="Minimum duration of each of the two trainings.")] = 30.0,
    out: Annotated[Path, typer.Option(help="Folder for the checkpoints and the picture.")] = Path("demo-out"),
) -> None:
    """Train a network on handwritten digits with a real cluster: Redis, a scheduler, 2 shards, 4 workers.

    First in sync, then in async mode, each until at least 96 % of the test images are recognized. Kill any of its
    processes while it runs: it is restarted, and the training continues. Ctrl-C leaves nothing behind.

        psctl demo

        psctl demo --seconds 60
    """
    _check_packages()
    unwind.on_signals()  # SIGTERM becomes an exception, so that the cluster is stopped
    state, failed = StateDir(Path(tempfile.mkdtemp(prefix="paramserver-demo-"))), False
    try:
        out.mkdir(parents=True, exist_ok=True)
        typer.echo(f"starting Redis, a scheduler, {SHARDS} shards and {WORKERS} workers; the logs are in {state.logs}")
        with launch.cluster(state, Plan(shards=SHARDS, workers=WORKERS)) as launched:
            cluster = launched.state.cluster()
            if cluster is None:
                raise Failed(f"the cluster exited right after it became ready:\n{launched.state.tail('supervisor')}")
            typer.echo(f"status page  {cluster.scheduler}")
            client = connect(cluster.scheduler, timeout_s=CALL_TIMEOUT_S)
            results = [_train(client, mode, seconds, out, cluster.scheduler) for mode in MODES]
            picture = out / "curves.png"
            _draw(picture, [r.training for r in results])
            _summarize(results, picture)
            if at_terminal() and sys.stdin.isatty():
                _wait_for_enter(cluster.scheduler)
    except (Failed, PsError):
        failed = True
        raise
    finally:
        state.discard(keep_logs=failed)  # which are where they are said to be


def _check_packages() -> None:
    missing = [name for name in ("sklearn", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise Failed(f"the demo needs {' and '.join(missing)}: in a checkout, pip install '.[demo]'")


def _train(client: ps.Client, mode: str, seconds: float, out: Path, page: str) -> Result:
    """Run one training to the target and save its checkpoint.  Raises Failed if it misses the target."""
    from paramserver.examples import digits

    optimizer, consistency = MODES[mode]
    name = f"digits-{mode}"
    model = client.create_model(
        name,
        digits.spec(),
        optimizer=optimizer,
        consistency=consistency,
        partitions=digits.PARTITIONS,
        exist_ok=True,
    )
    run = client.create_run(name, "paramserver.examples.digits:train", workers=WORKERS, evaluate_every=EVALUATE_EVERY)
    training = Training(client, name, mode)
    accuracy = 0.0
    with display(page) as show:
        while accuracy < TARGET_ACCURACY:
            _follow(training, run["id"], seconds, show)
            client.set_run(run["id"], state="paused")
            accuracy = digits.accuracy(_pull_settled(model))
            # The final values may be worse than the last evaluations; if so, training continues.
            client.set_run(run["id"], state="stopped" if accuracy >= TARGET_ACCURACY else "running")
            training.evaluations.clear()
    checkpoint = out / name
    model.checkpoint(checkpoint, overwrite=True)
    typer.echo(f"{mode}: {100 * accuracy:.1f} % of the test images after {training.elapsed_s:.0f} s")
    return Result(training, accuracy, checkpoint)


def _pull_settled(model: ps.Model) -> ps.Params:
    """Return the values once two pulls in a row give the same.  Raises Failed after SETTLE_POLLS_MAX pulls."""
    before = model.pull()
    for _ in range(SETTLE_POLLS_MAX):
        time.sleep(POLL_S)  # workers finish their current steps; nothing notifies the demo of that
        now = model.pull()
        if (before.flat == now.flat).all():
            return now
        before = now
    raise Failed(f"model {model.name} still changes although its run is paused")


def _follow(training: Training, run: str, seconds: float, show: Show) -> None:
    """Show a training until it has both lasted `seconds` and reached the target.

    Raises Failed if its run fails, or if the target is not reached LIMIT_S after `seconds`.
    """
    checked_s = 0.0
    while training.elapsed_s < seconds or not training.has_reached(TARGET_ACCURACY):
        training.poll()
        show(training)
        if training.elapsed_s > seconds + LIMIT_S:
            wanted = f"{100 * TARGET_ACCURACY:g} %"
            raise Failed(f"{training.title} training has not reached {wanted} in {training.elapsed_s:.0f} s")
        if training.elapsed_s - checked_s > CHECK_RUN_EVERY_S and not training.error:
            checked_s = training.elapsed_s
            document = training.client.get_run(run)
            if document["state"] == "failed":
                raise Failed(f"the run failed: {document['reason']}")
        time.sleep(POLL_S)  # the redraw interval; the training runs in other processes


def _draw(path: Path, trainings: list[Training]) -> None:
    """Draw accuracy and loss over time in two panels, with a line per training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    accuracy, loss = figure.subplots(1, 2)
    for training in trainings:
        points = [(s.elapsed_s, s.accuracy, s.loss) for s in training.samples]
        accuracy.plot(*zip(*[(t, 100 * a) for t, a, _ in points if a is not None], strict=True), label=training.title)
        loss.plot(*zip(*[(t, v) for t, _, v in points if v is not None], strict=True), label=training.title)
    accuracy.set(xlabel="seconds", ylabel="test accuracy in %", ylim=(None, 100))
    loss.set(xlabel="seconds", ylabel="training loss", yscale="log")
    for axes in (accuracy, loss):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def _summarize(results: list[Result], picture: Path) -> None:
    typer.echo("")
    for r in results:
        typer.echo(f"{r.training.title} accuracy {100 * r.accuracy:.1f} %")
    for r in results:
        updates, pushes = r.training.rate()
        typer.echo(f"{r.training.title + ' rate':11} {pushes:.0f} pushes/s, {updates:.0f} updates/s")
    files = [*(r.checkpoint / "model.safetensors" for r in results), picture]
    for path in files:
        typer.echo(f"wrote       {path}")
    steps = ["psctl up --detach", "psctl new my-model", "psctl train my-model/train.py --model my-model --workers 2"]
    if shutil.which("psctl") is None:  # as after `make demo`
        steps.insert(0, f". {sys.prefix}/bin/activate")
    for label, step in zip_longest(["next"], steps, fillvalue=""):
        typer.echo(f"{label:12}{step}")


def _wait_for_enter(page: str) -> None:
    typer.echo(f"\nthe cluster and its page {page} stay up until you press Enter")
    with suppress(EOFError, KeyboardInterrupt):
        input()
