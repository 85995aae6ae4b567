"""The parts of psctl that need no cluster."""

import asyncio
import errno
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from rich.console import Console
from tests.waiting import eventually
from typer.testing import CliRunner

from paramserver.errors import problem
from paramserver_cli import config, demo, exits, moves, ports, runs, supervisor, train, up
from paramserver_cli.assignments import spec_patch
from paramserver_cli.children import Guard
from paramserver_cli.display import CHART_WIDTH, picture, plain_line, sparkline
from paramserver_cli.launch import Failed
from paramserver_cli.main import app
from paramserver_cli.models import read_spec
from paramserver_cli.processes import Processes
from paramserver_cli.state_directory import MODULE, Cluster, Plan, StateDir, SupervisorState, running
from paramserver_cli.training import Sample, Training, WorkerLine
from paramserver_node.settings import ClientSettings
from paramserver_worker.entry import load

from . import virtual_time


@pytest.mark.parametrize(
    ("words", "patch"),
    [
        (["lr=0.05"], {"optimizer": {"lr": 0.05}}),
        (["mode=ssp", "staleness=2"], {"consistency": {"mode": "ssp", "staleness": 2}}),
        (["optimizer=adam", "betas=[0.9,0.95]"], {"optimizer": {"name": "adam", "betas": [0.9, 0.95]}}),
        (["consistency=ssp", "staleness=2"], {"consistency": {"mode": "ssp", "staleness": 2}}),
        (["late=fold"], {"consistency": {"late": "fold"}}),
        (["evaluate_every=10", "keep=5"], {"evaluate_every": 10, "checkpoint": {"keep": 5}}),
        (["optimizer.schedule.kind=cosine"], {"optimizer": {"schedule": {"kind": "cosine"}}}),
        (["clip_norm=null"], {"optimizer": {"clip_norm": None}}),
        (["schedule.gamma=0.9"], {"optimizer": {"schedule": {"gamma": 0.9}}}),
        (["params.0.weight.lr_scale=0.1"], {"params": {"0.weight": {"lr_scale": 0.1}}}),
        (['params.0.weight={"trainable":false}'], {"params": {"0.weight": {"trainable": False}}}),
        (['params={"0.weight":{"lr_scale":2}}'], {"params": {"0.weight": {"lr_scale": 2}}}),
    ],
)
def test_settings_on_the_command_line_become_a_patch(words: list[str], patch: dict[str, Any]) -> None:
    """Each setting goes into the section of the spec that it belongs to, with its JSON type."""
    assert spec_patch(words) == patch


@pytest.mark.parametrize(("word", "says"), [("lrr=1", "did you mean 'lr'"), ("lr", "name=value"), ("=3", "name=value")])
def test_a_wrong_setting_is_a_usage_error(word: str, says: str) -> None:
    """A word with an unknown name, or not of the form name=value, is a usage error that says so."""
    with pytest.raises(typer.BadParameter, match=says):
        spec_patch([word])


def test_a_setting_within_a_value_is_a_usage_error() -> None:
    """A word that sets a field inside a value that another word sets is a usage error."""
    with pytest.raises(typer.BadParameter, match="another word sets to"):
        spec_patch(["lr=0.1", "optimizer.lr.x=3"])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\x7fELF\xd0", "can't decode byte 0xd0"),
        (b"params:\n  w: {shape: [3]}}", "line 2, column 18"),
        (b"w: \0", "position 3"),
        (b"w: 2001-99-99", "month"),
    ],
)
def test_a_spec_that_is_no_text_or_no_yaml_is_told_in_one_line(tmp_path: Path, content: bytes, why: str) -> None:
    """A spec file that cannot be parsed is reported as not YAML, in one line that says why and where."""
    (tmp_path / "spec").write_bytes(content)
    with pytest.raises(Failed, match="spec is not YAML") as e:
        read_spec(tmp_path / "spec")
    (line,) = str(e.value).splitlines()
    assert why in line


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("unreachable", 3),
        ("no_leader", 3),
        ("unknown_model", 4),
        ("forbidden", 4),
        ("invalid_field", 4),
        ("internal", 1),
    ],
)
def test_errors_lead_to_exit_codes(code: str, exit_code: int) -> None:
    """The exit code is 3 if the cluster does not answer, 4 if it refuses, and 1 for any other error."""
    assert exits.code_of(problem(code, "x")) == exit_code


