"""Clocks of the scheduler, event by event: who waits for whom in each mode, and what a change of the mode makes."""

from typing import Any

import pytest

from paramserver import limits
from paramserver.core.scheduler import io
from paramserver.errors import RequestError

from .scheduling import Driver, beyond_its_cut, code

SYNC = {"consistency": {"mode": "sync"}}


def test_a_worker_parked_at_a_clock_learns_of_the_rollback() -> None:
    """A rollback answers a parked clock request with `rolled_back`, at once and once: the next request is served."""
    d = Driver.with_model(consistency={"mode": "sync", "min_workers": 2})
    a = d.join("a")
    d.join("b")
    parked = d.clock(a, 1)
    d.shard("s0")
    assert code(d, parked) == "rolled_back"
    assert d.result(d.clock(a, 1, 0.0))["timeline"] == 1


def test_a_heartbeat_without_a_clock_learns_of_the_rollback_by_its_timeline() -> None:
    """A heartbeat that says only its timeline is refused as `rolled_back` once the model has another one."""
    d, a = beyond_its_cut()

    def beat(timeline: int | None) -> int:
        return d.send(lambda n: io.WorkerHeartbeat(n, "m", a["worker"], a["epoch"], timeline=timeline))

    d.shard("s0")
    refused = beat(0)
    assert code(d, refused) == "rolled_back"
    assert d.replies[refused].members == {"timeline": 1, "clock": 1}
    assert d.result(beat(None))["timeline"] == 0, "nothing is said of timelines where nothing is asked"
    assert d.result(beat(1))["timeline"] == 1


@pytest.mark.parametrize("waits_for", ["clock", "task"])
def test_a_parked_worker_learns_that_another_has_its_name(waits_for: str) -> None:
    """A join under the name of a worker that waits answers it `fenced`, with the new epoch, by which it gives way.

    Without that it would take its lease for expired, join again, and replace the worker that has just replaced it.
    """
    d = Driver.with_model(consistency={"mode": "sync", "min_workers": 2})
    a = d.join("a")
    if waits_for == "task":
        d.ask(lambda n: io.RegisterDataset(n, "m", "train", 1, 1))
        d.lease(d.join("b"), "train")
    parked = d.clock(a, 1) if waits_for == "clock" else d.lease(a, "train", 10.0)
    assert parked in d.open

    epoch = d.join("a")["epoch"]

    assert code(d, parked) == "fenced"
    assert d.replies[parked].members["epoch"] == epoch > a["epoch"]


@pytest.mark.parametrize("done", [0, 3])
def test_a_new_mode_waits_for_its_workers_unless_there_has_been_progress(done: int) -> None:
    """In a new mode the first clock waits for `min_workers`, whoever had joined before; after progress, none waits."""
    d = Driver.with_model()
    a, b = d.join("a"), d.join("b")
    if done:
        d.clock(a, done)
        d.clock(b, done)
    d.ask(lambda n: io.LeaveWorker(n, "m", b["worker"], b["epoch"]))
    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"mode": "sync", "min_workers": 2}}))
    begins = d.core.read.model("m")["clock"]
    d.clock(a, begins)  # learns of the new timeline

    released = d.result(d.clock(a, begins + 1, 0.0))["released"]

    assert released == (done > 0)


def test_entering_sync_makes_one_clock_and_a_cut() -> None:
    """Switching to sync begins a new timeline with an empty commit that is a cut; workers continue after it."""
    d = Driver.with_model()
    a = d.join("a")
    assert d.result(d.clock(a, 7))["released"]
    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"mode": "sync"}}))
    (first,) = d.commits()
    assert first["contributions"] == []
    assert first["cut"]
    assert first["timeline"] == 1
    told = d.clock(a, 8)
    assert code(d, told) == "rolled_back"
    clock = d.replies[told].members["clock"]
    assert clock == first["t"] + 1
    assert d.result(d.clock(a, clock + 1))["released"]


