"""A journaling shard whose Redis is away, cannot fsync, has lost data, or names another owner."""

import json
import tracemalloc

import numpy as np
import pytest
from msgspec.structs import replace
from tests.refusals import refused_with

from paramserver import limits
from paramserver.core.partition_state import Capture, HeldPart, PartitionState
from paramserver.core.shard.effects import Journal, StoreSnapshot
from paramserver.core.shard.events import Journaled, JournalLost, JournalRefused, SnapshotDone, StorageChanged
from paramserver.testing.shard_driver import InMemoryStore, ShardDriver
from paramserver.types import ModelKey, PartitionKey, PushId
from paramserver_shard import snapshot_format

from .partitions import WORKERS, apply, complete, done, entries, journaled, ones, pending, refused, slow


def test_a_duplicate_does_not_count_as_stored_what_redis_has_lost() -> None:
    """After Redis was emptied, a duplicate is acknowledged only once the partition is stored again."""
    driver = slow()
    first = driver.submit({0: ones()}, PushId("w", 1, 0))
    driver.settle()
    assert done(driver, first).state == "applied"
    assert driver.view is not None

    driver.send(replace(driver.view, owned={0: 2}, kept_from={0: 1}))
    again = driver.submit({0: ones()}, PushId("w", 1, 0))
    assert again not in driver.replies
    driver.settle()
    assert done(driver, again).duplicate


def test_what_a_dead_owner_may_not_have_synced_is_not_acknowledged_as_on_disk() -> None:
    """At level `fsynced` a new owner acknowledges a duplicate only once a snapshot of its own is on disk.

    The last owner may have died after its entry was in Redis and before it was on disk.
    """
    store = InMemoryStore()
    before = ShardDriver(store)
    before.serve(journaled(ack="fsynced"))
    before.push({0: ones()}, PushId("w", 1, 0))
    after = ShardDriver(store)
    after.serve(journaled(ack="fsynced"), owned={0: 2}, source="snapshot")
    after.eager = False

    again = after.submit({0: ones()}, PushId("w", 1, 0))
    assert again not in after.replies
    assert [s.fsync for s in pending(after, StoreSnapshot)] == [True]
    after.settle()
    assert done(after, again).duplicate


def test_while_redis_is_away_new_pushes_are_refused_and_waiting_ones_give_up_in_time() -> None:
    """While Redis is away new pushes get 503 at once and are not applied; waiting ones get 503 after JOURNAL_WAIT_S.

    The waiting push was applied, so sent again it is a duplicate.
    """
    driver = slow()
    waiting = driver.submit({0: ones()}, PushId("w", 1, 0))
    apply(driver)

    driver.send(StorageChanged("no Redis"))
    new = driver.submit({0: ones()}, PushId("w", 1, 1))
    again = driver.submit({0: ones()}, PushId("w", 1, 0))
    assert {refused(driver, r).code for r in (new, again)} == {"storage_unavailable"}
    assert refused(driver, new).retry_after_s
    driver.advance(limits.JOURNAL_WAIT_S - 0.1)
    assert waiting not in driver.replies
    driver.advance(0.1)
    assert refused(driver, waiting).code == "storage_unavailable"
    assert driver.core.waiting == 0

    driver.send(StorageChanged(""))
    back = driver.submit({0: ones()}, PushId("w", 1, 0))
    complete(driver, Journal)
    assert done(driver, back).duplicate
    assert driver.values() == [1.0] * 4


def test_each_waiting_push_gives_up_in_its_own_time() -> None:
    """Every push that does not become durable is answered JOURNAL_WAIT_S after it came, the later one, too."""
    driver = slow()
    first = driver.submit({0: ones()}, PushId("w", 1, 0))
    apply(driver)
    driver.advance(4.0)
    second = driver.submit({0: ones()}, PushId("w", 1, 1))
    apply(driver)

    driver.advance(limits.JOURNAL_WAIT_S - 4.0)
    assert refused(driver, first).code == "storage_unavailable"
    assert second not in driver.replies
    driver.advance(4.0)
    assert refused(driver, second).code == "storage_unavailable"


