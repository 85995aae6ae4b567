"""The shard's core in synchronous mode: staging, commits and settings (cuts: `test_shard_cuts`)."""

import json
import random
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from msgspec.structs import replace
from tests.refusals import refused_with

from paramserver import limits
from paramserver.core.commit import Commit
from paramserver.core.settings import model_settings_document
from paramserver.core.shard.effects import Apply, PullDone
from paramserver.core.shard.events import (
    AssignPart,
    CommitDecided,
    PushReceived,
    RosterChanged,
    SetReceived,
    WorkerAnswered,
)
from paramserver.core.shard.served_model import ServedModel
from paramserver.core.spec import ModelSpec
from paramserver.errors import ConflictError, FencedError, PsError, RequestError, StaleMapError
from paramserver.testing.shard_driver import ShardDriver, push_part
from paramserver.types import ModelKey, PushId

from .partitions import LEVELS, listed, ones, pending, refused, serving, stage, successor, view

WORKERS = ("r/w0", "r/w1", "r/w2")
ROSTER = dict.fromkeys(WORKERS, 1)


def spec(size: int = 4, partitions: int = 1, optimizer: dict[str, Any] | None = None, **consistency: Any) -> ModelSpec:
    return ModelSpec.parse(
        {
            "name": "m",
            "params": {"w": {"shape": [size]}},
            "optimizer": optimizer or {"name": "sum"},
            "consistency": {"mode": "sync"} | consistency,
            "partitions": partitions,
        }
    )


def test_a_commit_applies_the_mean_of_its_list() -> None:
    """Pushes are staged and leave the version; the commit applies their sum divided by the length of its list."""
    driver = serving(spec(), workers=ROSTER)

    staged = stage(driver, 0, 0, 1.0)
    stage(driver, 1, 0, 5.0)
    again = stage(driver, 1, 0, 5.0)
    driver.commit(0, listed(0, 0), listed(1, 0), listed(2, 0))

    assert (staged.state, staged.version, staged.late) == ("staged", 0, False)
    assert (again.duplicate, again.version) == (True, 0)
    assert driver.values() == [2.0] * 4
    assert driver.pull(0).version == 1
    assert driver.core.held_bytes == 0


def test_a_commit_divides_by_the_length_of_its_list() -> None:
    """A commit divides the weighted sum of the pushes by their number, whatever their weights."""
    driver = serving(spec(), workers=ROSTER)
    stage(driver, 0, 0, 4.0, weight=3.0)
    stage(driver, 1, 0, 8.0)

    driver.commit(0, listed(0, 0), listed(1, 0))

    assert driver.values() == [10.0] * 4


def test_every_commit_is_a_version_even_where_nothing_came() -> None:
    """A commit raises the version of every partition, and keeps the values of those that no listed push touched."""
    driver = serving(spec(8, 2), workers=ROSTER)
    stage(driver, 0, 0, 1.0)

    driver.commit(0, listed(0, 0))

    assert (driver.pull(0).version, driver.pull(1).version) == (1, 1)
    assert driver.values(1) == [0.0] * 4


def test_two_hundred_arrival_orders_of_one_clock_give_the_same_bytes() -> None:
    """Sums run in order of (rank, seq), so values and moments are bit-identical for any order of arrival."""
    rng, numbers = random.Random(11), np.random.default_rng(7)
    pushes = [
        (rank, seq, numbers.standard_normal(256).astype(np.float32) * np.float32(10.0 ** rng.randrange(-3, 4)))
        for rank in range(3)
        for seq in range(4)
    ]
    contributions = [listed(rank, 0) for rank in range(3)]
    seen = set()
    for _ in range(200):
        driver = serving(spec(256, optimizer={"name": "adam", "lr": 0.1}), workers=ROSTER)
        rng.shuffle(pushes)
        rng.shuffle(contributions)
        for rank, seq, gradient in pushes:
            driver.push({0: gradient}, PushId(WORKERS[rank], 1, seq), clock=0)
        driver.commit(0, *contributions)
        state = driver.pull(0).parts[0].state
        seen.add(b"".join(a.tobytes() for a in (state.values, *state.slots)))

    assert len(seen) == 1
    assert np.abs(state.values).min() > 0


