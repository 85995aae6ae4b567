"""Shards that come back after all have gone: whom the scheduler waits for before it gives the partitions to them."""

from paramserver import limits
from paramserver.core.scheduler import io

from .scheduling import EIGHT, SPEC, Driver, code


def stop(d: Driver, *names: str) -> None:
    """Let these shards leave, one right after the other."""
    for name in names:
        epoch = d.shards.pop(name)
        d.ask(lambda n, name=name, epoch=epoch: io.LeaveShard(n, name, epoch))  # type: ignore[misc]


def run(d: Driver, until_s: float, partitions: int) -> None:
    """Advance the clock, with heartbeats of shards that have memory for so many partitions while they train."""
    room = 2 * 32 * partitions  # each of 32 bytes, and the version that is computed
    while d.now < until_s:
        d.now += 0.5
        for name in d.shards:
            d.beat(name, memory={"limit_bytes": 1000 + room, "used_bytes": 1000})
        d.do(io.Tick())


def test_shards_that_come_back_one_by_one_share_again() -> None:
    """After all shards have left, one that returns alone gets all partitions, and the next one its share of them."""
    d = Driver.with_model(**EIGHT)
    stop(d, "s0", "s1")
    d.restart()
    d.shard("s0")
    d.wait(2)
    assert set(d.owners()) == {"s0"}
    d.wait(1)
    d.shard("s1")
    d.wait(10)
    assert d.owners().count("s1") == 4


def test_shards_that_were_stopped_together_share_again_whoever_is_back_first() -> None:
    """The first one waits for those that went with it, and not for longer than two seconds.

    Given all partitions, it would load them all, perhaps into too little memory, and hand half of them on.
    """
    d = Driver.with_model()
    stop(d, "s0", "s1")
    d.wait(3600, shards=False)
    d.restart()
    d.shard("s1")
    assert d.owners() == [None] * 4
    d.shard("s0")
    assert [d.owners().count(s) for s in ("s0", "s1")] == [2, 2]

    stop(d, "s0", "s1")
    d.shard("s1")
    d.wait(1.5)
    assert d.owners() == [None] * 4
    d.wait(0.5)
    assert d.owners() == ["s1"] * 4


def test_shards_that_are_back_first_are_given_no_more_than_their_memory_holds() -> None:
    """Shards whose memory cannot hold what is stored wait for the others, at most a minute, also if the leader changes.

    Given all partitions, each would be killed for its memory as it loads them, and again after every restart.
    """
    names = ("s0", "s1", "s2", "s3")
    d = Driver(*names)
    d.model(**EIGHT)
    stop(d, *names)
    d.wait(3600, shards=False)
    d.shard("s0")
    run(d, d.now + 40, partitions=2)
    stop(d, "s0")
    d.wait(40, shards=False)
    began_s = d.now
    for i, name in enumerate(names):
        run(d, began_s + 3 * i, partitions=2)
        assert d.owners() == [None] * 8
        d.shard(name)
    assert [d.owners().count(name) for name in names] == [2] * 4

    stop(d, *names)
    began_s = d.now
    d.shard("s0")
    run(d, began_s + 10, partitions=4)
    d.restart()
    d.shard("s1")
    assert d.owners() == [None] * 8
    run(d, began_s + 14, partitions=4)
    assert [d.owners().count(name) for name in names] == [4, 4, 0, 0]

    stop(d, "s0", "s1")
    began_s = d.now
    d.shard("s0")
    run(d, began_s + 59.5, partitions=4)
    assert d.owners() == [None] * 8
    run(d, began_s + 60, partitions=4)
    assert d.owners() == ["s0"] * 8


def test_shards_that_the_leader_has_never_heard_of_are_waited_for_likewise() -> None:
    """After schedulers and shards have all died at once, those that are back are given no more than they can hold."""
    names = ("s0", "s1", "s2", "s3")
    d = Driver(*names)
    d.model(**EIGHT)
    d.shards.clear()
    d.restart()
    began_s = d.now
    for i, name in enumerate(names):
        run(d, began_s + 4 * i, partitions=2)
        assert all(d.owners().count(n) <= 2 for n in d.shards)
        d.shard(name)
    assert [d.owners().count(name) for name in names] == [2] * 4

    d.shards.clear()
    d.restart()
    run(d, d.now + 8, partitions=2)
    d.shard("s0")
    d.do(io.Tick())
    run(d, d.now + 59.5, partitions=2)
    assert d.owners().count("s0") == 2
    run(d, d.now + 2, partitions=2)
    assert d.owners() == ["s0"] * 8

    d.shard("s1")
    run(d, d.now + 30, partitions=8)
    d.restart()
    del d.shards["s1"]
    run(d, d.now + limits.LEASE_S, partitions=8)
    assert d.owners() == ["s0"] * 8


def test_partitions_that_wait_for_shards_are_placed_also_if_the_leader_changes_meanwhile() -> None:
    """A leader that takes over while the first shard waits for the others gives it all partitions two seconds later.

    Nothing did, until a shard joined or died: the model was not served.
    """
    d = Driver.with_model()
    stop(d, "s0", "s1")
    d.shard("s1")
    d.restart()
    d.wait(1.5)
    assert d.owners() == [None] * 4
    d.wait(0.5)
    assert d.owners() == ["s1"] * 4


def test_a_new_model_is_served_while_stored_ones_wait_for_their_shards() -> None:
    """It waits for no other shard, and is refused if what waits would then lack the memory once all are back."""
    d = Driver.with_model(**EIGHT)
    stop(d, "s0", "s1")
    d.shard("s0")
    run(d, d.now + 4, partitions=5)

    def create(name: str, elements: int) -> int:
        shape = {"w": {"shape": [elements]}}
        return d.send(lambda n: io.CreateModel(n, SPEC | {"name": name, "params": shape, "partitions": 1}, "x"))

    assert code(d, create("large", 2 * 8 + 1)) == "not_enough_memory"  # two of the ten partitions that both can hold
    small = create("small", 2 * 8)
    d.beat("s0")
    assert d.result(small)["state"] == "ready"
    assert (d.owners("small"), d.owners()) == (["s0"], [None] * 8)
    d.shard("s1")
    assert [d.owners().count(name) for name in ("s0", "s1")] == [4, 4]
