"""Cuts of models in sync: when they are stored, and in which order with other snapshots."""

import numpy as np
import pytest
from msgspec.structs import replace

from paramserver import limits
from paramserver.core.partition_state import Capture
from paramserver.core.shard.effects import Apply, StoreSnapshot
from paramserver.core.shard.events import (
    AssignPart,
    CaptureReceived,
    JournalLost,
    SaveAll,
    SetReceived,
    SnapshotDone,
)
from paramserver.core.spec import ModelSpec
from paramserver.errors import FencedError
from paramserver.testing.shard_driver import InMemoryStore, ShardDriver
from paramserver.types import ModelKey, PartitionKey, PushId

from .partitions import LEVELS, ROSTER, WORKERS, complete, journaled, listed, ones, pending, serving, spec, stage


def synced(partitions: int = 1) -> ModelSpec:
    """Return `spec` of a model in sync."""
    return spec(partitions, consistency={"mode": "sync"})


def with_a_cut_to_store(ack: str) -> ShardDriver:
    """Return a shard of a sync model whose cut is about to be stored."""
    driver = serving(journaled(ack=ack, consistency={"mode": "sync"}), workers=ROSTER)
    driver.advance(10.0)
    driver.eager = False
    driver.commit(0, cut=True)
    return driver


def cut_beside_what_is_due(partitions: int) -> ShardDriver:
    """Return a shard with a requested cut of a sync model, 0.1 s before all of a small async model is due."""
    driver = serving(synced(partitions), workers=ROSTER)
    model = driver.view
    small = {"name": "small", "params": {"w": {"shape": [8]}}, "optimizer": {"name": "sum"}, "partitions": 4}
    driver.serve(ModelSpec.parse(small))
    driver.push({i: np.ones(2, np.float32) for i in range(4)})
    driver.advance(limits.SNAPSHOT_INTERVAL_S - 0.1)
    driver.eager, driver.view = False, model
    driver.commit(0, cut=True)
    return driver


def test_a_cut_is_stored_reported_and_what_a_rollback_goes_back_to() -> None:
    """A cut is stored and reported; a rollback under a new timeline returns to its clock and refuses older pushes."""
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
    """Of a partition's waiting cuts only the oldest and the newest are stored, so one completes at any rate of cuts."""
    driver = serving(synced(2), workers=ROSTER)
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
    """While cuts and other due snapshots wait, each kind gets half of the bytes written, so neither starves."""
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
    """A snapshot waits for an earlier cut of its partition, which, if stored last, would count as the newest state."""
    driver = serving(journaled(partitions=2, consistency={"mode": "sync"}), workers=ROSTER)
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
    """A cut whose write failed is written again: until it is stored, the leader begins no other cut and no move."""
    driver = with_a_cut_to_store(ack)
    (store,) = pending(driver, StoreSnapshot)
    driver.pending.remove(store)
    driver.send(SnapshotDone(store.capture.key, 1, stored=False))
    driver.settle()
    driver.advance(1.0)
    driver.settle()

    assert [row.clock for row in driver.core.cuts()] == [1]


def test_a_cut_that_cannot_be_stored_holds_up_no_other() -> None:
    """A cut that keeps failing delays neither the cuts of other partitions nor other due snapshots."""
    driver = cut_beside_what_is_due(3)
    bad, failed = PartitionKey(ModelKey("m", 1), 0), 0
    for _ in range(30):
        while driver.pending:
            (store,) = driver.pending
            assert isinstance(store, StoreSnapshot)
            if store.capture.key == bad:
                failed += 1
                driver.pending.clear()
                driver.send(SnapshotDone(bad, 1, stored=False))
            else:
                driver.complete()
        driver.advance(0.1)

    assert failed == 3
    assert [row[2:] for row in driver.core.cuts()] == [(0, 1, 0), (1, 1, 1), (2, 1, 1)]
    assert [row.durable_version for row in driver.core.partitions() if row.model == "small"] == [1] * 4


