"""HTTP/1.1 and protocol detection, on real connections whose client is a plain socket in the same process."""

import asyncio
import gc
import json
import socket
import ssl
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

import paramserver as ps
from paramserver.errors import problem
from paramserver.wire import http2 as wire
from paramserver_node import http1, protocol_detector, read_deadline
from paramserver_node.http2 import HEADER_BYTES_MAX
from paramserver_node.middleware import NodeMiddleware
from paramserver_node.protocol_detector import ProtocolDetector

ASKED = wire.encoded([(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/")])
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
HELLO = wire.PREFACE + wire.settings({})
ONE_REQUEST = HELLO + wire.frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, 1, ASKED)
WITHIN_S = 20.0
LARGE_BYTES = 20_000_000
LONG = b"x: " + bytes(b"y" * (HEADER_BYTES_MAX + 1))


class Client:
    """A client on a plain socket."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket, self.loop = connected, asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        """Send these bytes."""
        await self.loop.sock_sendall(self.socket, data)

    async def until(self, end: bytes, times: int = 1) -> bytes:
        """Return what arrives until `end` has occurred `times` times."""
        came = bytearray()
        while came.count(end) < times:
            data = await self.loop.sock_recv(self.socket, 1 << 16)
            assert data, f"closed after {came!r}"
            came += data
        return bytes(came)

    async def some(self, size: int) -> bytes:
        """Return at least `size` bytes, or fewer if the server disconnects before."""
        came = bytearray()
        while len(came) < size and (data := await self.loop.sock_recv(self.socket, 1 << 16)):
            came += data
        return bytes(came)

    async def to_the_end(self) -> bytes:
        """Return what arrives until the server disconnects."""
        came = bytearray()
        while True:
            try:
                data = await self.loop.sock_recv(self.socket, 1 << 16)
            except ConnectionResetError:
                return bytes(came)
            if not data:
                return bytes(came)
            came += data


def problem_of(answer: bytes) -> dict[str, Any]:
    """Return the problem document that is the response's whole body."""
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"\r\ncontent-length: %d" % len(body) in head
    document: dict[str, Any] = json.loads(body)
    return document


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond with the body of the request."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    head = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def large(scope: Scope, receive: Receive, send: Send) -> None:
    """Send a large response; without a second request header (`connection: close`) it is left incomplete."""
    head = [(b"content-length", b"%d" % LARGE_BYTES)]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": bytes(LARGE_BYTES), "more_body": len(scope["headers"]) < 2})


async def kept(scope: Scope, receive: Receive, send: Send) -> None:
    """Send a large, complete response."""
    head = [(b"content-length", b"%d" % LARGE_BYTES)]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": bytes(LARGE_BYTES)})


@asynccontextmanager
async def serving(app: ASGIApp = echo, **settings: Any) -> AsyncIterator[tuple[Client, ServerState]]:
    """Yield a connected client and the server's state; at the end, wait for all connections and tasks to end."""
    loop, state = asyncio.get_running_loop(), ServerState()
    config = Config(app, log_config=None, ws="none", **{"timeout_keep_alive": 75, **settings})
    config.load()
    made: dict[str, Any] = {}
    server = await loop.create_server(lambda: ProtocolDetector(config, state, made), "127.0.0.1", 0)
    async with asyncio.timeout(WITHIN_S):
        with closing(server), socket.socket() as connected:
            connected.setblocking(False)
            await loop.sock_connect(connected, server.sockets[0].getsockname())
            yield Client(connected), state
        while state.connections or state.tasks:
            await asyncio.sleep(0)


async def test_who_begins_with_tls_is_refused_at_once() -> None:
    """A client that starts with TLS is refused at once in plain HTTP; the SDK's hint names the http:// URL."""
    async with serving() as (client, _):
        host, port = client.socket.getpeername()
        with pytest.raises(ssl.SSLError):
            await asyncio.open_connection(host, port, ssl=ssl.create_default_context())
        with pytest.raises(ps.Unreachable) as e:
            await asyncio.to_thread(ps.connect, f"https://{host}:{port}")
        assert e.value.hint == f"connect to http://{host}:{port}"
        await client.send(b"\x16\x03\x01\x02\x00")
        assert problem_of(await client.to_the_end())["code"] == "malformed"


@pytest.mark.parametrize("asked_before", [False, True])
async def test_a_head_that_is_too_long_is_refused(asked_before: bool) -> None:
    """A request head above the limit is answered with 431, whether it is the first of its connection or a later one."""
    async with serving() as (client, _):
        if asked_before:
            await client.send(GET)
            await client.until(b"\r\n\r\n")
        await client.send(b"GET / HTTP/1.1\r\n" + LONG)
        told = await client.to_the_end()
        assert told.startswith(b"HTTP/1.1 431 ")
        assert problem_of(told)["code"] == "headers_too_large"


@pytest.mark.parametrize("line", [b"GET /" + LONG[3:] + b" HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n" + LONG + b"\r\n"])
async def test_a_head_that_is_too_long_is_refused_even_if_it_comes_at_once(line: bytes) -> None:
    """A complete head above the limit is answered with 431, be it one long request line or one long header."""
    async with serving() as (client, _):
        await client.send(line + b"host: x\r\n\r\n")
        told = problem_of(await client.to_the_end())
        assert (told["code"], told["status"]) == ("headers_too_large", 431)
        assert told["hint"]


@pytest.mark.parametrize(
    "rest", [b"}", b"FOO / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + LONG], ids=["body", "head", "long"]
)
@pytest.mark.parametrize("times", [1, 2])
async def test_a_refusal_is_not_taken_for_the_answer_to_the_request_before_it(rest: bytes, times: int) -> None:
    """If something invalid follows complete requests, such as a body beyond its length, these get their own answers."""
    asked = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
    # A head that never ends is waited for as long as an idle connection is kept.
    async with serving(timeout_keep_alive=0) as (client, _):
        await client.send(times * asked + rest)
        answer = await client.to_the_end()
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 200 ") == answer.count(b"hello") == times
    if LONG not in rest:  # else the answers may be there before it is known to be too long
        assert answer.count(b"\r\nconnection: close\r\n") == 1


async def test_a_body_at_fault_adds_nothing_to_a_response_that_has_begun() -> None:
    """If a body turns out to be invalid while its response is being sent, the connection just ends."""

    async def early(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    async with serving(early) as (client, _):
        await client.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        await client.until(b"begun")
        await client.send(b"zz\r\n")
        assert b"HTTP" not in await client.to_the_end()


@pytest.mark.parametrize("chunk", [b"0\r\n" + LONG, b"1;" + LONG[3:]], ids=["trailers", "extension"])
async def test_a_chunked_body_has_no_more_than_that_beside_its_bytes(chunk: bytes) -> None:
    """Trailers or a chunk extension of a body in progress are answered with 431 if they exceed the header limit."""
    async with serving() as (client, state):
        await client.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        while not state.tasks:
            await asyncio.sleep(0)
        await client.send(chunk)
        assert (await client.to_the_end()).startswith(b"HTTP/1.1 431 ")


async def test_a_large_body_in_small_chunks_is_a_body() -> None:
    """Chunk extensions do not add up: a body whose extensions together exceed the header limit is served."""
    async with serving() as (client, _):
        await client.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(100):
            await client.send(b"1;" + bytes(b"z" * 2000) + b"\r\na\r\n")
        await client.send(b"0\r\n\r\n")
        assert (await client.until(b"a" * 100)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("begun", [b"GET / HT", b"\r\n"])
async def test_a_second_head_that_does_not_come_is_not_waited_for(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection whose next head does not arrive within HEAD_S is closed, even if a request was answered before."""
    monkeypatch.setattr(http1, "HEAD_S", 0.05)
    async with serving() as (client, _):
        await client.send(GET)
        await client.until(b"\r\n\r\n")
        await client.send(begun)
        assert await client.to_the_end() == b""


async def test_half_a_head_behind_a_request_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an incomplete head follows a request, the connection is closed HEAD_S after the response."""
    monkeypatch.setattr(http1, "HEAD_S", 0.05)
    async with serving() as (client, _):
        await client.send(GET + b"GET / HT")
        assert (await client.to_the_end()).startswith(b"HTTP/1.1 200 ")


async def test_a_request_has_its_time_once_its_head_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """HEAD_S limits the arrival of each head and no more: once it is complete, the response may take longer."""
    monkeypatch.setattr(http1, "HEAD_S", 0.5)
    late = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await late.wait()
        await echo(scope, receive, send)

    async with serving(slow) as (client, _):
        for _ in range(2):
            late.clear()
            asyncio.get_running_loop().call_later(0.65, late.set)
            await client.send(GET[:20])
            for _ in range(10):  # so that the server reads the rest by itself
                await asyncio.sleep(0)
            await client.send(GET[20:])
            assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await client.send(GET[:20])
        assert await client.to_the_end() == b""


@pytest.mark.parametrize("ask", [b"connection: close\r\n", b""], ids=["closed", "failed"])
async def test_an_answer_that_nobody_reads_is_not_kept(ask: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a closing connection, what the client has not read by the read deadline is dropped, whatever closed it."""
    monkeypatch.setattr(read_deadline, "PATIENCE_S", 0.05)
    monkeypatch.setattr(read_deadline, "PACE_BYTES_PER_S", LARGE_BYTES * 100)
    async with serving(large) as (client, state):
        await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n" + ask + b"\r\n")
        await client.until(b"\r\n\r\n")
        while state.connections:
            await asyncio.sleep(0)
        assert len(await client.to_the_end()) < LARGE_BYTES


@pytest.mark.parametrize("again", [GET, b""], ids=["asked again", "resting"])
async def test_the_next_answer_does_not_wait_for_ever_for_one_before_it(
    again: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept-alive connection with an unread response ends at the read deadline, idle or with another request."""
    monkeypatch.setattr(read_deadline, "PATIENCE_S", 0.05)
    monkeypatch.setattr(read_deadline, "PACE_BYTES_PER_S", LARGE_BYTES * 100)

    async with serving(kept) as (client, state):
        await client.send(GET)
        await client.until(b"\r\n\r\n")
        await client.send(again)
        while state.connections:
            await asyncio.sleep(0)
        assert len(await client.to_the_end()) < LARGE_BYTES


async def test_a_kept_connection_whose_answers_are_read_is_kept() -> None:
    """Once a response has been read, its read deadline is cancelled and cannot end an idle or busy connection."""
    async with serving(kept) as (client, state):
        for _ in range(3):
            await client.send(GET)
            answer = await client.until(b"\r\n\r\n")
            await client.some(LARGE_BYTES - len(answer.partition(b"\r\n\r\n")[2]))
            (connection,) = state.connections
            assert isinstance(connection, http1.Http1)
            assert connection._read_deadline._timer is None


async def test_an_answer_that_is_read_at_its_pace_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response read at the required pace arrives completely, however long after the server has written all of it."""
    monkeypatch.setattr(read_deadline, "PATIENCE_S", 0.5)
    monkeypatch.setattr(read_deadline, "PACE_BYTES_PER_S", LARGE_BYTES // 10)
    turn, came = asyncio.Event(), 0
    async with serving(large) as (client, _):
        await client.send(GET[:-2] + b"connection: close\r\n\r\n")
        while came < LARGE_BYTES:
            came += len(await client.some(LARGE_BYTES // 10))
            turn.clear()
            asyncio.get_running_loop().call_later(0.15, turn.set)
            await turn.wait()


async def test_an_app_waits_for_a_client_that_reads_nothing() -> None:
    """Pieces of a response do not pile up: the app waits while the client reads nothing, and goes on once it reads."""
    count, size, sent = 1000, 1 << 16, 0

    async def pieces(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(count):
            await send({"type": "http.response.body", "body": bytes(size), "more_body": True})
            sent += 1
        await send({"type": "http.response.body", "body": b""})

    async with serving(pieces) as (client, _):
        await client.send(GET)
        await client.until(b"\r\n\r\n")
        for _ in range(100):
            await asyncio.sleep(0)
        assert sent < count / 2
        await client.some((count - 2) * size)
        while sent < count:
            await asyncio.sleep(0)


@pytest.mark.parametrize("last", [b"", b"FOO", GET[:-2] + LONG + b"\r\n\r\n"], ids=["complete", "invalid", "too long"])
async def test_a_connection_that_has_ended_is_let_go(last: bytes) -> None:
    """A connection that has ended is freed, whatever came last: nothing and no reference cycle keeps it alive."""
    gc.disable()
    try:
        async with serving() as (client, state):
            await client.send(GET)
            await client.until(b"\r\n\r\n")
            (kept,) = map(weakref.ref, state.connections)
            await client.send(last)
            if last:
                await client.to_the_end()
        async with asyncio.timeout(WITHIN_S):
            while kept() is not None:
                await asyncio.sleep(0)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "body", [b"content-length: 5\r\n\r\nhello", b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("cut", [1 << 16, 1])
async def test_an_offer_of_another_protocol_is_ignored(body: bytes, cut: int) -> None:
    """A request that offers `Upgrade` is served with its body, as are those after it, however the bytes are split."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    asked = 2 * (b"POST / HTTP/1.1\r\nhost: x\r\n" + offer + body)
    async with serving() as (client, _):
        for _ in range(2):
            for at in range(0, len(asked), cut):
                await client.send(asked[at : at + cut])
            assert (await client.until(b"hello", 2)).count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("cut", [1 << 16, 1])
@pytest.mark.parametrize("connection", [b"close, Upgrade", b"Upgrade, close"])
async def test_an_offer_with_the_last_request_is_ignored(connection: bytes, cut: int) -> None:
    """A request with both `Upgrade` and `close` is served, and then the connection is closed."""
    asked = b"POST / HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\ncontent-length: 5\r\nconnection: " + connection
    asked += b"\r\n\r\nhello"
    async with serving() as (client, _):
        for at in range(0, len(asked), cut):
            await client.send(asked[at : at + cut])
        answer = await client.to_the_end()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"hello")


@pytest.mark.parametrize("more", [GET, b"FOO", b"\r\n"])
@pytest.mark.parametrize("last", [GET[:-2] + b"connection: close\r\n\r\n", GET.replace(b"1.1", b"1.0")])
async def test_what_follows_the_last_request_is_ignored(last: bytes, more: bytes) -> None:
    """Whatever a client sends behind the request that it calls its last, that request is answered, and nothing else."""
    async with serving() as (client, _):
        await client.send(last + more)
        answer = await client.to_the_end()
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 200 ") == 1


@pytest.mark.parametrize(
    "asked",
    [
        b"FOO / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nno header\r\n\r\n",
        b"GET / HTTP/1.1\nhost: x\n\n",
        b"GET http://x HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids="method,header,line feeds,target,no host,hosts,length,coding,codings,chunk,connect".split(","),
)
async def test_what_is_no_http_is_told_in_a_problem_document(asked: bytes) -> None:
    """Invalid HTTP and transfer codings other than `chunked` are answered once, with 400 and a problem document."""
    async with serving() as (client, _):
        await client.send(asked)
        answer = await client.to_the_end()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"application/problem+json" in head
    assert (json.loads(body)["code"], answer.count(b"HTTP/1.1 ")) == ("malformed", 1)


async def test_chunks_are_taken_in_any_case() -> None:
    """The transfer coding `chunked` is recognized in any case."""
    async with serving() as (client, _):
        await client.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: Chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
        assert (await client.until(b"hello")).startswith(b"HTTP/1.1 200 ")


async def test_a_trailer_is_no_header() -> None:
    """What follows a chunked body adds nothing to the request's headers (RFC 9110, 6.5.1), though it came with them."""

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        await echo({**scope, "headers": []}, receive, ignored)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-heard", names(scope))]})
        await send({"type": "http.response.body", "body": b"."})

    def names(scope: Scope) -> bytes:
        return b" ".join(name for name, _ in scope["headers"])

    async def ignored(_: Any) -> None:
        pass

    async with serving(told) as (client, _):
        head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        for _ in range(2):
            await client.send(head + b"1\r\na\r\n0\r\nif-match: late\r\nx-paramserver-role: admin\r\n\r\n")
            assert b"x-heard: host transfer-encoding\r\n" in await client.until(b"0\r\n\r\n")


OFFER = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"


@pytest.mark.parametrize("asked", [GET, OFFER], ids=["plain", "offers"])
async def test_requests_that_wait_for_their_turn_are_bounded(asked: bytes) -> None:
    """As many pipelined requests as may wait are all served; if more come, the connection ends with their answers."""
    async with serving() as (client, _):
        for _ in range(2):
            await client.send(asked * (1 + http1.WAITING_MAX))
            answers = await client.until(b"\r\n\r\n", 1 + http1.WAITING_MAX)
            assert b"connection: close" not in answers
        await client.send(asked * (3 + http1.WAITING_MAX))
        answers = await client.to_the_end()
    assert answers.count(b"HTTP/1.1 ") == answers.count(b"HTTP/1.1 200 ") == 1 + http1.WAITING_MAX
    assert answers.partition(b"connection: close")[2] == b"\r\n\r\n"


@pytest.mark.parametrize(
    "begun",
    [
        wire.PREFACE,
        HELLO,
        HELLO + wire.frame(wire.HEADERS, 0, 1, ASKED[:2]),
        ONE_REQUEST + wire.frame(wire.HEADERS, 0, 3, ASKED[:2]),
        ONE_REQUEST + wire.head(60_000, wire.HEADERS, wire.END_HEADERS, 3),
    ],
    ids=["preface", "settings", "half a head", "half a second one", "half a frame"],
)
async def test_http2_that_does_not_go_on_is_not_kept(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An HTTP/2 connection is closed if its first head, or the rest of a later one, does not arrive within HEAD_S."""
    monkeypatch.setattr(protocol_detector, "HEAD_S", 0.05)
    async with serving() as (client, _):
        await client.send(begun)
        await client.to_the_end()


async def test_http2_that_has_asked_may_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """An HTTP/2 connection may be idle between requests for longer than HEAD_S."""
    monkeypatch.setattr(protocol_detector, "HEAD_S", 0.5)
    rested = asyncio.Event()
    async with serving() as (client, _):
        await client.send(HELLO)
        for stream in (1, 3):
            await client.send(wire.frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, stream, ASKED))
            await client.until(wire.frame(wire.DATA, wire.END_STREAM, stream))
            rested.clear()
            asyncio.get_running_loop().call_later(0.65, rested.set)
            await rested.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the options have other names elsewhere")
async def test_a_client_that_has_vanished_is_noticed() -> None:
    """TCP keep-alive is enabled: after a minute of silence the kernel probes whether the client is still there."""
    async with serving() as (client, state):
        await client.send(GET)
        await client.until(b"\r\n\r\n")
        (connection,) = state.connections
        ours = connection.transport.get_extra_info("socket")
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


async def test_a_connection_beyond_the_limit_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many connections as a node may have, another one is closed unasked, until one of them ends."""
    monkeypatch.setattr(protocol_detector, "CONNECTIONS_MAX", 1)
    async with serving() as (client, state):
        await client.send(GET)
        await client.until(b"\r\n\r\n")
        other = socket.create_connection(client.socket.getpeername())
        with other:
            other.setblocking(False)
            assert await Client(other).to_the_end() == b""
        await client.send(GET)
        await client.until(b"\r\n\r\n")
        host, port = client.socket.getpeername()
        client.socket.shutdown(socket.SHUT_RDWR)
        while state.connections:
            await asyncio.sleep(0)
        with socket.create_connection((host, port)) as later:
            later.setblocking(False)
            await Client(later).send(GET)
            await Client(later).until(b"\r\n\r\n")


async def test_who_asks_before_sending_a_body_is_refused_before_sending_it() -> None:
    """A refused request with `Expect: 100-continue` gets the refusal in place of the 100, and its connection ends."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        raise problem("too_large", "that is too much")

    asking = b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n"
    async with serving(NodeMiddleware(refuse)) as (client, _):
        await client.send(asking)
        answer = await client.to_the_end()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nconnection: close\r\n" in answer

    async with serving(NodeMiddleware(echo)) as (client, _):
        await client.send(asking)
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"hello")
        assert b"HTTP/1.1 200 OK" in await client.until(b"hello")
        await client.send(GET)
        await client.until(b"HTTP/1.1 200 OK")


async def test_who_has_sent_the_next_request_and_gone_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    """A disconnect ends the request that is being answered, also if others wait behind it; what it sends is dropped."""

    async def until_gone(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/short":
            await echo(scope, receive, send)
            return
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        await large(scope, receive, send)

    begun = asyncio.Event()
    async with serving(until_gone) as (client, _):
        await client.send(GET.replace(b"/", b"/short", 1) + GET + GET)
        await begun.wait()
        client.socket.close()
    assert not caplog.records


async def test_an_http_1_0_client_gets_no_chunks() -> None:
    """A response of unknown length to HTTP/1.0 is its plain bytes, up to the end of the connection (RFC 9112, 6.1).

    Nor does it get an interim answer, whatever it expects.
    """

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"one ", b"", b"two "):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"three"})

    async with serving(stream) as (client, _):
        await client.send(b"GET / HTTP/1.0\r\n\r\n")
        head, body = (await client.to_the_end()).split(b"\r\n\r\n", 1)
    assert b"transfer-encoding" not in head
    assert body == b"one two three"

    async with serving() as (client, _):
        await client.send(b"POST / HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\nhello")
        answer = await client.to_the_end()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-length: 5\r\n" in answer
