"""psctl run series: an endless sequence of runs on the cluster's worker pool."""

from __future__ import annotations  # client classes are named, but not imported until used

import re
import signal
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import paramserver as ps
from paramserver.core.fields import check_model_name
from paramserver.core.scheduler.runs import ENDED
from paramserver.core.spec import ConsistencySpec
from paramserver.errors import ConflictError, NotFoundError, Unavailable
from paramserver_cli.config import Url, connect
from paramserver_cli.display import last_line
from paramserver_cli.models import create_from, read_spec

DIGITS: Final = "paramserver.examples.digits:train"
OPTIMIZER: Final = {"name": "adam", "lr": 1e-3, "schedule": {"kind": "exponential", "gamma": 0.9995}}
"""Optimizer of the digits example: its steps shrink because in async mode several gradients are in flight at once."""
MODES: Final = tuple(ConsistencySpec.MODES)
POLL_S: Final = 1.0
PAUSE_S: Final = 2.0
"""Pause after a failed run, doubled each time up to `PAUSE_MAX_S`; undoubled also after an outage or a conflict."""
PAUSE_MAX_S: Final = 60.0
REMOVE_S: Final = 5.0
"""How long to wait for a scheduler that is to delete a checkpoint, and may never come back."""
RUN_WORKER: Final = re.compile(r"run-[0-9]+/w[0-9]+")
"""Names of the workers of runs (`Run.worker_name`)."""


def numbers(name: str, models: Iterable[str]) -> list[int]:
    """Return the numbers N of the models called `NAME-N`, ascending, without repetition."""
    pattern = re.compile(re.escape(name) + r"-([1-9][0-9]{0,15})")
    return sorted(int(found[1]) for m in set(models) if (found := pattern.fullmatch(m)))


@dataclass(frozen=True)
class Series:
    """Runs of models NAME-1, NAME-2, …; all state is in the cluster, so that any process can continue the series."""

    client: ps.Client
    name: str
    entry: str
    spec: dict[str, Any]
    """Spec of each model; `consistency.mode` is replaced, and in sync and ssp `min_workers`."""
    modes: tuple[str, ...]
    minutes: float
    keep: int
    """Number of models to keep, the one in training included."""
    workers: int
    evaluate_every: int

    def current_run(self) -> dict[str, Any] | None:
        """Return a run of this series that has not ended; None if all have."""
        ours = self._runs()
        return next((r for r in ours if r["state"] not in ENDED), None)

    def start(self) -> dict[str, Any]:
        """Start the next run, on a new model, for which there is room: the oldest goes before, not the newest.

        Raises ConflictError if another process was faster, or if there is no room all the same.
        """
        self.prune(max(1, self.keep - 1))
        used = numbers(self.name, (r["model"] for r in self._runs()))
        existing = numbers(self.name, self.client.models())
        newest = max(used + existing, default=0)
        # A newest model without a run: this process or the scheduler died before the run was created.
        number = newest if newest and not self._had_run(newest, used) else newest + 1
        mode = self.modes[(number - 1) % len(self.modes)]
        consistency: dict[str, Any] = {**self.spec.get("consistency", {}), "mode": mode}
        if mode in ("sync", "ssp"):
            consistency["min_workers"] = self.workers
        model = f"{self.name}-{number}"
        try:
            create_from(self.client, model, {**self.spec, "consistency": consistency}, exist_ok=True)
        except ConflictError:  # a user's model with another spec
            model = f"{self.name}-{newest + 1}"
            create_from(self.client, model, {**self.spec, "consistency": consistency}, exist_ok=True)
        return self.client.create_run(
            model,
            self.entry,
            name=model,
            workers=self.workers,
            stop={"minutes": self.minutes},
            evaluate_every=self.evaluate_every,
        )

    def prune(self, keep: int | None = None) -> list[str]:
        """Delete all but the newest models, except those that never had a run; return the names deleted.

        `keep`: how many to keep; default: as many as the series does.
        """
        used = numbers(self.name, (r["model"] for r in self._runs()))
        existing = numbers(self.name, self.client.models())
        deleted = []
        for number in existing[: -(keep or self.keep)]:
            with suppress(NotFoundError):  # another process was faster
                if self._had_run(number, used):
                    self._delete(f"{self.name}-{number}")
                    deleted.append(f"{self.name}-{number}")
        return deleted

    def _had_run(self, number: int, used: Collection[int]) -> bool:
        """Whether a run has trained the model of that number; `used` has the numbers of those whose runs are known."""
        if number in used:
            return True
        # The cluster forgets runs, but a model's workers are named after them.
        workers = self.client.model(f"{self.name}-{number}").workers()
        return any(w["epoch"] and RUN_WORKER.fullmatch(w["worker"]) for w in workers)

    def _delete(self, name: str) -> None:
        """Delete a model with the checkpoints of it that have no name from a user: no rule removes them later."""
        model = self.client.model(name)
        for checkpoint in model.checkpoints():
            if checkpoint["kept"]:
                continue
            try:
                model.delete_checkpoint(checkpoint["name"], timeout=REMOVE_S)
            except (NotFoundError, ConflictError, Unavailable) as e:  # the model must go all the same
                typer.echo(f"checkpoint {checkpoint['name']} of model {name} stays: {e}", err=True)
        model.delete()

    def follow(self, run: str) -> dict[str, Any]:
        """Wait until the run has ended and return its document; say so if it waits for workers.

        Raises NotFoundError if the run is gone.
        """
        begun, told = time.monotonic(), ""
        while True:
            document = self.client.get_run(run)
            if document["state"] in ENDED:
                return document
            waits = document["state"] == "waiting" and time.monotonic() - begun > PAUSE_S
            if waits and document["reason"] not in ("", told):
                told = document["reason"]
                typer.echo(f"{run} waits: {told}", err=True)
            time.sleep(POLL_S)  # a run takes minutes, and each poll is one small request

    def _runs(self) -> list[dict[str, Any]]:
        return [r for r in self.client.runs() if numbers(self.name, [r["model"]])]


