"""The cost of a call depends on the partitions it touches, not on those of the model; accesses are counted."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from msgspec.structs import replace
from tests.refusals import refused_with

from paramserver.client import transfer
from paramserver.client.cluster import Cluster
from paramserver.client.encoding import Encoding
from paramserver.core.layout import Layout
from paramserver.core.shard.effects import LoadPartition, StoreSnapshot
from paramserver.core.shard.events import AssignPart, SaveAll, SetReceived
from paramserver.core.shard.partition import Partition
from paramserver.core.shard.served_model import ServedModel
from paramserver.core.spec import ModelSpec
from paramserver.limits import PARTITIONS_MAX, SHARED_LEASE_S, SNAPSHOT_INTERVAL_S
from paramserver.net.calls import Deadline
from paramserver.testing.shard_driver import ShardDriver
from paramserver.types import ModelKey, PartitionKey, PushId, Token
from paramserver_shard.buffers import SMALL_BYTES, BufferPool
from paramserver_shard.lending import Lending
from paramserver_shard.loading import LOADS_AT_ONCE, REPLAYS_AT_ONCE, Loader
from paramserver_shard.shared_folder import SharedFolder

from .sharding import Now, Shards, drive, terms

WIDTH = 4
STEPS_MAX = 64
"""More than a few binary searches through all partitions take, and far less than an iteration over them."""
EDGES = pytest.mark.parametrize("index", [0, PARTITIONS_MAX // 2, PARTITIONS_MAX - 1])


class Looks:
    """Counts the elements read from the sequences and mappings that it wraps."""

    def __init__(self) -> None:
        self.count = 0

    def sequence(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        looks = self

        class Watched(tuple[Any, ...]):
            def __getitem__(self, index: Any) -> Any:
                looks.count += 1
                return super().__getitem__(index)

            def __iter__(self) -> Iterator[Any]:
                for value in super().__iter__():
                    looks.count += 1
                    yield value

        return Watched(values)

    def mapping(self, values: dict[Any, Any]) -> dict[Any, Any]:
        looks = self

        class Watched(dict[Any, Any]):
            def __getitem__(self, key: Any) -> Any:
                looks.count += 1
                return super().__getitem__(key)

            def get(self, key: Any, default: Any = None) -> Any:
                looks.count += 1
                return super().get(key, default)

            def __iter__(self) -> Iterator[Any]:
                looks.count += len(self)
                return super().__iter__()

            def values(self) -> Any:
                looks.count += len(self)
                return super().values()

            def items(self) -> Any:
                looks.count += len(self)
                return super().items()

        return Watched(values)


class Wide(Shards):
    """Shards that hold one parameter in the largest number of partitions."""

    def __init__(self) -> None:
        super().__init__()
        params = {"w": {"shape": [PARTITIONS_MAX * WIDTH]}}
        self.spec = ModelSpec.parse({"name": "m", "params": params, "partitions": PARTITIONS_MAX})
        self.layout = type(self.layout)(self.spec)
        self.flat = np.arange(self.layout.size, dtype=np.float32)
        self.versions = [0] * PARTITIONS_MAX
        self.owners = ["a" if i % 2 == 0 else "b" for i in range(PARTITIONS_MAX)]


@EDGES
def test_a_client_looks_at_the_partitions_of_a_call_alone(index: int) -> None:
    """A client's push and pull of one partition do not iterate over the others, whether it is the first or the last."""
    shards, now, cluster, looks = Wide(), Now(), Cluster(("http://given:1",)), Looks()
    ranges = {"w": [(index * WIDTH, (index + 1) * WIDTH)]}

    def call(seq: int) -> None:
        grads = {"w": np.ones(WIDTH, np.float32)}
        only = Encoding(ranges=ranges)
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads, terms(seq), encoding=only), shards, now)
        drive(transfer.pull(cluster, "m", Deadline.after(30, now), ranges=ranges), shards, now)

    call(1)  # fetches the map and fills the caches derived from it
    model_map = cluster._maps["m"]
    object.__setattr__(model_map, "owners", looks.sequence(model_map.owners))
    model_map.layout.__dict__["bounds"] = looks.sequence(model_map.layout.bounds)
    call(2)

    assert shards.versions[index] == 2
    assert 0 < looks.count < STEPS_MAX


