"""Losses in the scheduler's core: shards die, Redis is emptied, or values were never stored."""

import json

import pytest

from paramserver import limits
from paramserver.core.scheduler import io
from paramserver.core.scheduler.core import SchedulerCore
from paramserver.core.scheduler.model_desk import FILES_AGAIN_S
from paramserver.errors import PsError, problem
from paramserver.types import ModelKey, make_token

from . import scheduling
from .scheduling import EIGHT, SPEC, Driver, beyond_its_cut, code, release_numbers, row

JOURNALED = {"ack": "journaled", "consistency": {"mode": "sync"}}


# --- dead shards


def test_the_dead_are_fenced_in_the_write_that_gives_their_partitions_away() -> None:
    """A shard that dies, leaves or rejoins is fenced in the same write that reassigns its partitions."""
    d = Driver.with_model()
    d.wait(limits.ALL_SILENT_S + 1, shards=False)
    assert d.fences == {"s0": 1, "s1": 1}
    assert set(d.owners()) == {None}
    d = Driver.with_model()
    epoch = d.shards["s1"]
    effects = d.core.handle(io.LeaveShard(99, "s1", epoch), d.now)
    (store,) = [e for e in effects if isinstance(e, io.Store)]
    assert dict(store.fences) == {"s1": epoch}
    assert len(store.tokens) == 2
    d.shard("s1")
    d.shard("s1")
    assert d.fences["s1"] == epoch + 1
    assert d.shards["s1"] == epoch + 2


def test_a_model_without_a_live_shard_is_not_served() -> None:
    """Once every shard is dead, no partition is called served, a creation waits, and a sync phase does not begin."""
    d = Driver.with_model()
    d.wait(limits.ALL_SILENT_S + 1, shards=False)

    model = d.core.read.model("m")
    assert not model["served"]
    assert [(p["shard"], p["from_version"], p["served"]) for p in model["partitions"]] == [(None, None, False)] * 4
    assert d.send(lambda n: io.CreateModel(n, SPEC, "other")) in d.open
    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"mode": "sync"}}))
    d.do(io.Tick())
    assert (d.commits(), d.document()["cut_asked"]) == ([], None)


def test_a_scheduler_that_hears_of_no_shard_waits_longer() -> None:
    """It may be cut off itself; once it hears of a shard again, those that it does not hear of are dead at once."""
    d = Driver.with_model()
    d.wait(limits.ALL_SILENT_S - 1, shards=False)
    assert (d.fences, set(d.owners())) == ({}, {"s0", "s1"})
    assert d.core.deadline() > d.now
    d.beats()
    d.wait(limits.ALL_SILENT_S - 1, shards=False)
    del d.shards["s1"]
    d.wait(0.5)
    assert (d.fences, set(d.owners())) == ({"s1": 1}, {"s0"})


def test_a_shard_that_was_scaled_away_leaves_the_lists_after_a_minute() -> None:
    """A shard that left is listed for a minute, a dead one longer, and their epochs still rise after that."""
    d = Driver()
    for name in ("s0", "s1", "s2"):
        d.shard(name)
    d.ask(lambda n: io.LeaveShard(n, "s2", d.shards.pop("s2")))
    del d.shards["s1"]
    d.wait(10)
    states = {s["name"]: s["state"] for s in d.core.read.shards(d.now)}
    assert states == {"s0": "active", "s1": "dead", "s2": "left"}
    d.wait(limits.SHARD_LEFT_LISTED_S)
    assert {s["name"] for s in d.core.read.shards(d.now)} == {"s0", "s1"}
    assert set(d.core.read.map()["shards"]) == {"s0", "s1"}
    d.restart()
    assert {s["name"] for s in d.core.read.shards(d.now)} == {"s0", "s1"}
    d.wait(limits.SHARD_DEAD_LISTED_S)
    assert [s["name"] for s in d.core.read.shards(d.now)] == ["s0"]
    d.shard("s2")
    assert d.shards["s2"] == 2
    assert {s["name"] for s in d.core.read.shards(d.now)} == {"s0", "s2"}


def test_a_dead_shard_is_not_listed_anew_by_each_leader() -> None:
    """A dead shard is listed for an hour of Unix time and with its true age, however often the leader changes."""
    d = Driver("s0", "s1")
    del d.shards["s1"]
    d.wait(limits.LEASE_S)
    for _ in range(2):
        d.wait(limits.SHARD_DEAD_LISTED_S / 2 - 60)
        d.restart()
    ages = {s["name"]: s["heartbeat_age_s"] for s in d.core.read.shards(d.now)}
    assert ages["s1"] == pytest.approx(limits.SHARD_DEAD_LISTED_S - 120, abs=1)
    d.wait(120)
    assert [s["name"] for s in d.core.read.shards(d.now)] == ["s0"]