def psctl(*words: str) -> tuple[int, str]:
    """Run psctl in this process; return its exit code and standard error."""
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("up", "--state-dir", "FILE/x"),
        ("up", "--state-dir", "FILE"),
        ("secret", "FILE/x"),
        ("new", "FILE/x"),
        ("demo", "--out", "FILE/x"),
    ],
)
def test_a_path_that_cannot_be_used_is_told_in_one_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    """A path that cannot be a folder, or is inside a file, is reported in one line that names it, with exit code 1."""
    file = tmp_path / "file"
    file.touch()
    code, text = psctl(*(w.replace("FILE", str(file)) for w in words))
    assert code == 1
    (line,) = text.splitlines()
    assert line.startswith(f"psctl: {file}")
    assert "directory" in line


def test_advice_for_programs_is_given_in_the_words_of_the_command_line() -> None:
    """Hints for Python and REST callers are replaced by command-line advice; other hints are kept."""
    for advice, words in exits.HINTS.items():
        assert exits.one_line(problem("conflict", "it is there", hint=advice)) == f"it is there ({words})"
    assert exits.one_line(problem("conflict", "x", hint="another")) == "x (another)"
    assert exits.one_line(problem("conflict", "x")) == "x"


@pytest.mark.parametrize("advice", exits.HINTS)
def test_advice_that_is_translated_is_given_somewhere(advice: str) -> None:
    """Every hint that psctl replaces occurs in the library or a service, so rewording one there fails this test."""
    root, own = Path(__file__).parents[2], Path(exits.__file__)
    files = [p for folder in ("shared", "services") for p in (root / folder).rglob("*.py") if p != own]
    assert [p for p in files if advice in p.read_text()]


def test_why_a_run_failed_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Square brackets in an exception's text are printed, not taken for the markup of a terminal's text."""
    why = "KeyError: '[/data] has no [a, b] :x:'"
    failed = {"id": "run-1", "model": "m", "entry": "a:b", "state": "failed", "created_s": 1.0, "reason": f"T\n{why}"}
    monkeypatch.setattr(runs, "connect", lambda url: SimpleNamespace(runs=lambda: [failed]))

    listed = CliRunner().invoke(app, ["run", "list"])

    assert listed.exit_code == 0
    assert why in listed.stdout


def test_a_state_directory_gives_back_what_was_written(tmp_path: Path) -> None:
    """Plan, cluster and supervisor state are read as written, or None if missing; `remove_run_files` keeps the plan."""
    state = StateDir(tmp_path)
    cluster = Cluster(
        "http://h:1", ["http://h:2"], "redis://h:3", None, {"shards": [4, None]}, str(tmp_path), ["http://h:1"]
    )
    assert (state.plan(), state.cluster(), state.supervisor()) == (None, None, None)

    for document in (Plan(shards=3), cluster, SupervisorState(7, "ready", {"redis": 2})):
        state.write(document)

    assert state.plan() == Plan(shards=3)
    assert state.cluster() == cluster
    assert state.supervisor() == SupervisorState(7, "ready", {"redis": 2})
    state.remove_run_files()
    assert (state.plan(), state.cluster(), state.supervisor()) == (Plan(shards=3), None, None)


def test_the_files_of_a_cluster_of_another_version_are_read(tmp_path: Path) -> None:
    """What another version wrote besides keeps psctl from nothing, such as ending that cluster."""
    state = StateDir(tmp_path)
    cluster = Cluster("http://h:1", ["http://h:2"], "redis://h:3", None, {}, str(tmp_path), ["http://h:1"])
    for document in (Plan(shards=3), cluster, SupervisorState(7, "ready")):
        state.write(document)
    for file in tmp_path.glob("*.json"):
        file.write_text(json.dumps({"of_another_version": 1, **json.loads(file.read_text())}))

    assert (state.plan(), state.cluster(), state.supervisor()) == (Plan(3), cluster, SupervisorState(7, "ready"))


def test_a_start_that_fails_says_why_however_deep_the_error_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed start reports the innermost error, not the exception groups around it."""

    async def fails(self: supervisor.Supervisor) -> None:
        raise ExceptionGroup("start", [ExceptionGroup("step", [OSError("no space left")])])

    monkeypatch.setattr(supervisor.Supervisor, "run", fails)
    state, block, guard = StateDir(tmp_path), ports.reserve(1), Guard()
    lock = state.lock()
    assert lock is not None
    with lock, closing(guard), closing(block.lock):
        assert asyncio.run(supervisor._main(state, Plan(shards=1), block, guard, lock.fileno(), None)) == 1
    said = state.supervisor()
    assert said is not None
    assert (said.phase, said.error) == ("failed", "no space left")


