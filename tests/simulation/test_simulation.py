"""A whole cluster under seeded faults keeps its promises, and the checkers notice when it would not."""

from typing import Any

import pytest

from paramserver.core import shard_io as sio
from paramserver.core.cluster import Cluster
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
"""Seeds in one test."""
MODES = sorted(CONSISTENCY)


def run(simulation: Simulation) -> str:
    """The trace's hash; a failure says how to see it again."""
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
    """Crashes after any effect, cuts, pauses, moves, Redis absent or emptied: nothing promised is lost or doubled."""
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
"""Seeds that found something once, and what."""


@pytest.mark.parametrize("found", FOUND, ids=str)
def test_what_was_found_once_stays_found(found: tuple[int, str, str, str]) -> None:
    """A seed that has turned red is run for ever, at both lengths that were in use."""
    run(Simulation(*found, change="none"))
    run(Simulation(*found, change="none", clocks=10))


UNFINISHED = {
    (1, "crashes", "none"): "the owner of a partition died before it had stored it, and the next one was beyond the "
    "clock by the journal",
    (47, "emptied", "restores"): "Redis was emptied while the cut was being written",
    (76, "pauses", "puts"): "the owner of a partition was thought dead",
}
"""Seeds in which a cut was waited for that nobody would store any more, and why."""


@pytest.mark.parametrize("found", UNFINISHED, ids=str)
def test_no_cut_is_waited_for_in_vain(found: tuple[int, str, str]) -> None:
    """One that cannot become whole is given up for another; at `journaled` checkpoints alone ask for any."""
    seed, kind, change = found
    run(Simulation(seed, "sync", "journaled", kind, change, checkpoints=2))


@pytest.mark.parametrize("level", LEVELS)
def test_checkpoints_of_a_synchronous_model_find_their_cuts(level: str) -> None:
    """Whatever goes wrong meanwhile: in each kind of trouble."""
    for seed, kind in enumerate(KINDS):
        run(Simulation(seed, "sync", level, kind, checkpoints=2))


@pytest.mark.parametrize("late", ["fold", "drop"])
@pytest.mark.parametrize(
    "first", [0, pytest.param(12, marks=pytest.mark.slow), pytest.param(24, marks=pytest.mark.slow)]
)
def test_a_quorum_under_faults_divides_by_what_was_pushed(late: str, first: int) -> None:
    """Two of three workers are enough; each commit is the mean of whole contributions, late ones folded or not."""
    for seed in range(first, first + 12):
        run(Simulation(seed, "sync", checkpoints=2 * (seed % 3), late=late))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_trace(kind: str) -> None:
    """A run is a function of its seed: everything happens again in the same order at the same times."""
    assert run(Simulation(3, kind=kind)) == run(Simulation(3, kind=kind))
    assert run(Simulation(4, kind=kind)) != run(Simulation(12, kind=kind))


def test_the_seeds_cover_every_mode_level_and_trouble() -> None:
    """Among so many seeds each combination comes several times."""
    simulations = [Simulation(seed) for seed in range(SEEDS)]
    runs = [(s.mode, s.level, s.kind) for s in simulations]
    assert set(runs) == {(m, level, k) for m in CONSISTENCY for level in LEVELS for k in KINDS}
    assert min(runs.count(r) for r in set(runs)) >= 10
    changed = {(s.level, s.kind, s.change) for s in simulations if s.mode == "sync"}
    assert changed == {(level, k, c) for level in LEVELS for k in KINDS for c in CHANGES}


