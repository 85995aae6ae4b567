"""Task leases of live workers, evaluations, and the registration of datasets."""

import json
from typing import Any

import pytest
from tests.refusals import refused_with

from paramserver import limits
from paramserver.core.scheduler import io, task_desk
from paramserver.core.scheduler.task_desk import EVALUATIONS_MAX
from paramserver.errors import ConflictError, NotFoundError
from paramserver.types import ModelKey

from .scheduling import Driver, beyond_its_cut

KINDS = ("dataset", "tasks")
"""Kinds of documents stored of a dataset."""


def lease(d: Driver, worker: Any, holding: list[str] | None, dataset: str = "train") -> Any:
    """Return the task leased to the worker, which lists the tasks it still holds in `holding`."""
    e = worker["epoch"]
    return d.ask(lambda n: io.LeaseTask(n, "m", worker["worker"], e, dataset, holding=holding))["task"]


@pytest.fixture
def two() -> tuple[Driver, Any, Any]:
    """A model with a dataset of two ranges, and two workers, the first of which has leased range 0."""
    d = Driver.with_model()
    a, b = d.join("a"), d.join("b")
    d.ask(lambda n: io.RegisterDataset(n, "m", "train", 20, 10))
    assert lease(d, a, [])["start"] == 0
    return d, a, b


def test_a_name_that_is_not_there_hints_at_the_nearest(two: tuple[Driver, Any, Any]) -> None:
    """A request for a dataset or model that does not exist names the one that was most likely meant."""
    d, a, _ = two
    with pytest.raises(NotFoundError, match="did you mean 'train'"):
        lease(d, a, [], "trian")
    with pytest.raises(NotFoundError, match="register it first"):
        lease(d, a, [], "other")
    with pytest.raises(NotFoundError, match="did you mean 'm'"):
        d.ask(lambda n: io.RegisterDataset(n, "mm", "train", 20, 10))
    with pytest.raises(NotFoundError, match="create it"):
        d.ask(lambda n: io.RegisterDataset(n, "other", "train", 20, 10))


def test_a_range_that_its_worker_does_not_hold_any_more_is_free_with_its_next_lease(
    two: tuple[Driver, Any, Any],
) -> None:
    """A lease request frees the ranges of its worker that it does not list in `holding`, and no other worker's."""
    d, a, b = two
    assert lease(d, b, [])["start"] == 10

    again = lease(d, a, [])

    assert again["start"] == 0
    assert lease(d, b, ["train:0:1"]) is None


def test_a_range_that_is_given_back_goes_to_who_waits(two: tuple[Driver, Any, Any]) -> None:
    """A range freed by a lease request goes to a request that was already waiting, not back to its worker."""
    d, a, b = two
    lease(d, b, [])
    waiting = d.send(lambda n: io.LeaseTask(n, "m", b["worker"], 1, "train", 30.0, ["train:0:1"]))

    assert lease(d, a, []) is None
    assert d.result(waiting)["task"]["start"] == 0


def test_what_a_worker_says_it_holds_stays_its_own(two: tuple[Driver, Any, Any]) -> None:
    """A range listed in `holding` stays leased to its worker, so that two loops of one worker get one range each."""
    d, a, _ = two

    assert lease(d, a, ["train:0:0"])["start"] == 10
    assert lease(d, a, ["train:0:0", "train:0:1"]) is None


def test_a_client_that_does_not_say_what_it_holds_keeps_all(two: tuple[Driver, Any, Any]) -> None:
    """A lease request without `holding` frees nothing, so that a plain client can work on several ranges."""
    d, a, _ = two

    assert lease(d, a, None)["start"] == 10
    assert lease(d, a, None) is None


def test_an_evaluation_that_failed_is_made_again() -> None:
    """An evaluation that its worker no longer lists in `holding` is leased again, even to the same worker."""
    d = Driver.with_model()
    a = d.join("a")
    d.ask(lambda n: io.RequestEvaluation(n, "m"))
    first = lease(d, a, [], "evaluate")

    assert lease(d, a, [first["id"]], "evaluate") is None
    assert lease(d, a, [], "evaluate") == first


def test_an_evaluation_whose_worker_died_is_made_by_another() -> None:
    """An evaluation that a worker had leased when it left is leased to another one."""
    d = Driver.with_model()
    a, b = d.join("a"), d.join("b")
    d.ask(lambda n: io.RequestEvaluation(n, "m"))
    first = lease(d, a, [], "evaluate")
    assert lease(d, b, [], "evaluate") is None

    d.ask(lambda n: io.LeaveWorker(n, "m", a["worker"]))

    assert lease(d, b, [], "evaluate") == first


