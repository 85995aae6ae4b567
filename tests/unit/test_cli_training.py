"""What psctl remembers of a training that it follows."""

import io
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from paramserver.core.scheduler.runs import Place, Run, StopRule, how_to_start
from paramserver.errors import problem
from paramserver_cli import train
from paramserver_cli.display import picture, plain_line
from paramserver_cli.launch import Failed
from paramserver_cli.main import app
from paramserver_cli.state_directory import StateDir
from paramserver_cli.training import SAMPLES_MAX, Training
from paramserver_node.unwind import Terminated

MODEL = {
    "name": "m", "clock": 0, "version": 0, "pushes_per_s": 0.0, "lag": None, "latest": {}, "not_finite": {},
    "workers": [],
}  # fmt: skip


def test_a_training_of_days_takes_no_more_memory_than_one_of_an_hour() -> None:
    """A bounded number of samples is kept, evenly spaced from the first to the newest."""
    versions = count()
    client: Any = SimpleNamespace(status=lambda timeout: {"models": [MODEL | {"version": next(versions)}]})
    training = Training(client, "m", "sync")
    most = 0
    for newest in range(9 * SAMPLES_MAX):
        training.poll()
        assert training.last is not None
        assert training.last.version == newest
        most = max(most, len(training.samples))

    kept = [s.version for s in training.samples]
    assert most == SAMPLES_MAX
    assert kept[0] == 0
    gaps = [b - a for a, b in pairwise(kept[:-1])]
    assert max(gaps) <= 2 * min(gaps)


def test_a_training_is_followed_through_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """While no scheduler answers, `psctl train` does not end, and with it its workers, who may train on."""
    monkeypatch.setattr(train, "POLL_S", 0.0)
    away = [problem("unreachable", "cannot reach http://127.0.0.1:1")] * 3

    def get_run(run: str, **_: Any) -> dict[str, Any]:
        if away:
            raise away.pop()
        return {"id": run, "state": "finished", "reason": "every worker has finished"}

    client: Any = SimpleNamespace(url="http://127.0.0.1:1", get_run=get_run, status=lambda timeout: {"models": []})
    state: Any = SimpleNamespace(supervisor=lambda: None)
    assert train._follow(client, "run-1", Training(client, "m", "m"), state)["state"] == "finished"
    assert away == []


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_a_training_that_somebody_stopped_is_not_done(state: str) -> None:
    """If its run failed, or was stopped by the page or another psctl, `psctl train` exits with 1 and says why."""
    training = Training(SimpleNamespace(), "m", "m")  # type: ignore[arg-type]  # it has polled nothing
    with pytest.raises(Failed, match=f"run-1 {state}: it was asked to"):
        train._report({"id": "run-1", "state": state, "reason": "it was asked to"}, training)