def test_partitions_move_while_training_goes_on() -> None:
    """The runs without a death hand partitions over, and lose nothing that `applied` acknowledged."""
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
    """Whether some seed finds the bug that was planted."""
    for seed in range(within):
        try:
            Simulation(seed, mode, level, kind, change, **settings).run()
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_forgetting_push_ids_turns_the_checkers_red(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the window a push that comes twice counts twice, and the sums show it."""
    monkeypatch.setattr(PushMemory, "check", lambda *_: None)

    assert turns_red(mode, "applied", "crashes")


def test_applying_twice_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is sometimes taken twice is noticed."""

    def twice(task: sio.Task) -> sio.TaskResult:
        result = perform(task)
        if result.state is not None and isinstance(task, sio.UpdateTask) and task.state.values[0] == 5.0:
            result.state.values[:] += 1.0
        return result

    monkeypatch.setattr(shards, "perform", twice)

    assert turns_red("sync", within=3)


def test_a_torn_update_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an update in one partition is noticed by whoever pulls it."""

    def half(task: sio.Task) -> sio.TaskResult:
        result = perform(task)
        if result.state is not None and task.state.values[0] == 5.0:
            result.state.values[0] = 5.0
        return result

    monkeypatch.setattr(shards, "perform", half)

    assert turns_red("async", within=3)


def test_an_acknowledged_push_that_was_not_applied_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that leaves the values as they were is noticed where nothing may have been lost."""

    def skipped(task: sio.Task) -> sio.TaskResult:
        return sio.TaskResult(task.state) if task.state.values[0] == 5.0 else perform(task)

    monkeypatch.setattr(shards, "perform", skipped)

    assert turns_red("async", "applied", within=3, faults=Faults(crash=0.0, drop=0.0))


def test_answering_before_the_journal_is_written_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """At level `journaled` a push that was acknowledged too early is missed after a crash."""
    monkeypatch.setattr(
        Durability, "acknowledge", lambda self, request, done, partitions, level, now: self._shard.reply(request, done)
    )

    assert turns_red("async", "journaled", "crashes", within=24, faults=Faults(crash=0.004))


def test_a_journal_without_tokens_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two owners that both may write are noticed, by the journal's holes or by the sums."""

    def any_owner(self: SimRedis, key: Any, token: int, entries: Any) -> Verdict:
        for entry in entries:
            self.store.append(entry)
        return Verdict.DONE

    monkeypatch.setattr(SimRedis, "append", any_owner)

    assert turns_red("async", "journaled", within=48, faults=Faults(crash=0.0, cut=2.0))


def test_handing_over_without_holding_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that goes on while its state is being stored loses what it acknowledged meanwhile."""
    monkeypatch.setattr(Partition, "ready", property(lambda self: self.state is not None))

    assert turns_red("async", "applied", "moves", within=24)


def test_keeping_no_memory_of_old_tokens_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners that begin anew when Redis was emptied have nothing to begin with."""
    give = Cluster.give_token

    monkeypatch.setattr(Cluster, "renew_token", lambda self, model, index: give(self, model, index, "snapshot"))

    assert turns_red("async", "journaled", "emptied", within=6)


def test_not_telling_where_a_timeline_began_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is behind when a restore ends, or when the model is synchronous again, waits for what is over."""
    told = Model.feed_document

    monkeypatch.setattr(Model, "feed_document", lambda self, *args: told(self, *args) | {"began": 0})

    assert turns_red("sync", "applied", "moves", "restores", within=3)


def test_not_giving_up_a_cut_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored of it is gone with all else in Redis, and whoever counts it waits for the rest in vain."""
    monkeypatch.setattr(Model, "give_up_cut", lambda self: None)

    assert turns_red("sync", "journaled", "emptied", within=17, checkpoints=2)


def test_listing_clocks_that_were_left_out_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """A straggler is believed to have worked on all that the others have gone on over."""
    report = Gate.report

    monkeypatch.setattr(Gate, "report", lambda self, worker, done, since=None: report(self, worker, done, 0))

    assert turns_red("sync", "applied", within=6, late="fold")


def test_counting_commits_as_durable_by_versions_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """An assignment raises the version above the clock, and commits go that a new owner has not taken."""
    rows = ShardCore.partitions

    monkeypatch.setattr(ShardCore, "partitions", lambda self: ((*row[:7], row[5]) for row in rows(self)))

    assert turns_red("sync", "journaled", "pauses", "puts", within=3)