def test_assignments_count_in_a_synchronous_models_version_and_not_in_its_clock() -> None:
    """Assignments raise a sync model's version but not its clock, which is the version told to a released worker."""
    d = Driver()
    d.assigned = 3
    d.model(**SYNC)
    told = [(d.core.read.model("m")["version"], d.core.read.models()[0]["version"])]
    released = d.result(d.clock(d.join("a"), 1))
    d.beats()
    told.append((d.core.read.model("m")["version"], d.core.read.models()[0]["version"]))

    assert told == [(3, 3), (4, 4)]
    assert (released["released"], released["version"]) == (True, 1)
    assert d.core.read.model("m")["clock"] == 1


def test_quorum_late_workers_are_dropped_or_folded() -> None:
    """A late clock is in no commit with `drop`, in the next one with `fold`; the worker is told where to continue."""
    for late, listed in (("drop", [["m/a", 1]]), ("fold", [["m/a", 1], ["m/b", 0]])):
        d = Driver.with_model(consistency={"mode": "sync", "quorum": 0.5, "late": late, "min_workers": 2})
        a, b = d.join("a"), d.join("b")
        d.clock(a, 1)
        reply = d.result(d.clock(b, 1))
        assert reply["released"]
        assert reply["clock"] == 1
        d.clock(a, 2)
        assert [[w, c] for w, _, _, c in d.commits()[1]["contributions"]] == listed


def test_a_quorum_by_number_counts_reports_and_no_more_than_are_live() -> None:
    """`quorum_count` reports end a clock, whatever the number of workers; if fewer are left, the reports of all do."""
    d = Driver.with_model(consistency={"mode": "sync", "quorum_count": 2, "min_workers": 4})
    workers = [d.join(name) for name in "abcd"]

    def reports(clock: int, *of: int) -> list[int]:
        """The number of commits after each of these workers' reports."""
        made = []
        for i in of:
            d.clock(workers[i], clock)
            made.append(len(d.commits()))
        return made

    assert reports(1, 0, 1) == [0, 1]
    assert reports(2, 3, 2) == [1, 2]
    for i in (1, 2):
        d.ask(lambda n, w=workers[i]: io.LeaveWorker(n, "m", w["worker"], w["epoch"]))  # type: ignore[misc]
    assert reports(3, 0, 3) == [2, 3]
    d.ask(lambda n: io.LeaveWorker(n, "m", workers[3]["worker"], workers[3]["epoch"]))
    assert reports(4, 0) == [4]


@pytest.mark.parametrize("late", ["drop", "fold"])
def test_a_worker_that_joins_during_a_clock_is_told_if_its_push_for_it_does_not_count(late: str) -> None:
    """A joiner works on the open clock, for which nobody waits; if its report is too late and dropped, it is told."""
    d = Driver.with_model(consistency={"mode": "sync", "late": late})
    a = d.join("a")
    d.clock(a, 1)
    b = d.join("b")
    assert b["clock"] == 1
    d.clock(a, 2)
    told = [d.result(d.clock(b, 2)) for _ in range(2)]  # its second report is a repetition
    d.clock(a, 3)
    told.append(d.result(d.clock(b, 3)))

    assert [(t["released"], t["late"]) for t in told] == [(True, late == "drop")] * 2 + [(True, False)]
    listed = [(w, clock) for c in d.commits() for w, _, _, clock in c["contributions"]]
    assert (("m/b", 1) in listed) == (late == "fold")
    assert ("m/b", 2) in listed


