"""The command `paramserver-worker`."""

import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from secrets import token_hex
from typing import Annotated, Any

import typer

import paramserver as ps
from paramserver.errors import PsError, Unavailable
from paramserver_node import log as node_log
from paramserver_node import unwind
from paramserver_node.settings import WorkerSettings, exit_status
from paramserver_node.words import arguments
from paramserver_worker import ending
from paramserver_worker import entry as entries
from paramserver_worker.pool import PoolMember

EPILOG = """Examples:

  paramserver-worker                                   # waits for places in runs of the shipped examples

  paramserver-worker --allow mypackage                 # and of mypackage

  paramserver-worker mypackage.train:train --model m   # runs one function once, outside any run
"""
RETRY_S = 1.0
HOST_CHARS = 48

app = typer.Typer(add_completion=False)


def connect(settings: WorkerSettings) -> ps.Client:
    """Connect to the cluster, retrying until it is up."""
    told = False
    while True:
        try:
            return ps.connect(settings.url, token=settings.token or None, ca=settings.ca or None)
        except Unavailable as e:
            if not told:
                typer.echo(f"{e}; waiting for it", err=True)
            told = True
            time.sleep(RETRY_S)


def default_name() -> str:
    """Return HOST-PID-RANDOM as a valid pool name; two containers may have both the same host name and process id."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-") or "host"
    return f"{host[:HOST_CHARS]}-{os.getpid()}-{token_hex(3)}"


@app.command(epilog=EPILOG)
def worker(
    entry: Annotated[str | None, typer.Argument(help="package.module:function to run; none: join the pool.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to train, with ENTRY.")] = None,
    arg: Annotated[list[str] | None, typer.Option(help="name=value for ENTRY (JSON or text); repeatable.")] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="Prefix of entries it may run; repeatable. Default: the examples.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Its unique name in the pool; default: host and process.")] = None,
    url: Annotated[str | None, typer.Option(help="The cluster; default: PARAMSERVER_URL.")] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = None,
) -> None:
    """Run training functions: join the cluster's worker pool, or run one function by name."""
    unwind.on_signals()  # SIGTERM unwinds through the session, which leaves the model
    with ending.in_time():
        _run(entry, model, arg or [], {"url": url, "name": name, "allow": allow or None, "log_level": log_level})


def _run(entry: str | None, model: str | None, args: list[str], given: Mapping[str, Any]) -> None:
    try:
        settings = WorkerSettings.load(given)
    except PsError as e:
        typer.echo(str(e), err=True)
        raise typer.Exit(exit_status(e)) from None
    try:
        node_log.setup(settings.log_level)
        if entry is not None:
            if model is None:
                raise typer.BadParameter("is required with an entry", param_hint="--model")
            module = entry.partition(":")[0]
            function, values = entries.load(entry, [module]), arguments(args)
            entries.run(connect(settings), function, values, model=model, place={})
            return
        allowed = [prefix.strip() for prefix in settings.allow.split(",")]
        member = PoolMember(connect(settings), settings.name or default_name(), allowed)
        try:
            member.work()
        finally:
            _leave(member)
    except PsError as e:
        typer.echo(str(e), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        sys.exit(130)


def _leave(member: PoolMember) -> None:
    try:
        member.leave()
    except PsError as e:  # then the lease expires instead
        typer.echo(f"could not leave the pool: {e}", err=True)
