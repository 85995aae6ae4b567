"""What the scheduler's core keeps of the metrics that workers report."""

from paramserver.core import scheduler_io as io

from .scheduling import EPOCH_S, Driver


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
