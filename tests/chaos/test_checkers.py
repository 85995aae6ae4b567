"""The checkers report nothing for a correct history, and each kind of violation in an incorrect one."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from . import checkers
from .history import Clock, History, Push, Recorder, Seen, read

WORKERS = 2


class Shop:
    """A simulated partition that applies pushes as told and records the history its clients would have seen."""

    def __init__(self) -> None:
        self.history = History()
        self.now, self.version, self.incarnation = 0.0, 0, 1
        self.cells = [0.0] * WORKERS

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def push(self, by: int, *, times: int = 1, versions: int | None = None, answered: bool = True) -> None:
        """Record one push, applied `times` times and raising the version by `versions` (default: `times`)."""
        start = self.tick()
        self.cells[by] += times
        self.version += times if versions is None else versions
        if answered:
            self.history.pushes.append(Push("m", by, start, self.tick(), "ok"))
        else:
            self.history.pushes.append(Push("m", by, start, result="doubt"))

    def pull(self, by: int = -1, **changes: Any) -> None:
        """Record one pull of the current state, with fields changed as by a bug."""
        start, total = self.tick(), sum(self.cells)
        seen = Seen("m", by, start, self.tick(), len(self.history.seen), 0, 0, 0, self.version, self.incarnation,
                    total, total, tuple(self.cells))  # fmt: skip
        self.history.seen.append(replace(seen, **changes))

    def crash(self, *, lose: tuple[int, ...] = ()) -> None:
        """Start a new incarnation without the last push of these workers."""
        self.incarnation += 1
        for w in lose:
            self.cells[w] -= 1
            self.version -= 1


def served() -> Shop:
    """Return a partition with three pushes of each worker and a pull after each."""
    shop = Shop()
    for i in range(6):
        shop.push(i % 2)
        shop.pull()
    return shop


def durable(shop: Shop) -> list[str]:
    return checkers.judge(shop.history, mode="async", durable=True).wrong


def test_a_right_history_passes() -> None:
    """Pushes, pulls, a crash that loses nothing and an applied push in doubt are no violations."""
    shop = served()
    shop.push(0, answered=False)
    shop.pull()
    shop.crash()
    shop.push(1)
    shop.pull()
    shop.history.pushes.append(Push("m", 1, shop.tick(), result="dropped"))

    verdict = checkers.judge(shop.history, mode="async", durable=True)
    assert verdict.wrong == []
    assert (verdict.acknowledged, verdict.in_doubt, verdict.dropped, verdict.pulls) == (7, 1, 1, 8)


def test_a_push_in_doubt_counts_as_either() -> None:
    """A push without an answer may have been applied or not, or be applied late, without a violation."""
    for times in (0, 1):
        shop = served()
        shop.push(0, times=times, answered=False)
        shop.pull()
        assert durable(shop) == []

    late = served()
    late.push(0, times=0, answered=False)
    late.pull()
    late.push(0, times=1, versions=1, answered=False)
    late.history.pushes.pop()  # this was the late arrival of the first push, not a second one
    late.pull()
    assert durable(late) == []


def test_a_lost_acknowledged_push_turns_red() -> None:
    """A lost acknowledged push is reported at a durable level; at `applied` only if its incarnation still lives."""
    shop = served()
    shop.crash(lose=(1,))
    shop.pull()

    assert any(line.startswith("lost") for line in durable(shop))
    # `applied` may lose it with its shard, but not while the shard lives.
    assert checkers.judge(shop.history, mode="async", durable=False).wrong == []
    shop.push(1, times=0)
    shop.pull()
    assert any("lost" in x for x in checkers.judge(shop.history, mode="async", durable=False).wrong)


def test_a_doubled_push_turns_red() -> None:
    """A push applied twice is reported, whether or not the second time raised the version."""
    for versions in (1, 2):
        shop = served()
        shop.push(1, times=2, versions=versions)
        shop.pull()
        assert any(line.startswith("doubled") for line in durable(shop))


def test_a_doubled_push_shows_behind_a_loss() -> None:
    """A push applied twice at `applied` is reported even if an earlier loss keeps the total below the number sent."""
    shop = served()
    shop.crash(lose=(0, 1))
    shop.pull()
    shop.push(0, times=2)
    shop.pull()

    assert sum(shop.cells) <= len(shop.history.pushes)
    assert any("doubled" in x for x in checkers.judge(shop.history, mode="async", durable=False).wrong)


@pytest.mark.parametrize(
    "bug", [{"low": 5.0}, {"cells": (3.0, 2.0)}, {"version": 5}], ids=["half a vector", "half a push", "no version"]
)
def test_a_torn_read_turns_red(bug: dict[str, Any]) -> None:
    """A pull is reported if it shows part of an update, or an update that its version does not count."""
    shop = served()
    shop.pull(**bug)

    assert any(line.startswith("torn") for line in durable(shop))


def test_two_states_under_one_version_turn_red() -> None:
    """One version with two different states, as from an owner and a zombie, is reported."""
    shop = served()
    shop.pull()
    shop.pull(cells=(4.0, 2.0))

    assert any("otherwise" in line for line in durable(shop))


def test_a_version_that_goes_back_turns_red() -> None:
    """A lower version is reported within an incarnation but not in a new one; an answer of the old one is stale."""
    shop = served()
    shop.cells, shop.version = [2.0, 2.0], 4
    shop.pull()
    assert any(line.startswith("went_back") for line in durable(shop))

    again = served()
    again.crash(lose=(0,))
    again.pull()
    assert checkers.judge(again.history, mode="async", durable=False).wrong == []
    again.pull(incarnation=1)
    assert checkers.stale(again.history) != []


# ------------------------------------------------------------------------------------------------ synchronous


def commits(clocks: int = 4) -> History:
    """Return a correct history of two workers and two partitions over `clocks` commits."""
    history, now = History(), 0.0
    for clock in range(1, clocks + 1):
        for by in range(WORKERS):
            history.pushes.append(Push("m", by, now, now + 1, "ok"))
        for by in range(WORKERS):
            history.clocks.append(Clock("m", by, now + 1, now + 2, clock, 0, 7))
        for by in range(WORKERS):
            for partition in range(2):
                cells = (clock / 2, clock / 2)
                pull = clock * WORKERS + by
                history.seen.append(
                    Seen("m", by, now + 3, now + 4, pull, 0, 7, partition, clock, 1, clock, clock, cells)
                )
        now += 5
    return history


def wrong(history: History, *, durable: bool = True) -> list[str]:
    return checkers.judge(history, mode="sync", durable=durable).wrong


def changed(history: History, at: int, **fields: Any) -> History:
    history.seen[at] = replace(history.seen[at], **fields)
    return history


def test_a_right_synchronous_history_passes() -> None:
    """Commits that are the same on all partitions are no violation."""
    assert wrong(commits()) == []


def test_partitions_of_different_commits_turn_red() -> None:
    """A member's pull whose partitions show different commits is reported."""
    found = wrong(changed(commits(), -1, version=3, low=3.0, high=3.0, cells=(1.5, 1.5)))
    assert any(line.startswith("apart") for line in found)


