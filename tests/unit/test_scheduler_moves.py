"""The scheduler's decisions when shards join or drain and partitions move, event by event."""

from typing import Any

import pytest

from paramserver import limits
from paramserver.core.scheduler import io
from paramserver.core.scheduler.balance import COPIES
from paramserver.core.scheduler.models import Model
from paramserver.errors import ConflictError, FencedError, NotFoundError, RequestError
from paramserver.types import ModelKey

from .scheduling import EIGHT, SPEC, Driver, code, release_numbers, row


def drain(d: Driver, shard: str, state: str = "draining", epoch: int | None = None) -> Any:
    """Change that shard's state; return the answer."""
    return d.ask(lambda n: io.SetShardState(n, shard, state, epoch))


def test_a_shard_that_joins_gets_its_share_while_the_others_keep_theirs() -> None:
    """A third shard gets two or three of eight partitions, under new tokens and from snapshots; the rest stays."""
    d = Driver()
    before = d.model(**EIGHT)["partitions"]
    d.shard("s2")
    assert d.owners() == [p["shard"] for p in before]
    d.wait(10)
    counts = [d.owners().count(s) for s in ("s0", "s1", "s2")]
    assert sorted(counts) == [2, 3, 3]
    after = d.core.read.model("m")
    assert after["timeline"] == 0
    assert after["served"]
    for old, new, owner in zip(before, after["partitions"], d.document()["owners"], strict=True):
        if old["shard"] == new["shard"]:
            assert old["incarnation"] == new["incarnation"]
            assert len(owner) == 2
        else:
            assert new["incarnation"] > old["incarnation"]
            assert owner[2] == {"source": "snapshot"}


def test_the_owner_keeps_a_partition_until_it_has_said_that_all_of_it_is_stored() -> None:
    """A partition moves only when its owner reports it stored under the current token and release number."""
    d = Driver.with_model(**EIGHT)
    d.shard("s2")
    asked = release_numbers(d)
    index, number = min(asked.items())
    owner = d.owners()[index] or ""
    other = next(s for s in ("s0", "s1") if s != owner)
    before = d.owners()
    d.beat(owner, releases=False)
    d.beat(owner, released=[row(d, index, number + 1)])
    d.beat(owner, released=[[*row(d, index, number)[:3], 5, 7, number, 0]])
    d.beat(other, released=[row(d, index, number)])
    assert d.owners() == before
    d.beat(owner, released=[row(d, index, number)])
    assert d.owners()[index] == "s2"


def test_a_late_word_of_a_withdrawn_release_request_hands_nothing_over() -> None:
    """A late report for a withdrawn release request moves nothing, because the partition may have changed since."""
    d = Driver.with_model(**EIGHT)
    d.shard("s2")
    index, number = min(release_numbers(d).items())
    owner = d.owners()[index] or ""
    late = row(d, index, number)
    drain(d, "s2")
    assert release_numbers(d) == {}
    drain(d, "s2", "active")
    again = release_numbers(d)[index]
    assert again != number
    d.beat(owner, released=[late])
    assert d.owners()[index] == owner
    d.beat(owner, released=[row(d, index, again)])
    assert d.owners()[index] == "s2"


