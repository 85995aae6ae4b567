"""A whole simulated cluster under seeded faults keeps its promises."""

from typing import Any

import pytest

from paramserver.testing.reference import OPTIMIZERS
from paramserver.testing.simulation import CHANGES, CONSISTENCY, LEVELS, Simulation
from paramserver.testing.trouble import KINDS
from paramserver.testing.world import Faults

SEEDS = 300
"""More of them, and in other combinations: make chaos SEEDS=5000."""
TOGETHER = 5
"""Seeds per test."""
STEP = 13
"""Between the seeds of a test, so that few of them have many modes, kinds and changes."""


def run(simulation: Simulation) -> str:
    """Run a simulation and return its trace's hash; on failure print the end of the log and the replay command."""
    try:
        return simulation.run()
    except BaseException:
        print(*simulation.world.log[-40:], sep="\n")
        print(f"replay: {simulation.replay}")
        raise


@pytest.mark.parametrize(
    "first", [pytest.param(s, marks=[] if s < 4 * TOGETHER else [pytest.mark.slow]) for s in range(0, SEEDS, TOGETHER)]
)
def test_a_cluster_under_faults_keeps_its_promises(first: int) -> None:
    """Crashes after any effect, cuts, pauses, moves and an absent or emptied Redis lose and double nothing promised."""
    for seed in range(first, first + TOGETHER):
        run(Simulation(seed))


FOUND = {
    (142, "ssp", "journaled", "emptied"): "Redis had the renewed token before the owner had heard of it, refused its "
    "journal, and the owner threw away the only copy there was",
    (
        67,
        "sync",
        "applied",
        "cuts",
    ): "a shard that died after the last clock took the model back, and the checker waited for that clock for ever",
    (
        459,
        "sync",
        "applied",
        "pauses",
    ): "a leader that took over after a rollback believed workers' clocks of before it, "
    "and made commits without contributions",
    (143, "sync", "journaled", "emptied"): "a partition that was in nobody's memory when Redis was emptied came back "
    "with its first values and could never reach the others' clock",
    (
        16,
        "sync",
        "applied",
        "cuts",
    ): "owners were not told that a cut was whole, and let it go for the next one: a death "
    "before that was whole left the model nowhere to go back to",
    (37, "sync", "applied", "pauses"): "a snapshot for a move that had been called off took the place of a cut",
}
"""Runs that once failed, and the bug that each found."""


@pytest.mark.parametrize("found", FOUND, ids=str)
def test_what_was_found_once_stays_found(found: tuple[int, str, str, str]) -> None:
    """Each run that once found a bug passes, with 8 clocks and with 10."""
    run(Simulation(*found, change="none"))
    run(Simulation(*found, change="none", clocks=10))


@pytest.mark.parametrize(
    "first",
    [pytest.param(s, marks=[] if s < 4 * TOGETHER else [pytest.mark.slow]) for s in range(0, 24 * TOGETHER, TOGETHER)],
)
def test_a_model_that_goes_from_mode_to_mode_loses_and_doubles_no_push(first: int) -> None:
    """A push whose iteration has ended is in the values once, whatever mode the model was in, entered or left."""
    for seed in range(first, first + TOGETHER):
        run(Simulation(seed, change="modes"))


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 100, 10))])
def test_workers_that_leave_while_a_mode_ends_lose_and_double_no_push(first: int) -> None:
    """If workers die or are removed while slow shards apply what a mode has left, pushes count once."""
    for seed in range(first, first + 10):
        run(Simulation(seed, level="journaled", kind="slow", change="modes", deaths=True))


MODE_CHANGES_FOUND = {
    26: "workers were told to work on the clock of the commit that begins a phase, which lists nothing",
    315: "a partition that had not heard of the end of a phase without commits went straight to the next one",
}
"""Seeds with which a change of mode once lost a push, and why."""


@pytest.mark.parametrize("seed", MODE_CHANGES_FOUND)
def test_what_a_change_of_mode_once_lost_is_there(seed: int) -> None:
    """Each run in which a change of mode once lost a push passes."""
    run(Simulation(seed, change="modes"))


def spread(fast: int) -> list[Any]:
    """Return the first seeds of tests that go on in steps of `STEP`; all but `fast` are slow."""
    return [pytest.param(first, marks=[] if first == fast else [pytest.mark.slow]) for first in range(STEP)]


@pytest.mark.parametrize("first", spread(0))
def test_a_model_created_again_has_no_push_and_no_worker_of_its_predecessor(first: int) -> None:
    """Pushes count, and are acknowledged, only in the creation of the model that their worker has joined."""
    for seed in range(first, 5 * STEP, STEP):
        run(Simulation(seed, kind=("", "feeds")[seed % 2], change="recreations", deaths=seed % 3 == 2))


