"""Partitions that change hands while they live: holding, handing over, calling off, renewed tokens."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from paramserver import limits
from paramserver.core.shard_io import (
    Apply,
    AssignPart,
    CaptureReceived,
    Contribution,
    Journal,
    Journaled,
    JournalLost,
    JournalRefused,
    LoadPartition,
    ModelView,
    PushDone,
    RosterChanged,
    SetReceived,
    SnapshotFailed,
    SnapshotStored,
    StoreSnapshot,
)
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError
from paramserver.testing.shard_driver import ShardDriver, SnapshotShelf
from paramserver.types import F32, ModelKey, PartitionKey, PushId

WORKERS = ("r/w0", "r/w1")
ROSTER = {w: (1, i) for i, w in enumerate(WORKERS)}
LEVELS = ("applied", "journaled")
KEY = PartitionKey(ModelKey("m", 1), 0)


def spec(partitions: int = 1, ack: str = "applied", **fields: Any) -> ModelSpec:
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
    return np.full(4, value, np.float32)


def refused(driver: ShardDriver, request: int) -> PsError:
    outcome = driver.replies[request]
    assert isinstance(outcome, PsError)
    return outcome


def done(driver: ShardDriver, request: int) -> PushDone:
    outcome = driver.outcome(request)
    assert isinstance(outcome, PushDone)
    return outcome


def view(driver: ShardDriver) -> ModelView:
    assert driver.view is not None
    return driver.view


def wish(driver: ShardDriver, *indices: int, number: int = 1) -> None:
    """The leader wants these partitions handed over; without any, it calls the moves off."""
    driver.send(replace(view(driver), release=dict.fromkeys(indices, number)))


def complete(driver: ShardDriver, kind: type) -> None:
    driver.complete(next(i for i, e in enumerate(driver.pending) if isinstance(e, kind)))


def released(driver: ShardDriver) -> list[tuple[int, ...]]:
    return [row[2:] for row in driver.core.released()]


def successor(driver: ShardDriver, **changes: Any) -> ShardDriver:
    """The shard that gets the partitions next, which the old owner then loses."""
    after = ShardDriver(driver.store)
    owned = {i: 2 for i in range(view(driver).spec.partitions)}
    after.send(replace(view(driver), owned=owned, source="snapshot", release={}, **changes))
    driver.send(replace(view(driver), owned={}, release={}))
    return after


@pytest.mark.parametrize("ack", LEVELS)
def test_a_move_is_lossless_at_every_level(ack: str) -> None:
    """What runs ends, what is new waits, the whole state is stored at once; the next owner knows every push."""
    driver = ShardDriver()
    driver.serve(spec(ack=ack))
    driver.push({0: ones()}, PushId("w", 1, 0))
    driver.eager = False
    running = driver.submit({0: ones(2.0)}, PushId("w", 1, 1))
    queued = driver.submit({0: ones(4.0)}, PushId("w", 1, 2))

    wish(driver, 0)
    late = driver.submit({0: ones(8.0)}, PushId("w", 1, 3))
    assert not any(isinstance(e, StoreSnapshot) and e.urgent for e in driver.pending)
    complete(driver, Apply)
    (snapshot,) = (e for e in driver.pending if isinstance(e, StoreSnapshot) and e.urgent)
    assert snapshot.capture.version == 2
    assert released(driver) == []
    reports = driver.reports
    driver.settle()
    assert released(driver) == [(0, 1, 2, 1)]
    assert driver.reports == reports + 1
    assert done(driver, running).version == 2
    assert not {queued, late} & driver.replies.keys()
    assert driver.values() == [3.0] * 4

    after = successor(driver)
    assert {refused(driver, r).code for r in (queued, late)} == {"wrong_owner"}
    assert [after.push({0: ones(2.0**i)}, PushId("w", 1, i)).duplicate for i in range(4)] == [True, True, False, False]
    assert after.values() == [15.0] * 4
    assert after.pull(0).version == 4


def test_what_is_buffered_moves_along_with_its_deadline() -> None:
    """The interval ends while the partition is held: its next owner applies the mean of all of it."""
    driver = ShardDriver()
    driver.serve(spec(consistency={"mode": "buffered", "count": 3, "interval_ms": 500}))
    for i, value in enumerate((1.0, 3.0)):
        driver.push({0: ones(value)}, PushId("w", 1, i))

    wish(driver, 0)
    driver.advance(1.0)
    assert driver.values() == [0.0] * 4
    after = successor(driver)
    after.push({0: ones(5.0)}, PushId("w", 1, 2))

    assert after.values() == [3.0] * 4
    assert after.core.held_bytes == driver.core.held_bytes == 0


@pytest.mark.parametrize("ack", LEVELS)
def test_what_is_staged_moves_along_and_commits_catch_up(ack: str) -> None:
    """A commit that is decided while the partition is held is taken by its next owner, with the same bytes."""
    adam = spec(ack=ack, optimizer={"name": "adam", "lr": 0.1}, consistency={"mode": "sync"})
    driver, straight = ShardDriver(), ShardDriver()
    decided = tuple(Contribution(w, 1, i, 0) for i, w in enumerate(WORKERS))
    for d in (driver, straight):
        d.serve(adam, workers=ROSTER, live_workers=2)
        for i, w in enumerate(WORKERS):
            d.push({0: ones(1.0 + i)}, PushId(w, 1, 0), clock=0)
    straight.commit(0, *decided)

    wish(driver, 0)
    driver.commit(0, *decided)
    assert driver.pull(0).version == 0
    assert released(driver) == [(0, 1, 0, 1)]
    commits = tuple(driver.core.models["m"].commits.values())
    after = successor(driver, clock=1, commits=commits)

    ours, theirs = (d.pull(0).parts[0] for d in (after, straight))
    assert ours.version == 1
    assert ours.state.values.tobytes() == theirs.state.values.tobytes()
    assert after.core.held_bytes == driver.core.held_bytes == 0
    assert after.push({0: ones(1.0)}, PushId(WORKERS[0], 1, 0), clock=0).duplicate


def test_settings_that_change_meanwhile_are_taken_up_by_the_next_owner() -> None:
    """The state carries the settings it had; the newer ones come after it, in their order."""
    driver = ShardDriver()
    driver.serve(spec(optimizer={"name": "sgd", "lr": 1.0}, consistency={"mode": "buffered", "count": 2}))
    driver.push({0: ones(4.0)}, PushId("w", 1, 0))

    wish(driver, 0)
    driver.patch({"optimizer": {"lr": 10.0}, "consistency": {"mode": "async"}})
    assert [row[6] for row in driver.core.partitions()] == [1]
    after = successor(driver)

    assert after.values() == [-4.0] * 4
    after.push({0: ones(1.0)}, PushId("w", 1, 1))
    assert after.values() == [-14.0] * 4
    assert [row[6] for row in after.core.partitions()] == [2]


@pytest.mark.parametrize("ack", LEVELS)
def test_a_move_that_is_called_off_goes_on_as_if_nothing_had_been(ack: str) -> None:
    """What waited runs in its order, the flush that was due comes, and settings and commits are taken up."""
    driver = ShardDriver()
    driver.serve(spec(ack=ack, consistency={"mode": "buffered", "count": 9, "interval_ms": 500}))
    driver.push({0: ones(2.0)}, PushId("w", 1, 0))
    wish(driver, 0)
    assert released(driver) == [(0, 1, 0, 1)]
    waiting = driver.submit({0: ones(6.0)}, PushId("w", 1, 1))
    driver.advance(1.0)
    driver.patch({"optimizer": {"clip_value": 100.0}}, release={0: 1})
    assert waiting not in driver.replies

    wish(driver)

    assert released(driver) == []
    assert done(driver, waiting).state == "buffered"
    driver.advance(0.5)
    assert driver.values()[0] in (4.0, 8.0)
    assert [row[6] for row in driver.core.partitions()] == [2]
    wish(driver, 0, number=2)
    assert released(driver) == [(0, 1, driver.pull(0).version, 2)]


def test_a_wish_under_another_number_is_another_wish() -> None:
    """What was stored for the first does not count for the second unless nothing has run in between."""
    driver = ShardDriver()
    driver.serve(spec())
    wish(driver, 0, number=1)
    waiting = driver.submit({0: ones()}, PushId("w", 1, 0))
    driver.eager = False

    wish(driver, 0, number=2)
    driver.settle()

    assert released(driver) == [(0, 1, done(driver, waiting).version if waiting in driver.replies else 0, 2)]
    after = successor(driver)
    assert not after.push({0: ones()}, PushId("w", 1, 0)).duplicate


def test_a_push_of_several_partitions_holds_up_nobody_else() -> None:
    """It waits aside, so the partition that stays goes on; called off, it runs on both."""
    driver = ShardDriver()
    driver.serve(spec(2))

    wish(driver, 0)
    both = driver.submit({0: ones(), 1: ones()}, PushId("w", 1, 0))
    other = driver.push({1: ones(2.0)}, PushId("w", 1, 1))
    assert (other.version, both in driver.replies) == (1, False)
    driver.send(CaptureReceived(90, "m", 0))
    assert 90 in driver.replies
    wish(driver)

    assert [p.version for p in done(driver, both).parts] == [1, 2]


def test_a_request_waits_no_longer_than_a_lease_for_a_move() -> None:
    """Then it hears 503 and comes again."""
    driver = ShardDriver()
    driver.serve(spec())
    wish(driver, 0)
    request = driver.submit({0: ones()}, PushId("w", 1, 0))

    driver.advance(limits.LEASE_S)

    assert refused(driver, request).code == "loading"


def test_a_partition_that_is_still_being_loaded_is_handed_over_as_soon_as_it_is_there() -> None:
    """The wish came first."""
    driver = ShardDriver(eager=False)
    driver.serve(spec())
    wish(driver, 0)
    assert [type(e) for e in driver.pending] == [LoadPartition]

    driver.settle()

    assert released(driver) == [(0, 1, 0, 1)]


def test_moves_wait_for_no_budget_and_are_tried_again() -> None:
    """Two big partitions are written one after the other; a failure is repeated a second later."""
    driver = ShardDriver()
    driver.serve(spec(2))
    driver.push({0: ones(), 1: ones()})
    driver.eager = False
    driver.core.plan._usual.free_at = driver.now + 1000.0  # the budget is spent

    wish(driver, 0, 1)
    (first,) = driver.pending
    assert isinstance(first, StoreSnapshot)
    driver.pending.clear()
    driver.send(SnapshotFailed(first.capture.key, 1, 1, urgent=True))
    assert driver.pending == []
    driver.advance(1.0)
    driver.settle()

    assert sorted(released(driver)) == [(0, 1, 1, 1), (1, 1, 1, 1)]


def test_the_last_snapshot_written_is_the_whole_state() -> None:
    """While an older one of the same partition is being written, the hand-over waits for it, and for no other."""
    driver = ShardDriver()
    driver.serve(spec())
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

    wish(driver, 0)
    assert driver.pending == [older]
    assert driver.core.deadline(driver.now) is None
    complete(driver, StoreSnapshot)
    (whole,) = driver.pending
    assert isinstance(whole, StoreSnapshot)
    assert (whole.urgent, whole.capture.version) == (True, 3)
    driver.settle()

    assert [c.version for c in driver.store.kept[KEY]] == [3, 2]


def test_staged_parts_of_ended_workers_stay_while_a_partition_is_held() -> None:
    """A held state stands still; when the move is called off, they go."""
    driver = ShardDriver()
    driver.serve(spec(consistency={"mode": "sync", "late": "fold"}), workers=ROSTER, live_workers=2)
    driver.commit(0)
    driver.push({0: ones()}, PushId(WORKERS[0], 1, 0), clock=0)
    wish(driver, 0)

    driver.send(RosterChanged(view(driver).model, {}, 0))
    assert driver.core.held_bytes == 16
    driver.send(replace(view(driver), workers={}, release={}))

    assert driver.core.held_bytes == 0


@pytest.mark.parametrize("ack", LEVELS)
def test_a_renewed_token_keeps_memory_and_stores_everything_again(ack: str) -> None:
    """Redis was emptied: values, windows and what runs stay; replies of before wait for the new snapshot."""
    driver = ShardDriver()
    driver.serve(spec(ack=ack))
    driver.push({0: ones()}, PushId("w", 1, 0))
    driver.eager = False
    waiting = driver.submit({0: ones(2.0)}, PushId("w", 1, 1))
    complete(driver, Apply)
    running = driver.submit({0: ones(4.0)}, PushId("w", 1, 2))
    driver.store = SnapshotShelf()
    driver.pending = [e for e in driver.pending if isinstance(e, Apply)]

    driver.send(replace(view(driver), owned={0: 9}, renewed={0: 1}, source="snapshot"))

    (snapshot,) = (e for e in driver.pending if isinstance(e, StoreSnapshot))
    assert (snapshot.urgent, snapshot.capture.token, snapshot.capture.version) == (True, 9, 2)
    assert [row[3:6] for row in driver.core.partitions()] == [(9, 2, 0)]
    complete(driver, Apply)
    if ack == "journaled":
        (journal,) = (e for e in driver.pending if isinstance(e, Journal))
        assert [(e.token, e.lsn) for e in journal.entries] == [(9, 4)]
        driver.send(Journaled(KEY, 9, 4))
        assert not {waiting, running} & driver.replies.keys()
    complete(driver, StoreSnapshot)
    assert done(driver, waiting).version == 2
    assert done(driver, running).incarnation == 9
    driver.settle()

    after = ShardDriver(driver.store)
    after.serve(spec(ack=ack), owned={0: 10}, source="snapshot")
    assert after.values() == ([7.0] * 4 if ack == "journaled" else [3.0] * 4)
    assert after.push({0: ones()}, PushId("w", 1, 0)).duplicate


def test_a_newer_token_without_that_word_is_a_new_ownership() -> None:
    """Memory counts only for who holds the token that is renewed, or a later one."""
    driver = ShardDriver()
    driver.serve(spec(), owned={0: 5})
    driver.push({0: ones()}, PushId("w", 1, 0))
    for token, renewed, value in ((6, {0: 5}, 1.0), (7, {0: 2}, 1.0), (8, {0: 8}, 0.0), (9, {}, 0.0)):
        driver.store = SnapshotShelf()
        driver.eager = False
        driver.send(replace(view(driver), owned={0: token}, renewed=renewed, source="snapshot"))
        driver.pending = [e for e in driver.pending if isinstance(e, LoadPartition)]
        driver.settle()
        driver.eager = True
        assert driver.values() == [value] * 4, token


def test_a_cut_of_a_model_in_sync_is_stored_again_under_the_new_token() -> None:
    """What Redis lost of a recovery's target is in memory still."""
    driver = ShardDriver()
    driver.serve(spec(consistency={"mode": "sync"}), workers=ROSTER, live_workers=2)
    driver.commit(0, cut=True)
    driver.commit(1)
    driver.store = SnapshotShelf()

    driver.send(replace(view(driver), owned={0: 9}, renewed={0: 1}, clock=2))
    driver.advance(0.1)

    assert [row[3:] for row in driver.core.cuts()] == [(9, 1)]
    assert driver.store.cuts[KEY, 1].token == 9
    assert driver.pull(0).version == 2


