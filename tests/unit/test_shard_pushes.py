"""The shard's core, event by event: pushes in every mode but sync, and what pulls see of pushes and commits."""

from typing import Any

import numpy as np
import pytest
from tests.refusals import refused_with

from paramserver import limits
from paramserver.core.commit import Contribution
from paramserver.core.shard.effects import PushDone
from paramserver.core.shard.events import MapChanged, RosterChanged, WorkerAnswered
from paramserver.errors import FencedError, PsError, StaleMapError
from paramserver.testing.shard_driver import InMemoryStore, ShardDriver
from paramserver.types import PushId

from .partitions import ROSTER, listed, ones, refused, serving, spec, successor


def test_a_push_is_applied_and_its_duplicate_answered_with_the_original_version() -> None:
    """A second delivery changes nothing and is answered with the version of the first, even after other pushes."""
    driver = serving(spec())

    first = driver.push({0: ones()}, PushId("w", 1, 0))
    driver.push({0: ones()}, PushId("w", 1, 1))
    again = driver.push({0: ones()}, PushId("w", 1, 0))

    assert (first.version, first.duplicate, first.state) == (1, False, "applied")
    assert (again.version, again.duplicate) == (1, True)
    assert driver.values() == [2.0] * 4


def test_a_duplicate_waits_for_its_original_in_flight() -> None:
    """Two overlapping deliveries of a push are applied once, and both are answered with the same version."""
    driver = serving(spec())
    driver.eager = False

    first = driver.submit({0: ones()}, PushId("w", 1, 0))
    again = driver.submit({0: ones()}, PushId("w", 1, 0))
    assert not driver.replies
    driver.settle()

    outcomes = [driver.outcome(r) for r in (first, again)]
    assert [(o.version, o.duplicate) for o in outcomes if isinstance(o, PushDone)] == [(1, False), (1, True)]
    assert driver.values() == [1.0] * 4


def test_parts_that_came_before_are_skipped_one_by_one() -> None:
    """A push whose parts arrive in several requests is applied once on each partition."""
    driver = serving(spec(2))
    push_id = PushId("w", 1, 0)

    driver.push({0: ones()}, push_id)
    both = driver.push({0: ones(), 1: ones()}, push_id)
    again = driver.push({0: ones(), 1: ones()}, push_id)

    assert (both.duplicate, again.duplicate) == (False, True)
    assert driver.values(0) == driver.values(1) == [1.0] * 4


def test_a_request_runs_on_all_its_partitions_or_on_none() -> None:
    """If one part of a request is refused, none of its parts is applied."""
    driver = serving(spec(2))
    driver.push({1: ones()}, PushId("w", 1, 0))

    with refused_with("id_reused"):
        driver.push({0: ones(), 1: ones(2.0)}, PushId("w", 1, 0))
    assert driver.values(0) == [0.0] * 4
    assert driver.push({0: ones()}, PushId("w", 1, 0)).duplicate is False


def test_operations_that_share_a_partition_run_in_order_of_arrival() -> None:
    """A push of two partitions waits for both, and no later push overtakes it on either."""
    driver = serving(spec(2))
    driver.eager = False

    driver.submit({0: ones()})
    both = driver.submit({0: ones(), 1: ones()})
    last = driver.submit({1: ones()})

    assert len(driver.pending) == 1
    driver.complete()
    assert len(driver.pending) == 1
    driver.complete()
    assert both in driver.replies
    assert last not in driver.replies
    driver.complete()
    assert last in driver.replies


def test_no_pull_of_a_shard_sees_a_push_on_one_of_its_partitions_only() -> None:
    """Whatever is being computed or waits, a pull has each push of a request on all of its partitions or on none."""
    driver = serving(spec(2))
    driver.eager = False
    for i in range(3):
        driver.submit({i % 2: ones(10.0)})
        driver.submit({0: ones(), 1: ones()})
    seen = []

    def pull() -> None:
        parts = driver.pull(0, 1).parts
        seen.append(tuple(float(p.state.values[0]) % 10.0 for p in parts))

    pull()
    while driver.pending:
        driver.complete()
        pull()

    assert {a for a, _ in seen} == {0.0, 1.0, 2.0, 3.0}
    assert all(a == b for a, b in seen)


