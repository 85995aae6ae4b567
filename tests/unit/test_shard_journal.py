"""Acknowledgement levels: what is journaled, and when requests are answered."""

import random

import pytest
from msgspec.structs import replace

from paramserver import limits
from paramserver.core.commit import Contribution
from paramserver.core.ranges import of_pairs
from paramserver.core.shard.effects import Journal, StoreSnapshot
from paramserver.core.shard.events import (
    AssignPart,
    Journaled,
    JournalRefused,
    PushReceived,
    RosterChanged,
    SetReceived,
)
from paramserver.testing.shard_driver import InMemoryStore, ShardDriver, checked_part, push_part
from paramserver.types import PushId

from .partitions import ROSTER, WORKERS, apply, complete, done, entries, journaled, ones, pending, refused, slow


def test_a_push_is_applied_then_journaled_then_acknowledged() -> None:
    """A push is applied and visible first, then journaled, and then acknowledged with its durable version."""
    driver = slow()

    request = driver.submit({0: ones()}, PushId("w", 1, 0))
    apply(driver)

    assert driver.values() == [1.0] * 4
    assert request not in driver.replies
    (entry,) = entries(driver)
    assert (entry.kind, entry.lsn, entry.token) == ("push", 2, 1)
    assert (entry.head["id"], entry.head["version"]) == (["w", 1, 0], 1)
    assert entry.arrays[0].tolist() == [1.0] * 4
    complete(driver, Journal)
    assert (done(driver, request).version, done(driver, request).durable_version) == (1, 1)
    assert [(row.version, row.durable_version) for row in driver.core.partitions()] == [(1, 1)]


@pytest.mark.parametrize("mode", ["async", "buffered", "sync"])
def test_at_level_applied_nothing_is_journaled(mode: str) -> None:
    """At level `applied` pushes, assignments, commits, flushes and settings are answered without journal entries."""
    driver = slow(ack="applied", consistency={"mode": mode})

    requests = [driver.submit({0: ones()}, PushId(WORKERS[0], 1, i), clock=0) for i in range(9)]
    driver.send(SetReceived("m", (AssignPart(0, ones(), "float32", True),), request=900))
    driver.commit(0, Contribution(WORKERS[0], 1, 0, 0))
    driver.patch({"optimizer": {"clip_value": 1.0}})
    driver.send(RosterChanged(driver.view.model, {}))  # type: ignore[union-attr]
    apply(driver)

    assert all(r in driver.replies for r in [*requests, 900])
    assert pending(driver, Journal) == []


@pytest.mark.parametrize("mode", ["sync", "buffered"])
def test_a_snapshot_holds_what_was_pushed_not_what_lies_there_now(mode: str) -> None:
    """A snapshot written after a held gradient was applied has it as pushed, though its memory was reused since."""
    driver = slow(consistency={"mode": mode} | ({"count": 2, "interval_ms": 60_000} if mode == "buffered" else {}))
    gradient = ones()
    driver.submit({0: gradient}, PushId(WORKERS[0], 1, 0), clock=0 if mode == "sync" else None)
    complete(driver, Journal)
    driver.advance(limits.SNAPSHOT_INTERVAL_S)
    assert pending(driver, StoreSnapshot)

    if mode == "sync":
        driver.commit(0, Contribution(WORKERS[0], 1, 0, 0))
    else:
        driver.submit({0: ones()}, PushId(WORKERS[1], 1, 0))
    apply(driver)
    complete(driver, Journal)
    gradient[:] = 1000.0
    complete(driver, StoreSnapshot)

    assert driver.values() == [1.0] * 4
    assert driver.view is not None
    after = ShardDriver(driver.store)
    after.send(replace(driver.view, owned={0: 2}, source="snapshot"))
    assert after.values() == [1.0] * 4


def test_a_push_that_is_refused_after_it_was_accepted_says_so() -> None:
    """A push refused after it was applied says so, because its memory may still be read and must not be reused."""
    driver = slow()
    request = driver.submit({0: ones()}, PushId("w", 1, 0))
    apply(driver)

    driver.send(JournalRefused(entries(driver)[0].key, 1))

    assert refused(driver, request).code == "wrong_owner"
    assert refused(driver, request).members["push"]["state"] == "applied"


def test_a_push_waits_for_every_partition_it_touches() -> None:
    """A push is acknowledged once it is durable on every partition it touches, not on one of two."""
    driver = slow(partitions=2)
    request = driver.submit({0: ones(), 1: ones()}, PushId("w", 1, 0))
    apply(driver)
    first, second = entries(driver)

    driver.send(Journaled(second.key, second.token, second.lsn))
    assert request not in driver.replies
    driver.send(Journaled(first.key, first.token, first.lsn))

    assert [p.durable_version for p in done(driver, request).parts] == [1, 1]


