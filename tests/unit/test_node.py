"""What all services share, around a small app: problem documents, media types, request ids, draining, roles."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import Any, TypeVar

import httpx
import msgpack
import pytest
from fastapi import APIRouter, FastAPI, Request, Response
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paramserver.errors import CODES, InternalError, RequestError, as_problem, problem
from paramserver.limits import PACE_BYTES_PER_S, PATIENCE_S
from paramserver_node import health, middleware, negotiate, problems, roles
from paramserver_node.deadlines import Deadlines
from paramserver_node.middleware import NodeMiddleware

T = TypeVar("T")
SIZE_MAX = 1000
NUMBERS = [-(1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 1 << 64]
"""The smallest and the largest integer of msgpack, and those beyond."""
ODD = {"loss": [float("nan"), {"worst": (float("-inf"), 1.5)}], "n": NUMBERS, "text": "\ud800"}
MSGPACK = {"content-type": "application/msgpack"}


def make_app() -> FastAPI:
    app = FastAPI(redirect_slashes=False, docs_url=None, redoc_url=None)
    problems.install(app)
    app.include_router(health.router("test", lambda: "still loading", lambda: "c1"))

    @app.post("/echo")
    @roles.role("worker")
    async def echo(request: Request) -> Response:
        negotiate.check_accept(request)
        return negotiate.respond(request, await negotiate.read(request, SIZE_MAX))

    @app.post("/refuse")
    @roles.role("worker")
    async def refuse(request: Request) -> Response:
        raise problem("queue_full", "no room \ud800", hint="wait", retry_after_s=0.2, where=float("nan"))

    @app.get("/items/{name:path}")
    @roles.role("reader")
    async def item(name: str, limit: int = 10) -> dict[str, Any]:
        return {"name": name, "limit": limit}

    @app.get("/bug")
    @roles.role("reader")
    async def bug() -> None:
        raise ZeroDivisionError

    @app.get("/long")
    @roles.role("reader")
    async def long() -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"begun"

        return StreamingResponse(pieces())

    @app.get("/odd")
    @roles.role("reader")
    async def odd(request: Request) -> Response:
        return negotiate.respond(request, ODD)

    return app


def served(outside: bool) -> ASGIApp:
    """Return the app with the middleware around it, as in the scheduler, or inside it, as in the shard."""
    app = make_app()
    if outside:
        return NodeMiddleware(app)
    app.add_middleware(NodeMiddleware)
    return app


async def ask(method: str, path: str, *, outside: bool = True, **request: Any) -> httpx.Response:
    transport = httpx.ASGITransport(served(outside))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        return await client.request(method, path, **request)


def code_of(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == answer.status_code
    assert document["retryable"] == CODES[document["code"]].retryable
    assert document["request_id"] == answer.headers["x-request-id"]
    return str(document["code"])


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("PUT", "/echo", 405, "method_not_allowed"),
        ("GET", "/items/a?limit=x", 400, "malformed"),
        ("GET", "/items/a%FF", 400, "malformed"),
        ("GET", "/bug", 500, "internal"),
    ],
)
async def test_every_failure_is_a_problem_document(
    method: str, path: str, status: int, code: str, outside: bool
) -> None:
    """Unknown routes, wrong methods, query values or paths, and bugs are answered with a problem document and an id."""
    answer = await ask(method, path, outside=outside)

    assert (answer.status_code, code_of(answer)) == (status, code)
    assert (code == "method_not_allowed") == ("allow" in answer.headers)


async def test_an_unknown_route_with_a_query_that_is_not_utf8_is_unknown() -> None:
    """An unknown route is answered with 404 and its path, whatever the bytes of the query are."""
    sent, _ = await exchange(served(True), {**scope_of("GET", b"/nothing", []), "query_string": b"\xff"}, [])
    assert sent[0]["status"] == 404
    assert json.loads(sent[1]["body"])["detail"] == "GET /nothing: Not Found"


async def test_what_the_core_tells_of_a_bug_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """An internal error from an endpoint without a router is answered as `internal`, and logged with its cause."""

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        raise as_problem(ZeroDivisionError("of ours"))

    transport = httpx.ASGITransport(NodeMiddleware(endpoint))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        answer = await client.post("/push/%0A%1B[31mp%C3%A4")

    assert (answer.status_code, code_of(answer)) == (500, "internal")
    (record,) = [r for r in caplog.records if r.getMessage().startswith("request.failed")]
    assert " path=/push/%0A%1B%5B31mp%C3%A4 " in record.getMessage(), "a client could write lines and colors of its own"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], InternalError)
    assert isinstance(record.exc_info[1].__cause__, ZeroDivisionError)


async def test_a_refusal_says_when_to_come_back() -> None:
    """A refusal's `Retry-After` is whole seconds, at least 1; NaN and lone surrogates do not break its document."""
    answer = await ask("POST", "/refuse", content=b"{}")

    assert code_of(answer) == "queue_full"
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["retry_after_s"] == 0.2
    assert answer.json()["where"] is None