def test_a_shard_is_not_gone_in_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose clock is behind that of the last leader, a dead shard counts as gone from now on."""
    d = Driver("s0", "s1")
    del d.shards["s1"]
    d.wait(limits.LEASE_S)
    monkeypatch.setattr(scheduling, "EPOCH_S", scheduling.EPOCH_S - 86400.0)
    d.restart()
    d.wait(limits.SHARD_DEAD_LISTED_S - 1)
    assert {s["name"] for s in d.core.read.shards(d.now)} == {"s0", "s1"}
    d.wait(1)
    assert [s["name"] for s in d.core.read.shards(d.now)] == ["s0"]


def test_the_commits_of_a_timeline_that_has_ended_are_not_kept() -> None:
    """A model that goes back to a cut has no stored commit of before, which another leader would take for its own."""
    d, _ = beyond_its_cut()
    assert [k for k in d.hash if k.startswith("commit:")]
    d.shard("s0")
    assert not [k for k in d.hash if k.startswith("commit:")]


def test_a_cluster_keeps_the_id_that_its_first_leader_gave_it() -> None:
    """The id is stored with the first state; a later leader takes it from there, whatever it would have chosen."""
    d = Driver()
    d.core = SchedulerCore.restore({}, d.now, 1, scheduling.EPOCH_S + d.now, "first")
    d.shard("s0")
    stored = {k: json.loads(v) for k, v in d.hash.items()}
    assert d.core.read.cluster == "first"
    assert SchedulerCore.restore(stored, d.now, 2, scheduling.EPOCH_S + d.now, "second").read.cluster == "first"


def test_names_of_the_dead_are_bounded_and_their_epochs_not_given_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of dead shards are bounded, with their fences, and their epochs are not reused, even after a restart."""
    monkeypatch.setattr(limits, "SHARD_NAMES_MAX", 4)
    d = Driver()
    for i in range(10):
        d.shard(f"pod-{i}")
        d.shard(f"pod-{i}")
        d.ask(lambda n, i=i: io.LeaveShard(n, f"pod-{i}", d.shards.pop(f"pod-{i}")))  # type: ignore[misc]
    assert 4 <= len([k for k in d.hash if k.startswith("shard:")]) <= 5
    assert len([f for f in d.fences.values() if f]) <= 5
    d.restart()
    d.shard("pod-0")
    assert d.shards["pod-0"] > 2


# --- an emptied Redis


def test_an_emptied_redis_gets_everything_back_and_owners_keep_their_memory() -> None:
    """After Redis is emptied the leader stores all fields, fences and new tokens again, and owners keep their memory.

    The documents name the token under which each owner holds its partition.
    """
    d = Driver.with_model(**EIGHT)
    d.join("a")
    d.ask(lambda n: io.RegisterDataset(n, "m", "train", size=10, task_size=5))
    d.ask(lambda n: io.CreateRun(n, "m", "a.b:c"))
    d.ask(lambda n: io.JoinPool(n, None, ["a"]))
    d.shard("s1")
    d.wait(1)
    stored, owned = dict(d.hash), [p["incarnation"] for p in d.core.read.model("m")["partitions"]]
    d.empty_redis()
    assert set(d.hash) == set(stored) | {"series:m"}
    assert d.fences == {"s1": 1}
    owners = d.document()["owners"]
    assert [o[2]["from"] for o in owners] == owned
    assert all(o[1] > make_token(d.term, 0) for o in owners)
    assert sorted(d.tokens.values()) == sorted(o[1] for o in owners)
    # Emptied again before any shard was told: they still hold them under the first tokens.
    d.empty_redis()
    assert [o[2]["from"] for o in d.document()["owners"]] == owned
    # A leader that takes over now publishes the same.
    d.restart()
    document = d.ask(lambda n: io.OpenFeed(n))["documents"][1]
    assert [o[2]["from"] for o in document["owners"]] == owned
    d.beats()
    assert d.core.read.model("m")["served"]
    document = d.ask(lambda n: io.OpenFeed(n))["documents"][1]
    assert all(o[2:] in ([], [{"source": "snapshot"}]) for o in document["owners"])


