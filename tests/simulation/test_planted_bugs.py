"""Bugs that are planted into a simulated cluster turn its checkers red."""

from pathlib import Path
from traceback import extract_tb
from typing import Any

import pytest

from paramserver.core.cluster import Cluster
from paramserver.core.cuts import Cuts
from paramserver.core.durability import Durability
from paramserver.core.gate import Gate
from paramserver.core.models import Model
from paramserver.core.partition import Partition
from paramserver.core.shard import ShardCore
from paramserver.core.shard_effects import Task, UpdateTask
from paramserver.core.shard_events import TaskResult
from paramserver.core.window import PushMemory
from paramserver.testing import shards
from paramserver.testing.shard_driver import perform
from paramserver.testing.simulation import Simulation
from paramserver.testing.storage import SimRedis, Verdict
from paramserver.testing.world import Faults

PATIENCE_S = 200.0
"""After three times what the longest runs take, a run with a planted bug hangs."""


def turns_red(
    mode: str = "",
    level: str = "",
    kind: str = "",
    change: str = "none",
    *,
    first: int = 0,
    within: int = 12,
    **settings: Any,
) -> bool:
    """Return whether the checkers fail one of `within` seeds, of which `first` is the first.

    The product's own assertions do not count: a bug that they do not catch must be found, too.
    """
    for seed in range(first, first + within):
        try:
            Simulation(seed, mode, level, kind, change, patience_s=PATIENCE_S, **settings).run()
        except AssertionError as error:
            if "testing" in Path(extract_tb(error.__traceback__)[-1].filename).parts:
                return True
    return False


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_forgetting_push_ids_turns_the_checkers_red(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the push memory recognizes no push ids, duplicates count twice and the sums reveal it."""
    monkeypatch.setattr(PushMemory, "check", lambda *_: None)

    assert turns_red(mode, "applied", "crashes")


def test_applying_twice_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update step that is sometimes applied twice is detected."""

    def twice(task: Task) -> TaskResult:
        result = perform(task)
        if result.state is not None and isinstance(task, UpdateTask) and task.state.values[0] == 5.0:
            result.state.values[:] += 1.0
        return result

    monkeypatch.setattr(shards, "perform", twice)

    assert turns_red("sync", within=3)


def test_a_torn_update_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is partly missing in one partition is detected by a pull."""

    def half(task: Task) -> TaskResult:
        result = perform(task)
        if result.state is not None and task.state.values[0] == 5.0:
            result.state.values[0] = 5.0
        return result

    monkeypatch.setattr(shards, "perform", half)

    assert turns_red("async", within=3)


def test_an_acknowledged_push_that_was_not_applied_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """An acknowledged update that leaves the values unchanged is detected if nothing may have been lost."""

    def skipped(task: Task) -> TaskResult:
        result = perform(task)
        if result.state is not None and task.state.values[0] == 5.0:
            result.state.values[:] = task.state.values
        return result

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

    assert turns_red("sync", "journaled", "emptied", first=16, within=30, checkpoints=2)  # 16, 35, 41


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