def run_forever(series: Series) -> None:
    """Start run after run, forever; a NotFoundError, a ConflictError or an outage only delays the next.

    Raises AuthError, or any other RequestError: the cluster would refuse the request again.
    """
    pause_s, away = PAUSE_S, False
    while True:
        try:
            run = series.current_run()
            if run is None:
                run = series.start()
                typer.echo(f"{run['id']} trains model {run['model']}")
            elif not away:
                typer.echo(f"{run['id']} is already training model {run['model']}")
            away = False
            series.prune()
            ended = series.follow(run["id"])
        except Unavailable as e:
            if not away:
                typer.echo(f"waiting for the cluster: {e}", err=True)
            away = True
            time.sleep(PAUSE_S)  # do not flood the cluster with requests when it comes back
        except (NotFoundError, ConflictError) as e:  # another client deleted the model, or just started a run
            typer.echo(f"retrying: {e}", err=True)
            time.sleep(PAUSE_S)  # let the other client finish first
        else:
            typer.echo(f"{ended['id']} {ended['state']}: {last_line(ended['reason'])}")
            if ended["state"] == "failed":
                time.sleep(pause_s)  # the next run may fail at once, too
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            else:
                pause_s = PAUSE_S


def series(
    entry: Annotated[
        str, typer.Argument(metavar="MODULE:FUNC", help="What the workers run; default: the digits example.")
    ] = DIGITS,
    name: Annotated[str, typer.Option(help="The models are called NAME-1, NAME-2, …")] = "digits",
    spec: Annotated[Path | None, typer.Option(help="YAML or JSON file that the models are created from.")] = None,
    modes: Annotated[str, typer.Option(help="Consistency modes, used in turn.")] = "async,sync,ssp",
    minutes: Annotated[float, typer.Option(min=0.01, help="Length of one run.")] = 2.0,
    keep: Annotated[int, typer.Option(min=1, max=100, help="Models to keep, including the one in training.")] = 20,
    workers: Annotated[int, typer.Option(min=1, help="Workers of the pool for one run.")] = 4,
    evaluate_every: Annotated[int, typer.Option(min=0, help="Clocks between evaluations.")] = 10,
    url: Url = None,
) -> None:
    """Train forever: the cluster's worker pool does one run after another, each on a new model.

    Of models beyond --keep only checkpoints that were saved under a name stay.

    It can be stopped and started again, or run twice: it continues with the current run. Stopping it does not stop
    that run; psctl run stop does.

        psctl run series

        psctl run series mypackage.job:train --name demo --spec model.yaml --modes sync --minutes 10
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    check_model_name(f"{name}-1")
    chosen = tuple(m.strip() for m in modes.split(","))
    if unknown := [m for m in chosen if m not in MODES]:
        raise typer.BadParameter(f"'{unknown[0]}' is not a mode; known: {', '.join(MODES)}", param_hint="--modes")
    document = _spec_of(entry, spec)
    run_forever(
        Series(
            connect(url),
            name,
            entry,
            document,
            modes=chosen,
            minutes=minutes,
            keep=keep,
            workers=workers,
            evaluate_every=evaluate_every,
        )
    )


def _spec_of(entry: str, file: Path | None) -> dict[str, Any]:
    if file is not None:
        return read_spec(file)
    if entry != DIGITS:
        raise typer.BadParameter("is required unless the entry is the digits example", param_hint="--spec")
    from paramserver.examples import digits

    return {"params": digits.spec(), "optimizer": OPTIMIZER, "partitions": digits.PARTITIONS}
