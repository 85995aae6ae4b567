"""The shard's core, event by event: pulls, assignments, ownership and snapshots (pushes: `test_shard_pushes`)."""

from typing import Any

from msgspec.structs import replace

from paramserver import limits
from paramserver.core.ranges import of_pairs
from paramserver.core.shard.effects import LoadPartition, PullDone, PushDone, StoreSnapshot
from paramserver.core.shard.events import (
    AssignPart,
    CaptureReceived,
    LoadFailed,
    ModelGone,
    RequestGone,
    SetReceived,
    SnapshotDone,
)
from paramserver.errors import PsError, problem
from paramserver.testing.shard_driver import InMemoryStore, ShardDriver
from paramserver.types import PushId

from .partitions import ones, refused, serving, spec


def test_pulls_wait_for_a_version() -> None:
    """A pull with `min_version` is answered with that version, or refused with the present one at its deadline."""
    driver = serving(spec(2))

    patient = driver.ask((0, 1), min_version=1, wait_s=5.0)
    hasty = driver.ask((0, 1), min_version=1, wait_s=1.0)
    at_once = driver.ask((0,), min_version=1)
    assert refused(driver, at_once).code == "version_not_reached"
    driver.push({0: ones()})
    driver.advance(1.0)
    assert refused(driver, hasty).members == {"version": 0}
    assert patient not in driver.replies
    driver.push({1: ones()})

    assert patient in driver.replies
    assert driver.core.waiting == 0


def test_a_client_that_has_gone_frees_its_place() -> None:
    """A waiting pull whose client has gone is neither answered nor kept."""
    driver = serving(spec())
    request = driver.ask((0,), min_version=1, wait_s=60.0)

    driver.send(RequestGone(request))
    driver.push({0: ones()})

    assert request not in driver.replies
    assert driver.core.waiting == 0


def test_the_queue_is_bounded() -> None:
    """While QUEUED_REQUESTS_MAX requests are waiting, another one is refused at once with `queue_full`."""
    driver = serving(spec())
    for _ in range(limits.QUEUED_REQUESTS_MAX):
        driver.ask((0,), min_version=1, wait_s=60.0)

    request = driver.ask((0,))

    assert refused(driver, request).code == "queue_full"


def test_requests_wait_for_a_partition_that_is_being_loaded() -> None:
    """Requests for a partition that is being loaded wait for it, for at most LEASE_S, and then get 503 `loading`."""
    driver = ShardDriver(eager=False)
    view = driver.serve(spec())
    push, pull = driver.submit({0: ones()}), driver.ask((0,))

    driver.settle()

    assert push in driver.replies
    assert pull in driver.replies
    driver.send(replace(view, owned={0: 2}))
    slow = driver.submit({0: ones()})
    driver.advance(limits.LEASE_S)
    assert refused(driver, slow).code == "loading"


def test_pushes_that_wait_for_partitions_run_in_order_of_arrival() -> None:
    """Pushes that wait for partitions run in order of arrival, whichever partition is loaded first."""
    driver = ShardDriver(eager=False)
    driver.serve(spec(2, size=2))
    both, one = driver.submit({0: ones(size=1), 1: ones(size=1)}), driver.submit({0: ones(size=1)})

    driver.complete(1)
    driver.settle()

    outcomes = [driver.outcome(request) for request in (both, one)]
    assert [[p.version for p in o.parts] for o in outcomes if isinstance(o, PushDone)] == [[1, 1], [2]]


def test_an_optimizer_that_is_chosen_while_initial_values_load_begins_with_its_own_state() -> None:
    """What another optimizer's state would begin with is not given to one that has as many arrays."""
    driver = ShardDriver(eager=False)
    driver.serve(spec(optimizer={"name": "adagrad", "initial_accumulator_value": 0.5}))
    driver.patch({"optimizer": {"name": "momentum"}})

    driver.settle()

    state = driver.core.models["m"].partitions[0].state
    assert state is not None
    assert [set(slot.tolist()) for slot in state.slots] == [{0.0}]


def test_values_restored_while_a_model_enters_sync_do_not_keep_a_partition_from_entering_it() -> None:
    """A restore that is queued before a change to `sync` leaves that to the change, which begins at its clock."""
    driver = serving(spec())
    driver.eager = False
    for value in (5.0, 7.0):
        part = AssignPart(0, ones(value), "float32", True)
        driver.send(SetReceived("m", (part,), restore=True, request=driver.request()))

    driver.patch({"consistency": {"mode": "sync"}}, clock=3, began=3)
    driver.settle()

    partition = driver.core.models["m"].partitions[0]
    assert (partition.clock, partition.spec.consistency.mode, driver.values()) == (3, "sync", [7.0] * 4)


