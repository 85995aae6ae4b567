"""Cuts in the scheduler's core: which clocks become cuts, and what shards are told of them and of commits."""

from functools import partial
from typing import Any

import pytest

from paramserver import limits
from paramserver.core.scheduler import io
from paramserver.errors import problem
from paramserver.types import ModelKey

from .scheduling import Driver, beyond_its_cut, code, release_numbers

SYNC: dict[str, Any] = {"consistency": {"mode": "sync"}}


def test_a_cut_counts_once_every_partition_has_stored_it() -> None:
    """A cut counts once every partition has stored it, and no other cut is begun before."""
    d = Driver.with_model(**SYNC)
    a = d.join("a")
    d.clock(a, 1)
    d.beat("s0")
    assert d.core.read.model("m")["cut"] == 0
    d.now += 4
    d.beat("s0", stored=False)
    d.beat("s1", stored=False)
    d.now += 2
    d.clock(a, 2)
    assert [c["cut"] for c in d.commits()] == [True, False]
    d.beat("s0")
    d.beat("s1")
    assert d.core.read.model("m")["cut"] == 1
    d.now += 1  # in which moves may begin
    d.clock(a, 3)
    assert d.commits()[-1]["cut"]


def test_a_whole_cut_is_told_before_the_next_one_is_asked_for() -> None:
    """A complete cut is published before the next is requested, so shards keep it as one of their two snapshots."""
    d, _ = beyond_its_cut(after_s=6)
    told, asked = d.published[-2:]
    assert (told["type"], told["cut"]) == ("model", 1)
    assert (asked["type"], asked["cut"]) == ("commit", True)


def test_a_model_that_rests_is_cut_where_it_stands() -> None:
    """After SNAPSHOT_INTERVAL_S without a commit, the present clock becomes a cut that a later rollback uses."""
    d, _ = beyond_its_cut()
    d.wait(limits.SNAPSHOT_INTERVAL_S - 1)
    assert (d.core.read.model("m")["cut"], d.document("m")["cut_asked"]) == (1, None)
    d.now += 1
    d.do(io.Tick())
    assert (d.document("m")["cut_asked"], d.document("m")["cut_urgent"]) == (2, False)
    d.beats()
    assert (d.core.read.model("m")["cut"], d.document("m")["cut_asked"]) == (2, None)
    published = len(d.published)
    d.wait(20)
    assert len(d.published) == published
    d.shard("s1")
    model = d.core.read.model("m")
    assert (model["timeline"], model["clock"], model["cut"]) == (1, 2, 2)


def test_a_model_without_a_commit_goes_back_to_what_was_stored_of_it() -> None:
    """The first values are a cut, so that what was assigned to them is not drawn again when a shard dies."""
    d = Driver.with_model(**SYNC)
    assert (d.core.read.model("m")["cut"], d.document("m")["cut_asked"]) == (0, None)

    d.shard("s1")
    assert (d.document("m")["timeline"], d.document("m")["source"]) == (1, {"cut": 0})
    d.beats()
    d.clock(d.join("a"), 1)
    assert d.commits()[-1]["cut"]


def test_the_cut_of_a_model_that_rests_holds_no_commit_up() -> None:
    """A commit does not wait for the cut of an idle model, and that cut still completes, also under a new leader."""
    d, a = beyond_its_cut()
    d.now += limits.SNAPSHOT_INTERVAL_S
    d.do(io.Tick())
    assert d.document("m")["cut_asked"] == 2
    assert d.result(d.clock(a, 3))["released"]
    d.restart()
    d.beats()
    assert d.core.read.model("m")["cut"] == 2


@pytest.mark.parametrize("targets", [0, 1])
def test_a_shard_that_ends_gets_its_models_cut_at_once(targets: int) -> None:
    """A stopping shard that serves no more has the present clock cut at once, whether or not others could take it over.

    These may lack the memory, and without commits the next cut would be 5 s away.
    """
    d = Driver.with_model(**SYNC)
    if not targets:
        d.ask(lambda n: io.LeaveShard(n, "s1", d.shards.pop("s1")))
    d.beats()
    a = d.join("a")
    d.clock(a, 1)
    d.beats()
    d.now += 0.1
    d.clock(a, 2)
    if targets:
        d.beat("s1", memory={"limit_bytes": 1000, "used_bytes": 1000})
    d.ask(lambda n: io.SetShardState(n, "s0", "draining", d.shards["s0"]))
    assert d.document("m")["cut_asked"] is None
    answer = d.ask(lambda n: io.SetShardState(n, "s0", "draining", d.shards["s0"], cut=True))
    assert (answer["targets"], d.document("m")["cut_asked"], d.document("m")["cut_urgent"]) == (targets, 2, True)
    d.beats()
    assert d.core.read.model("m")["cut"] == 2


