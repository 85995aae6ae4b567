"""Workers that had no data for a while, with a real scheduler: where they and their model go on."""

import json
from collections.abc import Callable
from urllib.parse import unquote

import pytest

from paramserver.client.iterations import Iterations
from paramserver.client.session import Session
from paramserver.client.task_requests import TaskRequests
from paramserver.client.tasks import Task
from paramserver.core.scheduler import io
from paramserver.net.calls import Outcome, Request, Response

from .scheduling import Driver
from .session_node import deadline, ok, opened
from .sharding import drive


def scheduler(d: Driver) -> Callable[[Request], Outcome]:
    """Return what answers the requests of workers as this scheduler does."""

    def answer(request: Request) -> Outcome:
        path, body = unquote(request.path), json.loads(bytes(request.body or b"{}"))
        if path == "/livez":
            return Response(200, {})
        if path == "/models/m":
            return ok(d.core.read.model("m"))
        if path == "/models/m/workers":
            return ok(d.ask(lambda n: io.JoinWorker(n, "m", **body)), 201)
        if path == "/models/m/tasks/lease":
            return ok(d.ask(lambda n: io.LeaseTask(n, "m", **body)))
        if path.startswith("/models/m/tasks/"):
            return ok(d.ask(lambda n: io.TaskDone(n, "m", task=path.split("/")[4], **body)))
        return ok(d.ask(lambda n: io.WorkerHeartbeat(n, "m", path.removeprefix("/models/m/workers/"), **body)))

    return answer


@pytest.mark.parametrize("by", ["a range", "a step"])
@pytest.mark.parametrize("mode", ["async", "buffered"])
def test_a_model_goes_on_with_the_slower_worker_after_both_had_no_data(mode: str, by: str) -> None:
    """Of two workers that go on after a rest, also the one that was far behind moves the clock with its next steps.

    It was taken for as far as the other one without being told, so its reports of lower clocks said nothing new: with
    two datasets in turn, the model's clock stood still for most of the second, and with it all that goes by clocks.
    """
    d = Driver.with_model(consistency={"mode": mode})
    answer = scheduler(d)
    fast, slow = (opened(answer) for _ in range(2))

    def lease(session: Session, dataset: str) -> Task | None:
        return drive(TaskRequests(session).lease(dataset, wait=False), answer)

    def train(session: Session, steps: int) -> None:
        for _ in range(steps):
            drive(Iterations(session).advance(deadline(), None), answer)
        drive(session.beat(deadline()), answer)

    d.ask(lambda n: io.RegisterDataset(n, "m", "first", 2, 1))
    for session, steps in ((fast, 100), (slow, 10)):
        task = lease(session, "first")
        assert task is not None
        train(session, steps)
        drive(TaskRequests(session).done(task, deadline()), answer)
    assert [lease(fast, "first"), lease(slow, "first")] == [None, None]

    d.ask(lambda n: io.RegisterDataset(n, "m", "second", 2, 1))
    assert lease(fast, "second") is not None
    if by == "a range":
        assert lease(slow, "second") is not None
    else:
        train(slow, 1)
    train(slow, 5)
    train(fast, 50)

    assert (slow.clock, fast.clock) == (105, 150)
    assert d.core.read.model("m")["clock"] == 105