def test_a_commit_with_other_contributions_on_one_partition_turns_red() -> None:
    """A commit whose contributions differ between partitions is reported."""
    found = wrong(changed(commits(), -1, cells=(1.0, 3.0)))
    assert any("differs" in line for line in found)


def test_a_lost_commit_turns_red() -> None:
    """A pull without a commit that workers were told of is reported, except at `applied` under a higher timeline."""
    history = commits()
    for i in (-1, -2, -3, -4):
        changed(history, i, version=3, low=3.0, high=3.0, cells=(1.5, 1.5))
    assert any(line.startswith("lost") for line in wrong(history))
    assert any(line.startswith("lost") for line in wrong(history, durable=False))
    for i in (-1, -2, -3, -4):
        changed(history, i, timeline=1)
    assert wrong(history, durable=False) == []
    assert any("timelines" in line for line in wrong(history))


def test_a_doubled_commit_turns_red() -> None:
    """A commit beyond the clocks of all members is reported."""
    history = commits()
    for i in (-1, -2, -3, -4):
        changed(history, i, version=5, low=5.0, high=5.0, cells=(2.5, 2.5))
    assert any(line.startswith("doubled") for line in wrong(history))


# ------------------------------------------------------------------------------------------------ records


def test_a_history_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """Records of several processes are merged in time order; a killed process's push stays open with no end."""
    one, two = Recorder(tmp_path / "a.jsonl"), Recorder(tmp_path / "b.jsonl")
    two.write(op="invoke", id="m:1", model="m", by=1, start=2.0)
    one.write(op="invoke", id="m:1", model="m", by=0, start=1.0)
    one.write(op="push", id="m:1", model="m", by=0, end=3.0, result="ok")
    one.write(op="pull", model="m", by=0, start=4.0, end=5.0, timeline=0, epoch=2, parts=[[0, 1, 9, 1.0, 1.0, [1, 0]]])
    one.fault("kill")
    one.close()
    two.close()
    with (tmp_path / "b.jsonl").open("a") as torn:
        torn.write(json.dumps({"op": "push"})[:-3])

    history = read(tmp_path)

    assert history.pushes == [Push("m", 0, 1.0, 3.0, "ok"), Push("m", 1, 2.0, inf, "open")]
    assert [(s.partition, s.version, s.incarnation, s.cells) for s in history.seen] == [(0, 1, 9, (1, 0))]
    assert [f.what for f in history.faults] == ["kill"]