def test_an_evaluation_of_what_was_rolled_back_is_not_taken_for_one_of_the_new_timeline() -> None:
    """At the same clock of the next timeline an evaluation has another id, and only the `done` of that one counts.

    It counts from a worker that has given it up, too, and only once if it is repeated.
    """
    d, a = beyond_its_cut()
    d.ask(lambda n: io.RequestEvaluation(n, "m"))
    before = lease(d, a, [], "evaluate")
    d.shard("s1")
    d.beats()
    assert d.core.read.model("m")["timeline"] == 1
    d.clock_of(a | {"timeline": 1}, 2)
    asked = d.ask(lambda n: io.RequestEvaluation(n, "m"))
    assert asked["clock"] == before["clock"] == 2

    def report(task: str) -> int:
        assert d.ask(lambda n: io.TaskDone(n, "m", a["worker"], a["epoch"], task, {"accuracy": 0.9}))["done"]
        return len(d.core._c.models["m"].series.points.get("accuracy", ()))

    assert report(before["id"]) == 0
    assert lease(d, a, [], "evaluate")["id"] == asked["id"] != before["id"]
    assert report(before["id"]) == 0
    d.restart()
    assert lease(d, a, None, "evaluate") is None
    d.ask(lambda n: io.LeaveWorker(n, "m", a["worker"]))
    a = d.join("a")
    assert [report(asked["id"]) for _ in range(2)] == [1, 1]
    assert lease(d, a, [], "evaluate") is None


def test_who_gets_data_again_goes_on_where_the_others_are() -> None:
    """A worker without data holds nobody back; with data again, it begins at the slowest one's clock, and counts."""
    d = Driver.with_model(consistency={"mode": "ssp", "staleness": 1})
    a, b = d.join("a"), d.join("b")
    d.ask(lambda n: io.RegisterDataset(n, "m", "train", 10, 10))
    lease(d, a, [])
    assert lease(d, b, []) is None
    assert d.result(d.clock(a, 50))["released"]

    d.ask(lambda n: io.RegisterDataset(n, "m", "more", 10, 10))
    assert lease(d, b, [], "more")["start"] == 0

    assert d.core.read.worker("m", b["worker"], d.now)["clock"] == 50
    assert d.result(d.clock(a, 51))["released"]
    assert d.clock(a, 52) in d.open


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_an_evaluation_wakes_no_worker_that_has_no_data(mode: str) -> None:
    """A worker that rests and makes an evaluation goes on resting, so the others do not wait for it.

    With the evaluation it is told the others' clock, which its heartbeats say from then on, and that it skipped some.
    """
    d = Driver.with_model(consistency={"mode": mode})
    a, b = d.join("a"), d.join("b")
    d.ask(lambda n: io.RegisterDataset(n, "m", "train", 10, 10))
    lease(d, a, [])
    assert lease(d, b, []) is None
    assert d.result(d.clock(a, 3))["released"]
    d.ask(lambda n: io.RequestEvaluation(n, "m"))
    answer = d.result(d.lease(b, "evaluate"))
    at = answer["clock"]
    d.ask(lambda n: io.WorkerHeartbeat(n, "m", b["worker"], b["epoch"], clock=at, since=at, timeline=0))
    d.ask(lambda n: io.TaskDone(n, "m", b["worker"], b["epoch"], answer["task"]["id"], {"accuracy": 0.9}))

    for clock in (4, 5, 6):
        assert d.result(d.clock(a, clock))["released"]
    d.send(lambda n: io.ReportClock(n, "m", b["worker"], b["epoch"], at + 1, 0, 10.0, at))
    assert d.core.read.worker("m", b["worker"], d.now)["state"] == "active"  # it has done an iteration all the same