@pytest.mark.parametrize(("name", "killed_after_s"), [("shard-0", 105.0), ("scheduler", 10.0)])
def test_a_shard_has_its_own_time_and_more_before_it_is_killed(
    tmp_path: Path, name: str, killed_after_s: float
) -> None:
    """A shard that does not end is killed 5 s after its `stop_s`, any other process after 10 s."""

    async def stop() -> float:
        cluster.stop.set()
        await cluster._stop_children()
        return asyncio.get_running_loop().time()

    state, block, guard = StateDir(tmp_path), ports.reserve(1), Guard()
    lock = state.lock()
    assert lock is not None
    cluster = supervisor.Supervisor(Processes(state, Plan(shards=1, stop_s=100.0), block), guard, lock.fileno())
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    argv = [sys.executable, "-c", deaf]
    with (
        lock,
        closing(guard),
        closing(block.lock),
        subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as child,
    ):
        assert child.stdout is not None
        assert child.stdout.readline() == b"deaf\n"
        cluster.alive[name] = child

        assert virtual_time.run(stop()) == pytest.approx(killed_after_s, abs=0.1)
        assert child.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(("shards_max", "says"), [(97, "room for 1 to 97"), (None, "still starting")])
def test_more_shards_than_there_are_ports_are_refused(tmp_path: Path, shards_max: int | None, says: str) -> None:
    """`resize` fails with the possible range, or if it is not known yet, and leaves the plan as it is."""
    state = StateDir(tmp_path)
    two = Cluster("http://h:1", ["http://h:2", "http://h:3"], "redis://h:9", None, {}, str(tmp_path), ["http://h:1"])
    for document in (Plan(shards=2), two, SupervisorState(os.getpid(), "ready", shards_max=shards_max)):
        state.write(document)
    with pytest.raises(Failed, match=says):
        moves._LocalCluster(state, two).resize(500)
    assert state.plan() == Plan(shards=2)


@pytest.mark.parametrize(
    ("folder", "url", "says"),
    [
        (".paramserver", "http://127.0.0.1:9100", "psctl status, psctl new NAME, psctl down"),
        ("x y", "http://127.0.0.1:9100", "psctl status, psctl new NAME, psctl down --state-dir 'HERE/x y'"),
        (
            "x y",
            "http://127.0.0.1:9200",
            "psctl status --url http://127.0.0.1:9100, psctl new NAME, psctl down --state-dir 'HERE/x y'",
        ),
    ],
)
def test_what_comes_next_reaches_the_cluster_that_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, url: str, says: str
) -> None:
    """The suggested commands have --url and --state-dir where the defaults here would not reach the started cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARAMSERVER_URL", url)
    started = "http://127.0.0.1:9100"
    found = Cluster(started, [], "redis://h:3", None, {}, str(tmp_path / folder), [started])
    assert up._next(found) == f"next: {says.replace('HERE', str(tmp_path))}"


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("http://127.0.0.1:9100", True),
        ("http://localhost:9100/", True),
        ("http://localhost:9100,http://other:1", True),
        ("http://localhost:910", False),
        ("https://localhost:9100", False),
        ("http://localhost.example:9100", False),
    ],
)
def test_a_cluster_of_this_machine_is_known_by_any_of_its_names(url: str, same: bool) -> None:
    """A cluster's URL may say localhost for 127.0.0.1, but scheme and port must be the same."""
    at = "http://127.0.0.1:9100"
    assert Cluster(at, [], "redis://h:3", None, {}, "/x", [at]).is_at(url) is same


