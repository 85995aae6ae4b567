"""Large bodies moved by transfer threads, while other things happen on their connections."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
from starlette.types import Receive, Scope, Send
from tests.unit.http2_connection import ASKED, BODY_BYTES, LINUX, Into, connected, frames_of, tell

from paramserver.kernels import sockets
from paramserver.wire import http2 as wire
from paramserver_node.http2 import Connection
from paramserver_node.lent_socket import LentSocket
from paramserver_node.server import serve_unix
from paramserver_node.stream import BODY, TRANSFER_BYTES_MAX
from paramserver_node.transfer_threads import ALTERNATION_S, TransferThreads

pytestmark = LINUX

ANSWER = bytes(range(251)) * (TRANSFER_BYTES_MAX // 200)
"""Larger than one transfer, and than a socket's send buffer."""
TAKEN = wire.encoded([(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/taken")])
SMALL = wire.encoded([(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/small")])


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Send a small response, or a large one in uneven pieces."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/small":
        await send({"type": "http.response.body", "body": b"small"})
        return
    pieces = [memoryview(ANSWER)[a:b] for a, b in ((0, 10), (10, 5_000_000), (5_000_000, len(ANSWER)))]
    left = await scope["extensions"][BODY].send_rest(pieces)
    for i, piece in enumerate(left):
        await send({"type": "http.response.body", "body": piece, "more_body": i + 1 < len(left)})


class Client:
    """A client on a plain socket; it collects the response bodies by stream."""

    def __init__(self, theirs: socket.socket) -> None:
        self.theirs = theirs
        self.bodies: dict[int, bytearray] = {}
        self.ended: set[int] = set()
        self._scanner = wire.Scanner(1 << 24, 1 << 16)

    async def greet(self, window: int = wire.WINDOW_MAX) -> None:
        """Grant `window` bytes to each response, and 1 GiB more to the connection."""
        sent = wire.settings({wire.INITIAL_WINDOW_SIZE: window, wire.MAX_FRAME_SIZE: 1 << 20})
        await asyncio.get_running_loop().sock_sendall(
            self.theirs, sent + wire.u32_frame(0, wire.WINDOW_UPDATE, 1 << 30)
        )

    async def ask(self, *blocks: tuple[int, bytes]) -> None:
        """Send requests without bodies, each a stream and a header block."""
        sent = b""
        for stream, block in blocks:
            sent += wire.frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, stream, block)
        await asyncio.get_running_loop().sock_sendall(self.theirs, sent)

    async def read(self, ends: Iterable[int]) -> None:
        """Read until these streams have ended."""
        while not self.ended >= set(ends):
            data = await asyncio.get_running_loop().sock_recv(self.theirs, 1 << 18)
            assert data
            for kind, flags, stream, payload, _ in self._scanner.scan(memoryview(data)):
                if kind == wire.DATA:
                    self.bodies.setdefault(stream, bytearray()).extend(payload)
                    if flags & wire.END_STREAM:
                        self.ended.add(stream)


async def until(connection: Connection, *, writes: bool) -> None:
    """Wait until a thread is writing, or none is."""
    while connection._lent.writes != writes:
        await asyncio.sleep(0)


@asynccontextmanager
async def answering(window: int = wire.WINDOW_MAX) -> AsyncIterator[tuple[Client, Connection]]:
    """Yield a client whose response a thread has begun to write, and the server's connection."""
    async with connected(app, threads=True) as (theirs, connection):
        client = Client(theirs)
        await client.greet(window)
        await client.ask((1, ASKED))
        await until(connection, writes=True)
        yield client, connection


async def test_an_answer_arrives_whole_and_small_ones_beside_it() -> None:
    """Two large and two small responses on one connection all arrive intact."""
    async with connected(app, threads=True) as (theirs, connection):
        client = Client(theirs)
        await client.greet()
        await client.ask((1, ASKED), (3, SMALL), (5, ASKED), (7, SMALL))
        await client.read([1, 3, 5, 7])
        assert client.bodies == {1: ANSWER, 3: b"small", 5: ANSWER, 7: b"small"}
        assert connection.send_window == wire.WINDOW_BYTES + (1 << 30) - 2 * len(ANSWER) - 10


async def test_the_event_loop_ends_what_a_slow_client_left() -> None:
    """The event loop finishes what a thread stopped writing to a slow client; no byte is lost or sent twice."""
    async with answering() as (client, connection):
        await client.ask((3, SMALL))
        await until(connection, writes=False)
        await client.read([1, 3])
        assert client.bodies == {1: ANSWER, 3: b"small"}


async def test_an_answer_keeps_to_the_window_of_its_client() -> None:
    """Neither a thread nor the event loop sends more of a response than the client's window allows."""
    async with answering(window=3_000_000) as (client, connection):
        await until(connection, writes=False)
        while connection._streams[1].send_window:
            await asyncio.sleep(0)
        await asyncio.get_running_loop().sock_sendall(client.theirs, wire.u32_frame(1, wire.WINDOW_UPDATE, len(ANSWER)))
        await client.read([1])
        assert client.bodies == {1: ANSWER}


async def test_a_client_that_gives_up_or_hangs_up_is_written_to_no_more() -> None:
    """A response stops when the client resets its stream, and a writing thread stops when the client disconnects."""
    async with answering() as (client, connection):
        sent = wire.u32_frame(1, wire.RST_STREAM, wire.CANCEL)
        await asyncio.get_running_loop().sock_sendall(client.theirs, sent)
        await client.ask((3, SMALL))
        await client.read([3])
        assert len(client.bodies[1]) < len(ANSWER)
        await client.ask((5, ASKED))
        await until(connection, writes=True)
        client.theirs.close()
        await until(connection, writes=False)
    assert connection._lent._socket is not None
    assert connection._lent._socket.fileno() == -1


async def test_a_body_that_comes_while_an_answer_is_written_has_a_thread_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A body that begins to arrive while a thread writes a response is later received by a thread.

    The client may send the rest before the event loop knows that the response is out.
    """
    transfers, sinks, body = Mock(side_effect=sockets.receive), [], bytes(range(256)) * (BODY_BYTES >> 8)

    async def answers_or_takes(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/taken":
            sinks.append(Into())
            await scope["extensions"][BODY].into(sinks[0])
            scope["path"] = "/small"
        await app(scope, receive, send)

    monkeypatch.setattr(sockets, "receive", transfers)
    async with connected(answers_or_takes, threads=True) as (theirs, connection):
        client = Client(theirs)
        await client.greet()
        await client.ask((1, ASKED))
        await until(connection, writes=True)
        first, rest = body[: 1 << 18], body[1 << 18 :]
        begun = wire.frame(wire.HEADERS, wire.END_HEADERS, 3, TAKEN) + frames_of(3, first, 1 << 18, ends=False)
        await tell(theirs, begun)
        while not sinks:
            await asyncio.sleep(0)
        await client.read([1])
        await tell(theirs, frames_of(3, rest, 1 << 20))
        await client.read([3])
    assert transfers.called
    assert client.bodies == {1: ANSWER, 3: b"small"}
    assert sinks[0].memory == body


@pytest.mark.parametrize("direction", ["send", "receive"])
async def test_a_transfer_that_fails_ends_its_connection(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer thread that raises closes its connection at once, as its progress is unknown."""

    def broken(*_: Any) -> NoReturn:
        raise MemoryError("planted")

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        if direction == "receive":
            await scope["extensions"][BODY].into(Into())
        await app(scope, receive, send)

    monkeypatch.setattr(sockets, direction, broken)
    loop, body = asyncio.get_running_loop(), bytes(BODY_BYTES if direction == "receive" else 1)
    async with connected(both, threads=True) as (theirs, connection):
        client = Client(theirs)
        await client.greet()
        sent = wire.frame(wire.HEADERS, wire.END_HEADERS, 1, ASKED) + frames_of(1, body, 1 << 20)
        with suppress(ConnectionError):
            await tell(theirs, sent)
            while await loop.sock_recv(theirs, 1 << 16):
                pass
        assert connection.transport.is_closing()
        assert not connection._lent.reads
        assert not connection._lent.writes


def test_why_a_socket_cannot_be_lent_is_logged_as_the_system_says_it(caplog: pytest.LogCaptureFixture) -> None:
    """If a socket cannot be duplicated for a thread, the log gives the system's reason."""
    lent = LentSocket(Mock(), -1, lambda: None)

    assert not lent.write([], lambda _: None)
    assert [r.getMessage() for r in caplog.records] == ["http2.no_thread reason=[Errno 9] Bad file descriptor"]


async def test_threads_move_bodies_while_several_connections_ask_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are used only for a while after requests have alternated between connections, never for a single one."""
    loop, threads = asyncio.get_running_loop(), TransferThreads()
    time_s = [100.0]
    monkeypatch.setattr(threads, "_loop", Mock(wraps=loop, time=lambda: time_s[0]))
    taken: list[bool] = []

    def asks(by: int, after_s: float) -> None:
        time_s[0] += after_s
        threads.note_request(by)
        taken.append(threads.send(-1, [], lambda _: None))  # no data, to no socket

    asks(3, 0.0)
    asks(3, ALTERNATION_S)
    asks(4, 0.0)
    asks(4, ALTERNATION_S / 2)
    asks(3, ALTERNATION_S / 4)
    asks(3, ALTERNATION_S)
    while threads._in_progress:
        await asyncio.sleep(0)
    threads.close()
    assert taken == [False, False, True, True, True, False]


async def test_who_asks_over_a_unix_socket_is_one_of_several(tmp_path: Path) -> None:
    """A request over a Unix socket is noted as one of several connections, though no thread moves its bodies.

    Its small calls, too, would wait for the large bodies of other connections.
    """
    loop, stop, threads = asyncio.get_running_loop(), asyncio.Event(), Mock()
    serving = asyncio.create_task(
        serve_unix(app, str(tmp_path / "socket"), stop, grace_s=5.0, transfer_threads=threads)
    )
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.setblocking(False)
        while not (tmp_path / "socket").exists():
            await asyncio.sleep(0)
        await loop.sock_connect(theirs, str(tmp_path / "socket"))
        await tell(theirs, wire.PREFACE)
        client = Client(theirs)
        await client.greet()
        await client.ask((1, SMALL))
        await client.read([1])
    stop.set()
    await serving
    assert threads.note_request.called
    assert not threads.send.called
