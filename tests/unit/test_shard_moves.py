"""Moves of partitions between live shards: holding requests, handing over, calling off."""

import pytest
from msgspec.structs import replace

from paramserver import limits
from paramserver.core.commit import Commit, Contribution
from paramserver.core.shard.effects import Apply, LoadPartition, PullDone, StoreSnapshot
from paramserver.core.shard.events import CaptureReceived, JournalLost, RosterChanged, SnapshotDone
from paramserver.testing.shard_driver import ShardDriver
from paramserver.types import ModelKey, PartitionKey, PushId

from .partitions import (
    LEVELS,
    ROSTER,
    WORKERS,
    complete,
    done,
    listed,
    ones,
    pending,
    refused,
    released,
    request_release,
    serving,
    spec,
    stage,
    successor,
    view,
)

KEY = PartitionKey(ModelKey("m", 1), 0)


@pytest.mark.parametrize("ack", LEVELS)
def test_a_move_is_lossless_at_every_level(ack: str) -> None:
    """In a move running pushes end, new ones wait, and the next owner has the whole state with every push."""
    driver = serving(spec(ack=ack))
    driver.push({0: ones()}, PushId("w", 1, 0))
    driver.eager = False
    running = driver.submit({0: ones(2.0)}, PushId("w", 1, 1))
    queued = driver.submit({0: ones(4.0)}, PushId("w", 1, 2))

    request_release(driver, 0)
    late = driver.submit({0: ones(8.0)}, PushId("w", 1, 3))
    assert not any(isinstance(e, StoreSnapshot) and e.urgent for e in driver.pending)
    complete(driver, Apply)
    (snapshot,) = (e for e in driver.pending if isinstance(e, StoreSnapshot) and e.urgent)
    assert snapshot.capture.version == 2
    assert released(driver) == []
    assert driver.values() == [3.0] * 4
    reports = driver.reports
    driver.settle()
    assert released(driver) == [(0, 1, 2, 1)]
    assert driver.reports == reports + 1
    assert done(driver, running).version == 2
    assert not {queued, late} & driver.replies.keys()

    after = successor(driver)
    assert {refused(driver, r).code for r in (queued, late)} == {"wrong_owner"}
    assert [after.push({0: ones(2.0**i)}, PushId("w", 1, i)).duplicate for i in range(4)] == [True, True, False, False]
    assert after.values() == [15.0] * 4
    assert after.pull(0).version == 4


def test_what_is_buffered_moves_along_with_its_deadline() -> None:
    """Buffered pushes move with their deadline: if it passes during the move, the next owner applies the mean."""
    driver = serving(spec(consistency={"mode": "buffered", "count": 3, "interval_ms": 500}))
    for i, value in enumerate((1.0, 3.0)):
        driver.push({0: ones(value)}, PushId("w", 1, i))

    request_release(driver, 0)
    driver.advance(1.0)
    assert released(driver) == [(0, 1, 0, 1)]
    after = successor(driver)
    after.push({0: ones(5.0)}, PushId("w", 1, 2))

    assert after.values() == [3.0] * 4
    assert after.core.held_bytes == driver.core.held_bytes == 0


def test_a_partition_that_enters_sync_at_its_next_owner_takes_all_commits_of_the_phase() -> None:
    """If a phase has begun when a partition is loaded with a buffer, pulls wait for its flush and the commits."""
    driver = serving(spec(consistency={"mode": "buffered", "count": 9, "interval_ms": 60_000}))
    driver.push({0: ones(8.0)}, PushId("w", 1, 0))
    driver.advance(limits.SNAPSHOT_INTERVAL_S)
    after = ShardDriver(driver.store, eager=False)
    sync = view(driver).spec.patched({"consistency": {"mode": "sync"}})
    phase = {"timeline": 1, "began": 5, "clock": 6, "commits": (Commit(5, 1, (), 2, 0, False),)}

    after.send(replace(view(driver), owned={0: 2}, source="snapshot", spec=sync, revision=2, **phase))
    complete(after, LoadPartition)
    pull = after.ask((0,), min_clock=6, wait_s=5.0)
    after.send(view(after))
    assert pull not in after.replies
    after.settle()

    pulled = after.outcome(pull)
    assert isinstance(pulled, PullDone)
    assert (pulled.version, after.values(), after.resyncs) == (6, [8.0] * 4, 0)