@pytest.mark.skipif(sys.platform == "win32", reason="no cluster runs there")
@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("https://127.0.0.1:9100", True),
        ("https://127.0.0.1:9198/", True),
        ("https://localhost:9100", True),
        ("https://localhost:9198,https://127.0.0.1:9100", True),
        ("https://localhost:9100,https://other:1", False),
        ("http://127.0.0.1:9100", False),
        ("https://127.0.0.1:9300", False),
    ],
)
def test_the_secret_at_hand_is_for_all_schedulers_of_its_cluster(tmp_path: Path, url: str, found: bool) -> None:
    """The secret is used only if its cluster runs and every URL is one of its schedulers, by whatever name."""
    schedulers = ["https://127.0.0.1:9100", "https://127.0.0.1:9198"]
    state = StateDir(tmp_path)
    state.write(Cluster(schedulers[0], [], "redis://h:3", None, {}, str(tmp_path), schedulers))
    state.secret_file.write_text("a secret")
    settings = ClientSettings(state_dir=str(tmp_path), url=url)
    with state.lock() or nullcontext():
        assert config._secret(settings) == ("a secret" if found else "")
    assert config._secret(settings) == ""  # a killed supervisor leaves its files, and its ports to anybody


@pytest.mark.skipif(sys.platform == "win32", reason="no cluster runs there")
def test_the_cluster_of_this_folder_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's processes are looked through only if the cluster of this folder is not the one meant."""
    state, looked = StateDir(tmp_path), Mock(return_value=[])
    state.write(Cluster("http://h:1", [], "redis://h:9", None, {}, str(tmp_path), ["http://h:1"]))
    monkeypatch.setenv("PARAMSERVER_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(config, "running", looked)
    with state.lock() or nullcontext():
        found = config.cluster_at("http://h:1")
        assert found is not None
        assert found[0].path == tmp_path
        looked.assert_not_called()
        assert config.cluster_at("http://h:2") is None
        looked.assert_called_once()


@pytest.mark.skipif(sys.platform == "win32", reason="no cluster runs there")
def test_the_folder_of_another_users_cluster_keeps_nobody_from_a_cluster(tmp_path: Path) -> None:
    """Where another user has started a cluster, whose files are its own, others can be reached and started."""
    StateDir(tmp_path).write(Cluster("http://h:1", [], "redis://h:9", None, {}, str(tmp_path), ["http://h:1"]))
    (tmp_path / "lock").touch(0o600)
    root = os.geteuid() == 0
    os.seteuid(65534) if root else tmp_path.chmod(0)
    try:
        found = config._secret(ClientSettings(state_dir=str(tmp_path), url="http://h:1"))
        url = config.client_settings({"state_dir": str(tmp_path)}).url
    finally:
        os.seteuid(0) if root else tmp_path.chmod(0o700)
    assert (found, url) == ("", ClientSettings().url)


def test_the_lock_says_whether_a_cluster_runs(tmp_path: Path) -> None:
    """A cluster counts as running exactly while its lock is held."""
    state = StateDir(tmp_path / "new" / "state")
    assert not state.is_running()
    assert not state.path.exists()
    lock = state.lock()
    assert lock is not None
    assert state.is_running()
    assert state.lock() is None
    lock.close()
    assert not state.is_running()


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    """`tail` returns the last lines of a long log, and an empty string for one that does not exist."""
    state = StateDir(tmp_path)
    state.logs.mkdir()
    state.log("x").write_text("\n".join(f"line {i}" for i in range(1000)) + "\n")
    assert state.tail("x", 2) == "line 998\nline 999"
    assert state.tail("y") == ""


def test_the_tail_of_a_log_is_text_whatever_is_cut(tmp_path: Path) -> None:
    """The tail of a short log is all of it, and that of a long line begins anywhere, even within a character."""
    state = StateDir(tmp_path)
    state.logs.mkdir()
    state.log("short").write_text("one\ntwo\n")
    state.log("long").write_text("€" * 1000)
    assert state.tail("short") == "one\ntwo"
    assert state.tail("long", 1).endswith("€" * 60)


def test_running_clusters_are_those_whose_supervisor_holds_the_lock(tmp_path: Path) -> None:
    """A cluster is listed if a process says that it supervises the folder, and its lock is held."""
    held, free = StateDir(tmp_path / "held"), StateDir(tmp_path / "free")
    with ExitStack() as stack:
        for folder in ([str(held.path)], [str(free.path)], [str(held.path)], []):
            argv = [sys.executable, "-c", "input()", MODULE, *folder]
            process = stack.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE))
            stack.callback(process.kill)
        lock = held.lock()
        assert lock is not None
        with lock:
            found = [state.path for state in running() if tmp_path in state.path.parents]
    assert found == [held.path]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "x/y"), "x/y: No such file"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded"),
        (OSError(errno.ENOENT, "No usable temporary directory"), "No usable temporary directory"),
        (OSError(errno.EBADF, "Bad file descriptor"), ""),
    ],
)
def test_an_error_of_a_file_or_a_full_disk_is_told_in_a_line(error: OSError, text: str) -> None:
    """Errors of a file or folder, and a full disk, are told in one line; another one is a bug with its traceback."""
    assert exits.os_error_text(error) == text


