"""Owners that are given newer tokens: what they keep in memory and store again."""

from typing import Any

import pytest
from msgspec.structs import replace
from tests.refusals import refused_with

from paramserver.core.commit import Contribution
from paramserver.core.shard.effects import Apply, Journal, LoadPartition, StoreSnapshot
from paramserver.core.shard.events import (
    AssignPart,
    Journaled,
    JournalLost,
    JournalRefused,
    SetReceived,
    SnapshotDone,
)
from paramserver.testing.shard_driver import InMemoryStore, ShardDriver
from paramserver.types import ModelKey, PartitionKey, PushId

from .partitions import LEVELS, ROSTER, WORKERS, complete, done, ones, released, request_release, serving, spec, view

KEY = PartitionKey(ModelKey("m", 1), 0)


@pytest.mark.parametrize("ack", LEVELS)
def test_a_renewed_token_keeps_memory_and_stores_everything_again(ack: str) -> None:
    """Renewed after Redis was emptied, an owner keeps its state, and replies wait until all of it is stored again.

    The version it began with stays, too: nothing was lost.
    """
    driver = serving(spec(ack=ack))
    driver.push({0: ones()}, PushId("w", 1, 0))
    driver.eager = False
    waiting = driver.submit({0: ones(2.0)}, PushId("w", 1, 1))
    complete(driver, Apply)
    running = driver.submit({0: ones(4.0)}, PushId("w", 1, 2))
    driver.store = InMemoryStore()
    driver.pending = [e for e in driver.pending if isinstance(e, Apply)]

    driver.send(replace(view(driver), owned={0: 9}, kept_from={0: 1}, source="snapshot"))

    (snapshot,) = (e for e in driver.pending if isinstance(e, StoreSnapshot))
    assert (snapshot.urgent, snapshot.capture.token, snapshot.capture.version) == (True, 9, 2)
    (row,) = driver.core.partitions()
    assert (row.token, row.version, row.durable_version, row.from_version) == (9, 2, 0, 0)
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
    """A newer token keeps the memory only if `kept_from` is the token that the shard holds, or an earlier one."""
    driver = serving(spec(), owned={0: 5})
    driver.push({0: ones()}, PushId("w", 1, 0))
    for token, renewed, value in ((6, {0: 5}, 1.0), (7, {0: 2}, 1.0), (8, {0: 8}, 0.0), (9, {}, 0.0)):
        driver.store = InMemoryStore()
        driver.eager = False
        driver.send(replace(view(driver), owned={0: token}, kept_from=renewed, source="snapshot"))
        driver.pending = [e for e in driver.pending if isinstance(e, LoadPartition)]
        driver.settle()
        driver.eager = True
        assert driver.values() == [value] * 4, token


@pytest.mark.parametrize("renewed", [False, True])
def test_what_was_given_up_is_not_loaded_again_under_the_old_token(renewed: bool) -> None:
    """If Redis and its leader lost a handover, the next leader names the old owner, which had more than the source has.

    It loads nothing until it is given another token.
    """
    driver = serving(spec(), owned={0: 5})
    driver.push({0: ones()}, PushId("w", 1, 0))
    request_release(driver, 0)
    driver.send(replace(view(driver), owned={}, release={}))
    token, kept_from = (9, {0: 5}) if renewed else (5, {})

    driver.send(replace(view(driver), owned={0: token}, kept_from=kept_from, term=1))
    driver.send(view(driver))

    assert not list(driver.core.partitions())
    assert list(driver.core.given_up()) == [("m", 1, 0, token, True)]
    driver.send(replace(view(driver), owned={0: 10}, kept_from={}, source="snapshot"))
    assert driver.values() == [1.0] * 4
    assert not list(driver.core.given_up())


def test_a_cut_of_a_model_in_sync_is_stored_again_under_the_new_token() -> None:
    """A cut of a model in sync that Redis lost is stored again from memory under the renewed token."""
    driver = serving(spec(consistency={"mode": "sync"}), workers=ROSTER)
    driver.commit(0, cut=True)
    driver.commit(1)
    driver.store = InMemoryStore()

    driver.send(replace(view(driver), owned={0: 9}, kept_from={0: 1}, clock=2))
    driver.advance(0.1)

    assert [(row.token, row.clock) for row in driver.core.cuts()] == [(9, 1)]
    assert driver.store.cuts[KEY, 1].token == 9
    assert driver.pull(0).version == 2