def test_no_pull_of_a_shard_sees_a_commit_on_one_of_its_partitions_only() -> None:
    """Whichever partitions the commits touch, and whatever is being computed, a pull has the same ones on all."""
    touched: list[tuple[int, ...]] = [(0,), (0, 1), (), (1,), (0, 1), (1,), (0,), (), ()]
    driver = serving(spec(2, consistency={"mode": "sync"}), workers=ROSTER)
    for t, parts in enumerate(touched):
        if parts:
            driver.push(dict.fromkeys(parts, ones(value=2.0**t)), PushId("r/w0", 1, t), clock=t)
    driver.eager = False
    seen = []

    def pull() -> None:
        parts = driver.pull(0, 1).parts
        seen.append(parts[0].version)
        made = [2.0**t for t in range(seen[-1])]
        sums = [sum(n for n, of in zip(made, touched, strict=False) if i in of) for i in range(2)]
        assert [(p.version, float(p.state.values[0])) for p in parts] == [(seen[-1], n) for n in sums]

    for t, parts in enumerate(touched):
        driver.commit(t, *([listed(0, t)] if parts else []))
        pull()
    while driver.pending:
        driver.complete()
        pull()

    assert seen[0] == 0, "the first is being computed"
    assert seen[-1] == len(touched)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_not_remembered(value: float) -> None:
    """A gradient that is not finite changes nothing, and its push id may come again with finite content."""
    driver = serving(spec())

    with refused_with("non_finite"):
        driver.push({0: ones(value)}, PushId("w", 1, 0))
    assert driver.push({0: ones()}, PushId("w", 1, 0)).version == 1


def test_a_result_that_would_not_be_finite_is_refused_and_not_remembered() -> None:
    """A push whose result would overflow is refused on all of its partitions, and may be sent again."""
    driver = serving(spec(2))
    driver.push({0: ones(3e38)})

    with refused_with("non_finite_result"):
        driver.push({0: ones(3e38), 1: ones()}, PushId("w", 1, 0))
    assert driver.values(1) == [0.0] * 4
    assert driver.push({0: ones(), 1: ones()}, PushId("w", 1, 0)).duplicate is False


def test_a_range_push_moves_and_counts_only_what_it_names() -> None:
    """Adam's step count rises only for the parameter a range push touches; other elements keep value and moments."""
    driver = ShardDriver()
    params = {"a": {"shape": [4]}, "b": {"shape": [4]}}
    driver.serve(spec(params=params, optimizer={"name": "adam", "lr": 0.1}))

    driver.push({0: ones(size=2)}, ranges={0: ((1, 3),)})

    state = driver.pull(0).parts[0].state
    assert state.steps == (1, 0)
    assert np.allclose(state.values, [0, -0.1, -0.1, 0, 0, 0, 0, 0])
    assert list(state.slots[0] != 0) == [False, True, True, False, False, False, False, False]


@pytest.mark.parametrize("ranges", [(), ((3, 5),), ((0, 1), (3, 5))])
def test_ranges_that_do_not_fit_are_refused(ranges: tuple[tuple[int, int], ...]) -> None:
    """An empty list of ranges, and ranges beyond the partition, are refused with `invalid_range`."""
    driver = serving(spec())

    with refused_with("invalid_range"):
        driver.push({0: ones(sum(b - a for a, b in ranges))}, ranges={0: ranges})


def test_generation_timeline_and_owner_are_checked() -> None:
    """A push with an old generation, timeline or owner is refused with the present one, and changes nothing.

    One with a generation that the shard does not know yet is told to retry.
    """
    driver = serving(spec(2), timeline=3, clock=5, owned={0: 1})
    driver.send(MapChanged(17))

    with pytest.raises(FencedError) as replaced:
        driver.push({0: ones()}, generation=0)
    with pytest.raises(FencedError) as back:
        driver.push({0: ones()}, timeline=2)
    with pytest.raises(StaleMapError) as owner:
        driver.push({0: ones(), 1: ones()})
    with pytest.raises(PsError) as unknown:
        driver.push({0: ones()}, generation=2)

    assert (replaced.value.code, replaced.value.members) == ("model_replaced", {"generation": 1})
    assert (back.value.code, back.value.members) == ("rolled_back", {"timeline": 3, "clock": 5})
    assert owner.value.members == {"map_epoch": 17, "partition": 1}
    assert unknown.value.retryable
    assert driver.values(0) == [0.0] * 4


