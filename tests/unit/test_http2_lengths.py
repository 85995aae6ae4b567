"""The body length that an HTTP/2 request announces, which must be true (RFC 9113, 8.1.1) but may be missing."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from types import SimpleNamespace

import pytest
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.unit.http2_connection import ASKED, BODY_BYTES, WAYS, Into, connected, frames_of, tell

from paramserver.errors import PsError
from paramserver.wire import http2 as wire
from paramserver.wire.frame import PushFrame, PushPart, encode_header
from paramserver_node.in_flight import InFlight
from paramserver_node.middleware import NodeMiddleware
from paramserver_node.receive_limits import CONNECTION_WINDOW_BYTES
from paramserver_node.stream import BODY
from paramserver_scheduler import bodies
from paramserver_scheduler.large_bodies import LargeBodies
from paramserver_scheduler.requests import read_optional
from paramserver_shard.buffers import BufferPool
from paramserver_shard.receiving import Body, FrameReader

Read = Callable[[Scope, Receive], Coroutine[None, None, bool]]


async def by_message(_: Scope, receive: Receive) -> bool:
    """Read the body as ASGI messages; return whether it ended, as opposed to a disconnect."""
    while (message := await receive())["type"] != "http.disconnect":
        if not message["more_body"]:
            return True
    return False


async def whole(scope: Scope, receive: Receive) -> bool:
    """Take the body whole if all of it has arrived, else read it as messages."""
    return scope["extensions"][BODY].whole() is not None or await by_message(scope, receive)


async def to_its_place(scope: Scope, _: Receive) -> bool:
    """Receive the body into a sink as it arrives."""
    ended: bool = await scope["extensions"][BODY].into(Into())
    return ended


READS = pytest.mark.parametrize("read", [by_message, whole, to_its_place])


def applying(read: Read, applied: list[str]) -> ASGIApp:
    """Return an app that reads each body and, if it ended, records its path in `applied`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if not await read(scope, receive):
            return
        applied.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return NodeMiddleware(app)


def head(number: int, length: int, path: bytes, flags: int = 0) -> bytes:
    """Return the head of a request that announces the length of its body."""
    said = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b"content-length", b"%d" % length)]
    return wire.frame(wire.HEADERS, wire.END_HEADERS | flags, number, wire.encoded(said))


async def ends_of(theirs: socket.socket, number: int) -> list[tuple[int, int]]:
    """Return (stream, error code, or 0 for a response) of each request that ends, until `number` has."""
    scanner, ended = wire.Scanner(1 << 20, 1 << 20), list[tuple[int, int]]()
    while all(n != number for n, _ in ended):
        data = await asyncio.get_running_loop().sock_recv(theirs, 1 << 16)
        assert data, "the server has hung up"
        for kind, flags, n, payload, _ in scanner.scan(memoryview(data)):
            if kind == wire.RST_STREAM:
                ended.append((n, wire.parse_u32(payload)))
            elif n and flags & wire.END_STREAM:
                ended.append((n, 0))
    return ended


@READS
@pytest.mark.parametrize("threads", WAYS)
@pytest.mark.parametrize(
    ("said", "size"), [(BODY_BYTES - 7, BODY_BYTES), (BODY_BYTES + 7, BODY_BYTES), (7, 100), (107, 100), (7, 0), (0, 7)]
)
async def test_a_body_that_is_not_as_long_as_its_head_says_is_never_whole(
    read: Read, threads: bool, said: int, size: int
) -> None:
    """A body with more or fewer bytes than announced resets its stream, and is not applied, however it is read.

    The next request on the connection is served.
    """
    applied: list[str] = []
    async with connected(applying(read, applied), threads=threads) as (theirs, connection):
        loop = asyncio.get_running_loop()
        begun = head(1, said, b"/lie", 0 if size else wire.END_STREAM)
        sending = loop.create_task(send(theirs, begun + frames_of(1, bytes(size), 1 << 14)))
        assert await ends_of(theirs, 1) == [(1, wire.PROTOCOL_ERROR)]
        await sending
        await tell(theirs, head(3, 3, b"/true") + frames_of(3, b"abc", 2))
        assert await ends_of(theirs, 3) == [(3, 0)]
        assert applied == ["/true"]
        assert connection._receive_window + connection._used == CONNECTION_WINDOW_BYTES


@pytest.mark.parametrize("size", [96, 100, 104])
async def test_a_frame_whose_body_has_another_length_is_refused_once_it_is_here(size: int) -> None:
    """A frame without content-length is refused at its end if its body is not of the length that its header gives.

    The header gives 100 bytes, which come in two pieces.
    """

    async def app(scope: Scope, receive: Receive, answer: Send) -> None:
        async def sized(frame: PushFrame) -> tuple[PushFrame, Body]:
            return frame, Body((100,))

        status = 200
        with InFlight(1 << 30).request("") as scope["state"]["account"]:
            try:
                await FrameReader(BufferPool()).read(scope, receive, PushFrame, sized)
            except PsError as error:
                status = error.status
        said.append(status)
        await answer({"type": "http.response.start", "status": status, "headers": []})
        await answer({"type": "http.response.body", "body": b""})

    said: list[int] = []
    begun = encode_header(PushFrame("m", [PushPart(0, None, None)])) + bytes(10)
    async with connected(app) as (theirs, _), asyncio.timeout(20.0):
        await send(theirs, wire.frame(wire.HEADERS, wire.END_HEADERS, 1, ASKED) + wire.frame(wire.DATA, 0, 1, begun))
        await send(theirs, head(3, 0, b"/", wire.END_STREAM))
        assert await ends_of(theirs, 3) == [(3, 0)]  # so the first request is being read by now
        await send(theirs, wire.frame(wire.DATA, wire.END_STREAM, 1, bytes(size - 10)))
        assert await ends_of(theirs, 1) == [(1, 0)]
    assert said == [400, 200 if size == 100 else 400]