def test_what_to_train_is_a_script_or_a_function(tmp_path: Path) -> None:
    """A script's entry is its function `train`; a missing script, or a module name that cannot be, is a usage error."""
    for name in ("job.py", "my-job.py", "my job.2.py", "2nd.py", "random.py"):
        (tmp_path / name).touch()
    assert train._entry(str(tmp_path / "job.py")) == ("job:train", tmp_path)
    assert train._entry("package.module:function") == ("package.module:function", Path.cwd())
    renamed = [("my-job.py", "to my_job.py"), ("my job.2.py", "to my_job_2.py"), ("2nd.py", "to _2nd.py")]
    for wrong, says in [*renamed, ("random.py", "Python's own"), ("no.py", "no file"), ("word", "neither")]:
        with pytest.raises(typer.BadParameter, match=says):
            train._entry(str(tmp_path / wrong) if wrong.endswith(".py") else wrong)


def test_a_script_without_its_function_is_named_as_its_user_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error about a script without `train` names the script's module, not the one that stands for it."""
    (tmp_path / "async.py").write_text("def main(worker): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = train._named_anew("async:train", tmp_path)
    module = entry.partition(":")[0]
    with pytest.raises(AttributeError, match="module 'async' has no attribute 'train'"):
        load(entry, [module])
    for name in ("async", module):
        sys.modules.pop(name, None)


def test_a_file_beside_a_script_that_would_hide_a_module_of_python_is_named(tmp_path: Path) -> None:
    """A file, or a package, that the workers would import in place of a module they need is refused by its path.

    One that has the name of a module built into Python, or of one that no worker needs, does no harm.
    """
    (tmp_path / "random").mkdir()
    for harmless in ("job.py", "time.py", "os.py", "antigravity.py"):
        (tmp_path / harmless).touch()
    train._check_folder(tmp_path)
    for wrong in (tmp_path / "random" / "__init__.py", tmp_path / "queue.py"):
        wrong.touch()
        with pytest.raises(typer.BadParameter, match=f"{re.escape(str(wrong))} .* rename it"):
            train._check_folder(tmp_path)


def test_the_demo_says_how_psctl_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the shell does not find psctl, as after `make demo`, the next commands begin with the environment's."""
    monkeypatch.setenv("PATH", "")
    demo._summarize([], Path("curves.png"))
    assert f"next        . {sys.prefix}/bin/activate\n            psctl up --detach\n" in capsys.readouterr().out
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    demo._summarize([], Path("curves.png"))
    assert "next        psctl up --detach\n" in capsys.readouterr().out


CLIENT: Any = None


def _sample(elapsed_s: float, version: int = 0, accuracy: float | None = None) -> Sample:
    return Sample(
        elapsed_s, 0.5, accuracy, version, version, 40.0, None, (WorkerLine("w0", 3, 0.5, None, "active", 0),)
    )


@pytest.mark.parametrize("words", [("--mode", "slow"), ("--arg", "batch_size"), ("--arg", "batch-size=1")])
def test_what_is_typed_is_checked_before_anything_is_created(tmp_path: Path, words: tuple[str, ...]) -> None:
    """An unknown mode, or an argument without a value or that no function can have, is refused before all else."""
    (tmp_path / "job.py").touch()
    code, text = psctl("train", str(tmp_path / "job.py"), "--model", "m", "--url", "http://127.0.0.1:1", *words)
    assert code == 2
    assert words[1].partition("=")[0] in text


def test_a_training_is_good_when_its_last_evaluations_are() -> None:
    """An accuracy is reached when the last two evaluations have it, and rates count from the first update."""
    training = Training(CLIENT, "m", "sync", evaluations=[0.97])
    assert not training.has_reached(0.96)
    training.evaluations.append(0.95)
    assert not training.has_reached(0.96)
    training.evaluations += [0.961, 0.97]
    assert training.has_reached(0.96)
    training.evaluations.append(math.nan)
    assert not training.has_reached(0.96)
    training.samples += [_sample(0.0), _sample(10.0, 5), _sample(20.0, 105)]
    assert training.rate() == (10.0, 40.0)


def test_a_workers_lag_is_what_the_shards_measured() -> None:
    """A worker's lag is taken from the shards' measurement, not from the metrics that the worker reports."""
    worker = {"worker": "m/w0", "clock": 3, "lag": 1.5, "metrics": {"loss": 0.5}, "state": "active", "alive": True}
    model = {"name": "m", "version": 3, "clock": 3, "pushes_per_s": 40.0, "lag": 1.5, "latest": {}, "not_finite": {}}
    status = {"models": [model | {"workers": [worker | {"heartbeat_age_s": 0.1}]}]}
    client: Any = SimpleNamespace(status=lambda timeout: status)
    training = Training(client, "m", "async")
    training.poll()
    assert training.last is not None
    assert [w.lag for w in training.last.workers] == [1.5]


def test_a_plain_line_has_the_numbers() -> None:
    """The line has loss, accuracy, rate and clocks, or says that it waits for workers, or why nobody answers."""
    training = Training(CLIENT, "m", "sync")
    assert "waiting for workers" in plain_line(training)
    training.samples.append(_sample(1.0, 3, 0.931))
    line = plain_line(training)
    assert all(part in line for part in ("sync", "loss 0.500", "accuracy 93.1 %", "40 pushes/s", "clocks 3"))
    training.samples.append(_sample(2.0, 4, 93.0))  # some report it in percent
    assert "accuracy 93.0 %" in plain_line(training)
    training.error = "no scheduler answers"
    assert "no scheduler answers" in plain_line(training)


def test_the_live_picture_has_curves_and_workers() -> None:
    """The live display has the status page's address, the curves, and a line for each worker."""
    training = Training(CLIENT, "digits-sync", "sync")
    training.samples += [_sample(1.0, 3, 0.5), _sample(2.0, 6, 0.931)]
    out = Console(width=100, file=io.StringIO())
    out.print(picture(training, "http://127.0.0.1:8700"))
    text = out.file.getvalue()  # type: ignore[attr-defined]  # the StringIO above
    assert all(part in text for part in ("digits-sync", "http://127.0.0.1:8700", "w0", "0.500", "93.1 %", "\u2588"))


def test_a_sparkline_spans_its_range() -> None:
    """The lowest value is the lowest bar, the highest the highest; gaps are kept, and long series are thinned out."""
    assert sparkline([0.0, None, 1.0, math.nan], 0.0, 1.0) == "▁ █ "
    assert len(sparkline([0.5] * 1000, 0.0, 1.0)) == CHART_WIDTH


OWNER = """
import sys, time
from pathlib import Path
from paramserver_cli.children import ChildSpec, Guard, start
guard = Guard()
code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
child = start(ChildSpec("c", "worker", [sys.executable, "-c", code]), Path(sys.argv[1]), guard)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.process
def test_children_and_theirs_die_with_a_killed_owner(tmp_path: Path) -> None:
    """After a SIGKILL of the owner, neither its child nor its grandchild survives."""
    psutil = pytest.importorskip("psutil")
    argv = [sys.executable, "-P", "-c", OWNER, str(tmp_path / "log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(owner.stdout.readline())]
        # A whole line: its number may come in two pieces.
        eventually(lambda: (tmp_path / "log").read_text().endswith("\n"), what="the start of the grandchild")
        pids.append(int((tmp_path / "log").read_text()))
        os.kill(owner.pid, signal.SIGKILL)

    def lives(pid: int) -> bool:
        try:
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    eventually(lambda: not any(map(lives, pids)), what="the end of both")