def test_version_lag_scales_or_refuses() -> None:
    """A lag of two gives a third of the step, one beyond the bound is refused, and another incarnation has no lag."""
    driver = serving(spec(consistency={"mode": "async", "lag": "scale"}))
    driver.push({0: ones()})
    driver.push({0: ones()})

    driver.push({0: ones(3.0)}, base=(0, 1))
    other = driver.push({0: ones()}, base=(0, 99))

    assert [p.incarnation for p in other.parts] == [1]  # not the one of its base
    assert driver.values() == [4.0] * 4
    driver.patch({"consistency": {"lag": "reject", "lag_bound": 3}})
    assert driver.push({0: ones()}, base=(1, 1)).version == 5
    with pytest.raises(PsError) as caught:
        driver.push({0: ones()}, base=(1, 1))
    assert (caught.value.code, caught.value.members) == ("too_stale", {"lag": 4, "version": 5})


def test_the_schedule_counts_versions_and_settings_change_in_order_of_arrival() -> None:
    """A schedule counts the partition's versions, and a push uses the settings that were in force as it was queued."""
    driver = ShardDriver()
    schedule = {"kind": "step", "step_size": 2, "gamma": 0.5}
    driver.serve(spec(optimizer={"name": "sgd", "lr": 1.0, "schedule": schedule}))
    for _ in range(4):
        driver.push({0: ones()})
    assert driver.values() == [-3.0] * 4
    driver.eager = False

    driver.submit({0: ones()})
    driver.patch({"optimizer": {"lr": 8.0}})
    driver.submit({0: ones()})
    driver.settle()

    assert driver.values() == [-5.25] * 4


def test_linear_scaling_counts_the_workers_of_the_revision() -> None:
    """With linear scaling the rate of a push is that of the live workers as the newest settings say."""
    driver = serving(spec(optimizer={"name": "sgd", "lr": 0.5, "linear_scaling": True}), workers=ROSTER)

    driver.push({0: ones()})
    assert driver.values() == [-1.0] * 4
    driver.patch({}, workers=ROSTER | {"r/w2": 1, "r/w3": 1})
    driver.push({0: ones()})

    assert driver.values() == [-3.0] * 4


def test_another_optimizer_starts_with_fresh_state() -> None:
    """Changing the optimizer keeps the values, and starts with fresh slots and step counts."""
    driver = serving(spec(optimizer={"name": "adam", "lr": 0.1}))
    driver.push({0: ones()})

    driver.patch({"optimizer": {"name": "momentum", "lr": 1.0}})
    driver.push({0: ones()})

    state = driver.pull(0).parts[0].state
    assert (len(state.slots), state.steps) == (1, (1,))
    assert np.allclose(state.values, -1.1)


CHANGES_OF_OPTIMIZER: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({"name": "adam"}, {"name": "adamw"}, True),
    ({"name": "adamw"}, {"name": "adam", "lr": 0.2}, True),
    ({"name": "momentum"}, {"name": "nesterov"}, True),
    ({"name": "nesterov"}, {"name": "momentum"}, True),
    ({"name": "rmsprop", "momentum": 0.9}, {"momentum": 0.5, "lr": 0.2}, True),
    ({"name": "rmsprop", "momentum": 0.9}, {"momentum": 0.0}, False),
    ({"name": "rmsprop"}, {"momentum": 0.9}, False),
    ({"name": "rmsprop"}, {"centered": True}, False),
    ({"name": "rmsprop", "centered": True}, {"centered": False}, False),
    ({"name": "rmsprop", "centered": True}, {"name": "adam"}, False),
]


@pytest.mark.parametrize(("before", "change", "same"), CHANGES_OF_OPTIMIZER, ids=str)
def test_state_is_kept_where_the_arrays_are_the_same_and_begins_afresh_where_they_are_not(
    before: dict[str, Any], change: dict[str, Any], same: bool
) -> None:
    """Slots and step counts outlive a change between optimizers with the same arrays, and no other change.

    Another owner, from the journal or from a snapshot, has the same.
    """
    for stored_s in (0.0, limits.SNAPSHOT_INTERVAL_S):
        driver = serving(spec(optimizer=before, ack="journaled"))
        driver.push({0: ones()})
        old = driver.pull(0).parts[0].state

        driver.patch({"optimizer": change})
        driver.advance(stored_s)

        found = [driver.pull(0)]
        found.append(successor(driver).pull(0))
        for state in (pulled.parts[0].state for pulled in found):
            assert np.array_equal(state.values, old.values)
            if same:
                assert (state.steps, len(state.slots)) == ((1,), len(old.slots))
                assert all(np.array_equal(a, b) for a, b in zip(state.slots, old.slots, strict=True))
            else:
                assert (sum(state.steps), sum(float(s.sum()) for s in state.slots)) == (0, 0.0)