async def send(theirs: socket.socket, data: bytes) -> None:
    """Send these bytes."""
    await asyncio.get_running_loop().sock_sendall(theirs, data)


@READS
async def test_a_body_has_not_ended_before_its_last_frame(read: Read) -> None:
    """A body ends only with its last frame: one byte after all that were announced still resets its stream."""
    applied: list[str] = []
    async with connected(applying(read, applied)) as (theirs, _):
        await tell(theirs, head(1, 5, b"/lie") + wire.frame(wire.DATA, 0, 1, b"hello"))
        await tell(theirs, head(3, 0, b"/true", wire.END_STREAM))
        assert await ends_of(theirs, 3) == [(3, 0)]  # so the app has read all of the first that has arrived
        await tell(theirs, wire.frame(wire.DATA, wire.END_STREAM, 1, b"!"))
        assert await ends_of(theirs, 1) == [(1, wire.PROTOCOL_ERROR)]
        assert applied == ["/true"]


@READS
async def test_trailers_end_a_body_too(read: Read) -> None:
    """A body that trailers end before its announced length resets its stream."""
    applied: list[str] = []
    trailers = wire.frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, 1, wire.encoded([(b"x", b"y")]))
    async with connected(applying(read, applied)) as (theirs, _):
        await send(theirs, head(1, 6, b"/lie") + wire.frame(wire.DATA, 0, 1, b"hello") + trailers)
        assert await ends_of(theirs, 1) == [(1, wire.PROTOCOL_ERROR)]
        assert not applied


@READS
async def test_what_still_comes_of_a_refused_body_is_dropped(read: Read) -> None:
    """Data that still arrives for a refused body is dropped: it completes nothing, and its window is returned.

    The client cannot know of the refusal yet.
    """
    applied: list[str] = []
    async with connected(applying(read, applied)) as (theirs, connection):
        late = [wire.frame(wire.DATA, flags, 1, bytes(100)) for flags in (0, 0, wire.END_STREAM)]
        await send(theirs, head(1, 150, b"/lie") + b"".join(late) + wire.frame(wire.HEADERS, 5, 3, ASKED))
        await ends_of(theirs, 3)
        assert "/lie" not in applied
        assert connection._receive_window + connection._used == CONNECTION_WINDOW_BYTES


@READS
async def test_a_body_that_was_cut_before_it_was_read_is_never_whole(read: Read) -> None:
    """A whole body whose client cancels the request before the app reads it is a disconnect, not an empty body."""
    applied: list[str] = []
    cancelled = asyncio.Event()
    reading = applying(read, applied)

    async def busy(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/left":
            await cancelled.wait()
        await reading(scope, receive, send)

    async with connected(busy) as (theirs, _):
        begun = head(1, 5, b"/left") + frames_of(1, b"hello", 5)
        reset = wire.u32_frame(1, wire.RST_STREAM, wire.CANCEL)
        await tell(theirs, begun + reset + head(3, 3, b"/true") + frames_of(3, b"abc", 3))
        assert await ends_of(theirs, 3) == [(3, 0)]
        cancelled.set()
    assert applied == ["/true"]


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        ([wire.frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, 1, ASKED)], None),
        ([wire.frame(wire.HEADERS, wire.END_HEADERS, 1, ASKED), wire.frame(wire.DATA, wire.END_STREAM, 1)], None),
        ([wire.frame(wire.HEADERS, wire.END_HEADERS, 1, ASKED), frames_of(1, b'{"name": "best"}', 9)], "best"),
        ([head(1, 16, b"/"), frames_of(1, b'{"name": "best"}', 9)], "best"),
    ],
    ids=["none", "empty", "unannounced", "announced"],
)
async def test_an_optional_body_that_nobody_has_announced_is_read(frames: list[bytes], name: str | None) -> None:
    """An optional body is read whether or not its length is announced, so the request is not taken for one without."""
    read: list[str | None] = []

    async def app(scope: Scope, receive: Receive, answer: Send) -> None:
        scope["app"] = SimpleNamespace(state=SimpleNamespace(service=SimpleNamespace(large_bodies=LargeBodies())))
        read.append((await read_optional(Request(scope, receive), bodies.Checkpoint)).name)
        await answer({"type": "http.response.start", "status": 200, "headers": []})
        await answer({"type": "http.response.body", "body": b""})

    async with connected(NodeMiddleware(app)) as (theirs, _):
        await send(theirs, b"".join(frames))
        assert await ends_of(theirs, 1) == [(1, 0)]
        assert read == [name]
