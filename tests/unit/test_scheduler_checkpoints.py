"""Checkpoints in the scheduler's core: when they are written, which are kept, and what a restore does."""

import math
from typing import Any

import pytest
from tests.refusals import refused_with

from paramserver import limits
from paramserver.core.scheduler import io
from paramserver.core.scheduler.checkpoints import Checkpoints
from paramserver.core.spec import CheckpointSpec
from paramserver.errors import PsError, RequestError, problem
from paramserver.types import ModelKey

from .scheduling import SPEC, Driver, beyond_its_cut, code

SYNC = {"consistency": {"mode": "sync"}}


def finish(d: Driver) -> io.WriteCheckpoint:
    """Complete the checkpoint that is being written; return its effect."""
    effect = next(w for w in d.work if isinstance(w, io.WriteCheckpoint))
    d.work.remove(effect)
    d.do(io.CheckpointWritten(effect.model, effect.name, 10, [0, 0, 0, 0], "/x"))
    return effect


def test_checkpoints_in_sync_are_of_one_clock() -> None:
    """In sync, a checkpoint is of the next cut or, if the model is idle, of the present clock while commits wait."""
    d = Driver.with_model(**SYNC)
    a = d.join("a")
    d.clock(a, 1)
    d.beats()
    d.clock(a, 2)
    asked = d.send(lambda n: io.RequestCheckpoint(n, "m", "mine"))
    d.clock(a, 3)
    assert not d.work
    d.clock(a, 4)
    d.beats()
    assert finish(d).cut == 3
    assert d.result(asked)["clock"] == 3
    d.send(lambda n: io.RequestCheckpoint(n, "m"))
    d.wait(1.5)
    parked = d.clock(a, 5)
    assert parked in d.open
    effect = finish(d)
    assert (effect.cut, effect.document["clock"]) == (None, 4)
    assert d.result(parked)["released"]


def reading_current() -> tuple[Driver, Any, int, io.WriteCheckpoint]:
    """Begin a checkpoint of an idle model at clock 2, beyond its cut; return driver, worker, request and effect."""
    d, a = beyond_its_cut()
    asked = d.send(lambda n: io.RequestCheckpoint(n, "m", "mine"))
    d.wait(1.5)
    effect = d.work.pop()
    assert isinstance(effect, io.WriteCheckpoint)
    assert effect.cut is None
    return d, a, asked, effect


def test_cuts_moves_and_commits_go_on_once_a_checkpoint_is_read() -> None:
    """Once all partitions are read, nothing waits for the files: not a commit, a cut, a move or a restore.

    Nor does a death void what was read.
    """
    d, a, asked, effect = reading_current()
    parked = d.clock(a, 3)
    d.shard("s2")
    assert parked in d.open
    d.do(io.CheckpointRead(effect.model, "another"))
    assert parked in d.open

    d.do(io.CheckpointRead(effect.model, effect.name))
    assert d.result(parked)["released"]
    d.wait(limits.SNAPSHOT_INTERVAL_S * 2)
    assert d.core.read.model("m")["cut"] > 2
    assert "s2" in d.owners()
    assert d.ask(lambda n: io.StartRestore(n, "m"))["name"] == "m"
    d.ask(lambda n: io.LeaveShard(n, "s1", d.shards.pop("s1")))
    d.do(io.CheckpointWritten(effect.model, effect.name, 10, [2] * 4))
    assert d.result(asked)["clock"] == 2


def test_a_checkpoint_by_rule_leaves_as_much_time_as_the_last_one_took() -> None:
    """If each takes as long as the rule gives it, there is time between them nevertheless, in which partitions move."""
    d = Driver.with_model(checkpoint={"every_clocks": 1})
    a = d.join("a")
    d.clock(a, 1)
    d.wait(3)
    d.clock(a, 2)
    finish(d)
    d.ask(lambda n: io.SetShardState(n, "s1", "draining"))
    d.wait(2.5)
    assert not d.work
    assert "s1" not in d.owners()
    asked = d.send(lambda n: io.RequestCheckpoint(n, "m"))
    finish(d)
    assert d.result(asked)["clock"] == 2
    d.clock(a, 3)
    d.wait(0.5)
    assert finish(d).document["clock"] == 3


