"""Clocks that begin anew while partitions stay where they are: nobody waits for what is over, nothing of it counts."""

from typing import Any

import numpy as np
from msgspec.structs import replace

from paramserver.core.shard_io import AssignPart, Contribution, SetReceived
from paramserver.core.spec import ModelSpec
from paramserver.testing.shard_driver import ShardDriver
from paramserver.types import F32, PushId

ROSTER = {"a": (1, 0)}
SYNC = {"mode": "sync"}


def spec(**fields: Any) -> ModelSpec:
    """One partition of four elements, which adds up what it gets."""
    return ModelSpec.parse(
        {
            "name": "m",
            "params": {"w": {"shape": [4]}},
            "optimizer": {"name": "sum"},
            "consistency": SYNC,
            "partitions": 1,
            **fields,
        }
    )


def ones() -> F32:
    return np.ones(4, np.float32)


def listed(clock: int) -> Contribution:
    """What the worker did for that clock."""
    return Contribution("a", 1, 0, clock, 1.0)


def stage(driver: ShardDriver, seq: int, clock: int) -> None:
    """The worker pushes ones for that clock."""
    assert driver.view is not None
    driver.submit({0: ones()}, PushId("a", 1, seq), clock=clock, timeline=driver.view.timeline)


def put(driver: ShardDriver, value: float, *, restore: bool = False) -> None:
    """All values are assigned."""
    part = AssignPart(0, np.full(4, value, np.float32), "float32", True)
    driver.send(SetReceived(driver.request(), "m", (part,), restore=restore))


def durable_clock(driver: ShardDriver) -> int:
    """What the scheduler is told."""
    (row,) = driver.core.partitions()
    return row[7]


def test_the_clock_that_is_durable_is_reported_beside_the_version() -> None:
    """A commit raises both once it is journaled, an assignment the version alone; a new owner begins with it."""
    driver = ShardDriver()
    view = driver.serve(spec(ack="journaled"), workers=ROSTER)
    driver.eager = False
    driver.commit(0)
    assert durable_clock(driver) == 0
    driver.settle()
    put(driver, 7.0)
    driver.settle()
    assert durable_clock(driver) == 1
    after = ShardDriver(driver.store)
    after.send(replace(view, owned={0: 2}, source="snapshot", clock=1))
    assert durable_clock(after) == 1