def test_commits_apply_once_and_in_order_of_their_clocks() -> None:
    """Commits are applied once and in clock order; an early one waits, and the gap before it requests a resync."""
    driver = serving(spec(), workers=ROSTER)
    stage(driver, 0, 0, 1.0)
    stage(driver, 0, 1, 10.0)

    driver.commit(1, listed(0, 1))
    assert (driver.values(), driver.resyncs) == ([0.0] * 4, 1)
    driver.commit(0, listed(0, 0))
    driver.commit(0, listed(0, 0))
    driver.commit(1, listed(0, 1))

    assert driver.values() == [11.0] * 4
    assert driver.pull(0).version == 2


def test_commits_that_come_before_the_partition_is_loaded_wait_for_it() -> None:
    """Commits that arrive while the partition is loading are applied once it is loaded."""
    driver = ShardDriver(eager=False)
    view = driver.serve(spec(), workers=ROSTER)
    driver.commit(0)
    driver.commit(1)
    driver.send(replace(view, clock=2))

    driver.settle()

    assert driver.pull(0).version == 2


def test_a_late_push_is_dropped_and_says_so() -> None:
    """Under `drop` a late push is accepted, discarded and marked late, and so is its duplicate."""
    driver = serving(spec(), workers=ROSTER)
    driver.commit(0)

    late, again = stage(driver, 0, 0, 1.0), stage(driver, 0, 0, 1.0)
    driver.commit(1, listed(0, 0))

    assert (late.late, late.duplicate, again.late, again.duplicate) == (True, False, True, True)
    assert driver.values() == [0.0] * 4
    assert driver.core.held_bytes == 0


def test_what_a_commit_left_out_is_dropped_or_folded() -> None:
    """Under `drop` unlisted parts go with their clock; under `fold` they stay until listed or their epoch ends."""
    for late, want in (("drop", 0.0), ("fold", 4.0)):
        driver = ShardDriver()
        view = driver.serve(spec(late=late), workers=ROSTER)
        stage(driver, 0, 0, 4.0)
        stage(driver, 1, 0, 16.0)
        driver.commit(0)
        driver.commit(1, listed(0, 0))
        assert driver.values() == [want] * 4
        driver.send(RosterChanged(view.model, {"r/w0": 1}))
        assert driver.core.held_bytes == 0


def test_a_late_clock_is_folded_by_the_commit_that_ends_folding() -> None:
    """A commit whose revision brings `drop` applies the late clock that it lists, and drops the one that it omits."""
    driver = serving(spec(late="fold"), workers=ROSTER)
    stage(driver, 0, 0, 4.0)
    stage(driver, 1, 0, 16.0)
    driver.commit(0)
    driver.patch({"consistency": {"late": "drop"}})

    driver.commit(1, listed(0, 0), revision=2)

    assert driver.values() == [4.0] * 4
    assert driver.core.held_bytes == 0


def test_a_folded_gradient_that_can_never_be_listed_is_let_go() -> None:
    """Under `fold` a worker's parts older than its newest listed clock, which no list can name, are dropped."""
    driver = serving(spec(late="fold"), workers=ROSTER)
    stage(driver, 0, 0, 4.0)
    stage(driver, 0, 1, 2.0)
    stage(driver, 1, 0, 16.0)
    held = driver.core.held_bytes

    driver.commit(0)
    driver.commit(1, listed(0, 1))

    assert driver.core.held_bytes == held // 3
    driver.commit(2, listed(1, 0))
    assert driver.core.held_bytes == 0
    assert driver.values() == [18.0] * 4