def test_min_workers_and_waiting_for_are_said() -> None:
    """A clock report that is not released names what it waits for: first workers yet to join, then those behind."""
    d = Driver.with_model(consistency={"mode": "sync", "min_workers": 2})
    a = d.join("a")
    reply = d.result(d.clock(a, 1, 0.0))
    assert (reply["released"], reply["waiting_for"]) == (False, ["1 more worker to join"])
    d.join("b")
    assert d.result(d.clock(a, 1, 0.0))["waiting_for"] == ["m/b"]
    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"min_workers": 3}}))
    assert d.result(d.clock(a, 1, 0.0))["waiting_for"] == ["m/b"]


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_clock_0_waits_anew_once_all_have_gone_without_a_step(mode: str) -> None:
    """Workers that join and leave without a step do not open clock 0 for the next ones, nor does a new leader."""
    d = Driver.with_model(consistency={"mode": mode, "min_workers": 2})
    for worker in [d.join("a"), d.join("b")]:
        d.ask(lambda n, w=worker: io.LeaveWorker(n, "m", w["worker"], w["epoch"]))  # type: ignore[misc]
    d.restart()
    d.beats()
    a = d.join("a")

    alone = d.result(d.clock(a, 1, 0.0))

    assert (alone["released"], alone["waiting_for"]) == (False, ["1 more worker to join"])
    assert not d.commits()
    b = d.join("b")
    d.clock(b, 1)
    assert d.result(d.clock(a, 1, 0.0))["released"]


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_more_workers_to_begin_with_are_waited_for_until_one_has_reported(mode: str) -> None:
    """A larger `min_workers` holds clock 0 back for the workers that are there already, but not once one has reported.

    Fewer open it as before.
    """
    d = Driver.with_model(consistency={"mode": mode})
    a = d.join("a")
    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"min_workers": 2}}))
    reply = d.result(d.clock(a, 1, 0.0))
    assert (reply["released"], reply["waiting_for"]) == (False, ["1 more worker to join"])

    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"min_workers": 1}}))

    assert d.result(d.clock(a, 1, 0.0))["released"]
    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"min_workers": 3}}))
    assert d.result(d.clock(a, 2, 0.0))["released"]


def test_who_has_joined_before_the_first_report_belongs_to_the_first_clock() -> None:
    """The roster of clock 0 stays open until a worker has reported; who joins after that belongs to clock 1."""
    d = Driver.with_model(consistency={"mode": "sync"})
    a = d.join("a")
    b = d.join("b")
    parked = d.clock(a, 1)
    assert parked in d.open
    c = d.join("c")

    d.clock(b, 1)

    assert d.result(parked)["released"]
    parked = d.clock(a, 2)
    d.clock(b, 2)
    assert parked in d.open
    d.clock(c, 2)
    assert d.result(parked)["released"]


def test_a_dead_worker_opens_the_barrier_and_is_fenced() -> None:
    """A worker whose lease expires is fenced until it rejoins; a parked one counts as alive and is released then."""
    d = Driver.with_model(consistency={"mode": "sync", "min_workers": 2})
    a, b = d.join("a"), d.join("b")
    parked = d.clock(a, 1, 30.0)
    d.wait(4)
    assert parked in d.open
    d.wait(2)
    assert d.result(parked)["released"]
    assert code(d, d.clock(b, 1)) == "fenced"
    again = d.join("b")
    assert (again["epoch"], again["rank"], again["clock"]) == (2, 1, 1)


def test_a_worker_whose_parked_request_has_ended_dies_as_any_other() -> None:
    """A parked request keeps its worker alive only until it is answered: a lease later the worker is fenced."""
    d = Driver.with_model(consistency={"mode": "sync", "min_workers": 2})
    a, b = d.join("a"), d.join("b")
    parked = d.clock(a, 1, 30.0)
    assert d.result(d.clock(b, 1))["released"]
    assert d.result(parked)["released"]
    d.wait(6)
    assert code(d, d.clock(a, 2)) == "fenced"


def test_ssp_blocks_who_is_too_far_ahead() -> None:
    """In ssp with staleness 2, a worker three clocks ahead waits for the slowest one."""
    d = Driver.with_model(consistency={"mode": "ssp", "staleness": 2})
    a, b = d.join("a"), d.join("b")
    assert d.result(d.clock(a, 2))["released"]
    parked = d.clock(a, 3)
    assert parked in d.open
    d.ask(lambda n: io.WorkerHeartbeat(n, "m", b["worker"], 1, 1))
    assert d.result(parked)["released"]


