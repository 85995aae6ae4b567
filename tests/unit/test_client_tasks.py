"""Loops over the ranges of a dataset by one worker: nested ones are refused, those of threads and tasks are not."""

import asyncio
import logging
import threading

import pytest

from paramserver.client.task_requests import TaskRequests
from paramserver.client.tasks import Holding, Task
from paramserver.core.scheduler.tasks import EVALUATE
from paramserver.errors import ConflictError, Unavailable

from .session_node import BEAT, Node, deadline, no, ok, opened
from .sharding import drive

LEASE = "/models/m/tasks/lease"
NOTHING_FREE = ok({"task": None, "finished": False})
RANGE = {
    "id": "train:0:2", "kind": "range", "dataset": "train", "uri": None, "pass": 0, "index": 2, "start": 20, "stop": 30,
}  # fmt: skip


def test_a_loop_inside_another_over_the_same_dataset_is_refused_once_it_would_wait_for_it() -> None:
    """A nested loop ends with an error when only the range of the loop around it is left, for which it would wait."""
    node = Node()
    session = opened(node)
    lease = TaskRequests(session).lease
    node.script[LEASE] = [ok({"task": RANGE}), ok({"task": {**RANGE, "id": "train:0:3"}}), NOTHING_FREE]
    outer, inner = (drive(lease("train"), node) for _ in range(2))
    assert outer is not None
    assert inner is not None
    session.holding.done(inner)

    with pytest.raises(ConflictError, match="loop over 'train' inside another"):
        drive(lease("train"), node)

    session.holding.put_down(outer)
    node.script[LEASE] = [NOTHING_FREE, ok({"task": None, "finished": True})]
    assert drive(lease("train"), node) is None


@pytest.mark.parametrize("another", ["thread", "task"])
def test_threads_and_tasks_of_one_worker_wait_for_each_others_ranges(another: str) -> None:
    """Loops over one dataset in several threads or asyncio tasks are no nested loops: one waits for another's range."""
    node = Node()
    lease = TaskRequests(opened(node)).lease
    node.script[LEASE] = [ok({"task": RANGE}), NOTHING_FREE, ok({"task": None, "finished": True})]

    async def both() -> None:
        assert drive(lease("train"), node) is not None
        if another == "thread":
            await asyncio.to_thread(drive, lease("train"), node)
        else:
            await asyncio.create_task(one())

    async def one() -> None:
        assert drive(lease("train"), node) is None

    asyncio.run(both())
    assert not node.script[LEASE]


@pytest.mark.parametrize("end", ["cancelled", "unavailable"])
def test_an_evaluation_whose_lease_had_no_answer_is_asked_for_again(end: str) -> None:
    """An evaluation may be leased to a worker that does not know it; no heartbeat would ever tell it, or another."""
    node = Node()
    session = opened(node)
    node.script[BEAT] = [ok({"state": "active", "evaluate": True}), ok({"state": "active", "evaluate": False})]
    drive(session.beat(deadline()), node)
    lease = TaskRequests(session).lease(EVALUATE, wait=False)
    if end == "cancelled":
        next(lease)
        lease.close()
    else:
        session.silence_s = 0.0
        node.script[LEASE] = [no("no_leader")]
        with pytest.raises(Unavailable):
            drive(lease, node)

    drive(session.beat(deadline()), node)
    assert session.evaluation_waits
    node.script[LEASE] = [NOTHING_FREE]
    assert drive(TaskRequests(session).lease(EVALUATE, wait=False), node) is None
    assert not session.evaluation_waits


@pytest.mark.parametrize(("code", "told"), [("unknown_task", "was deleted"), ("unknown_worker", "processed again")])
def test_a_range_that_cannot_be_reported_says_what_becomes_of_it(
    code: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A range of a deleted dataset is handed out to nobody; that of a worker which was given up is, to another one."""
    node = Node()
    tasks = TaskRequests(opened(node))
    node.script[LEASE] = [ok({"task": RANGE})]
    node.script["/models/m/tasks/train%3A0%3A2/done"] = [no(code)]
    task = drive(tasks.lease("train"), node)
    assert task is not None

    with caplog.at_level(logging.WARNING, "paramserver"):
        drive(tasks.done(task, deadline()), node)

    (line,) = [r.getMessage() for r in caplog.records if "task.lost" in r.getMessage()]
    assert told in line


def test_a_loop_that_is_garbage_at_any_moment_puts_down_its_task() -> None:
    """A garbage collection that closes a loop may come while the same thread is looking at the worker's tasks."""
    holding = Holding()
    task = Task.from_document(RANGE)
    holding.take("train", {"task": RANGE})

    class Closing(str):
        """The name of a dataset; once it is compared, a loop is closed."""

        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            holding.put_down(task)
            return str.__eq__(self, other)

    found = list[list[str]]()
    looking = threading.Thread(target=lambda: found.append(holding.ids(Closing("train"))), daemon=True)
    looking.start()
    looking.join(20.0)

    assert found == [["train:0:2"]]
    assert holding.ids("train") == []