@pytest.mark.parametrize("first", spread(11))
def test_two_models_on_the_same_shards_keep_their_promises(first: int) -> None:
    """Two models trained at the same time, in two modes, do as each would alone, also while one is restored."""
    for seed in range(first, 5 * STEP, STEP):
        run(Simulation(seed, models=2, optimizer=OPTIMIZERS[seed % 3]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:])
@pytest.mark.parametrize("first", spread(3))
def test_values_and_optimizer_state_are_those_after_a_number_of_steps(first: int, optimizer: str) -> None:
    """Moves, deaths with recovery, restores and changes of mode leave all of a partition after one number of steps."""
    for seed in range(first, 3 * STEP, STEP):
        run(Simulation(seed, optimizer=optimizer))
        run(Simulation(seed, change=("modes", "recreations", "restores")[seed % 3], optimizer=optimizer))


@pytest.mark.parametrize("first", [135, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 50, 200))])
def test_a_model_that_is_restored_ends_in_one_state(first: int) -> None:
    """However often shards and leaders die around restores, all partitions end with the same number of steps."""
    for seed in range(first, first + 15):
        run(Simulation(seed, "sync", "applied", "crashes", "restores", deaths=True, faults=Faults(crash=0.004)))


UNFINISHED = {
    (1, "crashes", "none"): "the owner of a partition died before it had stored it, and the next one was beyond the "
    "clock by the journal",
    (49, "emptied", "restores"): "Redis was emptied while the cut was being written",
    (76, "pauses", "puts"): "the owner of a partition was thought dead",
}
"""Runs in which the scheduler once waited for a cut that could not become complete any more, and why."""


@pytest.mark.parametrize("found", UNFINISHED, ids=str)
def test_no_cut_is_waited_for_in_vain(found: tuple[int, str, str]) -> None:
    """A cut that can no longer become complete is given up, so that the run ends without a pending cut."""
    seed, kind, change = found
    # At `journaled`, only checkpoints request cuts.
    run(Simulation(seed, "sync", "journaled", kind, change, checkpoints=2))


@pytest.mark.slow
@pytest.mark.parametrize("clocks", [0, 8])
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_assigned_to_a_model_that_rests_is_there_after_a_death(level: str, clocks: int) -> None:
    """Values assigned after the last commit, or before the first, survive a move and the death of a shard."""
    for seed, kind in enumerate(KINDS):
        run(Simulation(seed, "sync", level, kind, "puts", clocks=clocks))


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_commit_is_applied_with_the_settings_it_names(level: str) -> None:
    """Where settings change while feeds are cut and shards die, all partitions apply a commit with the same ones."""
    for seed in range(12):
        run(Simulation(seed, "sync", level, "feeds", "settings"))


@pytest.mark.parametrize("first", spread(5))
def test_a_change_of_the_optimizer_leaves_all_partitions_alike(first: int) -> None:
    """Where the optimizer changes around restores and phases out of sync, no partition loses state that others keep."""
    for seed in range(first, 5 * STEP, STEP):
        run(Simulation(seed, "sync", kind=("", "births", "stops")[seed % 3], change="optimizers"))


def test_what_the_policy_dropped_is_not_folded_after_a_change_of_it() -> None:
    """Where the policy for late reports changes to `drop` and back to `fold`, every mean is of whole contributions."""
    for seed in (12, 21, 47, 52, 53, 57, 59):
        run(Simulation(seed, "sync", change="settings", late="fold"))


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_checkpoints_of_a_synchronous_model_find_their_cuts(level: str) -> None:
    """With automatic checkpoints, a synchronous model ends without a pending cut under each kind of faults."""
    for seed, kind in enumerate(KINDS):
        run(Simulation(seed, "sync", level, kind, checkpoints=2))


@pytest.mark.parametrize("late", ["fold", "drop"])
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (6, 12, 18, 24, 30))])
def test_a_quorum_under_faults_divides_by_what_was_pushed(late: str, first: int) -> None:
    """With a quorum of two of three workers, each commit is a mean of whole contributions, late ones folded or not."""
    for seed in range(first, first + 6):
        run(Simulation(seed, "sync", checkpoints=2 * (seed % 3), late=late))


@pytest.mark.parametrize("first", spread(6))
def test_shards_that_are_told_to_stop_lose_nothing(first: int) -> None:
    """One or all shards stop, again and again: no acknowledged push and no commit is lost at any level."""
    for seed in range(first, 5 * STEP, STEP):
        run(Simulation(seed, kind="stops", clocks=16))