def test_values_set_beside_lost_ones_are_of_a_new_version_if_others_were_trained() -> None:
    """What is set while first values are not complete is of the version it names, or the one after what was trained."""
    driver = ShardDriver()
    driver.serve(spec(2, size=2), ready=False)

    def restore() -> list[int]:
        parts = tuple(AssignPart(i, ones(size=1), "float32", True, version=3) for i in (0, 1))
        request = driver.request()
        driver.send(SetReceived("m", parts, restore=True, request=request))
        done = driver.outcome(request)
        assert isinstance(done, PushDone)
        return [p.version for p in done.parts]

    assert [restore(), restore()] == [[3, 3], [3, 3]]
    view = driver.view
    assert view is not None
    driver.send(replace(view, ready=True))
    driver.push({1: ones(size=1)})
    driver.send(view)

    assert restore() == [3, 5]


def test_a_failed_load_is_told_and_tried_again() -> None:
    """When a load fails, waiting requests and heartbeats get its error, and the load is retried after a second."""
    driver = ShardDriver(eager=False)
    driver.serve(spec())
    (load,) = driver.pending
    assert isinstance(load, LoadPartition)
    push, pull = driver.submit({0: ones()}), driver.ask((0,))
    driver.pending.clear()

    driver.send(LoadFailed(load.key, load.token, problem("storage_unavailable", "no Redis")))

    assert refused(driver, push).code == refused(driver, pull).code == "storage_unavailable"
    assert "no Redis" in driver.core.load_trouble()
    driver.advance(1.0)
    assert [type(e) for e in driver.pending] == [LoadPartition]
    driver.settle()
    assert driver.core.load_trouble() == ""