def test_a_new_leader_knows_nothing_of_its_predecessors_release_requests() -> None:
    """A new leader publishes no release request at first, ignores reports for old ones, and then makes its own."""
    d = Driver.with_model(**EIGHT)
    d.shard("s2")
    index, number = min(release_numbers(d).items())
    owner = d.owners()[index] or ""
    d.restart()
    documents = d.ask(lambda n: io.OpenFeed(n))["documents"]
    assert all(len(o) == 2 for o in documents[1]["owners"])
    d.beat(owner, released=[row(d, index, number)])
    assert d.owners()[index] == owner
    d.wait(10)
    assert sorted(d.owners().count(s) for s in ("s0", "s1", "s2")) == [2, 3, 3]


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("busy", ["restored", "read"])
def test_nothing_moves_while_a_model_is_restored_or_read(busy: str, mode: str) -> None:
    """Moves of a model are withdrawn when its restore begins; none begins until that, or its checkpoint, has ended."""
    d = Driver.with_model(**EIGHT, consistency={"mode": mode})
    d.shard("s2")
    assert release_numbers(d)
    if busy == "restored":
        d.ask(lambda n: io.StartRestore(n, "m"))
        assert release_numbers(d) == {}
    else:
        drain(d, "s2")
        d.send(lambda n: io.RequestCheckpoint(n, "m", "mine"))
        d.wait(2)
        drain(d, "s2", "active")
    before = d.owners()
    d.wait(10)
    assert (d.owners(), release_numbers(d)) == (before, {})

    if busy == "restored":
        d.ask(lambda n: io.RestoreFinished(n, ModelKey("m", 1)))
    else:
        (effect,) = d.work
        assert isinstance(effect, io.WriteCheckpoint)
        d.do(io.CheckpointWritten(effect.model, effect.name, 10, [0] * 8, "/x"))
    d.wait(10)
    assert "s2" in d.owners()


def test_a_target_that_dies_gets_nothing_and_the_owner_goes_on() -> None:
    """If the target of a move dies, the release request is withdrawn and the partition stays with its owner."""
    d = Driver.with_model(**EIGHT)
    d.shard("s2")
    before = d.owners()
    assert release_numbers(d)
    d.ask(lambda n: io.LeaveShard(n, "s2", d.shards.pop("s2")))
    assert release_numbers(d) == {}
    d.wait(5)
    assert d.owners() == before


def test_an_owner_that_does_not_hand_over_is_let_be_for_a_while() -> None:
    """An owner that does not hand over within MOVE_S keeps its partition, and other partitions are requested."""
    d = Driver.with_model(**EIGHT)
    d.shard("s2")
    first = release_numbers(d)
    for _ in range(int(limits.MOVE_S) + 1):
        d.now += 1
        for s in d.shards:
            d.beat(s, releases=False)
        d.do(io.Tick())
    now = release_numbers(d)
    assert now
    assert not set(now) & set(first)


def test_a_large_partition_has_the_time_that_storing_it_may_take() -> None:
    """The time of a move grows with the partition's bytes, so a large one is not withdrawn again and again."""
    d = Driver()
    d.model(params={"w": {"shape": [32 << 20]}}, partitions=2)  # 64 MiB each
    drain(d, "s1")
    asked = release_numbers(d)
    assert asked
    for _ in range(int(limits.MOVE_S) + 60):
        d.now += 1
        for s in d.shards:
            d.beat(s, releases=False)
        d.do(io.Tick())
    assert release_numbers(d) == asked


def test_a_partition_that_waits_for_others_of_its_owner_has_its_own_time() -> None:
    """An owner stores its moves one after the other, beside its snapshots; none is withdrawn while it gets on so."""
    d = Driver()
    d.model(params={"w": {"shape": [128 << 20]}}, partitions=8)  # 64 MiB each
    drain(d, "s1")
    asked = release_numbers(d)
    assert len(asked) == limits.MOVES_AT_ONCE
    for index, number in asked.items():
        for _ in range(250):  # at half of the lowest pace, 64 MiB take 256 s
            d.now += 1
            for s in d.shards:
                d.beat(s, releases=False)
            d.do(io.Tick())
        assert release_numbers(d)[index] == number
        d.beat("s1", released=[row(d, index, number)])
        assert d.owners()[index] == "s0"


def test_a_partition_that_is_not_stored_is_not_held_for_as_long_as_others_move() -> None:
    """A move that comes to no end is withdrawn although its owner goes on to hand over others: its pushes wait for it.

    At most `limits.MOVES_AT_ONCE` are ahead of it, so that many times what one may take is enough.
    """
    d = Driver.with_model(partitions=128, params={"w": {"shape": [128]}})
    drain(d, "s1")
    stuck, number = next(iter(release_numbers(d).items()))
    began = d.now
    while release_numbers(d).get(stuck) == number:
        assert d.now - began < limits.MOVES_AT_ONCE * (limits.MOVE_S + 1)
        d.now += 5
        others = [row(d, i, n) for i, n in release_numbers(d).items() if i != stuck]
        d.beat("s0", releases=False)
        d.beat("s1", released=others[:1])
        d.do(io.Tick())
    assert d.owners()[stuck] == "s1"


