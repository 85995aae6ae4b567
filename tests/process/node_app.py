"""A small node for tests of the servers and of forwarding: `node_app.py PORT [UPSTREAM,...]`.

With upstreams it forwards every request to the first that answers; without, it answers itself.  What is in flight when
it is told to stop has GRACE_S of its environment, by default 5 s.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse

from paramserver.net.credentials import Credentials
from paramserver_node import log, problems
from paramserver_node.forward import FORWARDED_BY_SHARD, Forwarder
from paramserver_node.middleware import NodeMiddleware
from paramserver_node.race import while_there
from paramserver_node.server import serve_tcp, stop_on_signals

PULL_BYTES = 5_000_000


def answering(app: FastAPI) -> None:
    """Add the routes of a node without upstreams."""
    listening = begun = waiting = 0

    @app.post("/push")
    async def push(request: Request) -> dict[str, Any]:
        size = 0
        async for piece in request.stream():
            size += len(piece)
        kept = ("content-length", "x-kept", "x-dropped", "x-request-id", FORWARDED_BY_SHARD)
        return {"size": size, "query": request.url.query} | {k: request.headers.get(k) for k in kept}

    @app.post("/ignore")
    async def ignore() -> dict[str, bool]:
        return {"ok": True}

    @app.get("/pull")
    async def pull() -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            for i in range(PULL_BYTES // 500_000):
                yield bytes([i]) * 500_000

        return StreamingResponse(pieces(), headers={"content-length": str(PULL_BYTES), "etag": '"v7"'})

    @app.get("/events")
    async def events() -> Response:
        async def forever() -> AsyncIterator[bytes]:
            nonlocal listening
            listening += 1
            try:
                while True:
                    yield b"data: tick\n\n"
                    await asyncio.sleep(0.05)
            finally:
                listening -= 1

        return StreamingResponse(forever(), media_type="text/event-stream")

    @app.get("/listening")
    async def count() -> int:
        return listening

    @app.get("/names/{name:path}")
    async def name_of(name: str) -> str:
        return name

    @app.get("/slow")
    async def slow(seconds: float) -> dict[str, bool]:
        nonlocal begun
        begun += 1
        await asyncio.sleep(seconds)
        return {"ok": True}

    @app.get("/begun")
    async def begun_ones() -> int:
        return begun

    @app.api_route("/wait", methods=["GET", "PUT"])
    @app.post("/pull")
    async def wait(request: Request) -> None:
        nonlocal waiting
        await request.body()
        waiting += 1
        try:
            await while_there(request.receive, asyncio.sleep(60))
        finally:
            waiting -= 1

    @app.get("/waiting")
    async def waiting_ones() -> int:
        return waiting

    @app.get("/die")
    async def die() -> Response:
        async def part() -> AsyncIterator[bytes]:
            yield b"begun"
            await asyncio.sleep(0.2)
            os._exit(1)

        return StreamingResponse(part(), headers={"content-length": "1000"})


def handing_on(app: FastAPI, forwarder: Forwarder, upstreams: list[str]) -> None:
    """Add one route that forwards every request to the upstreams."""

    @app.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "PUT"])
    async def everything(request: Request) -> Response:
        return await forwarder.forward(request, upstreams, code="no_leader", headers={FORWARDED_BY_SHARD: "1"})


async def main(port: int, upstreams: list[str]) -> None:
    """Serve until SIGTERM, then print a line."""
    log.setup("INFO")
    stop = asyncio.Event()
    stop_on_signals(stop)
    app = FastAPI(redirect_slashes=False)
    problems.install(app)
    forwarder = Forwarder(Credentials(), stop)
    if upstreams:
        handing_on(app, forwarder, upstreams)
    else:
        answering(app)
    await serve_tcp(NodeMiddleware(app), "127.0.0.1", port, stop, grace_s=float(os.environ.get("GRACE_S", "5")))
    await forwarder.aclose()
    print("stopped in order", flush=True)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2].split(",") if len(sys.argv) > 2 else []))