def test_a_cut_is_stored_where_it_is_asked_for_at_the_present_clock_or_one_to_come() -> None:
    """A cut asked for at the present or a later clock is stored once, as soon as the partition is at that clock."""
    driver = ShardDriver()
    view = driver.serve(synced(), workers=ROSTER)
    driver.advance(1.0)
    stage(driver, 0, 0, 1.0)
    driver.commit(0, listed(0, 0))

    driver.eager = False
    driver.send(replace(view, clock=1, cut_asked=1))
    driver.send(replace(view, clock=1, cut_asked=1))
    driver.complete()
    driver.advance(1.0)
    assert not driver.pending
    driver.eager = True
    assert [row.clock for row in driver.core.cuts()] == [1]
    stored = driver.reports

    driver.send(replace(view, clock=1, cut_asked=2))
    driver.advance(9.0)
    assert ([row.clock for row in driver.core.cuts()], driver.reports) == ([1], stored)
    stage(driver, 0, 1, 1.0)
    driver.commit(1, listed(0, 1))
    driver.advance(1.0)
    assert [row.clock for row in driver.core.cuts()] == [2]


def test_a_snapshot_for_a_move_does_not_pass_for_the_cut_that_is_asked_for() -> None:
    """A cut asked for while the whole partition is stored for a move, later called off, is stored all the same."""
    driver = ShardDriver()
    view = driver.serve(synced(), workers=ROSTER)
    driver.advance(1.0)
    driver.commit(0)
    driver.eager = False
    driver.send(replace(view, clock=1, release={0: 7}))
    (whole,) = pending(driver, StoreSnapshot)
    assert not whole.cut
    driver.send(replace(view, clock=1, cut_asked=1))
    driver.settle()
    driver.advance(1.0)
    driver.settle()

    assert [row.clock for row in driver.core.cuts()] == [1]


@pytest.mark.parametrize("ack", ["applied", "journaled", "fsynced"])
def test_a_cut_is_on_disk_where_the_level_says_so(ack: str) -> None:
    """A cut counts as stored only once it is on disk if the model's level is `fsynced`; other levels do not wait."""
    driver = with_a_cut_to_store(ack)

    assert [(store.cut, store.fsync) for store in pending(driver, StoreSnapshot)] == [(True, ack == "fsynced")]


def test_a_move_that_was_called_off_stores_nothing_in_the_place_of_a_cut() -> None:
    """A failed snapshot for a move is not retried once the move is called off, so it cannot replace a cut."""
    store = InMemoryStore()
    driver = ShardDriver(store)
    view = driver.serve(synced(), workers=ROSTER)
    driver.advance(1.0)
    driver.eager = False
    driver.send(replace(view, release={0: 7}))
    (urgent,) = driver.pending
    assert isinstance(urgent, StoreSnapshot)
    driver.pending.clear()
    driver.send(SnapshotDone(urgent.capture.key, urgent.capture.token, stored=False, urgent=True))
    driver.send(view)
    driver.eager = True
    stage(driver, 0, 0, 1.0)
    driver.commit(0, listed(0, 0), cut=True)
    driver.advance(5.0)

    assert [c.clock for c in store.kept[urgent.capture.key]] == [1, 0]


@pytest.mark.parametrize("when", ["while it is written", "once it is stored"])
@pytest.mark.parametrize("emptied", [False, True], ids=["in part", "entirely"])
def test_a_partition_that_moves_is_whole_in_redis_whatever_redis_loses(emptied: bool, when: str) -> None:
    """What Redis lost of a moving partition is stored again, its whole state last, before another shard takes it over.

    The new owner starts from the newest snapshot; from the cut, it would lack the commits since.
    """
    driver = ShardDriver()
    view = driver.serve(synced(), workers=ROSTER)
    driver.commit(0, cut=True)
    driver.advance(1.0)
    stage(driver, 0, 1, 1.0)
    driver.commit(1, listed(0, 1))
    driver.eager = False
    view = replace(view, clock=2, release={0: 7})
    driver.send(view)
    (whole,) = pending(driver, StoreSnapshot)
    at = [(0, driver.core.models["m"].partitions[0].version)]
    assert driver.core.present(ModelKey("m", 1), at)
    if when == "once it is stored":
        driver.settle()
        assert list(driver.core.released())
        assert not driver.core.present(ModelKey("m", 1), at), "its new owner may have newer values"

    if emptied:
        driver.store = InMemoryStore()
        driver.send(replace(view, owned={0: 2}, kept_from={0: 1}))
    else:
        driver.send(JournalLost(whole.capture.key, 1))
    assert not list(driver.core.released())
    driver.settle()
    driver.advance(1.0)
    driver.settle()

    assert [row.version for row in driver.core.released()] == [2]
    assert [c.clock for c in driver.store.kept[whole.capture.key]] == [2, 1]


