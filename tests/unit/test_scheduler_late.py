"""Late clocks in sync with a quorum: commits list each finished clock once, and never one that the worker skipped."""

from typing import Any

import pytest

from paramserver.core.scheduler import io
from paramserver.errors import PsError

from .scheduling import Driver
from .test_scheduler_staged import told

FOLD: dict[str, Any] = {"consistency": {"mode": "sync", "quorum": 0.5, "late": "fold"}}


def gone_on(to: int = 3) -> tuple[Driver, Any, Any]:
    """Return a driver with two workers, of which the first has reached that clock without the second."""
    d = Driver.with_model(**FOLD)
    a, b = d.join("a"), d.join("b")
    for clock in range(1, to + 1):
        d.clock_of(a, clock)
        d.beats()
    return d, a, b


def beat(d: Driver, worker: Any, clock: int, since: int | None = None) -> None:
    """Send a heartbeat of the worker with its clock."""
    d.ask(lambda n: io.WorkerHeartbeat(n, "m", worker["worker"], worker["epoch"], clock, since=since))


def listed_of(d: Driver, worker: Any) -> list[int]:
    """Return the clocks that commits have listed for the worker, in order."""
    return [c for commit in d.commits() for name, _, _, c in commit["contributions"] if name == worker["worker"]]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_who_has_finished_no_iteration_is_not_late(mode: str) -> None:
    """A report of clock 0 is not late in any mode: there is nothing that could have been dropped."""
    d = Driver.with_model(consistency={"mode": mode})
    told = d.result(d.clock_of(d.join("a"), 0))
    assert (told["released"], told["late"]) == (True, False)


def test_a_clock_that_was_late_before_the_model_went_back_is_not_late_again() -> None:
    """A worker that reported a clock late, and reports it again in time on the next timeline, is in its commit."""
    d = Driver.with_model(consistency={"mode": "sync", "quorum": 0.5, "min_workers": 2})
    a, b = d.join("a"), d.join("b")
    d.clock_of(a, 1)
    d.beats()
    d.now += 0.1
    d.clock_of(a, 2)
    assert d.result(d.clock_of(b, 2))["late"] is True

    d.ask(lambda n: io.LeaveShard(n, "s1", d.shards.pop("s1")))
    d.beats()
    told = d.result(d.clock_of(b | {"timeline": 1}, 2))

    assert (told["released"], told["late"]) == (True, False)
    assert listed_of(d, b) == [1]


@pytest.mark.parametrize("since", [None, 3])
def test_clocks_that_a_worker_was_told_to_leave_out_are_never_listed(since: int | None) -> None:
    """Clocks that a worker was told to skip are not listed when its heartbeats report a later one.

    Otherwise a mean would be divided by a contribution that was never pushed.
    """
    d, a, b = gone_on()
    assert d.result(d.clock_of(b, 1))["clock"] == 3
    beat(d, b, 3, since)
    d.clock_of(b, 4)
    d.clock_of(a, 5)

    assert listed_of(d, b) == [0, 3]


@pytest.mark.parametrize("late", ["drop", "fold"])
def test_what_a_worker_reports_although_it_waits_for_data_is_late(late: str) -> None:
    """An iteration that a worker without data has finished after the others is late: it is told so, or it is folded."""
    d = Driver.with_model(consistency={"mode": "sync", "late": late, "min_workers": 2})
    a, b = d.join("a"), d.join("b")
    d.ask(lambda n: io.RegisterDataset(n, "m", "t", 1, 1))
    for worker in (a, b):
        d.lease(worker, "t")
    d.clock_of(a, 1)
    told_late = d.result(d.clock_of(b, 1))["late"]
    d.clock_of(a, 2)

    assert (told_late, listed_of(d, b)) == ((True, []) if late == "drop" else (False, [0]))


def test_who_gets_data_again_leaves_out_what_the_others_did_without_it() -> None:
    """A worker that rested goes on at the clock that comes with its next range; those before it are not listed."""
    d = Driver.with_model(**FOLD)
    a, b = d.join("a"), d.join("b")
    d.ask(lambda n: io.RegisterDataset(n, "m", "t", 1, 1))
    d.ask(lambda n: io.RegisterDataset(n, "m", "u", 1, 1))
    for worker in (a, b):
        d.lease(worker, "t")
    for clock in (1, 2, 3):
        d.clock_of(a, clock)
    leased = d.result(d.lease(b, "u"))
    d.restart()
    d.clock_of(b, 4)

    assert (leased["clock"], listed_of(d, b)) == (3, [3])


