"""psctl status: shows nodes, models and runs of a cluster, once or repeatedly."""

from __future__ import annotations  # client classes are named, but not imported until used

import json
import sys
import time
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Column
from rich.text import Text

import paramserver as ps
from paramserver.errors import Unavailable
from paramserver.limits import MIB
from paramserver_cli.config import Json, Url, connect
from paramserver_cli.display import NOT_FINITE, columns, console, last_line, natural, redraws

WATCH_S = 1.0
WAITED_FOR_SHOWN = 8
"""Workers named per model that the others wait for; a thousand would fill the terminal."""
PROBLEMS_SHOWN = 8
"""Problems printed; after a restart each of many models is one until it is loaded."""


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second until Ctrl-C.")] = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Show the cluster: nodes with heartbeat ages; models with versions, clocks, lag and workers waited for; runs.

    psctl status --watch

    psctl status --json | jq .models
    """
    client = connect(url)
    if not watch:
        found = client.status()
        if as_json:
            typer.echo(json.dumps(found))
        else:
            console().print(table(found))
        return
    if as_json or not redraws(console()):
        _print_each_second(client, as_json)
    with Live(console=console(), auto_refresh=False, screen=False) as live:
        while True:
            try:
                live.update(table(client.status(timeout=2 * WATCH_S)), refresh=True)
            except Unavailable as e:
                live.update(Text(str(e), style="red"), refresh=True)
            time.sleep(WATCH_S)


def _print_each_second(client: ps.Client, as_json: bool) -> NoReturn:
    """Print one status after another, for what reads a pipe or a file; why there is none goes to standard error."""
    while True:
        try:
            found = client.status(timeout=2 * WATCH_S)
        except Unavailable as e:
            typer.echo(f"psctl: {e}", err=True)
        else:
            if as_json:
                typer.echo(json.dumps(found))
            else:
                console().print(table(found), "")
                sys.stdout.flush()
        time.sleep(WATCH_S)


def table(found: dict[str, Any]) -> RenderableType:
    """Return the status as tables."""
    cluster = found["cluster"]
    head = Text(f"cluster {cluster['state']}, redis {cluster['redis']}, up {cluster['uptime_s']:.0f} s")
    problems = cluster["problems"][:PROBLEMS_SHOWN]
    if more := len(cluster["problems"]) - len(problems):
        problems.append(f"and {more} more")
    parts: list[RenderableType] = [head, *(Text(f"! {p}", style="red") for p in problems)]
    nodes = columns(_name("node"), "state", "heartbeat", "partitions", "MiB", "address")
    for n in sorted(found["nodes"], key=_place):
        # A node that left in good order sends no heartbeats, either, but is no problem.
        state = n["state"] if n["alive"] or n["state"] == "left" else "dead"
        if n["role"] == "scheduler" and state == "active":
            state = "leads"
        size = f"{n['bytes'] / MIB:.1f}"
        address = ", ".join(a for a in n["addresses"] if a.startswith("http"))
        nodes.add_row(n["name"], state, f"{n['heartbeat_age_s']:.1f} s", str(n["partitions"]), size, address)
    parts += [Text(), nodes]
    if found["models"]:
        models = columns(_name("model"), "mode", "state", "version", "clock", "pushes/s", "lag", "workers", "last")
        for m in sorted(found["models"], key=lambda m: natural(m["name"])):
            metrics = {n: f"{x:.4g}" for n, (_, x) in m["latest"].items()} | dict.fromkeys(m["not_finite"], NOT_FINITE)
            last = "  ".join(f"{name} {value}" for name, value in metrics.items())
            lag = "-" if m["lag"] is None else f"{m['lag']:.1f}"
            numbers = (str(m["version"]), str(m["clock"]), f"{m['pushes_per_s']:.1f}", lag)
            workers = sum(w["alive"] for w in m["workers"])
            state = f"{m['state']}, {len(m['moving'])} moving" if m["moving"] else m["state"]
            models.add_row(m["name"], m["mode"], state, *numbers, str(workers), last)
        parts += [Text(), models]
        parts += [_waiting_line(m) for m in found["models"] if m["waiting_for"]]
    if found["runs"]:
        runs = columns(_name("run"), "model", "state", "workers", "")
        for r in found["runs"]:
            runs.add_row(r["id"], r["model"], r["state"], f"{r['placed']} of {r['workers']}", last_line(r["reason"]))
        parts += [Text(), runs]
    return Group(*parts)


def _place(node: dict[str, Any]) -> tuple[int, list[Any]]:
    """Return a sort key for a node: by role, then by name, but of the schedulers the leader stays the first one."""
    role = node["role"]
    return ("scheduler", "shard", "pool").index(role), [] if role == "scheduler" else natural(node["name"])


def _name(title: str) -> Column:
    """Return a column whose texts are whole also in a narrow terminal."""
    return Column(title, no_wrap=True)


def _waiting_line(model: dict[str, Any]) -> Text:
    """Return a line with the workers that the others of a model wait for: why a synchronous training is stalled."""
    names = model["waiting_for"]
    more = f" and {len(names) - WAITED_FOR_SHOWN} more" if len(names) > WAITED_FOR_SHOWN else ""
    return Text(f"! {model['name']} waits for {', '.join(names[:WAITED_FOR_SHOWN])}{more}", style="yellow")