def test_a_push_that_waits_while_a_partition_enters_sync_is_in_its_commit() -> None:
    """If buffered mode ends while a partition is suspended, a push that waits meanwhile is staged, and not flushed."""
    driver = serving(spec(consistency={"mode": "buffered", "count": 9, "interval_ms": 60_000}), workers=ROSTER)
    driver.push({0: ones(8.0)}, PushId("w", 1, 0))
    request_release(driver, 0)
    driver.patch({"consistency": {"mode": "sync"}}, timeline=1, clock=5, began=5)

    driver.submit({0: ones(2.0)}, PushId(WORKERS[0], 1, 0), clock=5)
    request_release(driver)
    assert driver.values() == [8.0] * 4
    stage(driver, 1, 5, 4.0)
    driver.commit(5, listed(0, 5), listed(1, 5))

    assert driver.values() == [11.0] * 4


@pytest.mark.parametrize("ack", LEVELS)
def test_what_is_staged_moves_along_and_commits_catch_up(ack: str) -> None:
    """Staged parts move, and the next owner applies a commit decided during the move, with the same bytes."""
    adam = spec(ack=ack, optimizer={"name": "adam", "lr": 0.1}, consistency={"mode": "sync"})
    driver, straight = ShardDriver(), ShardDriver()
    decided = tuple(Contribution(w, 1, i, 0) for i, w in enumerate(WORKERS))
    for d in (driver, straight):
        d.serve(adam, workers=ROSTER)
        for i, w in enumerate(WORKERS):
            d.push({0: ones(1.0 + i)}, PushId(w, 1, 0), clock=0)
    straight.commit(0, *decided)

    request_release(driver, 0)
    driver.commit(0, *decided)
    assert released(driver) == [(0, 1, 0, 1)]
    commits = tuple(driver.core.models["m"].commits.values())
    after = successor(driver, clock=1, commits=commits)

    ours, theirs = (d.pull(0).parts[0] for d in (after, straight))
    assert ours.version == 1
    assert ours.state.values.tobytes() == theirs.state.values.tobytes()
    assert after.core.held_bytes == driver.core.held_bytes == 0
    assert after.push({0: ones(1.0)}, PushId(WORKERS[0], 1, 0), clock=0).duplicate


def test_settings_that_change_meanwhile_are_taken_up_by_the_next_owner() -> None:
    """Settings changed during a move are adopted by the next owner, after those that the state carries."""
    driver = serving(spec(optimizer={"name": "sgd", "lr": 1.0}, consistency={"mode": "buffered", "count": 2}))
    driver.push({0: ones(4.0)}, PushId("w", 1, 0))

    request_release(driver, 0)
    driver.patch({"optimizer": {"lr": 10.0}, "consistency": {"mode": "async"}})
    assert [row.revision for row in driver.core.partitions()] == [1]
    after = successor(driver)

    assert after.values() == [-4.0] * 4
    after.push({0: ones(1.0)}, PushId("w", 1, 1))
    assert after.values() == [-14.0] * 4
    assert [row.revision for row in after.core.partitions()] == [2]


@pytest.mark.parametrize("ack", LEVELS)
def test_a_move_that_is_called_off_goes_on_as_if_nothing_had_been(ack: str) -> None:
    """When a move is called off, waiting pushes run, due flushes are made and new settings are adopted."""
    driver = serving(spec(ack=ack, consistency={"mode": "buffered", "count": 9, "interval_ms": 500}))
    driver.push({0: ones(2.0)}, PushId("w", 1, 0))
    request_release(driver, 0)
    assert released(driver) == [(0, 1, 0, 1)]
    waiting = driver.submit({0: ones(6.0)}, PushId("w", 1, 1))
    driver.advance(1.0)
    driver.patch({"optimizer": {"clip_value": 100.0}}, release={0: 1})
    assert waiting not in driver.replies

    request_release(driver)

    assert released(driver) == []
    assert done(driver, waiting).state == "buffered"
    driver.advance(0.5)
    assert driver.values()[0] in (4.0, 8.0)
    assert [row.revision for row in driver.core.partitions()] == [2]
    version = driver.pull(0).version
    request_release(driver, 0, number=2)
    assert released(driver) == [(0, 1, version, 2)]


