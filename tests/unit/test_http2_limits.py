"""What an HTTP/2 server allows its clients and what it does not, on real connections."""

import asyncio
import socket
import tracemalloc
from contextlib import AsyncExitStack, suppress

import pytest
import uvloop
from starlette.types import Receive, Scope, Send
from tests.unit.http2_connection import ASKED, Into, connected, frames_of, tell

from paramserver.wire import http2 as wire
from paramserver_node import frame_abuse, stream
from paramserver_node.http2 import FIRST_BYTES, Connection
from paramserver_node.receive_limits import CONNECTION_WINDOW_BYTES
from paramserver_node.stream import BODY, READING_WINDOW_BYTES, UNREAD_BYTES_MAX

ENDS = wire.END_HEADERS | wire.END_STREAM
OPENED = wire.frame(wire.HEADERS, wire.END_HEADERS, 1, ASKED)


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Send an empty response at once."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def taking(scope: Scope, receive: Receive, send: Send) -> None:
    """Take the body piece by piece, then send an empty response."""
    while (await receive()).get("more_body"):
        pass
    await nothing(scope, receive, send)


async def windows(connection: Connection, *numbers: int) -> list[int]:
    """Return the receive windows of the streams, once their app runs."""
    while not all(n in connection._streams and not connection._streams[n].is_new for n in numbers):
        await asyncio.sleep(0)
    return [connection._streams[n]._receive_window for n in numbers]


async def heard(theirs: socket.socket, until: int, of: int | None = None) -> tuple[int, bytes]:
    """Return (flags, payload) of the next frame of kind `until`, and of stream `of` if given."""
    scanner = wire.Scanner(1 << 14, 1 << 14)
    while data := await asyncio.get_running_loop().sock_recv(theirs, 1 << 16):
        for kind, flags, number, payload, _ in scanner.scan(memoryview(data)):
            if kind == until and of in (None, number):
                return flags, bytes(payload)
    raise AssertionError("the server has hung up")


async def code_of(theirs: socket.socket) -> int:
    """Return the error code of the server's GOAWAY."""
    return int.from_bytes((await heard(theirs, wire.GOAWAY))[1][4:8])


@pytest.mark.parametrize(
    "useless",
    [
        pytest.param(wire.u32_frame(0, wire.WINDOW_UPDATE, 1), id="a window wider by a byte"),
        pytest.param(wire.frame(wire.SETTINGS, wire.ACK, 0), id="settings taken that were never made"),
        pytest.param(wire.frame(wire.HEADERS, ENDS, 1, ASKED), id="headers of a request that is over"),
        pytest.param(wire.frame(wire.PING, 0, 0, bytes(8)), id="a ping"),
    ],
)
async def test_who_sends_only_frames_of_no_use_is_cut_off(useless: bytes) -> None:
    """A client that sends more than COUNT_MAX frames without use is disconnected with ENHANCE_YOUR_CALM."""
    async with connected(nothing) as (theirs, _):
        await tell(theirs, wire.frame(wire.HEADERS, ENDS, 1, ASKED))
        await heard(theirs, wire.HEADERS, 1)
        sending = asyncio.ensure_future(tell(theirs, useless * (frame_abuse.COUNT_MAX + 10)))
        assert await code_of(theirs) == wire.ENHANCE_YOUR_CALM
        await asyncio.gather(sending, return_exceptions=True)


def test_who_was_calm_for_long_may_not_send_more_of_them_at_once() -> None:
    """A long rest allows no more useless frames at once than at first, and one a day is allowed forever."""
    days = iter([*range(3000), *[3000] * 2 * frame_abuse.COUNT_MAX])
    counted = frame_abuse.FrameAbuseLimit(lambda: 86_400.0 * next(days))
    for _ in range(2999 + frame_abuse.COUNT_MAX):
        counted.count()
    with pytest.raises(wire.Http2Error, match="useless frames"):
        counted.count()


