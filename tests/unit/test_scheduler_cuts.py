"""The scheduler's core in synchronous mode: which clocks become cuts, and who is told."""

from typing import Any

import pytest

from paramserver import limits
from paramserver.core import scheduler_io as io

from .scheduling import Driver, beyond_its_cut

SYNC: dict[str, Any] = {"consistency": {"mode": "sync"}}


def test_a_cut_counts_once_every_partition_has_stored_it() -> None:
    """Half of the reports are not enough, and no second cut is begun before."""
    d = Driver()
    d.model(**SYNC)
    a = d.join("a")
    d.clock(a, 1)
    d.beat("s0")
    assert d.core.read.model("m")["cut"] is None
    d.now += 4
    d.beat("s0", stored=False)
    d.beat("s1", stored=False)
    d.now += 2
    d.clock(a, 2)
    assert [c["cut"] for c in d.commits()] == [True, False]
    d.beat("s0")
    d.beat("s1")
    assert d.core.read.model("m")["cut"] == 1
    d.clock(a, 3)
    assert d.commits()[-1]["cut"]


def test_a_whole_cut_is_told_before_the_next_one_is_asked_for() -> None:
    """Shards keep two snapshots, one of them the newest whole cut, so they must know it when they store another."""
    d, _ = beyond_its_cut(after_s=6)
    told, asked = d.published[-2:]
    assert (told["type"], told["cut"]) == ("model", 1)
    assert (asked["type"], asked["cut"]) == ("commit", True)


def test_a_model_that_rests_is_cut_where_it_stands() -> None:
    """When no commit has come for a while its last clock becomes a cut, to which a death goes back."""
    d, _ = beyond_its_cut()
    d.wait(limits.SNAPSHOT_INTERVAL_S - 1)
    assert (d.core.read.model("m")["cut"], d.document("m")["cut_asked"]) == (1, None)
    d.now += 1
    d.do(io.Tick())
    assert d.document("m")["cut_asked"] == 2
    d.beats()
    assert (d.core.read.model("m")["cut"], d.document("m")["cut_asked"]) == (2, None)
    published = len(d.published)
    d.wait(20)
    assert len(d.published) == published
    d.shard("s1")
    model = d.core.read.model("m")
    assert (model["timeline"], model["clock"], model["cut"]) == (1, 2, 2)


def test_the_cut_of_a_model_that_rests_holds_no_commit_up() -> None:
    """A commit that comes before all have stored it is made at once, and the cut is whole all the same."""
    d, a = beyond_its_cut()
    d.now += limits.SNAPSHOT_INTERVAL_S
    d.do(io.Tick())
    assert d.document("m")["cut_asked"] == 2
    assert d.result(d.clock(a, 3))["released"]
    d.restart()
    d.beats()
    assert d.core.read.model("m")["cut"] == 2


def test_a_last_shard_that_ends_gets_its_models_cut_at_once() -> None:
    """Nobody can take what it has: its drain asks for a cut of the present clock, whatever the time since the last."""
    d = Driver()
    d.model(**SYNC)
    d.ask(lambda n: io.LeaveShard(n, "s1", d.shards.pop("s1")))
    d.beats()
    a = d.join("a")
    d.clock(a, 1)
    d.beats()
    d.now += 0.1
    d.clock(a, 2)
    answer = d.ask(lambda n: io.SetShardState(n, "s0", "draining", d.shards["s0"]))
    assert (answer["targets"], d.document("m")["cut_asked"]) == (0, 2)
    d.beats()
    assert d.core.read.model("m")["cut"] == 2


def journaled_and_cut() -> tuple[Driver, Any]:
    """A journaled model whose clock 1 is to be a cut, which nobody has stored yet, and its worker."""
    d = Driver()
    d.model(**SYNC, ack="journaled", checkpoint={"every_clocks": 1})
    a = d.join("a")
    d.clock(a, 1)
    d.beat("s0", stored=False)
    d.clock(a, 2)
    assert [c["cut"] for c in d.commits()] == [False, True]
    return d, a


def join(d: Driver, name: str) -> None:
    """That shard is started anew, and has not loaded anything yet."""
    d.shards[name] = d.ask(lambda n: io.JoinShard(n, name, [f"http://{name}:1"]))["epoch"]


@pytest.mark.parametrize("loss", ["shard", "redis"])
def test_a_cut_that_can_not_become_whole_any_more_is_given_up_for_another(loss: str) -> None:
    """By its journal a new owner may begin beyond the clock; of what had been stored an emptied Redis has nothing."""
    d, a = journaled_and_cut()
    d.beat("s0")
    if loss == "shard":
        join(d, "s1")
    else:
        d.empty_redis()
    d.restart()
    d.clock(a, 3)
    assert not d.commits()[-1]["cut"], "not all partitions are served"
    for name in d.shards:
        d.beat(name, stored=False)
    d.clock(a, 4)
    assert d.commits()[-1]["cut"]
    d.beat("s1")
    assert d.core.read.model("m")["cut"] is None
    d.beat("s0")
    assert d.core.read.model("m")["cut"] == 4


def test_a_sync_phase_that_is_left_before_its_first_commit_leaves_nothing_behind() -> None:
    """What waits for that commit, as moves do, need not wait any more."""
    d = Driver()
    d.model()
    d.clock(d.join("a"), 3)
    join(d, "s1")  # what it owns is not served, so that the first commit has to wait
    for mode in ("sync", "async"):
        d.ask(lambda n, mode=mode: io.PatchModel(n, "m", {"consistency": {"mode": mode}}))  # type: ignore[misc]
    assert not d.commits()
    d.beats()
    d.ask(lambda n: io.SetShardState(n, "s0", "draining"))
    d.wait(10)
    assert d.owners() == ["s1"] * 4