def test_a_shard_that_redis_does_not_answer_takes_no_part_in_moves() -> None:
    """Moves from and to a shard that cannot reach Redis are withdrawn, and it gets nothing, until it can again."""
    d = Driver.with_model(**EIGHT)
    d.shard("s2")
    away = {"redis_away": True}
    assert {d.owners()[i] for i in release_numbers(d)} == {"s0", "s1"}
    d.beat("s0", releases=False, metrics=away)
    d.do(io.Tick())
    assert {d.owners()[i] for i in release_numbers(d)} == {"s1"}
    d.beat("s2", metrics=away)
    d.do(io.Tick())
    assert release_numbers(d) == {}
    d.send(lambda n: io.CreateModel(n, SPEC | {"name": "n"}, "x"))
    assert set(d.owners("n")) == {"s1"}
    d.wait(10)
    assert set(d.owners()) == {"s0", "s1", "s2"}


def test_a_draining_shard_ends_with_nothing_and_gets_nothing() -> None:
    """A draining shard loses all partitions and gets none, even of new models or by a new leader, until it rejoins."""
    d = Driver.with_model(**EIGHT)
    d.shard("s2")
    d.wait(10)
    assert d.beat("s1") == "active"
    answer = drain(d, "s1")
    assert (answer["state"], answer["targets"]) == ("draining", 2)
    assert answer["partitions"] > 0
    assert d.beat("s1") == "draining"
    d.wait(10)
    assert "s1" not in d.owners()
    assert drain(d, "s1")["partitions"] == 0
    d.model(**EIGHT, name="n")
    assert "s1" not in d.owners("n")
    d.restart()
    assert d.beat("s1") == "draining"
    d.shard("s1")
    assert d.beat("s1") == "active"
    d.wait(10)
    assert "s1" in d.owners() + d.owners("n")


def test_a_drain_that_is_called_off_leaves_the_rest_where_it_is() -> None:
    """Setting a draining shard to `active` withdraws the pending moves, and it keeps its partitions."""
    d = Driver.with_model(**EIGHT)
    drain(d, "s1")
    assert len(release_numbers(d)) == limits.MOVES_AT_ONCE
    drain(d, "s1", "active")
    assert release_numbers(d) == {}
    assert d.owners().count("s1") == 4


def test_a_drain_is_refused_with_figures_when_the_others_lack_memory() -> None:
    """A drain is refused if the other shards lack memory, unless a limit is unknown or the shard itself requests it."""
    d = Driver.with_model(**EIGHT, optimizer={"name": "adam"})
    drain(d, "s1")
    drain(d, "s1", "active")
    needed = 4 * 8 * 4 * 3 * 2  # by the partitions of each shard
    d.beat("s0", memory={"limit_bytes": 1000 + needed, "used_bytes": 900})
    with pytest.raises(ConflictError) as e:
        drain(d, "s1")
    assert e.value.code == "not_enough_memory"
    assert e.value.members["needed_bytes"] == needed
    assert e.value.members["free_bytes"] == 100
    assert d.beat("s1") == "active"
    assert drain(d, "s1", epoch=d.shards["s1"])["state"] == "draining"
    with pytest.raises(FencedError):
        drain(d, "s1", epoch=d.shards["s1"] - 1)
    with pytest.raises(NotFoundError):
        drain(d, "s9")
    with pytest.raises(RequestError, match="state"):
        drain(d, "s1", "tired")


def test_a_second_drain_is_refused_if_both_together_lack_memory() -> None:
    """What an already draining shard still has counts for the next drain, so that neither gets stuck half-way."""
    d = Driver("s0", "s1", "s2", "s3")
    d.model(partitions=64, params={"w": {"shape": [64 * 1000]}})
    for s in d.shards:
        d.beat(s, memory={"limit_bytes": 328_000, "used_bytes": 100_000})  # each has 64,000 of partitions
    drain(d, "s3")
    with pytest.raises(ConflictError) as e:
        drain(d, "s2")
    assert e.value.code == "not_enough_memory"
    assert e.value.members["needed_bytes"] > 200_000