@pytest.mark.parametrize("first", spread(2))
def test_snapshots_that_take_seconds_keep_what_was_promised(first: int) -> None:
    """Snapshots, cuts among them, that are overtaken by moves, deaths, stops and other cuts replace nothing newer."""
    for seed in range(first, 5 * STEP, STEP):
        run(Simulation(seed, kind="stores", clocks=16))


@pytest.mark.parametrize("first", spread(1))
def test_a_redis_that_comes_back_with_older_data_loses_nothing(first: int) -> None:
    """What Redis has lost of state, journals and snapshots is stored again from memory, before anybody misses it."""
    for seed in range(first, 5 * STEP, STEP):
        run(Simulation(seed, kind="restarts", clocks=20))


@pytest.mark.parametrize("seed", [20, 55, 62, 67])
def test_a_model_of_which_redis_lost_a_part_goes_on_from_there_as_a_whole(seed: int) -> None:
    """Where Redis lost what no shard had of a model in sync, no partition takes a commit without what that lists.

    In these runs, some did, and ended in other values than their version says, or a cut was never whole again.
    """
    run(Simulation(seed, "sync", "applied", "restarts", "none", clocks=20))


def test_a_model_goes_back_if_redis_lost_what_was_stored_for_a_move() -> None:
    """A cut of the same clock does not pass for the state handed over: it lacks what was staged, as in this run."""
    harsh = Faults(crash=0.004, drop=0.005, feed_cut=0.002, drain=0.05, redis_restarts_s=(0.5, 4.0))
    run(Simulation(72, "sync", "applied", "restarts", "none", clocks=20, faults=harsh))


@pytest.mark.parametrize("first", spread(10))
def test_each_range_of_the_data_is_worked_on_in_each_pass(first: int) -> None:
    """Whatever dies, no range is left out in any pass; none is done twice if no worker joins again or goes back."""
    for seed in range(first, 5 * STEP, STEP):
        run(Simulation(seed, change="none", data=True, deaths=seed % 3 == 2))


@pytest.mark.parametrize("first", spread(9))
def test_no_push_is_applied_to_first_values_that_are_lost(first: int) -> None:
    """First values that are lost before they are stored are uploaded again, and only then can be trained or pulled."""
    for seed in range(1000 + first, 1000 + 6 * STEP, STEP):
        run(Simulation(seed, kind="births", change="none", given="upload"))


@pytest.mark.parametrize("first", spread(9))
def test_restored_values_that_are_lost_are_restored_again(first: int) -> None:
    """What a restore has given a new model, and a death takes before it is stored, nothing else replaces."""
    for seed in range(first, 6 * STEP, STEP):
        run(Simulation(seed, "async", kind="births", change="none", given="restore"))


def test_a_push_that_waited_for_lost_first_values_is_refused() -> None:
    """The run in which a push was applied to zeros, acknowledged, and gone with the second upload passes."""
    run(Simulation(1113, kind="births", change="none", given="upload"))


@pytest.mark.parametrize("mode", CONSISTENCY)
def test_workers_that_die_leave_nothing_half_done(mode: str) -> None:
    """Workers that die between two requests and join again, soon or after their lease, break no promise."""
    for seed, kind in enumerate(KINDS):
        run(Simulation(seed, mode, kind=kind, deaths=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_trace(kind: str) -> None:
    """Two runs of the same seed have the same trace, and one of another seed, all else alike, has another."""
    first, again, other = (run(Simulation(seed, "sync", "applied", kind, "none")) for seed in (3, 3, 11))
    assert first == again != other


def test_the_seeds_cover_every_mode_level_and_trouble() -> None:
    """The seeds cover each mode, level and fault mix together at least six times, and in sync each operator change."""
    simulations = [Simulation(seed) for seed in range(SEEDS)]
    runs = [(s.mode, s.level, s.kind) for s in simulations]
    assert set(runs) == {(m, level, k) for m in CONSISTENCY for level in LEVELS for k in KINDS}
    assert min(runs.count(r) for r in set(runs)) >= 6
    changed = {(s.level, s.kind, s.change) for s in simulations if s.mode == "sync"}
    assert changed == {(level, k, c) for level in LEVELS for k in KINDS for c in CHANGES}


def test_partitions_move_while_training_goes_on() -> None:
    """Partitions that move between living shards during training lose no push acknowledged at `applied`."""
    moved = 0
    for seed in range(4):
        simulation = Simulation(seed, "async", "applied", "moves")
        run(simulation)
        assert simulation.lossless
        moved += sum(token & 0xFFFFFFFF > 4 for token in simulation.redis.tokens.values())
    assert moved
