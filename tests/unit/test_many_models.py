"""What an event costs the scheduler of a large cluster, during which it answers nobody; calls are counted."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from fastapi import Request

from paramserver.core.scheduler import balance, io, move_desk
from paramserver.core.scheduler.gate import Gate
from paramserver.core.scheduler.models import Model
from paramserver.core.scheduler.owner import Owner
from paramserver.core.spec import ModelSpec
from paramserver_scheduler import overview, pause
from paramserver_scheduler.history import History
from paramserver_scheduler.redis_file import RedisFile
from paramserver_scheduler.redis_memory import RedisMemory
from paramserver_scheduler.routes import status
from paramserver_scheduler.service import Service

from .scheduling import SPEC, Driver


def test_the_death_of_a_shard_costs_by_the_partitions_of_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard's death looks at each partition a few times, however many models there are."""
    d = Driver()
    for shard in ("s0", "s1", "s2"):
        d.shard(shard)
    names = [f"m{i}" for i in range(40)]
    for spec in [SPEC | {"name": name} for name in names]:
        d.send(partial(io.CreateModel, spec=spec, nonce="secret"))
    d.beats()
    looks = Counter[tuple[str, int]]()
    bytes_of = Model.bytes_of

    def counted(model: Model, index: int) -> int:
        looks[model.name, index] += 1
        return bytes_of(model, index)

    monkeypatch.setattr(Model, "bytes_of", counted)
    d.ask(lambda n: io.LeaveShard(n, "s2", d.shards.pop("s2")))
    assert {owner for name in names for owner in d.owners(name)} == {"s0", "s1"}
    assert max(looks.values()) < 8


def test_small_models_spread_although_a_large_one_is_on_one_shard() -> None:
    """A partition counts by its requests, too: all small models would go to the shard that lacks a larger one."""
    d = Driver()
    for shard in ("s0", "s1"):
        d.shard(shard)
    for i, size in enumerate([100_000] + [10] * 40):
        spec = {"name": f"m{i}", "params": {"w": {"shape": [size]}}, "partitions": 1}
        d.send(partial(io.CreateModel, spec=spec, nonce="secret"))
    owners = Counter(owner for i in range(1, 41) for owner in d.owners(f"m{i}"))
    assert min(owners["s0"], owners["s1"]) >= 15


def test_moves_are_not_planned_with_each_event_while_a_model_cannot_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model that is not served keeps its partitions from moving, ticks plan for them, other events do not."""
    d = Driver.with_model()
    worker = d.join("a")
    d.send(lambda n: io.CreateModel(n, SPEC | {"name": "slow"}, "secret"))
    plans = 0

    def counted(*_args: Any, **_options: Any) -> list[balance.Move]:
        nonlocal plans
        plans += 1
        return []

    monkeypatch.setattr(move_desk, "plan", counted)
    for _ in range(20):
        d.ask(lambda n: io.WorkerHeartbeat(n, "m", "m/a", worker["epoch"], 0))
    assert plans == 0
    d.do(io.Tick())
    assert plans == 1


def test_a_heartbeat_without_news_looks_for_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a heartbeat that repeats a clock costs does not include a look at all other workers for a commit."""
    d = Driver.with_model(consistency={"mode": "sync", "min_workers": 2})
    worker, _ = d.join("a"), d.join("b")
    decide = Mock(wraps=Gate.decide, return_value=None)
    monkeypatch.setattr(Gate, "decide", decide)

    def beat(clock: int) -> None:
        d.ask(lambda n: io.WorkerHeartbeat(n, "m", "m/a", worker["epoch"], clock))

    beat(0)
    assert not decide.called
    beat(1)
    assert decide.call_count == 1
    beat(1)
    assert decide.call_count == 1


def of_models(count: int) -> tuple[Driver, Service]:
    """Return a scheduler's driver with that many models on one shard, and what its routes use of it."""
    d = Driver("s0")
    for spec in [SPEC | {"name": f"m{i:02}"} for i in range(count)]:
        d.send(partial(io.CreateModel, spec=spec, nonce="secret"))
    d.beats()
    lease, runtime = SimpleNamespace(schedulers=[]), SimpleNamespace(redis_away="")
    used = {"read": d.core.read, "history": History(0.0), "lease": lease, "runtime": runtime}
    used["redis_memory"], used["redis_file"] = RedisMemory(), RedisFile()
    return d, cast(Service, SimpleNamespace(now=d.now, url="", started_s=0.0, **used))


async def test_a_status_of_many_models_lets_requests_be_answered_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two models a status lets others run, and a model that they delete is left out of it."""
    monkeypatch.setattr(pause, "SLICE_S", 0.0)
    d, service = of_models(20)

    async def delete() -> None:
        d.ask(lambda n: io.DeleteModel(n, "m19"))

    deleting = asyncio.ensure_future(delete())
    found = await overview.describe(service)
    assert deleting.done()
    assert [m.name for m in found.models] == [f"m{i:02}" for i in range(19)]


async def test_series_of_many_models_let_requests_be_answered_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the series of two models an answer lets others run, and has those of both."""
    monkeypatch.setattr(pause, "SLICE_S", 0.0)
    d, service = of_models(2)
    for model in ("m00", "m01"):
        service.history.rings.add("model.version", (("model", model),), d.now, 3.0)
    app = SimpleNamespace(state=SimpleNamespace(service=service))
    asked = {"type": "http", "app": app, "query_string": b"metric=model.version", "headers": []}

    other = asyncio.ensure_future(asyncio.sleep(0))
    answer = await status.series(Request(asked))

    assert other.done()
    assert [item["labels"] for item in json.loads(bytes(answer.body))["items"]] == [{"model": "m00"}, {"model": "m01"}]


async def test_a_status_writes_no_models_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The status of each second writes out none of the models' specs, which may have thousands of parameters."""
    _, service = of_models(2)
    monkeypatch.setattr(ModelSpec, "document", Mock(side_effect=AssertionError))
    found = await overview.describe(service)
    assert [(m.parameters, m.lr) for m in found.models] == [(1, 1e-3)] * 2


def test_the_list_of_shards_goes_through_the_partitions_once() -> None:
    """What `GET /shards` costs does not grow with shards times partitions."""
    d, _ = of_models(10)
    for i in range(1, 20):
        d.shard(f"s{i}")
    passes = Counter[str]()

    class Watched(list[Owner]):
        def __iter__(self) -> Iterator[Owner]:
            passes["owners"] += 1
            return super().__iter__()

    for model in d.core._c.models.values():
        model.owners = Watched(model.owners)
    shown = d.core.read.shards(d.now)
    assert (len(shown), sum(s["partitions"] for s in shown)) == (20, 40)
    assert passes["owners"] == 10