def test_what_a_dead_worker_has_pushed_ahead_is_let_go_with_its_epoch() -> None:
    """Parts staged ahead are dropped when their worker's epoch ends, but kept for a worker not yet in any roster."""
    driver = ShardDriver(roster=lambda ask: WorkerAnswered(ask.request, 1, True))
    view = driver.serve(spec(late="fold"), workers={w: ROSTER[w] for w in WORKERS[:2]})
    for rank, clock in ((0, 0), (0, 7), (1, 7), (2, 7)):
        stage(driver, rank, clock, 1.0)

    driver.commit(0)
    driver.send(RosterChanged(view.model, {WORKERS[1]: 1}))
    assert set(driver.core.models["m"].partitions[0].staged) == {(w, 1, 7) for w in WORKERS[1:]}
    driver.send(RosterChanged(view.model, {w: ROSTER[w] for w in WORKERS[1:]}))
    driver.send(RosterChanged(view.model, {WORKERS[1]: 2}))

    assert driver.core.held_bytes == 0


def test_what_a_commit_still_to_come_lists_of_a_dead_worker_stays_until_then() -> None:
    """Parts of a dead worker stay until a commit that lists them, which was decided before the roster changed."""
    driver = ShardDriver()
    view = driver.serve(spec(late="fold"), workers=ROSTER)
    stage(driver, 0, 1, 2.0)

    driver.commit(1, listed(0, 1))
    driver.send(RosterChanged(view.model, {}))
    driver.commit(0)

    assert driver.values() == [2.0] * 4
    assert driver.core.held_bytes == 0


def test_no_push_is_staged_for_a_clock_that_is_too_far_ahead() -> None:
    """A push more than CLOCKS_AHEAD_MAX ahead of the open clock is refused, as the scheduler refuses such a report."""
    driver = serving(spec(), workers=ROSTER)
    stage(driver, 0, limits.CLOCKS_AHEAD_MAX, 1.0)
    with pytest.raises(RequestError) as e:
        stage(driver, 0, limits.CLOCKS_AHEAD_MAX + 1, 1.0)

    assert (e.value.code, e.value.members["where"]) == ("invalid_field", "clock")
    driver.commit(0)
    stage(driver, 0, limits.CLOCKS_AHEAD_MAX + 1, 1.0)


def test_pushes_that_sync_cannot_take_are_refused() -> None:
    """In sync a push without a joined worker, without a clock or with a replaced epoch is refused."""
    driver = serving(spec(), workers=ROSTER | {"r/w0": 2})

    with pytest.raises(PsError) as plain:
        driver.push({0: ones()}, clock=0)
    with pytest.raises(PsError) as clockless:
        driver.push({0: ones()}, PushId("r/w1", 1, 0))
    with pytest.raises(FencedError) as old:
        stage(driver, 0, 0, 1.0)

    assert (plain.value.code, clockless.value.code, old.value.code) == ("worker_required", "invalid_field", "fenced")


def test_staged_bytes_are_bounded() -> None:
    """A push beyond the bound of its shard gets `queue_full`, is not remembered, and is accepted once there is room."""
    driver = serving(spec(), workers=ROSTER)
    driver.core.held_bytes_max = 32
    stage(driver, 0, 0, 1.0)
    stage(driver, 1, 0, 1.0)

    with refused_with("queue_full"):
        stage(driver, 2, 0, 1.0)
    driver.commit(0, listed(0, 0), listed(1, 0))
    assert stage(driver, 2, 1, 1.0, seq=0).duplicate is False


def test_a_commit_whose_result_is_not_finite_keeps_the_values() -> None:
    """A commit whose result is not finite raises the version, keeps the values, and is reported."""
    driver = serving(spec(), workers=ROSTER)
    stage(driver, 0, 0, 3e38)
    driver.commit(0, listed(0, 0))
    stage(driver, 0, 1, 3e38)

    driver.commit(1, listed(0, 1))

    assert [key.index for key in driver.kept] == [0]
    assert (driver.pull(0).version, driver.values()) == (2, [float(np.float32(3e38))] * 4)


