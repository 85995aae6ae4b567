"""The shard's core, event by event: pulls, assignments, ownership, snapshots; see `test_shard_pushes`."""

from typing import Any

import numpy as np
from msgspec.structs import replace

from paramserver import limits
from paramserver.core.shard_io import (
    AssignPart,
    CaptureReceived,
    LoadFailed,
    LoadPartition,
    ModelGone,
    PushDone,
    RequestGone,
    SetReceived,
    SnapshotFailed,
    StoreSnapshot,
)
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError, problem
from paramserver.testing.shard_driver import InMemoryStore, ShardDriver
from paramserver.types import F32, PushId


def spec(size: int = 4, partitions: int = 1, **fields: Any) -> ModelSpec:
    return ModelSpec.parse(
        {"name": "m", "params": {"w": {"shape": [size]}}, "optimizer": {"name": "sum"}, "partitions": partitions}
        | fields
    )


def ones(n: int = 4, value: float = 1.0) -> F32:
    return np.full(n, value, np.float32)


def refused(driver: ShardDriver, request: int) -> PsError:
    outcome = driver.replies[request]
    assert isinstance(outcome, PsError)
    return outcome


def test_pulls_wait_for_a_version() -> None:
    """A waiting pull is released by the version it asked for, or hears the present one at its deadline."""
    driver = ShardDriver()
    driver.serve(spec(8, 2))

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
    """A withdrawn pull is neither answered nor kept."""
    driver = ShardDriver()
    driver.serve(spec())
    request = driver.ask((0,), min_version=1, wait_s=60.0)

    driver.send(RequestGone(request))
    driver.push({0: ones()})

    assert request not in driver.replies
    assert driver.core.waiting == 0


def test_the_queue_is_bounded() -> None:
    """Beyond the bound a request is told to come again, and nothing waits longer for it."""
    driver = ShardDriver()
    driver.serve(spec())
    for _ in range(limits.QUEUED_REQUESTS_MAX):
        driver.ask((0,), min_version=1, wait_s=60.0)

    request = driver.ask((0,))

    assert refused(driver, request).code == "queue_full"


def test_requests_wait_for_a_partition_that_is_being_loaded() -> None:
    """What arrives before the state does is answered when it is there, or 503 after a lease."""
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
    """Whichever partition is there first: one that waited for two comes before a later one that needs one of them."""
    driver = ShardDriver(eager=False)
    driver.serve(spec(2, 2))
    both, one = driver.submit({0: ones(1), 1: ones(1)}), driver.submit({0: ones(1)})

    driver.complete(1)
    driver.settle()

    outcomes = [driver.outcome(request) for request in (both, one)]
    assert [[p.version for p in o.parts] for o in outcomes if isinstance(o, PushDone)] == [[1, 1], [2]]


def test_a_failed_load_is_told_and_tried_again() -> None:
    """Waiting requests hear the reason; the load is asked for again after a second."""
    driver = ShardDriver(eager=False)
    driver.serve(spec())
    (load,) = driver.pending
    assert isinstance(load, LoadPartition)
    push, pull = driver.submit({0: ones()}), driver.ask((0,))
    driver.pending.clear()

    driver.send(LoadFailed(load.key, load.token, problem("storage_unavailable", "no Redis")))

    assert refused(driver, push).code == refused(driver, pull).code == "storage_unavailable"
    driver.advance(1.0)
    assert [type(e) for e in driver.pending] == [LoadPartition]


def test_initial_values_are_uploaded_before_anything_else() -> None:
    """While a model initializes, sets leave version 0, pushes hear 503 and pulls wait; then version 0 is served."""
    driver = ShardDriver()
    view = driver.serve(spec(), ready=False)
    pull, hasty = driver.ask((0,), wait_s=20.0), driver.ask((0,))

    driver.send(SetReceived(90, "m", (AssignPart(0, ones(2, 5.0), "float32", True, ((0, 2),)),)))
    push = driver.submit({0: ones()})
    driver.advance(limits.LEASE_S)

    assert refused(driver, push).code == refused(driver, hasty).code == "initializing"
    assert pull not in driver.replies
    driver.send(replace(view, ready=True))
    assert pull in driver.replies
    assert driver.values() == [5.0, 5.0, 0.0, 0.0]
    assert driver.pull(0).version == 0


def test_an_assignment_to_a_value_that_has_changed_changes_nothing() -> None:
    """It is for a version of a shard's: a push that was there first, or another owner, makes all of it void."""
    driver = ShardDriver()
    driver.serve(spec(8, 2))
    stands = [(p.version, p.incarnation) for p in driver.pull(0, 1).parts]
    driver.push({1: ones()})

    def assign(*expected: tuple[int, int]) -> Any:
        request = driver.request()
        parts = tuple(AssignPart(i, ones(value=9.0), "float32", True, expected=e) for i, e in enumerate(expected))
        driver.send(SetReceived(request, "m", parts))
        return driver.replies[request]

    refused = assign(*stands)
    assert refused.code == "precondition_failed"
    assert "[1]" in refused.detail
    assert driver.values() == [0.0] * 4
    assert assign((0, stands[0][1] + 1)).code == "precondition_failed"
    assert assign(stands[0], (1, stands[1][1])).parts[1].version == 2


