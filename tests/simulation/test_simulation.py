"""A whole simulated cluster under seeded faults keeps its promises, and the checkers detect planted bugs."""

from typing import Any

import pytest

from paramserver.core import shard_io as sio
from paramserver.core.cluster import Cluster
from paramserver.core.cuts import Cuts
from paramserver.core.durability import Durability
from paramserver.core.gate import Gate
from paramserver.core.models import Model
from paramserver.core.partition import Partition
from paramserver.core.shard import ShardCore
from paramserver.core.window import PushMemory
from paramserver.testing import shards
from paramserver.testing.shard_driver import perform
from paramserver.testing.simulation import CHANGES, CONSISTENCY, KINDS, LEVELS, Simulation
from paramserver.testing.storage import SimRedis, Verdict
from paramserver.testing.world import Faults

SEEDS = 500
TOGETHER = 5
"""Seeds per test."""
MODES = sorted(CONSISTENCY)
PATIENCE_S = 200.0
"""After three times what the longest runs take, a run with a planted bug hangs."""


def run(simulation: Simulation) -> str:
    """Run a simulation and return its trace's hash; on failure print the end of the log and the replay command."""
    try:
        return simulation.run()
    except BaseException:
        print(*simulation.world.log[-40:], sep="\n")
        print(f"replay: {simulation.replay}")
        raise