def test_what_was_read_of_a_model_that_went_back_meanwhile_is_no_checkpoint() -> None:
    """If a model rolls back while a checkpoint reads its current state, the checkpoint fails with `conflict`.

    The model may have reached the same clock again with other values.  Training and later checkpoints go on.
    """
    d, a, asked, effect = reading_current()
    d.ask(lambda n: io.LeaveShard(n, "s1", d.shards.pop("s1")))
    d.beats()
    assert d.result(d.clock_of(a | {"timeline": 1}, 2))["released"]
    d.do(io.CheckpointWritten(effect.model, effect.name, 10, [2] * 4, creation="1-2.0"))
    assert code(d, asked) == "conflict"
    assert d.work == [io.RemoveCheckpoint("m", "mine", "1-2.0")]
    assert not d.core.read.checkpoints("m")

    d.work.clear()
    again = d.send(lambda n: io.RequestCheckpoint(n, "m", "mine"))
    d.wait(1.5)
    finish(d)
    assert d.result(again)["clock"] == 2


def test_what_was_read_of_a_model_that_left_sync_meanwhile_is_no_checkpoint() -> None:
    """If sync ends while a checkpoint reads the current state, the checkpoint fails with `conflict`.

    Partitions read afterwards have pushes that those read before lack, although their clocks are the same.
    """
    d, _, asked, effect = reading_current()
    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"mode": "async"}}))
    d.do(io.CheckpointWritten(effect.model, effect.name, 10, [2, 3, 3, 3], creation="1-2.0"))
    assert code(d, asked) == "conflict"
    assert d.work == [io.RemoveCheckpoint("m", "mine", "1-2.0")]


def test_a_name_in_use_is_refused_with_what_uses_it() -> None:
    """A checkpoint under a name that another one has, or that is being written, is refused, and says which."""
    d, _, asked, effect = reading_current()
    with refused_with("conflict", match="'mine' is being written"):
        d.ask(lambda n: io.RequestCheckpoint(n, "m", "mine"))
    d.do(io.CheckpointWritten(effect.model, effect.name, 10, [2] * 4))
    assert d.result(asked)["name"] == "mine"
    with refused_with("conflict", match="'mine' exists"):
        d.ask(lambda n: io.RequestCheckpoint(n, "m", "mine"))


def test_nothing_is_restored_into_a_model_that_is_being_read() -> None:
    """A restore is refused while a checkpoint reads the current state, and accepted once it is written.

    A restore keeps the clock, so the clock could not tell which partitions were read before it and which after.
    """
    d, _, asked, effect = reading_current()
    with refused_with("conflict", match="mine"):
        d.ask(lambda n: io.StartRestore(n, "m"))
    d.do(io.CheckpointWritten(effect.model, effect.name, 10, [2] * 4))
    assert d.result(asked)["clock"] == 2
    assert d.ask(lambda n: io.StartRestore(n, "m"))["name"] == "m"


@pytest.mark.parametrize("model", ["m", "copy"])
def test_an_optimizer_with_other_state_is_not_set_while_a_model_is_restored(model: str) -> None:
    """A restore brings the state of the optimizer that the model had when it began, whose arrays another would take."""
    d = Driver.with_model(optimizer={"name": "momentum"})
    if model == "m":
        d.ask(lambda n: io.StartRestore(n, "m"))
    else:
        d.send(lambda n: io.CreateModel(n, {**d.document()["spec"], "name": model}, "", restore=True))
        d.beats()
    with refused_with("conflict", match="being restored"):
        d.ask(lambda n: io.PatchModel(n, model, {"optimizer": {"name": "adagrad"}}))
    d.ask(lambda n: io.PatchModel(n, model, {"optimizer": {"lr": 0.5}}))
    d.ask(lambda n: io.RestoreFinished(n, d.core.read.key(model)))

    body = d.ask(lambda n: io.PatchModel(n, model, {"optimizer": {"name": "adagrad"}}))
    assert (body["spec"]["optimizer"]["name"], body["spec"]["optimizer"]["lr"]) == ("adagrad", 0.5)


