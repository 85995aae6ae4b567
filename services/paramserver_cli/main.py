"""The command `psctl`."""

from typing import Annotated

import typer

import paramserver
from paramserver_cli import (
    checkpoints,
    config,
    demo,
    doctor,
    exits,
    keys,
    logs,
    models,
    moves,
    new,
    runs,
    status,
    train,
    up,
)

app = typer.Typer(
    cls=exits.Psctl,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Start parameter server clusters on this machine, and control any cluster.\n\n"
    "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 cluster unavailable, 4 refused (by the cluster, or "
    "locally: invalid setting or name, or it already exists), 130 interrupted.",
    epilog="Start here: psctl demo",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(paramserver.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None: ...


START, LOCAL, CLUSTER = "Start here", "Clusters on this machine", "Any cluster"
app.command(rich_help_panel=START)(demo.demo)
app.command(rich_help_panel=START)(new.new)
app.command(rich_help_panel=START)(doctor.doctor)
app.command(rich_help_panel=START)(config.config)
app.command(rich_help_panel=LOCAL)(up.up)
app.command(rich_help_panel=LOCAL)(up.down)
app.command("list", rich_help_panel=LOCAL)(up.list_clusters)
app.command(rich_help_panel=LOCAL)(logs.logs)
app.command(rich_help_panel=CLUSTER)(status.status)
app.command(rich_help_panel=CLUSTER)(moves.drain)
app.command(rich_help_panel=CLUSTER)(moves.scale)
app.command(rich_help_panel=CLUSTER)(train.train)
app.command(rich_help_panel=CLUSTER)(models.models)
app.command(rich_help_panel=CLUSTER)(models.create)
app.command("set", rich_help_panel=CLUSTER)(models.set_)
app.command(rich_help_panel=CLUSTER)(models.pull)
app.command(rich_help_panel=CLUSTER)(models.delete)
app.command(rich_help_panel=CLUSTER)(keys.token)
app.command(rich_help_panel=CLUSTER)(keys.secret)
app.add_typer(runs.app, name="run", rich_help_panel=CLUSTER)
app.add_typer(checkpoints.app, name="checkpoint", rich_help_panel=CLUSTER)
