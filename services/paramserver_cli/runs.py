"""psctl run: list, show, pause, resume, stop and evaluate runs."""

import json
from typing import Annotated, Any

import typer

from paramserver.core.scheduler.runs import ENDED
from paramserver.errors import problem
from paramserver_cli import series
from paramserver_cli.config import Json, Url, connect
from paramserver_cli.display import columns, console, last_line, print_list
from paramserver_cli.exits import Group

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="List, show, pause, resume, stop and evaluate runs; train in series.",
    epilog="psctl run list",
)
Run = Annotated[str, typer.Argument(help="The run's id, such as run-1.")]

app.command("series")(series.series)


def _print_run(run: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(run))
        return
    for key in ("id", "name", "model", "entry", "state", "reason", "args", "stop"):
        if run.get(key):
            typer.echo(f"{key:8} {run[key] if isinstance(run[key], str) else json.dumps(run[key])}")
    if restarts := sum(place["restarts"] for place in run.get("places", ())):
        typer.echo(f"restarts {restarts}")
    if run.get("error") and run["error"].partition(": ")[2] not in run["reason"]:  # where it ended the run, that has it
        typer.echo(f"error    {run['error']}")


@app.command("list")
def list_runs(as_json: Json = False, url: Url = None) -> None:
    """List the runs, newest first.

    psctl run list
    """
    items = connect(url).runs()
    if as_json:
        print_list(items)
        return
    table = columns("run", "model", "entry", "state", "reason")
    for r in items:
        table.add_row(r["id"], r["model"], r["entry"], r["state"], last_line(r["reason"]))
    console().print(table)


@app.command()
def show(run: Run, as_json: Json = False, url: Url = None) -> None:
    """Show one run, with the reason why it ended and its last traceback.

    psctl run show run-1
    """
    _print_run(connect(url).get_run(run), as_json)


@app.command()
def pause(run: Run, as_json: Json = False, url: Url = None) -> None:
    """Pause a run: its workers wait after their current step.

    psctl run pause run-1
    """
    _print_run(connect(url).set_run(run, state="paused"), as_json)


@app.command()
def resume(run: Run, as_json: Json = False, url: Url = None) -> None:
    """Resume a paused run.

    psctl run resume run-1
    """
    _print_run(connect(url).set_run(run, state="running"), as_json)


@app.command()
def stop(run: Run, as_json: Json = False, url: Url = None) -> None:
    """Stop a run; its workers return to the pool.

    psctl run stop run-1
    """
    _print_run(connect(url).set_run(run, state="stopped"), as_json)


@app.command("eval")
def evaluate(run: Run, url: Url = None) -> None:
    """Request an evaluation now; a worker of the run performs it, so the run must not have ended.

    psctl run eval run-1
    """
    client = connect(url)
    document = client.get_run(run)
    if document["state"] in ENDED:
        hint = "only a running run can evaluate; psctl run list shows what runs"
        raise problem("conflict", f"run '{run}' has already ended ({document['state']})", hint=hint)
    model = document["model"]
    client.model(model).evaluate()
    typer.echo(f"requested an evaluation of model {model}; psctl status shows the result")
