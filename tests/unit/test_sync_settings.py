"""The settings of a partition in sync are those that its last commit names, whenever it hears of newer ones."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from paramserver.core.commit import Commit
from paramserver.core.partition_state import PartitionState
from paramserver.core.ranges import of_pairs
from paramserver.core.settings import model_settings_document
from paramserver.core.shard.events import AssignPart, CommitDecided, ModelView, SetReceived
from paramserver.core.shard.partition import Partition
from paramserver.testing.shard_driver import ShardDriver
from paramserver.types import PushId

from .partitions import LEVELS, ROSTER, WORKERS, listed, ones, refused, serving, spec, stage, successor, view

ADAM = {"name": "adam", "lr": 0.5}
ADAGRAD = {"name": "adagrad", "lr": 0.5}
MOMENTUM = {"name": "momentum", "lr": 0.25}
SGD = {"name": "sgd", "lr": 0.5}
SYNC = {"mode": "sync"}


def partition(driver: ShardDriver) -> Partition:
    """Return the only partition."""
    return driver.core.models["m"].partitions[0]


def state(driver: ShardDriver) -> PartitionState:
    """Return its state."""
    found = partition(driver).state
    assert found is not None
    return found


def content(driver: ShardDriver) -> tuple[Any, ...]:
    """Return its revision, version, values, optimizer state and step counts."""
    p, s = partition(driver), state(driver)
    return p.revision, p.version, s.values.tolist(), [slot.tolist() for slot in s.slots], s.steps


def commit(of: ModelView, t: int, settings: ModelView | None, *clocks: int) -> Commit:
    """Return commit `t`, which brings the settings of that view, or none, and lists the first worker's `clocks`."""
    contributions = tuple(listed(0, clock) for clock in clocks)
    named = of if settings is None else settings
    brought = None if settings is None else model_settings_document(settings.spec, settings.revision)
    return Commit(t, of.timeline, contributions, named.revision, len(ROSTER), False, brought)


def decide(driver: ShardDriver, decided: Commit) -> None:
    """Send the commit."""
    driver.send(CommitDecided(view(driver).model, decided))


@pytest.mark.parametrize("ack", LEVELS)
def test_a_commit_decided_before_a_change_of_optimizer_takes_nothing_from_a_restore_that_brought_it(ack: str) -> None:
    """A restore's optimizer state stays where a commit of earlier settings comes only after it.

    Other partitions had that commit before, and kept the state.
    """
    driver = serving(spec(ack=ack, optimizer=MOMENTUM, consistency=SYNC), workers=ROSTER)
    stage(driver, 0, 0, 1.0)
    first = view(driver)
    driver.patch({"optimizer": ADAM})
    restored = tuple(np.full(4, x, np.float32) for x in (2.0, 3.0))
    part = AssignPart(0, ones(7.0), "float32", True, slots=restored, steps=(5,))
    driver.send(SetReceived("m", (part,), restore=True, request=driver.request()))

    decide(driver, commit(first, 0, first, 0))
    driver.send(replace(view(driver), timeline=1, began=2, clock=2, commits=()))
    driver.commit(2)

    expected = 2, 3, [7.0] * 4, [[2.0] * 4, [3.0] * 4], (5,)
    assert content(driver) == expected
    assert ack == "applied" or content(successor(driver)) == expected


@pytest.mark.parametrize("ack", LEVELS)
@pytest.mark.parametrize("kept", [False, True])
def test_a_partition_that_enters_sync_late_keeps_the_optimizer_state_that_the_others_keep(ack: str, kept: bool) -> None:
    """Settings newer than those of the phase's first commits wait for the commit that names them.

    So all partitions step with the same ones, and none loses moments that the phase began with.
    """

    def trained(late: bool) -> ShardDriver:
        driver = serving(spec(ack=ack, optimizer=ADAM, consistency={"mode": "async"}), workers=ROSTER)
        for seq in range(3):
            driver.push({0: ones(2.0)}, PushId(WORKERS[0], 1, seq))
        before = view(driver)
        entered = replace(before, spec=before.spec.patched({"consistency": SYNC}), revision=2, timeline=1)
        entered = replace(entered, began=5, clock=5)
        change = {"lr": 4.0} if kept else MOMENTUM
        changed = replace(entered, spec=entered.spec.patched({"optimizer": change}), revision=3, clock=7)
        driver.send(changed if late else entered)
        for clock in (6, 7):
            stage(driver, 0, clock, float(clock), timeline=1)
        decide(driver, commit(entered, 5, entered))
        decide(driver, commit(entered, 6, None, 6))
        driver.send(changed)
        decide(driver, commit(changed, 7, changed, 7))
        assert partition(driver).clock == 8
        return driver

    late, expected = trained(late=True), content(trained(late=False))
    assert content(late) == expected
    assert ack == "applied" or content(successor(late)) == expected