def test_a_model_that_is_at_its_cut_when_a_shard_stops_is_not_hurried_later() -> None:
    """A request for a cut that is there already leaves nothing behind: the next one keeps to its interval."""
    d, a = beyond_its_cut(after_s=6)  # its last commit is a cut
    d.beats()
    d.ask(lambda n: io.SetShardState(n, "s0", "draining", d.shards["s0"], cut=True))
    d.ask(lambda n: io.SetShardState(n, "s0", "active", d.shards["s0"]))
    d.clock(a, 3)
    d.do(io.Tick())
    d.beats()
    assert (d.core.read.model("m")["cut"], d.document("m")["cut_asked"]) == (2, None)


@pytest.mark.parametrize("behind", [False, True])
def test_a_pending_cut_becomes_urgent_for_a_shard_that_stops(behind: bool) -> None:
    """A cut that has begun leaves the budget when a shard is to stop; if commits came since, another follows it."""
    d = Driver.with_model(**SYNC)
    a = d.join("a")
    d.beats()
    d.clock(a, 1)
    assert d.commits()[-1]["cut"], "the first commit is a cut"
    if behind:
        d.clock(a, 2)
    d.ask(lambda n: io.SetShardState(n, "s0", "draining", d.shards["s0"], cut=True))
    assert (d.document("m")["cut_asked"], d.document("m")["cut_urgent"]) == (1, True)
    d.beats()
    d.do(io.Tick())
    assert (d.document("m")["cut_asked"], d.document("m")["cut_urgent"]) == ((2, True) if behind else (None, False))
    d.beats()
    assert d.core.read.model("m")["cut"] == 1 + behind


def test_moves_do_not_hold_up_the_cut_of_a_shard_that_stops() -> None:
    """Once a stopping shard asks for a cut, moves of that model are withdrawn: no cut begins while one is under way."""
    d = Driver.with_model(consistency={"mode": "sync"}, partitions=16, params={"w": {"shape": [640]}})
    a = d.join("a")
    d.clock(a, 1)
    d.beats()
    d.now += 0.1
    d.clock(a, 2)
    d.ask(lambda n: io.SetShardState(n, "s0", "draining", d.shards["s0"]))
    assert release_numbers(d)
    d.ask(lambda n: io.SetShardState(n, "s0", "draining", d.shards["s0"], cut=True))
    assert (release_numbers(d), d.document("m")["cut_asked"]) == ({}, 2)


def test_moves_go_on_where_a_shard_that_stops_has_its_cut_already() -> None:
    """A stopping shard's moves are withdrawn only for a cut: not if the model stands at the last one."""
    d = Driver.with_model(**SYNC, partitions=16, params={"w": {"shape": [640]}})
    d.clock(d.join("a"), 1)
    d.beats()
    d.ask(lambda n: io.SetShardState(n, "s0", "draining", d.shards["s0"]))
    moves = release_numbers(d)
    d.ask(lambda n: io.SetShardState(n, "s0", "draining", d.shards["s0"], cut=True))
    assert moves
    assert release_numbers(d) == moves


def test_a_shard_that_stops_stays_until_no_commit_goes_with_it() -> None:
    """A stopping shard that has stored all it knows leaves once the last commit is in a cut, which is asked for."""
    d = Driver.with_model(**SYNC)
    a = d.join("a")
    d.clock(a, 1)
    d.beats()
    d.clock(a, 2)  # of which the shard has not heard
    assert d.ask(lambda n: io.LeaveShard(n, "s0", d.shards["s0"], stored=True)) == {"left": False}
    assert (d.document("m")["cut_asked"], d.document("m")["cut_urgent"]) == (2, True)
    d.beats()
    assert d.ask(lambda n: io.LeaveShard(n, "s0", d.shards.pop("s0"), stored=True)) is None
    assert d.core.read.model("m")["clock"] == 2


def journaled_and_cut() -> tuple[Driver, Any]:
    """Return a journaled model whose second commit is a cut that no shard has stored yet, and its worker."""
    d = Driver.with_model(**SYNC, ack="journaled", checkpoint={"every_clocks": 1})
    a = d.join("a")
    d.clock(a, 1)
    d.beat("s0", stored=False)
    d.clock(a, 2)
    assert [c["cut"] for c in d.commits()] == [False, True]
    return d, a


