"""psctl drain and psctl scale: move partitions between shards while training continues, and show the progress."""

from __future__ import annotations  # client classes are named, but not imported until used

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import paramserver as ps
from paramserver.errors import PsError
from paramserver.limits import MIB
from paramserver_cli import launch
from paramserver_cli.config import StateDirOption, Url, cluster_at, connect, listed, running_cluster, state_dir
from paramserver_cli.display import natural, redraws
from paramserver_cli.launch import Failed
from paramserver_cli.state_directory import Cluster, StateDir

POLL_S: Final = 0.25
QUIET_S: Final = 2.0
"""Time without a move or a change of the shards after which rebalancing counts as complete."""
SLOW_S: Final = 5.0
"""Time without a partition moved after which psctl says what it waits for."""
MOVES_SHOWN: Final = 4

Line = Mapping[str, Any]
Show = Callable[[int, int, str], None]
Timeout = Annotated[float, typer.Option(min=1.0, help="Seconds to wait; moves continue after a timeout.")]


def drain(
    shard: Annotated[str, typer.Argument(help="The shard's name, as psctl status shows it.")],
    undo: Annotated[
        bool, typer.Option("--undo", help="Cancel the drain; the shard receives partitions again.")
    ] = False,
    wait: Annotated[bool, typer.Option(help="Show the moves until the shard is empty.")] = True,
    timeout: Timeout = 600.0,
    url: Url = None,
) -> None:
    """Move all partitions of a shard to the other shards while training continues, so that it can be stopped.

    psctl drain shard-1

    psctl drain shard-1 --undo
    """
    client = connect(url)
    if undo:
        _set(client, shard, "active")
        typer.echo(f"{shard} is active again")
        return
    _drain_all(client, [shard])
    if wait:
        until_empty(client, [shard], timeout)
        typer.echo(f"{shard} is empty and can be stopped; to undo: psctl drain {shard} --undo")
    else:
        typer.echo(f"{shard} is being emptied; psctl status shows how many partitions it still has")


def scale(
    what: Annotated[str, typer.Argument(help="shards")],
    number: Annotated[int, typer.Argument(min=1, max=1024, help="Target number of shards.")],
    timeout: Timeout = 600.0,
    state: StateDirOption = None,
    url: Url = None,
) -> None:
    """Change the number of shards while training continues; refused if the remaining shards cannot hold everything.

    A cluster of psctl up on this machine starts and stops the processes itself. For other clusters, psctl prints the
    command to run, and shows the moves.

    psctl scale shards 4
    """
    if what != "shards":
        raise typer.BadParameter(f"cannot scale '{what}', only shards", param_hint="WHAT")
    local = _local_cluster(url, state)
    if local is None and state is not None and url is None:  # never take another cluster for the one in that folder
        raise Failed(f"no cluster of psctl up runs in {state_dir(state).path}; --url names any other cluster")
    if local is not None and state is not None:  # the moves must be those of the cluster whose processes change
        client = connect(",".join(local.cluster.schedulers), state_dir=str(local.state.path))
    else:
        client = connect(url)
    lines = _shards(client)
    alive = sorted((x["name"] for x in lines if x["alive"]), key=natural)
    before = alive if local is None else local.names
    for line in lines:  # left draining by an earlier attempt that was interrupted
        if line["state"] == "draining" and line["name"] in before[:number]:
            _set(client, line["name"], "active")
    if number < len(before):
        _fewer(client, before[number:], number, local, timeout)
    elif number > len(before) and local is not None:
        local.resize(number)
    elif number > len(before):
        typer.echo("start them with one of these; the moves are shown once they have joined:")
        _print_commands(number)
    _until_quiet(client, number, local, timeout)
    typer.echo(f"{number} shards")


@dataclass(frozen=True)
class _LocalCluster:
    """A cluster of psctl up on this machine, whose supervisor can start and stop shards."""

    state: StateDir
    cluster: Cluster

    @property
    def names(self) -> list[str]:
        return [f"shard-{i}" for i in range(len(self.cluster.shards))]

    def check_number(self, shards: int) -> None:
        """Raise Failed if another command has changed the number of shards to be had."""
        plan = self.state.plan()
        if plan is not None and plan.shards != shards:
            raise Failed(f"another command has set the number of shards to {plan.shards}")

    def resize(self, shards: int) -> None:
        """Change the number of shards in the plan, and wait until the supervisor has adopted it.

        Raises Failed if there is no plan, if the ports have no room or the supervisor has not said yet how much, if
        it has ended, or after 60 s.
        """
        plan, supervisor = self.state.plan(), self.state.supervisor()
        if plan is None:
            raise Failed(f"the cluster under {self.state.path} has no plan")
        room = None if supervisor is None else supervisor.shards_max
        if room is None:
            raise Failed(f"the cluster under {self.state.path} is still starting: try again")
        if shards > room:
            raise Failed(f"the ports of this cluster have room for 1 to {room} shards, not {shards}")
        self.state.write(replace(plan, shards=shards))
        launch.plan_changed(self.state)
        deadline = time.monotonic() + 60.0
        while True:
            cluster = self.state.cluster()
            if cluster is not None and len(cluster.shards) == shards:
                return
            if time.monotonic() > deadline or not self.state.is_running():
                folder = shlex.quote(str(self.state.path))
                raise Failed(f"the supervisor did not adopt the plan; see psctl logs supervisor --state-dir {folder}")
            time.sleep(POLL_S)  # the supervisor adopts the plan in its own process


