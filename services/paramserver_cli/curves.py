"""Charts of loss and accuracy over time."""

from collections.abc import Sequence
from pathlib import Path

from paramserver_cli.training import Training


def write_png(path: Path, trainings: Sequence[Training]) -> None:
    """Draw accuracy and loss in two panels, with a line per training; needs matplotlib."""
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
