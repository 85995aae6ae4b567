"""Runs and the worker pool, and what survives a kill of the scheduler."""

import json
from typing import Any

import pytest

from paramserver import limits
from paramserver.core.scheduler import io
from paramserver.errors import ConflictError, CorruptState, FencedError, NotFoundError, RequestError

from .scheduling import EPOCH_S, Driver
from .training_runs import ENTRY, beat, done, member, run, state


def test_a_run_without_workers_says_so_and_how_to_start_some() -> None:
    """A run without workers is `waiting` and says how to start some; with one of two it is `running` and says so."""
    d = Driver.with_model()
    made = run(d, workers=2)
    assert made["state"] == "waiting"
    assert "paramserver-worker" in made["reason"]
    m = member(d, "p")
    assert state(d)[0] == "running"
    assert "1 of 2 workers" in state(d)[1]
    assert beat(d, m) == {
        "state": "assigned",
        "run": {
            "id": "run-1", "name": "run-1", "model": "m", "entry": ENTRY, "args": {}, "place": 0,
            "attempt": 0, "worker": "run-1/w0", "rank": 0, "workers": 2,
        },
    }  # fmt: skip


def test_the_time_in_which_a_run_waits_for_workers_is_not_its_own() -> None:
    """A run's time is that in which it had a worker."""
    d = Driver.with_model()
    run(d)
    d.wait(30.0)
    d.now += 0.25
    m = member(d, "p")
    d.wait(2.0)
    assert done(d, m)["ran_s"] == 2.0


def test_a_paused_run_stays_paused_until_it_is_told_to_go_on() -> None:
    """Another change of a paused run does not resume it."""
    d = Driver.with_model()
    run(d)
    member(d, "p")
    d.ask(lambda n: io.PatchRun(n, "run-1", "paused"))
    assert d.ask(lambda n: io.PatchRun(n, "run-1", None, 2))["state"] == "paused"
    assert d.ask(lambda n: io.PatchRun(n, "run-1", "running"))["state"] == "running"


def test_the_pool_shows_the_newest_metrics_of_its_members() -> None:
    """A member's heartbeat replaces the metrics of the one before; what is no finite number is left out."""
    d = Driver.with_model()
    m = member(d, "p")
    for metrics in ({"cpu": 1.0, "gpu": 2.0}, {"cpu": 3.0, "nan": float("nan")}):
        d.ask(lambda n, x=metrics: io.PoolHeartbeat(n, m["member"], m["epoch"], x))  # type: ignore[misc]
    assert d.core.read.pool(d.now)[0]["metrics"] == {"cpu": 3.0}


def test_only_who_allows_the_entry_gets_a_place() -> None:
    """Only a member that allows the module of the entry gets a place; prefixes match whole module names."""
    d = Driver.with_model()
    run(d)
    for i, allow in enumerate(("paramserver.example", "other", "paramserver.examples.digits.train")):
        assert beat(d, member(d, f"p{i}", allow))["state"] == "idle"
    assert beat(d, member(d, "q", "paramserver"))["state"] == "assigned"


def test_a_run_says_that_idle_workers_may_not_import_its_entry() -> None:
    """While idle workers may not import a run's entry, its reason says how many, what they allow and what to start."""
    d = Driver.with_model()
    a = member(d, "a", "tr")
    run(d, workers=2)
    barred = f"1 idle worker may not import '{ENTRY}' (allowed: tr)"
    assert f"no worker has taken one of its 2 places: {barred}" in state(d)[1]
    assert "paramserver-worker --allow paramserver.examples.digits" in state(d)[1]

    member(d, "b", "os", "tr")
    assert f"2 idle workers may not import '{ENTRY}' (allowed: os, tr)" in state(d)[1]
    d.ask(lambda n: io.LeavePool(n, "b", 1))
    member(d, "c")
    assert f"1 of 2 workers; 1 more can join: {barred}" in state(d)[1]
    assert json.loads(d.hash["run:run-1"])["reason"] == state(d)[1]
    d.ask(lambda n: io.LeavePool(n, a["member"], 1))
    assert state(d)[1] == "1 of 2 workers; 1 more can join: start one with 'paramserver-worker'"