def test_a_key_may_have_as_many_bytes_as_its_header() -> None:
    """An `Idempotency-Key` of 256 bytes is accepted, whatever its letters: it comes as one character per byte."""
    driver = serving(spec())
    letter = "é".encode().decode("latin-1")

    driver.push({0: ones()}, key=128 * letter)

    with refused_with("invalid_field"):
        driver.push({0: ones()}, key=129 * letter)


def test_clipping_by_norm_needs_the_whole_gradients_norm() -> None:
    """With `clip_norm`, a push is scaled by the norm in its frame, and refused without one."""
    driver = serving(spec(optimizer={"name": "sum", "clip_norm": 1.0}))

    driver.push({0: ones()}, norm=4.0, weight=2.0)

    assert driver.values() == [0.5] * 4
    with refused_with("invalid_field"):
        driver.push({0: ones()})


@pytest.mark.parametrize(("consistency", "values"), [({"mode": "async"}, 0.0), ({"mode": "buffered", "count": 2}, 0.5)])
def test_clipping_by_value_clamps_what_a_step_is_made_of(consistency: dict[str, Any], values: float) -> None:
    """With `clip_value`, each element of a weighted gradient is clamped, in buffered mode of the mean."""
    driver = serving(spec(optimizer={"name": "sum", "clip_value": 1.0}, consistency=consistency))

    driver.push({0: ones(2.0)}, weight=2.0)
    driver.push({0: ones(-3.0)})

    assert driver.values() == [values] * 4


def test_ids_of_the_scheduler_are_asked_for_once() -> None:
    """In async the scheduler is asked once about a worker id with '/'; unknown ids and old epochs are refused."""
    driver = serving(spec())

    request = driver.submit({0: ones()}, PushId("run-1/w0", 3, 0))
    assert request not in driver.replies
    driver.send(WorkerAnswered(request, epoch=3, live=True))
    assert request in driver.replies
    driver.push({0: ones()}, PushId("run-1/w0", 3, 1))
    stranger = driver.submit({0: ones()}, PushId("a/b", 1, 0))
    driver.send(WorkerAnswered(stranger, epoch=None))
    driver.send(RosterChanged(driver.view.model, {"run-1/w0": 4}))  # type: ignore[union-attr]
    old = driver.submit({0: ones()}, PushId("run-1/w0", 3, 2))

    assert len(driver.asked) == 2
    assert refused(driver, stranger).code == "reserved_worker"
    assert refused(driver, old).code == "fenced"


def test_a_push_by_name_counts_only_in_the_creation_that_its_worker_joined() -> None:
    """A shard that has not heard of a model created again takes no push of a worker that has joined that one."""
    driver = serving(spec())

    request = driver.submit({0: ones()}, PushId("run-1/w0", 4, 0))
    driver.send(WorkerAnswered(request, epoch=4, live=True, generation=2))

    assert refused(driver, request).code == "loading"
    assert driver.pull(0).version == 0


def test_ssp_takes_pushes_of_joined_workers_only() -> None:
    """In ssp pushes without a joined worker's id are refused; the scheduler is asked about ids the roster lacks."""
    driver = serving(spec(consistency={"mode": "ssp"}), workers={"r/w0": 1})

    plain, free = driver.submit({0: ones()}), driver.submit({0: ones()}, PushId("me", 1, 0))
    asked = driver.submit({0: ones()}, PushId("r/w1", 1, 0))
    driver.send(WorkerAnswered(asked, epoch=1, live=False))

    assert driver.push({0: ones()}, PushId("r/w0", 1, 0)).version == 1
    assert refused(driver, plain).code == refused(driver, free).code == "worker_required"
    assert refused(driver, asked).code == "fenced"


