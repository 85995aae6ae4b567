"""Requests that each worker, member or shard sends every second or iteration, which bypass the scheduler's router."""

import json
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Scope

from paramserver_node.roles import routes

from .leading import leading

FREQUENT: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/models/m/clock", {"worker": "m/w0", "epoch": 1, "clock": 1}),
    ("PUT", "/models/m/workers/m/w0", {"epoch": 1}),
    ("PUT", "/pool/p0", {"epoch": 1}),
    ("PUT", "/internal/shards/shard-0", {"epoch": 1}),
]


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
    _, app, outer = leading()
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
    *_, outer = leading()
    monkeypatch.setattr(FastAPI, "__call__", None)
    _, _, document = await sent(outer, *FREQUENT[1], b"x=1")
    assert (document["status"], document["code"]) == (422, "invalid_field")
