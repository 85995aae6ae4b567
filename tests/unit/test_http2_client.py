"""The client's HTTP/2, blocking and on asyncio, against scripted servers: responses, bodies, concurrent requests."""

import asyncio
import threading

import numpy as np
import pytest
from tests.unit.scripted_server import OK, Blocking, Kept, Kind, OnLoop, Peer, Server, both_clients

from paramserver.errors import PsError, problem
from paramserver.net import http2
from paramserver.net.calls import Request, Response
from paramserver.wire import http2 as wire


@both_clients
def test_an_answer_arrives_however_it_is_cut(kind: Kind) -> None:
    """A response arrives complete byte by byte, after a 103, padded, with trailers and between unknown frames."""

    def script(peer: Peer) -> None:
        stream = peer.until(wire.HEADERS)
        answer = (
            wire.settings({wire.MAX_FRAME_SIZE: 20_000})
            + wire.frame(wire.PING, 0, 0, b"12345678")
            + wire.frame(wire.HEADERS, wire.END_HEADERS, stream, wire.encoded([(b":status", b"103")]))
            + wire.frame(wire.HEADERS, 0, stream, OK[:3])
            + wire.frame(wire.CONTINUATION, wire.END_HEADERS, stream, OK[3:])
            + wire.frame(wire.DATA, wire.PADDED, stream, b"\x02abc\x00\x00")
            + wire.frame(99, 0, stream, b"what is this")
            + wire.frame(wire.DATA, 0, stream, b"de")
            + wire.frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, stream, wire.encoded([(b"sum", b"9")]))
        )
        for byte in answer:
            peer.send(bytes((byte,)))
        peer.until(wire.PING, wire.ACK)

    with Server(kind, script) as server:
        kept = Kept()
        answer = server.ask(sink=kept)
        assert isinstance(answer, Response)
        assert (answer.status, answer.headers["etag"], answer.body) == (200, "7", b"")
        assert (kept.data, kept.ended) == (b"abcde", 1)


@both_clients
@pytest.mark.parametrize("piece_bytes", [7_000, 70_000, 700_000])
def test_a_large_answer_is_put_where_it_belongs(kind: Kind, piece_bytes: int) -> None:
    """A large response is received intact, mostly straight into the sink's memory, however it is split.

    PING frames in between and the next response on the connection are not mixed with it.
    """
    body, frame_bytes = bytes(range(251)) * 10_000, 600_000

    def script(peer: Peer) -> None:
        stream = peer.until(wire.HEADERS)
        answer = wire.settings({}) + wire.frame(wire.HEADERS, wire.END_HEADERS, stream, OK)
        for at in range(0, len(body), frame_bytes):
            ends = wire.END_STREAM if at + frame_bytes >= len(body) else 0
            answer += wire.frame(wire.PING, 0, 0, bytes(8))
            answer += wire.frame(wire.DATA, ends, stream, body[at : at + frame_bytes])
        for at in range(0, len(answer), piece_bytes):
            peer.send(answer[at : at + piece_bytes])
        peer.send(peer.answer(peer.until(wire.HEADERS), b"next"))

    with Server(kind, script) as server:
        kept = Kept(100_000)
        assert isinstance(server.ask(sink=kept), Response)
        assert kept.data == body
        assert kept.put > len(body) // 2
        answer = server.ask()
        assert isinstance(answer, Response)
        assert answer.body == b"next"


@both_clients
def test_a_body_that_the_network_takes_bit_by_bit_arrives_whole(kind: Kind) -> None:
    """A body in frames much larger than what a socket takes at once is sent to its last byte, in order."""
    body, frame_bytes = np.random.default_rng(0).bytes(8 << 20), 1 << 20

    def script(peer: Peer) -> None:
        peer.send(wire.settings({wire.MAX_FRAME_SIZE: frame_bytes, wire.INITIAL_WINDOW_SIZE: 1 << 30}))
        peer.send(wire.u32_frame(0, wire.WINDOW_UPDATE, 1 << 30))
        peer.send(peer.answer(peer.until(wire.DATA, wire.END_STREAM), b"first"))
        peer.seen.clear()
        stream = peer.until(wire.DATA, wire.END_STREAM)
        assert b"".join([payload for k, _, _, payload in peer.seen if k == wire.DATA]) == body
        peer.send(peer.answer(stream, b"second"))

    with Server(kind, script) as server:
        answers = [server.ask(b"settings are known after this"), server.ask(body)]
        assert [a.body for a in answers if isinstance(a, Response)] == [b"first", b"second"]