def test_a_snapshot_that_was_on_its_way_when_redis_lost_things_counts_for_nothing() -> None:
    """Parts of it may be among what is lost; wishes that come and go meanwhile change nothing about the next one."""
    driver = ShardDriver()
    driver.serve(spec(ack="journaled"))
    driver.advance(1.0)
    driver.eager = False
    waiting = driver.submit({0: ones()}, PushId("w", 1, 0), ack="fsynced")
    complete(driver, Apply)
    (older,) = (e for e in driver.pending if isinstance(e, StoreSnapshot))
    driver.pending.clear()

    driver.send(JournalLost(KEY, 1))
    wish(driver, 0)
    wish(driver)
    driver.send(SnapshotStored(KEY, 1, older.capture.version, older.urgent))
    assert waiting not in driver.replies
    (whole,) = (e for e in driver.pending if isinstance(e, StoreSnapshot))
    assert whole.urgent
    complete(driver, StoreSnapshot)
    driver.advance(2.0)
    driver.settle()

    assert done(driver, waiting).durable_version == 1


def test_a_partition_that_is_handed_over_when_redis_is_emptied_is_stored_anew() -> None:
    """It counts as released again only under its new token."""
    driver = ShardDriver()
    driver.serve(spec())
    driver.push({0: ones()}, PushId("w", 1, 0))
    wish(driver, 0)
    assert released(driver) == [(0, 1, 1, 1)]
    driver.eager = False

    driver.send(replace(view(driver), owned={0: 9}, renewed={0: 1}))
    assert released(driver) == []
    driver.settle()

    assert released(driver) == [(0, 9, 1, 1)]


