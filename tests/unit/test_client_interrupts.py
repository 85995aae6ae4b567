"""A Ctrl-C may come after any call that a worker's own code makes; the worker goes on afterwards.  Without I/O."""

import sys
from collections.abc import Callable
from functools import partial
from inspect import CO_GENERATOR
from itertools import count
from types import FrameType
from typing import Any

import numpy as np
import pytest

import paramserver as ps
from paramserver import client
from paramserver.client.iterations import Iterations
from paramserver.client.session import Session
from paramserver.client.task_requests import TaskRequests
from paramserver.errors import ConflictError, InDoubt, problem
from paramserver.net.calls import Call, Deadline

from .session_node import GRAD, Node, ok, opened
from .sharding import Now, answered, drive
from .test_client_uploads import Server

CLIENT = client.__path__[0]
LEASE = "/models/m/tasks/lease"


class CtrlC:
    """A profile function that raises KeyboardInterrupt once, as the n-th call in the client's modules returns.

    That is where Python looks for signals: a call is over, and what follows it is not begun.  Generators are left out:
    their return may be a `yield`, where no signal raises, and an exception would end them without their `finally`.
    """

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """See `sys.setprofile`."""
        of_call = event == "c_return" or (event == "return" and not frame.f_code.co_flags & CO_GENERATOR)
        if of_call and frame.f_code.co_filename.startswith(CLIENT):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


def interrupted(n: int, do: Callable[[], object], kept: list[BaseException] | None = None) -> bool:
    """Do it, interrupted as its n-th call returns; return whether it makes so many.

    The exception, and with it what the call had, is added to `kept`, as a notebook keeps the last one.
    """
    before, ctrl_c = sys.getprofile(), CtrlC(n)
    sys.setprofile(ctrl_c)
    try:
        do()
    except KeyboardInterrupt as e:
        if kept is not None:
            kept.append(e)
    finally:
        sys.setprofile(before)
    return ctrl_c.left <= 0


def nothing(node: Node, session: Session, now: Now) -> None:
    """Leave the worker as it is."""


def torn(node: Node, session: Session, now: Now) -> None:
    """Leave a push in doubt, so that the next call begins by joining again."""
    node.script["/push"] = [problem("in_doubt", "the answer was lost")] * 100
    with pytest.raises(InDoubt):
        drive(session.push(GRAD, Deadline.after(1.0, now)), node, now)
    node.script["/push"] = []


def make(how: str, node: Node, session: Session, now: Now) -> Any:
    """Make a call and return its result."""
    deadline, iterations = Deadline.after(30.0, now), Iterations(session)
    call: Call[Any]
    if how == "push":
        call = session.push(GRAD, deadline)
    elif how == "step":
        call = iterations.step(GRAD, {}, deadline, deadline)
    else:
        call = iterations.advance(deadline, deadline)
    return drive(call, node, now)


@pytest.mark.parametrize("prepare", [nothing, torn])
@pytest.mark.parametrize("way", ["step", "push", "clock"])
def test_a_worker_goes_on_after_ctrl_c(way: str, prepare: Callable[[Node, Session, Now], None]) -> None:
    """Wherever a synchronous call is interrupted, the next step is made at once, if need be after a `clock()`.

    If the call pushes, its exception must be gone: the push is in doubt as long as its id may be in use.
    """
    kept: list[BaseException] = []
    for n in count(1):
        node, now = Node("sync"), Now()
        session = opened(node)
        prepare(node, session, now)

        more = interrupted(n, partial(make, way, node, session, now), kept if way == "clock" else None)
        began_s = now()
        try:
            done = make("step", node, session, now)
        except ConflictError as e:
            if "has been reported finished" not in e.detail:
                raise
            make("clock", node, session, now)
            done = make("step", node, session, now)
        assert (done.state, now() - began_s < 1.0) == ("staged", True), n
        if not more:
            break
    assert n > 20


def test_a_loop_over_tasks_goes_on_after_ctrl_c() -> None:
    """Wherever a request for a task is interrupted, the next one gets a task at once, also in a notebook."""
    kept: list[BaseException] = []
    task = {"id": "d:0:0", "kind": "range", "dataset": "d", "pass": 0, "index": 0, "start": 0, "stop": 1}
    for n in count(1):
        node, now = Node("async"), Now()
        node.script[LEASE] = [ok({"task": task})] * 2
        session = opened(node)

        def lease(session: Session = session, node: Node = node, now: Now = now) -> Any:
            return drive(TaskRequests(session).lease("d", now), node, now)

        more = interrupted(n, lease, kept)
        began_s = now()
        assert lease() is not None
        assert now() - began_s < 1.0, n
        if not more:
            break
    assert n > 10


def test_a_creation_that_ctrl_c_ends_leaves_nothing_unfinished() -> None:
    """Wherever `create_model` is interrupted, the model is complete, or gone, so that its name is free."""
    values = {"a": np.ones((2, 2), np.float32), "b": np.zeros(3, np.float32)}
    for n in count(1):
        server = Server(values, 1)
        client = answered(ps.Client, server)
        more = interrupted(n, partial(client.create_model, "m", values, partitions=1))
        assert not server.here or server.complete, n
        if not more:
            break
    assert n > 20
