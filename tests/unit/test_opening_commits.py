"""The commit that begins a synchronous phase lists nothing, so no worker is told to work on its clock."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.refusals import refused_with

from paramserver.core.scheduler import io
from paramserver.errors import PsError
from paramserver.testing.shard_driver import ShardDriver

from .scheduling import Driver
from .test_timelines import ROSTER, at, begin, listed, spec, stage

SYNC = {"mode": "sync"}


def entering() -> tuple[Driver, Any]:
    """Return a scheduler whose model was made synchronous while a shard had not loaded its part, and a worker of it."""
    d = Driver()
    d.model(partitions=2)
    worker = d.join("a")
    d.shards["s1"] = d.ask(lambda n: io.JoinShard(n, "s1", ["http://s1:1"]))["epoch"]
    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": SYNC}))
    assert not d.commits()
    return d, worker


def told_by_report(d: Driver, worker: Any) -> int:
    """Return the clock that a report of a clock of the earlier timeline is told to go on at."""
    told = d.replies[d.clock_of(worker, 1)]
    assert isinstance(told, PsError)
    return int(told.members["clock"])


def told_by_join(d: Driver, worker: Any) -> int:
    """Return the clock that the worker is told when it joins again."""
    worker |= d.join("a")
    return int(worker["clock"])


def told_by_document(d: Driver, worker: Any) -> int:
    """Return the clock that the model's public document names."""
    worker |= d.join("a")
    assert d.core.read.models()[0]["clock"] == d.core.read.model("m")["clock"]
    return int(d.core.read.model("m")["clock"])


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("told", [told_by_report, told_by_join, told_by_document])
def test_a_report_before_the_phase_has_begun_is_in_its_first_list(
    told: Callable[[Driver, Any], int], restarts: bool
) -> None:
    """What a worker pushes and reports between a change to sync and the phase's first commit is in the second one."""
    d, worker = entering()
    if restarts:
        d.restart()
    began = d.document("m")["began"]
    clock = told(d, worker)
    assert clock == began + 1
    worker["timeline"] = d.core.read.model("m")["timeline"]
    report = d.clock_of(worker, clock + 1)
    assert report not in d.replies
    d.beats()
    d.beats()
    assert [(c["t"], [x[3] for x in c["contributions"]]) for c in d.commits()] == [(began, []), (clock, [clock])]
    assert d.result(report)["released"]


@pytest.mark.parametrize("opening", [True, False])
def test_a_shard_names_the_first_clock_that_counts(opening: bool) -> None:
    """Before a phase's first commit a shard tells a push of the earlier timeline to go on at the clock after it.

    A rollback has no such commit.
    """
    driver = ShardDriver()
    driver.serve(spec(), workers=ROSTER)
    assert driver.view is not None
    begin(driver, 3, opening=opening)

    def told() -> int:
        with pytest.raises(PsError) as refused:
            driver.core.models["m"].check(None, 0)
        return int(refused.value.members["clock"])

    assert told() == 3 + opening
    stage(driver, 1, told())
    driver.commit(3)
    assert told() == 4
    driver.commit(4, listed(4))
    assert at(driver) == (5, 5)
    assert driver.values() == [float(opening)] * 4


def test_a_pull_for_the_first_clock_does_not_wait_for_the_commit_that_begins_the_phase() -> None:
    """A pull that asks for the phase's first commit is answered once the partition is in the phase.

    That commit changes no values, and may wait long: for a checkpoint that is being written, for instance.
    """
    driver = ShardDriver()
    driver.serve(spec(), workers=ROSTER)
    begin(driver, 3, opening=True)

    assert at(driver) == (3, 0)
    assert driver.pull(0, min_clock=4).version == 0
    with refused_with("version_not_reached"):
        driver.pull(0, min_clock=5)
    begin(driver, 7, opening=False)
    with refused_with("version_not_reached"):
        driver.pull(0, min_clock=8)