def test_a_result_that_is_not_finite_leaves_the_other_partitions_alone() -> None:
    """Only the partition whose result is not finite keeps its values and says so; the others take the step."""
    driver = serving(spec(8, 2), workers=ROSTER)
    for t in range(2):
        driver.push({0: ones(3e38), 1: ones()}, PushId(WORKERS[0], 1, t), clock=t)
        driver.commit(t, listed(0, t))

    assert [key.index for key in driver.kept] == [0]
    assert (driver.values(0), driver.values(1)) == ([float(np.float32(3e38))] * 4, [2.0] * 4)


def test_what_float32_cannot_hold_is_not_staged() -> None:
    """A gradient that overflows float32 is refused, because it would make the mean of all workers infinite."""
    driver = serving(spec(), workers=ROSTER)
    stage(driver, 0, 0, 1.0)
    part, request = push_part(0, np.array([1e300, 0, 0, 0]), 4, dtype="float64"), driver.request()
    driver.send(PushReceived("m", (part,), push_id=PushId(WORKERS[1], 1, 0), clock=0, request=request))
    with pytest.raises(RequestError) as e:
        driver.outcome(request)
    driver.commit(0, listed(0, 0))

    assert e.value.code == "non_finite"
    assert driver.values() == [1.0] * 4


def test_settings_change_at_the_commit_that_names_their_revision() -> None:
    """A commit uses the settings of the revision it names, even if the shard knows newer ones already."""
    driver = serving(spec(optimizer={"name": "sgd", "lr": 1.0}), workers=ROSTER)
    stage(driver, 0, 0, 1.0)
    stage(driver, 0, 1, 1.0)
    driver.patch({"optimizer": {"lr": 10.0}})

    driver.commit(0, listed(0, 0), revision=1)
    driver.commit(1, listed(0, 1), revision=2)

    assert driver.values() == [-11.0] * 4


@pytest.mark.parametrize("seen", ["each change", "the last change", "the commit first"])
def test_a_commit_brings_the_settings_that_it_names(seen: str) -> None:
    """All shards apply a commit with the settings of its revision, also one that heard only of newer settings.

    The commits after it name the same revision without its settings, which the partition has by then.
    """
    driver = serving(spec(optimizer={"name": "sgd", "lr": 1.0}), workers=ROSTER)
    for t in range(3):
        stage(driver, 0, t, 1.0)
    sent = view(driver)
    params = {"w": {"lr_scale": 10.0}}
    second = replace(sent, spec=sent.spec.patched({"params": params}), revision=2)
    third = replace(sent, spec=sent.spec.patched({"optimizer": {"lr": 100.0}}), revision=3)
    named = [(2, second.spec), (2, None), (3, third.spec)]
    commits = tuple(
        Commit(t, 0, (listed(0, t),), r, 3, False, None if s is None else model_settings_document(s, r))
        for t, (r, s) in enumerate(named)
    )
    commits = tuple(Commit.of(json.loads(json.dumps(c.document(sent.model)))) for c in commits)

    if seen == "each change":
        driver.send(second)
    if seen != "the last change":
        driver.send(CommitDecided(sent.model, commits[0]))
    driver.send(replace(third, clock=3, commits=commits))

    assert driver.values() == [-120.0] * 4


def test_an_assignment_moves_no_schedule() -> None:
    """In sync, schedules count the clock: partitions that were assigned to keep the rate of the others."""
    schedule = {"kind": "step", "step_size": 2, "gamma": 0.5}
    driver = serving(spec(8, 2, {"name": "sgd", "lr": 1.0, "schedule": schedule}), workers=ROSTER)
    for _ in range(2):
        part = AssignPart(1, ones(0.0), "float32", True)
        driver.send(SetReceived("m", (part,), generation=1, request=driver.request()))

    for t in range(3):
        driver.push({0: ones(), 1: ones()}, PushId(WORKERS[0], 1, t), clock=t)
        driver.commit(t, listed(0, t))
    driver.push({0: ones(), 1: ones()}, PushId(WORKERS[0], 1, 3), clock=3)
    driver.patch({"consistency": {"mode": "async"}}, clock=3)

    assert (driver.pull(0).version, driver.pull(1).version) == (4, 6)
    assert (driver.values(0), driver.values(1)) == ([-3.0] * 4, [-3.0] * 4)


