"""Keys of models that are gone: when the leader deletes them from Redis, and which ones."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from paramserver.core.scheduler import io
from paramserver.errors import problem
from paramserver.types import ModelKey
from paramserver_scheduler.jobs import Jobs

from .scheduling import SPEC, Driver


async def test_keys_of_a_model_that_is_gone_are_deleted_once_redis_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deleted model's keys are deleted in two passes, each retried while Redis is away."""
    monkeypatch.setattr("paramserver_scheduler.jobs.SETTLE_S", 0.0)
    passes: Iterator[list[bytes] | OSError] = iter([[b"{m.1/0}:state"], OSError("away"), []])
    d = Driver.with_model()
    d.ask(lambda n: io.DeleteModel(n, "m"))
    deleted: list[bytes] = []

    async def scan(match: str, count: int) -> AsyncIterator[bytes]:
        keys = next(passes)
        if isinstance(keys, OSError):
            raise keys
        for key in keys:
            yield key

    async def unlink(*keys: bytes) -> None:
        deleted.extend(keys)

    runtime: Any = SimpleNamespace(core=d.core, send=d.do, check_leads=AsyncMock())
    redis: Any = SimpleNamespace(scan_iter=scan, unlink=unlink)
    unused: Any = Mock()
    async with asyncio.TaskGroup() as group:
        jobs = Jobs(runtime, unused, unused, unused, redis, unused, group, "s")
        jobs.start(next(w for w in d.work if isinstance(w, io.ForgetOthers)))

    assert deleted == [b"{m.1/0}:state"]
    assert next(passes, None) is None


def test_a_redis_that_came_back_with_older_data_is_rid_of_what_was_deleted_since() -> None:
    """With the whole state written again, keys of all generations so far that no model has any more are deleted."""
    d = Driver.with_model()
    d.model(name="other")
    d.ask(lambda n: io.DeleteModel(n, "m"))
    d.work.clear()

    d.empty_redis()
    d.model()

    (forget,) = d.work
    assert isinstance(forget, io.ForgetOthers)
    there = [ModelKey("other", 2), ModelKey("m", 3), ModelKey("later", 4)]
    assert [m for m in (ModelKey("m", 1), ModelKey("other", 1), *there) if forget.concerns(m)] == [
        ModelKey("m", 1),
        ModelKey("other", 1),
    ]


def test_a_new_leader_deletes_what_is_left_of_models_that_are_gone() -> None:
    """A leader begins by deleting the keys of all generations so far that no model has, and none that come later."""
    d = Driver.with_model()
    d.model(name="other")
    d.ask(lambda n: io.DeleteModel(n, "m"))
    d.work.clear()
    d.send(lambda n: io.CreateModel(n, SPEC, "x"), 1)
    d.do(io.Tick())
    d.model(name="later")

    (forget,) = [w for w in d.work if isinstance(w, io.ForgetOthers)]
    gone = [ModelKey("m", 1), ModelKey("other", 1), ModelKey("never", 3)]
    there = [ModelKey(m["name"], m["generation"]) for m in d.core.read.models()]
    assert sorted(k.generation for k in there) == [2, 3, 4]
    assert [m for m in (*gone, *there) if forget.concerns(m)] == gone


@pytest.mark.parametrize("checks", [0, 1])
async def test_a_deposed_leader_deletes_no_keys(monkeypatch: pytest.MonkeyPatch, checks: int) -> None:
    """It asks before each pass: its successor, which deletes what it finds of gone models itself, may have new ones."""
    monkeypatch.setattr("paramserver_scheduler.jobs.SETTLE_S", 0.0)
    d = Driver.with_model()
    d.ask(lambda n: io.DeleteModel(n, "m"))
    scans = 0

    async def scan(**_: Any) -> AsyncIterator[bytes]:
        nonlocal scans
        scans += 1
        found: list[bytes] = []
        for key in found:
            yield key

    over = AsyncMock(side_effect=[None] * checks + [problem("no_leader", "another one leads")])
    runtime: Any = SimpleNamespace(core=d.core, send=d.do, check_leads=over)
    redis, unused = cast(Any, SimpleNamespace(scan_iter=scan)), cast(Any, Mock())
    async with asyncio.TaskGroup() as group:
        jobs = Jobs(runtime, unused, unused, unused, redis, unused, group, "s")
        jobs.start(next(w for w in d.work if isinstance(w, io.ForgetOthers)))
    assert scans == checks


async def test_of_many_deletions_the_last_one_looks_for_the_keys_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are looked through once for all that is deleted meanwhile, and no key of a model that is there goes."""
    monkeypatch.setattr("paramserver_scheduler.jobs.SETTLE_S", 0.0)
    d = Driver()
    names = [f"m-{i}" for i in range(20)]
    for name in (*names, "stays"):
        d.model(name=name)
    scans = 0
    deleted: list[bytes] = []

    async def scan(**_: Any) -> AsyncIterator[bytes]:
        nonlocal scans
        scans += 1
        for number in range(1, 22):
            yield b"{%s.%d/0}:token" % (b"stays" if number == 21 else b"m-%d" % (number - 1), number)

    async def unlink(*keys: bytes) -> None:
        deleted.extend(keys)

    runtime: Any = SimpleNamespace(core=d.core, send=d.do, check_leads=AsyncMock())
    redis, unused = cast(Any, SimpleNamespace(scan_iter=scan, unlink=unlink)), cast(Any, Mock())
    async with asyncio.TaskGroup() as group:
        jobs = Jobs(runtime, unused, unused, unused, redis, unused, group, "s")
        for name in names:
            d.ask(lambda n, name=name: io.DeleteModel(n, name))  # type: ignore[misc]
            jobs.start(d.work[-1])

    assert scans == 2
    assert deleted == [b"{m-%d.%d/0}:token" % (i, i + 1) for i in range(20)] * 2