def two_models() -> Driver:
    """Return a driver with models m and n, of 16 partitions each: of one that has yet to load some, no other moves."""
    d = Driver("s0", "s1")
    for name in ("m", "n"):
        d.send(lambda n, name=name: io.CreateModel(n, SPEC | {"name": name, "partitions": 16}, "x"))  # type: ignore[misc]
    d.beats()
    return d


def moving(d: Driver) -> list[tuple[Model, int]]:
    """Return the partitions that are requested to be released."""
    return [(m, i) for m in d.core._c.models.values() for i, o in enumerate(m.owners) if o.release]


def test_what_a_target_still_loads_counts_as_a_move() -> None:
    """Between its release and its first report by the target, a partition holds a place among those that move."""
    d = two_models()
    drain(d, "s1")
    assert len(moving(d)) == limits.MOVES_AT_ONCE
    rows = [[m.name, 1, i, m.owners[i].token, 7, m.owners[i].release, 0] for m, i in moving(d)]
    d.beat("s1", released=rows)
    assert not moving(d)
    d.beat("s0")
    assert len(moving(d)) == limits.MOVES_AT_ONCE


def test_what_a_target_still_loads_counts_in_its_memory() -> None:
    """Between its release and its first report by the target, a partition holds the memory that it will need there."""
    d = two_models()
    size = d.core._c.models["m"].held_bytes_of(0)

    def with_room_for_two() -> None:
        owned = (d.owners("m") + d.owners("n")).count("s0")
        d.beat("s0", memory={"limit_bytes": COPIES * size * (owned + 2), "used_bytes": 0})

    with_room_for_two()
    drain(d, "s1", epoch=d.shards["s1"])
    assert len(moving(d)) == 2 < limits.MOVES_AT_ONCE
    d.beat("s1")
    d.do(io.Tick())
    assert d.owners().count("s1") == 6
    assert not moving(d)
    with_room_for_two()  # beside those that it serves now
    assert len(moving(d)) == 2


def test_the_last_shard_may_drain_and_keeps_what_it_has() -> None:
    """If all shards drain, they keep their partitions, and partitions without an owner go to a draining shard."""
    d = Driver("s0", "s1")
    d.model(**EIGHT)
    for s in ("s0", "s1"):
        drain(d, s)
    assert drain(d, "s0")["targets"] == 0
    d.wait(5)
    assert d.owners().count("s0") == 4
    d.ask(lambda n: io.LeaveShard(n, "s1", d.shards.pop("s1")))
    assert set(d.owners()) == {"s0"}


def test_nothing_moves_while_redis_is_away() -> None:
    """While Redis is away moves are withdrawn, so that owners serve, and none begins; they begin again afterwards."""
    d = Driver.with_model(**EIGHT)
    d.shard("s2")
    assert release_numbers(d)
    d.do(io.StorageChanged("timed out"))
    assert release_numbers(d) == {}
    d.do(io.Tick())
    assert release_numbers(d) == {}
    d.do(io.StorageChanged(""))
    assert release_numbers(d)


def test_cuts_and_moves_do_not_meet() -> None:
    """No partition moves while a cut is being stored, and no cut begins while a partition moves."""
    d = Driver.with_model(**EIGHT, consistency={"mode": "sync"})
    a = d.join("a")
    d.clock(a, 1)
    assert d.commits()[-1]["cut"]
    d.shard("s2")
    assert release_numbers(d) == {}
    d.beats()
    assert d.core.read.model("m")["cut"] == 1
    d.now += limits.SNAPSHOT_INTERVAL_S - 0.1
    for s in d.shards:
        d.beat(s, releases=False)
    d.do(io.Tick())
    assert release_numbers(d)
    d.now += 1
    d.clock(a, 2)
    assert not d.commits()[-1]["cut"]
    d.wait(4)
    assert release_numbers(d) == {}
    d.clock(a, 3)
    assert d.commits()[-1]["cut"]
    assert d.core.read.model("m")["timeline"] == 0
    assert "s2" in d.owners()