def test_a_late_clock_of_who_waits_for_data_then_is_listed_by_a_new_leader() -> None:
    """A late report is stored until its clock is listed, also if its worker finds no more data and the leader changes.

    Without it the worker's push, answered as one that counts, would be in no commit.
    """
    d, a, b = gone_on()
    d.ask(lambda n: io.RegisterDataset(n, "m", "t", 1, 1))
    d.lease(a, "t")
    d.clock_of(b, 1)
    d.lease(b, "t")
    d.ask(lambda n: io.RequestEvaluation(n, "m"))  # has the clocks stored
    d.restart()
    beat(d, b, 1)
    d.clock_of(a, 4)

    assert listed_of(d, b) == [0]


def test_who_never_heard_where_to_go_on_leaves_nothing_out() -> None:
    """The clocks that a worker goes on to report are listed if they lie before the one that it was told to work on.

    It has worked on them because the answer that named a later one was lost.
    """
    d, a, b = gone_on()
    assert d.result(d.clock_of(b, 1))["clock"] == 3
    beat(d, b, 2)
    d.clock_of(a, 4)

    assert listed_of(d, b) == [0, 1]


def test_who_joins_begins_at_the_open_clock_however_far_behind_another_is() -> None:
    """A worker that joins while another lags behind the quorum begins at the open clock, not at a committed one."""
    d, _, b = gone_on()

    assert d.join("c")["clock"] == 3
    assert d.core.read.worker("m", b["worker"], d.now)["clock"] == 0


def test_who_heard_from_a_shard_where_to_go_on_says_so() -> None:
    """If a shard told a worker where to continue, `since` in its reports keeps the clocks before from being listed."""
    d, a, b = gone_on()
    beat(d, b, 3, 3)
    d.clock_of(a, 4)
    d.send(lambda n: io.ReportClock(n, "m", b["worker"], b["epoch"], 5, None, 0.0, 4))
    d.clock_of(a, 5)
    d.clock_of(a, 6)

    assert listed_of(d, b) == [4]


def test_a_push_that_ends_its_iteration_stands_for_that_clock_alone() -> None:
    """A clock that a shard reports for a worker is listed alone, without earlier clocks that the worker skipped."""
    d, a, b = gone_on()
    told(d, b, "s0", clock=4, shards=1)
    d.clock_of(a, 4)
    d.clock_of(a, 5)

    assert listed_of(d, b) == [3]


def test_a_commit_lists_no_clock_after_its_own() -> None:
    """With `fold`, too, the clocks of a worker that is ahead of the others wait for commits of their own."""
    d = Driver.with_model(consistency={"mode": "sync", "late": "fold", "min_workers": 2})
    a, b = d.join("a"), d.join("b")
    d.clock_of(a, 3)
    for clock in (1, 2, 3):
        d.clock_of(b, clock)

    assert [[c for _, _, _, c in commit["contributions"]] for commit in d.commits()] == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("when", ["reported before", "reported after"])
def test_a_late_clock_is_folded_whoever_leads_by_then(when: str) -> None:
    """With `fold`, a new leader lists a late clock, whether it was reported before the change of leader or after it."""
    d, a, b = gone_on()
    if when == "reported before":
        d.clock_of(b, 1)
    d.restart()
    if when == "reported after":
        d.clock_of(b, 1)
    beat(d, b, 3, 3)
    beat(d, a, 3, 0)
    d.clock_of(a, 4)
    d.clock_of(b, 5)
    d.clock_of(a, 5)

    assert listed_of(d, b) == [0, 3, 4]


def test_another_leader_knows_where_a_worker_was_told_to_go_on() -> None:
    """A new leader knows where a worker was told to continue, also if the worker never reports `since`."""
    d, a, b = gone_on()
    d.clock_of(b, 1)
    d.clock_of(a, 4)
    assert listed_of(d, b) == [0]
    d.restart()
    beat(d, b, 3)
    d.clock_of(b, 4)
    d.clock_of(a, 5)
    d.clock_of(a, 6)

    assert listed_of(d, b) == [0, 3]


