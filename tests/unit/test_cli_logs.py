"""psctl logs: the ends of logs, and what is written to them afterwards."""

import itertools
import time
from pathlib import Path
from subprocess import Popen
from typing import cast
from unittest.mock import Mock

import pytest
import typer

from paramserver_cli import logs, ports, state_directory, up
from paramserver_cli.launch import Failed, Launched
from paramserver_cli.processes import Processes
from paramserver_cli.state_directory import Plan, StateDir


@pytest.mark.parametrize(("lines", "shown"), [(2, ["b", "c"]), (0, [])])
def test_what_is_written_while_the_end_of_a_log_is_shown_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int, shown: list[str]
) -> None:
    """`--follow` begins where the lines that were shown ended, so that none is left out."""
    log = StateDir(tmp_path).log("shard-0")
    log.parent.mkdir()
    log.write_text("a\nb\nc\n")
    printed: list[str] = []

    def echo(text: str) -> None:
        printed.append(text)
        if text == "b":
            with log.open("a") as more:
                more.write("d\n")

    def sleep(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(typer, "echo", echo)
    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        logs.logs("shard-0", follow=True, lines=lines, state=tmp_path)
    assert printed == [*shown, *(["d"] if shown else [])]


def test_where_there_are_no_logs_it_says_where_they_are_in_containers(tmp_path: Path) -> None:
    """Without a log the error names the commands that show those of containers, whose nodes write no files."""
    with pytest.raises(Failed, match="docker compose logs, or kubectl -n paramserver logs"):
        logs.logs("shard-0", follow=False, lines=20, state=tmp_path)


def test_a_log_that_becomes_too_long_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each process a log and the one before it are kept, however long it runs, and `--follow` goes on with both."""
    monkeypatch.setattr(state_directory, "LOG_BYTES_MAX", 8)
    state = StateDir(tmp_path)
    log = state.log("shard-0")
    log.parent.mkdir()
    rounds = iter(["first\n", "1234567890\n", "second\n"])
    printed: list[str] = []

    with log.open("ab", buffering=0) as process:

        def sleep(_: float) -> None:
            state.bound_logs()
            try:
                process.write(next(rounds).encode())
            except StopIteration:
                raise KeyboardInterrupt from None

        monkeypatch.setattr(typer, "echo", printed.append)
        monkeypatch.setattr(time, "sleep", sleep)
        with pytest.raises(KeyboardInterrupt):
            logs.logs("shard-0", follow=True, lines=0, state=tmp_path)

    assert printed == ["first", "1234567890", "second"]
    assert log.read_text() == "second\n"
    assert log.with_suffix(".log.1").read_text() == "first\n1234567890\n"


@pytest.mark.parametrize("node", [None, "shard-0"])
def test_what_is_followed_goes_on_with_a_cluster_that_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str | None
) -> None:
    """`--follow` shows the rest of the old logs and then the new ones; without a name also of shards added since."""
    state = StateDir(tmp_path)
    log = state.log("shard-0")
    log.parent.mkdir()
    log.write_text("first\n")
    printed: list[str] = []

    def start_again() -> None:
        with log.open("a") as old:
            old.write("last of the old\n")
        log.rename(log.with_suffix(".log.1"))
        log.write_text("new\n")

    def sleep(_: float) -> None:
        match next(rounds):
            case 0:  # the new process has written nothing yet
                log.rename(log.with_suffix(".log.1"))
            case 1:
                log.with_suffix(".log.1").rename(log)
            case 2:
                start_again()
            case 3:
                state.log("shard-10").write_text("added\n")
            case 5:
                raise KeyboardInterrupt

    rounds = itertools.count()
    monkeypatch.setattr(typer, "echo", printed.append)
    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        logs.logs(node, follow=True, lines=1, state=tmp_path)

    alone = ["first", "last of the old", "new"]
    assert printed == (alone if node else [*(f"shard-0  {line}" for line in alone), "shard-10  added"])


def test_the_warnings_of_a_supervisor_are_shown_after_its_log_began_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`psctl up` in the foreground goes on to print them, as `psctl logs --follow` does."""
    monkeypatch.setattr(state_directory, "LOG_BYTES_MAX", 8)
    state = StateDir(tmp_path)
    state.logs.mkdir()
    rounds = iter(["at WARNING 1\n", "at ERROR 2\n"])
    printed: list[str] = []
    process = Mock(returncode=0, poll=lambda: None)

    with state.log("supervisor").open("ab", buffering=0) as supervisor:

        def sleep(_: float) -> None:
            state.bound_logs()
            try:
                supervisor.write(next(rounds).encode())
            except StopIteration:
                process.poll = lambda: 0

        monkeypatch.setattr(typer, "echo", lambda text, err: printed.append(text))
        monkeypatch.setattr(time, "sleep", sleep)
        up._watch(Launched(state, cast("Popen[bytes]", process), None))

    assert printed == ["at WARNING 1", "at ERROR 2"]


@pytest.mark.parametrize("there", [False, True])
def test_other_users_read_no_logs(tmp_path: Path, there: bool) -> None:
    """The folders of logs and of Redis are this user's, also in a folder that was there; so is a new folder."""
    state, block = StateDir(tmp_path / "here" / "state"), ports.reserve(1)
    if there:
        state.path.mkdir(parents=True)
    lock = state.lock()
    assert lock is not None
    Processes(state, Plan(shards=1), block).redis_specs()
    lock.close()
    block.lock.close()

    folders = [state.logs, state.path / "redis", *([] if there else [state.path])]
    assert [f.stat().st_mode & 0o077 for f in folders] == [0] * len(folders)
