"""The node's HTTP/2 server, tested frame by frame."""

import signal
import socket
import threading
from collections.abc import Iterator
from email.utils import parsedate_to_datetime

import pytest
from tests.waiting import eventually

from paramserver.wire import http2 as wire
from paramserver_node.http2 import FRAME_BYTES
from paramserver_node.stream import READING_WINDOW_BYTES, UNREAD_BYTES_MAX

from .test_servers import Node, node

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server() -> Iterator[Node]:
    """A node without upstreams."""
    with node() as running:
        yield running


class Client:
    """An HTTP/2 client connection that sends given frames and keeps received ones in `frames`."""

    def __init__(self, server: Node, *, greeted: bool = True, window: int | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=20.0)
        self.scanner = wire.Scanner(1 << 20, 1 << 16)
        self.decoder = wire.HeaderDecoder(1 << 16, dict)
        self.frames: list[tuple[int, int, int, bytes]] = []
        self.socket.sendall(wire.PREFACE)
        if greeted:
            self.send(wire.settings({} if window is None else {wire.INITIAL_WINDOW_SIZE: window}))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send raw bytes."""
        self.socket.sendall(data)

    def ask(self, stream: int, method: str, path: str, *, ends: bool = True, **headers: str) -> None:
        """Send the HEADERS frame of a request."""
        self.send(wire.frame(wire.HEADERS, wire.END_HEADERS | ends, stream, block(method, path, **headers)))

    def until(self, kind: int, stream: int | None = None, flags: int = 0) -> bytes:
        """Wait for the next frame of this kind, stream and flags, and return its payload."""
        while True:
            for i, (k, f, s, payload) in enumerate(self.frames):
                if k == kind and (stream is None or s == stream) and f & flags == flags:
                    del self.frames[i]
                    return payload
            data = self.socket.recv(65536)
            assert data, f"closed before {kind}; {self.frames[-3:]}"
            self.frames += [(k, f, s, bytes(p)) for k, f, s, p, _ in self.scanner.scan(memoryview(data))]

    def answer(self, stream: int) -> tuple[int, bytes]:
        """Wait for a complete response and return its status and body."""
        head: dict[bytes, bytes] = self.decoder.decode(self.until(wire.HEADERS, stream))
        last = self.until(wire.DATA, stream, wire.END_STREAM)
        pieces = [p for k, _, s, p in self.frames if (k, s) == (wire.DATA, stream)]
        self.frames = [f for f in self.frames if (f[0], f[2]) != (wire.DATA, stream)]
        return int(head[b":status"]), b"".join(pieces) + last

    def closed(self) -> bool:
        """Wait until the server has closed the connection, then return True."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return True


def block(method: str, path: str, **headers: str) -> bytes:
    """A request's HPACK header block."""
    special = [(":method", method), (":scheme", "http"), (":authority", "x"), (":path", path), *headers.items()]
    return wire.encoded((k.replace("_", "-").encode(), v.encode()) for k, v in special)


def data(stream: int, payload: bytes, *, ends: bool = False) -> bytes:
    """A DATA frame."""
    return wire.frame(wire.DATA, int(ends), stream, payload)


ENDS = wire.END_HEADERS | wire.END_STREAM
HEAD = wire.frame(wire.HEADERS, wire.END_HEADERS, 1, block("POST", "/push"))
UNREAD = wire.frame(wire.HEADERS, wire.END_HEADERS, 1, block("GET", "/slow?seconds=20"))
BEGUN = wire.frame(wire.HEADERS, 0, 1, block("POST", "/push"))
PING = wire.frame(wire.PING, 0, 0, b"12345678")