def test_who_looks_at_a_model_changes_nothing_of_it() -> None:
    """Reading what workers wait for while no commit may be made fixes no roster: who joins next is waited for."""
    d, a, _, effect = reading_current()
    d.ask(lambda n: io.LeaveWorker(n, "m", a["worker"]))
    parked = d.clock(d.join("b"), 3)
    assert d.core.read.waiting_for("m") == ["the commit"]
    d.join("c")
    d.do(io.CheckpointWritten(effect.model, effect.name, 10, [2] * 4))
    assert parked in d.open
    assert d.core.read.waiting_for("m") == ["m/c"]


def test_who_joins_a_restored_model_begins_with_the_state_that_the_checkpoint_has() -> None:
    """A worker, known or not, that joins after a restore gets its state from the checkpoint, also by a new leader."""
    d = Driver.with_model()
    a = d.join("a")
    d.ask(lambda n: io.WorkerHeartbeat(n, "m", "m/a", 1, state={"at": 9}))
    d.ask(lambda n: io.StartRestore(n, "m"))
    states = {"m/a": {"at": 3}, "m/b": {"at": 4}, "run-1/w0": [5]}
    d.ask(lambda n: io.ModelRestored(n, "m", 1, workers=states))
    d.ask(lambda n: io.RestoreFinished(n, ModelKey("m", 1)))
    d.restart()
    assert d.result(d.clock(a, 1))["released"]
    joined = [d.join(w) for w in ("a", "b", "run-1/w0", "c")]

    assert [w["state"] for w in joined] == [{"at": 3}, {"at": 4}, [5], None]
    assert [w["epoch"] for w in joined] == [2, 1, 1, 1]


def test_a_worker_that_a_restore_has_brought_and_that_has_not_joined_is_not_dead() -> None:
    """Until it joins, a restored worker is in no status and unknown to shards, but stored states list it."""
    d = Driver.with_model()
    d.join("a")
    d.ask(lambda n: io.ModelRestored(n, "m", 1, None, 0, {"m/b": {"at": 4}}))
    for _ in range(2):
        assert [w["worker"] for w in d.core.read.workers("m", d.now)] == ["m/a"]
        with pytest.raises(PsError, match="has not joined"):
            d.core.read.worker("m", "m/b", d.now)
        listed = d.core.read.workers("m", d.now, kept=True)[-1]
        assert (listed["worker"], listed["state"], listed["kept"]) == ("m/b", "restored", {"at": 4})
        d.restart()
    assert d.join("b")["epoch"] == 1
    assert d.core.read.worker("m", "m/b", d.now)["state"] == "active"


def test_a_restored_worker_gets_no_epoch_that_a_forgotten_one_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch of a worker that joins after a restore is higher than those of all workers that were forgotten."""
    monkeypatch.setattr(limits, "WORKERS_PER_MODEL_MAX", 2)
    d = Driver.with_model()
    for name in ("b", "b", "b", "a", "c"):  # the last two of them leave no room for b
        d.join(name)
        d.ask(lambda n, w=name: io.LeaveWorker(n, "m", f"m/{w}"))  # type: ignore[misc]
    monkeypatch.setattr(limits, "WORKERS_PER_MODEL_MAX", 3)
    d.ask(lambda n: io.ModelRestored(n, "m", 1, None, 0, {"m/b": 1}))
    assert d.join("b")["epoch"] == 4


@pytest.mark.parametrize(
    "workers",
    [
        {"../x": 1},
        {"m/" + "x" * 200: 1},
        {"m/a": {"x": 1 << 70}},
        {"m/a": [0, "x" * (1 << 21)]},
        {"m/a": [[1]] * 30_000},
    ],
)
def test_a_state_that_no_worker_could_have_told_is_not_taken_from_a_client(workers: dict[str, Any]) -> None:
    """Restored states are refused, and none is kept, if one has a name or value that no worker could have sent."""
    d = Driver.with_model()
    with refused_with("invalid_field"):
        d.ask(lambda n: io.ModelRestored(n, "m", 1, None, 0, {"m/b": 1} | workers))
    assert not d.core.read.workers("m", d.now)


def test_more_states_than_a_model_may_have_workers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored states beyond the limit of workers are dropped; no known worker is forgotten to make room for one."""
    monkeypatch.setattr(limits, "WORKERS_PER_MODEL_MAX", 2)
    d = Driver.with_model()
    d.join("a")
    d.ask(lambda n: io.ModelRestored(n, "m", 1, None, 0, {"m/b": 1, "m/c": 2, "m/a": 3}))
    assert {w["worker"]: w["kept"] for w in d.core.read.workers("m", d.now, kept=True)} == {"m/a": 3, "m/b": 1}


