"""What psctl says before it has asked a cluster."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import paramserver as ps
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
