"""What the scheduler keeps of workers, and what it asks of them."""

from typing import Any

import pytest

from paramserver.core import scheduler_io as io
from paramserver.errors import ConflictError, NotFoundError, PsError, RequestError
from paramserver.limits import CLOCKS_AHEAD_MAX

from .scheduling import Driver, code


def beat(d: Driver, worker: Any, **fields: Any) -> Any:
    """The answer to that worker's heartbeat."""
    return d.ask(lambda n: io.WorkerHeartbeat(n, "m", worker["worker"], worker["epoch"], **fields))


@pytest.mark.parametrize("wrong", [{"metrics": {"x" * 65: 1.0}}, {"state": [0] * 30_000}, {"clock": -1}])
def test_a_heartbeat_that_says_something_wrong_is_a_sign_of_life(wrong: dict[str, Any]) -> None:
    """It is refused with the reason, and the lease goes on."""
    d = Driver()
    d.model()
    a = d.join("a")
    d.wait(4.0)

    with pytest.raises(RequestError):
        beat(d, a, **wrong)
    d.wait(4.0)

    assert d.core.read.worker("m", a["worker"], d.now)["alive"]


def test_a_workers_state_is_known_after_a_restart() -> None:
    """Also of one that lives on and has nothing new to say."""
    d = Driver()
    d.model()
    beat(d, d.join("a"), state={"epoch": 7})

    d.restart()

    assert d.core.read.workers("m", d.now, kept=True)[0]["kept"] == {"epoch": 7}
    assert d.join("a")["state"] == {"epoch": 7}


def test_a_state_that_has_not_changed_is_not_stored_again() -> None:
    """A plain client may send it with every heartbeat."""
    d = Driver()
    d.model()
    a = d.join("a")
    beat(d, a, state={"epoch": 7})

    effects = d.core.handle(io.WorkerHeartbeat(99, "m", a["worker"], 1, state={"epoch": 7}), d.now)

    assert not [e for e in effects if isinstance(e, io.Store)]


def test_a_worker_that_drains_goes_on_to_after_a_restart() -> None:
    """Whoever asked it to finish was told 200; its next incarnation is not asked."""
    d = Driver()
    d.model()
    a = d.join("a")
    d.ask(lambda n: io.DrainWorker(n, "m", a["worker"]))

    d.restart()

    assert beat(d, a)["state"] == "draining"
    assert beat(d, d.join("a"))["state"] == "active"


def test_a_model_named_like_an_ended_run_has_workers_of_its_own() -> None:
    """Only workers of the model that the run trained are asked to stop."""
    d = Driver()
    d.model()
    d.ask(lambda n: io.CreateRun(n, "m", "paramserver.examples.digits:train"))
    theirs = d.join("run-1/w0")
    d.ask(lambda n: io.PatchRun(n, "run-1", state="stopped"))
    d.model(name="run-1")
    own = d.ask(lambda n: io.JoinWorker(n, "run-1"))

    heard = d.ask(lambda n: io.WorkerHeartbeat(n, "run-1", own["worker"], own["epoch"]))

    assert own["worker"] == theirs["worker"]
    assert (heard["state"], beat(d, theirs)["state"]) == ("active", "stop")


def test_a_join_whose_answer_was_lost_leaves_no_worker_behind() -> None:
    """The same attempt again is the same worker, with its rank; another attempt is another one."""
    d = Driver()
    d.model()
    lost = d.join(None, rank=0, attempt="x")

    again = d.join(None, rank=0, attempt="x")
    other = d.join(None, attempt="y")

    assert (again["worker"], again["epoch"], again["rank"]) == (lost["worker"], lost["epoch"] + 1, 0)
    assert other["worker"] != lost["worker"]
    assert len(d.core.read.workers("m", d.now)) == 2


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_who_joins_just_after_a_change_of_leader_begins_where_the_others_are(mode: str) -> None:
    """As they were a second before, and not where they once joined; they need not have been heard of yet."""
    d = Driver()
    d.model(consistency={"mode": mode})
    a, b = d.join("a"), d.join("b")
    for t in range(1, 101):
        d.clock(a, t)
        d.clock(b, t)
    d.wait(0.5)

    d.restart()

    assert d.join("c")["clock"] == 100
    assert beat(d, a, clock=101)["min_clock"] == 100


def test_how_far_a_worker_is_ahead_is_counted_from_the_clock_that_is_open() -> None:
    """Not from its own last report, or report by report it could be ahead without a bound; a repetition is taken."""
    d = Driver()
    d.model(consistency={"mode": "sync", "min_workers": 2})
    a, _ = d.join("a"), d.join("b")
    for _ in range(2):
        assert not d.result(d.clock(a, CLOCKS_AHEAD_MAX, wait_s=0.0))["released"]
    assert code(d, d.clock(a, CLOCKS_AHEAD_MAX + 1, wait_s=0.0)) == "invalid_field"


def test_a_report_that_is_refused_wakes_nobody() -> None:
    """A worker without data holds no barrier up, until it reports a clock that can be."""
    d = Driver()
    d.model(consistency={"mode": "sync"})
    a, b = d.join("a"), d.join("b")
    d.ask(lambda n: io.RegisterDataset(n, "m", "t", 1, 1, None, None, "dynamic", 1))
    d.lease(a, "t")
    d.lease(b, "t")
    assert code(d, d.clock(b, 1 << 20)) == "invalid_field"
    assert all(d.result(d.clock(a, clock))["released"] for clock in (1, 2, 3))


@pytest.mark.parametrize("wrong", [{"clock": 1 << 20}, {"clock": 1, "since": 2}, {"clock": 1, "timeline": 7}])
def test_a_heartbeat_that_is_refused_leaves_the_state_as_it_was(wrong: dict[str, Any]) -> None:
    """Whoever sent it does not know that it was taken, and sends it again."""
    d = Driver()
    d.model(consistency={"mode": "sync"})
    a = d.join("a")
    beat(d, a, state={"epoch": 1})
    with pytest.raises(PsError):
        beat(d, a, state={"epoch": 2}, **wrong)
    assert d.core.read.workers("m", d.now, kept=True)[0]["kept"] == {"epoch": 1}


def test_a_join_that_is_refused_takes_no_name() -> None:
    """The next one without a name gets the one that was free."""
    d = Driver()
    d.model()
    d.join("a", rank=0)
    with pytest.raises(ConflictError):
        d.join(None, rank=0)
    assert d.join(None)["worker"] == "m/w0"


def test_a_worker_that_left_cannot_be_asked_to_finish() -> None:
    """The refusal says that it is no longer live, where of one that never came it says so."""
    d = Driver()
    d.model()
    a = d.join("a")
    d.ask(lambda n: io.LeaveWorker(n, "m", a["worker"]))

    with pytest.raises(NotFoundError, match=r"'m/a' is no longer live"):
        d.ask(lambda n: io.DrainWorker(n, "m", a["worker"]))
    with pytest.raises(NotFoundError, match=r"'m/b' has not joined"):
        d.ask(lambda n: io.DrainWorker(n, "m", "m/b"))