@pytest.mark.parametrize("leader", ["the same", "another"])
def test_who_is_told_of_a_rollback_leaves_out_what_lies_before_the_clock_it_is_told(leader: str) -> None:
    """Without `since`, clocks before the one named by `rolled_back` count as skipped, also under another leader."""
    d, a, b = gone_on(1)
    d.ask(lambda n: io.LeaveShard(n, "s1", d.shards.pop("s1")))
    d.beats()
    a["timeline"] = 1
    for clock in (2, 3, 4):
        d.clock_of(a, clock)
    refused = d.replies[d.clock_of(b, 1)]
    assert (refused.code, refused.members["clock"]) == ("rolled_back", 4)
    if leader == "another":
        d.restart()
    b["timeline"] = 1
    d.clock_of(b, 5)
    d.clock_of(a, 5)
    d.clock_of(a, 6)

    assert listed_of(d, b) == [4]


def now_late(d: Driver, policy: str) -> None:
    """Set the model's policy for late reports."""
    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"late": policy}}))


@pytest.mark.parametrize("restarts", [False, True])
def test_a_late_clock_that_was_accepted_is_folded_though_the_next_ones_are_dropped(restarts: bool) -> None:
    """A clock reported late under `fold` is in the next list, also if the policy has become `drop` by then."""
    d, a, b = gone_on()
    assert d.result(d.clock_of(b, 1))["late"] is False
    now_late(d, "drop")
    if restarts:
        d.restart()
        beat(d, a, 3, 0)
    assert d.result(d.clock_of(b, 2))["late"] is True
    d.clock_of(a, 4)
    d.clock_of(a, 5)

    assert listed_of(d, b) == [0]


@pytest.mark.parametrize("first", ["report", "heartbeat"])
def test_a_new_leader_says_which_clock_was_dropped(first: str) -> None:
    """A clock that the former leader committed without a worker is late, also if the worker reports it to a new one."""
    d, a, b = gone_on()
    now_late(d, "drop")
    d.clock_of(a, 4)
    d.restart()
    if first == "heartbeat":
        beat(d, b, 1)
        beat(d, a, 4)

    assert d.result(d.clock_of(b, 1))["late"] is True
    assert d.result(d.clock_of(a, 4))["late"] is False


def test_a_late_clock_that_was_dropped_is_not_folded_afterwards() -> None:
    """A clock whose report was answered `late` under `drop` is in no list, also if the policy then becomes `fold`."""
    d, a, b = gone_on()
    now_late(d, "drop")
    d.clock_of(a, 4)
    assert d.result(d.clock_of(b, 1))["late"] is True
    now_late(d, "fold")
    d.clock_of(a, 5)

    assert listed_of(d, b) == []


@pytest.mark.parametrize("restarts", [False, True])
def test_a_clock_that_the_others_passed_under_drop_is_not_folded(restarts: bool) -> None:
    """A report of it is late, also after a change to `fold`: the partitions have discarded its parts by then."""
    d, a, b = gone_on()
    now_late(d, "drop")
    d.clock_of(a, 4)
    now_late(d, "fold")
    if restarts:
        d.restart()
        beat(d, a, 4, 0)
    assert d.result(d.clock_of(b, 4))["late"] is True
    d.clock_of(a, 5)
    assert d.result(d.clock_of(b, 5))["late"] is False
    d.clock_of(a, 6)

    assert listed_of(d, b) == [4]


@pytest.mark.parametrize("since", [None, 0])
def test_another_leader_lists_the_clock_that_a_late_worker_has_reported_as_well(since: int | None) -> None:
    """A worker with a late clock has the open one listed, too, if it reported both before a change of leader."""
    d = Driver.with_model(consistency={"mode": "sync", "quorum": 0.6, "late": "fold", "min_workers": 3})
    a, b, c = d.join("a"), d.join("b"), d.join("c")
    d.clock_of(a, 1)
    d.clock_of(c, 1)
    d.clock_of(b, 1)
    assert not d.ask(lambda n: io.ReportClock(n, "m", b["worker"], b["epoch"], 2, None, 0.0, since))["released"]
    d.restart()
    beat(d, b, 2, since)
    d.clock_of(a, 2)

    assert listed_of(d, b) == [0, 1]


@pytest.mark.parametrize("since", [-1, 5])
def test_a_beginning_that_cannot_be_is_refused(since: int) -> None:
    """A `since` below 0 or above the reported clock is refused."""
    d, _, b = gone_on()
    with pytest.raises(PsError) as refused:
        beat(d, b, 4, since)
    assert (refused.value.code, refused.value.members["where"]) == ("invalid_field", "since")