@pytest.mark.parametrize(
    ("greeted", "sent", "code"),
    [
        (False, PING, wire.PROTOCOL_ERROR),
        (True, data(1, b"x"), wire.PROTOCOL_ERROR),
        (True, HEAD + data(2, b"x"), wire.PROTOCOL_ERROR),
        (True, HEAD + data(3, b"x"), wire.PROTOCOL_ERROR),
        (True, HEAD + data(1, b"", ends=True) + data(1, b"x"), wire.STREAM_CLOSED),
        (True, UNREAD + data(1, bytes(UNREAD_BYTES_MAX)) + data(1, b"x"), wire.FLOW_CONTROL_ERROR),
        (True, wire.frame(wire.HEADERS, wire.END_HEADERS, 2, block("GET", "/pull")), wire.PROTOCOL_ERROR),
        (True, wire.frame(wire.HEADERS, wire.END_HEADERS, 0, block("GET", "/pull")), wire.PROTOCOL_ERROR),
        (True, HEAD + HEAD, wire.PROTOCOL_ERROR),
        (True, wire.frame(wire.HEADERS, wire.END_HEADERS, 1, b"\xff\xff\xff\xff\x0f"), wire.COMPRESSION_ERROR),
        (True, BEGUN + PING, wire.PROTOCOL_ERROR),
        (True, BEGUN + wire.frame(wire.CONTINUATION, wire.END_HEADERS, 3), wire.PROTOCOL_ERROR),
        (True, wire.frame(wire.CONTINUATION, wire.END_HEADERS, 1), wire.PROTOCOL_ERROR),
        (True, BEGUN + 2 * wire.frame(wire.CONTINUATION, 0, 1, bytes(60_000)), wire.ENHANCE_YOUR_CALM),
        (True, wire.head(FRAME_BYTES + 1, wire.DATA, 0, 1), wire.FRAME_SIZE_ERROR),
        (True, wire.head(1 << 17, wire.HEADERS, 0, 1), wire.FRAME_SIZE_ERROR),
        (True, wire.frame(wire.PUSH_PROMISE, 0, 1, bytes(8)), wire.PROTOCOL_ERROR),
        (True, wire.frame(wire.PING, 0, 0, b"1234"), wire.FRAME_SIZE_ERROR),
        (True, wire.frame(wire.PING, 0, 1, b"12345678"), wire.PROTOCOL_ERROR),
        (True, wire.frame(wire.SETTINGS, 0, 0, b"12345"), wire.FRAME_SIZE_ERROR),
        (True, wire.u32_frame(1, wire.RST_STREAM, 8), wire.PROTOCOL_ERROR),
        (True, wire.frame(wire.SETTINGS, wire.ACK, 0, bytes(6)), wire.FRAME_SIZE_ERROR),
        (True, wire.settings({wire.ENABLE_PUSH: 2}), wire.PROTOCOL_ERROR),
        (True, wire.u32_frame(0, wire.WINDOW_UPDATE, 0), wire.PROTOCOL_ERROR),
        (True, wire.u32_frame(1, wire.WINDOW_UPDATE, 1 << 20), wire.PROTOCOL_ERROR),
        (True, HEAD + wire.u32_frame(2, wire.WINDOW_UPDATE, 1 << 20), wire.PROTOCOL_ERROR),
        (True, wire.u32_frame(0, wire.WINDOW_UPDATE, wire.WINDOW_MAX), wire.FLOW_CONTROL_ERROR),
        (True, HEAD + wire.u32_frame(1, wire.WINDOW_UPDATE, wire.WINDOW_MAX), wire.FLOW_CONTROL_ERROR),
        (True, PING * 5000, wire.ENHANCE_YOUR_CALM),
        (True, HEAD + data(1, b"") * 5000, wire.ENHANCE_YOUR_CALM),
        (True, HEAD + wire.frame(wire.DATA, wire.PADDED, 1, b"\x00") * 5000, wire.ENHANCE_YOUR_CALM),
    ],
)
def test_what_no_client_may_send_ends_its_connection(server: Node, greeted: bool, sent: bytes, code: int) -> None:
    """A protocol violation ends the connection with GOAWAY and the right error code; other clients are still served."""
    with Client(server, greeted=greeted) as client:
        client.send(sent)
        told = client.until(wire.GOAWAY)
        assert int.from_bytes(told[4:8]) == code
        assert client.closed()
    assert server.http.get("/listening").is_success


def test_requests_that_are_given_up_without_end_are_cut_off(server: Node) -> None:
    """A client that keeps sending requests and resetting their streams is disconnected."""
    with Client(server) as client:
        try:
            for i in range(1, 20_000, 2):
                client.send(
                    wire.frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, i, block("GET", "/slow?seconds=1"))
                    + wire.u32_frame(i, wire.RST_STREAM, wire.CANCEL)
                )
            told = client.until(wire.GOAWAY)
        except (BrokenPipeError, ConnectionResetError):
            return
        assert int.from_bytes(told[4:8]) == wire.ENHANCE_YOUR_CALM