def test_a_release_request_under_another_number_is_another_request() -> None:
    """A partition released under one number is released again under the next, and its waiting push stays unapplied."""
    driver = serving(spec())
    request_release(driver, 0, number=1)
    waiting = driver.submit({0: ones()}, PushId("w", 1, 0))
    driver.eager = False

    request_release(driver, 0, number=2)
    driver.settle()

    assert waiting not in driver.replies
    assert released(driver) == [(0, 1, 0, 2)]
    after = successor(driver)
    assert refused(driver, waiting).code == "wrong_owner"
    assert not after.push({0: ones()}, PushId("w", 1, 0)).duplicate


def test_a_push_of_several_partitions_holds_up_nobody_else() -> None:
    """A push that waits for a moving partition blocks no other partition, and runs if the move is called off."""
    driver = serving(spec(2))

    request_release(driver, 0)
    both = driver.submit({0: ones(), 1: ones()}, PushId("w", 1, 0))
    other = driver.push({1: ones(2.0)}, PushId("w", 1, 1))
    assert (other.version, both in driver.replies) == (1, False)
    driver.send(CaptureReceived("m", 0, request=90))
    assert 90 in driver.replies
    request_release(driver)

    assert [p.version for p in done(driver, both).parts] == [1, 2]


def test_a_request_waits_no_longer_than_a_lease_for_a_move() -> None:
    """A request that has waited LEASE_S for a move gets 503 `loading`."""
    driver = serving(spec())
    request_release(driver, 0)
    request = driver.submit({0: ones()}, PushId("w", 1, 0))

    driver.advance(limits.LEASE_S)

    assert refused(driver, request).code == "loading"


def test_a_partition_that_is_still_being_loaded_is_handed_over_as_soon_as_it_is_there() -> None:
    """A partition whose release is requested while it is loading is handed over as soon as it is loaded."""
    driver = ShardDriver(eager=False)
    driver.serve(spec())
    request_release(driver, 0)
    assert [type(e) for e in driver.pending] == [LoadPartition]

    driver.settle()

    assert released(driver) == [(0, 1, 0, 1)]


def test_moves_wait_for_no_budget_and_are_tried_again() -> None:
    """Moves do not wait for the snapshot budget; they are written one by one, and retried a second after a failure."""
    driver = serving(spec(3))
    driver.push({i: ones() for i in range(3)})
    driver.eager = False
    driver.advance(limits.SNAPSHOT_INTERVAL_S)
    assert [e.capture.key.index for e in pending(driver, StoreSnapshot)] == [0]  # its write waits for the budget

    request_release(driver, 1, 2)
    _, first = driver.pending
    assert isinstance(first, StoreSnapshot)
    driver.pending.clear()
    driver.send(SnapshotDone(first.capture.key, 1, stored=False, urgent=True))
    assert [e.capture.key.index for e in pending(driver, StoreSnapshot)] == [2]
    driver.settle()
    assert released(driver) == [(2, 1, 1, 1)]
    driver.advance(1.0)
    driver.settle()

    assert sorted(released(driver)) == [(1, 1, 1, 1), (2, 1, 1, 1)]


def test_partitions_that_move_together_are_held_one_after_the_other() -> None:
    """A partition is served until those before it are stored: over a slow line, that takes minutes."""
    driver = serving(spec(3))
    driver.eager = False
    request_release(driver, 0, 1)
    waits, served = driver.submit({0: ones()}, PushId("w", 1, 1)), driver.submit({1: ones(2.0)}, PushId("w", 1, 2))
    complete(driver, Apply)
    assert (waits in driver.replies, done(driver, served).version) == (False, 1)

    complete(driver, StoreSnapshot)
    late = driver.submit({1: ones(4.0)}, PushId("w", 1, 3))
    assert released(driver) == [(0, 1, 0, 1)]
    driver.settle()

    assert released(driver) == [(0, 1, 0, 1), (1, 1, 1, 1)]
    assert late not in driver.replies


def test_a_partition_that_another_shard_may_have_answers_no_pull() -> None:
    """Once a partition is released, pulls wait for news of its owner: by then, the values here may be old."""
    driver = serving(spec())
    driver.push({0: ones()}, PushId("w", 1, 0))
    driver.eager = False
    request_release(driver, 0)
    assert driver.pull(0).version == 1
    driver.settle()
    called_off = driver.ask((0,))
    assert called_off not in driver.replies

    request_release(driver)
    assert isinstance(driver.outcome(called_off), PullDone)
    request_release(driver, 0, number=2)
    driver.settle()
    moved, late = driver.ask((0,)), driver.ask((0,))
    driver.send(replace(view(driver), owned={}, release={}))
    assert refused(driver, moved).code == refused(driver, late).code == "wrong_owner"


