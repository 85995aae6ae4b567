"""What the scheduler's core keeps of the metrics that workers report."""

from typing import Any

import pytest
from tests.refusals import refused_with

from paramserver import limits
from paramserver.core.scheduler import io

from .scheduling import EPOCH_S, SPEC, Driver, beyond_its_cut


def test_metrics_are_known_after_a_restart() -> None:
    """The newest 500 points of a series are stored within ten seconds, survive a restart, and go with their model."""
    d = Driver.with_model()
    for i in range(600):
        d.ask(lambda n, i=i: io.ReportMetrics(n, "m", {"loss": float(i)}, clock=i))  # type: ignore[misc]
    before = d.core.read.metric("m", "loss")["points"]

    d.wait(11.0)
    d.restart()

    assert d.core.read.metric("m", "loss")["points"] == before[-500:]
    d.ask(lambda n: io.DeleteModel(n, "m"))
    assert not [k for k in d.hash if k.startswith("series:")]


def test_a_loss_that_is_no_number_is_known_until_a_number_comes() -> None:
    """A metric that becomes NaN is known with time and worker, also after a restart, until that worker has a number.

    The series keeps its finite points alone, and the worker's own newest value is null.
    """
    d = Driver.with_model()
    a, b = d.join("a")["worker"], d.join("b")["worker"]
    for worker, loss in ((a, 0.5), (a, float("nan")), (a, None), (b, 0.7)):
        d.ask(lambda n, w=worker, x=loss: io.ReportMetrics(n, "m", {"loss": x}, w, 1))  # type: ignore[misc]
        d.wait(1.0)

    since, worker = d.core.read.not_finite("m")["loss"]
    points = d.core.read.metric("m", "loss")["points"]
    assert worker == a
    assert points[0][0] < since < points[1][0] - 1.5
    assert [p[3] for p in points] == [0.5, 0.7]
    assert d.core.read.worker("m", a, d.now)["metrics"] == {"loss": None}
    d.wait(11.0)
    d.restart()
    assert d.core.read.not_finite("m") == {"loss": (since, a)}
    d.ask(lambda n: io.ReportMetrics(n, "m", {"loss": 0.4}, a, 2))
    assert d.core.read.not_finite("m") == {}


def test_a_worker_that_left_with_no_number_is_forgotten_when_others_have_numbers() -> None:
    """A minute after the last NaN, a finite value of any worker ends the warning."""
    d = Driver.with_model()
    d.ask(lambda n: io.ReportMetrics(n, "m", {"loss": float("inf")}, "", 1))
    d.join("b")
    d.wait(50.0)
    d.ask(lambda n: io.ReportMetrics(n, "m", {"loss": 0.4}, "m/b", 1))
    assert list(d.core.read.not_finite("m")) == ["loss"]
    d.wait(20.0)
    d.ask(lambda n: io.ReportMetrics(n, "m", {"loss": 0.4}, "m/b", 2))
    assert d.core.read.not_finite("m") == {}


def test_metrics_of_before_a_rollback_do_not_count() -> None:
    """What says by its timeline that it was measured of values that are gone is not taken for the model's newest."""
    d, a = beyond_its_cut()
    d.shard("s1")  # a restart: what it had in memory is lost
    assert d.core.read.model("m")["timeline"] == 1

    def report(value: float, timeline: int | None) -> int:
        doc = d.ask(lambda n: io.ReportMetrics(n, "m", {"accuracy": value}, a["worker"], 1, timeline))
        return int(doc["accepted"])

    assert [report(0.9, 0), report(0.1, 1), report(0.2, None)] == [0, 1, 1]
    assert [p[3] for p in d.core.read.metric("m", "accuracy")["points"]] == [0.1, 0.2]
    assert d.core.read.worker("m", a["worker"], d.now)["metrics"] == {"accuracy": 0.2}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_metrics_of_before_values_were_lost_are_of_no_checkpoint(mode: str) -> None:
    """What was measured while all values were there is not of the model that goes on with some as they were at first.

    Its checkpoint would be the best, and be kept as that.
    """
    d = Driver("s0", "s1")
    params = {"w": {"shape": [64], "init": {"kind": "upload"}}}
    spec = SPEC | {"params": params, "consistency": {"mode": mode}, "ack": "journaled"}
    d.send(lambda n: io.CreateModel(n, spec, "secret"))
    d.beats()
    d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "secret", d.given()))
    d.beats()
    d.ask(lambda n: io.ReportMetrics(n, "m", {"accuracy": 0.9}))
    assert newest(d) == 0.9
    d.empty_redis()
    mine = [i for i, shard in enumerate(d.owners()) if shard == "s1"]
    d.ask(lambda n: io.LeaveShard(n, "s1", d.shards.pop("s1")))
    d.beat("s0", lost=[["m", 1, i, d.given()[i][1], False] for i in mine])
    assert d.document()["upload"]["lost"] == mine
    assert newest(d) is None


