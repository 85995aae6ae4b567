"""Which member of the pool gets which place of a run."""

from typing import Any

import pytest

from paramserver import limits
from paramserver.core.scheduler import io
from paramserver.errors import FencedError

from .scheduling import Driver
from .training_runs import beat, done, member, run, state


def test_a_place_whose_function_raised_goes_to_another_idle_member() -> None:
    """A member at which the function raises each time, as on a broken machine, fails no run while others are idle."""
    d = Driver.with_model()
    bad, good = member(d, "bad"), member(d, "good")
    run(d)
    assert beat(d, bad)["state"] == "assigned"
    done(d, bad, error="Traceback: no GPU here")
    assert beat(d, bad)["state"] == "idle"
    assert beat(d, good)["run"]["attempt"] == 1
    done(d, good, error="Traceback")
    assert beat(d, bad)["state"] == "assigned"
    assert state(d)[0] == "running"


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_the_time_in_which_no_worker_may_begin_is_not_a_runs_own(mode: str) -> None:
    """While a model waits for `min_workers`, its run says so and its minutes do not pass.

    It was "finished" before anything was trained.
    """
    d = Driver.with_model(consistency={"mode": mode, "min_workers": 3})
    run(d, workers=2, stop={"minutes": 0.1})
    members = [member(d, "a"), member(d, "b")]
    w = [d.join("run-1/w0"), d.join("run-1/w1")]
    for _ in range(2):
        assert state(d) == ("running", "training begins when 1 more worker has joined")
        for _ in range(10):
            d.wait(1.0)
            stay(d, members, w)
        d.restart()
        d.wait(0.5)
    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"min_workers": 2}}))
    d.wait(0.5)
    assert state(d) == ("running", "")
    for _ in range(6):
        d.wait(1.0)
        stay(d, members, w)
    assert state(d)[0] == "finished"


def test_a_run_tells_both_of_missing_workers_and_of_what_they_hold_up() -> None:
    """A run with fewer workers than `min_workers` says that training has not begun, and how to start the others."""
    d = Driver.with_model(consistency={"mode": "sync", "min_workers": 4})
    run(d, workers=4)
    member(d, "a")
    d.join("run-1/w0")
    assert state(d)[1].startswith("training begins when 3 more workers have joined; 1 of 4 workers; 3 more can join: ")


def stay(d: Driver, members: list[Any], workers: list[Any]) -> None:
    """Send a heartbeat of each member, and of each worker of model m."""
    for m in members:
        beat(d, m)
    for w in workers:
        d.ask(lambda n, w=w: io.WorkerHeartbeat(n, "m", w["worker"], w["epoch"]))  # type: ignore[misc]


def place(d: Driver, m: Any) -> int | None:
    """Return the place of a member in its run."""
    assigned = beat(d, m)["run"]
    return assigned["place"] if assigned else None


@pytest.mark.parametrize("then", ["running", "paused"])
def test_members_that_were_cut_off_get_their_places_back(then: str) -> None:
    """After a network break that is longer than their leases, members have the places at which they are working.

    They had each other's, went on as before, and were killed for it after ten seconds.
    """
    d = Driver.with_model()
    run(d, workers=2)
    assert [place(d, member(d, name)) for name in "ab"] == [0, 1]
    if then == "paused":
        d.ask(lambda n: io.PatchRun(n, "run-1", "paused"))
    d.wait(limits.LEASE_S + 1.0)
    assert [place(d, member(d, name)) for name in "ba"] == [1, 0]
    assert state(d)[0] == then


def test_a_member_that_joins_again_in_time_keeps_its_place() -> None:
    """A member that joins again before its lease expires does not get a lower place that has become free."""
    d = Driver.with_model()
    run(d, workers=2)
    a, b = member(d, "a"), member(d, "b")
    d.wait(3.0)
    beat(d, b)
    d.wait(3.0)
    assert place(d, member(d, "b")) == 1
    assert place(d, member(d, "c")) == 0
    with pytest.raises(FencedError):
        beat(d, a)


def test_a_member_whose_process_dies_again_goes_behind_the_idle_ones() -> None:
    """A member that is started again after each death, at its own place, leaves it to an idle one after the second."""
    d = Driver.with_model()
    run(d, workers=1)
    member(d, "a")
    idle = member(d, "idle")
    assert place(d, member(d, "a")) == 0
    assert place(d, member(d, "a")) is None
    assert place(d, idle) == 0


def test_a_member_gets_back_no_place_that_it_may_not_have() -> None:
    """A place that another member has taken, that is gone, or whose entry is not allowed any more is not given back."""
    d = Driver.with_model()
    run(d, workers=3)
    for name in "abc":
        member(d, name)
    d.wait(limits.LEASE_S + 1.0)
    d.ask(lambda n: io.PatchRun(n, "run-1", workers=2))
    assert place(d, member(d, "other")) == 0
    assert place(d, member(d, "b", "elsewhere")) is None
    assert place(d, member(d, "c")) == 1
    assert place(d, member(d, "a")) is None


def test_a_place_is_not_kept_for_a_member_that_has_done_it() -> None:
    """A place that a member has reported is not given back to it."""
    d = Driver.with_model()
    run(d, workers=2)
    a = member(d, "a")
    done(d, a)
    assert place(d, a) == 1
    d.restart()
    d.wait(limits.LEASE_S + 1.0)
    assert place(d, member(d, "a")) == 1


def test_a_join_tells_a_worker_what_its_run_asks() -> None:
    """A worker hears with its join that its run is paused or over, or that its place is gone.

    One whose process was started again trained a paused run until its first heartbeat.
    """
    d = Driver.with_model()
    run(d, workers=2)
    assert [d.join(name)["asked"] for name in ("run-1/w0", "run-1/w2", "alone")] == ["active", "stop", "active"]
    d.ask(lambda n: io.PatchRun(n, "run-1", "paused"))
    assert [d.join(name)["asked"] for name in ("run-1/w0", "alone")] == ["paused", "active"]
    d.ask(lambda n: io.PatchRun(n, "run-1", "stopped"))
    assert d.join("run-1/w1")["asked"] == "stop"