def test_a_pull_waits_no_longer_than_a_lease_for_a_move() -> None:
    """A pull that has waited LEASE_S for news of a released partition's owner gets 503 `loading`."""
    driver = serving(spec())
    request_release(driver, 0)
    pull = driver.ask((0,))

    driver.advance(limits.LEASE_S)

    assert refused(driver, pull).code == "loading"


def test_a_partition_whose_turn_never_comes_is_served_all_the_time() -> None:
    """A move that is called off before its partition is suspended leaves no trace."""
    driver = serving(spec(3))
    driver.eager = False
    request_release(driver, 0, 1)
    driver.send(replace(view(driver), release={0: 1}))
    driver.settle()
    driver.eager = True

    assert released(driver) == [(0, 1, 0, 1)]
    assert driver.push({1: ones()}, PushId("w", 1, 1)).version == 1


def test_a_partition_that_is_lost_lets_the_next_one_move() -> None:
    """If the partition that is suspended goes to another shard after all, the next one has its turn."""
    driver = serving(spec(3))
    driver.eager = False
    request_release(driver, 0, 1)
    driver.send(replace(view(driver), owned={1: 1, 2: 1}, release={1: 1}))
    driver.settle()

    assert released(driver) == [(1, 1, 0, 1)]


def test_the_last_snapshot_written_is_the_whole_state() -> None:
    """The snapshot for a move waits for an older one of the same partition, so that the whole state is written last."""
    driver = serving(spec())
    driver.push({0: ones()})
    driver.advance(limits.SNAPSHOT_INTERVAL_S + 1.0)
    driver.eager = False
    driver.submit({0: ones()})
    complete(driver, Apply)
    driver.advance(limits.SNAPSHOT_INTERVAL_S + 1.0)
    driver.submit({0: ones()})
    complete(driver, Apply)
    (older,) = driver.pending
    assert isinstance(older, StoreSnapshot)
    assert not older.urgent

    request_release(driver, 0)
    assert driver.pending == [older]
    assert driver.core.deadline() is None
    complete(driver, StoreSnapshot)
    (whole,) = driver.pending
    assert isinstance(whole, StoreSnapshot)
    assert (whole.urgent, whole.capture.version) == (True, 3)
    driver.settle()

    assert [c.version for c in driver.store.kept[KEY]] == [3, 2]


def test_staged_parts_of_ended_workers_stay_while_a_partition_is_suspended() -> None:
    """Staged parts of ended workers stay while it is suspended, and are dropped when the move is called off."""
    driver = serving(spec(consistency={"mode": "sync", "late": "fold"}), workers=ROSTER)
    driver.commit(0)
    driver.push({0: ones()}, PushId(WORKERS[0], 1, 0), clock=0)
    request_release(driver, 0)

    driver.send(RosterChanged(view(driver).model, {}))
    assert driver.core.held_bytes == 16
    driver.send(replace(view(driver), workers={}, release={}))

    assert driver.core.held_bytes == 0


def test_the_document_that_calls_a_move_off_takes_nothing_from_the_commits_that_it_brings() -> None:
    """A document that calls off a move applies its commits before it drops staged parts of ended workers."""
    driver = serving(spec(2, consistency={"mode": "sync", "late": "fold"}), workers=ROSTER)
    driver.push({0: ones(), 1: ones()}, PushId(WORKERS[0], 1, 0), clock=0)
    driver.commit(0)
    request_release(driver, 0)

    commit = Commit(1, 0, (listed(0, 0),), 1, 1, False)
    driver.send(replace(view(driver), clock=2, commits=(commit,), workers={}, release={}))

    assert [driver.values(i) for i in (0, 1)] == [[1.0] * 4] * 2
    assert driver.core.held_bytes == 0