async def test_what_must_not_be_sent_again_does_not_say_when() -> None:
    """An answer has no `Retry-After` if the same request could count twice: proxies and libraries act on the header."""
    for retryable in (True, False):
        answer = problems.response(
            Request({"type": "http", "headers": []}), problem("in_doubt", "perhaps", retryable=retryable)
        )
        assert ("retry-after" in answer.headers) is retryable


async def test_answers_to_get_are_not_for_caches() -> None:
    """Answers to GET and HEAD, refusals too, are not to be stored unless they say otherwise themselves."""

    async def own(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    for method, path in (("GET", "/livez"), ("GET", "/nothing"), ("GET", "/items/a?limit=x"), ("HEAD", "/livez")):
        assert (await ask(method, path)).headers["cache-control"] == "no-store"
    assert "cache-control" not in (await ask("POST", "/echo", json=1)).headers
    async with httpx.AsyncClient(transport=httpx.ASGITransport(NodeMiddleware(own)), base_url="http://node") as client:
        assert (await client.get("/")).headers.get_list("cache-control") == ["no-cache"]


async def test_request_ids_are_echoed_or_made() -> None:
    """A valid request id is echoed; a request with an invalid one gets a new id."""
    kept = await ask("GET", "/livez", headers={"x-request-id": "run-7/w0:12"})
    made = [await ask("GET", "/livez", headers={"x-request-id": bad}) for bad in ("", "a b", "x" * 200)]

    assert kept.headers["x-request-id"] == "run-7/w0:12"
    assert len({a.headers["x-request-id"] for a in made}) == 3
    assert all(16 < len(a.headers["x-request-id"]) <= 40 for a in made)


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"", {}, 400, "malformed"),
        (b"{", {}, 400, "malformed"),
        (b"[NaN]", {}, 422, "non_finite"),
        (b"[1e999]", {}, 422, "non_finite"),
        (b"[" * 500, {}, 413, "too_large"),
        (b'{"a":1,"a":2}', {}, 400, "malformed"),
        (b'"\\ud800"', {}, 400, "malformed"),
        (b"\xff", {}, 400, "malformed"),
        (b" " * (SIZE_MAX + 1), {}, 413, "too_large"),
        (b"\xc1", MSGPACK, 400, "malformed"),
        (b"\xdd\xff\xff\xff\xff", MSGPACK, 413, "too_large"),
        (b"{}", {"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        (b"{}", {"content-encoding": "gzip"}, 415, "unsupported_media_type"),
        (b"{}", {"content-length": "7"}, 400, "malformed"),
        (b"{}", {"accept": "text/html"}, 406, "not_acceptable"),
        (b"{}", {"accept": "*/*;q=0"}, 406, "not_acceptable"),
    ],
)
async def test_bad_bodies_are_refused(body: bytes, headers: dict[str, str], status: int, code: str) -> None:
    """An invalid body, or an `Accept` that cannot be met, is refused with a 4xx and its code."""
    answer = await ask("POST", "/echo", content=body, headers=headers)

    assert (answer.status_code, code_of(answer)) == (status, code)


@pytest.mark.parametrize(
    ("content_type", "accept", "answered"),
    [
        (None, None, negotiate.JSON),
        ("application/json; charset=utf-8", "*/*", negotiate.JSON),
        ("application/merge-patch+json", "application/*;q=0.2", negotiate.JSON),
        ("application/json", "application/msgpack", negotiate.MSGPACK),
        ("application/json", "application/json;q=0.1, application/msgpack;q=0.9", negotiate.MSGPACK),
        ("application/json", "application/json;q=0, */*", negotiate.MSGPACK),
        ("application/json", "text/html, application/json;q=nan, application/msgpack;q=0.1", negotiate.MSGPACK),
        ("application/x-msgpack", "*/*", negotiate.MSGPACK),
        ("application/msgpack", "application/json", negotiate.JSON),
        ("application/msgpack", None, negotiate.MSGPACK),
        ("application/msgpack", "application/json, application/msgpack;q=1", negotiate.MSGPACK),
    ],
)
async def test_media_types_are_negotiated(content_type: str | None, accept: str | None, answered: str) -> None:
    """Content-Type says how a body is read, Accept how it is answered; if Accept is open, msgpack gets msgpack."""
    headers = {k: v for k, v in (("content-type", content_type), ("accept", accept or "")) if v is not None}
    value = {"w": [0.1, None, "é", 1 << 63]}
    packed = content_type is not None and "msgpack" in content_type
    body = msgpack.packb(value) if packed else json.dumps(value).encode()

    answer = await ask("POST", "/echo", content=body, headers=headers)

    assert answer.headers["content-type"] == answered
    assert (msgpack.unpackb(answer.content) if answered == negotiate.MSGPACK else answer.json()) == value