@EDGES
def test_a_shard_looks_at_the_partitions_of_a_request_alone(index: int) -> None:
    """A shard handles a push, its duplicate and a pull of one partition without iterating over thousands of others."""
    driver, looks = ShardDriver(checked=False), Looks()
    driver.serve(wide())
    (model,) = driver.core.models.values()
    model.partitions = looks.mapping(model.partitions)
    model.layout.__dict__["bounds"] = looks.sequence(model.layout.bounds)

    for _ in range(2):
        driver.push({index: np.ones(WIDTH, np.float32)}, PushId("w", 1, 0))
    driver.pull(index)

    assert driver.values(index) == [1.0] * WIDTH
    assert 0 < looks.count < STEPS_MAX


def test_pushes_that_wait_for_partitions_are_not_tried_again_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """While partitions of a model arrive one by one, waiting pushes cost time linear in their number."""
    partitions, pushes = 128, 4
    looks = Mock(side_effect=ServedModel.owned)
    monkeypatch.setattr(ServedModel, "owned", lambda *args: looks(*args))
    driver = ShardDriver(eager=False, checked=False)
    driver.serve(wide(partitions))
    grads = {i: np.ones(WIDTH, np.float32) for i in range(partitions)}
    waiting = [driver.submit(grads, PushId(f"w{i}", 1, 0)) for i in range(pushes)]

    driver.settle()

    assert all(request in driver.replies for request in waiting)
    assert driver.values(0) == [float(pushes)] * WIDTH
    assert 0 < looks.call_count <= 4 * pushes * partitions


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="buffers are files on Linux")
def test_a_lease_that_runs_out_costs_by_its_partitions() -> None:
    """Once a lease has expired and its values are gone, their files are, without iterating over all others for each."""
    partitions, looks, now = 64, Looks(), Now()
    with TemporaryDirectory() as root:
        folder = SharedFolder.open(root, "s", 1 << 26)
        assert folder is not None
        pool = BufferPool(folder=folder)
        lending = Lending(pool, BufferPool(folder=folder), folder.board, now)
        values = [pool.take_bytes(SMALL_BYTES, shared=True).view(np.float32) for _ in range(partitions)]
        assert lending.lease(values) is not None
        pool._lent = looks.mapping(pool._lent)

        now.s += SHARED_LEASE_S
        lending.expire()
        values.clear()

        assert folder.bytes == 0
        assert 0 < looks.count <= 4 * partitions
        folder.close()


def test_cuts_that_wait_are_not_looked_at_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a commit with a cut, queueing and dropping the cuts of all partitions takes a linear number of comparisons."""
    partitions = 128
    driver = ShardDriver(eager=False, checked=False)
    view = driver.serve(wide(partitions, consistency={"mode": "sync"}))
    driver.settle()
    driver.eager = True
    driver.advance(1.0)
    driver.eager = False
    compared = Mock(side_effect=PartitionKey.__eq__)
    monkeypatch.setattr(PartitionKey, "__eq__", lambda *keys: compared(*keys))

    driver.commit(0, cut=True)
    driver.commit(1, cut=True)
    (store,) = driver.pending
    assert isinstance(store, StoreSnapshot)
    assert store.cut
    driver.send(replace(view, owned={}, clock=2))

    assert compared.call_count <= 4 * partitions


def test_what_is_to_be_stored_now_is_not_gone_through_with_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopping shard stores its partitions one by one, without going through those still waiting each time."""
    partitions = 128
    driver = ShardDriver(checked=False)
    driver.serve(wide(partitions))
    driver.push({i: np.ones(WIDTH, np.float32) for i in range(partitions)})
    driver.eager = False
    looks = Mock(side_effect=cast(property, Partition.by_cuts).fget)
    monkeypatch.setattr(Partition, "by_cuts", property(lambda p: looks(p)))

    driver.send(SaveAll())
    driver.settle()

    assert len(driver.store.kept) == partitions
    assert 0 < looks.call_count <= 8 * partitions


