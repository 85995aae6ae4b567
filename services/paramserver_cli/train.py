"""psctl train: starts workers on this machine, runs them as one run, and follows it to its end."""

from __future__ import annotations  # client classes are named, but not imported until used

import os
import re
import secrets
import shlex
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

import paramserver as ps
from paramserver.core.scheduler.runs import ENDED
from paramserver.core.spec import ConsistencySpec
from paramserver.errors import ConflictError, NotFoundError, PsError, Unavailable, problem
from paramserver_cli import launch
from paramserver_cli.config import Url, connect, listed, worker_token
from paramserver_cli.display import display, fixed, percent
from paramserver_cli.launch import Failed
from paramserver_cli.models import create_from, read_spec
from paramserver_cli.state_directory import Plan, StateDir
from paramserver_cli.training import POLL_TIMEOUT_S, Training
from paramserver_node import unwind
from paramserver_node.words import arguments

SPEC_FILE = "model.yaml"
POLL_S = 0.4
RAISED_EVERY_S = 5.0
"""Least time between two lines about exceptions: in an outage, functions may raise some every second."""
RETURN_S = 10.0
"""How long the functions of a run that has ended may go on, to finish their step and whatever follows their loop; it is
what a worker of the pool gives them, too."""


def train(
    target: Annotated[str, typer.Argument(metavar="SCRIPT|MODULE:FUNC", help="What the workers run.")],
    model: Annotated[str, typer.Option(help="The model to train.")],
    workers: Annotated[int, typer.Option(min=1, help="Worker processes on this machine.")] = 2,
    mode: Annotated[str | None, typer.Option(help="async, ssp, sync or buffered; default: as the model is.")] = None,
    spec: Annotated[
        Path | None, typer.Option(help="Spec to create a missing model from; default: model.yaml beside SCRIPT.")
    ] = None,
    arg: Annotated[list[str] | None, typer.Option(help="name=value for the function; repeatable.")] = None,
    clocks: Annotated[int | None, typer.Option(min=1, help="End after so many clocks of the slowest worker.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0.0, help="End after so many minutes.")] = None,
    evaluate_every: Annotated[int, typer.Option(min=0, help="Clocks between evaluations.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Clocks between the cluster's checkpoints.")] = 0,
    url: Url = None,
) -> None:
    """Train a model with workers on this machine, and follow the run to its end.

    SCRIPT is a file with a function `train(worker)`. Without --clocks or --minutes, the run ends when every worker's
    function has returned. The exit code is 1 if it fails, or if somebody else stops it.

        psctl train train.py --model demo --workers 4 --mode sync

        psctl train mypackage.job:train --model demo --clocks 1000 --arg batch_size=128
    """
    entry, folder = _entry(target)
    if os.pathsep in str(folder):  # PYTHONPATH, which the workers get, has no way to write it
        raise typer.BadParameter(f"Python cannot import from {folder}: rename it, without '{os.pathsep}'")
    if mode is not None and mode not in ConsistencySpec.MODES:
        known = ", ".join(ConsistencySpec.MODES)
        raise typer.BadParameter(f"'{mode}' is not a mode; known: {known}", param_hint="--mode")
    args = arguments(arg or [])
    client = connect(url)
    _check_folder(folder)  # once the client is loaded, whose modules the workers need, too
    _prepare(client, model, spec or _beside(target), mode, workers)
    stop = {k: v for k, v in (("clocks", clocks), ("minutes", minutes)) if v is not None}
    unwind.on_signals()  # SIGTERM and SIGHUP become exceptions, so that the run is stopped
    options: dict[str, Any] = {"evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every}
    if (token := worker_token(url)) is not None:
        os.environ["PARAMSERVER_TOKEN"] = token  # inherited by the workers: no file or command line shows it
    state, failed = StateDir(Path(tempfile.mkdtemp(prefix="paramserver-train-"))), True
    try:
        paths = [str(folder)]
        if target.endswith(".py"):
            entry, paths = _named_anew(entry, state.path), [*paths, str(state.path)]
        allow = [entry.partition(":")[0]]
        plan = Plan(shards=0, workers=workers, scheduler=",".join(client.urls), allow=allow, paths=paths)
        with launch.cluster(state, plan):
            run = client.create_run(model, entry, args=args, workers=workers, stop=stop, **options)
            try:
                typer.echo(
                    f"{run['id']} trains model {model} with {workers} worker{'s' * (workers > 1)}; status page "
                    f"{client.url}; what they print: psctl logs -f --state-dir {shlex.quote(str(state.path))}"
                )
                training = Training(client, model, model)
                ended = _follow(client, run["id"], training, state)
                _until_returned(client, run["id"], training)
            except BaseException:  # also if the terminal is gone: the run's workers go with this process
                _stop(client, run["id"])
                raise
            _report(ended, training)
        failed = False
    finally:
        state.discard(keep_logs=failed)
        if failed and state.logs.exists():
            with suppress(OSError):  # the terminal may be gone
                typer.echo(f"what the workers have printed is in {state.logs}", err=True)


def _entry(target: str) -> tuple[str, Path]:
    """Return (MODULE:FUNC, folder to import it from) for a target.  Raises BadParameter (exit code 2) if invalid."""
    if not target.endswith(".py"):
        if ":" not in target:
            raise typer.BadParameter(f"'{target}' is neither a .py file nor MODULE:FUNC")
        return target, Path.cwd()
    path = Path(target)
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {target}")
    if not path.stem.isidentifier():
        raise typer.BadParameter(f"'{path.name}' cannot be imported: rename it to {_importable(path.stem)}.py")
    if path.stem in sys.stdlib_module_names:  # the workers would import it in place of that, and not start
        raise typer.BadParameter(f"'{path.name}' has the name of a module of Python's own: rename it")
    return f"{path.stem}:train", path.parent.absolute()


def _check_folder(folder: Path) -> None:
    """Raise BadParameter if a file there has the name of a module that psctl, and so a worker, needs of Python's own.

    The workers would import it in place of that, and not start.
    """
    for name in sorted(sys.stdlib_module_names & sys.modules.keys()):
        spec = sys.modules[name].__spec__
        for path in (folder / f"{name}.py", folder / name / "__init__.py"):
            if spec is not None and spec.has_location and path.is_file():  # one without is never looked for
                raise typer.BadParameter(f"{path} would take the place of Python's own module '{name}': rename it")


def _named_anew(entry: str, folder: Path) -> str:
    """Return an entry that stands for a script's: its module, written into `folder`, has a name of its own.

    The pool tells entries apart by their names alone, and many projects have a `train.py`: by that name a worker of
    another one could take a place in this run.
    """
    module, _, function = entry.partition(":")
    own = f"{module}_{secrets.token_hex(4)}"
    text = f"import importlib\n{function} = getattr(importlib.import_module({module!r}), {function!r})\n"
    (folder / f"{own}.py").write_text(text, encoding="utf-8")
    return f"{own}:{function}"


def _importable(name: str) -> str:
    """Return a module's name that is like this one."""
    word = re.sub(r"\W", "_", name)
    return word if word.isidentifier() else f"_{word}"


def _beside(target: str) -> Path | None:
    path = Path(target).parent / SPEC_FILE
    return path if target.endswith(".py") and path.is_file() else None


def _prepare(client: ps.Client, model: str, spec: Path | None, mode: str | None, workers: int) -> None:
    """Create the model if it does not exist; set its mode if given, and `min_workers` in sync and ssp.

    Raises NotFoundError (`unknown_model`) if the model does not exist and there is no spec, ConflictError (`conflict`)
    if another run trains it.
    """
    try:
        document = client.model(model).info()
    except NotFoundError:
        if spec is None:
            hint = f"psctl create {model} -f spec.yaml, or put a {SPEC_FILE} beside the script"
            raise problem("unknown_model", f"there is no model '{model}'", hint=hint) from None
        document = create_from(client, model, read_spec(spec), exist_ok=True).info()
        typer.echo(f"created model {model} from {spec}")
    from paramserver.client.cluster import model_path

    busy = next((r["id"] for r in client.runs() if r["model"] == model and r["state"] not in ENDED), None)
    if busy is not None:  # before the settings are changed, which are those of its training
        raise problem("conflict", f"run '{busy}' is training model '{model}'", hint="stop it first")
    wanted: dict[str, Any] = {} if mode is None else {"mode": mode}
    if (mode or document["spec"]["consistency"]["mode"]) in ("sync", "ssp"):
        wanted["min_workers"] = workers
    if wanted:
        client.request("PATCH", model_path(model), {"consistency": wanted})


def _follow(client: ps.Client, run: str, training: Training, state: StateDir) -> dict[str, Any]:
    """Show the run until it has ended, through outages of the cluster, and return its document."""
    restarts: dict[str, int] = {}
    raised, told_s = 0, float("-inf")
    with display(client.url) as show:
        while True:
            training.poll()
            show(training)
            try:
                document = client.get_run(run, timeout=POLL_TIMEOUT_S)
            except Unavailable:  # the display says so; the workers wait for the cluster, or train on meanwhile
                time.sleep(POLL_S)
                continue
            if document["state"] in ENDED:
                return document
            held = document["reason"].partition(":")[0]  # the rest says how to start workers, which are ours to start
            training.held = held or ("" if document["state"] == "running" else document["state"])
            total, now = sum(place["restarts"] for place in document["places"]), time.monotonic()
            if total > raised and document["error"] and now - told_s >= RAISED_EVERY_S:
                raised, told_s = total, now
                so_far = f"{total} exception{'s' * (total > 1)} so far"
                typer.echo(f"{document['error']}; its function is called again ({so_far})")
            supervisor = state.supervisor()
            for name, count in (supervisor.restarts if supervisor else {}).items():
                if count > restarts.get(name, 0):
                    restarts[name] = count
                    typer.echo(f"{name} died and was restarted; its last lines:\n{state.tail(name)}")
            time.sleep(POLL_S)


def _until_returned(client: ps.Client, run: str, training: Training) -> None:
    """Wait until no worker is in the run any more, at most `RETURN_S`: those of this machine end with this process.

    What they report meanwhile, such as the accuracy of the final values, is picked up.
    """
    deadline = time.monotonic() + RETURN_S
    returned = False
    while not returned and time.monotonic() < deadline:
        with suppress(Unavailable):
            members = listed(client, "/pool", POLL_TIMEOUT_S)
            returned = all(member["run"] != run for member in members)
        training.poll()  # after that look: then it has what those that have returned reported
        if not returned:
            time.sleep(POLL_S)


def _stop(client: ps.Client, run: str) -> None:
    """Stop a run that loses its workers; if that fails, say how to, as nobody else can train the model until then."""
    try:
        client.set_run(run, state="stopped", timeout=5.0)
    except (ConflictError, NotFoundError):  # it has ended, or went with its model
        pass
    except PsError as e:
        with suppress(OSError):  # the terminal may be gone
            typer.echo(f"{run} goes on in the cluster ({e.detail}): psctl run stop {run}", err=True)


def _report(run: dict[str, Any], training: Training) -> None:
    if run["state"] != "finished":  # a script must not go on as if the model were trained
        raise Failed(f"{run['id']} {run['state']}: {run['reason']}")
    loss = next((s.loss for s in reversed(training.samples) if s.loss is not None), None)
    accuracy = training.last.accuracy if training.last else None
    ends = [] if loss is None else [f"loss {fixed(loss)}"]
    ends += [] if accuracy is None else [f"accuracy {percent(accuracy)}"]
    typer.echo("; ".join([f"{run['id']} {run['state']}: {run['reason']}", *ends]))