def _local_cluster(url: str | None, state: Path | None) -> _LocalCluster | None:
    """Return the cluster of psctl up that a command addresses; None if it addresses another cluster.

    It is the cluster of the state directory given with `--state-dir`, else the one on this machine that the URL names.
    """
    if state is None:
        found = cluster_at(url)
        return None if found is None else _LocalCluster(*found)
    folder = state_dir(state)
    cluster = running_cluster(folder)
    return None if cluster is None else _LocalCluster(folder, cluster)


def _fewer(client: ps.Client, names: Sequence[str], number: int, local: _LocalCluster | None, timeout_s: float) -> None:
    alive = {x["name"] for x in _shards(client) if x["alive"]}
    _drain_all(client, [n for n in names if n in alive])
    until_empty(client, names, timeout_s)
    if local is not None:
        local.resize(number)
        return
    typer.echo(f"{', '.join(names)}: empty. Stop them with one of these:")
    _print_commands(number)


def _print_commands(number: int) -> None:
    typer.echo(f"  echo SHARDS={number} >> .env && docker compose up -d --no-recreate")
    typer.echo(f"  kubectl -n paramserver scale statefulset shard --replicas {number}")


# --- the cluster ---


def _shards(client: ps.Client) -> Sequence[Line]:
    return listed(client, "/shards")


def _set(client: ps.Client, shard: str, state: str) -> Line:
    answer: Line = client.request("PUT", f"/shards/{quote(shard, safe='')}", {"state": state})
    return answer


def _drain_all(client: ps.Client, names: Sequence[str]) -> None:
    """Set all of these shards to `draining`, or none of them.

    Raises ConflictError (`not_enough_memory`) with the figures, Failed if no other shard could take the partitions.
    """
    asked: list[str] = []
    try:
        for name in names:
            answer = _set(client, name, "draining")
            asked.append(name)
            if not answer["targets"]:
                raise Failed(f"no other shard could take the partitions of {name}: start one first")
    except (PsError, Failed):
        for name in asked:
            _set(client, name, "active")
        raise


def until_empty(client: ps.Client, names: Sequence[str], timeout_s: float) -> None:
    """Show the moves until none of these shards owns a partition; of a slow one, what it waits for.

    Raises Failed after `timeout_s`, or if another command has made one of them active again.
    """
    deadline, total = time.monotonic() + timeout_s, 0
    before, reason, look_s = -1, "", 0.0
    with _progress("partitions moved") as show:
        while True:
            lines = [x for x in _shards(client) if x["name"] in names]
            left = sum(x["partitions"] for x in lines)
            total = max(total, left)
            size = sum(x["bytes"] for x in lines) / MIB
            if left != before:
                before, reason, look_s = left, "", time.monotonic() + SLOW_S
            elif time.monotonic() >= look_s:
                reason, look_s = f"; {_waits_for(client, lines)}", time.monotonic() + SLOW_S
            show(total - left, total, f"{size:.1f} MiB left on {', '.join(names)}{reason}")
            if not left:
                return
            for x in lines:
                if x["state"] == "active":
                    raise Failed(f"another command has made {x['name']} active again")
            if time.monotonic() > deadline:
                still = f"{', '.join(names)} still own {left} partitions; {_waits_for(client, lines)}"
                raise Failed(f"timed out: {still}")
            time.sleep(POLL_S)  # moves happen in other processes; this is the redraw interval


def _waits_for(client: ps.Client, lines: Sequence[Line]) -> str:
    """Return what keeps the partitions of these shards where they are."""
    moves = [f"{m['model']}/{m['partition']} to {m['to']}" for x in lines for m in x["moves"]]
    if moves:
        more = f" and {len(moves) - MOVES_SHOWN} more" if len(moves) > MOVES_SHOWN else ""
        return f"slow, by way of Redis: {', '.join(moves[:MOVES_SHOWN])}{more}"
    problems = client.status()["cluster"]["problems"]
    said = f"; the status says: {problems[0]}" if problems else ""
    return f"no move has begun: its models are being loaded, restored or saved, or no other shard has room{said}"


def _until_quiet(client: ps.Client, number: int, local: _LocalCluster | None, timeout_s: float) -> None:
    """Show the moves until `number` shards are active and no move ran for QUIET_S.

    Raises Failed after `timeout_s`, or if another command has changed the number meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    owned: Mapping[str, int] = {}
    quiet_s = time.monotonic()
    done = 0
    with _progress("partitions moved") as show:
        while True:
            lines = [x for x in _shards(client) if x["alive"]]
            now = {x["name"]: int(x["partitions"]) for x in lines if x["state"] == "active"}
            under_way = sum(len(x["moves"]) for x in lines)
            done += sum(max(0, n - owned.get(name, n)) for name, n in now.items()) if owned else 0
            if now != owned or under_way or len(now) != number:
                owned, quiet_s = now, time.monotonic()
            spread = "  ".join(f"{name} {n}" for name, n in sorted(now.items(), key=lambda i: natural(i[0])))
            show(done, done + under_way, f"{len(now)} of {number} shards: {spread}")
            if time.monotonic() - quiet_s > QUIET_S:
                return
            if local is not None:
                local.check_number(number)
            if time.monotonic() > deadline:
                still = f"{len(now)} of {number} shards are active, {under_way} moves are in progress"
                raise Failed(f"timed out: {still}")
            time.sleep(POLL_S)  # the redraw interval, as above


@contextmanager
def _progress(title: str) -> Iterator[Show]:
    """Show progress: as a bar at a terminal that can redraw it, elsewhere as a line whenever its text changes."""
    console = Console(stderr=True)
    if not redraws(console):
        last = ""

        def print_line(done: int, total: int, text: str) -> None:
            nonlocal last
            line = f"{done} of {total} {title}; {text}"
            if line != last:
                typer.echo(line, err=True)
            last = line

        yield print_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, text="")

        def draw(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total or None, text=text)

        yield draw