def put(driver: ShardDriver, value: float) -> None:
    """Assign `value` to the first partition's elements."""
    request = driver.request()
    driver.send(SetReceived("m", (AssignPart(0, ones(value), "float32", True),), generation=1, request=request))


def fail(driver: ShardDriver) -> None:
    """Let the pending write of a cut fail."""
    (store,) = (e for e in pending(driver, StoreSnapshot) if e.cut)
    driver.pending.remove(store)
    driver.send(SnapshotDone(store.capture.key, store.capture.token, False, store.urgent))


def stored(driver: ShardDriver, clock: int) -> list[float]:
    """Return the first partition's values in the cut of that clock."""
    return [float(x) for x in driver.store.cuts[PartitionKey(ModelKey("m", 1), 0), clock].state.values]


@pytest.mark.parametrize("ack", LEVELS)
@pytest.mark.parametrize("when", ["before it is written", "while it is written", "once it is stored"])
def test_what_is_assigned_at_the_clock_of_a_cut_is_part_of_it(when: str, ack: str) -> None:
    """Values assigned before the next commit are stored as the cut of their clock, and a checkpoint of it has them."""
    driver = with_a_cut_to_store(ack)
    if when == "once it is stored":
        driver.settle()
    elif when == "before it is written":
        fail(driver)

    put(driver, 7.0)
    driver.settle()
    driver.advance(1.0)
    driver.settle()

    assert stored(driver, 1) == [7.0] * 4
    assert not list(driver.core.models["m"].partitions[0].operations)
    request = driver.request()
    driver.send(CaptureReceived("m", 0, generation=1, cut=1, request=request))
    capture = driver.outcome(request)
    assert isinstance(capture, Capture)
    assert capture.state.values.tolist() == [7.0] * 4


def test_the_last_of_several_assignments_is_in_the_cut_though_the_next_cut_waits_too() -> None:
    """Of a cut that waits, the newest capture is stored, also if a cut of a later clock has come since."""
    driver = ShardDriver()
    driver.serve(synced(), workers=ROSTER)
    driver.settle()
    driver.eager = False
    driver.commit(0, cut=True)
    for value in (7.0, 8.0, 9.0):
        put(driver, value)
        (assigning,) = (e for e in driver.pending if not isinstance(e, StoreSnapshot))
        driver.complete(driver.pending.index(assigning))
    driver.commit(1, cut=True)
    driver.settle()
    assert stored(driver, 1) == [9.0] * 4


def test_what_is_assigned_after_the_clock_of_a_cut_leaves_it_as_it_is() -> None:
    """Values assigned after a commit without a cut do not change an older cut, which would mix two clocks."""
    driver = serving(synced(), workers=ROSTER)
    driver.advance(1.0)
    driver.commit(0, cut=True)
    driver.advance(1.0)
    driver.commit(1)
    put(driver, 7.0)
    driver.advance(60.0)

    assert stored(driver, 1) == [0.0] * 4
    assert [row.clock for row in driver.core.cuts()] == [1]


@pytest.mark.parametrize("moved", [False, True], ids=["called off", "done"])
def test_what_is_assigned_at_the_clock_of_a_cut_is_part_of_it_also_after_a_move(moved: bool) -> None:
    """What was assigned before, during or after a move of a model that rests is stored as the cut of its clock."""
    driver = ShardDriver()
    resting = replace(driver.serve(synced(), workers=ROSTER), clock=1, cut=1)
    driver.commit(0, cut=True)
    driver.advance(1.0)
    driver.send(resting)
    driver.eager = False
    put(driver, 7.0)
    complete(driver, Apply)
    driver.send(replace(resting, release={0: 1}))
    fail(driver)
    driver.eager = True
    driver.settle()
    driver.advance(1.0)
    assert (stored(driver, 1), [row.version for row in driver.core.released()]) == ([0.0] * 4, [2])
    after = driver
    if moved:
        after = ShardDriver(driver.store)
        after.send(replace(resting, owned={0: 2}, sources={0: "snapshot"}))
    else:
        after.send(resting)
    after.advance(1.0)
    assert stored(after, 1) == [7.0] * 4

    put(after, 8.0)
    after.advance(1.0)

    assert stored(after, 1) == [8.0] * 4