def test_the_next_owner_lets_go_what_ended_workers_pushed_ahead() -> None:
    """The next owner drops parts that ended workers staged ahead, which no roster it receives would name."""
    driver = serving(spec(consistency={"mode": "sync"}), workers=ROSTER)
    for worker in WORKERS:
        driver.push({0: ones()}, PushId(worker, 1, 0), clock=5)
    request_release(driver, 0)

    after = successor(driver, workers={WORKERS[1]: 1})

    assert set(after.core.models["m"].partitions[0].staged) == {(WORKERS[1], 1, 5)}


@pytest.mark.parametrize("ack", LEVELS)
@pytest.mark.parametrize("moved", [True, False])
def test_a_worker_that_goes_while_sync_ends_in_a_held_partition_is_in_the_mean(moved: bool, ack: str) -> None:
    """What a worker staged counts if it leaves after sync ended and before a move of the partition did."""
    driver = serving(spec(ack=ack, consistency={"mode": "sync"}), workers=ROSTER)
    stage(driver, 0, 0, 1.0)
    stage(driver, 1, 0, 3.0)
    request_release(driver, 0)
    driver.patch({"consistency": {"mode": "async"}})
    left = {WORKERS[0]: 1}
    driver.send(RosterChanged(KEY.model, left))

    if moved:
        driver = successor(driver, workers=left)
    else:
        driver.send(replace(view(driver), workers=left, release={}))

    assert driver.values() == [2.0] * 4


@pytest.mark.parametrize("ack", LEVELS)
def test_a_worker_that_went_before_sync_ended_is_not_in_the_mean_of_the_next_owner(ack: str) -> None:
    """What a worker staged does not count if it left in sync, though the partition was suspended then and moves on."""
    driver, after = serving(spec(ack=ack, consistency={"mode": "sync"}), workers=ROSTER), ShardDriver()
    after.store = driver.store
    after.send(replace(view(driver), owned={}))
    stage(driver, 0, 0, 1.0)
    stage(driver, 1, 0, 3.0)
    request_release(driver, 0)
    left = {WORKERS[0]: 1}
    for shard in (driver, after):
        shard.send(RosterChanged(KEY.model, left))
        shard.patch({"consistency": {"mode": "async"}}, workers=left)

    after.send(replace(view(after), owned={0: 2}, source="snapshot"))

    assert after.values() == [1.0] * 4


def test_a_cut_is_not_all_that_is_handed_over() -> None:
    """A stored cut does not complete a move, because at level `applied` it lacks staged parts that are needed."""
    driver = serving(spec(consistency={"mode": "sync", "quorum": 0.5, "late": "fold"}), workers=ROSTER)
    driver.push({0: ones()}, PushId(WORKERS[0], 1, 1), clock=0)
    driver.push({0: ones(10.0)}, PushId(WORKERS[1], 1, 1), clock=0)
    driver.commit(0, Contribution(WORKERS[0], 1, 0, 0), cut=True)
    driver.eager = False
    driver.send(JournalLost(KEY, 1))

    request_release(driver, 0)
    cut = next(e for e in driver.pending if isinstance(e, StoreSnapshot) and e.cut)
    driver.complete(driver.pending.index(cut))
    assert released(driver) == []
    driver.settle()
    assert [row[0] for row in released(driver)] == [0]
    after = successor(driver)
    after.commit(1, Contribution(WORKERS[1], 1, 1, 0))
    assert after.values() == [11.0] * 4


def test_a_cut_does_not_pass_for_the_whole_state_of_its_clock() -> None:
    """At `applied` a cut lacks what is staged, and its last number says so: Redis may lose the whole state beside it.

    A new owner that finds the cut alone begins with another number than the one with which it was handed over.
    """
    driver = serving(spec(consistency={"mode": "sync"}), workers=ROSTER)
    driver.commit(0)
    stage(driver, 0, 1, 1.0)
    (p,) = driver.core.models["m"].partitions.values()
    cut, whole = p.capture(cut=True), p.capture()
    assert (cut.clock, len(cut.staged), len(whole.staged)) == (whole.clock, 0, 1)
    assert cut.lsn < whole.lsn == p.lsn

    request_release(driver, 0)
    driver.store.save(StoreSnapshot(cut, cut=True))
    after = ShardDriver(driver.store)
    after.serve(spec(consistency={"mode": "sync"}), owned={0: 2}, workers=ROSTER, source="snapshot")

    assert [r.lsn for r in driver.core.released()] == [whole.lsn]
    assert [r.from_lsn for r in after.core.partitions()] == [cut.lsn]