def test_load_moves_partitions_when_bytes_are_level() -> None:
    """Where shards hold equal bytes, two busy partitions of one shard are separated."""
    d = Driver.with_model()
    assert d.owners() == ["s0", "s1", "s0", "s1"]
    busy: list[list[Any]] = [["m", 1, i, 60e6] for i in (0, 2)]
    for _ in range(40):
        d.now += 0.5
        for s in d.shards:
            d.beat(s, loads=[r for r in busy if d.owners()[r[2]] == s])
        d.do(io.Tick())
    assert d.owners()[0] != d.owners()[2]
    assert sorted(str(s) for s in d.owners()) == ["s0", "s0", "s1", "s1"]


def test_a_model_that_the_shards_have_no_memory_for_is_refused_with_figures() -> None:
    """A new model needs free memory for twice its values and optimizer state, beside as much for each model there is.

    It is the same before and after that is loaded: its optimizer's arrays are in no heartbeat before the first push.
    """
    d = Driver("s0", "s1")
    needed = 64 * 4 * 3 * 2

    def create(name: str) -> int:
        return d.send(lambda n: io.CreateModel(n, SPEC | {"name": name, "optimizer": {"name": "adam"}}, "x"))

    def tell(free: int) -> None:
        for name in d.shards:
            d.beat(name, memory={"limit_bytes": 1000 + free, "used_bytes": 1000})

    tell(needed // 2 - 1)
    stored = dict(d.hash)
    with pytest.raises(ConflictError) as e:
        d.result(create("m"))
    assert e.value.code == "not_enough_memory"
    assert e.value.members["needed_bytes"] == needed
    assert e.value.members["free_bytes"] == needed - 2
    assert d.hash == stored
    tell(needed // 2)
    assert create("m") in d.open
    assert code(d, create("n")) == "not_enough_memory"
    tell(needed - 1)
    assert d.core.read.model("m")["served"]
    assert code(d, create("n")) == "not_enough_memory"
    tell(needed)
    assert create("n") in d.open


def test_an_optimizer_that_the_shards_have_no_memory_for_is_refused_with_figures() -> None:
    """A patch to an optimizer needs free memory for the state it adds; one with less state is always accepted."""
    d = Driver.with_model(optimizer={"name": "momentum"})
    needed = 64 * 4 * 2
    stored = dict(d.hash)

    def patch(optimizer: str) -> int:
        return d.send(lambda n: io.PatchModel(n, "m", {"optimizer": {"name": optimizer}}))

    def tell(free: int) -> None:
        for name, more in (("s0", free), ("s1", 0)):  # beside what the model itself takes
            d.beat(name, memory={"limit_bytes": 1000 + needed + more, "used_bytes": 1000})

    tell(needed - 1)
    with pytest.raises(ConflictError) as e:
        d.result(patch("adam"))
    assert (e.value.code, e.value.members) == ("not_enough_memory", {"needed_bytes": needed, "free_bytes": needed - 1})
    assert d.hash == stored
    assert d.result(patch("sgd"))["spec"]["optimizer"]["name"] == "sgd"
    tell(2 * needed)
    assert d.result(patch("adam"))["spec"]["optimizer"]["name"] == "adam"


def test_a_model_is_taken_where_a_limit_is_unknown() -> None:
    """A model is accepted without a check of memory if the limit of a shard is unknown."""
    d = Driver("s0", "s1")
    d.beat("s0", memory={"limit_bytes": 1000, "used_bytes": 900})

    assert d.send(lambda n: io.CreateModel(n, SPEC | {"optimizer": {"name": "adam"}}, "x")) in d.open


def long_drain() -> tuple[Driver, Any]:
    """Return a driver whose sync model is being drained from one of two shards, and the model's worker."""
    d = Driver.with_model(partitions=64, consistency={"mode": "sync"})
    a = d.join("a")
    d.clock(a, 1)
    d.beats()
    drain(d, "s1")
    return d, a


def train(d: Driver, a: Any, cut_s: float = 0.0) -> None:
    """Let half a second pass: a commit, one partition released, and a cut stored that has begun `cut_s` ago."""
    cuts = d.core._c.models["m"].cuts
    d.now += 0.5
    d.clock(a, d.core.read.model("m")["clock"] + 1)
    moves = [row(d, i, n) for i, n in release_numbers(d).items()]
    d.do(io.Tick())
    stored = d.now - cuts.began_s >= cut_s
    d.beat("s1", stored=stored, released=moves[:1])
    d.beat("s0", stored=stored)


def test_a_drain_and_the_cuts_take_turns() -> None:
    """Cuts go on while a shard is drained, so that a death takes a sync model back by little, and so does the drain."""
    d, a = long_drain()
    whole_s, longest_s, before = d.now, 0.0, 1
    while "s1" in d.owners():
        train(d, a)
        if (cut := d.core.read.model("m")["cut"]) != before:
            whole_s, before = d.now, cut
        longest_s = max(longest_s, d.now - whole_s)
    assert before > 1
    assert longest_s <= limits.SNAPSHOT_INTERVAL_S + 0.5 * (limits.MOVES_AT_ONCE + 1)


def test_cuts_that_take_longer_than_their_interval_let_a_drain_go_on() -> None:
    """Between two long cuts, moves have a turn: else a large model would stay on a draining shard for ever."""
    d, a = long_drain()
    for _ in range(600):
        train(d, a, cut_s=8.0)
    assert "s1" not in d.owners()


def test_a_checkpoint_does_not_wait_for_the_end_of_a_drain() -> None:
    """Moves make way for a checkpoint of a sync model that trains, and then go on."""
    d, a = long_drain()
    for name in ("first", "second"):
        d.send(lambda n, name=name: io.RequestCheckpoint(n, "m", name))  # type: ignore[misc]
        for _ in range(10):
            train(d, a)
        (effect,) = d.work
        assert isinstance(effect, io.WriteCheckpoint)
        assert "s1" in d.owners()
        d.do(io.CheckpointWritten(effect.model, effect.name, 10, [0] * 64, "/x"))
        d.work.clear()
    while "s1" in d.owners():
        train(d, a)


@pytest.mark.parametrize("by_operator", [False, True])
def test_a_shard_that_stops_hands_over_without_waiting_for_cuts(by_operator: bool) -> None:
    """A shard that is told to stop has little time, and what it has not handed over becomes a cut at its end.

    That an operator drains it as well changes nothing.
    """
    d, a = long_drain()
    drain(d, "s1", epoch=d.shards["s1"])
    if by_operator:
        drain(d, "s1")
    for _ in range(int(limits.SNAPSHOT_INTERVAL_S) * 2 + 4):
        train(d, a)
        assert release_numbers(d)


@pytest.mark.parametrize("ack", ["applied", "journaled"])
@pytest.mark.parametrize("found", [4, 5])
def test_a_new_owner_that_lacks_what_was_handed_over_does_not_go_on_from_there(ack: str, found: int) -> None:
    """If Redis has lost the state stored for a move, what the new owner finds may be of the same clock.

    It lacks what was staged, and would take the next commits without that.
    """
    d = Driver.with_model(ack=ack, consistency={"mode": "sync"}, **EIGHT)
    a = d.join("a")
    d.clock(a, 1)
    d.beats()
    d.shard("s2")
    index, number = min(release_numbers(d).items())
    d.lsns[index] = 5
    d.beat(d.owners()[index] or "", released=[row(d, index, number)])
    assert d.owners()[index] == "s2"

    d.lsns[index] = found
    d.beats()

    document = d.document()
    assert document["timeline"] == (0 if found == 5 else 1)
    if found < 5:
        assert document["source"] == ({"cut": 1} if ack == "applied" else "init")
    d.beats()
    assert d.document()["timeline"] == document["timeline"]
