"""Generations tell the creations of a model apart, also those of an earlier cluster at the same address."""

import json
from typing import Any

import pytest
from tests.refusals import refused_with

from paramserver.client import control
from paramserver.client.cluster import Cluster
from paramserver.client.frames import PushTerms
from paramserver.client.iterations import Iterations
from paramserver.client.task_requests import TaskRequests
from paramserver.client.tasks import Task
from paramserver.core.scheduler import io
from paramserver.core.scheduler.core import SchedulerCore
from paramserver.errors import FencedError, InDoubt, problem
from paramserver.net.calls import Deadline, Outcome, Request

from .scheduling import Driver
from .session_node import BEAT, GRAD, Node, deadline, joined, no, ok
from .sharding import Now, drive

START_S = 1_790_000_000.0
JOIN = "/models/m/workers"


def begun(documents: dict[str, Any], unix_s: float) -> Driver:
    """Return a scheduler that has begun with these documents at that time, and its model, served."""
    d = Driver()
    d.core = SchedulerCore.restore(documents, d.now, d.term, unix_s, "id")
    d.model()
    return d


def test_no_two_clusters_share_a_generation() -> None:
    """A fresh cluster numbers from its first start on, beyond whatever one before it has created; a new leader goes on.

    Clocks, versions, tokens and epochs begin at the same numbers in both.
    """
    old = begun({}, START_S)
    for _ in range(100):
        old.ask(lambda n: io.DeleteModel(n, "m"))
        old.model()
    new = begun({}, START_S + 1.0)
    assert new.core.read.model("m")["generation"] > old.core.read.model("m")["generation"] > START_S * 1000
    assert not [w for w in new.work if isinstance(w, io.ForgetOthers)]  # it knows nothing of what else Redis has

    key = new.core.read.key("m")
    new.core = SchedulerCore.restore({k: json.loads(v) for k, v in new.hash.items()}, new.now, 2, START_S + 9.0)
    assert new.core.read.key("m") == key
    new.ask(lambda n: io.DeleteModel(n, "m"))
    assert new.model()["generation"] == key.generation + 1


@pytest.mark.parametrize("what", ["heartbeat", "clock", "lease", "done", "leave"])
def test_what_a_worker_of_another_creation_asks_is_not_taken_for_this_ones(what: str) -> None:
    """A request with the generation of another creation is refused, whatever its id and epoch are, and changes nothing.

    The error names the epoch of the worker that this creation has under the id, if any ever joined it.
    """
    d = Driver.with_model(consistency={"mode": "sync"})
    d.ask(lambda n: io.RegisterDataset(n, "m", "train", size=4, task_size=1))
    a = d.join("a")
    task = d.result(d.lease(a, "train"))["task"]["id"]
    d.wait(4.0)

    def send(worker: str, generation: int | None) -> Any:
        events: dict[str, Any] = {
            "heartbeat": lambda n: io.WorkerHeartbeat(n, "m", worker, 1, clock=1, generation=generation),
            "clock": lambda n: io.ReportClock(n, "m", worker, 1, 1, generation=generation),
            "lease": lambda n: io.LeaseTask(n, "m", worker, 1, "train", holding=[], generation=generation),
            "done": lambda n: io.TaskDone(n, "m", worker, 1, task, generation=generation),
            "leave": lambda n: io.LeaveWorker(n, "m", worker, 1, generation),
        }
        return d.ask(events[what])

    before = d.core.read.worker("m", "m/a", d.now), d.core.read.datasets("m")
    for worker, members in (("m/a", {"generation": 1, "epoch": 1}), ("m/b", {"generation": 1})):
        with pytest.raises(FencedError) as refused:
            send(worker, 7)
        assert (refused.value.code, refused.value.members) == ("model_replaced", members)
    assert (d.core.read.worker("m", "m/a", d.now), d.core.read.datasets("m")) == before
    d.wait(2.0)
    assert not d.core.read.worker("m", "m/a", d.now)["alive"]  # they were no signs of its life


