"""What psctl says before it has asked a cluster."""

import errno
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

import paramserver as ps
from paramserver.errors import PsError, problem
from paramserver_cli import exits, runs
from paramserver_cli.launch import Failed
from paramserver_cli.main import app
from paramserver_cli.state_directory import StateDir

NOBODY = "http://127.0.0.1:1"
UNANSWERED = ("drain shard-0", "status", "models", "run list --json")


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (f"create m -f absent.yaml --url {NOBODY}", 1, "cannot read absent.yaml"),
        ("logs shard-0 --state-dir empty", 1, "--state-dir names another cluster's folder"),
        *((f"{line} --url {NOBODY}", 3, "'psctl up' starts one") for line in UNANSWERED),
        ("frobnicate", 2, "frobnicate"),
        (f"--url {NOBODY} status", 2, "--url"),
        (f"set m lrr=1 --url {NOBODY}", 2, "did you mean 'lr'"),
        (f"set m lr --url {NOBODY}", 2, "name=value"),
        ("token --days 99999999", 2, "--days"),  # it would expire so late that no node reads the number
        ("token --days inf", 2, "--days"),
        ("up --redis redis://127.0.0.1:1 --appendfsync always", 2, "this one is yours"),
        (f"train nothing.py --model m --url {NOBODY}", 2, "nothing.py"),
        (f"checkpoint save m --overwrite --url {NOBODY}", 2, "it is for a folder"),
        (f"checkpoint save m folder --name n --url {NOBODY}", 2, "not for a folder"),
    ],
)
def test_what_is_wrong_is_named(
    line: str, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing file, folder or cluster is named, the nearest first, with what to do; so is what is wrongly typed."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, line.split())
    told = " ".join(done.stderr.replace("│", " ").split())
    assert (done.exit_code, says in told) == (code, True), done.stderr


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
        (problem("invalid_field", "lr: too low", errors=({"where": "lr", "detail": "too low"},)), 1, ["lr: too low"]),
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


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (problem("unreachable", "no answer"), 3, "psctl: no answer\n"),
        (problem("unknown_run", "no run r"), 4, "psctl: no run r\n"),
        (problem("internal", "a bug"), 1, "psctl: a bug\n"),
        (Failed("no room"), 1, "psctl: no room\n"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x/y"), 1, "psctl: x/y: No such file\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_whatever_ends_a_command_is_told_in_a_line(
    error: BaseException, code: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that fails or is interrupted says so in one line, and its exit code says whose fault it is."""
    monkeypatch.setattr(runs, "connect", Mock(side_effect=error))
    monkeypatch.setattr(exits, "running", lambda: [])

    done = CliRunner().invoke(app, ["run", "list"])

    assert (done.exit_code, done.stderr) == (code, told)


@pytest.mark.skipif(sys.platform == "win32", reason="there no folder is deleted that a program is in")
def test_a_folder_that_was_deleted_is_told_in_one_line(tmp_path: Path) -> None:
    """In a folder that has been deleted, a command that needs one says so instead of a traceback."""
    here = tmp_path / "here"
    here.mkdir()
    psctl = shlex.join([sys.executable, "-P", "-m", "paramserver_cli", "status"])
    done = subprocess.run(
        ["sh", "-c", f'rmdir "$PWD" && {psctl}'], cwd=here, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stderr) == (1, "psctl: the current folder has been deleted: change to another one\n")


def test_characters_that_the_output_does_not_have_are_replaced() -> None:
    """Where standard output is ASCII, the ellipsis in a help text is a question mark, not a traceback."""
    done = CliRunner(charset="ascii").invoke(app, ["run", "series", "--help"])
    assert (done.exit_code, done.exception) == (0, None)
    assert "NAME-2, ?" in done.stdout


def test_a_command_to_copy_has_its_paths_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path with spaces is one word of the command that psctl prints."""
    monkeypatch.chdir(tmp_path)
    assert "psctl train 'my work/first/train.py' " in CliRunner().invoke(app, ["new", "my work/first"]).stdout
    told = CliRunner().invoke(app, ["secret", "my work/secret"]).stdout
    assert told.endswith(f"export PARAMSERVER_SECRET_FILE='{tmp_path}/my work/secret'\n")


def test_a_project_that_does_not_fit_the_disk_can_be_made_again(tmp_path: Path) -> None:
    """`psctl new` leaves no half-written file, which the next one would not overwrite."""
    code = """
import resource
from paramserver_cli.main import app
resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
app(["new", "project"])
"""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=50, check=False)
    assert done.returncode == 1
    assert list(tmp_path.glob("project/*")) == []


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the system that no user can do anything about is not made a line."""
    bug = OSError(errno.EBADF, "Bad file descriptor")
    monkeypatch.setattr(runs, "connect", Mock(side_effect=bug))

    assert CliRunner().invoke(app, ["run", "list"]).exception is bug


def test_ctrl_c_is_told_in_one_line_from_the_start() -> None:
    """Interrupted while its modules are still being imported, psctl ends as it does later: in one line, with 130."""
    code = """
import runpy, signal, sys

class CtrlC:
    def find_spec(self, name, path, target=None):
        if name == "paramserver_cli.main":
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell of a background job ignores it
sys.meta_path.insert(0, CtrlC())
runpy.run_module("paramserver_cli", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("error", [Failed("the cluster ended"), problem("unavailable", "no answer in 60 s")])
def test_the_logs_of_a_demo_that_fails_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Whether its training fails or its cluster answers no more, the logs that the demo has named are still there."""

    def cluster(state: StateDir, _: object) -> None:
        state.make()
        state.log("scheduler").touch()
        raise error

    monkeypatch.setattr("paramserver_cli.demo.launch.cluster", cluster)
    monkeypatch.setattr("paramserver_cli.demo._check_packages", lambda: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out")])
    assert done.exit_code != 0
    assert len(list(tmp_path.glob("paramserver-demo-*/logs/scheduler.log"))) == 1


@pytest.mark.parametrize("target", ["job.py", "job:train"])
def test_a_folder_that_workers_cannot_import_from_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Python splits its import path at a colon, so `psctl train` refuses a folder with one before anything is done."""
    folder = tmp_path / "at 10:30"
    folder.mkdir()
    (folder / "job.py").touch()
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["train", target, "--model", "m", "--url", NOBODY])
    assert (done.exit_code, "without ':'" in " ".join(done.stderr.replace("│", " ").split())) == (2, True), done.stderr