def test_what_was_given_up_is_kept_nowhere() -> None:
    """While snapshots of a partition fail again and again, only the pushes that still wait for one are kept."""
    driver = slow(ack="applied")
    (partition,) = driver.core.models["m"].partitions.values()
    for seq in range(20):
        driver.submit({0: ones()}, PushId("w", 1, seq), ack="journaled")
        apply(driver)
        for stored in pending(driver, StoreSnapshot):
            driver.pending.remove(stored)
            driver.send(SnapshotDone(stored.capture.key, stored.capture.token, False, stored.urgent))
        driver.advance(limits.JOURNAL_WAIT_S / 4)
        assert len(partition.mark.waiting) <= 4

    driver.advance(limits.JOURNAL_WAIT_S)
    assert not partition.mark.waiting


def test_a_redis_that_cannot_sync_refuses_that_level_alone() -> None:
    """If Redis cannot fsync, a push that asks for `fsynced` gets 503, and `journaled` pushes are acknowledged."""
    driver = slow()
    driver.send(StorageChanged("", "appendonly is off"))

    more = driver.submit({0: ones()}, PushId("w", 1, 0), ack="fsynced")
    own = driver.submit({0: ones()}, PushId("w", 1, 1))
    apply(driver)
    complete(driver, Journal)

    assert (refused(driver, more).code, refused(driver, more).detail) == ("storage_unavailable", "appendonly is off")
    assert done(driver, own).version == 1


def test_an_owner_that_was_replaced_in_redis_serves_no_longer() -> None:
    """An owner that Redis reports as replaced refuses waiting and new pushes with 421 until it has a newer token."""
    driver = slow()
    assert driver.view is not None
    waiting = driver.submit({0: ones()}, PushId("w", 1, 0))
    apply(driver)
    (entry,) = entries(driver)

    driver.send(JournalRefused(entry.key, entry.token))
    new = driver.submit({0: ones()}, PushId("w", 1, 1))
    driver.send(driver.view)
    stale = driver.submit({0: ones()}, PushId("w", 1, 1))

    assert {refused(driver, r).code for r in (waiting, new, stale)} == {"wrong_owner"}
    driver.pending.clear()
    driver.send(replace(driver.view, owned={0: 2}, source="snapshot"))
    driver.settle()
    assert driver.values() == [0.0] * 4
    assert driver.core.durability.queued_bytes == 0


def test_a_running_job_of_a_replaced_owner_is_answered_too() -> None:
    """A push that is being computed when its owner is replaced gets 421."""
    driver = slow()
    request = driver.submit({0: ones()}, PushId("w", 1, 0))
    key = driver.core.models["m"].partitions[0].key

    driver.send(JournalRefused(key, 1))
    driver.settle()

    assert refused(driver, request).code == "wrong_owner"


