"""What HTTP/2 clients and servers of other makes rely on, and ours need not, on real connections."""

import asyncio

import hpack
import pytest
from starlette.types import Message, Receive, Scope, Send
from tests.unit.http2_connection import ASKED, connected, tell
from tests.unit.scripted_server import OK, Kind, Peer, Server, both_clients
from tests.unit.test_http2_limits import heard, nothing

from paramserver.errors import InDoubt, PsError, problem
from paramserver.net.calls import Response
from paramserver.wire import http2 as wire
from paramserver.wire.tcp import unacknowledged_bytes
from paramserver_node.frame_abuse import COUNT_MAX, FrameAbuseLimit
from paramserver_node.middleware import NodeMiddleware

ENDS = wire.END_HEADERS | wire.END_STREAM
NO_TABLE = wire.settings({wire.HEADER_TABLE_SIZE: 0})


def strict() -> hpack.Decoder:
    """A decoder whose table was made smaller, and that insists on being told that this is kept to."""
    decoder = hpack.Decoder()
    decoder.max_allowed_table_size = 0
    return decoder


async def test_a_client_without_a_table_of_headers_is_told_that_none_is_used() -> None:
    """Answers to a client that has lowered SETTINGS_HEADER_TABLE_SIZE begin with the new size (RFC 9113, 4.3.1)."""
    async with connected(nothing) as (theirs, _):
        decoder = strict()
        await tell(theirs, NO_TABLE)
        for number in (1, 3):
            await tell(theirs, wire.frame(wire.HEADERS, ENDS, number, ASKED))
            _, block = await heard(theirs, wire.HEADERS, number)
            assert (b":status", b"200") in list(decoder.decode(block, raw=True))


@both_clients
def test_a_server_without_a_table_of_headers_is_told_that_none_is_used(kind: Kind) -> None:
    """Requests to a server that has lowered SETTINGS_HEADER_TABLE_SIZE begin with the new size, once it is known."""

    def script(peer: Peer) -> None:
        peer.send(NO_TABLE + peer.answer(peer.until(wire.HEADERS), b""))
        peer.send(peer.answer(peer.until(wire.HEADERS), b""))
        blocks = [payload for kind, _, _, payload in peer.seen if kind == wire.HEADERS]
        assert (b":path", b"/p") in list(strict().decode(blocks[1], raw=True))

    with Server(kind, script) as server:
        assert [a.status for _ in range(2) if isinstance(a := server.ask(), Response)] == [200, 200]