def test_leaving_sync_applies_the_open_clock_and_entering_begins_at_the_leaders() -> None:
    """Leaving sync applies decided commits, then what is staged; a new phase begins with a cut at its first clock."""
    driver = serving(spec(), workers=ROSTER)
    stage(driver, 0, 0, 1.0)
    stage(driver, 0, 1, 5.0)
    driver.commit(0, listed(0, 0))

    driver.patch({"consistency": {"mode": "async"}}, clock=1)
    assert (driver.values(), driver.core.held_bytes) == ([6.0] * 4, 0)
    assert driver.push({0: ones()}, PushId("r/w1", 1, 0)).version == 3
    driver.patch({"consistency": {"mode": "sync"}}, clock=7, began=7)
    stage(driver, 2, 7, 2.0)
    driver.commit(7, listed(2, 7))

    assert driver.values() == [9.0] * 4
    assert driver.pull(0).version == 8  # the version is the clock from the first commit on
    driver.advance(1.0)
    assert [row.clock for row in driver.core.cuts()] == [7]


@pytest.mark.parametrize("rule", [{"mode": "async"}, {"mode": "buffered", "count": 9, "interval_ms": 60000}])
def test_leaving_sync_applies_the_mean_of_the_contributions_staged(rule: dict[str, Any]) -> None:
    """The open clock ends with the mean of what workers staged for it, however many pushes each of them made.

    What a worker staged under an epoch that has ended is left out, because it stages its iteration again.
    """
    driver = serving(spec(), workers=ROSTER)
    for worker, value in ((0, 1.0), (1, 2.0), (1, 4.0), (2, 100.0)):
        driver.push({0: ones(value)}, PushId(WORKERS[worker], 1, int(value)), clock=0)
    now = ROSTER | {WORKERS[2]: 2}
    driver.send(RosterChanged(ModelKey("m", 1), now) if rule["mode"] == "async" else replace(view(driver), workers=now))
    driver.push({0: ones(5.0)}, PushId(WORKERS[2], 2, 0), clock=0)

    driver.patch({"consistency": rule})

    assert driver.values() == [4.0] * 4
    assert driver.core.held_bytes == 0


@pytest.mark.parametrize("ack", LEVELS)
@pytest.mark.parametrize("clock", [0, 1])
def test_a_push_of_a_worker_that_leaves_while_it_is_applied_counts(clock: int, ack: str) -> None:
    """A worker that goes after sync, while the mean of what is staged, or a commit before it, is computed, is in it.

    The journal and the answers agree.  One whose epoch ended before sync did is left out.
    """
    driver = ShardDriver()
    driver.serve(replace(spec(), ack=ack), workers=ROSTER)
    for t in range(clock):
        stage(driver, 0, t, 8.0)
    for rank, value in enumerate((1.0, 3.0, 100.0)):
        stage(driver, rank, clock, value)
    driver.eager = False
    for t in range(clock):
        driver.commit(t, listed(0, t))
    again = ROSTER | {WORKERS[2]: 2}
    driver.send(RosterChanged(ModelKey("m", 1), again))
    driver.patch({"consistency": {"mode": "async"}}, clock=clock, workers=again)
    assert pending(driver, Apply)

    driver.send(RosterChanged(ModelKey("m", 1), {WORKERS[0]: 1}))
    driver.eager = True
    driver.settle()

    repeated = stage(driver, 1, clock, 3.0)
    applied = [8.0 * clock + 2.0] * 4
    assert (repeated.duplicate, repeated.late, driver.values()) == (True, False, applied)
    if ack != "applied":
        assert successor(driver).values() == applied