def test_in_ssp_workers_yet_to_join_hold_the_others_back() -> None:
    """In ssp nobody gets further than the staleness before `min_workers` have joined, and who joins begins at 0."""
    d = Driver.with_model(consistency={"mode": "ssp", "staleness": 2, "min_workers": 2})
    a = d.join("a")
    assert d.result(d.clock(a, 2))["released"]
    reply = d.result(d.clock(a, 3, 0.0))
    assert (reply["released"], reply["min_clock"], reply["waiting_for"]) == (False, 0, ["1 more worker to join"])

    b = d.join("b")

    assert b["clock"] == 0
    parked = d.clock(a, 3)
    assert parked in d.open
    d.clock(b, 1)
    assert d.result(parked)["released"]


def test_who_waits_for_data_holds_no_barrier_up() -> None:
    """In sync, commits do not wait for a worker that waits for data."""
    d = Driver.with_model(consistency={"mode": "sync", "min_workers": 2})
    a, b = d.join("a"), d.join("b")
    d.ask(lambda n: io.RegisterDataset(n, "m", "train", 10, 10))
    assert d.ask(lambda n: io.LeaseTask(n, "m", a["worker"], 1, "train"))["task"]
    parked = d.clock(a, 1)
    assert parked in d.open
    d.send(lambda n: io.LeaseTask(n, "m", b["worker"], 1, "train", 30.0))
    assert d.result(parked)["released"]


def test_refused_clocks_change_nothing() -> None:
    """In sync, a negative clock or one far beyond the open one is refused, and no commit is made."""
    d = Driver.with_model(**SYNC)
    a: Any = d.join("a")
    for bad in (1 << 40, -1):
        assert code(d, d.clock(a, bad)) == "invalid_field"
    assert not d.commits()


def test_what_cannot_be_given_back_is_not_taken() -> None:
    """A worker state must be JSON of bounded size and depth, with finite or 64-bit numbers, or it is refused.

    A metric that is not finite is given back as null.
    """
    d = Driver.with_model()
    a = d.join("a")
    deep: Any = []
    for _ in range(40):
        deep = [deep]
    for bad in (float("nan"), 1 << 64, "\ud800", {"x": [b""]}, {1: 2}, deep, [0] * 30_000):
        with pytest.raises(RequestError):
            d.ask(lambda n, v=bad: io.WorkerHeartbeat(n, "m", a["worker"], 1, state=v))  # type: ignore[misc]
    d.ask(lambda n: io.WorkerHeartbeat(n, "m", a["worker"], 1, metrics={"loss": float("nan"), "x": 1}, state={"i": 3}))
    assert d.core.read.worker("m", a["worker"], d.now)["metrics"] == {"loss": None, "x": 1.0}
    assert d.join("a")["state"] == {"i": 3}


def test_a_scheduler_wakes_when_the_first_wait_or_lease_ends() -> None:
    """`deadline` is at most the end of a wait that has just begun, and at most that of every lease."""
    d = Driver.with_model(consistency={"mode": "sync"})
    a, _ = d.join("a"), d.join("b")
    d.wait(0.5)
    asked = d.clock(a, 1, wait_s=0.1)
    assert d.core.deadline() == d.now + 0.1
    d.now += 0.1
    d.do(io.Tick())
    assert not d.result(asked)["released"]
    assert d.core.deadline() == d.now + limits.HEARTBEAT_S

    d.wait(limits.LEASE_S - 1.0)
    b_ends_s = d.core._c.models["m"].roster.workers["m/b"].expires_s()
    assert d.now < d.core.deadline() == b_ends_s < d.now + limits.HEARTBEAT_S


def test_a_new_leader_does_not_take_a_clock_of_an_old_timeline_for_a_present_one() -> None:
    """A worker that joined beyond the clock to which the model then went back starts at the model's clock.

    Otherwise another leader would not have the fast ones wait for it, in a mode that is not sync.
    """
    d, _ = beyond_its_cut()
    b = d.join("b")
    assert b["clock"] == 2
    d.shard("s1")
    d.beats()
    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"mode": "ssp", "staleness": 0}}))
    assert d.core.read.worker("m", "m/b", d.now)["clock"] == 1

    d.restart()

    assert d.core.read.worker("m", "m/b", d.now)["clock"] == 1
    assert d.core.read.worker("m", d.join("c")["worker"], d.now)["clock"] == 1