def test_only_what_the_journal_has_reached_counts_as_durable() -> None:
    """A version is durable once its own entry is journaled, not once an earlier one is."""
    driver = slow()
    first, second = (driver.submit({0: ones()}, PushId("w", 1, seq)) for seq in (0, 1))
    apply(driver)
    entry, _ = entries(driver)

    driver.send(Journaled(entry.key, entry.token, entry.lsn))

    assert (done(driver, first).durable_version, second in driver.replies) == (1, False)
    assert [row[4:6] for row in driver.core.partitions()] == [(2, 1)]
    assert driver.core.durability.queued_bytes > 0


def test_the_durable_version_of_an_answer_is_the_lowest_of_its_partitions() -> None:
    """An answer's `durable_version` is reached by every partition that the push touched, not by one of them."""
    driver = slow(partitions=2)
    driver.submit({0: ones()}, PushId("w", 1, 0))
    apply(driver)
    complete(driver, Journal)

    both = driver.submit({0: ones(), 1: ones()}, PushId("w", 1, 1))
    apply(driver)
    driver.settle()

    assert [p.durable_version for p in done(driver, both).parts] == [2, 1]
    assert done(driver, both).durable_version == 1


def test_a_clock_is_durable_once_its_commit_is_journaled() -> None:
    """The clock that a new owner would start at rises when the commit's entry is journaled: until then it is needed."""
    driver = slow(consistency={"mode": "sync"})
    driver.commit(0)
    apply(driver)
    assert [row.commits_from for row in driver.core.partitions()] == [0]

    complete(driver, Journal)

    assert [row.commits_from for row in driver.core.partitions()] == [1]


def test_a_duplicate_waits_until_its_original_is_durable() -> None:
    """A duplicate is acknowledged only once its original is durable, and at once after that."""
    driver = slow()
    first = driver.submit({0: ones()}, PushId("w", 1, 0))
    apply(driver)

    again = driver.submit({0: ones()}, PushId("w", 1, 0))
    assert not {first, again} & driver.replies.keys()
    complete(driver, Journal)
    late = driver.submit({0: ones()}, PushId("w", 1, 0))

    assert [done(driver, r).duplicate for r in (first, again, late)] == [False, True, True]
    assert {done(driver, r).version for r in (first, again, late)} == {1}


def test_a_crash_loses_nothing_that_was_acknowledged() -> None:
    """The next owner has every acknowledged push, the windows and the version, and accepts an unjournaled push anew."""
    store = InMemoryStore()
    driver = ShardDriver(store)
    driver.serve(journaled())
    driver.push({0: ones(1.0)}, PushId("w", 1, 0))
    driver.push({0: ones(2.0)}, None, key="k")
    driver.eager = False
    driver.submit({0: ones(4.0)}, PushId("w", 1, 1))

    after = ShardDriver(store)
    after.serve(journaled(), owned={0: 2}, source="snapshot")

    assert after.values() == [3.0] * 4
    assert after.pull(0).version == 2
    assert after.push({0: ones(1.0)}, PushId("w", 1, 0)).duplicate
    assert after.push({0: ones(2.0)}, None, key="k").version == 2
    assert not after.push({0: ones(4.0)}, PushId("w", 1, 1)).duplicate
    assert [e.lsn for e in store.journals[after.core.models["m"].partitions[0].key]] == [1, 2, 3, 4]


def test_the_older_snapshot_and_the_journal_give_the_same() -> None:
    """If the newest snapshot is damaged, the older one and the journal, kept from there on, give the same bytes."""
    store = InMemoryStore()
    driver = ShardDriver(store)
    driver.serve(journaled(optimizer={"name": "adam", "lr": 0.1}))
    for i in range(4):
        driver.push({0: ones(i)}, PushId("w", 1, i))
        driver.advance(limits.SNAPSHOT_INTERVAL_S)
    key = driver.core.models["m"].partitions[0].key
    assert [c.lsn for c in store.kept[key]] == [5, 4]
    assert [e.lsn for e in store.journals[key]] == [5]

    store.damaged = True
    after = ShardDriver(store)
    after.serve(journaled(optimizer={"name": "adam", "lr": 0.1}), owned={0: 2}, source="snapshot")

    ours, theirs = (d.pull(0).parts[0].state for d in (after, driver))
    assert ours.values.tobytes() == theirs.values.tobytes()
    assert [s.tobytes() for s in ours.slots] == [s.tobytes() for s in theirs.slots]