def test_a_run_of_ones_own_function_says_how_to_start_workers_that_may_import_it() -> None:
    """A worker may import the shipped examples only, unless it is told of another module."""
    d = Driver.with_model()
    d.ask(lambda n: io.CreateRun(n, "m", "mypackage.job:train"))
    how = "start one with 'paramserver-worker --allow mypackage.job'"
    assert state(d)[1] == f"no worker has taken one of its 1 places: {how}"


def test_an_exception_that_is_reported_again_counts_once() -> None:
    """Repeated reports of an exception in one attempt count once, and reports of an earlier attempt are ignored.

    The answer to a report may be lost, and by then the member may have the same place again, with a new attempt.
    """
    d = Driver.with_model()
    run(d)
    m = member(d, "p")
    for attempt in (0, 0, 0, 0, 0, 1, 1):
        done(d, m, error="Traceback: it", attempt=attempt)
    assert state(d)[0] == "running"
    assert beat(d, m)["run"]["attempt"] == 2
    done(d, m, attempt=1)
    assert state(d)[0] == "running"
    done(d, m, attempt=2)
    assert state(d)[0] == "finished"


def test_a_run_that_is_made_smaller_ends_where_all_that_is_left_of_it_is_done() -> None:
    """A run reduced to places that are all done is finished, and reports for the removed place change nothing."""
    d = Driver.with_model()
    run(d, workers=2)
    p, q = member(d, "p"), member(d, "q")
    done(d, p)
    assert d.ask(lambda n: io.PatchRun(n, "run-1", None, 1))["state"] == "finished"
    assert beat(d, q)["state"] == "stop"
    done(d, q, 1)
    assert beat(d, q)["state"] == "idle"
    assert state(d)[0] == "finished"


def test_a_worker_that_raises_is_restarted_three_times() -> None:
    """A worker that raises is restarted three times; then the run fails with the traceback and the member is free."""
    d = Driver.with_model()
    run(d)
    m = member(d, "p")
    for i in range(3):
        assert done(d, m, error=f"Traceback {i}")["state"] == "running"
        assert beat(d, m)["state"] == "assigned"
    failed = done(d, m, error="Traceback: the last")
    assert failed["state"] == "failed"
    assert "Traceback: the last" in failed["reason"]
    assert beat(d, m) == {"state": "idle", "run": None}


def test_a_worker_that_raises_now_and_then_ends_no_run() -> None:
    """Exceptions count together only if each came within an hour of taking the place, as in a loop of crashes."""
    d = Driver.with_model()
    run(d)
    m = member(d, "p")
    for _ in range(3):
        for _ in range(3):
            done(d, m, error="Traceback")
        for _ in range(30):
            d.now += 120.0  # a process of the scheduler that stood still: it takes the leases to be kept
            d.beats()
            beat(d, m)
    assert state(d)[0] == "running"
    assert d.core.read.run("run-1")["places"][0]["restarts"] == 9
    for _ in range(4):
        done(d, m, error="Traceback")
    assert state(d)[0] == "failed"
    assert "raised an exception 4 times" in state(d)[1]


def test_an_outage_of_the_shards_ends_no_run() -> None:
    """While a partition has no owner, exceptions of workers, which can neither pull nor push, are not counted."""
    d = Driver.with_model()
    run(d)
    m = member(d, "p")
    away, d.shards = d.shards, {}
    for _ in range(10):
        for _ in range(30):
            d.wait(0.5)
            beat(d, m)
        done(d, m, error="Unavailable")
    assert state(d)[0] == "running"

    for name in away:
        d.shard(name)
    d.beats()
    for _ in range(3):
        assert done(d, m, error="Traceback")["state"] == "running"
    assert done(d, m, error="Traceback")["state"] == "failed"


def test_what_a_worker_says_cannot_steer_the_terminal_that_shows_it() -> None:
    """Control characters of a traceback are replaced, apart from tabs and newlines; prefixes have none at all."""
    d = Driver.with_model()
    run(d)
    with pytest.raises(RequestError, match="prefixes"):
        member(d, "q", "\x1b[2J")
    m = member(d, "p")
    for _ in range(4):
        failed = done(d, m, error="Traceback\n\tat \x1b]0;title\x07\x9b2J\rhere")
        beat(d, m)
    assert failed["reason"].endswith("Traceback\n\tat ?]0;title??2J?here")