def test_metrics_of_another_creation_do_not_count() -> None:
    """Metrics with the generation of another creation are accepted and left out, as those of another timeline are."""
    d = Driver.with_model()
    a = d.join("a")

    def accepted(generation: int | None) -> int:
        event = lambda n: io.ReportMetrics(n, "m", {"loss": 1.0}, a["worker"], 1, 0, generation)  # noqa: E731
        return int(d.ask(event)["accepted"])

    assert [accepted(g) for g in (7, 1, None)] == [0, 1, 1]


@pytest.mark.parametrize("what", ["patch", "checkpoint", "restore", "delete"])
def test_what_changes_a_model_may_name_the_creation_that_is_meant(what: str) -> None:
    """A request that changes, stores or deletes a model is refused if it names another creation, and else is done."""
    d = Driver.with_model()

    def ask(generation: int | None) -> int:
        events: dict[str, Any] = {
            "patch": lambda n: io.PatchModel(n, "m", {"optimizer": {"lr": 0.5}}, generation),
            "checkpoint": lambda n: io.RequestCheckpoint(n, "m", "mine", generation),
            "restore": lambda n: io.StartRestore(n, "m", generation=generation),
            "delete": lambda n: io.DeleteModel(n, "m", generation=generation),
        }
        return d.send(events[what])

    before = dict(d.hash)
    refused = d.replies[ask(7)]
    assert (refused.code, refused.members) == ("model_replaced", {"generation": 1})
    assert d.hash == before
    done = ask(1)
    assert done in d.open if what == "checkpoint" else d.statuses[done] in (200, 204)


@pytest.mark.parametrize("lost", [False, True])
def test_a_model_that_is_replaced_once_its_deletion_is_in_doubt_was_deleted(lost: bool) -> None:
    """If the answer to a DELETE is lost and the model is another one by the next attempt, the first one was done."""
    answers: list[Outcome] = [problem("in_doubt", "the connection broke")] * lost
    paths: list[str] = []

    def node(request: Request) -> Outcome:
        paths.append(request.path)
        return answers.pop() if answers else no("model_replaced", generation=2)

    deleting = control.delete_model(Cluster(("http://given:1",)), "m", 1, Deadline.after(30.0, now := Now()))
    if lost:
        drive(deleting, node, now)
    else:
        with refused_with("model_replaced", FencedError):
            drive(deleting, node, now)
    assert paths == ["/models/m?generation=1"] * (1 + lost)


def replaced(node: Node, **members: Any) -> Any:
    """Create the node's model anew and return the refusal of what names the creation before."""
    node.generation += 1
    return no("model_replaced", generation=node.generation, **members)


def test_a_workers_requests_name_the_creation_that_it_has_joined() -> None:
    """Heartbeats, clock reports, requests for tasks, their ends, metrics and the leave carry the join's generation."""
    node, session = joined("ssp")
    done = {"id": "train:0:0", "kind": "range", "dataset": "train", "start": 0, "stop": 1}
    node.script["/models/m/tasks/lease"] = [ok({"task": done, "finished": False, "clock": 0, "timeline": 0})]
    node.script["/models/m/tasks/train%3A0%3A0/done"] = [ok({"id": "train:0:0", "done": True})]
    node.sent.clear()

    drive(session.beat(deadline()), node)
    drive(session.report({"loss": 1.0}, deadline()), node)
    drive(Iterations(session).advance(deadline(), None), node)
    task = drive(TaskRequests(session).lease("train"), node)
    assert isinstance(task, Task)
    drive(TaskRequests(session).done(task, deadline()), node)
    drive(session.leave(deadline()), node)

    assert [body["generation"] for _, _, body in node.sent if body is not None] == [1] * 6
    assert node.sent[-1][:2] == ("DELETE", f"{BEAT}?epoch=1&generation=1")