async def test_who_asks_before_sending_a_body_is_told_to_send_it() -> None:
    """A request with `Expect: 100-continue` gets a 100 once its body is wanted (RFC 9110, 10.1.1), else the refusal."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/refused":
            raise problem("too_large", "that is too much")
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})
        await receive()  # the client's end, of which it must not be told anything

    def asking(path: bytes) -> bytes:
        head = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b"expect", b"100-Continue")]
        return wire.encoded([*head, (b"content-length", b"5")])

    async with connected(NodeMiddleware(app)) as (theirs, _), asyncio.timeout(5.0):
        decoder = hpack.Decoder()

        async def status(number: int) -> bytes:
            return dict(decoder.decode((await heard(theirs, wire.HEADERS, number))[1], raw=True))[b":status"]

        await tell(theirs, wire.frame(wire.HEADERS, wire.END_HEADERS, 1, asking(b"/refused")))
        assert await status(1) == b"413"
        await tell(theirs, wire.frame(wire.HEADERS, wire.END_HEADERS, 3, asking(b"/taken")))
        assert await status(3) == b"100"
        await tell(theirs, wire.frame(wire.DATA, wire.END_STREAM, 3, b"hello"))
        assert await status(3) == b"200"


@both_clients
@pytest.mark.parametrize(
    ("block", "sent"),
    [
        pytest.param(wire.encoded([(b"etag", b"7")]), b"abc", id="no status"),
        pytest.param(OK + wire.encoded([(b"content-length", b"4")]), b"abc", id="too short"),
        pytest.param(OK + wire.encoded([(b"content-length", b"2")]), b"abc", id="too long"),
        pytest.param(wire.encoded([(b":status", b"103")]), None, id="nothing but hints"),
    ],
)
def test_an_answer_that_contradicts_itself_is_none(kind: Kind, block: bytes, sent: bytes | None) -> None:
    """An answer without a status, or with a body of another length than announced, is an error (RFC 9113, 8.1.1)."""

    def script(peer: Peer) -> None:
        stream = peer.until(wire.HEADERS)
        peer.send(
            wire.settings({}) + wire.frame(wire.HEADERS, ENDS if sent is None else wire.END_HEADERS, stream, block)
        )
        if sent is not None:
            peer.send(wire.frame(wire.DATA, wire.END_STREAM, stream, sent))

    with Server(kind, script) as server:
        assert isinstance(server.ask(), InDoubt)


@pytest.mark.parametrize("number", [1, 3], ids=["was answered", "was passed over"])
async def test_a_request_on_a_stream_that_is_over_is_refused(number: int) -> None:
    """HEADERS on a stream that has ended, or that a higher one has closed, are refused instead of left unanswered."""
    async with connected(nothing) as (theirs, _):
        for asked in (1, 5):
            await tell(theirs, wire.frame(wire.HEADERS, ENDS, asked, ASKED))
            await heard(theirs, wire.HEADERS, asked)
        await tell(theirs, wire.frame(wire.HEADERS, ENDS, number, ASKED))
        _, code = await heard(theirs, wire.RST_STREAM, number)
        assert int.from_bytes(code) == wire.STREAM_CLOSED


@pytest.mark.parametrize("written", [False, True], ids=["before the answer", "after it"])
async def test_what_a_client_says_late_costs_it_nothing_of_the_last_answer(written: bool) -> None:
    """A server that stops leaves its client the whole last answer, though the client goes on sending frames.

    A closed socket would answer them with a reset, which drops what the system still has of the answer.
    """
    size = 600_000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(size)})

    async with connected(app) as (theirs, connection), asyncio.timeout(20.0):
        loop = asyncio.get_running_loop()
        wide = wire.settings({wire.INITIAL_WINDOW_SIZE: size}) + wire.u32_frame(0, wire.WINDOW_UPDATE, size)
        await tell(theirs, wide + wire.frame(wire.HEADERS, ENDS, 1, ASKED))
        while not connection._newest or (written and connection._running):
            await asyncio.sleep(0)
        connection.shutdown()
        came = b""
        while connection._running or connection.transport.get_write_buffer_size():
            await asyncio.sleep(0)
            if connection.transport.get_write_buffer_size():
                came += await loop.sock_recv(theirs, 1 << 12)
        for _ in range(100):  # until the connection has ended, if it does not wait for its client
            await asyncio.sleep(0)
        await tell(theirs, wire.u32_frame(0, wire.WINDOW_UPDATE, size))
        while data := await loop.sock_recv(theirs, 1 << 16):
            came += data
        assert len(came) > size
        theirs.close()
        while not connection.transport.is_closing():
            await asyncio.sleep(0)


async def test_a_stop_does_not_wait_for_a_client_that_has_all_of_its_answers() -> None:
    """A client that is sent nothing any more may keep its connection for long: it is told, and hung up on at once."""
    async with connected(nothing) as (theirs, connection):
        await tell(theirs, wire.frame(wire.HEADERS, ENDS, 1, ASKED))
        await heard(theirs, wire.HEADERS, 1)
        while connection._running or unacknowledged_bytes(connection._socket):
            await asyncio.sleep(0)
        connection.shutdown()
        assert connection.transport.is_closing()
        await heard(theirs, wire.GOAWAY)


@pytest.mark.parametrize("earlier", [True, False], ids=["before the answer", "after it"])
async def test_a_request_that_was_cancelled_does_not_cut_the_wait_for_the_client_short(earlier: bool) -> None:
    """A server that stops leaves its client the last answer, whenever a request that the client cancelled ends."""
    goes_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            await goes_on.wait()
        await nothing(scope, receive, send)

    slow = wire.encoded([(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/slow")])
    cancelled = wire.u32_frame(1, wire.RST_STREAM, wire.CANCEL)
    async with connected(app) as (theirs, connection):
        await tell(theirs, wire.frame(wire.HEADERS, ENDS, 1, slow) + (cancelled if earlier else b""))
        await tell(theirs, wire.frame(wire.HEADERS, ENDS, 3, ASKED))
        while connection._newest < 3:
            await asyncio.sleep(0)
        connection.shutdown()
        await heard(theirs, wire.HEADERS, 3)
        if not earlier:
            await tell(theirs, cancelled)
            while connection._streams:
                await asyncio.sleep(0)
        goes_on.set()
        while connection._running:
            await asyncio.sleep(0)
        assert not connection.transport.is_closing(), "it waits for its client to close"
        theirs.close()
        while not connection.transport.is_closing():
            await asyncio.sleep(0)


@pytest.mark.parametrize("again", [False, True], ids=["unread", "read in part"])
async def test_a_request_that_was_cancelled_has_no_empty_body(again: bool) -> None:
    """The app learns of the cancellation, even if all of a body has come that it has yet to read and that is dropped.

    As after a pause of the process, when request, body and cancellation arrive at once.
    """
    told: list[Message] = []
    goes_on, ended = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if again:
            told.append(await receive())
        await goes_on.wait()
        told.append(await receive())
        ended.set()

    cancelled = wire.u32_frame(1, wire.RST_STREAM, wire.CANCEL)
    async with connected(app) as (theirs, connection):
        asked = wire.frame(wire.HEADERS, wire.END_HEADERS, 1, ASKED)
        if again:
            await tell(theirs, asked + wire.frame(wire.DATA, 0, 1, b"a"))
            while not told:
                await asyncio.sleep(0)
            asked = b""
        await tell(theirs, asked + wire.frame(wire.DATA, wire.END_STREAM, 1, b"b") + cancelled)
        while connection._streams or not connection._newest:
            await asyncio.sleep(0)
        goes_on.set()
        await ended.wait()

    assert [m["type"] for m in told] == [*(["http.request"] if again else []), "http.disconnect"]


async def test_a_client_that_returns_its_window_in_odd_pieces_may_read_for_long() -> None:
    """A client that reads each frame in two pieces, and widens both windows by each, as HAProxy does, is no abuser."""
    size = 20 << 20

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(size)})

    async with connected(app) as (theirs, _), asyncio.timeout(60.0):
        scanner, came = wire.Scanner(1 << 14, 1 << 14), 0
        await tell(theirs, wire.frame(wire.HEADERS, ENDS, 1, ASKED))
        while came < size:
            data = await asyncio.get_running_loop().sock_recv(theirs, 1 << 16)
            updates = b""
            for kind, _, number, payload, _ in scanner.scan(memoryview(data)):
                assert kind != wire.GOAWAY
                if kind == wire.DATA and payload:
                    came += len(payload)
                    for by in (n for n in (56, len(payload) - 56) if n > 0):
                        updates += wire.u32_frame(0, wire.WINDOW_UPDATE, by)
                        updates += wire.u32_frame(number, wire.WINDOW_UPDATE, by)
            await tell(theirs, updates)


def test_a_client_that_draws_an_answer_out_byte_by_byte_is_one() -> None:
    """What was sent in return for a window update of one byte does not excuse it."""
    abuse = FrameAbuseLimit(lambda: 0.0)
    for sent in range(COUNT_MAX):
        abuse.count_update(1, sent)
    with pytest.raises(wire.Http2Error, match="useless frames"):
        abuse.count_update(1, COUNT_MAX)


@both_clients
@pytest.mark.parametrize(
    "refusal",
    [
        pytest.param(wire.u32_frame(1, wire.RST_STREAM, wire.REFUSED_STREAM), id="one stream too many"),
        pytest.param(wire.goaway(0, wire.NO_ERROR), id="going away"),
    ],
)
def test_a_change_that_was_refused_unseen_is_not_in_doubt(kind: Kind, refusal: bytes) -> None:
    """A change that a server has certainly not carried out (RFC 9113, 8.7) is unavailable: it may be sent again."""

    def script(peer: Peer) -> None:
        peer.until(wire.DATA, wire.END_STREAM)
        peer.send(wire.settings({}) + refusal)

    with Server(kind, script) as server:
        outcome = server.ask(b"a change")
        assert isinstance(outcome, PsError)
        assert (outcome.code, outcome.retry_after_s) == ("unavailable", 0.0), "another attempt need not wait"


@pytest.mark.parametrize(
    "trailer", [(b":path", b"/"), (b"Sum", b"9"), (b"connection", b"close"), (b"sum", b"9\r\nx: y")]
)
async def test_a_body_with_malformed_trailers_has_no_end(trailer: wire.Header) -> None:
    """Trailers with fields of a request's head, or that no header may have, reset the stream (RFC 9113, 8.1)."""
    seen: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while not seen or (seen[-1]["type"] == "http.request" and seen[-1]["more_body"]):
            seen.append(await receive())

    async with connected(app) as (theirs, connection):
        await tell(theirs, wire.frame(wire.HEADERS, wire.END_HEADERS, 1, ASKED) + wire.frame(wire.DATA, 0, 1, b"abc"))
        await tell(theirs, wire.frame(wire.HEADERS, ENDS, 1, wire.encoded([trailer])))
        _, code = await heard(theirs, wire.RST_STREAM, 1)
        assert int.from_bytes(code) == wire.PROTOCOL_ERROR
        while connection._running:
            await asyncio.sleep(0)
    assert seen[-1]["type"] == "http.disconnect"