def test_what_waits_to_be_journaled_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the journal queue is full pushes are refused with `queue_full`, until its entries are durable."""
    driver = slow()
    first = driver.submit({0: ones()}, PushId("w", 1, 0))
    apply(driver)
    (entry,) = entries(driver)
    assert driver.core.durability.queued_bytes == entry.nbytes
    monkeypatch.setattr(limits, "JOURNAL_QUEUE_BYTES_MAX", entry.nbytes)

    second = driver.submit({0: ones()}, PushId("w", 1, 1))
    assert refused(driver, second).code == "queue_full"
    complete(driver, Journal)
    third = driver.submit({0: ones()}, PushId("w", 1, 1))
    apply(driver)
    complete(driver, Journal)

    assert [done(driver, r).version for r in (first, third)] == [1, 2]
    assert driver.core.durability.queued_bytes == 0


def test_a_journal_that_lost_entries_goes_on_from_a_snapshot() -> None:
    """Once Redis has lost journal entries, no later entry counts as durable until the whole state is stored."""
    driver = slow()
    first = driver.submit({0: ones()}, PushId("w", 1, 0))
    apply(driver)
    key = driver.core.models["m"].partitions[0].key

    for _ in range(2):
        driver.send(JournalLost(key, 1))
    (snapshot,) = pending(driver, StoreSnapshot)
    assert snapshot.urgent
    second = driver.submit({0: ones()}, PushId("w", 1, 1))
    apply(driver)
    driver.send(Journaled(key, 1, 3))
    assert not {first, second} & driver.replies.keys()
    driver.pending.clear()
    driver.send(SnapshotDone(key, 1, stored=False, urgent=True))
    driver.advance(1.0)
    (snapshot,) = pending(driver, StoreSnapshot)
    assert (snapshot.capture.lsn, snapshot.urgent) == (3, True)
    complete(driver, StoreSnapshot)

    assert [done(driver, r).durable_version for r in (first, second)] == [2, 2]


def test_a_cut_from_before_the_loss_does_not_make_the_journal_count_again() -> None:
    """A cut that waited when Redis lost its data is stored first, and replies wait for the whole state after it."""
    driver = slow(consistency={"mode": "sync"})
    driver.commit(0, cut=True)
    apply(driver)
    complete(driver, Journal)
    push = driver.submit({0: ones()}, PushId(WORKERS[0], 1, 0), clock=1)
    apply(driver)

    (entry,) = entries(driver)
    driver.send(JournalLost(entry.key, 1))
    driver.pending = [e for e in driver.pending if not isinstance(e, Journal)]
    for cut in (True, True, False):  # the first one was being written, and counts no more
        (snapshot,) = pending(driver, StoreSnapshot)
        driver.send(Journaled(entry.key, 1, entry.lsn))
        assert (snapshot.cut, push in driver.replies) == (cut, False)
        complete(driver, StoreSnapshot)

    assert done(driver, push).state == "staged"


def test_a_snapshot_is_cut_into_blocks_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block is larger than the limit, wherever arrays begin and end; joined, they are the whole stream."""
    monkeypatch.setattr(snapshot_format, "SNAPSHOT_BLOCK_BYTES", 16)
    arrays = [np.arange(n, dtype=np.float32) for n in (3, 0, 9, 2)]

    blocks = list(snapshot_format.blocks_of(b"head....", arrays))

    assert [len(b) for b in blocks] == [16, 16, 16, 16]
    assert b"".join(blocks) == b"head...." + b"".join(a.tobytes() for a in arrays)


def test_the_ranges_of_waiting_gradients_are_not_copied_before_they_are_written() -> None:
    """The head of a snapshot, which is made on the event loop, is small however many ranges wait."""
    ranges, data = np.arange(2 * limits.RANGES_PER_REQUEST_MAX).reshape(-1, 2), np.ones(2, np.float32)
    state = PartitionState(np.ones(2, np.float32), (), (0,))
    held = tuple([HeldPart("w", 1, 0, i, None, 1.0, ranges + 2 * i, data, "float32") for i in range(40)])
    key = PartitionKey(ModelKey("m", 1), 0)
    tracemalloc.start()
    try:
        for n in (0, 20, 40):
            capture = Capture(state, 1, buffered=held[:n], staged=held[n:], key=key, token=1)
            head, arrays = snapshot_format.to_stored(capture)
            assert len(snapshot_format.encode_head(head, arrays)) < 1 << 14
            back = snapshot_format.from_stored(head, arrays)
            assert [h.seq for h in (*back.buffered, *back.staged)] == list(range(40))
            assert all(np.array_equal(a.ranges, b.ranges) for a, b in zip(back.buffered, held[:n], strict=True))  # type: ignore[arg-type]
            assert len(back.staged) == 40 - n
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(ValueError, match="more arrays"):
        snapshot_format.from_stored(head, (*arrays, data))
    with pytest.raises(LookupError):
        snapshot_format.from_stored(head, arrays[:-1])


def test_a_manifest_that_is_damaged_or_newer_is_refused() -> None:
    """A manifest is read as a whole or not at all."""
    good = {"format": snapshot_format.FORMAT, "name": "a", "crc32": [1]}
    packed = json.loads(snapshot_format.pack_manifest([good]))
    assert snapshot_format.read_manifest(json.dumps(packed), "it") == [good]
    for wrong, why in (
        (packed | {"crc32": packed["crc32"] ^ 1}, "it is damaged"),
        (packed | {"format": "9"}, "it has format 9"),
        ([good], "it is damaged"),
    ):
        with refused_with("corrupt_state", match=why):
            snapshot_format.read_manifest(json.dumps(wrong), "it")
