"""Unforeseen exceptions: the request is answered 500, nothing of it is applied, and those behind it go on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paramserver.core.shard import admission, pull_desk, set_operation
from paramserver.core.shard.effects import PullDone, PushDone
from paramserver.core.shard.events import AssignPart, CaptureReceived, SetReceived
from paramserver.core.shard.partition import Partition
from paramserver.core.shard.push_operation import PushOperation
from paramserver.core.spec import ModelSpec
from paramserver.errors import InternalError
from paramserver.testing.shard_driver import ShardDriver
from paramserver.types import F32, PushId


class Bug(Exception):
    """An exception that no code expects."""


def fails(*args: Any, **kwargs: Any) -> Any:
    """Stand in for a function with a bug: raise `Bug`."""
    raise Bug


def ones(n: int = 4) -> F32:
    return np.ones(n, np.float32)


def served(**fields: Any) -> ShardDriver:
    """Return a shard that serves two partitions of four elements with optimizer `sum`."""
    driver = ShardDriver()
    spec = {"name": "m", "params": {"w": {"shape": [8]}}, "optimizer": {"name": "sum"}, "partitions": 2} | fields
    driver.serve(ModelSpec.parse(spec), workers={"r/a": 1})
    return driver


def assign(driver: ShardDriver) -> int:
    """Assign sevens to partition 0; return the request."""
    request = driver.request()
    driver.send(SetReceived("m", (AssignPart(0, ones() * 7, "float32", True),), request=request))
    return request


def capture(driver: ShardDriver) -> int:
    """Ask for a capture of partition 0; return the request."""
    request = driver.request()
    driver.send(CaptureReceived("m", 0, request=request))
    return request


def told(driver: ShardDriver, request: int) -> None:
    """Assert that the request got an internal error whose cause, for the log, is the bug."""
    outcome = driver.replies[request]
    assert isinstance(outcome, InternalError)
    assert isinstance(outcome.__cause__, Bug)


def test_a_push_that_meets_a_bug_as_it_starts_leaves_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that meets a bug as it starts is applied nowhere, leaves every queue, and sent again is new."""
    driver = served()
    with monkeypatch.context() as broken:
        broken.setattr(PushOperation, "_start", fails)
        told(driver, driver.submit({0: ones(), 1: ones()}, PushId("w", 1, 1)))
    assert driver.core.waiting == 0
    again = driver.push({0: ones(), 1: ones()}, PushId("w", 1, 1))
    assert (again.duplicate, again.version, driver.values()) == (False, 1, [1.0] * 4)


def test_of_those_that_start_together_one_that_meets_a_bug_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pushes started by the same event, one that meets a bug is refused and the others are applied."""
    driver = served()
    driver.eager = False
    first = driver.submit({0: ones(), 1: ones()})
    behind = [driver.submit({i: ones()}, PushId("w", 1, i)) for i in (0, 1)]
    start = PushOperation._start

    def second_fails(op: PushOperation, *args: Any) -> Any:
        return fails() if op.event.parts[0].partition == 1 else start(op, *args)

    monkeypatch.setattr(PushOperation, "_start", second_fails)
    driver.settle()
    told(driver, behind[1])
    assert [isinstance(driver.replies[r], PushDone) for r in (first, behind[0])] == [True, True]
    assert (driver.values(0), driver.values(1)) == ([2.0] * 4, [1.0] * 4)


def test_an_assignment_that_meets_a_bug_as_it_starts_leaves_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """An assignment that meets a bug as it starts is refused and leaves the queue, so the next one is applied."""
    driver = served()
    with monkeypatch.context() as broken:
        broken.setattr(set_operation, "AssignTask", fails)
        told(driver, assign(driver))
    assign(driver)
    assert driver.values() == [7.0] * 4


@pytest.mark.parametrize(
    ("where", "name", "request_of"),
    [
        (admission, "check_push", lambda d: d.submit({0: ones()})),
        (admission, "must_ask", lambda d: d.submit({0: ones()}, PushId("r/a", 1, 1))),
        (admission, "check_set", assign),
        (Partition, "capture_at", capture),
    ],
)
def test_a_request_that_meets_a_bug_as_it_is_looked_at_is_over(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, request_of: Callable[[ShardDriver], int]
) -> None:
    """A request that meets a bug during admission is refused and no longer counted as waiting."""
    driver = served()
    monkeypatch.setattr(where, name, fails)
    told(driver, request_of(driver))
    assert driver.core.waiting == 0


def test_a_request_that_was_answered_before_the_bug_gets_no_second_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was answered before the bug gets no second answer."""
    driver = served()
    take = pull_desk.PullDesk.take

    def answers_and_fails(*args: Any) -> Any:
        take(*args)
        fails()

    monkeypatch.setattr(pull_desk.PullDesk, "take", answers_and_fails)
    assert isinstance(driver.outcome(driver.ask((0,))), PullDone)
    assert driver.core.waiting == 0


def test_a_pull_that_meets_a_bug_is_over_whoever_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting pull that meets a bug is refused, and the push that woke it is applied as usual."""
    driver = served()
    pull = driver.ask((0,), min_version=1, wait_s=10.0)
    with monkeypatch.context() as broken:
        broken.setattr(pull_desk, "_outcome_or_blocker", fails)
        assert driver.push({0: ones()}).version == 1
    told(driver, pull)
    assert driver.core.waiting == 0


def test_a_bug_that_leaves_something_half_done_is_not_kept_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that leaves a push staged on one of two partitions is raised, and ends the process (`Runtime.feed`)."""
    driver = served(consistency={"mode": "sync"})
    stage = Partition.stage

    def second_fails(p: Partition, *args: Any) -> Any:
        return fails() if p.index == 1 else stage(p, *args)

    monkeypatch.setattr(Partition, "stage", second_fails)
    with pytest.raises(Bug):
        driver.submit({0: ones(), 1: ones()}, PushId("r/a", 1, 1), clock=0)
