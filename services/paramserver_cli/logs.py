"""psctl logs: shows the output of the processes of a cluster on this machine."""

import time
from contextlib import ExitStack
from typing import Annotated

import typer

from paramserver_cli.config import StateDirOption, state_dir
from paramserver_cli.launch import Failed
from paramserver_cli.state_directory import last_lines, new_lines

FOLLOW_S = 0.25


def logs(
    node: Annotated[str | None, typer.Argument(help="scheduler, shard-0, worker-1, redis, ...; none: all.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines from the end of each.")] = 20,
    state: StateDirOption = None,
) -> None:
    """Show the logs of a cluster on this machine.

    psctl logs shard-0

    psctl logs -f
    """
    folder = state_dir(state)
    found = {p.stem: p for p in sorted(folder.logs.glob("*.log"))}
    if not found:
        raise Failed(
            f"there are no logs in {folder.logs}; --state-dir names another cluster's folder; in containers: "
            "docker compose logs, or kubectl -n paramserver logs"
        )
    if node is not None and node not in found:
        raise Failed(f"there is no log of '{node}' in {folder.logs}; there are: {', '.join(found)}")
    chosen = found if node is None else {node: found[node]}
    width = max(map(len, chosen)) if node is None else 0
    with ExitStack() as opened:
        files = {name: opened.enter_context(path.open("rb")) for name, path in chosen.items()}
        for name, file in files.items():
            for line in last_lines(file, lines):
                _print(name, line, width)
        while follow:
            for name, file in files.items():
                for line in new_lines(file):
                    _print(name, line, width)
            time.sleep(FOLLOW_S)  # poll: nothing notifies us that a file has grown


def _print(name: str, line: str, width: int) -> None:
    typer.echo(f"{name:{width}}  {line}" if width else line)
