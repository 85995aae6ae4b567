"""Bodies read straight into the sink's memory, on a real connection whose other end is in the same process."""

import asyncio
import socket
from contextlib import suppress
from unittest.mock import Mock

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.unit.http2_connection import ASKED, BODY_BYTES, WAYS, Into, connected, frames_of, tell

from paramserver.wire import http2 as wire
from paramserver_node.http2 import DIRECT_BYTES_MIN, READ_BYTES, Connection
from paramserver_node.receive_limits import CONNECTION_WINDOW_BYTES
from paramserver_node.stream import BODY


def into(sinks: list[Into]) -> ASGIApp:
    """Return an app that receives each body into the next sink; it answers 400 if that failed, else 200."""
    waiting = iter(sinks)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            whole = await scope["extensions"][BODY].into(next(waiting))
        except ValueError:
            whole = False
        await send({"type": "http.response.start", "status": 200 if whole else 400, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return app


async def answered(theirs: socket.socket, count: int) -> list[bytes]:
    """Return the header blocks of the next `count` responses."""
    scanner, blocks = wire.Scanner(1 << 20, 1 << 16), list[bytes]()
    while len(blocks) < count:
        data = await asyncio.get_running_loop().sock_recv(theirs, 1 << 16)
        blocks += [bytes(p) for kind, _, _, p, _ in scanner.scan(memoryview(data)) if kind == wire.HEADERS]
    return blocks


async def asked(theirs: socket.socket, connection: Connection, stream: int) -> None:
    """Send a request's head and wait until the app receives its body."""
    await asyncio.get_running_loop().sock_sendall(theirs, wire.frame(wire.HEADERS, wire.END_HEADERS, stream, ASKED))
    while stream not in connection._streams or connection._streams[stream]._sink is None:
        await asyncio.sleep(0)


@pytest.mark.parametrize("frame_bytes", [DIRECT_BYTES_MIN - 1, 50_000, 1 << 20])
@pytest.mark.parametrize("piece_bytes", [1_000, 30_000, BODY_BYTES])
@pytest.mark.parametrize("threads", WAYS)
async def test_a_body_is_put_where_it_belongs(frame_bytes: int, piece_bytes: int, threads: bool) -> None:
    """A body arrives intact in its sink, however it is split; then single bytes wake the connection again.

    All windows are returned, and no view of the sink's memory is kept.
    """
    body, sink = bytes(range(251)) * (BODY_BYTES // 251) + bytes(BODY_BYTES % 251), Into()
    async with connected(into([sink]), threads=threads) as (theirs, connection):
        await asked(theirs, connection, 1)
        sent = frames_of(1, body, frame_bytes)
        for at in range(0, len(sent), piece_bytes):
            await asyncio.get_running_loop().sock_sendall(theirs, sent[at : at + piece_bytes])
        assert await answered(theirs, 1) == [wire.encoded([(b":status", b"200")])]
        assert sink.memory == body
        assert threads or (sink.direct > 0) == (frame_bytes >= DIRECT_BYTES_MIN)
        assert connection._receive_window + connection._used == CONNECTION_WINDOW_BYTES
        assert connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        while sink.memory:
            with suppress(BufferError):  # a thread releases its view a moment later
                sink.memory.clear()  # fails forever if the connection still has a view of it
            await asyncio.sleep(0)


@pytest.mark.parametrize("threads", WAYS)
async def test_a_body_whose_memory_is_there_may_come_whole(threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows are widened at once to all that is to come of a body, as there is memory for it."""
    size = CONNECTION_WINDOW_BYTES + (1 << 20)
    monkeypatch.setattr("tests.unit.http2_connection.BODY_BYTES", size)
    async with connected(into([Into()]), threads=threads) as (theirs, connection):
        await asked(theirs, connection, 1)
        assert (connection._receive_window, connection._streams[1]._receive_window) == (size, size)
        await asyncio.get_running_loop().sock_sendall(theirs, frames_of(1, bytes(size), 1 << 20))
        assert await answered(theirs, 1) == [wire.encoded([(b":status", b"200")])]
        assert connection._receive_window + connection._used == CONNECTION_WINDOW_BYTES


@pytest.mark.parametrize("threads", WAYS)
async def test_other_frames_may_come_in_the_middle_of_a_body(threads: bool) -> None:
    """A PING and the frames of another body may come in the middle of a body; both bodies arrive intact."""
    body, sinks = bytes(range(251)) * (BODY_BYTES // 251) + bytes(BODY_BYTES % 251), [Into(), Into()]
    async with connected(into(sinks), threads=threads) as (theirs, connection):
        frame_bytes = 500_000
        await asked(theirs, connection, 1)
        await tell(theirs, frames_of(1, body, frame_bytes)[: 2 * (frame_bytes + wire.HEAD_BYTES)])
        await tell(theirs, wire.frame(wire.PING, 0, 0, b"how now?"))
        await asked(theirs, connection, 3)
        await tell(theirs, frames_of(3, body[::-1], frame_bytes))
        await tell(theirs, frames_of(1, body, frame_bytes)[2 * (frame_bytes + wire.HEAD_BYTES) :])
        assert await answered(theirs, 2) == [wire.encoded([(b":status", b"200")])] * 2
        assert [s.memory for s in sinks] == [body, body[::-1]]
        assert connection._receive_window + connection._used == CONNECTION_WINDOW_BYTES


@pytest.mark.parametrize("threads", WAYS)
async def test_a_body_that_nobody_wants_any_more_holds_up_nothing(threads: bool) -> None:
    """After a body that its app refuses or its client cancels halfway, the next request on the connection is served."""
    body, last = bytes(BODY_BYTES), Into()
    async with connected(into([Into(refuses_at=READ_BYTES), Into(), last]), threads=threads) as (theirs, connection):
        await asked(theirs, connection, 1)
        await tell(theirs, frames_of(1, body, 1 << 20))
        await asked(theirs, connection, 3)
        await tell(theirs, frames_of(3, body, 1 << 20)[: -(1 << 20) - wire.HEAD_BYTES])
        await tell(theirs, wire.u32_frame(3, wire.RST_STREAM, 8))
        await asked(theirs, connection, 5)
        await tell(theirs, frames_of(5, body, 1 << 20))
        assert [wire.encoded([(b":status", s)]) for s in (b"400", b"200")] == await answered(theirs, 2)
        assert last.at == BODY_BYTES
        assert connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


@pytest.mark.parametrize("threads", WAYS)
async def test_a_body_may_end_with_an_empty_frame_before_its_place_is_full(threads: bool) -> None:
    """A body shorter than its place ends with an empty DATA frame that has END_STREAM; nothing more need come."""
    sink = Into()
    async with connected(into([sink]), threads=threads) as (theirs, connection), asyncio.timeout(10.0):
        await asked(theirs, connection, 1)
        await tell(theirs, frames_of(1, bytes(BODY_BYTES - 1), 1 << 20, ends=False))
        await tell(theirs, wire.frame(wire.DATA, wire.END_STREAM, 1))
        assert await answered(theirs, 1) == [wire.encoded([(b":status", b"200")])]
        assert sink.at == BODY_BYTES - 1


async def test_what_follows_the_end_of_a_body_is_not_taken_for_it() -> None:
    """DATA after END_STREAM closes the connection and is not added to the body, even before the app sees the end."""
    sink = Into()
    async with connected(into([sink])) as (theirs, connection):
        await asked(theirs, connection, 1)
        for flags in (wire.END_STREAM, 0):
            for piece in (wire.head(50_000, wire.DATA, flags, 1), bytes(50_000)):
                connection.get_buffer(-1)[: len(piece)] = piece
                connection.buffer_updated(len(piece))
        assert connection._over
        assert sink.at == 50_000


async def test_short_answers_to_several_go_together_and_none_is_lost_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Short responses queued in a loop iteration share a write, before a shutdown closes the connection."""
    async with connected(into([Into() for _ in range(9)])) as (theirs, connection):
        for stream in range(1, 19, 2):
            await asked(theirs, connection, stream)
        bodies = b"".join(frames_of(stream, b"x", 1) for stream in range(5, 19, 2))
        given_up = b"".join(wire.u32_frame(stream, wire.RST_STREAM, wire.CANCEL) for stream in (1, 3))
        connection.feed(memoryview(bodies + given_up))
        connection.shutdown()
        write = Mock(wraps=connection.transport.write)
        monkeypatch.setattr(connection.transport, "write", write)
        assert await answered(theirs, 7) == [wire.encoded([(b":status", b"200")])] * 7
        assert write.call_count == 1
        assert await asyncio.get_running_loop().sock_recv(theirs, 1) == b""
