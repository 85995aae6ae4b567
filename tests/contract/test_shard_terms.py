"""Which scheduler a shard follows when two claim to lead: the one with the highest term."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.servers import free_port
from uvicorn.config import Config
from uvicorn.server import ServerState

from paramserver_node.protocol_detector import ProtocolDetector
from paramserver_node.redis import FENCE_KEY, TERM_KEY

pytestmark = pytest.mark.process

WITHIN_S = 90.0


class Leader:
    """A fake scheduler on a real socket whose answers the test controls."""

    def __init__(self, term: int) -> None:
        self.term = term
        self.refusal = ""
        """The error code for heartbeats and feeds, or empty to accept them."""
        self.together = asyncio.Barrier(1)
        """Barrier that sends so many refusals at the same time."""
        self.joins = 0
        self.beats: list[int] = []
        """The epoch of each heartbeat received."""
        self.feeds = 0
        self.url = ""
        routes = [
            Route("/internal/shards", self._join, methods=["POST"]),
            Route("/internal/shards/{name}", self._beat, methods=["PUT", "DELETE"]),
            Route("/internal/feed", self._feed),
        ]
        self.app = Starlette(routes=routes)

    async def asked(self, times: int) -> None:
        """Wait for so many more heartbeats."""
        goal = len(self.beats) + times
        await until(lambda: len(self.beats) >= goal)

    async def _refused(self) -> Response:
        async with asyncio.timeout(WITHIN_S):
            await self.together.wait()
        status = {"fenced": 409, "unknown_node": 404}.get(self.refusal, 503)
        document = {"status": status, "code": self.refusal, "detail": "as the test says", "term": self.term}
        return JSONResponse(document, status)

    async def _join(self, _: Request) -> Response:
        if self.refusal == "no_leader":
            return await self._refused()
        self.joins += 1
        self.refusal = ""
        return JSONResponse({"epoch": self.joins, "lease_s": 5.0, "term": self.term}, 201)

    async def _beat(self, request: Request) -> Response:
        if request.method == "PUT":
            self.beats.append((await request.json())["epoch"])
        return await self._refused() if self.refusal else JSONResponse({"state": "active", "term": self.term})

    async def _feed(self, _: Request) -> Response:
        if self.refusal:
            return await self._refused()
        self.feeds += 1

        async def lines() -> AsyncIterator[bytes]:
            yield json.dumps({"type": "map", "term": self.term, "map_epoch": 1, "shards": {}}).encode() + b"\n"
            while not self.refusal:
                yield b'{"type":"ping"}\n'
                await asyncio.sleep(0.2)

        return StreamingResponse(lines())


async def until(what: Callable[[], Any]) -> None:
    """Wait until `what` returns a true value."""
    async with asyncio.timeout(WITHIN_S):
        while not what():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def member(redis_url: str, log: Path, *leaders: Leader) -> AsyncIterator[Redis]:
    """Run a shard that has joined the first leader and follows its feed; yield a client of its Redis."""
    loop, redis = asyncio.get_running_loop(), Redis.from_url(redis_url)
    await redis.set(TERM_KEY, leaders[0].term)
    await redis.delete(FENCE_KEY)
    servers = []
    for leader in leaders:
        config = Config(leader.app, log_config=None, ws="none")
        config.load()
        server = await loop.create_server(partial(ProtocolDetector, config, ServerState(), {}), "127.0.0.1", 0)
        leader.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        servers.append(server)
    port, urls = str(free_port()), ",".join(leader.url for leader in leaders)
    args = ("-P", "-m", "paramserver_shard", "--name", "s", "--port", port, "--scheduler", urls, "--redis", redis_url)
    with log.open("wb") as out:
        shard = await asyncio.create_subprocess_exec(sys.executable, *args, stdout=out, stderr=out)
    try:
        await until(lambda: leaders[0].feeds and leaders[0].beats)
        yield redis
    finally:
        shard.terminate()
        await shard.wait()
        for server in servers:
            server.close()
        await redis.aclose()


async def test_what_a_deposed_leader_refuses_is_not_heeded(redis_url: str, tmp_path: Path) -> None:
    """A shard ignores `fenced` and `unknown_node` from a leader with an older term and does not join again.

    If it refuses a heartbeat and a feed at once, the shard turns from it once: with two schedulers a second switch
    would lead back to it, again and again.
    """
    newest, deposed = Leader(3), Leader(2)
    async with member(redis_url, tmp_path / "log", newest, deposed):
        for refusal in ("fenced", "unknown_node"):
            deposed.refusal, newest.refusal = refusal, "no_leader"
            await deposed.asked(2)
            newest.refusal = ""
            await newest.asked(2)

        deposed.refusal, deposed.together, newest.refusal = "fenced", asyncio.Barrier(2), "no_leader"
        await deposed.asked(1)
        newest.refusal = ""
        await newest.asked(2)

    assert (newest.joins, deposed.joins) == (1, 0)
    assert set(newest.beats) == {1}


async def test_a_yes_of_a_deposed_leader_is_none(redis_url: str, tmp_path: Path) -> None:
    """Once Redis holds a newer term, heartbeats and the feed go to the leader of that term."""
    deposed, newest = Leader(2), Leader(3)
    async with member(redis_url, tmp_path / "log", deposed, newest) as redis:
        await redis.set(TERM_KEY, 3)
        await until(lambda: newest.feeds and len(newest.beats) > 2)
        before = len(deposed.beats)
        await newest.asked(2)

    assert (len(deposed.beats), newest.joins) == (before, 0)


async def test_a_cluster_that_begins_anew_takes_the_shard_in(redis_url: str, tmp_path: Path) -> None:
    """A leader with a lower term is accepted if Redis holds no higher term either."""
    leader = Leader(7)
    async with member(redis_url, tmp_path / "log", leader) as redis:
        await redis.set(TERM_KEY, 1)
        leader.term, leader.refusal = 1, "unknown_node"
        await until(lambda: leader.joins == 2 and leader.beats[-1] == 2)


async def test_a_fence_of_the_newest_leader_is_heeded(redis_url: str, tmp_path: Path) -> None:
    """A shard that is fenced by the leader of the newest term joins again."""
    leader = Leader(4)
    async with member(redis_url, tmp_path / "log", leader):
        leader.refusal = "fenced"
        await until(lambda: leader.joins == 2 and leader.beats[-1] == 2)


async def test_a_fence_in_redis_is_heeded_whatever_the_leader_answers(redis_url: str, tmp_path: Path) -> None:
    """A shard whose epoch is fenced in Redis joins again, though the leader that it reaches accepts its heartbeats."""
    leader = Leader(5)
    async with member(redis_url, tmp_path / "log", leader) as redis:
        await redis.hset(FENCE_KEY, "s", 1)
        await until(lambda: leader.joins == 2 and leader.beats[-1] == 2)