@pytest.mark.parametrize(
    ("accept", "answered"),
    [
        ("application/msgpack;q=0.5, application/json;q=0.5", negotiate.JSON),
        ("application/json;q=0.4, application/*;q=0.6", negotiate.MSGPACK),
        ("*/*;q=0.1, application/*;q=0", None),
        ("application/*;q=0, application/x-msgpack;q=0.1", negotiate.MSGPACK),
        ("application/json;q=0.2;version=1, Application/VND.MsgPack; version=1; Q=0.3", negotiate.MSGPACK),
        ("application/json;q=0.2, application/json;q=0.9, application/msgpack;q=0.5", negotiate.JSON),
        ("application/problem+json, application/msgpack;q=0.9", negotiate.JSON),
        ("application/msgpack;q=2", None),
        ("application/msgpack;q=-1", None),
        ("application/msgpack;q=", None),
        ("application/msgpack;q=1, application/json;q=0", negotiate.MSGPACK),
    ],
)
async def test_the_most_specific_range_of_a_type_gives_its_quality(accept: str, answered: str | None) -> None:
    """Of the ranges in `Accept` the most specific one that names a type counts; a quality that is none counts as 0."""
    answer = await ask("POST", "/echo", content=b"{}", headers={"accept": accept})

    if answered is None:
        assert (answer.status_code, code_of(answer)) == (406, "not_acceptable")
    else:
        assert answer.headers["content-type"] == answered


async def test_accept_may_come_in_several_lines() -> None:
    """Several `Accept` lines are one list (RFC 9110, 5.3), as clients send them that add one line for each type."""
    lines = [("accept", "text/html"), ("accept", "application/msgpack")]
    answer = await ask("POST", "/echo", content=b"{}", headers=lines)

    assert (answer.status_code, answer.headers["content-type"]) == (200, negotiate.MSGPACK)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": ""},
        {"content-type": " Application/JSON ;charset=utf-8"},
        {"content-encoding": " Identity "},
        {"content-length": "2"},
        {"content-length": b"\xb2"},
    ],
)
async def test_headers_of_a_json_body_are_read_as_they_are_meant(headers: dict[str, str | bytes]) -> None:
    """A body is JSON in whatever case that is said, or if nothing is said."""
    answer = await ask("POST", "/echo", content=b"{}", headers=headers)

    assert (answer.status_code, answer.json()) == (200, {})


async def test_what_a_media_type_cannot_say_does_not_break_an_answer() -> None:
    """What a media type cannot express, such as NaN, huge integers or lone surrogates, is replaced in responses."""
    as_json = (await ask("GET", "/odd")).json()
    as_msgpack = msgpack.unpackb((await ask("GET", "/odd", headers={"accept": "application/msgpack"})).content)

    kept = {"loss": [None, {"worst": [None, 1.5]}], "text": "?"}
    assert as_json == kept | {"n": NUMBERS}
    below, *between, beyond = NUMBERS
    assert repr(as_msgpack.pop("n")) == repr([float(below), *between, float(beyond)])
    assert as_msgpack == kept


async def test_readiness_says_what_is_missing() -> None:
    """A live node that is not ready answers 503 on /readyz, with the reason."""
    assert (await ask("GET", "/livez")).status_code == 200
    waiting = await ask("GET", "/readyz")

    assert (waiting.status_code, waiting.json()["reason"]) == (503, "still loading")