def test_metrics_of_before_a_partition_fell_behind_are_of_no_checkpoint() -> None:
    """If Redis has lost the newest journal entries of one partition, the model goes on with older values of it."""
    d = Driver.with_model(consistency={"mode": "sync"}, ack="journaled")
    a = d.join("a")
    for t in (1, 2, 3):
        d.clock(a, t)
        d.beats()
    d.ask(lambda n: io.ReportMetrics(n, "m", {"accuracy": 0.9}))
    d.stand = {i: 1 for i, shard in enumerate(d.owners()) if shard == "s1"}
    d.shard("s1")
    d.beats()
    assert d.core.read.model("m")["timeline"] == 1
    assert newest(d) is None


def newest(d: Driver) -> float | None:
    """Return the accuracy that a checkpoint of model m would be saved with."""
    return d.core._c.models["m"].series.latest("accuracy")


def test_a_heartbeat_reports_the_metrics_of_several_clocks() -> None:
    """They are points of their clocks, in order; an object of metrics is of the clock that the worker is at."""
    d = Driver.with_model()
    a = d.join("a")

    def beat(metrics: Any) -> None:
        d.ask(lambda n: io.WorkerHeartbeat(n, "m", a["worker"], 1, 3, metrics=metrics))

    beat([[1, {"loss": 0.3}], [2, {"loss": None, "accuracy": 0.8}]])
    assert d.core.read.worker("m", a["worker"], d.now)["metrics"] == {"loss": None, "accuracy": 0.8}
    beat({"loss": 0.1})
    assert [p[1:] for p in d.core.read.metric("m", "loss")["points"]] == [[1, "m/a", 0.3], [3, "m/a", 0.1]]
    assert [p[1:] for p in d.core.read.metric("m", "accuracy")["points"]] == [[2, "m/a", 0.8]]
    for wrong in ([[1]], [[-1, {}]], [["1", {}]], [1], [[1, {"loss": "low"}]], [[1, {}]] * 65, "loss"):
        with refused_with("invalid_field", match="metrics"):
            beat(wrong)


def test_metrics_are_not_stored_while_redis_is_away() -> None:
    """Metrics are not stored while Redis is away, but as soon as it is back."""
    d = Driver.with_model()
    d.do(io.StorageChanged("Redis does not answer"))
    d.ask(lambda n: io.ReportMetrics(n, "m", {"loss": 1.0}, clock=1))
    d.wait(30.0)
    assert "series:m" not in d.hash
    d.do(io.StorageChanged(""))
    d.wait(1.0)
    assert "series:m" in d.hash


def test_a_clock_that_is_put_back_keeps_no_warning() -> None:
    """After the machine's clock was put back by an hour, a finite value ends the warning of an earlier NaN, too."""
    d = Driver.with_model()
    d.join("b")
    d.ask(lambda n: io.ReportMetrics(n, "m", {"loss": float("nan")}, "", 1))
    d.do(io.ClockStepped(EPOCH_S - 3600))
    d.ask(lambda n: io.ReportMetrics(n, "m", {"loss": 0.4}, "m/b", 1))
    assert d.core.read.not_finite("m") == {}


def test_metrics_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model keeps the newest points of each name, and so many names; a worker's own are the last ones that it named.

    A report of more names at once is refused.
    """
    monkeypatch.setattr(limits, "METRIC_POINTS_MAX", 3)
    monkeypatch.setattr(limits, "METRIC_NAMES_MAX", 2)
    d = Driver.with_model()
    w = d.join("a")["worker"]
    with refused_with("invalid_field", match="at most 2 names"):
        d.ask(lambda n: io.ReportMetrics(n, "m", {"x": 1.0, "y": 1.0, "z": 1.0}, w, 1))
    for i in range(5):
        d.ask(lambda n, i=i: io.ReportMetrics(n, "m", {"x": float(i), "y": 0.0}, w, i))  # type: ignore[misc]
    for value in (1.0, float("nan")):
        d.ask(lambda n, v=value: io.ReportMetrics(n, "m", {"z": v}, w, 5))  # type: ignore[misc]

    assert [[p[3] for p in d.core.read.metric("m", name)["points"]] for name in "xyz"] == [[2, 3, 4], [0, 0, 0], []]
    assert d.core.read.not_finite("m") == {}
    assert list(d.core.read.worker("m", w, d.now)["metrics"]) == ["y", "z"]


def test_what_workers_of_the_last_run_report_ends_no_other_run() -> None:
    """They go on until they have heard of its end, and what they measure is not of the new run."""
    d = Driver.with_model()
    for name in ("p", "q"):
        d.ask(lambda n, p=name: io.JoinPool(n, p, ("job",)))  # type: ignore[misc]
    d.ask(lambda n: io.CreateRun(n, "m", "job:train"))
    old = d.join("run-1/w0")
    d.ask(lambda n: io.PatchRun(n, "run-1", state="stopped"))
    d.ask(lambda n: io.CreateRun(n, "m", "job:train", stop={"metric": {"name": "accuracy", "at_least": 0.9}}))
    new = d.join("run-2/w0")

    d.ask(lambda n: io.ReportMetrics(n, "m", {"accuracy": 0.95}, old["worker"]))
    d.ask(lambda n: io.WorkerHeartbeat(n, "m", old["worker"], 1, metrics={"accuracy": 0.95}))
    assert d.core.read.run("run-2")["state"] == "running"
    d.ask(lambda n: io.ReportMetrics(n, "m", {"accuracy": 0.95}, new["worker"]))
    assert d.core.read.run("run-2")["state"] == "finished"