@pytest.mark.parametrize("what", ["heartbeat", "clock", "lease"])
def test_a_worker_joins_a_model_that_was_created_anew(what: str) -> None:
    """A worker told that its model was created again joins the new one, and goes on with its map and its mode."""
    node, session = joined("ssp")
    paths = {"heartbeat": BEAT, "clock": "/models/m/clock", "lease": "/models/m/tasks/lease"}
    node.script[paths[what]] = [replaced(node)]
    node.mode = "async"
    node.script.setdefault("/models/m/tasks/lease", []).append(ok({"task": None, "finished": True}))

    if what == "heartbeat":
        drive(session.beat(deadline()), node)
    elif what == "clock":
        drive(Iterations(session).advance(deadline(), None), node)
    else:
        assert drive(TaskRequests(session).lease("train"), node) is None

    assert (session.numbers.epoch, session.generation, session.mode, session.status) == (2, 2, "async", "active")
    assert node.bodies(JOIN)[-1]["name"] == "m/w0"
    assert session.cluster.generation("m") == 2


def test_a_worker_gives_way_to_one_that_has_its_id_in_the_new_model() -> None:
    """A worker does not join a new creation in which another one has its id, whatever their epochs are."""
    node, session = joined("async")
    node.script[BEAT] = [no("fenced")] * 3
    for _ in range(3):
        drive(session.beat(deadline()), node)
    assert session.numbers.epoch == 4
    node.script[BEAT] = [replaced(node, epoch=1), *[no("model_replaced", epoch=1)] * 3]

    with pytest.raises(FencedError, match="another worker has joined"):
        drive(session.beat(deadline()), node)
    drive(session.refresh_mode(deadline()), node)
    with pytest.raises(FencedError, match="another worker has joined"):
        drive(session.pull(deadline()), node)
    with pytest.raises(FencedError, match="another worker has joined"):
        drive(session.push(GRAD, deadline()), node)
    drive(session.leave(deadline()), node)

    assert (session.status, len(node.bodies(JOIN)), node.pulls, node.pushes) == ("stop", 4, [], [])
    assert not [path for method, path, _ in node.sent if method == "DELETE"]


def test_a_push_into_a_model_that_was_created_anew_is_of_a_worker_of_that() -> None:
    """A worker joins the new creation before it pushes there, even if no heartbeat has told it to."""
    node, session = joined("async")
    node.generation = 2
    drive(session.refresh_mode(deadline()), node)
    drive(session.pull(deadline()), node)

    assert drive(session.push(GRAD, deadline()), node).state == "applied"

    assert (session.numbers.epoch, session.generation, node.pushes[0].epoch) == (2, 2, 2)


def test_a_push_that_is_torn_takes_no_other_workers_id() -> None:
    """Before a worker joins anew for a torn push, it is asked for whether another worker has its id in a new model."""
    (node, session), now = joined(), Now()
    node.script["/push"] = [problem("in_doubt", "the answer was lost")] * 100
    with pytest.raises(InDoubt):
        drive(session.push(GRAD, Deadline.after(1.0, now)), node, now)
    node.script = {BEAT: [replaced(node, epoch=1)]}

    with pytest.raises(FencedError, match="another worker has joined"):
        drive(session.push(GRAD, deadline()), node)

    assert len(node.bodies(JOIN)) == 1


def test_a_push_is_not_sent_to_another_creation_than_it_was_numbered_for() -> None:
    """A push whose map is replaced once it has its number is refused here: its id may be another worker's there."""
    node, session = joined("async")
    _, terms = drive(session.begin(deadline()), node)
    assert isinstance(terms, PushTerms)
    node.generation = 2
    drive(session.refresh_mode(deadline()), node)

    with refused_with("model_replaced", FencedError):
        drive(session.deliver(terms, GRAD, deadline()), node)

    assert node.pushes == []


def test_the_end_of_a_task_of_an_earlier_creation_is_forgotten() -> None:
    """A task whose model was created again is not held any more, as one of a worker that was fenced."""
    node, session = joined("async")
    task = Task("train:0:0", "train", 0, 1, 0, 0, None)
    node.script["/models/m/tasks/train%3A0%3A0/done"] = [replaced(node)]

    drive(TaskRequests(session).done(task, deadline()), node)

    assert session.holding.ids("train") == []
