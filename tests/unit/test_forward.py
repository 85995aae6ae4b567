"""The connections over which requests are forwarded, to a node played by a socket."""

import asyncio
import socket
import threading

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message
from tests.unit.scripted_server import serving

from paramserver.errors import InDoubt, Unavailable
from paramserver.net.credentials import Credentials
from paramserver_node import forward
from paramserver_node.forward import Forwarder


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fails here because the machine stands still for seconds."""
    monkeypatch.setattr(forward, "_TIMEOUT", httpx.Timeout(20.0).as_dict())
    monkeypatch.setattr(forward, "_IDLE_S", 60.0)


async def forwarded(
    forwarder: Forwarder,
    url: str,
    *,
    close: bool = False,
    method: str = "GET",
    path: str = "/map",
    query: bytes = b"a=1",
) -> bytes:
    """Forward a request to the node at `url`; return the body of its answer.  `close` it before that is read."""
    there = asyncio.Event()  # never set: the client does not hang up
    scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": [(b"x-a", b"\xe9 ")]}
    sent: list[Message] = []

    body: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}] if method == "POST" else []

    async def receive() -> Message:
        if body:
            return body.pop()
        await there.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    answer = await forwarder.forward(Request(scope, receive), [url])
    if close:
        await forwarder.aclose()
    await answer(scope, receive, send)
    return b"".join(m.get("body", b"") for m in sent)


OK = b"HTTP/1.1 200 OK\r\nset-cookie: a=1; path=/\r\ncontent-length: 2\r\n\r\nok"


async def test_a_connection_is_used_again_until_the_node_closes_it() -> None:
    """Forwarded requests share a connection, a closed one is replaced, and each says what its own client said."""
    connections: list[list[bytes]] = []
    closed = threading.Event()

    def serve(connected: socket.socket) -> None:
        """Answer two requests, and close the connection."""
        connections.append([])
        for _ in range(2):
            if not (head := connected.recv(1 << 16)):
                return
            connections[-1].append(head)
            connected.sendall(OK)
        connected.close()
        closed.set()

    with serving(serve) as url:
        forwarder = Forwarder(Credentials(), asyncio.Event())
        answers = [await forwarded(forwarder, url) for _ in range(2)]
        assert await asyncio.to_thread(closed.wait, 20.0)  # else it is closed under the next request
        answers.append(await forwarded(forwarder, url))
        await forwarder.aclose()

    host = url.removeprefix("http://").encode()
    head = b"GET /map?a=1 HTTP/1.1\r\nHost: " + host + b"\r\nx-a: \xe9\r\nx-request-id: \r\n\r\n"
    assert answers == [b"ok"] * 3
    assert connections == [[head, head], [head]]


async def test_a_query_that_is_not_utf8_is_passed_on() -> None:
    """A query is forwarded percent-encoded, whatever its bytes are."""
    heads: list[bytes] = []

    def serve(connected: socket.socket) -> None:
        heads.append(connected.recv(1 << 16))
        connected.sendall(OK)

    with serving(serve) as url:
        forwarder = Forwarder(Credentials(), asyncio.Event())
        assert await forwarded(forwarder, url, method="POST", query=b"a=\xff") == b"ok"
        await forwarder.aclose()
    assert heads[0].startswith(b"POST /map?a=%FF HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("path", "repeatable"),
    [
        ("/models/m/clock", True),
        ("/models/m/tasks/train:0:0/done", True),
        ("/models/m/workers/m/w0/drain", True),
        ("/models/m/tasks/lease", False),
        ("/models/m/metrics", False),
        ("/push", False),
        ("/runs", False),
    ],
)
async def test_a_lost_answer_says_whether_to_repeat_the_request(path: str, repeatable: bool) -> None:
    """A node that closes the connection without an answer: a POST is `retryable` if a repetition changes nothing."""
    headers = [(b"content-length", b"0")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    def serve(connected: socket.socket) -> None:
        connected.recv(1 << 16)

    with serving(serve) as url:
        forwarder = Forwarder(Credentials(), asyncio.Event())
        with pytest.raises(InDoubt) as raised:
            await forwarder.forward(Request(scope, receive), [url])
        await forwarder.aclose()
    assert raised.value.retryable is repeatable


async def test_a_closed_forwarder_finishes_what_it_has_begun() -> None:
    """A response under way when a forwarder is closed is passed on whole, and its connection is closed then."""
    closed = threading.Event()

    def serve(connected: socket.socket) -> None:
        connected.recv(1 << 16)
        connected.sendall(OK)
        assert not connected.recv(1)
        closed.set()

    with serving(serve) as url:
        assert await forwarded(Forwarder(Credentials(), asyncio.Event()), url, close=True) == b"ok"
        assert await asyncio.to_thread(closed.wait, 20.0)


@pytest.mark.parametrize(("method", "path", "answered"), [
    ("POST", "/models/m/checkpoints", True), ("POST", "/models/m/restore", True), ("POST", "/models/m/clock", False),
    ("GET", "/models/m/checkpoints", False),
])  # fmt: skip
async def test_what_takes_as_long_as_a_model_is_large_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, method: str, path: str, answered: bool
) -> None:
    """A checkpoint or restore may take longer than any other answer, so that silence does not end it."""
    monkeypatch.setattr(forward, "_TIMEOUT", httpx.Timeout(20.0, read=0.2).as_dict())
    asked, out_of_patience = threading.Event(), threading.Event()

    def serve(connected: socket.socket) -> None:
        connected.recv(1 << 16)
        asked.set()
        out_of_patience.wait(1.0 if answered else 20.0)  # five times the patience
        connected.sendall(OK)

    with serving(serve) as url:
        forwarder = Forwarder(Credentials(), asyncio.Event())
        try:
            if answered:
                assert await forwarded(forwarder, url, method=method, path=path) == b"ok"
            else:
                with pytest.raises(Unavailable):
                    await forwarded(forwarder, url, method=method, path=path)
                assert await asyncio.to_thread(asked.wait, 20.0)
        finally:
            out_of_patience.set()
            await forwarder.aclose()
