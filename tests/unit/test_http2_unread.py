"""Responses that a client does not read, on a real connection whose other end is in the same process."""

import asyncio
import functools
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.unit.http2_connection import tell
from uvicorn.config import Config
from uvicorn.server import ServerState

from paramserver.wire import http2 as wire
from paramserver_node import frame_abuse, http2, read_deadline
from paramserver_node.http2 import STREAMS_MAX, UNSENT_BYTES_MAX, Connection

ANSWER = bytes(100_000)
ENDS = wire.END_HEADERS | wire.END_STREAM
ASKED = wire.encoded([(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/")])


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the event loop of every node; before 3.13.2, that of asyncio sets `writelines` no bound."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        uvloop.run(test(*args, **kwargs))

    return run


async def connected(app: ASGIApp) -> tuple[socket.socket, asyncio.Transport, Connection]:
    """Connect a client to a node that runs `app`: the client's end, and the node's transport and connection."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    loop, config = asyncio.get_running_loop(), Config(app, log_config=None)
    config.load()
    return theirs, *(await loop.create_connection(lambda: Connection(config, ServerState(), {}), sock=ours))


@on_uvloop
async def test_who_asks_and_does_not_read_is_answered_so_far_and_no_further() -> None:
    """If a client sends requests but reads nothing, only a bounded number is started and a bounded size buffered."""
    begun: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(1)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": ANSWER})

    theirs, transport, connection = await connected(app)
    with theirs:
        await tell(theirs, wire.settings({wire.INITIAL_WINDOW_SIZE: wire.WINDOW_MAX}))
        await tell(theirs, wire.u32_frame(0, wire.WINDOW_UPDATE, 1 << 30))
        for i in range(1, 2 * 600, 2):
            await tell(theirs, wire.frame(wire.HEADERS, ENDS, i, ASKED))
        while connection._newest < 2 * 600 - 1:
            await asyncio.sleep(0)
        assert STREAMS_MAX <= len(begun) < 600
        assert UNSENT_BYTES_MAX < transport.get_write_buffer_size() < 2 * UNSENT_BYTES_MAX
        transport.abort()
        while connection._running:
            await asyncio.sleep(0)


@pytest.mark.parametrize("reads", [False, True])
@on_uvloop
async def test_an_answer_that_nobody_reads_ends_its_connection(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unread response ends its connection even if the app is done with it; a client that has read it may be idle."""
    monkeypatch.setattr(read_deadline, "PATIENCE_S", 0.5)
    monkeypatch.setattr(read_deadline, "PACE_BYTES_PER_S", 1 << 40)
    size = 4 * len(ANSWER)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(size)})

    theirs, transport, connection = await connected(app)
    with theirs:
        widened = wire.settings({wire.INITIAL_WINDOW_SIZE: size}) + wire.u32_frame(0, wire.WINDOW_UPDATE, size)
        await tell(theirs, widened + wire.frame(wire.HEADERS, ENDS, 1, ASKED))
        while not connection._newest or connection._running:
            await asyncio.sleep(0)
        assert transport.get_write_buffer_size()
        while reads and transport.get_write_buffer_size():
            await asyncio.get_running_loop().sock_recv(theirs, 1 << 20)
        while not transport.is_closing() and connection._read_deadline._timer is not None:
            await asyncio.sleep(0)
        assert transport.is_closing() is not reads
        transport.abort()


@on_uvloop
async def test_a_request_that_fails_beside_an_answer_in_progress_ends_alone() -> None:
    """A stream that breaks off is reset; the connection goes on, though its send buffer is full at that moment."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/bad":
            raise RuntimeError("it breaks off")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(2 * UNSENT_BYTES_MAX)})

    theirs, transport, connection = await connected(app)
    with theirs:
        size = 4 * UNSENT_BYTES_MAX
        widened = wire.settings({wire.INITIAL_WINDOW_SIZE: size}) + wire.u32_frame(0, wire.WINDOW_UPDATE, size)
        await tell(theirs, widened + wire.frame(wire.HEADERS, ENDS, 1, ASKED))
        while connection.writable:
            await asyncio.sleep(0)
        bad = wire.encoded([(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/bad")])
        await tell(theirs, wire.frame(wire.HEADERS, ENDS, 3, bad))
        while not transport.is_closing() and (connection._newest < 3 or 3 in connection._streams):
            await asyncio.sleep(0)
        assert not transport.is_closing()
        transport.abort()
        while connection._running:
            await asyncio.sleep(0)


@on_uvloop
async def test_the_path_of_a_request_that_fails_adds_no_line_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The path of a request whose app has failed is logged percent-encoded, so a line end in it forges no entry."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("it breaks off")

    caplog.set_level("DEBUG", logger="paramserver.node")
    theirs, transport, connection = await connected(app)
    with theirs:
        asked = wire.encoded([(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/a%0Ab")])
        await tell(theirs, wire.settings({}) + wire.frame(wire.HEADERS, ENDS, 1, asked))
        while not connection._newest or connection._running:
            await asyncio.sleep(0)
        transport.abort()
    assert [r.getMessage() for r in caplog.records if "http2.broken" in r.getMessage()] == ["http2.broken path=/a%0Ab"]


@on_uvloop
async def test_pings_whose_answers_nobody_reads_end_their_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends what is answered at once, and reads nothing, is disconnected before much is kept for it."""
    monkeypatch.setattr(read_deadline, "PATIENCE_S", 0.02)
    monkeypatch.setattr(read_deadline, "PACE_BYTES_PER_S", 1 << 40)
    monkeypatch.setattr(frame_abuse, "COUNT_MAX", 1 << 40)
    monkeypatch.setattr(http2, "UNSENT_BYTES_MAX", 1000)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("there is no request")

    theirs, transport, _ = await connected(app)
    with theirs:
        await tell(theirs, wire.settings({}))
        with suppress(ConnectionError):
            async with asyncio.timeout(20.0):
                while not transport.is_closing():
                    await tell(theirs, wire.frame(wire.PING, 0, 0, bytes(8)) * 100)
        assert transport.is_closing()


@on_uvloop
async def test_an_answer_that_is_being_read_is_not_taken_for_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection stays open while its long response is being read, though bytes are left unread all the time."""
    monkeypatch.setattr(read_deadline, "PATIENCE_S", 1.0)
    monkeypatch.setattr(read_deadline, "PACE_BYTES_PER_S", 1 << 40)
    checked = asyncio.Event()
    check = read_deadline.ReadDeadline._check

    def told(self: read_deadline.ReadDeadline, *when: Any) -> None:
        check(self, *when)
        checked.set()

    monkeypatch.setattr(read_deadline.ReadDeadline, "_check", told)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while scope["path"] == "/long" and not checked.is_set():
            await send({"type": "http.response.body", "body": ANSWER, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    theirs, transport, connection = await connected(app)
    long = wire.encoded([(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/long")])
    with theirs:
        widened = wire.settings({wire.INITIAL_WINDOW_SIZE: wire.WINDOW_MAX}) + wire.u32_frame(
            0, wire.WINDOW_UPDATE, 1 << 30
        )
        await tell(theirs, widened + wire.frame(wire.HEADERS, ENDS, 1, long))
        while connection.writable:
            await asyncio.sleep(0)
        await tell(theirs, wire.frame(wire.HEADERS, ENDS, 3, ASKED))
        while len(connection._streams) < 2:
            await asyncio.sleep(0)
        scanner, ended = wire.Scanner(1 << 20, 1 << 20), set[int]()
        while ended != {1, 3}:
            await asyncio.sleep(0)  # lets the server write after each piece, so that its buffer never runs empty
            data = await asyncio.get_running_loop().sock_recv(theirs, 16 << 10)
            assert data, "the server has hung up"
            ended |= {n for _, flags, n, _, _ in scanner.scan(memoryview(data)) if n and flags & wire.END_STREAM}
        assert checked.is_set()
        transport.abort()
        while connection._running:
            await asyncio.sleep(0)
