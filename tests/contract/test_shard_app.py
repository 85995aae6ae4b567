"""The shard's app without a cluster: its routes, and its answers before it has joined."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import REGISTRY
from starlette.types import ASGIApp, Receive, Scope, Send

from paramserver_node import roles
from paramserver_node.forward import FORWARDED_BY_SHARD
from paramserver_node.settings import ShardSettings
from paramserver_shard.app import make_app, served
from paramserver_shard.buffers import SMALL_BYTES
from paramserver_shard.main import Shard, assemble


@pytest.fixture
async def shard() -> AsyncIterator[Shard]:
    """A real shard whose scheduler and Redis are not running."""
    settings = ShardSettings(redis="redis://127.0.0.1:9/0", scheduler="http://127.0.0.1:9", memory_limit="64MiB")
    async with asyncio.TaskGroup() as group:
        shard = assemble(settings, group, None, asyncio.Event())
        yield shard
        shard.services.runtime.close()
        await shard.aclose()


@pytest.fixture
def app(shard: Shard) -> ASGIApp:
    """What it serves."""
    return served(make_app(shard.services), shard.services)


async def test_gradients_that_wait_take_half_of_its_memory_at_most(shard: Shard) -> None:
    """What is staged or buffered is bounded by the memory limit, as the system would kill a shard that holds more."""
    core = shard.services.runtime.core
    assert core.held_bytes_max == 32 << 20

    core.held_bytes = 5 << 20
    names = ("held_gradient_bytes", "held_gradient_limit_bytes", "shard_memory_limit_bytes")
    assert [REGISTRY.get_sample_value(f"paramserver_{name}") for name in names] == [5 << 20, 32 << 20, 64 << 20]


async def test_every_route_carries_a_role(shard: Shard) -> None:
    """Every route has a role, including the plain ASGI endpoints."""
    marks = {getattr(route, "path", ""): roles.role_of(route) for route in roles.routes(make_app(shard.services))}
    assert {"/push", "/pull", "/pushpull", "/livez", "/internal/set/{model}", "/{path:path}"} <= set(marks)
    assert None not in marks.values(), marks
    assert (marks["/push"], marks["/pull"]) == ("worker", "reader")


async def test_before_it_has_joined_a_shard_serves_nothing(app: ASGIApp) -> None:
    """Before it has joined, a shard answers 503 to values, to be asked again soon, is live, and says why not ready."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shard") as client:
        for answer in (await client.post("/pull", json={"model": "m"}), await client.get("/pull/m/w")):
            assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
            assert (answer.headers["retry-after"], answer.json()["retry_after_s"]) == ("1", 0.2)
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["reason"]) == (503, "not a member of the cluster yet")
        assert (await client.get("/livez")).status_code == 200
        forwarded = await client.get("/models")
        assert (forwarded.status_code, forwarded.json()["code"]) == (503, "no_leader")


async def test_what_another_shard_forwards_is_not_forwarded_again(app: ASGIApp) -> None:
    """A shard that another shard takes for a scheduler answers with 404 and the path, whatever the query is."""

    async def with_query(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "query_string": b"\xff"}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(with_query), base_url="http://shard") as client:
        answer = await client.get("/a%20b", headers={FORWARDED_BY_SHARD: "1"})
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert answer.json()["detail"] == "a shard does not serve /a b"


async def test_a_shard_that_is_no_member_tells_what_it_holds(shard: Shard, app: ASGIApp) -> None:
    """Gauges show the moment at which they are read; they showed that of the last heartbeat, however long ago."""
    held = shard.services.runtime.pool.take_bytes(SMALL_BYTES)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shard") as client:
        before = (await client.get("/metrics")).text.splitlines()
        size = float(held.nbytes)
        del held
        after = (await client.get("/metrics")).text.splitlines()
    assert f"paramserver_buffer_lent_bytes {size}" in before
    assert "paramserver_buffer_lent_bytes 0.0" in after
