"""What tests of a shard's partitions have in common: a model that adds up what it gets, and what came of it."""

from typing import Any

import numpy as np
from msgspec.structs import replace

from paramserver import limits
from paramserver.core.shard_io import Contribution, Journal, JournalEntry, ModelView, PushDone, StoreSnapshot
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError
from paramserver.testing.shard_driver import ShardDriver
from paramserver.types import F32, PushId

WORKERS = ("r/w0", "r/w1")
ROSTER = {w: (1, i) for i, w in enumerate(WORKERS)}
LEVELS = ("applied", "journaled")


def spec(partitions: int = 1, ack: str = "applied", **fields: Any) -> ModelSpec:
    """Partitions of four elements, all zeros."""
    return ModelSpec.parse(
        {
            "name": "m",
            "params": {"w": {"shape": [4 * partitions]}},
            "optimizer": {"name": "sum"},
            "partitions": partitions,
            "ack": ack,
        }
        | fields
    )


def ones(value: float = 1.0) -> F32:
    """A gradient of one partition."""
    return np.full(4, value, np.float32)


def refused(driver: ShardDriver, request: int) -> PsError:
    """What that request was refused with."""
    outcome = driver.replies[request]
    assert isinstance(outcome, PsError)
    return outcome


def done(driver: ShardDriver, request: int) -> PushDone:
    """What came of that push."""
    outcome = driver.outcome(request)
    assert isinstance(outcome, PushDone)
    return outcome


def pending(driver: ShardDriver, kind: type) -> list[Any]:
    """The effects of that kind that nobody has completed."""
    return [e for e in driver.pending if isinstance(e, kind)]


def complete(driver: ShardDriver, kind: type) -> None:
    """Complete the oldest effect of that kind."""
    driver.complete(next(i for i, e in enumerate(driver.pending) if isinstance(e, kind)))


def entries(driver: ShardDriver) -> list[JournalEntry]:
    """What is on its way to journals."""
    return [entry for effect in pending(driver, Journal) for entry in effect.entries]


def journaled(partitions: int = 1, ack: str = "journaled", **fields: Any) -> ModelSpec:
    """`spec` of a model that keeps a journal."""
    return spec(partitions, ack, **fields)


def slow(**fields: Any) -> ShardDriver:
    """A shard that serves `journaled(**fields)` and whose effects complete when the test says so."""
    driver = ShardDriver(eager=False)
    driver.serve(journaled(**fields), workers=ROSTER, live_workers=2)
    driver.settle()
    driver.advance(limits.SNAPSHOT_INTERVAL_S)
    driver.settle()
    return driver


def apply(driver: ShardDriver) -> None:
    """Let everything be computed that is under way."""
    while any(not isinstance(e, Journal | StoreSnapshot) for e in driver.pending):
        driver.complete(next(i for i, e in enumerate(driver.pending) if not isinstance(e, Journal | StoreSnapshot)))


def listed(rank: int, clock: int, weight: float = 1.0) -> Contribution:
    """What worker `rank` has given to that clock, in a commit's list."""
    return Contribution(f"r/w{rank}", 1, rank, clock, weight)


def stage(driver: ShardDriver, rank: int, clock: int, value: float, seq: int | None = None, **fields: Any) -> PushDone:
    """Worker `rank` pushes `value` for that clock to the first partition."""
    push_id = PushId(f"r/w{rank}", 1, clock if seq is None else seq)
    return driver.push({0: ones(value)}, push_id, clock=clock, **fields)


def view(driver: ShardDriver) -> ModelView:
    """What the shard was told of its model last."""
    assert driver.view is not None
    return driver.view


def request_release(driver: ShardDriver, *indices: int, number: int = 1) -> None:
    """The leader wants these partitions handed over; without any, it calls the moves off."""
    driver.send(replace(view(driver), release=dict.fromkeys(indices, number)))


def released(driver: ShardDriver) -> list[tuple[int, ...]]:
    """The partitions that another shard may have now, as a heartbeat says."""
    return [row[2:] for row in driver.core.released()]


def successor(driver: ShardDriver, **changes: Any) -> ShardDriver:
    """The shard that gets the partitions next, which the old owner then loses."""
    after = ShardDriver(driver.store)
    owned = {i: 2 for i in range(view(driver).spec.partitions)}
    after.send(replace(view(driver), owned=owned, source="snapshot", release={}, **changes))
    driver.send(replace(view(driver), owned={}, release={}))
    return after