@both_clients
def test_a_body_of_many_pieces_is_one_body(kind: Kind) -> None:
    """A request body given in several pieces, large, tiny or empty, arrives as one body."""
    pieces = [bytes([i]) * size for i, size in enumerate((5, 100_000, 0, 3, 7, 2_000_000, 1))]
    got: list[bytes] = []

    def script(peer: Peer) -> None:
        peer.send(wire.settings({wire.INITIAL_WINDOW_SIZE: 1 << 24}) + wire.u32_frame(0, wire.WINDOW_UPDATE, 1 << 24))
        stream = peer.until(wire.DATA, wire.END_STREAM)
        got.extend(payload for kind, _, _, payload in peer.seen if kind == wire.DATA)
        peer.send(peer.answer(stream, b""))

    with Server(kind, script) as server:
        rest = [memoryview(piece) for piece in pieces[1:]]
        request = Request("POST", "/p", pieces[0], to=server.url, rest=rest)
        assert isinstance(server.transport.send(request, server.url), Response)
    assert b"".join(got) == b"".join(pieces) == request.whole


@both_clients
def test_a_body_goes_as_the_windows_allow(kind: Kind) -> None:
    """A body is sent exactly as far as the windows of stream and connection allow, and then to its end."""
    body = bytes(range(256)) * 1000

    def script(peer: Peer) -> None:
        peer.send(wire.settings({wire.INITIAL_WINDOW_SIZE: 100}))
        stream = peer.until(wire.HEADERS)
        peer.until(wire.SETTINGS, wire.ACK)
        for allowed, on_stream, of_all in ((100_000, 99_900, 50_000), (wire.WINDOW_BYTES + 50_000, 100_000, 0)):
            peer.send(wire.u32_frame(stream, wire.WINDOW_UPDATE, on_stream))
            if of_all:
                peer.send(wire.u32_frame(0, wire.WINDOW_UPDATE, of_all))
            while peer.received < allowed:
                peer.until(wire.DATA)
            peer.send(wire.frame(wire.PING, 0, 0, bytes(8)))
            peer.until(wire.PING, wire.ACK)
            assert peer.received == allowed
        peer.send(wire.u32_frame(stream, wire.WINDOW_UPDATE, 1 << 20) + wire.u32_frame(0, wire.WINDOW_UPDATE, 1 << 20))
        peer.until(wire.DATA, wire.END_STREAM)
        assert peer.received == len(body)
        peer.send(peer.answer(stream, b"done"))

    with Server(kind, script) as server:
        answer = server.ask(body)
        assert isinstance(answer, Response)
        assert answer.body == b"done"


def test_the_reserved_bit_of_a_number_is_ignored() -> None:
    """The reserved bit neither widens a window by WINDOW_UPDATE nor changes the last stream of a GOAWAY."""
    client, answer, reserved = http2.Client(), http2.Answer(None), 1 << 31
    stream = client.start_stream([], answer, bodyless=False)

    for number in (0, stream):
        client.feed(memoryview(wire.u32_frame(number, wire.WINDOW_UPDATE, reserved | 5)))
    allowed = client.allowed(answer, wire.PAYLOAD_BYTES_MAX)
    window = answer.send_window
    client.feed(memoryview(wire.goaway(reserved, wire.NO_ERROR)))

    assert (allowed, window) == (wire.PAYLOAD_BYTES_MAX, wire.WINDOW_BYTES + 5)
    assert isinstance(answer.failed, http2.Refused)


