"""What psctl says before it has asked a cluster."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

import paramserver as ps
from paramserver.errors import PsError, problem
from paramserver_cli import exits, runs
from paramserver_cli.cluster_file import StateDir
from paramserver_cli.main import app

NOBODY = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (f"create m -f absent.yaml --url {NOBODY}", 1, "cannot read absent.yaml"),
        ("logs shard-0 --state-dir empty", 1, "--state-dir names another cluster's folder"),
        (f"drain shard-0 --url {NOBODY}", 3, "'psctl up' starts one"),
    ],
)
def test_what_is_missing_is_named(
    line: str, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing file, folder or cluster is named, the nearest first, with what to do."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, line.split())
    assert (done.exit_code, says in done.stderr) == (code, True), done.stderr


def test_the_version_can_be_asked_for() -> None:
    """`psctl --version` prints the version that the library has."""
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout.strip()) == (0, ps.__version__)


@pytest.mark.parametrize(
    ("error", "clusters", "lines"),
    [
        (problem("unreachable", "no answer"), 1, ["no answer", "psctl list shows the clusters"]),
        (problem("unreachable", "no answer"), 0, ["no answer"]),
        (problem("unknown_run", "no run r"), 1, ["no run r"]),
        (
            problem("invalid_field", "wrong", errors=({"where": "lr", "detail": "too low"},)),
            1,
            ["wrong", "lr: too low"],
        ),
    ],
)
def test_an_error_has_a_line_for_each_fault_and_for_what_helps(
    error: PsError, clusters: int, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wrong field has a line of its own; where no cluster answers, one tells how to find those that run here."""
    monkeypatch.setattr(runs, "connect", Mock(side_effect=error))
    monkeypatch.setattr(exits, "running", lambda: [StateDir(tmp_path)] * clusters)

    told = CliRunner().invoke(app, ["run", "list"]).stderr.splitlines()

    assert len(told) == len(lines)
    assert all(part in line for part, line in zip(lines, told, strict=True))
