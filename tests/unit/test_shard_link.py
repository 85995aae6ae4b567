"""A shard's requests to the schedulers: what a fault of the network costs it, and what it logs of a refusal."""

import asyncio
import json
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.types import Receive, Scope, Send
from tests.chaos.proxy import Link
from tests.refusals import refused_with
from tests.servers import free_port

from paramserver.errors import problem
from paramserver.net.aio_connection import RESTED_S
from paramserver.net.credentials import Credentials
from paramserver_node.server import serve_tcp
from paramserver_shard import link as link_module
from paramserver_shard import membership as membership_module
from paramserver_shard.link import SchedulerLink
from paramserver_shard.membership import Membership


async def test_connections_that_are_all_lost_at_once_cost_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard whose network loses all connections without a word reaches the next scheduler after one timeout."""
    monkeypatch.setattr(link_module, "REQUEST_S", RESTED_S + 0.2)
    connections: set[Any] = set()
    lost: set[Any] = set()

    async def scheduler(scope: Scope, receive: Receive, send: Send) -> None:
        connections.add(scope["client"])
        if scope["client"] in lost:
            await asyncio.Event().wait()
        body = json.dumps({"at": scope["server"][1]}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    stop, ports = asyncio.Event(), (free_port(), free_port())
    link = SchedulerLink([f"http://127.0.0.1:{port}" for port in ports], Credentials())
    async with asyncio.timeout(20), asyncio.TaskGroup() as nodes:
        for port in ports:
            nodes.create_task(serve_tcp(scheduler, "127.0.0.1", port, stop, grace_s=0.0))
        await asyncio.sleep(0)
        for port in ports:  # it has had to do with both
            assert (await link.request("GET", "/"))["at"] == port
            link.switch_from(link.url)
        lost |= connections

        assert (await link.request("GET", "/"))["at"] == ports[1]
        await link.aclose()
        stop.set()


async def test_a_feed_whose_connection_breaks_ends() -> None:
    """It is not opened again unnoticed: whoever reads it would miss what was deleted in between, and keep that."""
    opened = 0

    async def scheduler(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal opened
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] != "/internal/feed":
            await send({"type": "http.response.body", "body": b"{}"})
            return
        opened += 1
        document = json.dumps({"type": "ping", "opened": opened}).encode() + b"\n"
        await send({"type": "http.response.body", "body": document, "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    stop, port = asyncio.Event(), free_port()
    way = Link("shard>scheduler", port)
    await way.start()
    link = SchedulerLink([f"http://127.0.0.1:{way.port}"], Credentials())
    async with asyncio.timeout(20), asyncio.TaskGroup() as nodes:
        nodes.create_task(serve_tcp(scheduler, "127.0.0.1", port, stop, grace_s=0.0))
        await asyncio.sleep(0)
        await link.request("GET", "/")  # a feed goes over a connection that is there already, if one is
        feed = link.feed("s", 1)
        assert (await anext(feed))["opened"] == 1
        way.reset()
        with refused_with("unavailable", match="broke"):
            await anext(feed)
        await link.aclose()
        await way.stop()
        stop.set()


async def test_a_shard_that_hears_of_no_scheduler_warns_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It also says when it follows one again.  It logged each of three attempts a second, below WARNING."""
    asked, leads, stop, port, passed_s = asyncio.Queue[None](), False, asyncio.Event(), free_port(), 1000.0

    async def scheduler(scope: Scope, receive: Receive, send: Send) -> None:
        asked.put_nowait(None)
        await send({"type": "http.response.start", "status": 200 if leads else 503, "headers": []})
        await send({"type": "http.response.body", "body": b'{"type": "ping"}\n' if leads else b"{}"})

    async def told(times: int = 3) -> list[str]:
        for _ in range(times):
            await asked.get()
        return [r.getMessage() for r in caplog.records if r.name == "paramserver.shard" and r.levelname == "WARNING"]

    monkeypatch.setattr(membership_module, "RETRY_S", 0.0)
    monkeypatch.setattr(membership_module, "monotonic", lambda: passed_s)
    link = SchedulerLink([f"http://127.0.0.1:{port}"], Credentials("t"))
    async with asyncio.TaskGroup() as group:
        group.create_task(serve_tcp(scheduler, "127.0.0.1", port, stop))
        others: list[Any] = [Mock() for _ in range(6)]
        membership = Membership("s", [], link, *others)
        membership._terms = Mock()
        following = asyncio.ensure_future(membership._follow())
        (first,) = await told()
        passed_s += 61.0
        assert len(await told()) == 2
        leads = True
        *_, last = await told()
        following.cancel()
        await asyncio.wait({following})
        await link.aclose()
        stop.set()

    assert f"127.0.0.1:{port}" in first
    assert (len(caplog.records), last) == (3, f"http://127.0.0.1:{port} is followed again")


@pytest.mark.parametrize(("answer", "level"), [("too_large", "ERROR"), ("forbidden", "ERROR"), ("no_leader", "DEBUG")])
async def test_a_heartbeat_that_will_always_be_refused_is_an_error_in_the_log(
    answer: str, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and not at each repetition: within its lease the shard is taken for dead, and nobody knows why."""
    caplog.set_level("DEBUG", "paramserver.shard")
    monkeypatch.setattr(membership_module, "RETRY_S", 0.0)
    again = asyncio.Event()

    async def request(*_: Any) -> Any:
        if link.asked == 3:
            again.set()
        link.asked += 1
        raise problem(answer, "as the test says")

    link = Mock(request=request, asked=0)
    core: Any = Mock(partitions=lambda: [1, 2], cuts=list, released=list, given_up=list)
    storage = Mock(redis_away=False)
    runtime: Any = Mock(core=core, lost={}, storage=storage, degraded="", loads=Mock(rates=list))
    others: list[Any] = [Mock() for _ in range(3)]
    shard = membership_module.Membership("s", [], link, Mock(), Mock(), runtime, *others)
    async with asyncio.timeout(20):
        beating = asyncio.ensure_future(shard._heartbeats())
        await again.wait()
        beating.cancel()
        await asyncio.wait({beating})

    assert {r.levelname for r in caplog.records} == {level}
    if level == "ERROR":
        (told,) = [r.getMessage() for r in caplog.records]
        assert "with 2 partitions: " in told
        assert "as the test says" in told