@pytest.mark.parametrize("lost", ["renewed", "told"])
def test_a_cut_of_a_model_that_has_left_sync_is_not_stored_again(lost: str) -> None:
    """After sync is left, its cut is not stored again, whoever notices that Redis was emptied; later values are."""
    driver = serving(spec(consistency={"mode": "sync"}), workers=ROSTER)
    driver.commit(0, cut=True)
    driver.patch({"consistency": {"mode": "async"}}, clock=1)
    driver.push({0: ones()}, PushId("w", 1, 0))
    assert not list(driver.core.cuts())
    driver.store = InMemoryStore()

    if lost == "renewed":
        driver.send(replace(view(driver), owned={0: 9}, kept_from={0: 1}))
    else:
        driver.send(JournalLost(KEY, 1))
    driver.advance(10.0)

    assert [c.version for c in driver.store.kept[KEY]] == [2]
    after = ShardDriver(driver.store)
    after.serve(spec(), owned={0: 10}, source="snapshot")
    assert after.values() == [1.0] * 4


@pytest.mark.parametrize("succeeds", [True, False])
def test_cuts_that_are_not_stored_when_sync_is_left_never_are(succeeds: bool) -> None:
    """Once sync is left, cuts that wait or fail are dropped, and one that is being stored does not count as a cut."""
    driver = serving(spec(consistency={"mode": "sync"}), workers=ROSTER)
    driver.advance(1.0)
    driver.eager = False
    driver.commit(0, cut=True)
    driver.commit(1, cut=True)
    (first,) = driver.pending
    assert isinstance(first, StoreSnapshot)
    driver.pending.clear()

    driver.patch({"consistency": {"mode": "async"}}, clock=2)
    driver.send(SnapshotDone(KEY, 1, stored=succeeds))
    stored = []
    for _ in range(10):
        driver.advance(1.0)
        stored += [(e.cut, e.capture.version) for e in driver.pending if isinstance(e, StoreSnapshot)]
        driver.settle()

    assert stored == [(False, 2)]
    assert not list(driver.core.cuts())


def test_a_snapshot_that_was_on_its_way_when_redis_lost_things_counts_for_nothing() -> None:
    """A snapshot in flight when Redis lost data does not count, because parts of it may be lost, too.

    A release request that is called off meanwhile does not change that.
    """
    driver = serving(spec(ack="journaled"))
    driver.advance(1.0)
    driver.eager = False
    waiting = driver.submit({0: ones()}, PushId("w", 1, 0), ack="fsynced")
    complete(driver, Apply)
    (older,) = (e for e in driver.pending if isinstance(e, StoreSnapshot))
    driver.pending.clear()

    driver.send(JournalLost(KEY, 1))
    request_release(driver, 0)
    request_release(driver)
    driver.send(SnapshotDone(KEY, 1, True, older.urgent))
    assert waiting not in driver.replies
    (whole,) = (e for e in driver.pending if isinstance(e, StoreSnapshot))
    assert whole.urgent
    complete(driver, StoreSnapshot)
    driver.advance(2.0)
    driver.settle()

    assert done(driver, waiting).durable_version == 1


def test_a_partition_that_is_handed_over_when_redis_is_emptied_is_stored_anew() -> None:
    """A released partition whose token is renewed counts as released only once stored under the new token."""
    driver = serving(spec())
    driver.push({0: ones()}, PushId("w", 1, 0))
    request_release(driver, 0)
    assert released(driver) == [(0, 1, 1, 1)]
    driver.eager = False

    driver.send(replace(view(driver), owned={0: 9}, kept_from={0: 1}))
    assert released(driver) == []
    driver.settle()

    assert released(driver) == [(0, 9, 1, 1)]


