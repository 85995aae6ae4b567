"""What `psctl up` is to start: the options given, else what the folder's cluster had, else the defaults."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from paramserver_cli import up
from paramserver_cli.launch import Failed
from paramserver_cli.main import app
from paramserver_cli.state_directory import Plan, StateDir

REDIS = "redis://:secret@10.0.0.3:6379/0"
OTHER = "redis://10.0.0.4:6379/0"
LOCAL = "--shards 1 --workers 0 --lifeline 5"
"""What `ps.local()` gives."""
CHECK_REDIS = up._check_redis


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`psctl up` writes its plan, and starts nothing."""

    def launch(state: StateDir, plan: Plan, **_: Any) -> None:
        state.make()
        state.write(plan)

    monkeypatch.setattr("paramserver_cli.up.launch.launch", launch)
    for name in ("_check_redis", "_wait", "_print_summary"):
        monkeypatch.setattr(up, name, lambda *_, **__: None)


def planned(folder: Path, *options: str) -> tuple[Plan | None, str]:
    """Return what `psctl up` would start with these options, and what it says."""
    done = CliRunner().invoke(app, ["up", "--detach", "--state-dir", str(folder), *options])
    assert done.exit_code == 0, done.output
    return StateDir(folder).plan(), done.stderr


@pytest.mark.parametrize(
    ("options", "more", "plan", "said"),
    [
        ("", "", Plan(), ""),
        ("--shards 3 --port 8800", "", Plan(shards=3, port=8800), "as before: --shards 3 --port 8800 ("),
        ("--shards 3 --workers 4", "--shards 2", Plan(shards=2, workers=4), "as before: --workers 4 ("),
        ("--appendfsync always --schedulers 2", "", Plan(schedulers=2, appendfsync="always"), "--appendfsync always"),
        ("--appendfsync always", f"--redis {REDIS}", Plan(redis=REDIS), ""),
        (f"--redis {REDIS}", "", Plan(redis=REDIS), "--redis 'redis://:***@10.0.0.3:6379/0'"),
        ("--allow a --allow b", "", Plan(allow=["a", "b"]), "--allow a --allow b"),
        ("--host 0.0.0.0 --insecure", "", Plan(host="0.0.0.0", insecure=True), "--host 0.0.0.0 --insecure"),
        ("--host 0.0.0.0 --insecure", "--host ::", Plan(host="::"), ""),
        (f"--redis {REDIS} --workers 4", "--redis own", Plan(workers=4), "as before: --workers 4 ("),
        ("--host 0.0.0.0 --insecure --port 8800 --schedulers 2 --shards 3 --workers 4", LOCAL, Plan(shards=1), ""),
        ("--appendfsync always --allow a", LOCAL, Plan(1, allow=["a"], appendfsync="always"), "--appendfsync always ("),
        (f"--redis {REDIS}", LOCAL, Plan(1, redis=REDIS), "--redis 'redis://:***@10.0.0.3:6379/0'"),
    ],
)
def test_options_that_are_not_given_are_as_before(
    tmp_path: Path, options: str, more: str, plan: Plan, said: str
) -> None:
    """Options that are not given are those of the folder's last cluster, and it says which differ from the defaults."""
    assert planned(tmp_path / "new", *options.split())[1].count("as before") == 0

    found, says = planned(tmp_path / "new", *more.split())

    assert found == plan
    assert said in says
    assert bool(said) == ("as before" in says)


def test_a_redis_of_the_folders_own_stays_where_another_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`PARAMSERVER_REDIS` does not take the place of a Redis that `up` has started, by default or as `--redis own`."""
    planned(tmp_path / "earlier", "--appendfsync", "always")
    monkeypatch.setenv("PARAMSERVER_REDIS", OTHER)
    planned(tmp_path / "given", "--redis", "own", "--appendfsync", "always")

    for folder in ("earlier", "given"):
        found, says = planned(tmp_path / folder)
        assert found == Plan(appendfsync="always")
        assert "as before: --redis own --appendfsync always (" in says
        assert planned(tmp_path / folder, "--redis", OTHER)[0] == Plan(redis=OTHER)


def test_a_redis_that_is_set_takes_the_place_of_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`PARAMSERVER_REDIS` is followed where a Redis that runs already has moved or has another password, and told."""
    planned(tmp_path / "new", "--redis", REDIS)
    monkeypatch.setenv("PARAMSERVER_REDIS", REDIS.replace("secret", "newer"))
    assert planned(tmp_path / "new") == (Plan(redis=REDIS.replace("secret", "newer")), "")

    monkeypatch.setenv("PARAMSERVER_REDIS", OTHER)
    found, says = planned(tmp_path / "new")

    assert found == Plan(redis=OTHER)
    assert says == f"not as before: the Redis at {OTHER}, in place of redis://:***@10.0.0.3:6379/0\n"


@pytest.mark.parametrize("first", ["--shards 3", ""], ids=["goes on", "new"])
def test_what_kept_a_cluster_from_starting_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """A start that fails leaves the plan of before, so that the next one does not fail for the same option."""
    before = planned(tmp_path / "new", *first.split())[0] if first else None
    with monkeypatch.context() as patch:
        patch.setattr(up, "_wait", Mock(side_effect=Failed("the address is not one of this machine")))
        patch.setattr("paramserver_cli.up.launch.end", lambda _: None)
        CliRunner().invoke(app, ["up", "--detach", "--state-dir", str(tmp_path / "new"), "--host", "10.9.9.9"])

    assert StateDir(tmp_path / "new").plan() == before
    assert planned(tmp_path / "new")[0] == (before or Plan())


def test_ctrl_c_leaves_the_plan_of_a_cluster_that_was_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster in the foreground that was ready and is ended by Ctrl-C has the same options the next time."""
    with monkeypatch.context() as patch:
        patch.setattr("paramserver_cli.up.unwind.on_signals", lambda: None)
        patch.setattr(up, "_watch", Mock(side_effect=KeyboardInterrupt))
        patch.setattr("paramserver_cli.up.launch.end", lambda _: None)
        done = CliRunner().invoke(app, ["up", "--shards", "3", "--state-dir", str(tmp_path / "new")])

    assert done.exit_code == 130, done.output
    assert planned(tmp_path / "new")[0] == Plan(shards=3)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"shards": "x"}', '{"shards": 0}', '{"appendfsync": "no"}'])
def test_a_plan_that_cannot_be_read_is_a_line_that_says_what_to_do(tmp_path: Path, text: str) -> None:
    """A `plan.json` that is broken, as after a power cut, or edited wrongly, is named, and no traceback."""
    (tmp_path / "plan.json").write_text(text)

    done = CliRunner().invoke(app, ["up", "--detach", "--state-dir", str(tmp_path)])

    assert done.exit_code == 1
    assert done.stderr.startswith(f"psctl: {tmp_path / 'plan.json'}, the options of before, cannot be used: ")
    assert done.stderr.endswith(" (delete it)\n")
    assert (tmp_path / "plan.json").read_text() == text


def test_a_redis_of_before_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the Redis of the last cluster does not answer any more, `up` says that it is that one, and what to do."""
    gone = "redis://127.0.0.1:1/0"
    planned(tmp_path / "new", "--redis", gone)
    monkeypatch.setattr(up, "_check_redis", CHECK_REDIS)

    done = CliRunner().invoke(app, ["up", "--detach", "--state-dir", str(tmp_path / "new")])

    assert done.exit_code == 3
    assert f"the Redis at {gone}, the one of before, cannot be used" in done.stderr
    assert "--redis own" in done.stderr
    assert planned(tmp_path / "new", "--redis", "own")[0] == Plan()
