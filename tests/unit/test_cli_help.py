"""The help of psctl's commands."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paramserver_cli.main import app


def _commands(command: Any, path: str = "psctl") -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", {})
    if not inner:
        yield path, command
    for name, one in inner.items():
        yield from _commands(one, f"{path} {name}")


@pytest.mark.parametrize(("path", "command"), list(_commands(typer.main.get_command(app))))
def test_help_shows_how_a_command_is_typed(path: str, command: Any) -> None:
    """The help of each command has an example of it on a line of its own."""
    assert [line for line in f"{command.help}\n{command.epilog}".splitlines() if line.strip().startswith(path)]


@pytest.mark.parametrize("path", [path for path, _ in _commands(typer.main.get_command(app))])
def test_the_lines_of_help_fill_the_terminal(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of a paragraph ends where the next word does not fit; blocks that are indented stay as they are."""
    monkeypatch.setenv("COLUMNS", "100")
    shown = CliRunner().invoke(app, [*path.split()[1:], "--help"]).output
    lines = [line.rstrip() for line in shown.partition("\u256d")[0].splitlines()]
    assert "Usage: " in shown
    for line, following in pairwise(lines):
        if line and following and not line.startswith("  "):
            assert len(line) + len(following.split()[0]) + 1 > 97, line
