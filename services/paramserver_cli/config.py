"""Settings of psctl and where each comes from: flag over environment `PARAMSERVER_…` over `paramserver.toml`."""

from __future__ import annotations  # client classes are named, but not imported until used

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import paramserver as ps
from paramserver_cli.cluster_file import StateDir
from paramserver_cli.display import console
from paramserver_node import tokens
from paramserver_node.plausible import check_ca, shown
from paramserver_node.settings import (
    FILE,
    ClientSettings,
    SchedulerSettings,
    ShardSettings,
    WorkerSettings,
    redacted,
)

Url = Annotated[str | None, typer.Option("--url", help="The cluster; default: PARAMSERVER_URL.", show_default=False)]
StateDirOption = Annotated[
    Path | None,
    typer.Option("--state-dir", help="Folder of the cluster's files; default: .paramserver here.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def client_settings(flags: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Each client setting with its origin.

    Where no URL is set, the cluster that runs under this folder's state directory is meant: after `psctl up` the next
    command finds it, also when the default ports were taken.
    """
    found = ClientSettings.sources(flags, os.environ, Path.cwd() / FILE)
    if found["url"][1] == "default":
        state = StateDir(Path(found["state_dir"][0]))
        cluster = state.cluster() if state.is_running() else None
        if cluster is not None:
            found["url"] = (",".join(cluster.schedulers), str(state.path / "cluster.json"))
    return found


def state_dir(flag: Path | None) -> StateDir:
    """The state directory that is meant."""
    return StateDir(Path(client_settings({"state_dir": None if flag is None else str(flag)})["state_dir"][0]))


def redis_url(flag: str | None) -> str | None:
    """The Redis that is meant, by the rule of every setting; None where none is named."""
    if flag is not None and shown(flag) != flag:
        # What this process was started with cannot be taken back: only the next one can be started otherwise.
        typer.echo(
            "warning: everybody on this machine can read the password in --redis while this runs; "
            "PARAMSERVER_REDIS, or the file that PARAMSERVER_REDIS_FILE names, may hold the URL in its place",
            err=True,
        )
    value, origin = SchedulerSettings.sources({"redis": flag}, os.environ, Path.cwd() / FILE)["redis"]
    return None if origin == "default" else str(value)


def connect(url: str | None, *, timeout_s: float | None = None) -> ps.Client:
    """A client of the cluster that is meant; raises Unreachable."""
    settings = client_settings({"url": url, "timeout_s": timeout_s})
    check_ca(*settings["ca"])
    found = {name: value for name, (value, _) in settings.items()}
    token = found["token"] or _own_token(found["secret"] or _secret_of(found["url"], Path(found["state_dir"])))
    return ps.connect(found["url"], timeout=found["timeout_s"], token=token, ca=found["ca"] or None)


def worker_token(url: str | None) -> str | None:
    """A token for workers of the cluster that is meant; None where none is needed, or they inherit one."""
    found = {name: value for name, (value, _) in client_settings({"url": url}).items()}
    keys = tokens.keys_of(found["secret"] or _secret_of(found["url"], Path(found["state_dir"])))
    return tokens.make(keys[0], "worker") if keys and not found["token"] else None


def _secret_of(url: str, folder: Path) -> str:
    """The secret of the cluster of a state directory, if that is the one at `url`, and nobody else is named there."""
    state = StateDir(folder)
    cluster = state.cluster()
    return state.secret() if cluster is not None and all(map(cluster.is_at, url.split(","))) else ""


def _own_token(secret: str) -> str | None:
    """Where the nodes' secret is, psctl needs nobody to give it a token."""
    keys = tokens.keys_of(secret)
    return tokens.make(keys[0], "admin", "psctl") if keys else None


def _printable(name: str, value: Any) -> Any:
    return redacted(name, value) if isinstance(value, str) else value


def config(as_json: Json = False) -> None:
    """Show the effective settings and where each comes from.

    A flag wins over the environment (PARAMSERVER_URL, ...), that over paramserver.toml in this folder, for example:

        url = "http://10.0.0.5:8700"
        snapshot_mib_per_s = 128

    psctl config
    """
    parts: dict[str, dict[str, tuple[Any, str]]] = {"client": client_settings({})}
    for service in (SchedulerSettings, ShardSettings, WorkerSettings):
        parts[service.section] = service.sources({}, os.environ, Path.cwd() / FILE)
    rows = [
        {"part": part, "name": name, "value": _printable(name, value), "origin": origin}
        for part, settings in parts.items()
        for name, (value, origin) in settings.items()
    ]
    if as_json:
        typer.echo(json.dumps({"items": rows, "next": None}))
        return
    table = Table("part", "setting", "value", "from", box=None)
    for row in rows:
        table.add_row(row["part"], row["name"], str(row["value"]), row["origin"])
    console().print(table)