def test_buffered_applies_the_mean_of_every_k_pushes_in_order() -> None:
    """Buffered pushes are applied as the mean of every `count`, in order, or of the rest after the interval."""
    driver = serving(spec(consistency={"mode": "buffered", "count": 3, "interval_ms": 500}))

    done = [driver.push({0: ones(v)}, PushId("w", 1, i)) for i, v in enumerate((1.0, 2.0, 6.0, 5.0))]

    assert [(d.state, d.version) for d in done] == [("buffered", 0)] * 3 + [("buffered", 1)]
    assert driver.push({0: ones(2.0)}, PushId("w", 1, 1)).duplicate
    assert driver.values() == [3.0] * 4
    driver.advance(0.5)
    assert driver.values() == [8.0] * 4
    assert driver.core.held_bytes == 0


def test_changes_of_settings_do_not_put_off_what_is_buffered() -> None:
    """A buffer is flushed an interval after its first push, however often settings change; a shorter one counts."""
    driver = serving(spec(consistency={"mode": "buffered", "count": 9, "interval_ms": 1000}))

    driver.push({0: ones()})
    for live in range(3):
        driver.advance(0.4)
        driver.patch({}, workers=dict(list(ROSTER.items())[:live]))
    assert driver.values() == [1.0] * 4
    driver.push({0: ones()})
    driver.patch({"consistency": {"interval_ms": 300}})
    driver.advance(0.3)

    assert driver.values() == [2.0] * 4


def test_the_mean_of_pushes_that_adjoin_changes_what_each_of_them_names() -> None:
    """Buffered pushes of ranges that touch change the elements of all of them, not only those of the first."""
    driver = serving(spec(consistency={"mode": "buffered", "count": 2}))

    for start in (0, 2):
        driver.push({0: ones()[:2]}, PushId("w", 1, start), ranges={0: ((start, start + 2),)})

    assert driver.values() == [0.5] * 4


def test_buffered_with_a_count_of_one_is_async() -> None:
    """With a count of one, buffered mode applies each push at once and says so."""
    driver = serving(spec(consistency={"mode": "buffered", "count": 1}))

    assert driver.push({0: ones()}).state == "applied"


def test_a_buffer_whose_result_would_not_be_finite_is_dropped() -> None:
    """A flush can refuse no one: a partition whose result is not finite keeps its values, and takes the next pushes."""
    driver = serving(spec(consistency={"mode": "buffered", "count": 2}))

    for value in [1.5e38] * 6 + [-1.5e38] * 4:
        driver.push({0: ones(value)})

    assert [key.index for key in driver.kept] == [0]
    assert (driver.pull(0).version, driver.values()) == (4, [0.0] * 4)
    assert driver.core.held_bytes == 0


def test_leaving_buffered_flushes() -> None:
    """Leaving buffered mode applies the buffered pushes before any push under the new settings."""
    driver = serving(spec(consistency={"mode": "buffered", "count": 9}))
    driver.push({0: ones()})
    driver.push({0: ones(3.0)})

    driver.patch({"consistency": {"mode": "async"}})

    assert driver.values() == [2.0] * 4
    assert driver.push({0: ones()}).version == 2


def test_leaving_sync_takes_all_commits_decided_before() -> None:
    """A partition that is behind takes each commit before the change, then the mean of what is staged after them."""
    driver = serving(spec(consistency={"mode": "sync"}), workers={"r/w0": 1})
    for clock, value in enumerate((1.0, 2.0, 4.0, 8.0)):
        driver.push({0: ones(value)}, PushId("r/w0", 1, clock), clock=clock)
    driver.eager = False
    for clock in range(3):
        driver.commit(clock, Contribution("r/w0", 1, 0, clock))

    driver.patch({"consistency": {"mode": "async"}}, clock=3)
    driver.settle()

    assert (driver.pull(0).version, driver.values()) == (4, [15.0] * 4)


def test_a_snapshot_carries_what_is_buffered() -> None:
    """A snapshot contains buffered pushes, so after a crash every push in the window is applied or buffered."""
    store = InMemoryStore()
    driver = ShardDriver(store)
    buffered = spec(consistency={"mode": "buffered", "count": 3, "interval_ms": 3_600_000})
    driver.serve(buffered)
    for seq in range(2):
        driver.push({0: ones()}, PushId("w", 1, seq))
        driver.advance(6.0)

    after = ShardDriver(store)
    after.serve(buffered, owned={0: 2}, source="snapshot")
    assert [after.push({0: ones()}, PushId("w", 1, seq)).duplicate for seq in range(2)] == [True, True]
    after.push({0: ones(4.0)}, PushId("w", 1, 2))

    assert after.values() == [2.0] * 4