@pytest.mark.parametrize("back", ["to a cut", "to a checkpoint"])
def test_what_was_done_stays_done_when_the_model_goes_back(back: str) -> None:
    """Ranges that were done after the clock to which the model goes back are not handed out again."""
    d = Driver.with_model(consistency={"mode": "sync"})
    a = d.join("a")
    d.ask(lambda n: io.RegisterDataset(n, "m", "train", 30, 10))
    first = lease(d, a, [])
    d.clock(a, 1)
    d.ask(lambda n: io.TaskDone(n, "m", a["worker"], a["epoch"], first["id"]))
    held = lease(d, a, [])

    if back == "to a cut":
        d.shard("s1")
    else:
        d.ask(lambda n: io.StartRestore(n, "m"))
        d.ask(lambda n: io.RestoreFinished(n, ModelKey("m", 1)))
    assert d.core.read.model("m")["timeline"] == 1

    for _ in range(2):
        assert d.core.read.datasets("m")[0]["done"] == 1
        assert [lease(d, a, holding)["start"] for holding in ([], [held["id"]])] == [10, 20]
        d.restart()


def test_of_those_that_wait_each_gets_what_there_is_for_it() -> None:
    """One that gets nothing keeps nobody behind it from a range of its own, of another dataset, or an evaluation."""
    d = Driver.with_model()
    workers = [d.join(name) for name in "abcd"]
    for dataset, ranges, assignment in (("own", 2, "static"), ("any", 1, "dynamic"), ("later", 1, "dynamic")):
        size = {"size": ranges, "task_size": 1}
        d.ask(lambda n, s=dataset, z=size, a=assignment: io.RegisterDataset(n, "m", s, **z, assignment=a))  # type: ignore[misc]
    for worker, dataset in zip(workers, ("own", "own", "any", "later"), strict=True):
        assert d.result(d.lease(worker, dataset))["task"]["dataset"] == dataset

    waiting = [d.lease(w, s, 60.0) for w, s in zip(workers, ("own", "later", "any", "evaluate"), strict=True)]
    d.ask(lambda n: io.LeaveWorker(n, "m", workers[3]["worker"], 1))  # its range of `later` is free
    d.ask(lambda n: io.LeaveWorker(n, "m", workers[2]["worker"], 1))
    waiting.append(d.lease(workers[0], "any", 60.0))

    assert waiting[0] in d.open
    assert d.result(waiting[1])["task"]["dataset"] == "later"
    assert d.result(waiting[4])["task"]["dataset"] == "any"


def test_an_evaluation_that_nobody_makes_does_not_slow_the_rounds() -> None:
    """Only the next commit has the workers ask the scheduler whether there is an evaluation; then heartbeats tell."""
    d = Driver.with_model(consistency={"mode": "sync"})
    a = d.join("a")
    d.clock(a, 1)
    d.ask(lambda n: io.RequestEvaluation(n, "m"))
    for clock in (2, 3, 4):
        d.clock(a, clock)
    assert [c["asks"] for c in d.commits()] == [False, True, False, False]
    assert d.ask(lambda n: io.WorkerHeartbeat(n, "m", a["worker"], 1, 4))["evaluate"]


def test_an_evaluation_that_was_superseded_while_its_worker_was_away_counts_once() -> None:
    """The result of a worker that lost its lease meanwhile is noted, and not again if it is repeated."""
    d = Driver.with_model()
    a, b = d.join("a"), d.join("b")
    d.clock_of(a, 1)
    d.ask(lambda n: io.RequestEvaluation(n, "m"))
    first = lease(d, a, [], "evaluate")
    d.ask(lambda n: io.LeaveWorker(n, "m", a["worker"]))
    d.clock_of(b, 2)
    a = d.join("a")
    d.clock_of(a, 2)
    assert d.ask(lambda n: io.RequestEvaluation(n, "m"))["id"] != first["id"]

    for _ in range(2):
        d.ask(lambda n: io.TaskDone(n, "m", a["worker"], a["epoch"], first["id"], {"accuracy": 0.9}))
        assert len(d.core._c.models["m"].series.points["accuracy"]) == 1


def test_at_most_eight_evaluations_are_kept() -> None:
    """At most EVALUATIONS_MAX evaluations are kept, however many are requested and leased, always with the newest."""
    d = Driver.with_model()
    a = d.join("a")
    for clock in range(1, 12):
        d.clock(a, clock)
        d.ask(lambda n: io.RequestEvaluation(n, "m"))
        assert lease(d, a, None, "evaluate")["clock"] == clock
        kept = json.loads(d.hash["clock:m"])["evaluations"]
        assert [at for at, *_ in kept] == list(range(1, clock + 1))[-EVALUATIONS_MAX:]