async def test_windows_that_the_client_widens_as_it_reads_are_no_folly() -> None:
    """WINDOW_UPDATE frames of a client that reads its responses are not counted as abuse, however many there are."""
    async with connected(nothing) as (theirs, connection):
        count = 2 * frame_abuse.COUNT_MAX
        await tell(theirs, wire.u32_frame(0, wire.WINDOW_UPDATE, 4096) * count)
        await tell(theirs, wire.frame(wire.HEADERS, ENDS, 1, ASKED))
        await heard(theirs, wire.HEADERS, 1)
        assert connection.send_window == wire.WINDOW_BYTES + 4096 * count


async def test_the_reserved_bit_of_a_window_update_is_ignored() -> None:
    """A WINDOW_UPDATE with the reserved bit set widens the window by its other 31 bits (RFC 9113, 6.9)."""
    async with connected(nothing) as (theirs, connection):
        await tell(theirs, wire.u32_frame(0, wire.WINDOW_UPDATE, 1 << 31 | 4096))
        await tell(theirs, wire.frame(wire.HEADERS, ENDS, 1, ASKED))
        await heard(theirs, wire.HEADERS, 1)
        assert connection.send_window == wire.WINDOW_BYTES + 4096


async def test_a_client_may_widen_both_windows_after_each_short_answer() -> None:
    """Widening both windows after each short response, as simple clients do, is not counted as abuse."""
    async with connected(nothing) as (theirs, _):
        wider = b""
        for n in range(1, 2 * frame_abuse.COUNT_MAX, 2):
            await tell(theirs, wider + wire.frame(wire.HEADERS, ENDS, n, ASKED))
            await heard(theirs, wire.HEADERS, n)
            wider = wire.u32_frame(0, wire.WINDOW_UPDATE, 9) + wire.u32_frame(n, wire.WINDOW_UPDATE, 9)