def join(d: Driver, name: str) -> None:
    """Start or restart that shard; it has not loaded anything yet."""
    d.shards[name] = d.ask(lambda n: io.JoinShard(n, name, [f"http://{name}:1"]))["epoch"]


@pytest.mark.parametrize("loss", ["shard", "redis"])
def test_a_cut_that_can_not_become_whole_any_more_is_given_up_for_another(loss: str) -> None:
    """If a shard is lost or Redis is emptied, a pending cut is given up for the next one with all partitions served.

    With its journal a new owner may start beyond the cut's clock; an emptied Redis has lost what was stored of it.
    """
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
    """Leaving sync before the phase's first commit cancels that commit, so moves no longer wait for it."""
    d = Driver.with_model()
    d.clock(d.join("a"), 3)
    join(d, "s1")  # what it owns is not served, so that the first commit has to wait
    for mode in ("sync", "async"):
        d.ask(lambda n, mode=mode: io.PatchModel(n, "m", {"consistency": {"mode": mode}}))  # type: ignore[misc]
    assert not d.commits()
    d.beats()
    d.ask(lambda n: io.SetShardState(n, "s0", "draining"))
    d.wait(10)
    assert d.owners() == ["s1"] * 4


def restore(d: Driver, version: int = 0) -> None:
    """Restore model m in place."""
    d.ask(lambda n: io.StartRestore(n, "m"))
    d.ask(lambda n: io.RestoreFinished(n, ModelKey("m", 1), None, version))


@pytest.mark.parametrize("leader", ["the same", "another"])
def test_a_shard_that_dies_between_a_restore_and_its_first_cut_takes_the_model_back_to_the_cut_before(
    leader: str,
) -> None:
    """A shard that dies between a restore and its first cut takes the model back to the cut before the restore.

    Loaded from their newest snapshots, partitions would be in different states: some restored, others as before.
    """
    d, a = beyond_its_cut()
    restore(d, version=50)
    d.beat("s0")  # it has stored its part of the first cut
    if leader == "another":
        d.restart()
    assert (d.document()["clock"], d.document()["cut"], d.document()["cut_asked"]) == (50, 1, 50)
    assert d.core.read.model("m")["cut"] is None, "that cut has not the restored values"

    d.shard("s1")
    assert (d.document()["timeline"], d.document()["source"]) == (2, {"cut": 1})
    assert len({token for _, token, *_ in d.document()["owners"]}) == 4
    assert (d.document()["began"], d.document()["clock"], d.document()["opening"]) == (1, 1, False)
    d.beats()
    assert code(d, d.clock(a, 2)) == "rolled_back"
    assert d.result(d.clock(a, 2))["released"]
    assert (d.commits()[-1]["t"], d.commits()[-1]["timeline"]) == (1, 2)
    d.beats()
    assert d.core.read.model("m")["cut"] == 2


@pytest.mark.parametrize("ends", ["its leader dies", "it fails"])
@pytest.mark.parametrize("ack", ["applied", "journaled"])
def test_a_restore_that_does_not_come_to_its_end_is_undone_as_a_whole(ends: str, ack: str) -> None:
    """Where some values are set and some are not, a model at `applied` goes back to the cut before the restore.

    At the other levels what is set is in the journal, and sync goes on from it.
    """
    d, _ = beyond_its_cut(ack=ack)
    before = dict(d.tokens)
    d.ask(lambda n: io.StartRestore(n, "m"))
    if ends == "it fails":
        lost = problem("unavailable", "a shard does not answer")
        d.send(lambda n: io.RestoreFinished(n, ModelKey("m", 1), lost))
    else:
        d.restart()
        d.do(io.Tick())
    back = ack == "applied"
    assert (d.document()["timeline"], d.document()["began"]) == (1, 1 if back else 3)
    assert d.document()["source"] == ({"cut": 1} if back else "init")
    assert [d.tokens[k] for k in sorted(d.tokens)] == [o[1] for o in d.document()["owners"]]
    assert all((d.tokens[k] > before[k]) == back for k in before)
    d.wait(1.0)
    assert (d.core.read.model("m")["clock"], bool(d.commits()[-1]["contributions"])) == (1 if back else 4, back)


def test_a_cut_that_a_restore_interrupts_does_not_count() -> None:
    """A cut that is not whole when a restore begins is given up: a shard may reach its clock with restored values."""
    d, _ = beyond_its_cut(after_s=6)
    assert d.commits()[-1]["cut"]
    d.ask(lambda n: io.StartRestore(n, "m"))
    assert d.document()["cut_asked"] is None
    d.beats()
    assert d.core.read.model("m")["cut"] == 1