def test_what_was_handed_over_and_nobody_heard_of_goes_back_when_redis_was_emptied() -> None:
    """If Redis is emptied, a partition handed over goes back to its old owner, unless its new owner was told.

    The old owner still has it in memory, whether the new one is alive or not.
    """
    for unseen, died in ((True, False), (True, True), (False, False)):
        d = Driver.with_model(**EIGHT)
        d.shard("s2")
        index, number = min(release_numbers(d).items())
        owner, token = d.owners()[index] or "", d.core.read.model("m")["partitions"][index]["incarnation"]
        d.beat(owner, released=[row(d, index, number)])
        new = d.core.read.model("m")["partitions"][index]["incarnation"]
        if died:
            d.ask(lambda n: io.JoinShard(n, "s2", ["http://s2:1"]))
        d.empty_redis([index] if unseen else [])
        assert d.owners()[index] == (owner if unseen else "s2")
        assert d.document()["owners"][index][2]["from"] == (token if unseen else new)


def test_a_sync_model_whose_redis_was_emptied_goes_on_and_makes_a_cut() -> None:
    """A sync model does not roll back when Redis is emptied; its next commit is a cut, as the old ones are lost."""
    d = Driver.with_model(consistency={"mode": "sync"})
    a = d.join("a")
    d.clock(a, 1)
    d.wait(1)
    assert d.core.read.model("m")["cut"] == 1
    d.empty_redis()
    d.beats()
    assert d.core.read.model("m")["cut"] is None
    number = d.clock(a, 2)
    assert d.result(number)["released"]
    assert d.commits()[-1]["cut"]
    assert d.commits()[-1]["contributions"] == [["m/a", 1, 0, 1]]
    d.beats()
    model = d.core.read.model("m")
    assert (model["cut"], model["timeline"]) == (2, 0)


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_sync_model_begins_a_timeline_if_redis_lost_what_was_in_nobodys_memory(in_memory: bool) -> None:
    """A partition that has moved and is not loaded yet is lost with Redis' data, unless its old owner has it still.

    Its new owner may find an older state, and would take the commits since without what they list.
    """
    d = Driver.with_model(consistency={"mode": "sync"}, **EIGHT)
    a = d.join("a")
    d.clock(a, 1)
    d.beats()
    for t in (2, 3, 4):
        d.clock(a, t)
    d.shard("s2")
    index, number = min(release_numbers(d).items())
    d.beat(d.owners()[index] or "", released=[row(d, index, number)])
    assert d.owners()[index] == "s2"

    d.empty_redis([index] if in_memory else [])

    document = d.document()
    assert document["timeline"] == (0 if in_memory else 1)
    d.beats()
    number = d.clock_of(a, 5)
    if in_memory:
        assert d.result(number)["released"]
        return
    assert (document["source"], document["opening"]) == ("snapshot", True)
    assert document["clock"] == document["began"] > 4
    assert code(d, number) == "rolled_back"
    assert (d.commits()[-1]["t"], d.commits()[-1]["contributions"]) == (document["began"], [])


def test_a_loss_that_undoes_a_return_to_a_cut_begins_a_timeline_beyond_all_that_is_stored() -> None:
    """If Redis loses data before a return to a cut is stored, partitions load what they find, and begin together.

    Some may have stored their part of a newer cut, at a clock beyond that of the return.
    """
    d, _ = beyond_its_cut(after_s=6)
    assert (d.document()["cut"], d.commits()[-1]["cut"], d.commits()[-1]["t"]) == (1, True, 1)
    d.shard("s1")
    assert (d.document()["timeline"], d.document()["clock"]) == (1, 1)

    d.empty_redis(range(4))

    document = d.document()
    assert (document["timeline"], document["began"], document["opening"]) == (2, 3, True)
    assert document["source"] == "snapshot"