def test_more_requests_at_once_than_are_taken_are_refused_one_by_one(server: Node) -> None:
    """The 257th concurrent stream is reset with REFUSED_STREAM, and the other 256 are answered."""
    with Client(server) as client:
        asked = block("GET", "/slow?seconds=0.5")
        # Sent at once, so that the first is not answered before the last is there.
        client.send(b"".join(wire.frame(wire.HEADERS, ENDS, i, asked) for i in range(1, 2 * 257, 2)))
        assert int.from_bytes(client.until(wire.RST_STREAM, 2 * 256 + 1)) == wire.REFUSED_STREAM
        assert {client.answer(i)[0] for i in range(1, 2 * 256, 2)} == {200}


def test_an_answer_has_a_date(server: Node) -> None:
    """Every answer says when it was made, as over HTTP/1.1 (RFC 9110, 6.6.1), and not with what."""
    with Client(server) as client:
        client.ask(1, "GET", "/names/x")
        head: dict[bytes, bytes] = client.decoder.decode(client.until(wire.HEADERS, 1))
    other = server.http.get("/names/x").headers
    dates = [parsedate_to_datetime(text) for text in (head[b"date"].decode(), other["date"])]
    assert abs((dates[1] - dates[0]).total_seconds()) < 20.0
    assert b"server" not in head
    assert "server" not in other


def test_what_is_no_request_is_refused_alone(server: Node) -> None:
    """A malformed request has its stream reset, and the next one on the same connection is answered."""
    with Client(server) as client:
        client.ask(1, "GET", "/pull", Upper="x")
        client.ask(3, "GET", "no-path")
        client.ask(5, "GET", "/names/a%2Fb")
        assert int.from_bytes(client.until(wire.RST_STREAM, 1)) == wire.PROTOCOL_ERROR
        assert int.from_bytes(client.until(wire.RST_STREAM, 3)) == wire.PROTOCOL_ERROR
        assert client.answer(5)[0] == 200


def test_a_body_may_be_padded_and_end_in_trailers(server: Node) -> None:
    """A request with padding, priority, CONTINUATION frames and trailers is read; its body is the data alone."""
    head = block("POST", "/push")
    with Client(server) as client:
        client.send(
            wire.frame(wire.HEADERS, wire.PADDED | wire.WITH_PRIORITY, 1, b"\x03" + bytes(5) + head[:5] + bytes(3))
            + wire.frame(wire.CONTINUATION, 0, 1, head[5:9])
            + wire.frame(wire.CONTINUATION, wire.END_HEADERS, 1, head[9:])
            + wire.frame(wire.DATA, wire.PADDED, 1, b"\x0a" + b"x" * 1000 + bytes(10))
            + wire.frame(wire.PRIORITY, 0, 1, bytes(5))
            + data(1, b"y" * 500)
            + wire.frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, 1, wire.encoded([(b"check", b"sum")]))
        )
        status, body = client.answer(1)
    assert status == 200
    assert b'"size":1500' in body


def test_a_body_that_is_mostly_padding_arrives_whole(server: Node) -> None:
    """Padding is credited back to the flow-control windows, and padded frames of one byte are not counted as abuse."""
    lots, piece = 40, wire.frame(wire.DATA, wire.PADDED, 1, b"\xff" + b"x" + bytes(255))
    with Client(server) as client:
        client.send(HEAD)
        credit = UNREAD_BYTES_MAX
        for _ in range(lots):
            while credit < 500 * 257:
                credit += int.from_bytes(client.until(wire.WINDOW_UPDATE, 1))
            client.send(500 * piece)
            credit -= 500 * 257
        client.send(data(1, b"", ends=True))
        status, body = client.answer(1)
    assert status == 200
    assert f'"size":{500 * lots}' in body.decode()