def test_clocks_that_a_restore_skipped_are_not_a_runs_also_once_it_is_undone() -> None:
    """A run that goes back to the cut before a restore has done as many of its clocks as it had there."""
    d, a = beyond_its_cut()
    d.ask(lambda n: io.CreateRun(n, "m", "a.b:c"))
    d.ask(lambda n: io.JoinPool(n, "p", ["a.b"]))

    def counted() -> int:
        clock = d.core.read.model("m")["clock"]
        return int(clock - d.core.read.run("run-1")["from_clock"])

    d.clock(a, 3)
    d.now += 6
    d.clock(a, 4)
    d.beats()
    d.clock(a, 5)
    assert (d.core.read.model("m")["cut"], counted()) == (4, 3)
    restore(d, version=50)
    assert counted() == 3
    d.restart()
    d.shard("s1")
    assert (d.core.read.model("m")["clock"], counted()) == (4, 2)


@pytest.mark.parametrize("cut", [True, False])
def test_a_partition_that_lacks_commits_which_are_gone_takes_the_model_back(cut: bool) -> None:
    """An owner that starts before the oldest commit kept, as what was stored is lost, holds no model up for ever.

    The model goes back to its cut, or, if there is none any more, begins a new timeline.
    """
    d = Driver.with_model(consistency={"mode": "sync"})
    a = d.join("a")
    for t in range(1, 101):
        d.now += 1
        d.clock(a, t)
        d.beats()
    assert d.document()["timeline"] == 0
    if cut:
        d.ask(lambda n: io.SetShardState(n, "s1", "draining"))
        d.beat("s1")
    else:
        d.empty_redis()
    newest = d.document()["cut"]
    d.stand = dict.fromkeys(range(4), 10)

    d.beat("s0")

    assert d.document()["timeline"] == 1
    assert d.document()["clock"] == (newest if cut else 101)


def test_an_update_of_a_model_repeats_the_commits_that_a_partition_may_lack() -> None:
    """Commits that all partitions have taken are only in a new feed's document, and in one of a model that leaves sync.

    A new leader does not know what they have taken until it has heard of them all.
    """
    d = Driver.with_model(**SYNC)
    a = d.join("a")

    def listed(patch: Any) -> list[int]:
        d.ask(lambda n: io.PatchModel(n, "m", patch))
        return [c["t"] for c in d.document()["commits"]]

    for clock in (1, 2, 3):
        d.clock(a, clock)
    assert listed({"optimizer": {"lr": 0.5}}) == [0, 1, 2]
    d.beat("s0")
    assert listed({"optimizer": {"lr": 0.25}}) == [0, 1, 2]
    d.beat("s1")
    d.clock(a, 4)
    assert listed({"optimizer": {"lr": 0.125}}) == [3]
    assert [c["t"] for c in d.ask(lambda n: io.OpenFeed(n))["documents"][1]["commits"]] == [0, 1, 2, 3]

    d.restart()
    assert listed({"optimizer": {"lr": 0.5}}) == [0, 1, 2, 3]
    d.beats()
    assert listed({"optimizer": {"lr": 0.25}}) == []
    assert listed({"consistency": {"mode": "async"}}) == [0, 1, 2, 3]


@pytest.mark.parametrize(("ack", "kept_s"), [("journaled", 0.0), ("applied", 30.5)])
def test_commits_of_a_phase_that_is_over_are_forgotten(ack: str, kept_s: float) -> None:
    """Once all partitions have left sync, those commits go that none needs, at `applied` some time after they came."""
    d = Driver.with_model(ack=ack, **SYNC)
    a = d.join("a")
    for clock in (1, 2, 3):
        d.clock(a, clock)
    model = d.core._c.models["m"]

    def kept(commits_from: int) -> list[str]:
        """Return the commits that are stored after heartbeats that need them from that one on, and a tick."""
        for name, epoch in d.shards.items():
            owned = [(i, o) for i, o in enumerate(model.owners) if o.shard == name]
            rows = [["m", 1, i, o.token, 3, 3, model.revision, commits_from, 0, 0] for i, o in owned]
            d.ask(partial(io.ShardHeartbeat, name=name, epoch=epoch, partitions=rows))
        d.do(io.Tick())
        return sorted(field.removeprefix("commit:m:") for field in d.hash if field.startswith("commit:"))

    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"mode": "async"}}))
    d.do(io.Tick())
    d.now += kept_s
    assert kept(0) == ["0", "1", "2"]
    assert kept(2) == ["2"]
    assert kept(3) == []
    assert not model.commits