def test_an_owner_that_redis_refused_before_it_was_renewed_has_its_memory_still() -> None:
    """The new token is in Redis before the owner hears of it: what it is refused for is its own renewal."""
    driver = ShardDriver()
    driver.serve(spec(ack="journaled"))
    driver.push({0: ones()}, PushId("w", 1, 0))
    driver.store = SnapshotShelf()

    driver.send(JournalRefused(KEY, 1))
    with pytest.raises(PsError) as caught:
        driver.push({0: ones()}, PushId("w", 1, 1))
    assert caught.value.code == "wrong_owner"
    driver.send(replace(view(driver), owned={0: 9}, renewed={0: 1}, source="snapshot"))

    assert driver.push({0: ones()}, PushId("w", 1, 0)).duplicate
    assert not driver.push({0: ones()}, PushId("w", 1, 1)).duplicate
    assert driver.values() == [2.0] * 4
    assert driver.store.kept[KEY][0].token == 9


def kept(**fields: Any) -> tuple[ShardDriver, int]:
    """A journaled shard with one push, whose ownership was refused: Redis has forgotten it."""
    driver = ShardDriver()
    driver.serve(spec(ack="journaled", **fields), workers=ROSTER)
    return driver, driver.submit({0: ones()}, PushId(WORKERS[0], 1, 0), clock=0 if "consistency" in fields else None)