@pytest.mark.parametrize(
    "first",
    [pytest.param(s, marks=[] if s < 8 * TOGETHER else [pytest.mark.slow]) for s in range(0, SEEDS, TOGETHER)],
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


UNFINISHED = {
    (1, "crashes", "none"): "the owner of a partition died before it had stored it, and the next one was beyond the "
    "clock by the journal",
    (47, "emptied", "restores"): "Redis was emptied while the cut was being written",
    (76, "pauses", "puts"): "the owner of a partition was thought dead",
}
"""Runs in which the scheduler once waited for a cut that could not become complete any more, and why."""


@pytest.mark.parametrize("found", UNFINISHED, ids=str)
def test_no_cut_is_waited_for_in_vain(found: tuple[int, str, str]) -> None:
    """A cut that can no longer become complete is given up, so that the run ends without a pending cut."""
    seed, kind, change = found
    # At `journaled`, only checkpoints request cuts.
    run(Simulation(seed, "sync", "journaled", kind, change, checkpoints=2))


@pytest.mark.parametrize("level", LEVELS)
def test_checkpoints_of_a_synchronous_model_find_their_cuts(level: str) -> None:
    """With automatic checkpoints, a synchronous model ends without a pending cut under each kind of faults."""
    for seed, kind in enumerate(KINDS):
        run(Simulation(seed, "sync", level, kind, checkpoints=2))


@pytest.mark.parametrize("late", ["fold", "drop"])
@pytest.mark.parametrize(
    "first", [0, pytest.param(12, marks=pytest.mark.slow), pytest.param(24, marks=pytest.mark.slow)]
)
def test_a_quorum_under_faults_divides_by_what_was_pushed(late: str, first: int) -> None:
    """With a quorum of two of three workers, each commit is a mean of whole contributions, late ones folded or not."""
    for seed in range(first, first + 12):
        run(Simulation(seed, "sync", checkpoints=2 * (seed % 3), late=late))


@pytest.mark.parametrize("mode", CONSISTENCY)
def test_workers_that_die_leave_nothing_half_done(mode: str) -> None:
    """Workers that die between two requests and join again, soon or after their lease, break no promise."""
    for seed, kind in enumerate(KINDS):
        run(Simulation(seed, mode, kind=kind, deaths=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_trace(kind: str) -> None:
    """Two runs of the same seed have the same trace, and two different seeds have different traces."""
    assert run(Simulation(3, kind=kind)) == run(Simulation(3, kind=kind))
    assert run(Simulation(4, kind=kind)) != run(Simulation(12, kind=kind))


def test_the_seeds_cover_every_mode_level_and_trouble() -> None:
    """The seeds cover each mode, level and fault mix together at least ten times, and in sync each operator change."""
    simulations = [Simulation(seed) for seed in range(SEEDS)]
    runs = [(s.mode, s.level, s.kind) for s in simulations]
    assert set(runs) == {(m, level, k) for m in CONSISTENCY for level in LEVELS for k in KINDS}
    assert min(runs.count(r) for r in set(runs)) >= 10
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


# --- planted bugs


def turns_red(
    mode: str = "", level: str = "", kind: str = "", change: str = "none", *, within: int = 12, **settings: Any
) -> bool:
    """Return whether one of the first `within` seeds fails."""
    for seed in range(within):
        try:
            Simulation(seed, mode, level, kind, change, patience_s=PATIENCE_S, **settings).run()
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_forgetting_push_ids_turns_the_checkers_red(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the push memory recognizes no push ids, duplicates count twice and the sums reveal it."""
    monkeypatch.setattr(PushMemory, "check", lambda *_: None)

    assert turns_red(mode, "applied", "crashes")


def test_applying_twice_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update step that is sometimes applied twice is detected."""

    def twice(task: sio.Task) -> sio.TaskResult:
        result = perform(task)
        if result.state is not None and isinstance(task, sio.UpdateTask) and task.state.values[0] == 5.0:
            result.state.values[:] += 1.0
        return result

    monkeypatch.setattr(shards, "perform", twice)

    assert turns_red("sync", within=3)


def test_a_torn_update_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is partly missing in one partition is detected by a pull."""

    def half(task: sio.Task) -> sio.TaskResult:
        result = perform(task)
        if result.state is not None and task.state.values[0] == 5.0:
            result.state.values[0] = 5.0
        return result

    monkeypatch.setattr(shards, "perform", half)

    assert turns_red("async", within=3)


def test_an_acknowledged_push_that_was_not_applied_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """An acknowledged update that leaves the values unchanged is detected if nothing may have been lost."""

    def skipped(task: sio.Task) -> sio.TaskResult:
        return sio.TaskResult(task.state) if task.state.values[0] == 5.0 else perform(task)

    monkeypatch.setattr(shards, "perform", skipped)

    assert turns_red("async", "applied", within=3, faults=Faults(crash=0.0, drop=0.0))


def test_answering_before_the_journal_is_written_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """At `journaled`, a push acknowledged before it is in the journal is found missing after a crash."""
    monkeypatch.setattr(
        Durability, "acknowledge", lambda self, request, done, partitions, level, now: self._shard.reply(request, done)
    )

    assert turns_red("async", "journaled", "crashes", within=24, faults=Faults(crash=0.004))


def test_a_journal_without_tokens_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the journal accepts entries of former owners, its gaps or the wrong sums are detected."""

    def any_owner(self: SimRedis, key: Any, token: int, entries: Any) -> Verdict:
        for entry in entries:
            self.store.append(entry)
        return Verdict.DONE

    monkeypatch.setattr(SimRedis, "append", any_owner)

    assert turns_red("async", "journaled", within=48, faults=Faults(crash=0.0, cut=2.0))


def test_handing_over_without_holding_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that keeps applying while it stores its state for a handover is found to lose those pushes."""
    monkeypatch.setattr(Partition, "ready", property(lambda self: self.state is not None))

    assert turns_red("async", "applied", "moves", within=24)


def test_keeping_no_memory_of_old_tokens_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If owners are told to load a snapshot after Redis was emptied, instead of keeping their state, some run fails."""
    give = Cluster.give_token

    monkeypatch.setattr(Cluster, "renew_token", lambda self, model, index: give(self, model, index, "snapshot"))

    assert turns_red("async", "journaled", "emptied", within=6)


def test_not_telling_where_a_timeline_began_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the feed does not say where a timeline began, a shard behind it waits for old commits and the run fails."""
    told = Model.feed_document

    monkeypatch.setattr(Model, "feed_document", lambda self, *args: told(self, *args) | {"began": 0})

    assert turns_red("sync", "applied", "moves", "restores", within=3)


def test_not_giving_up_a_cut_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a cut that was partly stored when Redis was emptied is not given up, it never completes and the run fails."""
    monkeypatch.setattr(Cuts, "give_up", lambda self: None)

    assert turns_red("sync", "journaled", "emptied", within=17, checkpoints=2)


def test_listing_clocks_that_were_left_out_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a straggler's report also counts for clocks that the others committed without it, the run fails."""
    report = Gate.report

    monkeypatch.setattr(Gate, "report", lambda self, worker, done, since=None: report(self, worker, done, 0))

    assert turns_red("sync", "applied", within=6, late="fold")


def test_counting_commits_as_durable_by_versions_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If commits are dropped up to the durable version, which an assignment raises above the clock, the run fails."""
    rows = ShardCore.partitions

    monkeypatch.setattr(
        ShardCore, "partitions", lambda self: (r._replace(durable_clock=r.durable_version) for r in rows(self))
    )

    assert turns_red("sync", "journaled", "pauses", "puts", within=3)