def test_an_owner_that_redis_refused_before_it_was_renewed_has_its_memory_still() -> None:
    """An owner whose writes Redis refuses keeps its memory, because the cause may be its own renewed token."""
    driver = serving(spec(ack="journaled"))
    driver.push({0: ones()}, PushId("w", 1, 0))
    driver.store = InMemoryStore()

    driver.send(JournalRefused(KEY, 1))
    with refused_with("wrong_owner"):
        driver.push({0: ones()}, PushId("w", 1, 1))
    driver.send(replace(view(driver), owned={0: 9}, kept_from={0: 1}, source="snapshot"))

    assert driver.push({0: ones()}, PushId("w", 1, 0)).duplicate
    assert not driver.push({0: ones()}, PushId("w", 1, 1)).duplicate
    assert driver.values() == [2.0] * 4
    assert driver.store.kept[KEY][0].token == 9


def kept(**fields: Any) -> tuple[ShardDriver, int]:
    """Return a journaled shard with one push, and the request of that push."""
    driver = serving(spec(ack="journaled", **fields), workers=ROSTER)
    return driver, driver.submit({0: ones()}, PushId(WORKERS[0], 1, 0), clock=0 if "consistency" in fields else None)


def renew(driver: ShardDriver, **fields: Any) -> None:
    """Give the refused partition back to this shard under a new token."""
    driver.send(replace(view(driver), owned={0: 2}, kept_from={0: 1}, **fields))


def test_what_was_kept_is_flushed_when_it_is_due() -> None:
    """A buffer whose deadline passed while the partition had no owner is flushed after the renewal."""
    driver, _ = kept(consistency={"mode": "buffered", "count": 4, "interval_ms": 1000})
    driver.send(JournalRefused(KEY, 1))
    driver.advance(2.0)
    renew(driver)
    driver.advance(0.1)
    assert driver.values() == [1.0] * 4
    assert driver.core.held_bytes == 0


def test_what_was_kept_learns_of_settings_that_changed_meanwhile() -> None:
    """Settings that changed while the partition had no owner apply after the renewal."""
    driver, _ = kept()
    driver.send(JournalRefused(KEY, 1))
    driver.patch({"optimizer": {"name": "sgd", "lr": 5.0}})
    renew(driver)
    driver.push({0: ones()}, PushId(WORKERS[0], 1, 1))
    assert driver.values() == [-4.0] * 4


def test_what_was_kept_takes_the_commit_that_waited() -> None:
    """A commit queued behind an assignment when the ownership was refused is applied after the renewal."""
    driver, _ = kept(consistency={"mode": "sync"})
    driver.eager = False
    driver.send(SetReceived("m", (AssignPart(0, ones(), "float32", True),), request=driver.request()))
    driver.commit(0, Contribution(WORKERS[0], 1, 0, 0))
    driver.send(JournalRefused(KEY, 1))
    renew(driver)
    driver.eager = True
    driver.settle()
    assert driver.core.models["m"].partitions[0].clock == 1


def test_a_missed_commit_is_asked_for_again_until_the_partition_has_gone() -> None:
    """A partition that lacks a commit asks every second; once it has another owner, nothing is done for it."""
    driver = serving(spec(consistency={"mode": "sync"}), workers=ROSTER)
    driver.commit(1)
    driver.advance(1.0)
    assert driver.resyncs == 2
    driver.eager = False

    driver.send(replace(view(driver), owned={}))
    driver.commit(0)
    driver.advance(5.0)

    assert (driver.resyncs, driver.pending) == (2, [])


@pytest.mark.parametrize("term", [1, 2])
def test_a_lower_revision_counts_only_from_another_leader(term: int) -> None:
    """A shard takes a lower revision, and the partitions that come with it, only from a leader of another term.

    That one may not know of the higher revision, if Redis lost it with the leader before. Of one leader, the document
    is merely an older one.
    """
    driver = serving(spec(2), owned={0: 1}, term=1)
    before = view(driver)
    driver.patch({"consistency": {"mode": "ssp"}})

    driver.send(replace(before, owned={0: 1, 1: 2}, term=term))

    assert set(driver.core.models["m"].partitions) == ({0} if term == 1 else {0, 1})
