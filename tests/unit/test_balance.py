"""Move planning: bytes before load, no oscillation, and nothing beyond free memory and the bound on moves."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from paramserver.core.scheduler.balance import PartitionLoad, ShardLoad, missing_bytes, plan, worst_loss

MIB = 1 << 20


def settle(
    partitions: list[PartitionLoad], shards: list[ShardLoad], at_once: int = 4, by_load: bool = False
) -> tuple[list[PartitionLoad], int]:
    """Carry out plans until there is none left; return the partitions as they are then, and the number of moves."""
    count = 0
    for _ in range(10_000):
        moves = plan(partitions, shards, at_once, by_load=by_load)
        if not moves:
            return partitions, count
        to = {m.key: m.target for m in moves}
        assert all(m.source == next(p.shard for p in partitions if p.key == m.key) for m in moves)
        partitions = [PartitionLoad(p.key, to.get(p.key, p.shard), p.bytes, p.load, p.movable) for p in partitions]
        count += len(moves)
    raise AssertionError("plans go on for ever")


def held(partitions: list[PartitionLoad], shards: list[ShardLoad]) -> dict[str, int]:
    return {s.name: sum(p.bytes for p in partitions if p.shard == s.name) for s in shards}


def test_a_shard_that_joins_gets_its_share_and_no_more_moves_than_that() -> None:
    """A third shard that joins two with twelve partitions gets four of them, in four moves."""
    partitions = [PartitionLoad(("m", i), f"s{i % 2}", MIB) for i in range(12)]
    shards = [ShardLoad("s0"), ShardLoad("s1"), ShardLoad("s2")]
    after, moves = settle(partitions, shards)
    assert held(after, shards) == {"s0": 4 * MIB, "s1": 4 * MIB, "s2": 4 * MIB}
    assert moves == 4


def test_what_drains_goes_to_those_that_stay() -> None:
    """Each partition of a draining shard moves once, and the other shards end with equal bytes."""
    partitions = [PartitionLoad(("m", i), f"s{i % 3}", MIB) for i in range(12)]
    shards = [ShardLoad("s0"), ShardLoad("s1", draining=True), ShardLoad("s2")]
    after, moves = settle(partitions, shards)
    assert held(after, shards) == {"s0": 6 * MIB, "s1": 0, "s2": 6 * MIB}
    assert moves == 4


def test_nobody_has_more_moves_at_once_than_the_bound() -> None:
    """A shard takes part in at most `at_once` moves, including those in progress."""
    partitions = [PartitionLoad(("m", i), "s0", MIB) for i in range(64)]
    moves = plan(partitions, [ShardLoad("s0", moves=1), ShardLoad("s1")], 4)
    assert len(moves) == 3
    assert plan(partitions, [ShardLoad("s0", moves=4), ShardLoad("s1")], 4) == []


def test_of_several_models_the_one_moves_of_which_the_shard_has_most() -> None:
    """Of equal partitions, one of the model with most excess on the source moves, so that each model is spread."""
    partitions = [PartitionLoad(("a", i), "s0", MIB) for i in range(4)] + [
        PartitionLoad(("b", i), "s1", MIB) for i in range(4)
    ]
    partitions += [PartitionLoad(("c", i), "s0", MIB) for i in range(2)]
    moves = plan(partitions, [ShardLoad("s0"), ShardLoad("s1")], 1)
    assert [m.key[0] for m in moves] == ["a"]


def test_what_does_not_fit_into_memory_does_not_move() -> None:
    """A shard gets no partition without free memory for twice its state; if that is unknown, memory is no obstacle."""
    partitions = [PartitionLoad(("m", i), "s0", MIB) for i in range(4)]
    assert plan(partitions, [ShardLoad("s0", draining=True), ShardLoad("s1", free_bytes=2 * MIB - 1)], 4) == []
    assert len(plan(partitions, [ShardLoad("s0", draining=True), ShardLoad("s1", free_bytes=5 * MIB)], 4)) == 2
    assert len(plan(partitions, [ShardLoad("s0", draining=True), ShardLoad("s1")], 4)) == 4


def test_a_drain_that_memory_forbids_is_told_with_figures() -> None:
    """`missing_bytes` returns (needed, free) bytes if a drain does not fit into memory.

    It returns None if it fits, if the free memory of a shard is unknown, or if no shard remains.
    """
    partitions = [PartitionLoad(("m", i), "s0", MIB) for i in range(4)]
    assert missing_bytes(partitions, [ShardLoad("s0"), ShardLoad("s1", free_bytes=7 * MIB)], "s0") == (8 * MIB, 7 * MIB)
    assert missing_bytes(partitions, [ShardLoad("s0"), ShardLoad("s1", free_bytes=8 * MIB)], "s0") is None
    assert missing_bytes(partitions, [ShardLoad("s0"), ShardLoad("s1", free_bytes=0), ShardLoad("s2")], "s0") is None
    assert missing_bytes(partitions, [ShardLoad("s0"), ShardLoad("s1", free_bytes=0, draining=True)], "s0") is None


def test_a_drain_counts_what_other_draining_shards_still_have() -> None:
    """What two shards that drain have goes to the same free memory, which is to be enough for both."""
    partitions = [PartitionLoad(("m", i), f"s{i % 3}", MIB) for i in range(6)]
    shards = [ShardLoad("s0", free_bytes=7 * MIB), ShardLoad("s1", draining=True, free_bytes=0), ShardLoad("s2")]
    assert missing_bytes(partitions, shards, "s2") == (8 * MIB, 7 * MIB)
    shards[0] = ShardLoad("s0", free_bytes=8 * MIB)
    assert missing_bytes(partitions, shards, "s2") is None


def test_the_loss_of_a_shard_that_memory_forbids_is_told_with_figures() -> None:
    """`worst_loss` returns what `missing_bytes` does for the shard that the others could least replace.

    It returns None if they could replace each, if the free memory of a shard is unknown, or if there is only one.
    """

    def loss(*free: int | None, draining: int | None = None) -> tuple[int, int] | None:
        shards = [ShardLoad(f"s{i}", i == draining, None if f is None else f * MIB) for i, f in enumerate(free)]
        return worst_loss({s.name: MIB * held for s, held in zip(shards, (4, 2, 0), strict=False)}, shards)

    assert loss(8, 8) is None
    assert loss(8, 6) == (8 * MIB, 6 * MIB), "without s0"
    assert loss(2, 8) == (4 * MIB, 2 * MIB), "without s1"
    assert loss(0, 6) == (4 * MIB, 0), "both lack memory for the other's, and without s1 more of it is missing"
    assert loss(2, 6, 2) is None, "two take the place of one"
    assert loss(2, 6, 0) == (8 * MIB, 6 * MIB)
    assert loss(18, 6, 18, draining=2) == (8 * MIB, 6 * MIB), "what drains takes nothing"
    assert loss(9, 9, 11, draining=1) == (12 * MIB, 11 * MIB), "what drains goes to the same memory"
    assert loss(4, None) is None
    assert loss(0) is None
    assert loss() is None
    assert worst_loss({"s0": 0, "s1": 0}, [ShardLoad("s0", free_bytes=0), ShardLoad("s1", free_bytes=0)]) is None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=5))
def test_the_worst_loss_is_that_of_the_shard_with_the_most_missing(shards: list[tuple[int, int, bool]]) -> None:
    """`worst_loss` is None exactly if `missing_bytes` is for every shard, and else its largest difference."""
    loads = [ShardLoad(f"s{i}", draining, free) for i, (_, free, draining) in enumerate(shards)]
    partitions = [PartitionLoad(("m", i), f"s{i}", size) for i, (size, _, _) in enumerate(shards)]
    each = [short for s in loads if (short := missing_bytes(partitions, loads, s.name)) is not None]
    worst = worst_loss({p.shard: p.bytes for p in partitions}, loads)

    assert (worst is None) == (not each)
    assert worst is None or worst[0] - worst[1] == max(needed - free for needed, free in each)


def test_what_cannot_move_stays() -> None:
    """A partition that is not movable (not served, or already moving) stays, even on a draining shard."""
    partitions = [PartitionLoad(("m", i), "s0", MIB, movable=False) for i in range(4)]
    assert plan(partitions, [ShardLoad("s0", draining=True), ShardLoad("s1")], 4) == []


def test_load_is_leveled_by_an_exchange_when_bytes_are_level() -> None:
    """With equal bytes, two busy partitions on one shard are separated by an exchange, and no further move follows."""
    loads = [50.0 * MIB, 50.0 * MIB, 0.0, 0.0]
    partitions = [PartitionLoad(("m", i), f"s{i // 2}", MIB, loads[i]) for i in range(4)]
    shards = [ShardLoad("s0"), ShardLoad("s1")]
    assert plan(partitions, shards, 4) == []
    after, moves = settle(partitions, shards, by_load=True)
    assert moves == 2
    assert held(after, shards) == {"s0": 2 * MIB, "s1": 2 * MIB}
    assert {p.shard for p in after if p.load} == {"s0", "s1"}


@pytest.mark.parametrize("load", [0.0, 1000.0])
def test_idle_shards_are_left_alone(load: float) -> None:
    """No partition moves for load if the busiest shard is below LOAD_MIN."""
    partitions = [PartitionLoad(("m", i), "s0" if i < 2 else "s1", MIB, load if i < 2 else 0.0) for i in range(4)]
    assert plan(partitions, [ShardLoad("s0"), ShardLoad("s1")], 4, by_load=True) == []


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_plans_come_to_rest_with_nobody_above_the_average_and_one_partition(data: st.DataObject) -> None:
    """For any sizes and loads, plans end, with draining shards empty and none above the average plus one partition."""
    names = [f"s{i}" for i in range(data.draw(st.integers(1, 6)))]
    draining = data.draw(st.sets(st.sampled_from(names), max_size=len(names) - 1))
    shards = [ShardLoad(n, draining=n in draining) for n in names]
    sizes = data.draw(st.lists(st.integers(1, 64), max_size=60))
    partitions = [
        PartitionLoad(
            (f"m{i % 3}", i), data.draw(st.sampled_from(names)), size * MIB, data.draw(st.floats(0, 100.0)) * MIB
        )
        for i, size in enumerate(sizes)
    ]
    after, _ = settle(partitions, shards, data.draw(st.integers(1, 8)), by_load=data.draw(st.booleans()))
    assert sorted((p.key, p.bytes) for p in after) == sorted((p.key, p.bytes) for p in partitions)
    now = held(after, shards)
    assert all(now[n] == 0 for n in draining)
    share = sum(now.values()) / (len(names) - len(draining))
    assert max(now.values()) <= share + max((p.bytes for p in partitions), default=0)