def test_an_assignment_is_a_version() -> None:
    """Values change, optimizer state and windows stay."""
    driver = ShardDriver()
    driver.serve(spec(optimizer={"name": "momentum", "lr": 1.0}))
    driver.push({0: ones()}, PushId("w", 1, 0))
    slots = driver.pull(0).parts[0].state.slots

    driver.send(SetReceived(90, "m", (AssignPart(0, ones(value=9.0), "float32", True),)))

    assert driver.values() == [9.0] * 4
    assert driver.pull(0).version == 2
    assert driver.pull(0).parts[0].state.slots is slots
    assert driver.push({0: ones()}, PushId("w", 1, 0)).duplicate


def test_losing_a_partition_answers_what_waits_and_what_runs() -> None:
    """Queued and running requests hear 421; the other partition of a running request is unchanged."""
    driver = ShardDriver()
    view = driver.serve(spec(8, 2))
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
    """Waiting requests hear that it was deleted, or which generation took its place."""
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
    """A new shard goes on from the snapshot: values, window and version; a later push is applied anew."""
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
    assert list(after.core.partitions()) == [("m", 1, 0, 2, 2, 1, 1, 0)]


def test_snapshots_are_written_one_at_a_time_and_again_after_a_failure() -> None:
    """The second waits for the first; a refused one is tried again a second later, behind the other."""
    driver = ShardDriver()
    driver.serve(spec(8, 2))
    driver.advance(6.0)
    driver.eager = False
    for i in (0, 1):
        driver.submit({i: ones()})
    driver.settle()

    driver.advance(6.0)
    (store,) = driver.pending
    assert isinstance(store, StoreSnapshot)
    driver.pending.clear()
    driver.send(SnapshotFailed(store.capture.key, 1, store.capture.version))
    assert [e.capture.key.index for e in driver.pending if isinstance(e, StoreSnapshot)] == [1]
    driver.settle()
    driver.advance(0.9)
    assert driver.pending == []
    driver.advance(0.1)
    driver.settle()

    assert sorted(row[2:] for row in driver.core.partitions()) == [(0, 1, 1, 1, 1, 0), (1, 1, 1, 1, 1, 0)]


def failing(driver: ShardDriver, bad: set[int], seconds: float, push: int | None = None) -> list[int]:
    """Let time pass in which snapshots of these partitions fail; the partitions of all that were tried."""
    tried = []
    for _ in range(round(seconds * 10)):
        while driver.pending:
            (store,) = driver.pending
            assert isinstance(store, StoreSnapshot)
            tried.append(store.capture.key.index)
            if tried[-1] in bad:
                driver.pending.clear()
                driver.send(SnapshotFailed(store.capture.key, 1, store.capture.version))
            else:
                driver.complete()
        if push is not None:
            driver.submit({push: ones()})
            driver.complete()
        driver.advance(0.1)
    return tried


def test_partitions_that_cannot_be_stored_do_not_hold_up_those_that_can() -> None:
    """They are tried each second; what has changed is stored after its five, and they after it."""
    driver = ShardDriver()
    driver.serve(spec(32, 8))
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
    """Each costs a copy of its partition's state; all are stored soon after it is back."""
    driver = ShardDriver()
    driver.serve(spec(32, 8))
    driver.push({i: ones() for i in range(8)})
    driver.eager = False
    driver.advance(limits.SNAPSHOT_INTERVAL_S)

    tried = failing(driver, set(range(8)), 12.0)

    assert len(tried) <= 14
    assert set(tried) == set(range(8))
    assert set(failing(driver, set(), 2.0)) == set(range(8))


def test_the_next_snapshot_begins_when_the_one_before_is_stored() -> None:
    """How fast bytes go to Redis is a setting of who writes them, and nothing else slows them down."""
    driver = ShardDriver()
    driver.serve(spec(8, 2))
    driver.push({i: ones() for i in (0, 1)})
    driver.eager = False
    driver.advance(limits.SNAPSHOT_INTERVAL_S)

    for index in (0, 1):
        (store,) = driver.pending
        assert isinstance(store, StoreSnapshot)
        assert store.capture.key.index == index
        driver.complete()


def test_a_capture_is_one_moment() -> None:
    """What a checkpoint reads stays as it was while pushes go on."""
    driver = ShardDriver()
    driver.serve(spec())
    driver.push({0: ones()})
    driver.send(CaptureReceived(90, "m", 0))
    driver.push({0: ones()})

    capture = driver.outcome(90)

    assert getattr(capture, "version", None) == 1
    assert getattr(capture, "state").values.tolist() == [1.0] * 4  # noqa: B009 - any outcome