async def test_bodies_that_wait_unread_leave_the_others_their_window() -> None:
    """A body that is read arrives completely while unread bodies hold most of the connection's window."""
    waiting = CONNECTION_WINDOW_BYTES // UNREAD_BYTES_MAX - 1
    number, size = 2 * waiting + 1, 4 << 20
    took = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/taken":
            await took.wait()
            return
        got = 0
        while got < size:
            got += len((await receive())["body"])
        took.set()
        await nothing(scope, receive, send)

    taken = wire.encoded([(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/taken")])
    async with connected(app) as (theirs, _):
        loop = asyncio.get_running_loop()
        for i in range(waiting):
            n = 2 * i + 1
            await tell(theirs, wire.frame(wire.HEADERS, wire.END_HEADERS, n, ASKED))
            await tell(theirs, frames_of(n, bytes(UNREAD_BYTES_MAX), 64 << 10, ends=False))
        await tell(theirs, wire.frame(wire.HEADERS, wire.END_HEADERS, number, taken))
        sent, allowed = 0, {0: UNREAD_BYTES_MAX, number: UNREAD_BYTES_MAX}
        scanner = wire.Scanner(1 << 20, 1 << 20)
        while not took.is_set():
            if n := min(size - sent, *allowed.values(), 64 << 10):
                await tell(theirs, wire.frame(wire.DATA, 0, number, bytes(n)))
                sent, allowed = sent + n, {k: v - n for k, v in allowed.items()}
                continue
            if sent == size:
                await took.wait()
                break
            # `allowed` already includes the server's first update, from the default to CONNECTION_WINDOW_BYTES.
            for kind, _, of, payload, _ in scanner.scan(memoryview(await loop.sock_recv(theirs, 1 << 16))):
                by = int.from_bytes(payload)
                if kind == wire.WINDOW_UPDATE and of in allowed and by != CONNECTION_WINDOW_BYTES - wire.WINDOW_BYTES:
                    allowed[of] += by


async def test_one_body_at_a_time_may_come_far_ahead_of_its_app() -> None:
    """Of the bodies on a connection that apps read piece by piece, one at a time has the larger window.

    A body whose announced length fits into the smaller one needs no window updates, and gets none.
    """
    short = ASKED + wire.encoded([(b"content-length", b"%d" % UNREAD_BYTES_MAX)])
    async with connected(taking) as (theirs, connection):
        for number, block in ((1, short), (3, ASKED), (5, ASKED)):
            await tell(theirs, wire.frame(wire.HEADERS, wire.END_HEADERS, number, block))
        assert await windows(connection, 1, 3, 5) == [UNREAD_BYTES_MAX, READING_WINDOW_BYTES, UNREAD_BYTES_MAX]
        await tell(theirs, wire.u32_frame(3, wire.RST_STREAM, wire.CANCEL) + wire.frame(wire.DATA, 0, 5, bytes(1)))
        assert await heard(theirs, wire.WINDOW_UPDATE, 5) == (0, (READING_WINDOW_BYTES - UNREAD_BYTES_MAX).to_bytes(4))


async def test_a_server_reads_few_bodies_ahead_however_many_clients_it_has() -> None:
    """At most READ_AHEAD_MAX bodies of all connections have the larger window; one that ends leaves it to another."""
    async with AsyncExitStack() as clients:
        some = [await clients.enter_async_context(connected(taking)) for _ in range(stream.READ_AHEAD_MAX + 1)]
        found = list[int]()
        for theirs, connection in some:
            await tell(theirs, OPENED)
            found += await windows(connection, 1)
        assert found == [READING_WINDOW_BYTES] * stream.READ_AHEAD_MAX + [UNREAD_BYTES_MAX]
        await tell(some[0][0], wire.frame(wire.DATA, wire.END_STREAM, 1, b"x"))
        await heard(some[0][0], wire.HEADERS, 1)
        await tell(theirs, wire.frame(wire.DATA, 0, 1, bytes(1)))
        assert await heard(theirs, wire.WINDOW_UPDATE, 1) == (0, (READING_WINDOW_BYTES - UNREAD_BYTES_MAX).to_bytes(4))


async def test_a_body_that_was_put_into_place_leaves_the_larger_window_to_another() -> None:
    """It does so once it is complete, although its app may not answer for long: a push waits for its commit."""
    ended = asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await scope["extensions"][BODY].into(Into())
        await ended.wait()
        await nothing(scope, receive, send)

    async with connected(waits) as (theirs, connection):
        await tell(theirs, OPENED)
        assert await windows(connection, 1) == [READING_WINDOW_BYTES]
        first = connection._streams[1]
        await tell(theirs, wire.frame(wire.DATA, 0, 1, bytes(100)))
        while first._sink is None:
            await asyncio.sleep(0)
        await tell(theirs, wire.frame(wire.DATA, wire.END_STREAM, 1, bytes(100)))
        while first._sink is not None:
            await asyncio.sleep(0)
        await tell(theirs, wire.frame(wire.HEADERS, wire.END_HEADERS, 3, ASKED))
        assert await windows(connection, 3) == [READING_WINDOW_BYTES]
        ended.set()


async def test_a_client_hears_of_its_body_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose body is arriving is sent PINGs: over a slow path even replies to its own would come late.

    Megabytes may then be in flight between it and the server.
    """
    monkeypatch.setattr(stream, "PING_AFTER_S", 0.0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await scope["extensions"][BODY].into(Into())

    async with connected(app) as (theirs, _):
        await tell(theirs, OPENED)
        for _ in range(3):
            await tell(theirs, frames_of(1, bytes(100), 100, ends=False))
            assert await heard(theirs, wire.PING) == (0, bytes(8))


async def test_one_word_is_enough_for_all_bodies_of_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with many bodies in progress is sent a single PING, as many at once would look like abuse."""
    monkeypatch.setattr(stream, "PING_AFTER_S", 60.0)
    numbers = range(1, 200, 2)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await scope["extensions"][BODY].into(Into())

    async with connected(app) as (theirs, connection):
        loop = asyncio.get_running_loop()
        for n in numbers:
            await tell(theirs, wire.frame(wire.HEADERS, wire.END_HEADERS, n, ASKED))
        while len(connection._streams) < len(numbers) or any(s._sink is None for s in connection._streams.values()):
            await asyncio.sleep(0)
        for s in connection._streams.values():
            s._began_s = connection.last_body_frame_s = loop.time() - stream.PING_AFTER_S
        for n in numbers:
            await tell(theirs, wire.frame(wire.DATA, 0, n, b"a"))
        await tell(theirs, wire.frame(wire.PING, 0, 0, b"the last"))
        scanner, pings = wire.Scanner(1 << 20, 1 << 20), list[bytes]()
        while b"the last" not in pings:
            data = await loop.sock_recv(theirs, 1 << 16)
            pings += [bytes(p) for kind, _, _, p, _ in scanner.scan(memoryview(data)) if kind == wire.PING]
        assert pings == [bytes(8), b"the last"]


async def test_an_answer_ends_though_its_window_was_made_smaller_than_what_is_out() -> None:
    """A response whose window has become negative ends with an empty frame; the connection's window is unchanged."""
    smaller = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(5000), "more_body": True})
        await smaller.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with connected(app) as (theirs, connection):
        await tell(theirs, wire.frame(wire.HEADERS, ENDS, 1, ASKED))
        await heard(theirs, wire.DATA, 1)
        before = connection.send_window
        await tell(theirs, wire.settings({wire.INITIAL_WINDOW_SIZE: 1000}))
        await heard(theirs, wire.SETTINGS)
        smaller.set()
        assert await heard(theirs, wire.DATA, 1) == (wire.END_STREAM, b"")
        assert connection.send_window == before


async def test_settings_that_make_a_window_too_large_are_refused() -> None:
    """Settings that push a stream's window above the maximum are a FLOW_CONTROL_ERROR (RFC 9113, 6.9.2)."""

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    async with connected(silent) as (theirs, _):
        widened = wire.u32_frame(1, wire.WINDOW_UPDATE, wire.WINDOW_MAX - wire.WINDOW_BYTES)
        await tell(theirs, OPENED + widened + wire.settings({wire.INITIAL_WINDOW_SIZE: 1 << 20}))
        assert await code_of(theirs) == wire.FLOW_CONTROL_ERROR


async def test_a_waiting_body_takes_no_more_memory_for_coming_in_small_frames() -> None:
    """A body of one byte per frame that nobody reads yet takes little more memory than its bytes, and arrives whole."""
    wanted, size, arrived = asyncio.Event(), 50_000, bytearray()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await wanted.wait()
        while len(arrived) < size:
            arrived.extend((await receive())["body"])
        await nothing(scope, receive, send)

    body = bytes(range(250)) * (size // 250)
    async with connected(app) as (theirs, connection):
        sent = OPENED + frames_of(1, body, 1)
        tracemalloc.start()
        try:
            await tell(theirs, sent)
            while connection._receive_window > CONNECTION_WINDOW_BYTES - size:
                await asyncio.sleep(0)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        wanted.set()
        await heard(theirs, wire.HEADERS, 1)
    assert held < 2 * size
    assert arrived == body


def test_who_sends_many_small_frames_leaves_the_others_their_turn() -> None:
    """However many small frames have arrived, one read of them at most is processed before others get their turn."""

    async def run() -> tuple[int, list[int]]:
        async with connected(nothing) as (theirs, connection):
            feed, sent, turns = connection.feed, 0, [0]

            def counted(data: memoryview, *, in_place: bool = False) -> None:
                turns[-1] += len(data)
                feed(data, in_place=in_place)

            connection.feed = counted  # type: ignore[method-assign]
            small = memoryview(OPENED + frames_of(1, bytes(1000), 1, ends=False) * 40)
            with suppress(BlockingIOError):
                while sent < len(small):
                    sent += theirs.send(small[sent:])
            while sum(turns) < sent:
                turns.append(0)
                await asyncio.sleep(0)
            return sent, turns

    sent, turns = uvloop.run(run())
    assert sent > 2 * FIRST_BYTES, "there was more than one read of them"
    assert max(turns) <= FIRST_BYTES