def test_stored_state_that_stays_corrupt_is_read_ever_less_often() -> None:
    """The delay doubles up to a minute, and once it has begun to, requests are refused at once, not after it.

    Any other failure, as when Redis is away or lacks initial values, begins again with a second.
    """
    driver = ShardDriver(eager=False)
    driver.serve(spec())
    (load,) = driver.pending
    assert isinstance(load, LoadPartition)

    def failed(after_s: float, error: PsError) -> None:
        """Fail the pending load; the next one comes after that time."""
        driver.pending.clear()
        driver.send(LoadFailed(load.key, load.token, error))
        driver.advance(after_s - 0.5)
        assert driver.pending == []
        driver.advance(0.5)
        assert [type(e) for e in driver.pending] == [LoadPartition]

    corrupt = problem("corrupt_state", "both snapshots are damaged")
    early = driver.submit({0: ones()})
    assert early not in driver.replies
    failed(1.0, corrupt)
    waiting = driver.ask((0,))
    assert waiting not in driver.replies, "another owner token may be on its way"
    for after_s in (2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        failed(after_s, corrupt)
        push, pull = driver.submit({0: ones()}), driver.ask((0,), wait_s=30.0)
        assert refused(driver, push).code == refused(driver, pull).code == "corrupt_state"
        assert "both snapshots" in refused(driver, pull).detail
    assert refused(driver, early).code == refused(driver, waiting).code == "corrupt_state"

    failed(1.0, problem("storage_unavailable", "no Redis"))
    failed(1.0, corrupt)
    failed(1.0, problem("corrupt_state", "its initial values were never stored", never_stored=True))
    failed(1.0, corrupt)
    failed(2.0, corrupt)
    driver.complete()
    assert isinstance(driver.replies[driver.ask((0,))], PullDone)


def test_initial_values_are_uploaded_before_anything_else() -> None:
    """While a model initializes, assignments leave version 0, pushes get 503 and pulls wait for version 0."""
    driver = ShardDriver()
    view = driver.serve(spec(), ready=False)
    pull, hasty = driver.ask((0,), wait_s=20.0), driver.ask((0,))

    driver.send(SetReceived("m", (AssignPart(0, ones(5.0, 2), "float32", True, of_pairs([(0, 2)])),), request=90))
    push = driver.submit({0: ones()})
    driver.advance(limits.LEASE_S)

    assert refused(driver, push).code == refused(driver, hasty).code == "initializing"
    assert pull not in driver.replies
    driver.send(replace(view, ready=True))
    assert pull in driver.replies
    assert driver.values() == [5.0, 5.0, 0.0, 0.0]
    assert driver.pull(0).version == 0


def test_first_values_that_come_late_change_nothing() -> None:
    """First values that another attempt has made complete meanwhile are a duplicate: pushes may have changed them."""
    driver = ShardDriver()
    view = driver.serve(spec(), ready=False)
    upload = SetReceived("m", (AssignPart(0, ones(), "float32", True),), first=True, request=90)
    driver.send(upload)
    driver.send(replace(view, ready=True))
    driver.push({0: ones()})
    values, version = driver.values(), driver.pull(0).version

    driver.send(replace(upload, request=91))

    done = driver.replies[91]
    assert isinstance(done, PushDone)
    assert (done.duplicate, done.parts) == (True, ())
    assert (driver.values(), driver.pull(0).version) == (values, version)


def test_a_push_that_waits_for_a_partition_is_not_applied_to_lost_values() -> None:
    """A push that waits for a partition whose first values turn out to be lost is refused, not applied to zeros."""
    driver = ShardDriver(eager=False)
    view = driver.serve(spec())
    push = driver.submit({0: ones()})

    driver.send(replace(view, ready=False))
    driver.settle()

    assert refused(driver, push).code == "initializing"
    driver.send(replace(view, ready=True))
    assert driver.pull(0).version == 0


def test_an_assignment_to_a_value_that_has_changed_changes_nothing() -> None:
    """An assignment with expected versions is refused as a whole if one partition has another version or owner."""
    driver = serving(spec(2))
    stands = [(p.version, p.incarnation) for p in driver.pull(0, 1).parts]
    driver.push({1: ones()})

    def assign(*expected: tuple[int, int]) -> Any:
        request = driver.request()
        parts = tuple(AssignPart(i, ones(9.0), "float32", True, expected=e) for i, e in enumerate(expected))
        driver.send(SetReceived("m", parts, request=request))
        return driver.replies[request]

    refused = assign(*stands)
    assert refused.code == "precondition_failed"
    assert "[1]" in refused.detail
    assert driver.values() == [0.0] * 4
    assert assign((0, stands[0][1] + 1)).code == "precondition_failed"
    assert assign(stands[0], (1, stands[1][1])).parts[1].version == 2


def test_an_assignment_is_a_version() -> None:
    """An assignment changes the values and raises the version, but keeps optimizer state and push windows."""
    driver = serving(spec(optimizer={"name": "momentum", "lr": 1.0}))
    driver.push({0: ones()}, PushId("w", 1, 0))
    slots = driver.pull(0).parts[0].state.slots

    driver.send(SetReceived("m", (AssignPart(0, ones(9.0), "float32", True),), request=90))

    assert driver.values() == [9.0] * 4
    assert driver.pull(0).version == 2
    assert driver.pull(0).parts[0].state.slots is slots
    assert driver.push({0: ones()}, PushId("w", 1, 0)).duplicate


def test_losing_a_partition_answers_what_waits_and_what_runs() -> None:
    """When a partition is lost, its queued and running requests get 421 and change no other partition."""
    driver = ShardDriver()
    view = driver.serve(spec(2))
    driver.eager = False
    running, queued = driver.submit({0: ones(), 1: ones()}, PushId("w", 1, 0)), driver.submit({0: ones()})
    pull = driver.ask((0,), min_version=1, wait_s=60.0)

    driver.send(replace(view, owned={1: 1}))
    driver.settle()

    assert {refused(driver, r).code for r in (running, queued, pull)} == {"wrong_owner"}
    assert driver.values(1) == [0.0] * 4
    driver.eager = True
    assert driver.push({1: ones()}, PushId("w", 1, 0)).duplicate is False


def test_a_model_that_is_gone_or_replaced_is_told_apart() -> None:
    """Waiting requests are told that their model was deleted, or which generation replaced it."""
    driver = ShardDriver()
    view = driver.serve(spec())
    first = driver.ask((0,), min_version=1, wait_s=60.0)

    driver.send(replace(view, model=replace(view.model, generation=2)))
    second = driver.ask((0,), min_version=1, wait_s=60.0)
    driver.send(ModelGone(view.model))
    assert second not in driver.replies
    driver.send(ModelGone(replace(view.model, generation=2)))

    assert refused(driver, first).members == {"generation": 2}
    assert refused(driver, second).code == "unknown_model"
    assert list(driver.core.partitions()) == []


def test_a_changed_partition_is_stored_after_five_seconds_and_a_crash_loses_what_came_after() -> None:
    """A changed partition is stored after SNAPSHOT_INTERVAL_S, and after a crash the next owner starts from there."""
    store = InMemoryStore()
    driver = ShardDriver(store)
    driver.serve(spec())
    driver.push({0: ones()}, PushId("w", 1, 0))
    driver.advance(limits.SNAPSHOT_INTERVAL_S + 0.1)
    stored = driver.push({0: ones()}, PushId("w", 1, 1))

    after = ShardDriver(store)
    after.serve(spec(), owned={0: 2}, source="snapshot")

    assert stored.durable_version == 1
    assert after.push({0: ones()}, PushId("w", 1, 0)).duplicate
    assert after.push({0: ones()}, PushId("w", 1, 1)).duplicate is False
    assert after.values() == [2.0] * 4
    assert list(after.core.partitions()) == [("m", 1, 0, 2, 2, 1, 1, 0, 1, 1)]


def test_snapshots_are_written_one_at_a_time_and_again_after_a_failure() -> None:
    """Snapshots are written one at a time; a failed one is retried a second later, behind the other."""
    driver = serving(spec(2))
    driver.advance(6.0)
    driver.eager = False
    for i in (0, 1):
        driver.submit({i: ones()})
    driver.settle()

    driver.advance(6.0)
    (store,) = driver.pending
    assert isinstance(store, StoreSnapshot)
    driver.pending.clear()
    driver.send(SnapshotDone(store.capture.key, 1, stored=False))
    assert [e.capture.key.index for e in driver.pending if isinstance(e, StoreSnapshot)] == [1]
    driver.settle()
    driver.advance(0.9)
    assert driver.pending == []
    driver.advance(0.1)
    driver.settle()

    assert sorted(row[2:] for row in driver.core.partitions()) == [(0, 1, 1, 1, 1, 0, 0, 0), (1, 1, 1, 1, 1, 0, 0, 0)]


def failing(driver: ShardDriver, bad: set[int], seconds: float, push: int | None = None) -> list[int]:
    """Advance the time while snapshots of the `bad` partitions fail; return the partition of each attempt."""
    tried = []
    for _ in range(round(seconds * 10)):
        while driver.pending:
            (store,) = driver.pending
            assert isinstance(store, StoreSnapshot)
            tried.append(store.capture.key.index)
            if tried[-1] in bad:
                driver.pending.clear()
                driver.send(SnapshotDone(store.capture.key, 1, stored=False))
            else:
                driver.complete()
        if push is not None:
            driver.submit({push: ones()})
            driver.complete()
        driver.advance(0.1)
    return tried


def test_partitions_that_cannot_be_stored_do_not_hold_up_those_that_can() -> None:
    """Partitions whose snapshots fail are retried, but do not delay those that can be stored.

    They are stored, too, once their snapshots succeed.
    """
    driver = serving(spec(8))
    driver.push({i: ones() for i in range(7)})
    driver.eager = False
    driver.advance(limits.SNAPSHOT_INTERVAL_S)

    tried = failing(driver, {0, 1, 2, 3, 4, 5}, 20.0, push=7)

    assert tried.count(6) == 1
    assert tried.count(7) >= 3
    assert all(tried.count(i) >= 3 for i in range(6))
    assert set(failing(driver, set(), 8.0)) == set(range(6)) | {7}
    assert driver.core.deadline() is None


def test_while_redis_is_away_one_snapshot_a_second_is_tried() -> None:
    """While every snapshot fails, about one a second is tried, and all are stored within 2 s after Redis is back.

    Each attempt costs a copy of its partition's state.
    """
    driver = serving(spec(8))
    driver.push({i: ones() for i in range(8)})
    driver.eager = False
    driver.advance(limits.SNAPSHOT_INTERVAL_S)

    tried = failing(driver, set(range(8)), 12.0)

    assert len(tried) <= 14
    assert set(tried) == set(range(8))
    assert set(failing(driver, set(), 2.0)) == set(range(8))


def test_the_next_snapshot_begins_when_the_one_before_is_stored() -> None:
    """The next snapshot begins as soon as the one before is stored; only the writer limits the rate of bytes."""
    driver = serving(spec(2))
    driver.push({i: ones() for i in (0, 1)})
    driver.eager = False
    driver.advance(limits.SNAPSHOT_INTERVAL_S)

    for index in (0, 1):
        (store,) = driver.pending
        assert isinstance(store, StoreSnapshot)
        assert store.capture.key.index == index
        driver.complete()


def test_a_capture_is_one_moment() -> None:
    """A capture, which a checkpoint reads, stays as it was while later pushes are applied."""
    driver = serving(spec())
    driver.push({0: ones()})
    driver.send(CaptureReceived("m", 0, request=90))
    driver.push({0: ones()})

    capture = driver.outcome(90)

    assert getattr(capture, "version", None) == 1
    assert getattr(capture, "state").values.tolist() == [1.0] * 4  # noqa: B009 - any outcome
