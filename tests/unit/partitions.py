"""Helpers for tests of a shard's partitions: a model that sums its gradients, and a driver's replies and effects."""

from typing import Any

import numpy as np
from msgspec.structs import replace

from paramserver import limits
from paramserver.core.commit import Contribution
from paramserver.core.shard.effects import Journal, PushDone, StoreSnapshot
from paramserver.core.shard.events import ModelView
from paramserver.core.shard.journal import JournalEntry
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError
from paramserver.testing.shard_driver import ShardDriver
from paramserver.types import F32, PushId

WORKERS = ("r/w0", "r/w1")
ROSTER = dict.fromkeys(WORKERS, 1)
LEVELS = ("applied", "journaled")


def spec(partitions: int = 1, ack: str = "applied", size: int | None = None, **fields: Any) -> ModelSpec:
    """Return a model spec of `size` elements, by default four in each partition, all zeros."""
    return ModelSpec.parse(
        {
            "name": "m",
            "params": {"w": {"shape": [size or 4 * partitions]}},
            "optimizer": {"name": "sum"},
            "partitions": partitions,
            "ack": ack,
        }
        | fields
    )


def serving(model: ModelSpec, **owned: Any) -> ShardDriver:
    """Return a shard that serves this model; see `ShardDriver.serve`."""
    driver = ShardDriver()
    driver.serve(model, **owned)
    return driver


def ones(value: float = 1.0, size: int = 4) -> F32:
    """Return a gradient for one partition, all elements equal to `value`."""
    return np.full(size, value, np.float32)


def refused(driver: ShardDriver, request: int) -> PsError:
    """Return the error that a request was refused with."""
    outcome = driver.replies[request]
    assert isinstance(outcome, PsError)
    return outcome


def done(driver: ShardDriver, request: int) -> PushDone:
    """Return the outcome of a push."""
    outcome = driver.outcome(request)
    assert isinstance(outcome, PushDone)
    return outcome


def pending(driver: ShardDriver, kind: type) -> list[Any]:
    """Return the pending effects of this kind."""
    return [e for e in driver.pending if isinstance(e, kind)]


def complete(driver: ShardDriver, kind: type) -> None:
    """Complete the oldest pending effect of this kind."""
    driver.complete(next(i for i, e in enumerate(driver.pending) if isinstance(e, kind)))


def entries(driver: ShardDriver) -> list[JournalEntry]:
    """Return the entries of all pending journal writes."""
    return [entry for effect in pending(driver, Journal) for entry in effect.entries]


def journaled(partitions: int = 1, ack: str = "journaled", **fields: Any) -> ModelSpec:
    """Return the spec of a model that keeps a journal."""
    return spec(partitions, ack, **fields)


def slow(**fields: Any) -> ShardDriver:
    """Return a shard that serves `journaled(**fields)` and whose effects complete only when the test says so."""
    driver = ShardDriver(eager=False)
    driver.serve(journaled(**fields), workers=ROSTER)
    driver.settle()
    driver.advance(limits.SNAPSHOT_INTERVAL_S)
    driver.settle()
    return driver


def apply(driver: ShardDriver) -> None:
    """Complete all effects except journal writes and snapshots, which stay pending."""
    while any(not isinstance(e, Journal | StoreSnapshot) for e in driver.pending):
        driver.complete(next(i for i, e in enumerate(driver.pending) if not isinstance(e, Journal | StoreSnapshot)))


def listed(rank: int, clock: int) -> Contribution:
    """Return worker `rank`'s contribution to a clock, as a commit lists it."""
    return Contribution(f"r/w{rank}", 1, rank, clock)


def stage(driver: ShardDriver, rank: int, clock: int, value: float, seq: int | None = None, **fields: Any) -> PushDone:
    """Push `value` to the first partition as worker `rank`, for this clock; return the outcome."""
    push_id = PushId(f"r/w{rank}", 1, clock if seq is None else seq)
    return driver.push({0: ones(value)}, push_id, clock=clock, **fields)


def view(driver: ShardDriver) -> ModelView:
    """Return the newest view sent to the shard."""
    assert driver.view is not None
    return driver.view


def request_release(driver: ShardDriver, *indices: int, number: int = 1) -> None:
    """Send a view that asks the shard to release these partitions; without any, it cancels the moves."""
    driver.send(replace(view(driver), release=dict.fromkeys(indices, number)))


def released(driver: ShardDriver) -> list[tuple[int, ...]]:
    """Return (index, token, version, release number) of each partition that may be taken over, as in heartbeats."""
    return [row[2:6] for row in driver.core.released()]


def successor(driver: ShardDriver, **changes: Any) -> ShardDriver:
    """Return a shard on the same store that takes over all partitions; after that, the old owner's view has none."""
    after = ShardDriver(driver.store)
    owned = {i: 2 for i in range(view(driver).spec.partitions)}
    after.send(replace(view(driver), owned=owned, source="snapshot", release={}, **changes))
    driver.send(replace(view(driver), owned={}, release={}))
    return after