def test_who_handed_a_partition_over_before_a_return_to_a_cut_does_not_get_it_back() -> None:
    """Once its new owner has died and the model has gone back, the old owner's memory is of an ended timeline."""
    d = Driver.with_model(consistency={"mode": "sync"}, **EIGHT)
    a = d.join("a")
    d.clock(a, 1)
    d.beats()
    d.shard("s2")
    index, number = min(release_numbers(d).items())
    d.beat(d.owners()[index] or "", released=[row(d, index, number)])
    d.ask(lambda n: io.JoinShard(n, "s2", ["http://s2:1"]))
    token = d.core.read.model("m")["partitions"][index]["incarnation"]

    d.empty_redis(range(8))

    assert d.document()["owners"][index][2]["from"] == token


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_handover_that_redis_and_its_leader_lost_ends_the_old_ownership(mode: str) -> None:
    """The old owner, which the next leader names, has given the partition up: what is stored is loaded anew."""
    d = Driver.with_model(consistency={"mode": mode}, **EIGHT)
    d.clock(d.join("a"), 1)
    d.beats()
    d.shard("s2")
    before = dict(d.hash)
    index, number = min(release_numbers(d).items())
    owner, token = d.owners()[index] or "", d.given()[index][1]
    d.beat(owner, released=[row(d, index, number)])
    d.hash = before
    d.restart()
    assert (d.owners()[index], d.given()[index][1]) == (owner, token)

    d.beat(owner, lost=[["m", 1, index, token, True]])

    document = d.document()
    assert document["owners"][index][1] > token
    assert (document["timeline"], document["source"]) == ((1, {"cut": 1}) if mode == "sync" else (0, "snapshot"))


def test_moves_under_way_are_withdrawn_when_redis_was_emptied() -> None:
    """When Redis is emptied, moves in progress are withdrawn, owners keep their partitions, and moves begin again."""
    d = Driver.with_model(**EIGHT)
    d.shard("s2")
    index, number = min(release_numbers(d).items())
    owner, late = d.owners()[index] or "", row(d, index, number)
    d.empty_redis()
    d.beat(owner, released=[late])
    assert d.owners()[index] == owner
    d.wait(10)
    assert sorted(d.owners().count(s) for s in ("s0", "s1", "s2")) == [2, 3, 3]


# --- levels


def test_a_journaled_sync_model_never_rolls_back() -> None:
    """When a shard of a journaled sync model dies, only its partitions get new tokens; clock and timeline stay."""
    d = Driver.with_model(**JOURNALED)
    a = d.join("a")
    d.clock(a, 1)
    before = d.core.read.model("m")
    del d.shards["s1"]
    d.wait(6)
    after = d.core.read.model("m")
    assert (after["timeline"], after["clock"]) == (0, 1)
    assert d.document()["source"] == "snapshot"
    kept = [i for i, p in enumerate(before["partitions"]) if p["shard"] == "s0"]
    assert [
        i for i in range(4) if after["partitions"][i]["incarnation"] == before["partitions"][i]["incarnation"]
    ] == kept


def test_commit_records_of_a_journaled_model_stay_until_they_are_durable_everywhere() -> None:
    """Commit records of a journaled model are kept, across leaders, until they are durable on all partitions."""
    d = Driver()
    d.durable = False
    d.model(**JOURNALED)
    a = d.join("a")
    for t in range(1, 101):
        d.clock(a, t)
    d.wait(40, shards=False)
    d.restart()
    for name in ("s0", "s1"):
        d.shard(name)
    a = d.join("a")
    d.clock(a, 101)
    document = d.ask(lambda n: io.OpenFeed(n))["documents"][1]
    assert [c["t"] for c in document["commits"]] == list(range(101))
    d.durable = True
    d.beats()
    d.clock(a, 102)
    document = d.ask(lambda n: io.OpenFeed(n))["documents"][1]
    assert [c["t"] for c in document["commits"]] == [101]
    assert len([k for k in d.hash if k.startswith("commit:")]) == 1


@pytest.mark.parametrize(("ack", "left"), [("journaled", 4), ("applied", 7)])
def test_a_model_goes_on_once_what_held_it_up_has_taken_its_commits(
    monkeypatch: pytest.MonkeyPatch, ack: str, left: int
) -> None:
    """A model stops at COMMITS_KEPT commits that a partition lacks, or has not journaled, until heartbeats say so."""
    monkeypatch.setattr("paramserver.core.scheduler.models.COMMITS_KEPT", 8)
    d = Driver()
    d.durable = False
    d.model(**JOURNALED | {"ack": ack})
    a = d.join("a")
    d.clock(a, 12)
    assert [c["t"] for c in d.commits()] == list(range(8))

    d.durable = True
    d.beats()

    assert [c["t"] for c in d.commits()] == list(range(12))
    assert len([k for k in d.hash if k.startswith("commit:")]) == left


def test_assignments_do_not_make_commits_count_as_durable() -> None:
    """Commits are kept by the durable clock, where a new owner starts, not by the version, which assignments raise."""
    d = Driver()
    d.assigned = 10
    d.model(**JOURNALED)
    a = d.join("a")
    d.clock(a, 1)
    d.beats()
    for t in (2, 3, 4):
        d.clock(a, t)
    document = d.ask(lambda n: io.OpenFeed(n))["documents"][1]
    assert [c["t"] for c in document["commits"]] == [1, 2, 3]