def test_restored_states_are_bounded_as_those_that_workers_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored states that do not fit with all others are refused; those that they take the place of do not count."""
    monkeypatch.setattr(limits, "WORKER_STATES_MAX", 100_000)
    d = Driver.with_model()
    d.ask(lambda n: io.ModelRestored(n, "m", 1, workers={"m/a": "x" * 60_000}))
    with refused_with("too_large", RequestError):
        d.ask(lambda n: io.ModelRestored(n, "m", 1, workers={"m/b": "x" * 60_000}))
    d.ask(lambda n: io.ModelRestored(n, "m", 1, workers={"m/a": "x" * 90_000}))
    assert [(w["worker"], len(w["kept"])) for w in d.core.read.workers("m", d.now, kept=True)] == [("m/a", 90_000)]


def test_a_model_that_has_lost_updates_has_changed() -> None:
    """A model whose version is below that of its last checkpoint gets another one by time, as it is not the same."""
    points, rule = Checkpoints(last_version=7), CheckpointSpec(every_minutes=1.0)
    assert [points.due(rule, 0, 0, lambda v=v: v, 60.0) for v in (6, 7, 8)] == [True, False, True]  # type: ignore[misc]


def test_a_model_that_rests_gets_no_checkpoint_from_each_new_leader() -> None:
    """A new leader knows of which version the newest checkpoint is: copies of it would take the place of older ones."""
    d = Driver.with_model(**SYNC, checkpoint={"every_minutes": 1.0})
    d.clock(d.join("a"), 3)
    d.wait(61.0)
    (asked,) = [w for w in d.work if isinstance(w, io.WriteCheckpoint)]
    d.do(io.CheckpointWritten(asked.model, asked.name, 10, [3, 3, 3, 3], "/x"))
    d.restart()
    d.wait(61.0)
    assert [w for w in d.work if isinstance(w, io.WriteCheckpoint)] == [asked]


def test_the_last_and_the_best_checkpoints_stay() -> None:
    """The newest `keep` checkpoints, the best by metric and all named by users are kept."""
    d = Driver.with_model(checkpoint={"every_clocks": 10, "keep": 2})
    a = d.join("a")
    d.send(lambda n: io.RequestCheckpoint(n, "m", "mine"))
    finish(d)
    for i, accuracy in enumerate((0.5, 0.9, 0.6, 0.7, 0.8)):
        d.ask(lambda n, v=accuracy: io.ReportMetrics(n, "m", {"accuracy": v}))  # type: ignore[misc]
        d.clock(a, 10 * (i + 1))
        finish(d)
    names = [c["name"] for c in d.core.read.checkpoints("m")]
    assert [n.split("-")[-1] for n in names] == ["mine", "20", "40", "50"]
    assert len([w for w in d.work if isinstance(w, io.RemoveCheckpoint)]) == 2


def test_the_best_stays_the_best_until_a_better_value_is_reported() -> None:
    """Later checkpoints without a newer value of the metric, or with one that is not finite, never become the best."""
    d = Driver.with_model(checkpoint={"every_clocks": 10, "keep": 1})
    a = d.join("a")
    best = []
    for clock, accuracy in ((10, 0.9), (20, None), (30, math.nan), (40, 0.8), (50, 0.95)):
        if accuracy is not None:
            d.ask(lambda n, v=accuracy: io.ReportMetrics(n, "m", {"accuracy": v}))  # type: ignore[misc]
        d.clock(a, clock)
        finish(d)
        best.append(d.core.read.checkpoint("m", "best")["clock"])
    assert best == [10, 10, 10, 10, 50]


def test_a_checkpoint_has_no_metric_whose_newest_value_is_not_finite() -> None:
    """A model that has diverged is not saved with the last good value of its metric."""
    d = Driver.with_model(checkpoint={"every_clocks": 10})
    a = d.join("a")
    for clock, accuracy in ((5, 0.9), (10, math.nan)):
        d.ask(lambda n, v=accuracy: io.ReportMetrics(n, "m", {"accuracy": v}))  # type: ignore[misc]
        d.clock(a, clock)
    assert finish(d).document["metric"] is None


@pytest.mark.parametrize("back", ["by the scheduler", "by a client", "to a cut"])
def test_a_checkpoint_has_no_metric_from_before_the_model_went_back(back: str) -> None:
    """What was measured before a restore in place or a rollback is not of the values that are saved after it."""
    d, _ = beyond_its_cut()
    d.ask(lambda n: io.ReportMetrics(n, "m", {"accuracy": 0.9}))
    if back == "by the scheduler":
        d.ask(lambda n: io.StartRestore(n, "m"))
        d.ask(lambda n: io.RestoreFinished(n, ModelKey("m", 1)))
    elif back == "by a client":
        d.ask(lambda n: io.ModelRestored(n, "m", 1, timeline=0, given=d.given()))
    else:
        d.shard("s1")
    d.beats()

    for accuracy in (None, 0.5):
        if accuracy is not None:
            d.ask(lambda n, v=accuracy: io.ReportMetrics(n, "m", {"accuracy": v}))  # type: ignore[misc]
        d.send(lambda n: io.RequestCheckpoint(n, "m"))
        d.wait(1.5)
        found = finish(d).document["metric"]
        assert (found and found["value"]) == accuracy


def test_why_the_last_checkpoint_is_missing_is_told_until_one_is_written() -> None:
    """A failed checkpoint, which nobody may have asked for, is a complaint about its model until one is written."""
    d = Driver.with_model(checkpoint={"every_clocks": 10})
    a = d.join("a")
    told = []
    for clock in (10, 20, 30):
        d.clock(a, clock)
        if clock == 20:
            finish(d)
        else:
            effect = d.work.pop()
            assert isinstance(effect, io.WriteCheckpoint)
            full = problem("disk_refuses", "No space left on device", hint="make room")
            d.do(io.CheckpointFailed(effect.model, effect.name, full))
        told.append(d.core.read.model_status("m", d.now)["checkpoint_error"])  # type: ignore[index]

    assert told[0] == told[2] != told[1] == ""
    assert "No space left on device" in told[0]
    assert "make room" in told[0]


@pytest.mark.parametrize("asked", [None, "final"])
def test_a_checkpoint_that_failed_is_tried_again_though_training_is_over(asked: str | None) -> None:
    """A model that does not change any more is saved by the rule once it can be, not more often than the rule says.

    Also if the one that failed was asked for by a name that is in use on the disk.
    """
    d = Driver.with_model(checkpoint={"every_minutes": 1.0})
    d.clock(d.join("a"), 3)
    if asked is None:
        d.wait(61.0)
    else:
        d.send(lambda n: io.RequestCheckpoint(n, "m", asked))
    (first,) = [w for w in d.work if isinstance(w, io.WriteCheckpoint)]
    d.work.clear()
    error = problem("conflict", "exists") if asked else problem("disk_refuses", "No space left on device")
    d.do(io.CheckpointFailed(first.model, first.name, error, taken=asked is not None))

    d.wait(58.0)
    assert not d.work
    d.wait(3.0)
    assert finish(d).name != first.name
    d.wait(61.0)
    assert not d.work


def test_a_checkpoint_by_rule_has_the_result_of_the_evaluation_of_its_clock() -> None:
    """A checkpoint that is due with an evaluation is written after it, with its result; no user's request waits."""
    d = Driver.with_model(evaluate_every=10, checkpoint={"every_clocks": 10})
    a = d.join("a")
    for clock, accuracy in ((10, 0.9), (20, 0.5)):
        d.clock(a, clock)
        task = d.result(d.lease(a, "evaluate"))["task"]
        d.wait(4.0)
        assert not d.work
        d.ask(lambda n, t=task, v=accuracy: io.TaskDone(n, "m", a["worker"], 1, t["id"], {"accuracy": v}))  # type: ignore[misc]
        finish(d)
    assert [c["metric"]["value"] for c in d.core.read.checkpoints("m")] == [0.9, 0.5]
    d.clock(a, 31)
    d.send(lambda n: io.RequestCheckpoint(n, "m", "mine"))
    assert [finish(d).name, finish(d).name] == ["000003-clock-31", "mine"]