def test_a_member_that_dies_frees_its_place_without_a_restart() -> None:
    """When a member dies another one takes its place, no restart is counted, and the dead one is fenced."""
    d = Driver.with_model()
    run(d)
    a = member(d, "a")
    d.wait(3)
    b = member(d, "b")
    d.wait(3)
    assert beat(d, b)["run"]["place"] == 0
    with pytest.raises(FencedError):
        beat(d, a)
    assert d.core.read.run("run-1")["places"][0]["restarts"] == 0


@pytest.mark.parametrize("names", [["p"] * 6, [f"p{i}" for i in range(6)]])
def test_a_run_whose_process_dies_each_time_fails(names: list[str]) -> None:
    """A run fails once the process at one of its places has died five times in a row, soon after it took the place.

    It may come back under its name before its lease expires, or another member takes the place.
    """
    d = Driver.with_model()
    run(d)
    for i, name in enumerate(names):
        assert state(d)[0] == ("running" if i else "waiting")
        if name not in names[:1]:
            d.wait(limits.LEASE_S + 1.0)
        last = member(d, name)

    assert state(d)[0] == "failed"
    assert "the process of worker 0 died 5 times in a row" in state(d)[1]
    assert f"member '{names[4]}'" in state(d)[1]
    assert beat(d, last) == {"state": "idle", "run": None}


@pytest.mark.parametrize("between", ["a long life", "an exception"])
def test_deaths_that_are_not_in_a_row_end_no_run(between: str) -> None:
    """A process that worked for a minute, or reported an exception, starts the count of deaths anew."""
    d = Driver.with_model()
    run(d)
    for _ in range(3):
        for _ in range(4):
            m = member(d, "p")
        if between == "an exception":
            done(d, m, error="Traceback")
        else:
            for _ in range(31):
                d.wait(2.0)
                beat(d, m)
    assert state(d)[0] == "running"


def test_a_member_that_leaves_in_good_order_has_not_died() -> None:
    """However often members that have a place leave in good order, as when they are told to end, their run goes on."""
    d = Driver.with_model()
    run(d)
    for _ in range(10):
        m = member(d, "p")
        d.ask(lambda n, m=m: io.LeavePool(n, m["member"], m["epoch"]))  # type: ignore[misc]
    member(d, "p")
    assert state(d)[0] == "running"


def test_a_member_that_was_forgotten_comes_back_under_a_higher_epoch() -> None:
    """A member forgotten after 256 other dead ones rejoins under a higher epoch, even under a new leader.

    Its old process is fenced.
    """
    d = Driver()
    forgotten = member(d, "old")
    for name in ("old", *(f"p{i}" for i in range(256))):
        m = forgotten if name == "old" else member(d, name)
        d.ask(lambda n, m=m: io.LeavePool(n, m["member"], m["epoch"]))  # type: ignore[misc]
    d.wait(1.0)
    assert "member:old" not in d.hash
    d.restart()
    assert member(d, "old")["epoch"] > forgotten["epoch"]
    with pytest.raises(FencedError):
        beat(d, forgotten)


def test_stop_by_clocks_counts_from_the_beginning_of_the_run() -> None:
    """A stop rule of five clocks ends a run five clocks after it began, and its worker is told to stop."""
    d = Driver.with_model()
    before = d.join("x")
    d.clock(before, 5)
    d.ask(lambda n: io.LeaveWorker(n, "m", "m/x"))
    run(d, stop={"clocks": 5})
    m = member(d, "p")
    w = d.join("run-1/w0", rank=0)
    assert w["clock"] == 5
    assert d.result(d.clock(w, 9))["state"] == "active"
    d.clock(w, 10)
    assert state(d) == ("finished", "the limit of 5 clocks was reached")
    assert d.ask(lambda n: io.WorkerHeartbeat(n, "m", w["worker"], w["epoch"]))["state"] == "stop"
    assert beat(d, m)["state"] == "stop"
    assert done(d, m)["state"] == "finished"
    assert beat(d, m)["state"] == "idle"


