"""Cuts of models in sync: when they are stored, and what is stored beside them."""

import numpy as np
import pytest
from msgspec.structs import replace

from paramserver import limits
from paramserver.core.shard_io import JournalLost, SnapshotFailed, SnapshotStored, StoreSnapshot
from paramserver.core.spec import ModelSpec
from paramserver.errors import FencedError
from paramserver.testing.shard_driver import InMemoryStore, ShardDriver
from paramserver.types import ModelKey, PartitionKey, PushId

from .partitions import ROSTER, WORKERS, complete, journaled, listed, ones, pending, spec, stage


def synced(partitions: int = 1) -> ModelSpec:
    """`spec` of a model in sync."""
    return spec(partitions, consistency={"mode": "sync"})


def cut_beside_what_is_due(partitions: int) -> ShardDriver:
    """A cut of a model in sync is wanted, and a moment later all of a small model that is not will be due."""
    driver = ShardDriver()
    driver.serve(synced(partitions), workers=ROSTER)
    model = driver.view
    small = {"name": "small", "params": {"w": {"shape": [8]}}, "optimizer": {"name": "sum"}, "partitions": 4}
    driver.serve(ModelSpec.parse(small))
    driver.push({i: np.ones(2, np.float32) for i in range(4)})
    driver.advance(limits.SNAPSHOT_INTERVAL_S - 0.1)
    driver.eager, driver.view = False, model
    driver.commit(0, cut=True)
    return driver


def test_a_cut_is_stored_reported_and_what_a_rollback_goes_back_to() -> None:
    """After a recovery under a new timeline the model is that of the cut's clock; older pushes hear where it is."""
    store = InMemoryStore()
    driver = ShardDriver(store)
    view = driver.serve(synced(2), workers=ROSTER)
    driver.advance(1.0)
    stage(driver, 0, 0, 1.0)
    driver.commit(0, listed(0, 0), cut=True)
    driver.advance(1.0)
    reports = driver.reports
    stage(driver, 0, 1, 1.0)
    driver.commit(1, listed(0, 1))
    stage(driver, 0, 2, 1.0)
    assert [row[2:] for row in driver.core.cuts()] == [(0, 1, 1), (1, 1, 1)]
    assert reports > 2

    driver.send(replace(view, timeline=1, clock=1, owned={0: 5, 1: 6}, source=1))

    assert driver.values(0) == [1.0] * 4
    assert (driver.pull(0).version, driver.pull(1).incarnation) == (1, 6)
    assert driver.core.held_bytes == 0
    with pytest.raises(FencedError) as caught:
        stage(driver, 0, 1, 1.0, seq=9, timeline=0)
    assert caught.value.members == {"timeline": 1, "clock": 1}
    stage(driver, 0, 1, 2.0, seq=10, timeline=1)
    driver.commit(1, listed(0, 1), timeline=0)
    driver.commit(1, listed(0, 1))
    assert driver.values(0) == [3.0] * 4


def test_of_the_cuts_that_wait_the_oldest_and_the_newest_are_stored() -> None:
    """Of each partition, while another is being stored: so one completes however fast they come."""
    driver = ShardDriver()
    driver.serve(synced(2), workers=ROSTER)
    driver.advance(1.0)
    driver.eager = False

    for t in range(4):
        driver.commit(t, cut=True)
    stored = []
    for _ in range(6):
        driver.advance(1.0)
        for effect in tuple(driver.pending):
            assert isinstance(effect, StoreSnapshot)
            stored.append((effect.capture.key.index, effect.capture.clock))
            driver.complete()

    assert stored[:3] == [(0, 1), (1, 1), (0, 2)]
    assert sorted(stored[3:]) == [(0, 4), (1, 4)]


def test_cuts_and_what_else_is_due_share_the_way() -> None:
    """Neither cuts without an end nor models in async starve: while both wait each gets half of the bytes."""
    driver = cut_beside_what_is_due(2)
    driver.commit(1, cut=True)
    driver.advance(0.1)

    stored = []
    for t in range(2, 8):
        (effect,) = driver.pending
        assert isinstance(effect, StoreSnapshot)
        stored.append("cut" if effect.cut else effect.capture.key.index)
        driver.commit(t, cut=True)
        driver.complete()
        driver.advance(1.0)

    assert stored == ["cut", 0, 1, "cut", 2, 3]