async def test_metrics_are_labeled_by_route_not_by_path() -> None:
    """Metrics are labeled by route, so that paths made up by clients do not become labels."""
    app = served(True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as client:
        for path in ("/items/first-name", "/items/second-name", "/made/up"):
            await client.get(path)
        text = (await client.get("/metrics")).text

    counted = [line for line in text.splitlines() if line.startswith("paramserver_http_requests_total")]
    assert any('route="/items/{name:path}"' in line for line in counted)
    assert not any("first-name" in line or "made" in line for line in counted)


async def test_metrics_tell_why_a_request_was_refused() -> None:
    """Requests are counted under the code of their error, which is empty where there was none."""
    for path in ("/items/a", "/items/a?limit=x"):
        await ask("GET", path)
    labels = {"route": "/items/{name:path}", "method": "GET"}
    good, bad = ({**labels, "status": "200", "code": ""}, {**labels, "status": "400", "code": "malformed"})

    assert all(REGISTRY.get_sample_value("paramserver_http_requests_total", found) for found in (good, bad))


async def exchange(app: ASGIApp, scope: Scope, pieces: list[Message]) -> tuple[list[Message], int]:
    """Return what the app sends for a request in pieces, and how many were unread when the response began."""
    sent: list[Message] = []
    left = list(pieces)
    unread_at_start = -1

    async def receive() -> Message:
        return left.pop(0) if left else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal unread_at_start
        if message["type"] == "http.response.start":
            unread_at_start = len(left)
        sent.append(message)

    await app(scope, receive, send)
    return sent, unread_at_start


def scope_of(method: str, raw_path: bytes, headers: list[tuple[bytes, bytes]]) -> Scope:
    return {
        "type": "http", "method": method, "path": raw_path.decode("latin-1"), "raw_path": raw_path,
        "query_string": b"", "headers": headers, "scheme": "http", "http_version": "1.1", "root_path": "",
    }  # fmt: skip


@pytest.mark.parametrize("path", [b"/refuse", b"/nothing", b"/echo", b"/a%zz"])
async def test_a_body_nobody_wants_is_read_before_the_answer_begins(path: bytes) -> None:
    """A refused request's body is read to its end before the response begins, whatever the route does.

    A client that sends all of its body before it reads would lose an earlier response.
    """
    pieces: list[Message] = [
        {"type": "http.request", "body": b"x" * 600, "more_body": i < 4} for i in range(5)
    ]  # together above the limit of the route

    sent, unread = await exchange(served(True), scope_of("POST", path, [(b"content-length", b"3000")]), pieces)

    assert sent[0]["status"] >= 400
    assert unread == 0


async def test_a_stream_begins_when_the_end_of_a_late_body_is_here() -> None:
    """The end of the body is enough for the answer to begin, even if the endpoint got it, waiting for a disconnect."""
    arriving: asyncio.Queue[Message] = asyncio.Queue()
    begun = asyncio.Event()

    async def send(message: Message) -> None:
        begun.set()

    request = scope_of("GET", b"/long", [(b"content-length", b"2")])
    answering = asyncio.ensure_future(served(True)(request, arriving.get, send))
    for _ in range(100):  # until both wait: the endpoint, and what reads the rest of the body before the answer
        await asyncio.sleep(0)
    arriving.put_nowait({"type": "http.request", "body": b"{}"})
    async with asyncio.timeout(5.0):
        await begun.wait()
        await answering


async def test_a_body_that_is_cut_off_is_refused() -> None:
    """A request whose client disconnects in the middle of its body is refused."""
    pieces: list[Message] = [{"type": "http.request", "body": b"{}", "more_body": True}]

    sent, _ = await exchange(served(True), scope_of("POST", b"/echo", []), pieces)

    assert sent[0]["status"] == 400


@pytest.mark.parametrize("version", ["1.1", "2"])
async def test_a_reader_has_time_for_what_it_is_sent(version: str) -> None:
    """A piece of a response may take `PATIENCE_S` plus its size at the slowest allowed pace.

    Over HTTP/1.1 the size of the piece before is added, as a piece waits for that, too.
    """
    sizes = [2 << 20, 100]
    dues: list[float] = []

    class Noted(Deadlines):
        async def within(self, due_s: float, step: Awaitable[T]) -> T:
            dues.append(due_s - self.now())
            return await super().within(due_s, step)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for i, size in enumerate(sizes):
            await send({"type": "http.response.body", "body": bytes(size), "more_body": i == 0})

    node = NodeMiddleware(app)
    node._deadlines = Noted(asyncio.get_running_loop())
    await exchange(node, {**scope_of("GET", b"/", []), "http_version": version}, [])

    sent = sizes if version == "2" else [sizes[0], sum(sizes)]
    assert dues == pytest.approx([PATIENCE_S + size / PACE_BYTES_PER_S for size in sent], abs=1.0)


class Expired(Deadlines):
    """Deadlines whose clock stands at the last one that was waited for."""

    due_s = 0.0

    def now(self) -> float:
        return self.due_s

    async def within(self, due_s: float, step: Awaitable[T]) -> T:
        self.due_s = due_s
        return await super().within(due_s, step)


async def test_a_body_that_is_too_slow_is_refused_with_the_time_that_it_had() -> None:
    """The error for a slow body states the time that it had, which includes that for the bytes that arrived."""
    size = 2 * PACE_BYTES_PER_S
    pieces: list[Message] = [{"type": "http.request", "body": bytes(size), "more_body": True}]
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass

    async def receive() -> Message:
        if not pieces:
            raise TimeoutError
        return pieces.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    node = NodeMiddleware(app)
    node._deadlines = Expired(asyncio.get_running_loop())
    await node(scope_of("POST", b"/", []), receive, send)

    assert json.loads(sent[1]["body"])["detail"] == f"only {size} bytes of the body arrived in {PATIENCE_S + 2:g} s"


async def test_an_answer_that_is_not_read_is_cut_off_with_the_time_that_it_had() -> None:
    """The error for an unread response states the time that it had, which depends on the size of the piece."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with pytest.raises(problems.CutOff, match=f"within {PATIENCE_S + 2:g} s"):
            await send({"type": "http.response.body", "body": bytes(2 * PACE_BYTES_PER_S)})
        reached.set()

    async def receive() -> Message:
        raise AssertionError

    async def unread(message: Message) -> None:
        if message["type"] == "http.response.body":
            raise TimeoutError

    reached = asyncio.Event()
    await NodeMiddleware(app)(scope_of("GET", b"/", []), receive, unread)

    assert reached.is_set()


@pytest.mark.parametrize("outside", [True, False])
async def test_who_does_not_read_is_cut_off_without_a_word_of_a_bug(
    outside: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Disconnecting a client that does not read logs a single INFO line, without a traceback."""
    monkeypatch.setattr(middleware, "PATIENCE_S", 0.0)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def unread(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    caplog.set_level(logging.INFO)
    with suppress(Exception):
        await served(outside)(scope_of("GET", b"/long", []), receive, unread)

    assert [r.levelname for r in caplog.records] == ["INFO"]
    assert "request.unread path=/long" in caplog.text


header_names = st.sampled_from([b"accept", b"content-type", b"content-length", b"x-request-id"])


@given(
    st.binary(min_size=1, max_size=40),
    st.lists(st.tuples(header_names, st.binary(max_size=20)), max_size=4),
    st.binary(max_size=60),
)
def test_no_bytes_make_a_server_error(path: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Any path, headers and body are answered completely, with a status below 500."""
    piece: Message = {"type": "http.request", "body": body, "more_body": False}
    app = served(True)

    for raw in (b"/echo", b"/items/" + path):
        method = "POST" if raw == b"/echo" else "GET"
        sent, _ = asyncio.run(exchange(app, scope_of(method, raw, headers), [piece]))
        assert sent[0]["status"] < 500, sent
        assert sent[-1].get("more_body", False) is False


def test_routes_without_a_mark_are_found() -> None:
    """Every route is found with its role, or with None if it has none, also if it comes from an included router."""
    app = make_app()
    marks = {getattr(r, "path", ""): roles.role_of(r) for r in roles.routes(app)}
    assert {"/echo", "/livez", "/metrics"} <= marks.keys()
    assert None not in marks.values()

    inner = APIRouter()
    inner.add_api_route("/forgotten", lambda: None)
    app.include_router(inner)

    assert [getattr(r, "path", "") for r in roles.routes(app) if roles.role_of(r) is None] == ["/forgotten"]


async def test_chunked_bodies_are_read_whole() -> None:
    """A chunked body, which has no announced length, is read to its end."""

    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b'{"a"', b": [1,", b" 2]}"):
            yield piece

    assert (await ask("POST", "/echo", content=pieces())).json() == {"a": [1, 2]}


async def test_a_body_may_be_as_long_as_its_limit() -> None:
    """A body of exactly the limit is read, whether its length was announced or not."""
    body = b"[" + b" " * (SIZE_MAX - 2) + b"]"

    async def pieces() -> AsyncIterator[bytes]:
        yield body

    for content in (body, pieces()):
        assert (await ask("POST", "/echo", content=content)).json() == []


async def test_a_chunked_body_has_the_same_limit() -> None:
    """A body of unknown length is read no further than its limit, and refused."""
    read = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(100):
            read += 600
            yield b" " * 600

    with pytest.raises(RequestError) as refused:
        await negotiate.read_body(Request(scope_of("POST", b"/", []), received(pieces())), SIZE_MAX)
    assert (refused.value.code, read) == ("too_large", 1200)


def received(pieces: AsyncIterator[bytes]) -> Receive:
    """Return what a server receives of a body in these pieces."""

    async def receive() -> Message:
        return {"type": "http.request", "body": await anext(pieces), "more_body": True}

    return receive
