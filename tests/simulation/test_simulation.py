"""A whole cluster under seeded faults keeps its promises, and the checkers notice when it would not."""

from typing import Any

import pytest

from paramserver.core import shard_io as sio
from paramserver.core.window import PushMemory
from paramserver.testing import nodes
from paramserver.testing.shard_driver import perform
from paramserver.testing.simulation import CONSISTENCY, Simulation
from paramserver.testing.world import Faults

SEEDS = range(50)
MODES = sorted(CONSISTENCY)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[] if s < 8 else [pytest.mark.slow]) for s in SEEDS])
def test_a_cluster_under_faults_keeps_its_promises(seed: int) -> None:
    """Drops, duplicates, reorderings and crashes after any effect lose and double nothing that was promised."""
    mode = MODES[seed % len(MODES)]
    simulation = Simulation(seed, mode)
    try:
        simulation.run()
    except AssertionError:
        print(*simulation.world.log[-40:], sep="\n")
        print(f"replay: python -m paramserver.testing.simulation --seed {seed} --mode {mode}")
        raise


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_gives_the_same_trace(mode: str) -> None:
    """A run is a function of its seed: everything happens again in the same order at the same times."""
    assert Simulation(3, mode).run() == Simulation(3, mode).run()
    assert Simulation(4, mode).run() != Simulation(5, mode).run()


def turns_red(mode: str, *, within: int = 12, **settings: Any) -> bool:
    """Whether some seed finds the bug that was planted."""
    for seed in range(within):
        try:
            Simulation(seed, mode, **settings).run()
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_forgetting_push_ids_turns_the_checkers_red(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the window a push that comes twice counts twice, and the sums show it."""
    monkeypatch.setattr(PushMemory, "judge", lambda *_: None)

    assert turns_red(mode)


def test_applying_twice_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is sometimes taken twice is noticed."""

    def twice(task: sio.Task) -> sio.TaskResult:
        result = perform(task)
        if result.state is not None and isinstance(task, sio.UpdateTask) and task.state.values[0] == 5.0:
            result.state.values[:] += 1.0
        return result

    monkeypatch.setattr(nodes, "perform", twice)

    assert turns_red("sync", within=3)


def test_a_torn_update_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an update in one partition is noticed by whoever pulls it."""

    def half(task: sio.Task) -> sio.TaskResult:
        result = perform(task)
        if result.state is not None and task.state.values[0] == 5.0:
            result.state.values[0] = 5.0
        return result

    monkeypatch.setattr(nodes, "perform", half)

    assert turns_red("async", within=3)


def test_an_acknowledged_push_that_was_not_applied_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that leaves the values as they were is noticed where nothing may have been lost."""

    def skipped(task: sio.Task) -> sio.TaskResult:
        return sio.TaskResult(task.state) if task.state.values[0] == 5.0 else perform(task)

    monkeypatch.setattr(nodes, "perform", skipped)

    assert turns_red("async", within=3, shard_crashes=False, faults=Faults(crash=0.0, drop=0.0))
