"""Timers of the shard's core, and what is freed when they are cancelled."""

import weakref
from functools import partial

import numpy as np
from msgspec.structs import replace

from paramserver import limits
from paramserver.core.shard.events import Tick
from paramserver.core.shard.timers import Timers
from paramserver.core.spec import ModelSpec
from paramserver.testing.shard_driver import ShardDriver
from paramserver.types import F32


def spec(partitions: int = 1, **fields: object) -> ModelSpec:
    settings = {"name": "m", "params": {"w": {"shape": [4 * partitions]}}, "partitions": partitions}
    return ModelSpec.parse(settings | {"optimizer": {"name": "sum"}} | fields)


def ones() -> F32:
    return np.ones(4, np.float32)


def test_calls_are_made_in_the_order_of_their_times() -> None:
    """Calls that are due are made in order of time, those of equal time in the order in which they were set."""
    timers, made = Timers(), list[str]()
    for name, at in (("b", 2.0), ("c", 2.0), ("a", 1.0), ("d", 9.0)):
        timers.at(at, partial(lambda name, now: made.append(name), name))

    timers.run(5.0)

    assert made == ["a", "b", "c"]
    assert timers.next == 9.0


def test_a_call_that_was_taken_back_is_not_made_and_wakes_nobody() -> None:
    """A cancelled call is not made and not the next; cancelling it again, or after it was made, does nothing."""
    timers, made = Timers(), list[float]()
    first, second = timers.at(1.0, made.append), timers.at(2.0, made.append)

    timers.cancel(first)
    timers.cancel(first)
    assert timers.next == 2.0
    timers.run(3.0)
    timers.cancel(second)

    assert made == [3.0]
    assert timers.next is None


def test_calls_that_were_taken_back_take_no_room() -> None:
    """Cancelled calls take no memory, even if thousands are set and cancelled while a distant one stays."""
    timers, made = Timers(), list[float]()
    timers.at(1e9, made.append)
    for i in range(1000):
        timers.cancel(timers.at(1e6 + i, made.append))

    assert len(timers._timers) < 4
    timers.run(2e9)
    assert made == [2e9]


def test_a_pull_that_was_answered_wakes_nobody_at_its_deadline() -> None:
    """A pull that was answered leaves no deadline, or each of thousands of long polls would be kept for a minute."""
    driver = ShardDriver()
    driver.serve(spec())
    for version in range(1, 4):
        poll = driver.ask((0,), min_version=version, wait_s=limits.WAIT_S_MAX)
        driver.push({0: ones()})
        assert poll in driver.replies

    driver.advance(2 * limits.SNAPSHOT_INTERVAL_S)

    assert driver.core.deadline() is None


def test_a_buffer_that_is_filled_again_and_again_has_one_deadline() -> None:
    """A buffer that is filled repeatedly has one deadline, that of its present contents."""
    driver = ShardDriver()
    driver.serve(spec(consistency={"mode": "buffered", "count": 2, "interval_ms": 3_600_000}))
    for _ in range(5):
        driver.push({0: ones()})
        driver.advance(10.0)

    assert driver.values() == [2.0] * 4
    assert driver.core.deadline() == driver.now - 10.0 + 3600.0


def test_a_partition_that_has_gone_is_not_kept_for_its_flush() -> None:
    """The values of a lost partition are freed at once, not at the deadline of its buffer."""
    driver = ShardDriver(checked=False)
    view = driver.serve(spec(consistency={"mode": "buffered", "count": 9, "interval_ms": 3_600_000}))
    driver.push({0: ones()})
    gone = weakref.ref(driver.pull(0).parts[0].state.values)

    driver.replies.clear()
    driver.store.kept.clear()
    driver.send(replace(view, owned={}))
    driver.send(Tick())

    assert gone() is None


def test_a_push_that_waited_for_a_partition_is_let_go_of_once_it_is_done() -> None:
    """The gradient of a push that waited for its partitions is freed once it is done, not at its deadline."""
    driver = ShardDriver(eager=False, checked=False)
    driver.serve(spec(2))
    gradient = ones()
    request = driver.submit({0: gradient, 1: gradient})
    gone = weakref.ref(gradient)
    del gradient

    driver.settle()

    assert request in driver.replies
    assert gone() is None