def test_first_values_that_can_be_drawn_again_are_not_stored() -> None:
    """Initial values that can be drawn again are not stored; only a partition that has changed is.

    Thousands of snapshots of a new model would otherwise slow down its first minute.
    """
    driver = ShardDriver(checked=False)
    driver.eager = False
    driver.serve(wide())
    driver.settle()
    driver.advance(SNAPSHOT_INTERVAL_S + 1.0)
    assert driver.pending == []

    driver.submit({7: np.ones(WIDTH, np.float32)})
    driver.settle()
    driver.advance(SNAPSHOT_INTERVAL_S + 0.1)
    (store,) = driver.pending
    assert isinstance(store, StoreSnapshot)
    assert store.capture.key.index == 7


def test_first_values_that_were_set_are_stored_at_once() -> None:
    """An initial value that was uploaded is stored as soon as the model is ready; partitions still as drawn are not."""
    driver = ShardDriver(checked=False)
    view = driver.serve(wide(8), ready=False)
    part = AssignPart(3, np.full(WIDTH, 5.0, np.float32), "float32", finite=True)
    driver.send(SetReceived("m", (part,), request=90))
    driver.eager = False

    driver.send(replace(view, ready=True))

    (store,) = driver.pending
    assert isinstance(store, StoreSnapshot)
    assert store.capture.key.index == 3


def wide(count: int = PARTITIONS_MAX, **fields: Any) -> ModelSpec:
    params = {"w": {"shape": [count * WIDTH]}}
    settings = {"name": "m", "params": params, "optimizer": {"name": "sum"}, "partitions": count}
    return ModelSpec.parse(settings | fields)


async def test_first_values_are_not_made_on_the_event_loop() -> None:
    """Initial values of more than a few pages are made in a thread: those of a model are needed all at once."""
    spec = ModelSpec.parse({"name": "m", "params": {"w": {"shape": [20_000]}}, "partitions": 2})
    layout = Layout(spec)
    threads: list[int] = []

    async def submit(work: Callable[[], Any]) -> Any:
        threads.append(1)
        return await asyncio.to_thread(work)

    loader = Loader(Mock(), Mock(), BufferPool(), submit, lambda *_: True)
    key = PartitionKey(ModelKey("m", 1), 0)
    loaded = await loader.load(LoadPartition(key, Token(1), "init", spec, layout))
    assert loaded.state.values.size == layout.partition_size(0)
    assert threads == [1]


async def test_partitions_that_are_recovered_together_take_turns_at_redis() -> None:
    """Of thousands of partitions that a shard is given at once, a few ask Redis, and fewer read their journals."""
    spec = wide(ack="journaled")
    layout = Layout(spec)
    running, most = {"loads": 0, "replays": 0}, {"loads": 0, "replays": 0}

    async def asked(what: str, answer: Any) -> Any:
        running[what] += 1
        most[what] = max(most[what], running[what])
        await asyncio.sleep(0)
        running[what] -= 1
        return answer

    store: Any = Mock(has_token=lambda *_: asked("loads", True), manifest=lambda *_: asked("loads", []))
    journal: Any = Mock(read=lambda *_: asked("replays", []))
    loader = Loader(store, journal, BufferPool(), Mock(), lambda *_: True)
    key = ModelKey("m", 1)
    effects = [LoadPartition(PartitionKey(key, i), Token(1), "snapshot", spec, layout) for i in range(PARTITIONS_MAX)]
    loaded = await asyncio.gather(*map(loader.load, effects))

    assert [found.version for found in loaded] == [0] * PARTITIONS_MAX
    assert most == {"loads": LOADS_AT_ONCE, "replays": REPLAYS_AT_ONCE}


async def test_a_partition_that_was_taken_away_while_its_load_waited_is_not_read() -> None:
    """A load waits for its turn; if its ownership has ended by then, it reads nothing ahead of those that count."""
    spec = wide(ack="journaled")
    store: Any = Mock(has_token=AsyncMock(return_value=True), manifest=AsyncMock(return_value=[]))
    journal: Any = Mock(read=AsyncMock(return_value=[]))
    owned = [False]
    loader = Loader(store, journal, BufferPool(), Mock(), lambda *_: owned.pop())
    effect = LoadPartition(PartitionKey(ModelKey("m", 1), 0), Token(1), "snapshot", spec, Layout(spec))

    with refused_with("fenced"):
        await loader.load(effect)
    assert not store.manifest.called

    owned[:] = [False, True]
    with refused_with("fenced"):
        await loader.load(effect)
    assert store.manifest.called
    assert not journal.read.called