@pytest.mark.parametrize("ack", LEVELS)
def test_first_values_begin_under_the_settings_of_their_first_commit(ack: str) -> None:
    """Where settings change while a partition is loaded, the commits decided before are applied under their own."""

    def trained(late: bool) -> ShardDriver:
        driver = ShardDriver(eager=not late)
        first = driver.serve(spec(ack=ack, optimizer=MOMENTUM, consistency=SYNC), workers=ROSTER)
        changed = replace(first, spec=first.spec.patched({"optimizer": ADAM}), revision=2, clock=2)
        commits = commit(first, 0, first, 0), commit(first, 1, None, 1), commit(changed, 2, changed, 2)
        for clock in (0, 1, 2):
            driver.submit({0: ones(float(clock + 1))}, PushId(WORKERS[0], 1, clock), clock=clock)
        if late:
            driver.send(replace(changed, commits=commits[:2]))
        driver.settle()
        for c in commits:
            decide(driver, c)
            driver.settle()
        return driver

    late, expected = trained(late=True), content(trained(late=False))
    assert content(late) == expected
    assert ack == "applied" or content(successor(late)) == expected


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("before", "after", "names"),
    [(MOMENTUM, ADAGRAD, ("sum",)), (SGD, ADAM, ("exp_avg", "exp_avg_sq")), (ADAM, SGD, ())],
)
def test_a_restore_waits_for_the_optimizer_that_its_state_is_of(
    mode: str, before: dict[str, Any], after: dict[str, Any], names: tuple[str, ...]
) -> None:
    """State of another optimizer than the shard has heard of, of as many arrays or not, is refused until it has."""
    driver = serving(spec(optimizer=before, consistency={"mode": mode}), workers=ROSTER)
    slots = tuple(np.full(4, 2.0, np.float32) for _ in names)
    part = AssignPart(0, ones(7.0), "float32", True, slots=slots, steps=(5,))

    def restore() -> int:
        request = driver.request()
        driver.send(SetReceived("m", (part,), restore=True, slot_names=names, request=request))
        return request

    assert refused(driver, restore()).code == "loading"
    driver.patch({"optimizer": after})
    driver.outcome(restore())

    assert content(driver) == (2, 1, [7.0] * 4, [[2.0] * 4] * len(names), (5,))


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("empty_push", []),
        ("invalid_range", [{"partition": 1}]),
        ("invalid_range", [{}, {}]),
        ("invalid_range", [{"ranges": of_pairs([(2, 6)])}]),
        ("invalid_shape", [{"ranges": of_pairs([(1, 3)])}]),
        ("invalid_shape", [{"slots": (ones(), np.zeros(3, np.float32))}]),
        ("invalid_shape", [{"steps": (1, 2)}]),
    ],
)
def test_an_assignment_that_does_not_fit_its_model_is_refused(code: str, parts: list[dict[str, Any]]) -> None:
    """No parts, parts twice or beyond the model, and wrong numbers of elements or step counts are refused."""
    driver = serving(spec(optimizer=ADAM))
    request, whole = driver.request(), AssignPart(0, ones(), "float32", True)
    driver.send(SetReceived("m", tuple(replace(whole, **part) for part in parts), request=request))

    assert refused(driver, request).code == code


def test_a_restore_that_is_refused_brings_no_settings() -> None:
    """Where a restore's state is of an earlier optimizer, the newer one still waits for its commit."""
    driver = serving(spec(optimizer=MOMENTUM, consistency=SYNC), workers=ROSTER)
    stage(driver, 0, 0, 1.0)
    first = view(driver)
    driver.patch({"optimizer": ADAGRAD})
    part = AssignPart(0, ones(7.0), "float32", True, slots=(ones(),), steps=(5,))
    request = driver.request()
    driver.send(SetReceived("m", (part,), restore=True, slot_names=("momentum_buffer",), request=request))

    assert refused(driver, request).code == "loading"
    decide(driver, commit(first, 0, first, 0))
    assert content(driver) == (1, 1, [-0.25] * 4, [[1.0] * 4], (1,))