def test_what_is_buffered_is_journaled_and_the_flush_says_when_it_was_applied() -> None:
    """Buffered pushes and their flushes are journaled, so the next owner applies the same means at the same points."""
    store = InMemoryStore()
    buffered = journaled(consistency={"mode": "buffered", "count": 2, "interval_ms": 3_600_000})
    driver = ShardDriver(store)
    driver.serve(buffered)
    for i, value in enumerate((1.0, 3.0, 10.0)):
        assert driver.push({0: ones(value)}, PushId("w", 1, i)).state == "buffered"

    after = ShardDriver(store)
    after.serve(buffered, owned={0: 2}, source="snapshot")
    assert after.values() == [2.0] * 4
    after.push({0: ones(20.0)}, PushId("w", 1, 3))

    assert after.values() == [17.0] * 4
    kinds = [e.kind for e in store.journals[after.core.models["m"].partitions[0].key]]
    assert kinds == ["config", "hold", "hold", "flush", "hold", "hold", "flush"]


def test_a_synchronous_owner_that_dies_costs_no_rollback() -> None:
    """Staged parts are journaled before their ack, so the next owner applies decided commits without a rollback."""
    store = InMemoryStore()
    sync = journaled(optimizer={"name": "adam", "lr": 0.1}, consistency={"mode": "sync"})
    driver, straight = ShardDriver(store), ShardDriver()
    for d in (driver, straight):
        d.serve(sync, workers=ROSTER)
        for clock in (0, 1):
            for i, w in enumerate(WORKERS):
                d.push({0: ones(1.0 + i + clock)}, PushId(w, 1, clock), clock=clock)
        d.commit(0, *(Contribution(w, 1, i, 0) for i, w in enumerate(WORKERS)))
    decided = tuple(Contribution(w, 1, i, 1) for i, w in enumerate(WORKERS))
    straight.commit(1, *decided)

    after = ShardDriver(store)
    after.serve(sync, workers=ROSTER, owned={0: 2}, source="snapshot", clock=2)
    assert after.resyncs == 1
    assert after.push({0: ones(2.0)}, PushId(WORKERS[0], 1, 1), clock=1).duplicate
    after.commit(1, *decided)

    ours, theirs = (d.pull(0).parts[0] for d in (after, straight))
    assert (ours.version, ours.state.steps) == (theirs.version, theirs.state.steps) == (2, (2,))
    assert ours.state.values.tobytes() == theirs.state.values.tobytes()
    assert after.core.held_bytes == 0


def test_assignments_are_journaled_from_the_first_upload_on() -> None:
    """Values uploaded before the model is ready are journaled and survive the loss of their owner, at version 0."""
    store = InMemoryStore()
    driver = ShardDriver(store)
    view = driver.serve(journaled(), ready=False)
    driver.send(SetReceived("m", (AssignPart(0, ones(5.0), "float32", True),), request=90))
    assert done(driver, 90).durable_version == 0

    after = ShardDriver(store)
    after.serve(journaled(), owned={0: 2}, source="snapshot", ready=False)
    after.send(replace(view, owned={0: 2}, ready=True))
    after.send(SetReceived("m", (AssignPart(0, ones(6.0)[:2], "float32", True, of_pairs([(1, 3)])),), request=91))

    assert after.values() == [5.0, 6.0, 6.0, 5.0]
    assert done(after, 91).version == 1


@pytest.mark.parametrize(("level", "asked", "fsync"), [("applied", "journaled", False), ("journaled", "fsynced", True)])
def test_a_push_that_asks_for_more_than_the_models_level_waits_for_a_snapshot(
    level: str, asked: str, fsync: bool
) -> None:
    """A push that asks for a higher level is acknowledged once a snapshot, begun after it at once, is stored.

    A push that comes while that snapshot is being written waits for the next one.
    """
    driver = slow(ack=level)
    first = driver.submit({0: ones()}, PushId("w", 1, 0), ack=asked)
    plain = driver.submit({0: ones()}, PushId("w", 1, 1))
    apply(driver)
    while pending(driver, Journal):
        complete(driver, Journal)
    assert plain in driver.replies
    (snapshot,) = pending(driver, StoreSnapshot)
    assert (snapshot.capture.version, snapshot.fsync, snapshot.cut) == (1, fsync, False)

    second = driver.submit({0: ones()}, PushId("w", 1, 2), ack=asked)
    apply(driver)
    while pending(driver, Journal):
        complete(driver, Journal)
    complete(driver, StoreSnapshot)
    assert done(driver, first).durable_version >= 1
    assert second not in driver.replies
    driver.advance(0.1)
    complete(driver, StoreSnapshot)

    assert done(driver, second).durable_version == 3
    again = driver.submit({0: ones()}, PushId("w", 1, 0), ack=asked)
    assert done(driver, again).duplicate