def test_checkpoints_by_rule_are_written_one_after_the_other() -> None:
    """The leader has the whole state of a model in memory while it writes it, and after its start all are due at once.

    The one that has waited for longest comes next; one that somebody asks for waits for none.
    """

    def clock(name: str, clock: int) -> None:
        d.send(lambda n: io.ReportClock(n, name, f"{name}/a", 1, clock))

    d = Driver("s0")
    for name in "abc":
        spec = SPEC | {"name": name, "checkpoint": {"every_clocks": 10}}
        d.send(lambda n, s=spec: io.CreateModel(n, s, "x"))  # type: ignore[misc]
        d.beats()
        d.ask(lambda n, m=name: io.JoinWorker(n, m, "a"))  # type: ignore[misc]
    for name in "cab":
        clock(name, 10)
        d.wait(0.5)

    written: list[tuple[str, int]] = []
    while len(written) < 4:
        if len(written) == 3:
            d.wait(2)  # longer than c's last one took
        assert len(d.work) == 1
        effect = finish(d)
        written.append((effect.model.name, effect.document["clock"]))
        if written == [("c", 10)]:
            clock("c", 20)

    assert written == [("c", 10), ("a", 10), ("b", 10), ("c", 20)]
    d.wait(2)
    clock("c", 30)
    d.send(lambda n: io.RequestCheckpoint(n, "a"))
    assert len(d.work) == 2