def test_a_body_that_is_passed_on_as_it_arrives_may_be_megabytes_ahead(server: Node) -> None:
    """A body that its app reads piece by piece gets 4 MiB of window, so that a distant client rarely waits for more."""
    with Client(server) as client:
        client.send(HEAD)
        assert UNREAD_BYTES_MAX + int.from_bytes(client.until(wire.WINDOW_UPDATE, 1)) == READING_WINDOW_BYTES == 4 << 20
        for _ in range(READING_WINDOW_BYTES // FRAME_BYTES):
            client.send(data(1, bytes(FRAME_BYTES)))
        client.send(data(1, b"", ends=True))
        status, body = client.answer(1)
    assert (status, f'"size":{READING_WINDOW_BYTES}' in body.decode()) == (200, True)


def test_a_body_byte_by_byte_is_a_body(server: Node) -> None:
    """A request that arrives one byte at a time is read like any other."""
    with Client(server) as client:
        for byte in HEAD + data(1, b"abc") + data(1, b"", ends=True):
            client.send(bytes((byte,)))
        status, body = client.answer(1)
    assert (status, b'"size":3' in body) == (200, True)


def test_an_answer_waits_for_its_window_and_holds_up_no_other(server: Node) -> None:
    """A response whose send window is used up waits without blocking others, and continues when the window grows."""
    with Client(server, window=1000) as client:
        client.ask(1, "GET", "/pull")
        assert client.until(wire.DATA, 1) == bytes(1000)
        client.ask(3, "GET", "/names/small")
        assert client.answer(3)[0] == 200
        client.send(PING)
        client.until(wire.PING, 0, wire.ACK)
        assert not [f for f in client.frames if f[2] == 1 and f[0] == wire.DATA]
        client.send(wire.u32_frame(0, wire.WINDOW_UPDATE, 1 << 30) + wire.u32_frame(1, wire.WINDOW_UPDATE, 500))
        assert client.until(wire.DATA, 1) == bytes(500)
        client.send(wire.settings({wire.INITIAL_WINDOW_SIZE: 1 << 30}))
        status, rest = client.answer(1)
    assert (status, len(rest)) == (200, 5_000_000 - 1500)


def test_head_has_no_body_and_a_ping_is_given_back(server: Node) -> None:
    """The response to HEAD has no body, and a PING is acknowledged with its payload."""
    with Client(server) as client:
        client.ask(1, "HEAD", "/pull")
        assert client.answer(1) == (405, b"")
        client.send(PING)
        assert client.until(wire.PING, 0, wire.ACK) == b"12345678"


def test_a_request_that_is_given_up_lets_its_work_go(server: Node) -> None:
    """An endless response is cancelled when its stream is reset, and the connection stays usable."""
    with Client(server) as client:
        client.ask(1, "GET", "/events")
        client.until(wire.DATA, 1)
        eventually(lambda: server.http.get("/listening").json() == 1)
        client.send(wire.u32_frame(1, wire.RST_STREAM, wire.CANCEL))
        eventually(lambda: server.http.get("/listening").json() == 0, what="the answer to be given up")
        client.ask(3, "GET", "/names/x")
        assert client.answer(3)[0] == 200


def test_a_server_that_stops_says_so_and_finishes() -> None:
    """A stopping server names the last stream it answers in GOAWAY, finishes it, and then closes the connection."""
    with node() as running, Client(running) as client:
        client.ask(1, "GET", "/slow?seconds=1")
        eventually(lambda: running.http.get("/begun").json() == 1)
        stopping = threading.Thread(target=lambda: running.process.send_signal(signal.SIGTERM))
        stopping.start()
        told = client.until(wire.GOAWAY)
        client.ask(3, "GET", "/pull")
        assert (int.from_bytes(told[:4]), int.from_bytes(told[4:8])) == (1, wire.NO_ERROR)
        assert client.answer(1)[0] == 200
        assert client.closed()
        stopping.join()


def test_a_head_that_is_too_long_or_never_comes_is_not_kept(server: Node) -> None:
    """An HTTP/1.1 request with more than 64 KiB of headers is answered with 431."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(b"GET /pull HTTP/1.1\r\n" + b"x: " + b"y" * (70 << 10))
        assert client.recv(100).startswith(b"HTTP/1.1 431")