def test_what_a_restore_sets_is_no_part_of_an_older_cut() -> None:
    """Values of a restore are left out of the cut of their clock: if it ends half done, the model can go back."""
    driver = serving(synced(), workers=ROSTER)
    driver.commit(0, cut=True)
    driver.advance(1.0)
    part = AssignPart(0, ones(7.0), "float32", True)
    driver.send(SetReceived("m", (part,), generation=1, restore=True, request=driver.request()))
    driver.advance(1.0)

    assert stored(driver, 1) == [0.0] * 4


def test_before_the_first_commit_there_is_a_cut() -> None:
    """A synchronous model has a cut of its first clock before any commit, so that a recovery always has a target."""
    driver = serving(synced(2))
    driver.advance(1.0)

    assert [row[2:] for row in driver.core.cuts()] == [(0, 1, 0), (1, 1, 0)]


def test_a_journaled_model_has_no_cut_before_the_first_commit() -> None:
    """A journaled model has no cut of its first clock, because a recovery never returns to it."""
    driver = serving(journaled(consistency={"mode": "sync"}))
    driver.advance(10.0)

    (p,) = driver.core.models["m"].partitions.values()
    assert p.cut is None
    assert not list(driver.core.cuts())
    assert [c.version for c in driver.store.kept[p.key]] == [0]


@pytest.mark.parametrize("lost", [0, 1], ids=["being written", "waiting"])
def test_a_cut_that_redis_lost_is_stored_again_before_what_came_after_it(lost: int) -> None:
    """A cut that Redis lost is stored again first, and then the whole state, since the last one stored counts."""
    driver = serving(journaled(partitions=2, consistency={"mode": "sync"}), workers=ROSTER)
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


def test_what_redis_lost_is_stored_again_beside_the_cut_before() -> None:
    """Where Redis has lost the last cut, another leader may know only of the one before it, and goes back to that."""
    driver = serving(synced(), workers=ROSTER)
    driver.commit(0, cut=True)
    driver.advance(10.0)
    (p,) = driver.core.models["m"].partitions.values()
    older = driver.store.cuts[p.key, 1]
    driver.commit(1, cut=True)
    driver.advance(10.0)
    driver.pinned = 2
    driver.store.kept[p.key], driver.store.cuts = [older], {(p.key, 1): older}
    driver.commit(2)

    driver.send(JournalLost(p.key, p.token, restarted=True))
    driver.settle()

    assert [c.clock for c in driver.store.kept[p.key]] == [3, 2, 1]
    assert driver.store.cuts[p.key, 1] is older


def test_a_cut_that_redis_loses_again_before_the_whole_state_is_stored_is_stored_again() -> None:
    """If Redis loses the cut just stored again, it goes first once more; a repeated report of that changes nothing."""
    driver = serving(synced(), workers=ROSTER)
    driver.commit(0, cut=True)
    driver.advance(10.0)
    driver.eager = False
    driver.commit(1)
    (p,) = driver.core.models["m"].partitions.values()

    driver.send(JournalLost(p.key, p.token, restarted=True))
    driver.complete()
    driver.store = InMemoryStore()
    driver.send(JournalLost(p.key, p.token, restarted=True))
    driver.send(JournalLost(p.key, p.token))
    driver.settle()

    assert [c.clock for c in driver.store.kept[p.key]] == [2, 1]
    assert driver.store.cuts[p.key, 1].clock == 1


def test_a_cut_that_redis_lost_is_tried_until_it_is_stored() -> None:
    """A cut that Redis lost is retried until it is stored, and no failure lets the whole state go first."""
    driver = serving(journaled(consistency={"mode": "sync"}), workers=ROSTER)
    driver.advance(10.0)
    driver.eager = False
    driver.commit(0, cut=True)
    driver.commit(1)
    (first,) = pending(driver, StoreSnapshot)
    driver.send(JournalLost(first.capture.key, 1))
    stored = []
    for succeeds in (True, False, True, False, True):
        (store,) = pending(driver, StoreSnapshot)
        driver.pending.remove(store)
        stored.append((store.capture.clock, store.cut, store.urgent))
        driver.send(SnapshotDone(store.capture.key, 1, succeeds, store.urgent))
        driver.advance(1.0)

    cut, whole = (1, True, True), (2, False, True)
    assert stored == [(1, True, False), cut, cut, whole, whole]
    assert [row.clock for row in driver.core.cuts()] == [1]