@pytest.mark.parametrize(("taken", "wait_s"), [(False, 3.0), (True, 60.0)])
def test_an_evaluation_that_does_not_end_keeps_no_checkpoint_from_being_written(taken: bool, wait_s: float) -> None:
    """A checkpoint by rule waits a few seconds for an evaluation to be taken, and a minute for its result."""
    d = Driver.with_model(evaluate_every=10, checkpoint={"every_clocks": 10})
    a = d.join("a")
    d.clock(a, 10)
    if taken:
        assert d.result(d.lease(a, "evaluate"))["task"]
    for _ in range(int(wait_s) - 1):
        d.wait(1.0)
        d.ask(lambda n: io.WorkerHeartbeat(n, "m", a["worker"], 1))
    assert not d.work
    d.wait(1.0)
    assert finish(d).document["metric"] is None


def test_a_restore_under_a_new_name_is_ready_when_it_is_finished() -> None:
    """A model created by a restore is `initializing` until that finishes, then `ready`, or removed if it fails."""
    d = Driver("s0")
    for error in (None, PsError("corrupt_state", "torn")):
        number = d.send(lambda n: io.CreateModel(n, SPEC | SYNC, "", restore=True))
        d.beats()
        made = d.result(number)
        assert made["state"] == "initializing"
        key = ModelKey("m", made["generation"])
        done = d.send(lambda n, e=error, k=key: io.RestoreFinished(n, k, e))  # type: ignore[misc]
        if error is None:
            assert d.result(done)["state"] == "ready"
            assert d.commits()[-1]["cut"]
            d.ask(lambda n: io.DeleteModel(n, "m"))
        else:
            assert code(d, done) == "corrupt_state"
            assert not d.core.read.models()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_model_that_a_client_restores_is_ready_when_the_client_says_so(mode: str) -> None:
    """Until then it is `initializing`, also for a new leader, and only the request that made it may be repeated.

    If all its values were lost meanwhile, the client is told and the model stays as it is.
    """

    def create(nonce: str) -> int:
        number = d.send(lambda n: io.CreateModel(n, SPEC | {"consistency": {"mode": mode}}, nonce, restore=True))
        d.beats()
        return number

    def end(timeline: int) -> int:
        return d.send(lambda n: io.ModelRestored(n, "m", made["generation"], timeline, 12, given=d.given()))

    d = Driver("s0")
    made = d.result(create("mine"))
    d.restart()
    assert d.result(create("mine"))["generation"] == made["generation"]
    assert code(d, create("")) == code(d, create("another's")) == "model_exists"
    assert code(d, end(made["timeline"] + 1)) == "conflict"
    assert d.core.read.model("m")["state"] == "initializing"
    done = d.result(end(made["timeline"]))
    assert (done["state"], done["clock"]) == ("ready", 0 if mode == "async" else 12)
    assert d.result(end(made["timeline"]))["timeline"] == done["timeline"]
    assert code(d, d.send(lambda n: io.DeleteModel(n, "m", "mine"))) == "upload_in_progress"


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_restore_that_fails_in_a_model_that_a_client_is_creating_leaves_it_to_the_client(mode: str) -> None:
    """The client, which was restoring a folder of its own into the model that it made, ends that as if alone."""
    d = Driver("s0")
    spec = SPEC | {"consistency": {"mode": mode}}
    number = d.send(lambda n: io.CreateModel(n, spec, "mine", restore=True))
    d.beats()
    made = d.result(number)
    d.ask(lambda n: io.StartRestore(n, "m"))
    failed = d.send(lambda n: io.RestoreFinished(n, ModelKey("m", 1), PsError("corrupt_state", "torn")))
    assert code(d, failed) == "corrupt_state"

    assert d.core.read.model("m")["state"] == "initializing"
    done = d.ask(lambda n: io.ModelRestored(n, "m", made["generation"], made["timeline"], 12, given=d.given()))
    assert (done["state"], done["clock"]) == ("ready", 0 if mode == "async" else 12)