def test_a_snapshot_does_not_overtake_a_cut_of_its_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut is older, and stored after it would be taken for the newest state."""
    driver = ShardDriver()
    driver.serve(journaled(partitions=2, consistency={"mode": "sync"}), workers=ROSTER)
    driver.advance(10.0)
    driver.eager = False
    driver.commit(0, cut=True)
    monkeypatch.setattr(limits, "SNAPSHOT_JOURNAL_BYTES", 1)
    driver.submit({1: ones()}, PushId(WORKERS[0], 1, 0), clock=1)

    stored = []
    while snapshots := pending(driver, StoreSnapshot):
        stored += [(e.capture.key.index, e.cut) for e in snapshots]
        complete(driver, StoreSnapshot)
        driver.advance(0.1)

    assert stored == [(0, True), (1, True), (1, False)]


@pytest.mark.parametrize("ack", ["applied", "journaled"])
def test_a_cut_that_could_not_be_stored_is_tried_again(ack: str) -> None:
    """The leader waits for it, and begins no other and moves nothing till then."""
    driver = ShardDriver()
    driver.serve(journaled(ack=ack, consistency={"mode": "sync"}), workers=ROSTER)
    driver.advance(10.0)
    driver.eager = False
    driver.commit(0, cut=True)
    (store,) = pending(driver, StoreSnapshot)
    driver.pending.remove(store)
    driver.send(SnapshotFailed(store.capture.key, 1, store.capture.version))
    driver.settle()
    driver.advance(1.0)
    driver.settle()

    assert [row[4] for row in driver.core.cuts()] == [1]


def test_a_cut_that_cannot_be_stored_holds_up_no_other() -> None:
    """Neither cuts of others, nor what else has changed."""
    driver = cut_beside_what_is_due(3)
    bad, failed = PartitionKey(ModelKey("m", 1), 0), 0
    for _ in range(30):
        while driver.pending:
            (store,) = driver.pending
            assert isinstance(store, StoreSnapshot)
            if store.capture.key == bad:
                failed += 1
                driver.pending.clear()
                driver.send(SnapshotFailed(bad, 1, store.capture.version))
            else:
                driver.complete()
        driver.advance(0.1)

    assert failed == 3
    assert [row[2:] for row in driver.core.cuts()] == [(0, 1, 0), (1, 1, 1), (2, 1, 1)]
    assert [row[5] for row in driver.core.partitions() if row[0] == "small"] == [1] * 4


def test_a_cut_is_stored_where_it_is_asked_for_at_the_present_clock_or_one_to_come() -> None:
    """Once, of a model that rests or of one that has not come there yet."""
    driver = ShardDriver()
    view = driver.serve(synced(), workers=ROSTER)
    driver.advance(1.0)
    stage(driver, 0, 0, 1.0)
    driver.commit(0, listed(0, 0))

    driver.send(replace(view, clock=1, cut_asked=1))
    driver.send(replace(view, clock=1, cut_asked=1))
    driver.advance(1.0)
    assert [row[4] for row in driver.core.cuts()] == [1]
    stored = driver.reports

    driver.send(replace(view, clock=1, cut_asked=2))
    driver.advance(9.0)
    assert ([row[4] for row in driver.core.cuts()], driver.reports) == ([1], stored)
    stage(driver, 0, 1, 1.0)
    driver.commit(1, listed(0, 1))
    driver.advance(1.0)
    assert [row[4] for row in driver.core.cuts()] == [2]


def test_a_move_that_was_called_off_stores_nothing_in_the_place_of_a_cut() -> None:
    """What was to be stored for the move is not, when its first attempt failed and the partition stays."""
    store = InMemoryStore()
    driver = ShardDriver(store)
    view = driver.serve(synced(), workers=ROSTER)
    driver.advance(1.0)
    driver.eager = False
    driver.send(replace(view, release={0: 7}))
    (urgent,) = driver.pending
    assert isinstance(urgent, StoreSnapshot)
    driver.pending.clear()
    driver.send(SnapshotFailed(urgent.capture.key, urgent.capture.token, urgent.capture.version, urgent=True))
    driver.send(view)
    driver.eager = True
    stage(driver, 0, 0, 1.0)
    driver.commit(0, listed(0, 0), cut=True)
    driver.advance(5.0)

    assert [c.clock for c in store.kept[urgent.capture.key]] == [1, 0]


def test_before_the_first_commit_there_is_a_cut() -> None:
    """A synchronous model is stored at the clock it begins with, so that a recovery always has where to go."""
    driver = ShardDriver()
    driver.serve(synced(2))
    driver.advance(1.0)

    assert [row[2:] for row in driver.core.cuts()] == [(0, 1, 0), (1, 1, 0)]


def test_a_journaled_model_has_no_cut_before_the_first_commit() -> None:
    """A recovery never goes back to it, so its first values are not held in memory beside the present ones."""
    driver = ShardDriver()
    driver.serve(journaled(consistency={"mode": "sync"}))
    driver.advance(10.0)

    (p,) = driver.core.models["m"].partitions.values()
    assert p.cut is None
    assert not list(driver.core.cuts())
    assert [c.version for c in driver.store.kept[p.key]] == [0]


@pytest.mark.parametrize("lost", [0, 1], ids=["being written", "waiting"])
def test_a_cut_that_redis_lost_is_stored_again_before_what_came_after_it(lost: int) -> None:
    """The leader waits for it; and what is stored last is taken for the newest state, so that is all there is."""
    driver = ShardDriver()
    driver.serve(journaled(partitions=2, consistency={"mode": "sync"}), workers=ROSTER)
    driver.advance(10.0)
    driver.eager = False
    driver.commit(0, cut=True)
    driver.commit(1)
    (store,) = pending(driver, StoreSnapshot)
    assert (store.capture.key.index, store.cut) == (0, True)
    key = PartitionKey(ModelKey("m", 1), lost)

    driver.send(JournalLost(key, 1))
    driver.settle()

    assert [row[2:] for row in driver.core.cuts()] == [(0, 1, 1), (1, 1, 1)]
    assert [c.clock for c in driver.store.kept[key]] == [2, 1]
    assert driver.store.cuts[key, 1].clock == 1


def test_a_cut_that_redis_lost_is_tried_until_it_is_stored() -> None:
    """No failure lets what came after it go before."""
    driver = ShardDriver()
    driver.serve(journaled(consistency={"mode": "sync"}), workers=ROSTER)
    driver.advance(10.0)
    driver.eager = False
    driver.commit(0, cut=True)
    driver.commit(1)
    (first,) = pending(driver, StoreSnapshot)
    driver.send(JournalLost(first.capture.key, 1))
    stored = []
    for outcome in (SnapshotStored, SnapshotFailed, SnapshotStored, SnapshotFailed, SnapshotStored):
        (store,) = pending(driver, StoreSnapshot)
        driver.pending.remove(store)
        stored.append((store.capture.clock, store.cut, store.urgent))
        driver.send(outcome(store.capture.key, 1, store.capture.version, store.urgent))
        driver.advance(1.0)

    cut, whole = (1, True, True), (2, False, True)
    assert stored == [(1, True, False), cut, cut, whole, whole]
    assert [row[4] for row in driver.core.cuts()] == [1]


def test_a_cut_that_was_dropped_for_a_move_is_taken_anew_when_it_is_asked_for() -> None:
    """Redis was emptied, so the leader gave it up, and had the partition moved before it was stored again."""
    driver = ShardDriver()
    serving = driver.serve(synced(), workers=ROSTER)
    driver.commit(0, cut=True)
    driver.advance(1.0)
    driver.store = InMemoryStore()
    driver.eager = False
    renewed = replace(serving, clock=1, owned={0: 9}, kept_from={0: 1})
    driver.send(renewed)
    driver.send(replace(renewed, release={0: 7}))
    driver.send(renewed)
    driver.settle()
    assert not list(driver.core.cuts())

    driver.send(replace(renewed, cut_asked=1))
    driver.settle()

    assert [row[4] for row in driver.core.cuts()] == [1]