# --- values that were never stored


def test_an_uploaded_model_whose_values_were_never_stored_asks_for_them_again() -> None:
    """If an owner dies before its first snapshot, the lost parameters are missing until they are uploaded again."""
    params = {"w": {"shape": [32], "init": {"kind": "upload"}}, "b": {"shape": [32], "init": {"kind": "zeros"}}}
    d = Driver("s0", "s1")
    d.send(lambda n: io.CreateModel(n, {"name": "m", "params": params, "partitions": 4}, "secret"))
    d.beats()
    d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "secret", d.given()))
    assert d.core.read.model("m")["state"] == "ready"
    del d.shards["s0"]
    d.wait(6)
    model = d.core.read.model("m")
    mine = [
        i
        for i, p in enumerate(model["partitions"])
        if p["shard"] == "s1" and p["incarnation"] == max(q["incarnation"] for q in model["partitions"])
    ]
    lost = [["m", 1, i, model["partitions"][i]["incarnation"], False] for i in (0, *mine) if i < 2]
    d.beat("s1", lost=lost)
    after = d.core.read.model("m")
    assert after["state"] == "initializing"
    assert after["missing"] == ["w"]
    assert d.document()["owners"][0][2] == {"source": "init"}
    d.beat("s1", lost=lost)  # Reported again under an old token: ignored.
    number = d.send(lambda n: io.CreateModel(n, {"name": "m", "params": params, "partitions": 4}, "another"))
    d.beats()
    assert d.result(number)["upload_token"] == "another"
    given = [[i, p["incarnation"]] for i, p in enumerate(d.core.read.model("m")["partitions"]) if i < 2]
    with pytest.raises(PsError, match="lost their values"):  # as from a shard that does not know of all losses
        d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "another", given[1:]))
    assert d.core.read.model("m")["state"] == "initializing"
    d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "another", given))
    assert d.core.read.model("m")["state"] == "ready"


@pytest.mark.parametrize("kind", ["zeros", "upload", "file"])
def test_a_restored_model_whose_values_were_never_stored_is_to_be_restored_again(kind: str) -> None:
    """Shards are told that its values come from nowhere else, and a client that creates it again is to upload none."""
    spec = SPEC | {"params": {"w": {"shape": [64], "init": {"kind": kind} | ({"path": "x"} if kind == "file" else {})}}}
    d = Driver("s0", "s1")
    d.send(lambda n: io.CreateModel(n, spec, "mine", restore=True))
    d.beats()
    assert not d.document()["restored"], "a partition may still begin with what the restore replaces"
    d.ask(lambda n: io.ModelRestored(n, "m", 1, 0, given=d.given()))
    assert d.document()["restored"]

    dies(d, "s0")

    assert (d.core.read.model("m")["state"], d.document()["restored"]) == ("initializing", True)
    made = d.send(lambda n: io.CreateModel(n, spec, "another"))
    d.beats()
    assert "upload_token" not in d.result(made)
    assert not d.work
    d.ask(lambda n: io.ModelRestored(n, "m", 1, 0, given=d.given()))
    assert d.core.read.model("m")["state"] == "ready"


GONE = problem("invalid_field", "'first' cannot be read")


def from_a_file() -> Driver:
    """Return a driver with a model whose initial values were read from a file."""
    d = Driver("s0", "s1")
    params = {"w": {"shape": [64], "init": {"kind": "file", "path": "first"}}}
    d.send(lambda n: io.CreateModel(n, SPEC | {"params": params}, "x"))
    d.beats()
    read(d)
    assert d.core.read.model("m")["state"] == "ready"
    return d


def read(d: Driver, error: PsError | None = None) -> io.LoadFiles:
    """Finish the only read of the file in progress; return its effect."""
    (effect,) = [w for w in d.work if not isinstance(w, io.ForgetOthers)]
    assert isinstance(effect, io.LoadFiles)
    d.work.clear()
    d.do(io.FilesLoaded(effect.model, [] if error else list(effect.files), error))
    return effect


def lose(d: Driver, index: int) -> None:
    """Report that the partition's owner found nothing stored of it."""
    model = d.core.read.model("m")
    place = model["partitions"][index]
    d.beat(place["shard"], lost=[["m", 1, index, place["incarnation"], False]])


def dies(d: Driver, name: str) -> list[int]:
    """Let a shard die whose partitions were never stored; return their indexes."""
    mine = [i for i, shard in enumerate(d.owners()) if shard == name]
    del d.shards[name]
    d.wait(6)
    for index in mine:
        lose(d, index)
    return mine