def test_a_loss_that_becomes_nan_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A loss of a worker that is NaN is no number of the training, in the line, the panel and at the end."""
    losses = (0.5, None)
    workers = [
        {"worker": f"m/w{i}", "clock": 3, "lag": None, "metrics": {"loss": loss}, "state": "active", "alive": True,
         "heartbeat_age_s": 0.1}
        for i, loss in enumerate(losses)
    ]  # fmt: skip
    latest = {"loss": (1.0, 0.5), "accuracy": (1.0, 0.9)}
    seconds = [
        MODEL | {"workers": workers[:1], "latest": latest},
        MODEL | {"workers": workers, "latest": latest, "not_finite": {"loss": (1.0, "m/w1")}},
        # The workers have left, so what they last reported is known of the model alone.
        *[MODEL | {"latest": latest, "not_finite": {"loss": (1.0, "m/w1"), "accuracy": (2.0, "m/w1")}}] * 2,
    ]
    client: Any = SimpleNamespace(status=lambda timeout: {"models": [seconds.pop(0)]})
    training = Training(client, "m", "async")

    training.poll()
    assert "loss 0.500  accuracy 90.0 %" in plain_line(training)
    training.poll()
    assert "loss NaN or inf  accuracy 90.0 %" in plain_line(training)
    out = Console(width=100, file=io.StringIO())
    out.print(picture(training, "http://127.0.0.1:8700"))
    assert re.search(r"w1 +3 +NaN or inf", out.file.getvalue())  # type: ignore[attr-defined]  # the StringIO above
    for _ in range(2):
        training.poll()
    assert [repr(a) for a in training.evaluations] == ["0.9", "nan"]
    train._report({"id": "run-1", "state": "finished", "reason": "it is over"}, training)
    assert capsys.readouterr().out == "run-1 finished: it is over; loss NaN or inf; accuracy NaN or inf\n"


def test_a_training_whose_run_does_not_run_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is followed tells that its run is paused, or waits for workers, with the last numbers.

    It does not tell how workers are started, as it starts its own.  An exception that its run survives is told once.
    """
    monkeypatch.setattr(train, "POLL_S", 0.0)
    monkeypatch.setattr("paramserver_cli.display.PLAIN_EVERY_S", 0.0)
    worker = {"worker": "m/w0", "clock": 3, "lag": None, "metrics": {}, "state": "active", "alive": True}
    run = Run("run-1", "r", "m", "m:f", {}, StopRule(), [Place(), Place()], 0.0)
    run.settle(0.0, how_to_start("m:f", [["other"]]), 0)
    states = [
        (run.state, run.reason, 0),
        ("paused", "paused by request", 0),
        ("running", "training begins when 1 more worker has joined; 1 of 2 workers; 1 more can join: how", 1),
        ("running", "", 1),
        ("finished", "it is over", 2),
    ]
    rounds: list[list[Any]] = [[], [], *[[worker | {"heartbeat_age_s": 0.1}]] * 3]

    def get_run(run: str, **_: Any) -> Any:
        state, reason, restarts = states.pop(0)
        places = [{"restarts": 0}, {"restarts": restarts}]
        return {"id": run, "state": state, "reason": reason, "places": places, "error": "worker 1: ValueError: no"}

    def status(timeout: float) -> Any:
        return {"models": [MODEL | {"workers": rounds.pop(0)}]}

    client: Any = SimpleNamespace(url="http://127.0.0.1:1", get_run=get_run, status=status)
    supervised: Any = SimpleNamespace(supervisor=lambda: None)
    training = Training(client, "m", "m")
    train._follow(client, "run-1", training, supervised)

    lines = capsys.readouterr().out.splitlines()
    assert lines.pop(3) == "worker 1: ValueError: no; its function is called again (1 exception so far)"
    assert [line.split("s  ", 1)[1].strip() for line in lines] == [
        "waiting for workers",
        "no worker has taken one of its 2 places",
        "0 pushes/s  clocks 3  paused by request",
        "0 pushes/s  clocks 3  training begins when 1 more worker has joined; 1 of 2 workers; 1 more can join",
        "0 pushes/s  clocks 3",
    ]
    training.held = "paused by request"
    out = Console(width=100, file=io.StringIO())
    out.print(picture(training, "http://127.0.0.1:1"))
    assert "paused by request" in out.file.getvalue()  # type: ignore[attr-defined]  # the StringIO above