@both_clients
def test_a_window_is_widened_by_what_came_through_it(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection's window is widened by the bytes of all streams, and a stream's at most by its own.

    Widening by more would violate flow control.
    """
    monkeypatch.setattr(http2, "WINDOW_BYTES", 200_000)

    def script(peer: Peer) -> None:
        for size in (90_000, 30_000):
            stream = peer.until(wire.HEADERS)
            peer.send(
                wire.frame(wire.HEADERS, wire.END_HEADERS, stream, OK) + wire.frame(wire.DATA, 0, stream, bytes(size))
            )
            peer.send(wire.frame(wire.PING, 0, 0, bytes(8)))
            peer.until(wire.PING, wire.ACK)
            peer.send(wire.frame(wire.DATA, wire.END_STREAM, stream))
        peer.send(peer.answer(peer.until(wire.HEADERS), b""))
        widened = [(s, int.from_bytes(p)) for k, _, s, p in peer.seen if k == wire.WINDOW_UPDATE][1:]
        assert widened == [(0, 120_000)]

    with Server(kind, script) as server:
        answers = [server.ask() for _ in range(3)]
        assert [a.body for a in answers if isinstance(a, Response)] == [bytes(90_000), bytes(30_000), b""]


def test_an_answer_before_the_body_was_heard_is_an_answer() -> None:
    """The blocking client returns a response that arrives while it sends the body, and opens a new connection next."""

    def refusing(peer: Peer) -> None:
        peer.send(peer.answer(peer.until(wire.HEADERS), b"too large"))
        while peer.socket.recv(1 << 20):
            pass

    def answering(peer: Peer) -> None:
        peer.send(peer.answer(peer.until(wire.HEADERS), b"ok"))

    with Server(Blocking, refusing, answering) as server:
        first, second = server.ask(bytes(1 << 20)), server.ask()
        assert isinstance(first, Response)
        assert isinstance(second, Response)
        assert (first.body, second.body) == (b"too large", b"ok")


def test_what_nobody_waits_for_is_called_off_and_the_connection_goes_on() -> None:
    """A request answered early, cancelled or timed out has its stream reset; others on the connection are answered."""

    def script(peer: Peer) -> None:
        early = peer.until(wire.HEADERS)
        peer.send(peer.answer(early, b"too large"))
        assert peer.until(wire.RST_STREAM) == early
        cancelled, late, good = peer.until(wire.HEADERS), peer.until(wire.HEADERS), peer.until(wire.HEADERS)
        assert {peer.until(wire.RST_STREAM), peer.until(wire.RST_STREAM)} == {cancelled, late}
        peer.send(peer.answer(cancelled, b"1") + peer.answer(late, b"2") + peer.answer(good, b"3"))

    async def ask(loop: OnLoop, url: str) -> list[Response | PsError]:
        early = await loop.transport.send(Request("POST", "/", bytes(1 << 20)), url)
        waiting = asyncio.ensure_future(loop.transport.send(Request("GET", "/"), url))
        late = asyncio.ensure_future(loop.transport.send(Request("GET", "/", timeout_s=0.05), url))
        good = asyncio.ensure_future(loop.transport.send(Request("GET", "/"), url))
        outcomes = [early, await late]
        waiting.cancel()
        return [*outcomes, await good]

    with Server(OnLoop, script) as server:
        assert isinstance(server.transport, OnLoop)
        early, late, good = server.transport.runner.run(ask(server.transport, server.url))
        assert isinstance(early, Response)
        assert isinstance(late, PsError)
        assert isinstance(good, Response)
        assert (early.body, late.code, good.body) == (b"too large", "in_doubt", b"3")


class Refusing(Kept):
    """A sink that rejects its data."""

    def feed(self, chunk: memoryview) -> None:
        """Reject the data."""
        raise problem("in_doubt", "not what was asked for")


def test_many_requests_share_a_connection() -> None:
    """Concurrent requests go out in one write, are answered interleaved in any order, and fail independently."""
    pieces: list[bytes] = []

    def script(peer: Peer) -> None:
        peer.send(wire.settings({wire.INITIAL_WINDOW_SIZE: 1 << 20}))
        first = peer.until(wire.HEADERS)
        peer.until(wire.SETTINGS, wire.ACK)
        peer.send(peer.answer(first, b"first"))
        data = peer.socket.recv(1 << 16)
        pieces.append(data)
        streams = [s for kind, _, s, _, _ in peer.scanner.scan(memoryview(data)) if kind == wire.HEADERS]
        assert len(streams) == 4
        for stream in streams[:0:-1]:
            peer.send(wire.frame(wire.HEADERS, wire.END_HEADERS, stream, OK))
        for at in range(3):
            for stream in streams[1:]:
                ends = wire.END_STREAM if at == 2 else 0
                peer.send(wire.frame(wire.DATA, ends, stream, bytes([stream]) * 500_000))
        peer.send(peer.answer(streams[0], b"last"))
        assert peer.until(wire.RST_STREAM) == streams[2]  # the one whose sink raised

    async def ask(loop: OnLoop, url: str, sinks: list[Kept]) -> list[Response | PsError]:
        first = await loop.transport.send(Request("GET", "/"), url)
        requests = [Request("POST", "/", b"x" * 100), *(Request("GET", "/", sink=sink) for sink in sinks)]
        return [first, *await asyncio.gather(*(loop.transport.send(r, url) for r in requests))]

    with Server(OnLoop, script) as server:
        assert isinstance(server.transport, OnLoop)
        sinks = [Kept(1 << 20), Refusing(), Kept()]
        outcomes = server.transport.runner.run(ask(server.transport, server.url, sinks))
        assert [o.body if isinstance(o, Response) else o.code for o in outcomes] == [
            b"first", b"last", b"", "in_doubt", b"",
        ]  # fmt: skip
        assert (sinks[0].data, sinks[2].data) == (bytes([5]) * 1_500_000, bytes([9]) * 1_500_000)
        assert sinks[0].put > 0
    assert len(pieces) == 1


def test_a_shard_that_takes_one_request_at_a_time_gets_more_connections() -> None:
    """If a shard allows one stream at a time, concurrent requests use more connections instead of waiting in turn.

    A request that waited might be the one that the other depends on.
    """

    def script(peer: Peer) -> None:
        peer.send(wire.settings({wire.MAX_CONCURRENT_STREAMS: 1}) + peer.answer(peer.until(wire.HEADERS), b"first"))
        stream = peer.until(wire.HEADERS)
        connected, _ = server.listener.accept()
        with connected:
            other = Peer(connected)
            other.send(other.answer(other.until(wire.HEADERS), b"other"))
        peer.send(peer.answer(stream, b"last"))

    async def ask(loop: OnLoop, url: str) -> list[Response | PsError]:
        first = await loop.transport.send(Request("GET", "/"), url)
        return [first, *await asyncio.gather(*(loop.transport.send(Request("GET", "/"), url) for _ in range(2)))]

    with Server(OnLoop, script) as server:
        assert isinstance(server.transport, OnLoop)
        outcomes = server.transport.runner.run(ask(server.transport, server.url))
        assert [o.body for o in outcomes if isinstance(o, Response)] == [b"first", b"last", b"other"]


def test_a_request_that_is_given_up_again_and_again_makes_no_heap_of_connections() -> None:
    """A request whose stream is reset is retried on another connection; repeated resets never open a third one."""

    good = [b"first"]

    def failing(peer: Peer) -> None:
        try:
            if good:
                peer.send(peer.answer(peer.until(wire.HEADERS), good.pop()))
            while True:
                peer.send(wire.u32_frame(peer.until(wire.HEADERS), wire.RST_STREAM, wire.INTERNAL_ERROR))
        except AssertionError:
            pass  # the client has disconnected

    with Server(OnLoop, failing) as server:
        other = threading.Thread(target=server.serve, args=((failing,),))  # a third connection would not be served
        other.start()
        assert isinstance(server.ask(), Response)
        outcomes = [server.ask() for _ in range(5)]
        assert [o.code for o in outcomes if isinstance(o, PsError)] == ["in_doubt"] * 5
    other.join(20.0)


def test_a_transport_that_is_used_on_another_loop_begins_anew() -> None:
    """A transport used on another event loop opens new connections: the old ones ended with their loop."""

    def script(peer: Peer) -> None:
        peer.send(peer.answer(peer.until(wire.HEADERS), b"ok"))

    with Server(OnLoop, script, script) as server:
        assert isinstance(server.transport, OnLoop)
        assert isinstance(server.ask(), Response)
        for connection in server.transport.transport._connections[server.url]:
            connection.hang_up()
        server.transport.runner.close()
        server.transport.runner = asyncio.Runner()
        assert isinstance(server.ask(), Response)