def test_clocks_that_pass_before_a_run_has_a_worker_are_not_its_own() -> None:
    """Workers of the model's last run go on until their next heartbeat; the next run, which waits for them, does not
    end by their clocks, and counts from where it begins, also under a new leader."""
    d = Driver.with_model()
    before = d.join("x")
    run(d, stop={"clocks": 5})
    d.clock(before, 7)
    d.wait(1.0)
    assert state(d)[0] == "waiting"
    d.ask(lambda n: io.LeaveWorker(n, "m", "m/x"))
    member(d, "p")
    d.restart()
    w = d.join("run-1/w0", rank=0)
    d.clock(w, 11)
    assert state(d)[0] == "running"
    d.clock(w, 14)  # of clocks that are reported once a second, more may have passed
    assert state(d) == ("finished", "the limit of 5 clocks was reached")


def test_the_rank_of_a_worker_whose_run_is_over_goes_to_the_next_run() -> None:
    """A worker of a new run takes the rank of a worker whose run is over, which is fenced; other ranks are refused."""
    d = Driver.with_model()
    run(d)
    member(d, "p")
    old = d.join("run-1/w0", rank=0)
    with pytest.raises(ConflictError):
        d.join("other", rank=0)
    d.ask(lambda n: io.PatchRun(n, "run-1", state="stopped"))
    run(d)
    new = d.join("run-2/w0", rank=0)
    assert new["rank"] == 0
    with pytest.raises(FencedError):
        d.ask(lambda n: io.WorkerHeartbeat(n, "m", old["worker"], old["epoch"]))
    with pytest.raises(ConflictError):
        d.join("run-1/w0", rank=0)


@pytest.mark.parametrize(("bound", "before"), [({"at_least": 0.9}, 0.89), ({"at_most": 0.9}, 0.91)])
def test_stop_by_metric_and_by_minutes(bound: dict[str, float], before: float) -> None:
    """A run ends when a metric reaches its bound, from below or above, or after its minutes of running."""
    d = Driver.with_model()
    run(d, stop={"metric": {"name": "measured", **bound}})
    member(d, "p")
    for value, want in ((before, "running"), (0.9, "finished")):
        d.ask(lambda n, v=value: io.ReportMetrics(n, "m", {"measured": v}))  # type: ignore[misc]
        assert state(d)[0] == want
    d.ask(lambda n: io.CreateRun(n, "m", ENTRY, stop={"minutes": 0.1}))
    m = d.core.read.pool(d.now)[0]
    d.ask(lambda n: io.PlaceDone(n, "run-1", 0, "p", m["epoch"]))
    for want in ("running", "running", "finished"):
        d.wait(2.5)
        beat(d, m)
        assert d.core.read.run("run-2")["state"] == want


def test_a_run_ends_with_its_model() -> None:
    """Deleting a model stops the run that trains it, and says so."""
    d = Driver.with_model()
    run(d)
    member(d, "p")
    d.ask(lambda n: io.DeleteModel(n, "m"))

    assert state(d)[0] == "stopped"
    assert "deleted" in d.core.read.run("run-1")["reason"]


@pytest.mark.parametrize("stop", [{"name": "loss", "at_least": 1.0}, {"name": "loss", "at_most": 0.0}])
def test_a_value_that_is_not_finite_ends_no_run(stop: dict[str, Any]) -> None:
    """A metric that is not finite meets no stop rule and is not recorded."""
    d = Driver.with_model()
    run(d, stop={"metric": stop})
    member(d, "p")
    for value in (float("inf"), float("-inf"), float("nan")):
        assert d.ask(lambda n, v=value: io.ReportMetrics(n, "m", {"loss": v})) == {"accepted": 0}  # type: ignore[misc]
        assert state(d)[0] == "running"


def test_pause_and_resume() -> None:
    """Workers of a paused run get `paused`, after it is resumed `active`; a stopped run cannot be resumed."""
    d = Driver.with_model()
    run(d)
    member(d, "p")
    w = d.join("run-1/w0")
    for asked, heard in (("paused", "paused"), ("running", "active"), ("stopped", "stop")):
        d.ask(lambda n, s=asked: io.PatchRun(n, "run-1", s))  # type: ignore[misc]
        assert d.ask(lambda n: io.WorkerHeartbeat(n, "m", w["worker"], 1))["state"] == heard
    with pytest.raises(ConflictError):
        d.ask(lambda n: io.PatchRun(n, "run-1", "running"))


