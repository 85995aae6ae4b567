"""A worker's session, without I/O: joins, clocks, rollbacks, lost leases and reports, against a scripted node."""

import logging
import threading
from typing import Any, cast

import numpy as np
import pytest

from paramserver import limits
from paramserver.client.iterations import Iterations
from paramserver.client.numbers import PushNumbers
from paramserver.client.task_requests import TaskRequests
from paramserver.core.spec import ModelSpec
from paramserver.errors import FencedError, Unavailable, problem
from paramserver.net.calls import Deadline, Outcome, Pause, Request, Response

from .session_node import BEAT, GRAD, Node, deadline, joined, no, ok, opened
from .sharding import Now, drive


def test_what_a_cancelled_heartbeat_had_to_say_is_said_by_the_next_one() -> None:
    """Metrics of a cancelled heartbeat are sent again by the last heartbeat of a worker that leaves.

    An asyncio worker that leaves cancels the heartbeat in flight.
    """
    node, session = joined()
    session.reports.note(0, 7, {"loss": 0.25})
    beating = session.beat(deadline())
    next(beating)
    beating.close()
    drive(session.leave(deadline()), node)
    assert [[7, {"loss": 0.25}]] in [body.get("metrics") for body in node.bodies(BEAT) if body]


def test_a_gradient_is_dropped_that_a_rollback_overtakes_while_a_number_is_waited_for() -> None:
    """A push is dropped, not sent under the new timeline, if a rollback happens while it waits for a push id."""
    node, session = joined()
    drive(session.pull(deadline()), node)
    taken = [drive(session.numbers.take(deadline()), node) for _ in range(limits.WINDOW)]
    pushing = session.push(GRAD, deadline())
    assert isinstance(next(pushing), Pause)
    node.timeline = 1
    node.script[BEAT] = [no("rolled_back", timeline=1, clock=0)]
    drive(session.beat(deadline()), node)
    for push_id in taken:
        session.numbers.settle(push_id)

    with pytest.raises(StopIteration) as over:
        pushing.send([])
    assert over.value.value.state == "dropped"
    assert node.pushes == []


def test_a_gradient_of_a_model_that_was_created_anew_is_dropped() -> None:
    """A gradient of a model that was since created again is dropped; one of values pulled afterwards is applied."""
    node, session = joined("async")
    drive(session.pull(deadline()), node)
    node.generation = 2
    drive(session.refresh_mode(deadline()), node)

    assert drive(session.push(GRAD, deadline()), node).state == "dropped"
    drive(session.pull(deadline()), node)
    assert drive(session.push(GRAD, deadline()), node).state == "applied"
    assert len(node.pushes) == 1


def test_a_worker_of_a_model_that_was_created_anew_joins_it() -> None:
    """A worker unknown to a model that was created again drops its gradient and joins the new model."""
    node, session = joined("async")
    node.script["/push"] = [no("reserved_worker")]

    assert drive(session.push(GRAD, deadline()), node).state == "dropped"
    assert drive(session.push(GRAD, deadline()), node).state == "applied"
    assert session.numbers.epoch == 2


def test_a_pull_does_not_wait_for_a_timeline_of_an_earlier_creation() -> None:
    """A pull that names a timeline of a deleted model is made again as soon as the heartbeat has joined the new one.

    To its shard, which counts timelines from 0 again, that timeline is one that it does not know yet.
    """
    now = Now()

    class Anew(Node):
        def __call__(self, request: Request) -> Outcome:
            if request.path == "/pull" and session.timeline == 4:
                if len(self.script[BEAT]) == 1:
                    drive(session.beat(deadline()), self)  # what the thread of the heartbeats does meanwhile
                return no("loading")
            return super().__call__(request)

    node = Anew("async")
    node.timeline = 4
    session = opened(node)
    node.timeline, node.script[BEAT] = 0, [no("unknown_worker")]

    drive(session.pull(Deadline.after(30.0, now)), node, now)

    assert (session.numbers.epoch, session.timeline) == (2, 0)
    assert now.s < 101.0