def test_a_model_that_was_complete_outlives_a_file_that_cannot_be_read_again() -> None:
    """A model that was complete waits for a file that cannot be read again, and then sets only its lost partitions.

    Meanwhile it reports the error and retries the read, also under another leader.
    """
    d = from_a_file()
    lost = dies(d, "s0")
    assert len(lost) == 2
    read(d)  # for the first partition reported; the others were reported meanwhile
    assert list(read(d, GONE).partitions) == lost
    model = d.core.read.model("m")
    assert (model["state"], model["missing"], model["files_error"]) == ("initializing", ["w"], GONE.detail)
    d.wait(FILES_AGAIN_S)
    read(d, GONE)
    d.restart()
    assert d.core.read.model("m")["missing"] == ["w"]
    read(d, problem("unavailable", "a shard does not answer"))
    assert d.core.read.model("m")["missing"] == ["w"]
    d.wait(FILES_AGAIN_S)
    assert list(read(d).partitions) == lost
    model = d.core.read.model("m")
    assert (model["state"], model["files_error"]) == ("ready", None)
    d.wait(2 * FILES_AGAIN_S)
    assert not d.work


def test_a_second_loss_before_the_first_is_made_good_keeps_the_others() -> None:
    """If another shard is lost before a file is read again, its partitions are set, too; those of live owners stay."""
    d = from_a_file()
    d.shard("s2")
    first = dies(d, "s0")
    read(d)
    read(d, GONE)
    kept = [i for i, shard in enumerate(d.owners()) if shard == "s1"]
    tokens = {i: d.core.read.model("m")["partitions"][i]["incarnation"] for i in kept}
    second = dies(d, "s2")
    assert second
    assert not set(second) & set(kept)
    after = d.core.read.model("m")["partitions"]
    assert {i: after[i]["incarnation"] for i in kept} == tokens
    d.wait(FILES_AGAIN_S)
    assert set(read(d).partitions) == {*first, *second}


@pytest.mark.parametrize("way", ["restore", "upload"])
def test_what_a_file_does_not_give_back_may_come_otherwise(way: str) -> None:
    """If a file cannot be read again, a restore or an upload completes the model, and the file is not read any more."""
    d = from_a_file()
    dies(d, "s0")
    read(d)
    read(d, GONE)
    if way == "restore":
        d.ask(lambda n: io.StartRestore(n, "m"))
        d.ask(lambda n: io.RestoreFinished(n, ModelKey("m", 1)))
    else:
        given = [[i, p["incarnation"]] for i, p in enumerate(d.core.read.model("m")["partitions"])]
        d.ask(lambda n: io.ParameterUploaded(n, "m", "w", None, given))
    model = d.core.read.model("m")
    assert (model["state"], model["files_error"]) == ("ready", None)
    d.wait(2 * FILES_AGAIN_S)
    assert not d.work


def test_a_model_that_was_never_complete_goes_with_its_file() -> None:
    """A model that was never complete is removed if its file cannot be read, and the create request gets the error."""
    d = Driver("s0")
    params = {"w": {"shape": [64], "init": {"kind": "file", "path": "first"}}}
    asked = d.send(lambda n: io.CreateModel(n, SPEC | {"params": params}, "x"))
    read(d, GONE)
    with pytest.raises(PsError, match="cannot be read"):
        d.result(asked)
    assert not d.core.read.models()


def test_settings_that_redis_lost_with_the_leader_do_not_shut_out_the_next_ones() -> None:
    """The next leader's documents are above what the shards have, who would ignore them for ever otherwise."""
    d = Driver.with_model()
    before = dict(d.hash)
    d.ask(lambda n: io.PatchModel(n, "m", {"optimizer": {"lr": 0.5}}))
    known = d.document()["revision"]
    mine = [p for p in d.core.read.model("m")["partitions"] if p["shard"] == "s0"]
    rows = [["m", 1, p["index"], p["incarnation"], 0, 0, known, 0, 0, 0] for p in mine]
    d.hash = before
    d.restart()
    d.ask(lambda n: io.ShardHeartbeat(n, "s0", d.shards["s0"], {}, rows))

    assert d.document()["revision"] == d.core.read.model("m")["revision"] > known
    assert d.document()["spec"]["optimizer"]["lr"] == 0.001
    stored = d.document()["revision"]
    d.restart()
    assert d.core.read.model("m")["revision"] == stored