@pytest.mark.parametrize("left", [False, True])
def test_a_push_that_its_commit_left_out_is_late_when_it_is_sent_again(left: bool) -> None:
    """A staged push that the commit of its clock does not list is dropped; its repetition is told so, in any mode."""
    driver = ShardDriver()
    driver.serve(spec(quorum=0.5), workers=ROSTER)
    stage(driver, 0, 0, 1.0)
    stage(driver, 1, 0, 5.0)
    driver.commit(0, listed(0, 0))
    if left:
        driver.patch({"consistency": {"mode": "async"}}, clock=1)

    counted, dropped = stage(driver, 0, 0, 1.0), stage(driver, 1, 0, 5.0)

    assert [(d.duplicate, d.late) for d in (counted, dropped)] == [(True, False), (True, True)]
    assert driver.values() == [1.0] * 4


def test_a_push_staged_before_sync_ended_is_known_afterwards() -> None:
    """A staged push that is sent again after the model left sync is a duplicate, as it has been applied."""
    driver = serving(spec(), workers=ROSTER)
    stage(driver, 0, 0, 3.0)
    driver.patch({"consistency": {"mode": "async"}})

    again = driver.push({0: ones(3.0)}, PushId(WORKERS[0], 1, 0))

    assert (again.duplicate, driver.values()) == (True, [3.0] * 4)


def test_lag_is_counted_at_the_commit() -> None:
    """A gradient is scaled by the versions between its base and its commit, however early it was staged."""
    driver = serving(spec(lag="scale"), workers=ROSTER)
    stage(driver, 0, 1, 4.0, base=(0, 1))

    driver.commit(0)
    driver.commit(1, listed(0, 1))

    assert driver.values() == [2.0] * 4


def test_a_pull_waits_for_a_clock_whatever_the_version() -> None:
    """A pull with `min_clock` waits for commits: an assignment raises the version, but not the clock."""
    driver = serving(spec(), workers=ROSTER)
    stage(driver, 0, 0, 1.0)
    driver.send(SetReceived("m", (AssignPart(0, ones(), "float32", True),), request=90))

    waiting = driver.ask((0,), min_clock=1, wait_s=5.0)
    assert waiting not in driver.replies
    driver.commit(0, listed(0, 0))
    made = driver.outcome(waiting)

    assert isinstance(made, PullDone)
    assert (made.version, driver.values()) == (2, [2.0] * 4)
    with pytest.raises(ConflictError, match="not yet at clock 2"):
        driver.pull(0, min_clock=2)


def test_out_of_sync_no_pull_waits_for_a_clock() -> None:
    """Out of sync no pull waits for `min_clock`, not even one that already did; back in sync, pulls wait again."""
    driver = serving(spec(), workers=ROSTER)
    stage(driver, 0, 0, 1.0)
    waiting = driver.ask((0,), min_clock=2, wait_s=60.0)
    driver.commit(0, listed(0, 0))
    assert waiting not in driver.replies

    driver.patch({"consistency": {"mode": "async"}})
    assert isinstance(driver.outcome(waiting), PullDone)
    assert driver.pull(0, min_clock=9).version == 1

    driver.eager = False
    driver.submit({0: ones(2.0)})
    driver.patch({"consistency": {"mode": "sync"}}, clock=5, began=5, timeline=1)
    driver.submit({0: ones()}, PushId(WORKERS[0], 1, 1), clock=5)
    soon = driver.ask((0,), min_clock=5, wait_s=60.0)
    assert soon not in driver.replies, "a push is being computed, the partition enters the phase after it"
    driver.settle()
    assert driver.outcome(soon).version == 2  # type: ignore[union-attr]