def test_the_ranges_of_all_datasets_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset that would raise the ranges of all models above TASKS_MAX is refused; existing ones are not.

    A request of 60 bytes creates up to 100,000 ranges.
    """
    monkeypatch.setattr(limits, "TASKS_MAX", 25)
    d = Driver.with_model()
    d.model(name="n")

    def register(model: str, name: str, size: int) -> Any:
        return d.ask(lambda n: io.RegisterDataset(n, model, name, size, 1))

    register("m", "a", 10)
    register("n", "a", 10)
    with refused_with("conflict", ConflictError, match="delete datasets"):
        register("n", "b", 6)
    assert register("n", "b", 5)["tasks"] == 5
    assert register("m", "a", 10)["tasks"] == 10
    d.ask(lambda n: io.DeleteModel(n, "m"))
    assert register("n", "c", 10)["tasks"] == 10


def test_a_finished_dataset_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is trained for months gets more datasets than are kept: the finished one registered first goes.

    Also under another leader, and only if that makes the room; it is gone from Redis, too.
    """
    monkeypatch.setattr(task_desk, "DATASETS_MAX", 3)
    monkeypatch.setattr(limits, "TASKS_MAX", 8)
    d = Driver.with_model()
    a = d.join("a")

    def register(name: str, ranges: int = 2) -> None:
        d.ask(lambda n: io.RegisterDataset(n, "m", name, ranges, 1))

    def finish(name: str) -> None:
        while (task := lease(d, a, None, name)) is not None:
            d.ask(lambda n, t=task["id"]: io.TaskDone(n, "m", a["worker"], a["epoch"], t))  # type: ignore[misc]

    def there() -> list[str]:
        stored = {kind: sorted(k.split(":")[2] for k in d.hash if k.startswith(f"{kind}:m:")) for kind in KINDS}
        assert stored["dataset"] == stored["tasks"]
        return stored["dataset"]

    register("z")
    register("y")
    register("x")
    finish("y")
    finish("z")
    d.restart()
    a = d.join("a")
    register("w")
    assert there() == ["w", "x", "y"]
    with refused_with("conflict", ConflictError):
        register("v", 5)
    assert there() == ["w", "x", "y"]
    register("v")
    assert there() == ["v", "w", "x"]
    with refused_with("conflict", ConflictError, match="delete_tasks"):
        register("u")
    finish("w")
    register("u", 4)
    assert there() == ["u", "v", "x"]
    with pytest.raises(NotFoundError):
        lease(d, a, None, "w")


def test_a_dataset_that_is_deleted_is_gone(two: tuple[Driver, Any, Any]) -> None:
    """A deleted dataset is gone with its progress, also from Redis; who waits for a range of it is told at once."""
    d, a, b = two
    with pytest.raises(NotFoundError, match="did you mean 'train'"):
        d.ask(lambda n: io.DeleteDataset(n, "m", "trains"))
    lease(d, b, None)
    d.ask(lambda n: io.RegisterDataset(n, "m", "other", 10, 10))
    assert lease(d, a, None, "other")["start"] == 0
    waits, elsewhere = d.lease(b, "train", 60.0), d.lease(a, "other", 60.0)

    number = d.send(lambda n: io.DeleteDataset(n, "m", "train"))

    assert (d.result(number), d.statuses[number]) == (None, 204)
    with refused_with("unknown_task", NotFoundError):
        d.result(waits)
    assert elsewhere in d.open
    for _ in range(2):
        assert [s["dataset"] for s in d.core.read.datasets("m")] == ["other"]
        assert not [name for name in d.hash if name.endswith(":train")]
        with refused_with("unknown_task", NotFoundError):
            d.ask(lambda n: io.DeleteDataset(n, "m", "train"))
        d.restart()
    d.ask(lambda n: io.RegisterDataset(n, "m", "train", 10, 5))
    assert [lease(d, w, None)["start"] for w in (b, a)] == [0, 5]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"passes": 2}, "passes"),
        ({"uri": "s3://b", "assignment": "static"}, "uri and assignment"),
        ({"task_size": 5}, "ranges"),
    ],
)
def test_a_dataset_that_comes_again_otherwise_is_told_what_differs(
    two: tuple[Driver, Any, Any], fields: dict[str, Any], told: str
) -> None:
    """Registering a dataset again with different fields is refused, and the error names exactly those fields."""
    given = {"size": 20, "task_size": 10, **fields}
    with pytest.raises(ConflictError, match=f"is already registered with different {told} "):
        two[0].ask(lambda n: io.RegisterDataset(n, "m", "train", **given))