def test_fewer_workers_stop_the_last_places() -> None:
    """Reducing a run to one worker stops the member in the last place, which is given out when the run grows again."""
    d = Driver.with_model()
    run(d, workers=2)
    a, b = member(d, "a"), member(d, "b")
    d.ask(lambda n: io.PatchRun(n, "run-1", workers=1))
    assert (beat(d, a)["state"], beat(d, b)["state"]) == ("assigned", "stop")
    done(d, b, 1)
    assert beat(d, b)["state"] == "idle"
    d.ask(lambda n: io.PatchRun(n, "run-1", workers=2))
    assert beat(d, b)["run"]["place"] == 1
    done(d, a, 0)
    assert done(d, b, 1)["state"] == "finished"


def test_a_place_that_was_taken_away_stays_so_under_the_next_leader() -> None:
    """A member whose place was removed and given to another one is told to stop, also by a new leader.

    Its report does not end the other member's place.
    """
    d = Driver.with_model()
    pool = [member(d, f"p{i}") for i in range(3)]
    run(d, workers=2)
    d.ask(lambda n: io.PatchRun(n, "run-1", workers=1))
    d.ask(lambda n: io.PatchRun(n, "run-1", workers=2))
    for _ in range(2):
        assert [beat(d, m)["state"] for m in pool] == ["assigned", "stop", "assigned"]
        d.restart()

    after = done(d, pool[1], 1)

    assert [(p["member"], p["done"]) for p in after["places"]] == [("p0", False), ("p2", False)]
    assert beat(d, pool[1])["state"] == "idle"


def test_wrong_runs_are_refused() -> None:
    """A run with an unknown model, a malformed field or entry, or for a model that already has one is refused."""
    d = Driver()
    with pytest.raises(NotFoundError):
        run(d)
    d.model()
    wrong: list[dict[str, Any]] = [
        {"workers": 0},
        {"stop": {"clock": 1}},
        {"stop": {"metric": {"name": "a"}}},
        {"stop": {"minutes": -1}},
        {"evaluate_every": -1},
        {"args": []},
    ]
    for fields in wrong:
        with pytest.raises(RequestError):
            run(d, **fields)
    for entry in ("x", "x:", "../x:y", "x:y()", ".x:y"):
        with pytest.raises(RequestError):
            d.ask(lambda n, e=entry: io.CreateRun(n, "m", e))  # type: ignore[misc]
    run(d)
    with pytest.raises(ConflictError):
        run(d)
    assert len(d.core.read.runs()) == 1


def test_runs_are_listed_newest_first() -> None:
    """Runs are listed newest first."""
    d = Driver.with_model()
    d.model(name="n")
    first = d.ask(lambda n: io.CreateRun(n, "m", "a.b:c"))["id"]
    second = d.ask(lambda n: io.CreateRun(n, "n", "a.b:c"))["id"]
    assert [r["id"] for r in d.core.read.runs()] == [second, first]


def test_a_run_is_kept_until_its_workers_have_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ended run is kept beyond the limit of runs, also across a restart, until its workers have reported."""
    monkeypatch.setattr(limits, "RUNS_KEPT_MAX", 1)
    d = Driver.with_model()
    run(d)
    m = member(d, "p")
    for id_ in ("run-1", "run-2", "run-3"):
        d.ask(lambda n, i=id_: io.PatchRun(n, i, state="stopped"))  # type: ignore[misc]
        run(d)
    assert [r["id"] for r in d.core.read.runs()] == ["run-4", "run-1"]
    d.restart()
    assert beat(d, m)["state"] == "stop"
    assert done(d, m)["state"] == "stopped"
    assert beat(d, m)["run"]["id"] == "run-4"
    d.ask(lambda n: io.PatchRun(n, "run-4", state="stopped"))
    run(d)
    assert [r["id"] for r in d.core.read.runs()] == ["run-5", "run-4"]


def test_the_states_of_a_runs_workers_go_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that a worker of a run has left is kept as long as the run is; nobody joins under its name any more.

    Those of other workers stay, and so does what is left of a live one.
    """
    monkeypatch.setattr(limits, "RUNS_KEPT_MAX", 1)
    d = Driver.with_model()
    run(d)
    for name in ("run-1/w0", "run-1/w1", "run-10/w0", "a"):
        w = d.join(name)
        d.ask(lambda n, w=w: io.WorkerHeartbeat(n, "m", w["worker"], w["epoch"], state={"of": w["worker"]}))  # type: ignore[misc]
        if name != "run-1/w1":
            d.ask(lambda n, w=w: io.LeaveWorker(n, "m", w["worker"], None))  # type: ignore[misc]
    d.ask(lambda n: io.PatchRun(n, "run-1", state="stopped"))
    run(d)
    for _ in range(2):
        states = {w["worker"]: w["kept"] for w in d.core.read.workers("m", d.now, kept=True)}
        assert states == {
            "run-1/w0": None,
            "run-1/w1": {"of": "run-1/w1"},
            "run-10/w0": {"of": "run-10/w0"},
            "m/a": {"of": "m/a"},
        }
        d.restart()