def test_a_push_whose_turn_comes_after_a_new_timeline_began_is_refused() -> None:
    """A push that came before a new timeline and waited for its turn is refused: its clock is of the old timeline."""
    driver = ShardDriver(eager=False)
    driver.serve(spec(), workers=ROSTER)
    driver.settle()
    driver.submit({0: ones()}, PushId(WORKERS[0], 1, 0), clock=0)
    driver.commit(0, listed(0, 0))
    queued = driver.submit({0: ones()}, PushId(WORKERS[0], 1, 1), clock=1, timeline=0)
    assert queued not in driver.replies

    driver.patch({}, clock=5, began=5, timeline=1)
    driver.settle()

    assert refused(driver, queued).code == "rolled_back"
    assert driver.core.held_bytes == 0


def test_a_pull_that_waits_for_a_commit_is_not_looked_at_for_each_of_its_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waking a pull of n partitions costs a number of checks that is linear in n, not quadratic."""
    partitions = 256
    looks = Mock(side_effect=ServedModel.owned)
    driver = serving(spec(partitions, partitions), workers=ROSTER)
    driver.push({i: ones(size=1) for i in range(partitions)}, PushId(WORKERS[0], 1, 0), clock=0)
    waiting = driver.ask(tuple(range(partitions)), min_clock=1, wait_s=5.0)

    monkeypatch.setattr(ServedModel, "owned", lambda *args: looks(*args))
    driver.commit(0, listed(0, 0))
    made = driver.outcome(waiting)

    assert isinstance(made, PullDone)
    assert {p.version for p in made.parts} == {1}
    assert 0 < looks.call_count <= 4 * partitions


def test_a_commit_is_computed_on_all_partitions_together_and_lost_ones_do_not_hold_up_the_rest() -> None:
    """A commit of several partitions is one job, whose result is discarded for a partition lost meanwhile."""
    driver = serving(spec(3, 3), workers=ROSTER)
    driver.push({i: ones(size=1) for i in range(3)}, PushId(WORKERS[0], 1, 0), clock=0)
    driver.eager = False

    driver.commit(0, listed(0, 0))
    (job,) = driver.pending
    assert isinstance(job, Apply)
    assert len(job.tasks) == 3

    assert driver.view is not None
    driver.send(replace(driver.view, owned={i: t for i, t in driver.view.owned.items() if i != 1}))
    driver.complete()
    made = driver.outcome(driver.ask((0, 2)))
    assert isinstance(made, PullDone)
    assert [(p.version, p.state.values.tolist()) for p in made.parts] == [(1, [1.0]), (1, [1.0])]
    with pytest.raises(StaleMapError):
        driver.pull(1)


def test_a_worker_goes_on_without_asking_once_nothing_of_its_push_is_left() -> None:
    """A worker may go on without asking the scheduler only after a commit that listed its push.

    Not if the commit left the push out for a later one, if further commits came, or if the scheduler needs a report.
    """
    driver = serving(spec(late="fold"), workers=ROSTER)
    served = driver.core.find_model(ModelKey("m", 1))
    assert served is not None
    stage(driver, 0, 0, 1.0)
    stage(driver, 1, 0, 1.0)
    assert served.has_staged([0], WORKERS[0], 1, 0)
    assert not served.has_staged([0], WORKERS[2], 1, 0)

    driver.commit(0, listed(0, 0))
    assert not served.has_staged([0], WORKERS[1], 1, 0), "its clock is over, though it is still held"
    assert served.may_continue([0], WORKERS[0], 1, 0)
    assert not served.may_continue([0], WORKERS[1], 1, 0)
    driver.commit(1, listed(1, 0), needs_report=True)

    assert not served.may_continue([0], WORKERS[1], 1, 0)
    assert not served.may_continue([0], WORKERS[0], 1, 1)
    driver.commit(2, listed(0, 2))
    assert served.may_continue([0], WORKERS[0], 1, 2)
    driver.commit(3, listed(2, 3))
    assert not served.may_continue([0], WORKERS[0], 1, 2), "the others have gone on, to where the scheduler knows"
    assert not served.may_continue([1], WORKERS[0], 1, 2), "of a partition that is not here nothing is known"