def test_a_cut_that_was_dropped_for_a_move_is_taken_anew_when_it_is_asked_for() -> None:
    """A cut dropped for a move after Redis was emptied is taken again when the leader asks for it."""
    driver = ShardDriver()
    serving = driver.serve(synced(2), workers=ROSTER)
    driver.commit(0, cut=True)
    driver.advance(1.0)
    driver.store = InMemoryStore()
    driver.eager = False
    renewed = replace(serving, clock=1, owned={0: 8, 1: 9}, kept_from={0: 1, 1: 1})
    driver.send(renewed)
    driver.send(replace(renewed, release={1: 7}))
    driver.send(renewed)
    driver.settle()
    assert [row.partition for row in driver.core.cuts()] == [0]

    driver.send(replace(renewed, cut_asked=1))
    driver.settle()

    assert [row.clock for row in driver.core.cuts()] == [1, 1]


def test_what_changes_while_a_failed_snapshot_is_tried_again_is_stored_afterwards() -> None:
    """A push applied while the retry of a failed snapshot is being written is stored without another change."""
    driver = serving(spec())
    driver.push({0: ones()})
    driver.eager = False
    driver.advance(limits.SNAPSHOT_INTERVAL_S)
    (store,) = pending(driver, StoreSnapshot)
    driver.pending.clear()
    driver.send(SnapshotDone(store.capture.key, store.capture.token, stored=False))
    driver.advance(1.0)
    (store,) = pending(driver, StoreSnapshot)
    driver.eager = True
    driver.push({0: ones()})
    driver.complete()
    driver.advance(limits.SNAPSHOT_INTERVAL_S)

    assert [row.durable_version for row in driver.core.partitions()] == [2]


def test_a_shard_that_stops_writes_cuts_that_wait_at_once() -> None:
    """A shard that is about to stop writes a waiting cut beside the one it is writing, and nothing after it."""
    driver = serving(synced(3), workers=ROSTER)
    driver.advance(10.0)
    driver.eager = False
    driver.commit(0, cut=True)
    assert [(e.capture.key.index, e.urgent) for e in pending(driver, StoreSnapshot)] == [(0, False)]

    driver.send(SaveAll())
    driver.send(SaveAll())
    assert [(e.capture.key.index, e.urgent) for e in pending(driver, StoreSnapshot)] == [(0, False), (1, True)]
    assert [p.index for p in driver.core.unsaved()] == [0, 1, 2]
    driver.settle()
    driver.send(SaveAll())

    assert not driver.pending
    assert not list(driver.core.unsaved())
    assert [row.clock for row in driver.core.cuts()] == [1, 1, 1]


@pytest.mark.parametrize("reached", [True, False])
def test_a_cut_that_a_stopping_shard_waits_for_is_written_outside_the_budget(reached: bool) -> None:
    """If another shard is about to stop, a cut is written at once, outside the budget, and once."""
    driver = ShardDriver()
    view = driver.serve(synced(2), workers=ROSTER)
    driver.advance(1.0)
    driver.eager = False
    if reached:
        driver.commit(0)
    asked = replace(view, clock=1, cut_asked=1, cut_urgent=True)
    driver.send(asked)
    driver.send(asked)
    if not reached:
        driver.commit(0)
    while pending(driver, Apply):
        complete(driver, Apply)

    assert [(e.capture.key.index, e.cut, e.urgent) for e in pending(driver, StoreSnapshot)] == [(0, True, True)]
    complete(driver, StoreSnapshot)
    assert [(e.capture.key.index, e.cut, e.urgent) for e in pending(driver, StoreSnapshot)] == [(1, True, True)]
    driver.settle()
    driver.send(asked)
    assert not driver.pending
    assert [row.clock for row in driver.core.cuts()] == [1, 1]