def test_everything_survives_a_kill_of_the_scheduler() -> None:
    """After a kill of the scheduler, model, owners, worker, data, run, pool member and evaluation are as before."""
    d = Driver.with_model(evaluate_every=2, consistency={"mode": "sync"})
    run(d, stop={"clocks": 100})
    m = member(d, "p")
    w = d.join("run-1/w0")
    d.ask(lambda n: io.RegisterDataset(n, "m", "train", 30, 10, passes=2))
    for i in range(2):
        task = d.result(d.lease(w, "train"))["task"]
        if i == 0:
            d.ask(lambda n, t=task: io.TaskDone(n, "m", w["worker"], 1, t["id"]))  # type: ignore[misc]
    d.clock(w, 1)
    d.beats()
    d.clock(w, 3)
    d.send(lambda n: io.RequestCheckpoint(n, "m", "mine"))
    d.wait(1.5)
    (effect,) = d.work
    assert isinstance(effect, io.WriteCheckpoint)
    d.do(io.CheckpointWritten(effect.model, effect.name, 10, [0] * 4, "/x"))
    d.work.clear()
    before = {name: getattr(d.core.read, name)("m") for name in ("model", "datasets", "checkpoints")} | {
        "run": d.core.read.run("run-1"),
        "pool": d.core.read.pool(d.now),
    }
    d.restart()
    d.beats()
    after = {name: getattr(d.core.read, name)("m") for name in ("model", "datasets", "checkpoints")} | {
        "run": d.core.read.run("run-1"),
        "pool": d.core.read.pool(d.now),
    }
    for documents in (before, after):
        for p in documents["model"]["partitions"]:
            del p["version"]
        del documents["run"]["ran_s"]
        documents["pool"][0]["heartbeat_age_s"] = 0
    assert [c["name"] for c in before["checkpoints"]] == ["mine"]
    assert after == before
    assert beat(d, m)["state"] == "assigned"
    assert d.ask(lambda n: io.WorkerHeartbeat(n, "m", w["worker"], 1, 3))["evaluate"]
    assert d.result(d.clock(w, 4))["released"]
    assert [c["t"] for c in d.commits()] == [0, 1, 2, 3]
    d.wait(4.5)
    assert d.core.read.workers("m", d.now)[0]["alive"]


def test_a_state_of_a_newer_version_is_refused_by_name() -> None:
    """A stored field of unknown name or format, or with missing values, raises CorruptState."""
    d = Driver.with_model()
    for name, text in (("shard:s0", '{"format": 2}'), ("future:x", "{}"), ("model:m", '{"format": 1}')):
        kept = dict(d.hash)
        d.hash[name] = text
        with pytest.raises(CorruptState):
            d.restart()
        d.hash = kept


def test_runs_are_in_the_order_in_which_they_were_created() -> None:
    """Another leader lists them, and forgets the oldest, in that order, even if a clock was put back between them."""
    d = Driver.with_model()
    for i in range(11):
        d.do(io.ClockStepped(EPOCH_S - 3600 * i))
        run(d)
        d.ask(lambda n, i=i: io.PatchRun(n, f"run-{i + 1}", "stopped"))  # type: ignore[misc]
    before = d.core.read.runs()
    d.restart()
    assert [r["id"] for r in d.core.read.runs()] == [r["id"] for r in before]