def test_a_step_pushes_for_its_clock_then_reports_it_done() -> None:
    """A step's push names clock t and its report t + 1, and the next pull waits for the commit of that clock."""
    node, session = joined()

    for _ in range(2):
        drive(session.pull(deadline()), node)
        done = drive(Iterations(session).step(GRAD, {}, deadline(), None), node)
        assert done.state == "staged"

    assert [(f.clock, f.push_id.seq) for f in node.pushes if f.push_id] == [(0, 1), (1, 2)]
    assert [b["clock"] for b in node.bodies("/models/m/clock")] == [1, 2]
    assert [(f.min_version, f.min_clock) for f in node.pulls] == [(0, 0), (0, 1)]
    assert session.clock == 2


def test_a_step_whose_clock_was_committed_without_it_is_late() -> None:
    """If a worker's report is too late for the commit of its clock, the result of the step says so."""
    node, session = joined()
    node.script["/models/m/clock"] = [ok({"released": True, "clock": 1, "late": True, "state": "active"})]

    done = [drive(Iterations(session).step(GRAD, {}, deadline(), None), node) for _ in range(2)]

    assert [(d.state, d.late) for d in done] == [("staged", True), ("staged", False)]


def test_async_steps_never_ask_the_scheduler() -> None:
    """In async mode steps send only pushes; the heartbeat sends the clock and a few metrics, the newest among them."""
    node, session = joined("async")
    node.sent.clear()

    for i in range(9):
        drive(Iterations(session).step(GRAD, {"loss": 1.0 / (i + 1)}, deadline(), None), node)
    assert {path for _, path, _ in node.sent} <= {"/livez", "/push"}
    drive(session.beat(deadline()), node)

    (beat,) = node.bodies(BEAT)
    assert (beat["clock"], beat["metrics"]) == (9, [[clock, {"loss": 1.0 / (clock + 1)}] for clock in (2, 5, 8)])
    assert node.bodies("/models/m/metrics") == []


def test_a_rollback_drops_the_gradient_and_resets_the_clock() -> None:
    """After 409 rolled_back the push is dropped, no clock is reported, and the next push is of the new timeline."""
    node, session = joined()
    drive(session.pull(deadline()), node)
    drive(Iterations(session).step(GRAD, {}, deadline(), None), node)
    drive(session.pull(deadline()), node)
    node.timeline, node.clock = 5, 0
    node.script["/push"] = [no("rolled_back", timeline=5, clock=0)]
    reports = len(node.bodies("/models/m/clock"))

    dropped = drive(Iterations(session).step(GRAD, {}, deadline(), None), node)
    drive(session.pull(deadline()), node)
    drive(Iterations(session).step(GRAD, {}, deadline(), None), node)

    assert dropped.state == "dropped"
    assert len(node.bodies("/models/m/clock")) == reports + 1
    assert (node.pushes[-1].timeline, node.pushes[-1].clock) == (5, 0)
    assert node.pulls[-1].min_clock == 0