def renew(driver: ShardDriver, **fields: Any) -> None:
    """The leader tells that the refused ownership is this shard's under a new token."""
    driver.send(replace(view(driver), owned={0: 2}, renewed={0: 1}, **fields))


def test_what_was_kept_is_flushed_when_it_is_due() -> None:
    """The time came while it was nobody's."""
    driver, _ = kept(consistency={"mode": "buffered", "count": 4, "interval_ms": 1000})
    driver.send(JournalRefused(KEY, 1))
    driver.advance(2.0)
    renew(driver)
    driver.advance(0.1)
    assert driver.values() == [1.0] * 4
    assert driver.core.held_bytes == 0


def test_what_was_kept_learns_of_settings_that_changed_meanwhile() -> None:
    """They are those of its model."""
    driver, _ = kept()
    driver.send(JournalRefused(KEY, 1))
    driver.patch({"optimizer": {"name": "sgd", "lr": 5.0}})
    renew(driver)
    driver.push({0: ones()}, PushId(WORKERS[0], 1, 1))
    assert driver.values() == [-4.0] * 4


def test_what_was_kept_takes_the_commit_that_waited() -> None:
    """It stood in line behind an assignment when the ownership was refused."""
    driver, _ = kept(consistency={"mode": "sync"})
    driver.eager = False
    driver.send(SetReceived(driver.request(), "m", (AssignPart(0, ones(), "float32", True),)))
    driver.commit(0, Contribution(WORKERS[0], 1, 0, 0))
    driver.send(JournalRefused(KEY, 1))
    renew(driver)
    driver.eager = True
    driver.settle()
    assert driver.core.models["m"].partitions[0].clock == 1


def test_a_cut_is_not_all_that_is_handed_over() -> None:
    """At level applied it leaves out what is staged, which the next owner needs."""
    driver = ShardDriver()
    driver.serve(spec(consistency={"mode": "sync", "quorum": 0.5, "late": "fold"}), workers=ROSTER)
    driver.push({0: ones()}, PushId(WORKERS[0], 1, 1), clock=0)
    driver.push({0: ones(10.0)}, PushId(WORKERS[1], 1, 1), clock=0)
    driver.commit(0, Contribution(WORKERS[0], 1, 0, 0), cut=True)
    driver.eager = False
    driver.send(JournalLost(KEY, 1))
    snapshots = [e for e in driver.pending if isinstance(e, StoreSnapshot)]
    driver.complete(driver.pending.index(next(e for e in snapshots if e.urgent)))
    driver.advance(0.01)

    wish(driver, 0)
    cut = next(e for e in driver.pending if isinstance(e, StoreSnapshot) and e.cut)
    driver.complete(driver.pending.index(cut))
    assert released(driver) == []
    driver.settle()
    assert [row[0] for row in released(driver)] == [0]
    after = successor(driver)
    after.commit(1, Contribution(WORKERS[1], 1, 1, 0))
    assert after.values() == [11.0] * 4