@pytest.mark.parametrize("ack", ["applied", "journaled"])
def test_a_new_leader_begins_a_timeline_where_a_restore_was_under_way(ack: str) -> None:
    """Nobody ends a restore whose leader has died: at `applied` it is undone, else sync goes on from what is set."""
    d = Driver.with_model(**SYNC, ack=ack)
    a = d.join("a")
    d.ask(lambda n: io.StartRestore(n, "m"))
    d.restart()
    d.beats()
    assert code(d, d.clock_of(a, 1)) == "rolled_back"
    assert (d.core.read.model("m")["state"], d.core.read.model("m")["timeline"]) == ("ready", 1)
    if ack == "applied":
        assert (d.document()["source"], d.core.read.model("m")["clock"]) == ({"cut": 0}, 0)
    else:
        assert (d.document()["source"], d.commits()[-1]["cut"]) == ("init", True)


def test_a_model_that_a_leader_was_restoring_when_it_died_is_removed() -> None:
    """Nobody would set its values, and its name would be in use: the restore can be asked for again.

    One that a client restores, and one that had values and lost them, stay.
    """
    d = Driver("s0")
    for name, nonce in (("m", ""), ("clients", "mine"), ("lost", "")):
        made = d.send(lambda n, m=name, k=nonce: io.CreateModel(n, SPEC | SYNC | {"name": m}, k, restore=True))  # type: ignore[misc]
        d.beats()
        key = ModelKey(name, d.result(made)["generation"])
    d.ask(lambda n: io.RestoreFinished(n, key, None))
    d.shard("s0")  # it was restarted, and finds nothing stored
    place = d.core.read.model("lost")["partitions"]
    d.beat("s0", lost=[["lost", key.generation, p["index"], p["incarnation"], False] for p in place])
    d.beats()
    assert d.core.read.model("lost")["state"] == "initializing"

    d.restart()
    d.beats()

    assert [m["name"] for m in d.core.read.models()] == ["clients", "lost"]
    again = d.send(lambda n: io.CreateModel(n, SPEC | SYNC, "", restore=True))
    d.beats()
    assert d.result(again)["state"] == "initializing"


@pytest.mark.parametrize("name", ["latest", "best"])
def test_no_checkpoint_is_called_as_the_newest_or_the_best_is(name: str) -> None:
    """`latest` and `best`, which stand for other checkpoints, are refused as names."""
    d = Driver.with_model()
    with refused_with("invalid_field", match="stands for the"):
        d.ask(lambda n: io.RequestCheckpoint(n, "m", name))