@pytest.mark.parametrize(
    ("mode", "clock", "told"),
    [("sync", 0, "worker.rolled_back"), ("sync", 9, "worker.moved_on"), ("async", 0, "worker.moved_on")],
)
def test_only_a_clock_that_falls_in_sync_is_told_as_a_rollback(
    mode: str, clock: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A change to sync, and a restore, which goes on beyond all earlier clocks, are not logged as rollbacks."""
    node, session = joined(mode)
    drive(Iterations(session).step(GRAD, {}, deadline(), None), node)
    caplog.set_level(logging.INFO, "paramserver")
    node.script[BEAT] = [no("rolled_back", timeline=2, clock=clock)]
    drive(session.beat(deadline()), node)

    assert [r.getMessage() for r in caplog.records] == [f"{told} worker=m/w0 timeline=2 clock={clock}"]
    assert (session.clock, session.timeline) == (clock, 2)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_gradient_of_values_from_before_a_rollback_is_not_sent(evaluates: bool) -> None:
    """A gradient of values from before a rollback is not sent if a heartbeat has reported the rollback.

    What is pulled after it for something else, such as an evaluation, changes nothing.
    """
    node, session = joined()
    drive(session.pull(deadline()), node)
    node.timeline = 2
    node.script[BEAT] = [no("rolled_back", timeline=2, clock=0)]
    drive(session.beat(deadline()), node)
    if evaluates:
        drive(session.pull(deadline(), record=False), node)

    done = drive(session.push(GRAD, deadline()), node)

    assert done.state == "dropped"
    assert node.pushes == []


def test_a_pull_that_follows_a_rollback_is_of_the_same_names_and_ranges() -> None:
    """A pull repeated because of a rollback has the same names and ranges, even if they were given as iterators."""
    node, session = joined()
    node.script["/pull"] = [no("rolled_back", timeline=1, clock=0)] * 2
    node.timeline = 1
    ranges: Any = {"w": iter([(0, 4)])}

    assert list(drive(session.pull(deadline(), names=iter(["w"]), ranges=ranges), node)) == ["w"]


def test_a_rollback_at_the_clock_goes_back_to_the_clock_told() -> None:
    """A clock report answered with rolled_back returns the clock that the rollback went back to."""
    node, session = joined()
    for _ in range(3):
        drive(Iterations(session).step(GRAD, {}, deadline(), None), node)
    node.script["/models/m/clock"] = [no("rolled_back", timeline=1, clock=1)]

    assert drive(Iterations(session).advance(deadline(), None), node) == 1
    assert (session.clock, session.timeline) == (1, 1)


@pytest.mark.parametrize("code", ["fenced", "unknown_worker"])
def test_a_lost_lease_is_taken_anew(code: str) -> None:
    """A worker whose lease has expired joins again under its id, above its old epoch, and restarts its seq at 1."""
    node, session = joined("async")
    drive(session.push(GRAD, deadline()), node)
    node.script["/push"] = [no(code)]

    assert drive(session.push(GRAD, deadline()), node).state == "dropped"
    drive(session.push(GRAD, deadline()), node)

    assert node.bodies("/models/m/workers")[-1] == {"name": "m/w0", "rank": 3, "above": 1}
    last = node.pushes[-1].push_id
    assert last is not None
    assert (last.worker, last.epoch, last.seq) == ("m/w0", 2, 1)


def test_the_first_worker_is_whom_the_scheduler_says() -> None:
    """Answers to joins and heartbeats say whether the worker's rank is the lowest; where they do not, rank 0's is."""
    node, session = joined()
    assert (session.rank, session.first) == (3, False)

    node.script[BEAT] = [ok({"state": "active", "first": True})]
    drive(session.beat(deadline()), node)
    assert session.first

    drive(session.beat(deadline()), node)
    assert session.first
    node.script[BEAT] = [no("unknown_worker")]
    node.script["/models/m/workers"] = [ok({**node.joined(), "rank": 0}, 201)]
    drive(session.beat(deadline()), node)
    assert (session.rank, session.first) == (0, True)


def test_heartbeats_tell_whether_settings_have_changed() -> None:
    """A worker fetches the model's document, a long one, only if a heartbeat's answer has another tag than it knows.

    And once a minute: nobody else tells a client whose requests are passed on that shards can be reached directly.
    """
    now = Now()
    node, session = joined("sync")
    drive(session.join(Deadline.after(30.0, now)), node)
    fetched = len(node.bodies("/models/m"))

    def beat() -> int:
        drive(session.beat(Deadline.after(30.0, now)), node)
        return len(node.bodies("/models/m")) - fetched

    for _ in range(59):
        now.s += 1.0
        assert beat() == 0
    node.mode, node.settings_tag = "async", 2
    assert (beat(), session.mode) == (1, "async")
    now.s += 59.0
    assert beat() == 1
    now.s += 1.0
    assert beat() == 2


def test_a_join_is_sent_again_as_it_was() -> None:
    """A retried join repeats its attempt id, and another worker's join has another.

    By this id the scheduler recognizes the retry.
    """
    node = Node()
    node.script["/models/m/workers"] = [problem("in_doubt", "the connection broke")]

    opened(node)
    opened(node)

    first, again, other = (b["attempt"] for b in node.bodies("/models/m/workers"))
    assert first == again
    assert other != first


def test_a_rank_that_was_taken_meanwhile_is_let_go() -> None:
    """A worker that joins again gives up its rank if another worker has taken it meanwhile."""
    node, session = joined()
    node.script[BEAT] = [no("fenced")]
    node.script["/models/m/workers"] = [no("conflict", where="rank")]

    drive(session.beat(deadline()), node)

    assert node.bodies("/models/m/workers")[-2:] == [
        {"name": "m/w0", "rank": 3, "above": 1},
        {"name": "m/w0", "above": 1},
    ]


def test_waiting_has_an_end_only_when_asked_for() -> None:
    """A clock that times out raises an error that names the awaited workers, and can be reported again."""
    node, session = joined()
    node.script["/models/m/clock"] = [ok({"released": False, "clock": 0, "waiting_for": ["m/w7"], "state": "active"})]

    with pytest.raises(Unavailable, match="m/w7"):
        drive(Iterations(session).advance(deadline(), Deadline.after(0.0)), node)

    assert session.clock == 0
    assert drive(Iterations(session).advance(deadline(), None), node) == 1


def test_stop_ends_waiting_and_tasks() -> None:
    """A worker that is asked to stop ends its wait for the clock and leases no more tasks."""
    node, session = joined()
    node.script["/models/m/clock"] = [ok({"released": False, "clock": 0, "waiting_for": ["m/w7"], "state": "stop"})]

    drive(Iterations(session).advance(deadline(), None), node)

    assert drive(TaskRequests(session).lease("train"), node) is None
    assert session.status == "stop"


def test_tasks_are_waited_for_and_done() -> None:
    """A lease request is repeated until a task is free, and the finished task is reported with the worker's epoch."""
    node, session = joined()
    task = {
        "id": "train:0:2",
        "kind": "range",
        "dataset": "train",
        "uri": None,
        "pass": 0,
        "index": 2,
        "start": 20,
        "stop": 30,
    }
    node.script["/models/m/tasks/lease"] = [
        ok({"task": None, "finished": False, "clock": 0}),
        ok({"task": task, "finished": False, "clock": 4}),
    ]
    node.script["/models/m/tasks/train%3A0%3A2/done"] = [ok({"done": True})]

    found = drive(TaskRequests(session).lease("train"), node)
    assert found is not None
    drive(TaskRequests(session).done(found, deadline()), node)

    assert (found.start, found.stop, found.index) == (20, 30, 2)
    assert session.clock == 4, "while it waited it held nobody up, so it goes on where the others are"
    assert node.bodies("/models/m/tasks/train%3A0%3A2/done")[0]["epoch"] == 1


LEASE = "/models/m/tasks/lease"


TASK = {"id": "train:0:0", "kind": "range", "dataset": "train", "start": 0, "stop": 9, "index": 0, "pass": 0}


def given(task: Any) -> Response:
    return ok({"task": task, "finished": False, "clock": 0})


def test_a_lease_says_what_is_still_worked_on() -> None:
    """A lease request lists the tasks of its dataset that the worker still holds, not those done or put down.

    The scheduler may free the unlisted ones.
    """
    node, session = joined()
    tasks = [TASK | {"id": f"train:0:{i}"} for i in range(3)]
    node.script[LEASE] = [*(given(t) for t in tasks), given(None), given(None)]
    node.script["/models/m/tasks/train%3A0%3A0/done"] = [ok({"done": True})]

    first, second, _ = (drive(TaskRequests(session).lease("train"), node) for _ in tasks)
    assert first is not None
    assert second is not None
    drive(TaskRequests(session).done(first, deadline()), node)
    session.holding.put_down(second)
    drive(TaskRequests(session).lease("train", wait=False), node)
    drive(TaskRequests(session).lease("other", wait=False), node)

    ids = [t["id"] for t in tasks]
    assert [b["holding"] for b in node.bodies(LEASE)] == [[], ids[:1], ids[:2], ids[2:], []]


def test_a_task_that_was_given_in_an_answer_that_is_lost_is_not_held() -> None:
    """A lease request repeated after a lost answer does not list the task of that answer as held.

    The scheduler then gives out the same task.
    """
    node, session = joined()
    node.script[LEASE] = [problem("in_doubt", "the connection broke"), given(TASK)]

    assert drive(TaskRequests(session).lease("train"), node) is not None

    assert [b["holding"] for b in node.bodies(LEASE)] == [[], []]


def test_one_task_of_a_dataset_is_asked_for_at_a_time() -> None:
    """A worker has one lease request per dataset in flight; its other threads wait.

    Otherwise one thread's `holding` would lack the task that another is just being given.
    """
    node, session = joined()
    asking, other = TaskRequests(session).lease("train"), TaskRequests(session).lease("train")
    (request,) = cast(list[Request], next(asking))

    assert isinstance(next(other), Pause)
    node.script[LEASE] = [given(TASK), given(TASK | {"id": "train:0:1"})]
    with pytest.raises(StopIteration):
        asking.send([node(request)])
    drive(other, node)

    assert [b["holding"] for b in node.bodies(LEASE)] == [[], ["train:0:0"]]


def test_a_request_for_a_task_that_is_given_up_lets_the_next_one_be_made() -> None:
    """A lease request that is aborted, as by Ctrl-C or a cancelled task, does not block the next one."""
    node, session = joined()
    asking = TaskRequests(session).lease("train")
    next(asking)

    asking.close()
    node.script[LEASE] = [given(TASK)]

    assert drive(TaskRequests(session).lease("train"), node) is not None


def test_numbers_stay_within_the_window() -> None:
    """The 65th push id is not allocated while the first is in doubt, even if all after it are settled."""
    numbers = PushNumbers("c-1", 1)
    taken = [drive(numbers.take(deadline()), Node()) for _ in range(64)]
    for push_id in taken[1:]:
        numbers.settle(push_id)

    with pytest.raises(Unavailable):
        drive(numbers.take(Deadline.after(0.0)), Node())

    numbers.settle(taken[0])
    assert drive(numbers.take(deadline()), Node()).seq == 65


def test_a_new_epoch_has_push_ids_of_its_own() -> None:
    """In a new epoch numbers begin at 1 with none in doubt, and settling an id of the old one releases none of them."""
    numbers = PushNumbers("m/w0", 1)
    old = [drive(numbers.take(deadline()), Node()) for _ in range(64)]
    numbers.renew(2)
    assert not numbers.any_in_doubt()
    new = [drive(numbers.take(deadline()), Node()) for _ in range(64)]
    assert [new[0].seq, new[63].seq] == [1, 64]

    numbers.settle(old[0])

    with pytest.raises(Unavailable):
        drive(numbers.take(Deadline.after(0.0)), Node())


def test_a_number_that_nobody_holds_any_more_is_not_in_doubt() -> None:
    """A push id that was garbage-collected without being settled is not in doubt.

    Ctrl-C may come before the call settles it: 63 pushes later no id could be allocated any more.
    """
    numbers = PushNumbers("c-1", 1)
    held = drive(numbers.take(deadline()), Node())
    for _ in range(63):
        drive(numbers.take(deadline()), Node())
    with pytest.raises(Unavailable):
        drive(numbers.take(Deadline.after(0.0)), Node())

    del held
    assert [drive(numbers.take(Deadline.after(0.0)), Node()).seq for _ in range(65)] == list(range(65, 130))


def test_a_worker_whose_name_another_has_taken_gives_way() -> None:
    """A worker that is fenced because another has joined under its id stops instead of joining again.

    Otherwise the two would fence each other forever.
    """
    node, session = joined("async")
    node.script["/push"] = [no("fenced", epoch=2)]

    with pytest.raises(FencedError, match="another worker"):
        drive(session.push(GRAD, deadline()), node)

    assert session.status == "stop"
    assert len(node.bodies("/models/m/workers")) == 1


def test_a_worker_that_asked_twice_to_join_takes_no_later_epoch_for_another_ones() -> None:
    """A worker whose join was retried takes a higher epoch in `fenced` for its own, and joins again.

    The request that it sent first may have arrived last.
    """
    node = Node("async")
    node.script["/models/m/workers"] = [problem("in_doubt", "no answer")]
    session = opened(node)
    node.script["/push"] = [no("fenced", epoch=2)]

    assert drive(session.push(GRAD, deadline()), node).state == "dropped"
    assert drive(session.push(GRAD, deadline()), node).state == "applied"


@pytest.mark.parametrize("end", ["cancelled", "late"])
def test_a_worker_takes_the_epoch_of_a_join_that_was_given_up_for_its_own(end: str) -> None:
    """A worker whose request to join again was cancelled, or got no answer in time, does not give way to itself.

    The scheduler may have granted the epoch all the same; no other worker has it.
    """
    node, session = joined("async")
    node.script[BEAT] = [no("fenced")]
    if end == "cancelled":
        beating = session.beat(deadline())
        sent = next(beating)
        while not isinstance(sent, Pause) and sent[0].path != "/models/m/workers":
            sent = beating.send([node(r) for r in sent])
        beating.close()
    else:
        node.script["/models/m/workers"] = [problem("in_doubt", "no answer")]
        with pytest.raises(Unavailable):
            drive(session.beat(Deadline.after(0.0)), node)
    node.epoch = 2
    node.script["/push"] = [no("fenced", epoch=2)]

    assert drive(session.push(GRAD, deadline()), node).state == "dropped"
    assert drive(session.push(GRAD, deadline()), node).state == "applied"
    assert session.status == "active"


def test_a_number_is_of_the_epoch_it_was_taken_in() -> None:
    """A push id has the epoch in which its seq was allocated, even if a heartbeat joins again at that moment.

    A high seq of a new epoch would move the window past the ones that follow.
    """
    numbers = PushNumbers("m/w0", 1)
    lock = threading.Lock()

    class Then:
        """A lock that changes the epoch when it is first released."""

        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()
            if numbers.epoch == 1:
                numbers.renew(2)

    cast(Any, numbers)._lock = Then()

    push_id = drive(numbers.take(deadline()), Node())

    assert (push_id.epoch, push_id.seq) == (1, 1)
    assert drive(numbers.take(deadline()), Node()).epoch == 2


def test_a_pushpull_of_some_parameters_pulls_all_of_them() -> None:
    """A worker's pushpull of a gradient for some parameters only returns the values of all."""
    node = Node("async")
    params = {"a": {"shape": [1]}, "b": {"shape": [3]}}
    node.spec = ModelSpec.parse({"name": "m", "params": params, "partitions": 1})
    session = opened(node)

    values = drive(session.pushpull({"b": np.ones(3, np.float32)}, deadline()), node)

    assert (len(node.pushes), len(node.pulls), values.flat.size) == (1, 1, 4)


@pytest.mark.parametrize("told", [[], [no("fenced", epoch=1)]])
@pytest.mark.parametrize("way", ["step", "exchange", "advance"])
def test_a_timeout_bounds_the_wait_for_a_silent_scheduler(way: str, told: list[Outcome]) -> None:
    """A scheduler that falls silent is waited for no longer than the call's timeout says, and a second for its answer.

    So is one that says before that the worker's lease is over.
    """
    (node, session), now = joined("ssp"), Now()
    clock = "/models/m/clock"
    node.script[clock] = told.copy()

    def answer(request: Request) -> Outcome:
        if request.path not in (clock, "/models/m/workers") or node.script[clock]:
            return node(request)
        now.s += request.timeout_s
        return problem("in_doubt", "no answer")

    until = Deadline.after(3.0, now)
    with pytest.raises(Unavailable):
        drive(getattr(Iterations(session), way)(*([] if way == "advance" else [GRAD, {}]), until, until), answer, now)
    assert now() <= until.at + 1.0