def test_a_model_in_sync_gives_its_own_level_and_no_more() -> None:
    """A push to a model in sync is refused if it asks for more than the model's level, or for an unknown one.

    What is staged at level `applied` becomes durable with its clock, and the clock waits for the ack.
    """
    driver = slow(ack="applied", consistency={"mode": "sync"})

    request = driver.submit({0: ones()}, PushId(WORKERS[0], 1, 0), clock=0, ack="journaled")
    less = driver.submit({0: ones()}, PushId(WORKERS[0], 1, 0), clock=0, ack="applied")
    unknown = driver.submit({0: ones()}, PushId(WORKERS[0], 1, 1), clock=0, ack="maybe")

    assert refused(driver, request).code == refused(driver, unknown).code == "invalid_field"
    assert not done(driver, less).duplicate


def test_at_level_fsynced_entries_and_snapshots_are_to_be_on_disk() -> None:
    """At level `fsynced` every journal and snapshot effect asks for an fsync."""
    driver = slow(ack="fsynced")

    driver.submit({0: ones()}, PushId("w", 1, 0))
    apply(driver)
    driver.advance(limits.SNAPSHOT_INTERVAL_S)

    assert [j.fsync for j in pending(driver, Journal)] == [True]
    assert [s.fsync for s in pending(driver, StoreSnapshot)] == [True]


def test_much_journal_is_snapshotted_before_the_interval_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is taken early once the journal has SNAPSHOT_JOURNAL_BYTES, which bounds what is replayed."""
    monkeypatch.setattr(limits, "SNAPSHOT_JOURNAL_BYTES", 1000)
    driver = slow()

    for i in range(6):
        driver.submit({0: ones()}, PushId("w", 1, i))
        apply(driver)
    (snapshot,) = pending(driver, StoreSnapshot)

    assert 1000 / entries(driver)[0].nbytes <= snapshot.capture.version <= 5


def test_a_commit_that_changes_nothing_and_parts_that_are_dropped_are_journaled_too() -> None:
    """Empty commits and dropped parts are journaled, so the next owner has the same version and staged parts."""
    store = InMemoryStore()
    sync = journaled(consistency={"mode": "sync", "late": "fold"})
    driver = ShardDriver(store)
    driver.serve(sync, workers=ROSTER)
    driver.commit(0)
    driver.push({0: ones()}, PushId(WORKERS[0], 1, 0), clock=0)

    keeps = ShardDriver(store)
    keeps.serve(sync, workers=ROSTER, owned={0: 2}, source="snapshot", clock=1)
    assert keeps.core.held_bytes == 16
    keeps.send(RosterChanged(keeps.view.model, {}))  # type: ignore[union-attr]
    assert keeps.core.held_bytes == 0

    after = ShardDriver(store)
    after.serve(sync, workers=ROSTER, owned={0: 3}, source="snapshot", clock=1)
    assert after.core.held_bytes == 0
    assert after.pull(0).version == 1


def test_of_a_late_push_the_journal_has_neither_elements_nor_ranges() -> None:
    """Of a push that is discarded as late, only that it came is journaled: nothing of it will ever be applied."""
    driver = slow(consistency={"mode": "sync", "late": "drop"})
    driver.commit(0)
    driver.settle()
    driver.submit({0: ones()[:2]}, PushId(WORKERS[0], 1, 0), clock=0, ranges={0: ((1, 3),)})

    (entry,) = entries(driver)
    assert (entry.kind, entry.head["late"], entry.head["ranges"], entry.arrays) == ("hold", True, None, ())


def test_ten_thousand_duplicate_deliveries_are_exact() -> None:
    """Of 10,000 deliveries in random order within the window each push counts once and keeps its first version."""
    driver = ShardDriver(checked=False)
    driver.serve(journaled(ack="applied"))
    rng = random.Random(7)
    versions: dict[int, int] = {}
    part = checked_part(push_part(0, ones(), 4))
    pushes, copies = 1000, 10
    due = sorted((i + rng.uniform(0, limits.WINDOW / 2), i) for i in range(pushes) for _ in range(copies))

    for request, (_, i) in enumerate(due, 10):
        driver.send(PushReceived("m", (part,), push_id=PushId("w", 1, i), request=request))
        reply = done(driver, request)
        assert reply.duplicate == (i in versions)
        assert reply.version == versions.setdefault(i, reply.version)

    assert len(due) == 10_000
    assert driver.values() == [float(pushes)] * 4
    assert driver.pull(0).version == pushes == len(set(versions.values()))