def test_what_functions_report_after_their_loop_is_in_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The accuracy of the final values, which a function measures once its run has ended, is the one that is told."""
    monkeypatch.setattr(train, "POLL_S", 0.0)
    accuracy, members = [0.5], [[{"run": "run-1"}], [{"run": None}]]

    def pool(_: object) -> Any:
        if len(members) == 1:
            accuracy[0] = 0.97
        return members.pop(0)

    def status(timeout: float) -> Any:
        return {"models": [MODEL | {"latest": {"accuracy": (1.0, accuracy[0])}}]}

    client: Any = SimpleNamespace(status=status, run=pool, deadline=lambda timeout: None)
    training = Training(client, "m", "m")
    training.poll()

    train._until_returned(client, "run-1", training)
    train._report({"id": "run-1", "state": "finished", "reason": "it is over"}, training)

    assert members == []
    assert capsys.readouterr().out == "run-1 finished: it is over; accuracy 97.0 %\n"


@pytest.mark.parametrize(
    ("code", "told"), [("unreachable", "psctl run stop run-7"), ("conflict", ""), ("unknown_run", "")]
)
def test_a_run_that_cannot_be_stopped_is_said_to_go_on(
    code: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It keeps its model from other runs, so an interrupted `psctl train` says how to stop it, unless it has ended."""

    def set_run(*_: object, **__: object) -> None:
        raise problem(code, "no")

    client: Any = SimpleNamespace(set_run=set_run)
    train._stop(client, "run-7")
    err = capsys.readouterr().err
    assert told in err
    assert bool(told) == bool(err)


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """What runs `psctl train` on a cluster that is not there: its client has these functions in place of its own."""

    @contextmanager
    def cluster(state: StateDir, _: object) -> Iterator[None]:
        state.make()
        state.log("worker-0").write_text("what it printed\n")
        yield

    def begin(**functions: Any) -> Result:
        client = SimpleNamespace(
            url="http://127.0.0.1:1",
            urls=["http://127.0.0.1:1"],
            create_run=lambda *_, **__: {"id": "run-7"},
            status=lambda timeout: {"models": [MODEL]},
            deadline=lambda timeout: None,
            run=lambda call: [],
            **functions,
        )
        monkeypatch.setattr(train, "connect", lambda url: client)
        return CliRunner().invoke(app, ["train", str(tmp_path / "job.py"), "--model", "m"])

    monkeypatch.setattr(train, "worker_token", lambda url: None)
    monkeypatch.setattr(train, "_prepare", lambda *_: None)
    monkeypatch.setattr("paramserver_cli.train.unwind.on_signals", lambda: None)
    monkeypatch.setattr("paramserver_cli.train.launch.cluster", cluster)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "job.py").touch()
    return begin


@pytest.mark.parametrize("end", ["finished", "failed"])
def test_what_workers_print_is_named_and_stays_if_the_training_fails(end: str, begin: Callable[..., Result]) -> None:
    """`psctl train` names the command that shows the workers' logs, which are gone only if the run has finished."""
    done = begin(get_run=lambda run, **_: {"id": run, "state": end, "reason": "it is over"})

    named = re.search(r"psctl logs -f --state-dir (\S+)", done.stdout)
    assert named, done.output
    folder = Path(shlex.split(named[1])[0])
    assert (done.exit_code, folder.exists()) == ((0, False) if end == "finished" else (1, True))
    assert (str(folder / "logs") in done.stderr) == folder.exists()
    if folder.exists():
        assert [p.relative_to(folder) for p in folder.rglob("*.log")] == [Path("logs/worker-0.log")]
        assert [p.name for p in folder.iterdir()] == ["logs"]


@pytest.mark.parametrize("end", [KeyboardInterrupt(), Terminated(143), RuntimeError("a bug")])
def test_what_workers_have_printed_stays_if_the_training_is_interrupted(
    end: BaseException, begin: Callable[..., Result]
) -> None:
    """The logs stay, and are named, if `psctl train` ends by Ctrl-C, by a signal, or by what nobody has foreseen.

    They were deleted, and with them what the workers had printed for hours.
    """

    def get_run(*_: object, **__: object) -> None:
        raise end

    done = begin(get_run=get_run, set_run=lambda *_, **__: None)
    named = re.search(r"what the workers have printed is in (\S+)", done.stderr)
    assert named, done.output
    assert [p.name for p in Path(named[1]).iterdir()] == ["worker-0.log"]
    assert done.exit_code != 0


def test_a_run_is_stopped_if_the_terminal_closes_as_its_first_line_is_printed(
    begin: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `psctl train` that ends in its first line leaves no run, which would keep its model from other runs."""

    def echo(*_: object, **__: object) -> None:
        raise Terminated(129)

    stopped = []
    monkeypatch.setattr(typer, "echo", echo)
    done = begin(set_run=lambda run, state, timeout: stopped.append((run, state)))
    assert (done.exit_code, stopped) == (129, [("run-7", "stopped")])
