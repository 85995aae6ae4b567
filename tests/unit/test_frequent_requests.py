"""Requests that each worker, member or shard sends every second or iteration, which bypass the scheduler's router."""

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Scope

from paramserver.client.credentials import NO_CREDENTIALS
from paramserver.core.scheduler import SchedulerCore
from paramserver_node.forward import Forwarder
from paramserver_node.redis import connect
from paramserver_node.roles import routes
from paramserver_scheduler.app import make_app, served
from paramserver_scheduler.hub import Hub
from paramserver_scheduler.large_bodies import LargeBodies
from paramserver_scheduler.lease import Lease, Scheduler
from paramserver_scheduler.runtime import Runtime
from paramserver_scheduler.store import StateStore

FREQUENT: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/models/m/clock", {"worker": "m/w0", "epoch": 1, "clock": 1}),
    ("PUT", "/models/m/workers/m/w0", {"epoch": 1}),
    ("PUT", "/pool/p0", {"epoch": 1}),
    ("PUT", "/internal/shards/shard-0", {"epoch": 1}),
]


def leading() -> tuple[FastAPI, ASGIApp]:
    """Return the app of a scheduler that leads a new cluster and knows of a standby, alone and as it is served."""
    redis = connect("redis://127.0.0.1:1/0")  # never asked
    lease = Lease(redis, name="s1", place="here", url="http://127.0.0.1:1")
    lease.schedulers = (Scheduler("s1", lease.url), Scheduler("s2", "http://127.0.0.1:2"))
    core = SchedulerCore.restore({}, time.monotonic(), 1, time.time())
    runtime = Runtime(core, StateStore(redis, lease), Hub(lambda _: None))

    async def confirm() -> bool:
        return True

    app = make_app()
    app.state.service = SimpleNamespace(
        runtime=runtime, read=core.read, large_bodies=LargeBodies(), leadership=SimpleNamespace(confirm=confirm)
    )
    return app, served(app, lease, Forwarder(NO_CREDENTIALS, asyncio.Event()))


async def sent(
    app: ASGIApp, method: str, path: str, body: Any, query: bytes = b""
) -> tuple[Scope, dict[str, str], Any]:
    """Return the scope after the request, and the headers and the document of its answer, which is an error."""
    data, answer = json.dumps(body).encode(), list[Message]()

    async def receive() -> Message:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Message) -> None:
        answer.append(message)

    headers = [(b"host", b"here"), (b"content-length", str(len(data)).encode())]
    scope = {"type": "http", "http_version": "1.1", "method": method, "path": path, "query_string": query}
    await app(scope := {**scope, "headers": headers}, receive, send)
    return scope, {k.decode(): v.decode() for k, v in answer[0]["headers"]}, json.loads(answer[1]["body"])


@pytest.mark.parametrize(("method", "path", "body"), FREQUENT)
async def test_a_frequent_request_is_answered_without_the_router(
    method: str, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the route that the router would choose, and an error names all schedulers, as one from the router."""
    app, outer = leading()
    asked = {"type": "http", "method": method, "path": path, "headers": []}
    chosen = next(r for r in routes(app) if r.matches(asked)[0] is Match.FULL)
    monkeypatch.setattr(FastAPI, "__call__", None)
    scope, headers, document = await sent(outer, method, path, body)
    assert scope["route"].path == getattr(chosen, "path", None)
    assert (document["status"], document["code"].partition("_")[0]) == (404, "unknown")
    assert headers["content-type"] == "application/problem+json"
    assert headers["x-paramserver-schedulers"] == "http://127.0.0.1:1,http://127.0.0.1:2"


async def test_the_query_of_a_frequent_request_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query parameter that its route does not take is refused."""
    _, outer = leading()
    monkeypatch.setattr(FastAPI, "__call__", None)
    _, _, document = await sent(outer, *FREQUENT[1], b"x=1")
    assert (document["status"], document["code"]) == (422, "invalid_field")
