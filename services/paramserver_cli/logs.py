"""psctl logs: shows the output of the processes of a cluster on this machine."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from paramserver_cli.config import StateDirOption, state_dir
from paramserver_cli.launch import Failed
from paramserver_cli.state_directory import StateDir, last_lines, new_lines

FOLLOW_S = 0.25


def logs(
    node: Annotated[str | None, typer.Argument(help="scheduler, shard-0, worker-1, redis, ...; none: all.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines, also of a cluster that is started again.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines from the end of each.")] = 20,
    state: StateDirOption = None,
) -> None:
    """Show the logs of a cluster on this machine.

    psctl logs shard-0

    psctl logs -f
    """
    folder = state_dir(state)
    found = _found(folder)
    if not found:
        raise Failed(
            f"there are no logs in {folder.logs}; --state-dir names another cluster's folder; in containers: "
            "docker compose logs, or kubectl -n paramserver logs"
        )
    if node is not None and node not in found:
        raise Failed(f"there is no log of '{node}' in {folder.logs}; there are: {', '.join(found)}")
    files: dict[str, BinaryIO] = {}

    def show(name: str, some: Iterable[str]) -> None:
        width = 0 if node is not None else max(map(len, files))
        for line in some:
            typer.echo(f"{name:{width}}  {line}" if width else line)

    try:
        files |= {name: path.open("rb") for name, path in found.items() if node in (None, name)}
        for name, file in files.items():
            show(name, last_lines(file, lines))
        while follow:
            begun = {n: p for n, p in _found(folder).items() if node in (None, n) and not _is_open(files.get(n), p)}
            for name, file in files.items():
                show(name, new_lines(file))  # of one that is no longer at its path, the rest
            for name, path in begun.items():
                with suppress(FileNotFoundError):  # moved away just now
                    file = path.open("rb")
                    if name in files:
                        files[name].close()
                    files[name] = file
            time.sleep(FOLLOW_S)  # poll: nothing notifies us that a file has grown
    finally:
        for file in files.values():
            file.close()


def _found(folder: StateDir) -> dict[str, Path]:
    """Return the paths of the logs, by process."""
    return {p.stem: p for p in sorted(folder.logs.glob("*.log"))}


def _is_open(file: BinaryIO | None, path: Path) -> bool:
    """Whether this file is the one at that path, not the log of an earlier start."""
    try:
        return file is not None and os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:  # moved away just now
        return True
