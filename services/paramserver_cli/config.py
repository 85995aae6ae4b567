"""Settings of psctl and their origins: flag over environment `PARAMSERVER_…` over `paramserver.toml`."""

from __future__ import annotations  # client classes are named, but not imported until used

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import paramserver as ps
from paramserver_cli.display import columns, console, print_list
from paramserver_cli.state_directory import Cluster, StateDir, running
from paramserver_node import tokens
from paramserver_node.setting_checks import check_ca, shown
from paramserver_node.settings import (
    FILE,
    ClientSettings,
    SchedulerSettings,
    ShardSettings,
    WorkerSettings,
    redacted,
)

Url = Annotated[
    str | None,
    typer.Option(
        "--url", help="The cluster; default: PARAMSERVER_URL, else the cluster of this folder.", show_default=False
    ),
]
StateDirOption = Annotated[
    Path | None,
    typer.Option("--state-dir", help="Folder of the cluster's files; default: .paramserver here.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _client_sources(flags: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return each client setting as (value, origin).

    If no URL is set, the URL is that of the cluster running under the state directory, if any: after `psctl up` the
    next command finds the cluster, even if the default ports were taken.
    """
    found = ClientSettings.sources(flags, os.environ, Path.cwd() / FILE)
    if found["url"][1] == "default":
        state = StateDir(Path(found["state_dir"][0]))
        cluster = running_cluster(state)
        if cluster is not None:
            found["url"] = (",".join(cluster.schedulers), str(state.path / "cluster.json"))
    return found


def running_cluster(state: StateDir) -> Cluster | None:
    """Return the cluster that runs in that directory, if it is this user's."""
    try:
        return state.cluster() if state.is_running() else None
    except OSError:  # another user's, or a file system without locks, where none can run
        return None


def cluster_at(url: str | None) -> tuple[StateDir, Cluster] | None:
    """Return this user's cluster on this machine that `--url` or the settings name, with its directory; else None.

    It may have been started from another folder.  Other users' clusters are not listed; they could not be changed.
    """
    meant = client_settings({"url": url}).url

    def states() -> Iterator[StateDir]:
        yield state_dir(None)
        yield from running()  # which looks at every process of the machine

    for state in states():
        cluster = running_cluster(state)
        if cluster is not None and cluster.is_at(meant):
            return state, cluster
    return None


def client_settings(flags: Mapping[str, Any]) -> ClientSettings:
    """Return the client's settings; the URL is that of the cluster under the state directory if none is set."""
    return _values(_client_sources(flags))


def _values(sources: Mapping[str, tuple[Any, str]]) -> ClientSettings:
    return ClientSettings(**{name: value for name, (value, _) in sources.items()})


def state_dir(flag: Path | None) -> StateDir:
    """Return the state directory of a command: `flag` if given, else the setting `state_dir`."""
    return StateDir(Path(client_settings({"state_dir": None if flag is None else str(flag)}).state_dir))


def secret_of(state: StateDir) -> str:
    """Return the secret that is set, else the one of the cluster in that directory; empty if there is neither."""
    return client_settings({}).secret or state.secret()


def redis_url(flag: str | None) -> str | None:
    """Return the Redis URL from the flag, the environment or `paramserver.toml`; None if none of them sets it."""
    if flag is not None and shown(flag) != flag:
        # The command line of this process is already visible; the warning helps the next start.
        typer.echo(
            "warning: other users of this machine can read the password in --redis while this command runs; "
            "set PARAMSERVER_REDIS or PARAMSERVER_REDIS_FILE instead",
            err=True,
        )
    value, origin = SchedulerSettings.sources({"redis": flag}, os.environ, Path.cwd() / FILE)["redis"]
    return None if origin == "default" else str(value)


def connect(url: str | None, *, timeout_s: float | None = None, state_dir: str | None = None) -> ps.Client:
    """Connect to the cluster that the flag `--url` or the settings name; `state_dir` overrides the setting.

    Without a token setting, the client gets an admin token made from the cluster's secret, if that is known here.
    Raises Unreachable if no URL answers, RequestError (`invalid_field`) if the CA file cannot be used.
    """
    sources = _client_sources({"url": url, "timeout_s": timeout_s, "state_dir": state_dir})
    check_ca(*sources["ca"])
    found = _values(sources)
    token = found.token or tokens.of_secret(_secret(found), "admin", "psctl")
    return ps.connect(found.url, timeout=found.timeout_s, token=token, ca=found.ca or None)


def listed(client: ps.Client, path: str, timeout: float | None = None) -> list[dict[str, Any]]:
    """Return all items of one of the cluster's lists, which come in pages."""
    from paramserver.client import control  # loaded with the client

    return client.run(control.listed(path, client.deadline(timeout)))


def worker_token(url: str | None) -> str | None:
    """Return a token for workers of the cluster; None if no secret is known here, or a token is set: they get that."""
    found = client_settings({"url": url})
    return None if found.token else tokens.of_secret(_secret(found), "worker", tokens.POOL)


def _secret(settings: ClientSettings) -> str:
    """Return the secret that is set, or that of the cluster under `state_dir` if all URLs are its schedulers, or "".

    That cluster has to run: the files of one that was killed are still there, but its ports may be anybody's.
    """
    if settings.secret:
        return settings.secret
    state = StateDir(Path(settings.state_dir))
    cluster = running_cluster(state)
    return state.secret() if cluster is not None and all(map(cluster.is_at, settings.url.split(","))) else ""


def config(as_json: Json = False) -> None:
    """Show the effective settings and where each comes from.

    A flag wins over the environment (PARAMSERVER_URL, ...), which wins over paramserver.toml in this folder, such as:

        url = "http://10.0.0.5:8700"
        snapshot_mib_per_s = 128

    psctl config
    """
    parts: dict[str, dict[str, tuple[Any, str]]] = {"client": _client_sources({})}
    for service in (SchedulerSettings, ShardSettings, WorkerSettings):
        parts[service.section] = service.sources({}, os.environ, Path.cwd() / FILE)
    rows = [
        {"part": part, "name": name, "value": redacted(name, v) if isinstance(v, str) else v, "origin": origin}
        for part, settings in parts.items()
        for name, (v, origin) in settings.items()
    ]
    if as_json:
        print_list(rows)
        return
    table = columns("part", "setting", "value", "from")
    for row in rows:
        table.add_row(row["part"], row["name"], str(row["value"]), row["origin"])
    console().print(table)
