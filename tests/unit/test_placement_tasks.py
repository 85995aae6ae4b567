"""Placement of partitions on shards, and datasets whose ranges are leased to workers."""

from collections import Counter
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from paramserver.core.scheduler.placement import assign
from paramserver.core.scheduler.tasks import Dataset, DatasetSpec, RangeSet, parse_task
from paramserver.errors import NotFoundError, RequestError


@given(st.lists(st.integers(1, 1 << 26), min_size=1, max_size=200), st.integers(1, 12))
def test_placement_is_balanced_within_one_partition(sizes: list[int], shards: int) -> None:
    """The loads of the most and the least loaded shard differ by no more than the largest partition."""
    names = [f"s{i}" for i in range(shards)]
    placed = assign(dict(enumerate(sizes)), names, {}, {})
    load = Counter({n: 0 for n in names})
    for index, shard in placed.items():
        load[shard] += sizes[index]
    assert set(placed) == set(range(len(sizes)))
    assert max(load.values()) - min(load.values()) <= max(sizes)


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=60), st.integers(2, 6), st.data())
def test_orphans_go_where_least_is(sizes: list[int], shards: int, data: st.DataObject) -> None:
    """Assigning a dead shard's partitions leaves the survivors' loads within the largest partition of each other."""
    names = [f"s{i}" for i in range(shards)]
    placed = assign(dict(enumerate(sizes)), names, {}, {})
    dead = data.draw(st.sampled_from(names))
    orphans = {i: sizes[i] for i, s in placed.items() if s == dead}
    held = Counter({n: 0 for n in names if n != dead})
    for i, s in placed.items():
        if s != dead:
            held[s] += sizes[i]
    for i, s in assign(orphans, sorted(held), held, held).items():
        held[s] += sizes[i]
    assert max(held.values()) - min(held.values()) <= max(sizes)


def test_many_small_models_spread() -> None:
    """Ties are broken by a shard's bytes of all models, so models of one partition spread over the shards."""
    total = {"a": 0, "b": 0, "c": 0}
    for _ in range(9):
        (shard,) = assign({0: 10}, total, {}, total).values()
        total[shard] += 10
    assert set(total.values()) == {30}
    assert assign({0: 1}, [], {}, {}) == {}


@given(st.lists(st.integers(0, 60)))
def test_range_sets_hold_what_was_put_in(numbers: list[int]) -> None:
    """A RangeSet contains the same numbers as a plain set, in sorted runs that never touch."""
    runs = RangeSet()
    for n in numbers:
        runs.add(n)
    assert [n for n in range(61) if n in runs] == sorted(set(numbers))
    assert len(runs) == len(set(numbers))
    assert list(runs.missing(0, 61)) == sorted(set(range(61)) - set(numbers))
    assert list(runs.missing(30, 61)) == sorted(set(range(30, 61)) - set(numbers))
    assert all(a[1] < b[0] for a, b in zip(runs.runs, runs.runs[1:], strict=False))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 3),
    st.sampled_from(["dynamic", "static"]),
    st.integers(1, 4),
    st.integers(0, 1 << 32),
)
def test_every_range_of_every_pass_is_done(tasks: int, passes: int, assignment: str, workers: int, seed: int) -> None:
    """Every range of every pass is done at least once, although workers die with leases and the scheduler restarts."""
    data = Dataset(DatasetSpec.check("d", tasks, 1, None, None, assignment, passes))
    random = Random(seed)
    done: Counter[tuple[int, int]] = Counter()
    held: dict[int, list[tuple[int, int]]] = {w: [] for w in range(workers)}
    epoch = 1
    for step in range(10_000):
        if data.finished:
            break
        worker = random.randrange(workers)
        action = random.random()
        if action < 0.1 and step < 200:
            data.release(str(worker), epoch)
            held[worker].clear()
        elif action < 0.15:
            data = Dataset.of(data.spec.document(), data.progress())
        elif held[worker] and action < 0.6:
            task = held[worker].pop()
            data.finish(*task)
            done[task] += 1
        else:
            lease = data.lease(str(worker), epoch, worker, workers)
            if lease is not None:
                name, numbers = parse_task(lease["id"])
                assert name == "d"
                assert (lease["pass"], lease["index"]) == (numbers[0], numbers[1])
                held[worker].append((numbers[0], numbers[1]))
                assert sum(held[w].count((numbers[0], numbers[1])) for w in held) == 1, "leased twice at a time"
    assert data.finished
    assert set(done) == {(p, i) for p in range(passes) for i in range(tasks)}
    assert data.lease("0", epoch, 0, workers) is None


