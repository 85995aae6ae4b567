"""Shards that Redis does not answer: what they keep, and what others load in their place."""

import pytest

from paramserver.core.scheduler import io

from .scheduling import SPEC, Driver


def beat_without_redis(d: Driver, name: str, unserved: set[int]) -> None:
    """Send the heartbeat of a shard that Redis does not answer: it serves its partitions but for these."""
    owned = [(i, o.token) for i, o in enumerate(d.core._c.models["m"].owners) if o.shard == name]
    rows = [["m", 1, i, token, 0, 0, 0, 0, 0, 0] for i, token in owned if i not in unserved]
    d.ask(lambda n: io.ShardHeartbeat(n, name, d.shards[name], {"redis_away": True}, rows))


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_what_a_shard_cannot_load_goes_to_one_that_can(mode: str) -> None:
    """A shard that Redis does not answer keeps what it serves; what it was given and cannot load goes to others.

    Until then it has the time in which a shard may be silent, as Redis may just be slow.
    """
    d = Driver("s0", "s1", "s2")
    d.model(partitions=6, consistency={"mode": mode})
    before = {i for i, o in enumerate(d.owners()) if o == "s1"}
    d.ask(lambda n: io.LeaveShard(n, "s0", d.shards.pop("s0")))
    given = {i for i, o in enumerate(d.owners()) if o == "s1"} - before
    assert given
    unserved = given if mode == "async" else given | before  # a synchronous model goes back as a whole
    for _ in range(5):
        beat_without_redis(d, "s1", unserved)
        assert {i for i, o in enumerate(d.owners()) if o == "s1"} == given | before
        d.now += 1
        d.beat("s2")
    beat_without_redis(d, "s1", unserved)
    d.beat("s2")
    assert {i for i, o in enumerate(d.owners()) if o == "s1"} == (before if mode == "async" else set())
    assert mode == "async" or d.core.read.model("m")["served"]
    if mode == "async":
        assert all(d.document()["owners"][i] == ["s2", d.core._c.models["m"].owners[i].token] for i in given)
        assert d.document()["source"] == "snapshot"


def test_a_draining_shard_loads_what_no_other_can() -> None:
    """If Redis answers a draining shard alone, it gets what has no owner, or the model would not be served."""
    d = Driver("s0", "s1", "s2")
    d.model(partitions=6)
    d.ask(lambda n: io.SetShardState(n, "s2", "draining"))
    beat_without_redis(d, "s1", set())
    before = d.owners()
    d.ask(lambda n: io.LeaveShard(n, "s0", d.shards.pop("s0")))
    assert d.owners() == ["s2" if shard == "s0" else shard for shard in before]


def test_a_draining_shard_takes_what_another_cannot_load_after_all() -> None:
    """What a shard was given before Redis fell silent for it goes to a draining shard if no other is there."""
    d = Driver("s0", "s1", "s2")
    d.model(partitions=6)
    d.ask(lambda n: io.SetShardState(n, "s2", "draining"))
    before = d.owners()
    d.ask(lambda n: io.LeaveShard(n, "s0", d.shards.pop("s0")))
    given = {i for i, shard in enumerate(before) if shard == "s0"}
    assert {d.owners()[i] for i in given} == {"s1"}
    for _ in range(6):
        beat_without_redis(d, "s1", given)
        d.now += 1
        d.beat("s2")
    beat_without_redis(d, "s1", given)
    assert d.owners() == ["s2" if shard == "s0" else shard for shard in before]


@pytest.mark.parametrize("cut", [True, False], ids=["from a cut", "from the beginning"])
def test_a_model_goes_back_once_for_a_death_while_redis_does_not_answer_another_shard(cut: bool) -> None:
    """What goes back must be loaded, so others are given at once what a shard has that Redis does not answer."""
    d = Driver("s0", "s1", "s2")
    if cut:
        d.model(partitions=6, consistency={"mode": "sync"})
    else:
        d.send(lambda n: io.CreateModel(n, SPEC | {"partitions": 6, "consistency": {"mode": "sync"}}, "secret"))
        d.beat("s0", stored=False)
    beat_without_redis(d, "s1", set())
    d.ask(lambda n: io.LeaveShard(n, "s0", d.shards.pop("s0")))
    assert d.owners() == ["s2"] * 6
    for _ in range(8):
        d.now += 1
        d.beat("s2")
        beat_without_redis(d, "s1", set())
        d.do(io.Tick())
    assert (d.core.read.model("m")["timeline"], d.core.read.model("m")["served"]) == (1, True)


def test_what_goes_back_stays_where_no_other_shard_can_load_it() -> None:
    """A shard that Redis does not answer keeps its partitions, under new tokens, if it is alone with such."""
    d = Driver("s0", "s1")
    d.model(consistency={"mode": "sync"})
    before = {i: o.token for i, o in enumerate(d.core._c.models["m"].owners) if o.shard == "s1"}
    beat_without_redis(d, "s1", set())
    d.ask(lambda n: io.LeaveShard(n, "s0", d.shards.pop("s0")))
    assert d.owners() == ["s1"] * 4
    assert all(d.core._c.models["m"].owners[i].token > token for i, token in before.items())


def test_a_shard_that_joins_without_redis_gets_nothing_if_others_can_have_it() -> None:
    """What a shard that is started anew had goes to others if Redis did not answer it: it could not load it."""
    d = Driver.with_model()
    d.ask(lambda n: io.JoinShard(n, "s0", ["http://s0:1"]))
    assert set(d.owners()) == {"s1"}


def test_where_no_shard_can_load_a_partition_it_stays() -> None:
    """If Redis answers none of the shards, nothing is passed on from one to the other."""
    d = Driver.with_model()
    for name in d.shards:
        d.shards[name] = d.ask(lambda n, name=name: io.JoinShard(n, name, [f"http://{name}:1"]))["epoch"]  # type: ignore[misc]
    before = d.owners()
    for _ in range(8):
        for name in ("s0", "s1"):
            beat_without_redis(d, name, set(range(4)))
        d.now += 1
    assert d.owners() == before