def test_static_ranges_belong_to_positions() -> None:
    """Static assignment gives range i to the (i mod workers)-th worker; with fewer workers, those left get the rest."""
    data = Dataset(DatasetSpec.check("d", None, None, [[i, i + 1] for i in range(6)], "file:///x", "static", 1))
    assert [data.lease("b", 1, 1, 2)["index"] for _ in range(3)] == [1, 3, 5]  # type: ignore[index]
    assert data.lease("b", 1, 1, 2) is None
    assert [data.lease("b", 1, 0, 1)["index"] for _ in range(3)] == [0, 2, 4]  # type: ignore[index]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.sampled_from(["dynamic", "static"]), st.integers(0, 1 << 32))
def test_the_range_that_is_leased_is_the_first_free_one(tasks: int, assignment: str, seed: int) -> None:
    """However many workers there are when it asks, a worker gets the first range that is free for it, if any is."""
    data = Dataset(DatasetSpec.check("d", tasks, 1, None, None, assignment, 1))
    random = Random(seed)
    for _ in range(60):
        workers = random.randint(1, 3)
        position, action = random.randrange(workers), random.random()
        if action < 0.2:
            data.release(str(position), 1)
        elif action < 0.4 and data.leases:
            data.finish(*random.choice(list(data.leases)))
        elif not data.finished:
            own = range(position, tasks, workers) if assignment == "static" else range(tasks)
            free = [i for i in own if i not in data.done[0] and (0, i) not in data.leases]
            task = data.lease(str(position), 1, position, workers)
            assert (task and task["index"]) == (free[0] if free else None)


@pytest.mark.parametrize("assignment", ["dynamic", "static"])
def test_ranges_that_are_not_free_are_looked_at_once(assignment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits asks again at each event: what is leased or done is not gone through again."""
    looked: list[int] = []

    class Looked(dict[tuple[int, int], tuple[str, int]]):
        def __contains__(self, key: object) -> bool:
            looked.append(1)
            return super().__contains__(key)

    data = Dataset(DatasetSpec.check("d", 1000, 1, None, None, assignment, 1), leases=Looked())
    own = range(1, 1000, 10) if assignment == "static" else range(1000)
    assert [data.lease("b", 1, 1, 10)["index"] for _ in own] == [*own]  # type: ignore[index]
    assert len(looked) < 3 * len(own)
    assert data.lease("b", 1, 1, 10) is None
    looked.clear()
    assert data.lease("b", 1, 1, 10) is None
    assert not looked


def test_passes_without_end_overlap_by_one() -> None:
    """Without a limit of passes, the second begins during the first, and the third once the first is done."""
    data = Dataset(DatasetSpec.check("d", 2, 1, None, None, "dynamic", None))
    assert [data.lease("a", 1, 0, 1)["pass"] for _ in range(4)] == [0, 0, 1, 1]  # type: ignore[index]
    assert data.lease("a", 1, 0, 1) is None
    data.finish(0, 0)
    data.finish(0, 1)
    data.finish(0, 1)
    assert data.lease("a", 1, 0, 1)["pass"] == 2  # type: ignore[index]
    assert not data.finished


def test_the_last_pass_overlaps_with_the_one_before_and_none_follows_it() -> None:
    """A bounded pass begins while another worker is still at the one before; nothing is leased or open once all are."""
    data = Dataset(DatasetSpec.check("d", 2, 1, None, None, "dynamic", 2))
    assert [data.lease("a", 1, 0, 1)["pass"] for _ in range(4)] == [0, 0, 1, 1]  # type: ignore[index]
    for number in range(2):
        for index in range(2):
            data.finish(number, index)

    assert data.finished
    assert data.lease("a", 1, 0, 1) is None
    shown = data.document()
    assert (shown["passes_done"], shown["done"], shown["leased"]) == (2, 4, 0)


def test_wrong_datasets_and_tasks_are_refused() -> None:
    """A wrong field of a dataset is refused by name; a malformed task id or one without a range is not found."""
    for wrong, *fields in (
        ("dataset", "evaluate", 10, 1, None, None, "dynamic", 1),
        ("size", "d", 0, 1, None, None, "dynamic", 1),
        ("task_size", "d", 10, 0, None, None, "dynamic", 1),
        ("task_size", "d", 10**9, 1, None, None, "dynamic", 1),
        ("ranges", "d", None, None, [[3, 3]], None, "dynamic", 1),
        ("ranges", "d", 10, 1, [[0, 1]], None, "dynamic", 1),
        ("uri", "d", 10, 1, None, "a\nb", "dynamic", 1),
        ("assignment", "d", 10, 1, None, None, "random", 1),
        ("passes", "d", 10, 1, None, None, "static", 0),
    ):
        with pytest.raises(RequestError) as refused:
            DatasetSpec.check(*fields)
        assert refused.value.members["where"] == wrong
    for task in ("", "d", "d:", "d:x:1", "d:1:2:3", "d:-1:0", "d:²:1"):
        with pytest.raises(NotFoundError):
            parse_task(task)
    data = Dataset(DatasetSpec.check("d", 10, 1, None, None, "dynamic", 1))
    for number, index in ((1, 0), (0, 10)):
        with pytest.raises(NotFoundError):
            data.finish(number, index)
