"""Requests over HTTP/1.1, for what does not take HTTP/2: which do, kept connections that are closed, and proxies."""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from tests.unit.scripted_server import Blocking, Kept, Peer, Server, serving

from paramserver.client import control
from paramserver.errors import InDoubt, Unreachable, problem
from paramserver.net import plain
from paramserver.net.calls import TIMEOUT_S_MAX, Deadline, Request, Response, TakenTooSlowly
from paramserver.net.credentials import Credentials
from paramserver.net.plain import PlainTransport
from paramserver.net.proxies import is_here, proxy_of
from paramserver.net.transport import AsyncTransport, BlockingTransport, Protocols
from paramserver.wire import http2 as wire

from .sharding import Now

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
RUN = b"POST /runs"


class Node:
    """A server that answers one request per connection, reads a second one and closes the connection."""

    def __init__(self, *, reset: bool = False) -> None:
        self.heard: list[bytes] = []
        self.reset = reset

    def __call__(self, connected: socket.socket) -> None:
        """Serve one connection."""
        self.heard.append(connected.recv(65536).split(b" HTTP")[0])
        connected.sendall(OK)
        if said := connected.recv(65536):
            self.heard.append(said.split(b" HTTP")[0])
            if self.reset:
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def asked(transport: PlainTransport, url: str, call: Any) -> Any:
    """Return the result of a call whose requests this transport sends."""
    requests = next(call)
    try:
        while True:
            requests = call.send([transport.send(r, url) for r in requests])
    except StopIteration as stop:
        return stop.value


def test_what_may_have_been_done_is_not_sent_again() -> None:
    """If a kept connection breaks, a request that may have created a run raises InDoubt and is not sent again."""
    node, transport = Node(), PlainTransport(Credentials())
    with serving(node) as url:
        transport.send(Request("GET", "/livez"), url)
        with pytest.raises(InDoubt, match="broke before it answered"):
            asked(transport, url, control.post_unrepeatable("/runs", {}, Deadline.after(5.0)))
        transport.close()
    assert node.heard == [b"GET /livez", RUN]


@pytest.mark.parametrize("reset", [False, True])
def test_what_changes_nothing_is_sent_again(reset: bool) -> None:
    """If a kept connection breaks, a GET is sent again at once on another connection."""
    node, transport = Node(reset=reset), PlainTransport(Credentials())
    with serving(node) as url:
        outcomes = [transport.send(Request("GET", path), url) for path in ("/a", "/b")]
        transport.close()
    assert [o.status for o in outcomes if isinstance(o, Response)] == [200, 200]
    assert node.heard == [b"GET /a", b"GET /b", b"GET /b"]


def test_a_request_that_was_not_sent_whole_in_time_is_not_in_doubt() -> None:
    """A change whose body the server did not take whole by the deadline was certainly not made: so says its error."""
    transport = PlainTransport(Credentials())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        outcome = transport.send(Request("POST", "/push", bytes(64 << 20), timeout_s=0.5), url)
        transport.close()
    assert isinstance(outcome, TakenTooSlowly)
    assert outcome.detail == f"{url} did not take the whole request within 0.5 s"


def test_an_answer_without_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that has no place of its own is read up to a bound, as over HTTP/2."""
    monkeypatch.setattr(plain, "BODY_BYTES_MAX", 1000)

    def endless(connected: socket.socket) -> None:
        connected.recv(65536)
        connected.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n" + bytes(5000))

    transport = PlainTransport(Credentials())
    with serving(endless) as url:
        outcome = transport.send(Request("GET", "/livez"), url)
        transport.close()
    assert isinstance(outcome, InDoubt)
    assert "limited to 1000 bytes" in outcome.detail


@pytest.mark.parametrize("ending", [b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200 OK\r\nconnection: close\r\n"])
@pytest.mark.parametrize("body", [b"{}", b""])
def test_an_answer_that_ends_its_connection_is_read(ending: bytes, body: bytes) -> None:
    """An answer of known length after which the node closes the connection is one like any other."""

    def closing(connected: socket.socket) -> None:
        connected.recv(65536)
        connected.sendall(ending + f"content-length: {len(body)}\r\n\r\n".encode() + body)

    transport = PlainTransport(Credentials())
    with serving(closing) as url:
        outcomes = [transport.send(Request("GET", "/livez"), url) for _ in range(2)]
        transport.close()
    assert [(o.status, o.body) for o in outcomes if isinstance(o, Response)] == [(200, body)] * 2


def test_an_answer_is_never_taken_for_that_of_the_next_request() -> None:
    """After an informational answer the real one is still to come: the request is in doubt, its connection closed."""

    def early(connected: socket.socket) -> None:
        connected.recv(65536)
        connected.sendall(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        connected.recv(65536)  # its end, or the next request
        connected.sendall(OK)

    transport = PlainTransport(Credentials())
    with serving(early) as url:
        outcomes = [transport.send(Request("POST", "/runs"), url) for _ in range(2)]
        transport.close()
    assert [type(o) for o in outcomes] == [InDoubt] * 2


def test_a_connection_that_the_node_has_closed_is_not_used_again() -> None:
    """If the node has closed a kept connection, a request that must not be repeated is sent once, on another one."""
    heard: list[bytes] = []

    def serve(connected: socket.socket) -> None:
        heard.append(connected.recv(65536).split(b" HTTP")[0])
        connected.sendall(OK)

    transport = PlainTransport(Credentials())
    with serving(serve) as url:
        transport.send(Request("GET", "/livez"), url)
        (kept,) = transport._idle._kept[url]
        assert kept.sock is not None
        kept.sock.recv(1, socket.MSG_PEEK)  # returns once the node has closed the connection
        assert asked(transport, url, control.post_unrepeatable("/runs", {}, Deadline.after(5.0))) == {}
        transport.close()
    assert heard == [b"GET /livez", RUN]


def blocking(url: str, *requests: Request) -> list[Any]:
    """Return the outcomes of these requests to the given URL, one after the other."""
    transport = BlockingTransport((url,), Credentials())
    try:
        return [outcome for r in requests for outcome in transport.perform([r])]
    finally:
        transport.close()


def on_asyncio(url: str, *requests: Request) -> list[Any]:
    """Return the outcomes of these requests to the given URL, one after the other."""

    async def main() -> list[Any]:
        transport = AsyncTransport((url,), Credentials())
        try:
            return [outcome for r in requests for outcome in await transport.perform([r])]
        finally:
            await transport.close()

    return asyncio.run(main())


both = pytest.mark.parametrize("ask", [blocking, on_asyncio])
GET = Request("GET", "/models", timeout_s=TIMEOUT_S_MAX)


@both
def test_a_given_url_that_takes_http2_gets_it(ask: Callable[..., list[Any]]) -> None:
    """Requests to a URL that was given go over one HTTP/2 connection, if what answers there takes HTTP/2."""

    def node(peer: Peer) -> None:
        for body in (b"probe", b"1", b"2"):
            peer.send(peer.answer(peer.until(wire.HEADERS), body))

    with Server(Blocking, node) as server:
        assert [o.body for o in ask(server.url, GET, GET)] == [b"1", b"2"]


def answer_http1(connected: socket.socket, heard: list[bytes], refusal: bytes) -> None:
    """Refuse HTTP/2 with that status line and end, or answer requests in HTTP/1.1; add what is said to `heard`."""
    while said := connected.recv(65536):
        heard.append(said.split(b"\r\n")[0])
        if said.startswith(b"PRI"):
            connected.sendall(b"HTTP/1.1 " + refusal + b"\r\ncontent-length: 0\r\n\r\n")
            return
        connected.sendall(OK)


@both
def test_one_that_does_not_gets_http1(ask: Callable[..., list[Any]]) -> None:
    """A URL whose server refuses HTTP/2 is asked in HTTP/1.1, from then on without another attempt."""
    heard: list[bytes] = []

    with serving(lambda connected: answer_http1(connected, heard, b"505 HTTP Version Not Supported")) as url:
        assert [o.body for o in ask(url, GET, GET)] == [b"{}"] * 2
    assert heard == [b"PRI * HTTP/2.0", *[b"GET /models HTTP/1.1"] * 2]


@both
def test_a_url_that_no_longer_takes_http2_gets_http1(ask: Callable[..., list[Any]]) -> None:
    """If something that refuses HTTP/2 is put in front of a node, one request fails, and the next one is a probe."""
    heard: list[bytes] = []

    def serve(connected: socket.socket) -> None:
        if not heard:
            peer = Peer(connected)
            for _ in range(2):
                peer.send(peer.answer(peer.until(wire.HEADERS), b"node"))
            heard.append(b"node")
        else:
            answer_http1(connected, heard, b"400 Bad Request")

    with serving(serve) as url:
        first, lost, *rest = ask(url, GET, GET, GET, GET)
    assert isinstance(lost, InDoubt)
    assert [o.body for o in (first, *rest)] == [b"node", b"{}", b"{}"]
    assert heard == [b"node", *[b"PRI * HTTP/2.0"] * 2, *[b"GET /models HTTP/1.1"] * 2]


def test_what_a_probe_tells() -> None:
    """An answer tells that a URL takes HTTP/2, a quick failure for a minute that it does not, silence nothing."""
    now = Now()
    lost, nobody = problem("in_doubt", "no answer"), problem("unreachable", "nobody")
    protocols = Protocols(now)
    assert protocols.learn("http://a", lost, in_time=False) is False
    assert protocols.learn("http://a", nobody, in_time=False) is False
    assert protocols.learn("http://a", nobody, in_time=True) is nobody
    assert protocols.of("http://a") is None
    assert protocols.learn("http://a", Response(503, {}), in_time=True) is True
    assert protocols.learn("http://b", lost, in_time=True) is False
    assert (protocols.of("http://a"), protocols.of("http://b")) == (True, False)
    now.s += 61.0
    assert (protocols.of("http://a"), protocols.of("http://b")) == (True, None)


def test_an_answer_that_comes_in_drops_ends_at_the_timeout() -> None:
    """The timeout of a request over HTTP/1.1 is for the whole answer, however often some of it comes."""
    over = threading.Event()

    def dripping(connected: socket.socket) -> None:
        connected.recv(65536)
        connected.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        with suppress(OSError):
            while not over.wait(0.05):
                connected.sendall(b".")

    transport = PlainTransport(Credentials())
    with serving(dripping) as url:
        for sink in (None, Kept()):
            outcome = transport.send(Request("GET", "/", timeout_s=1.0, sink=sink), url)
            assert isinstance(outcome, InDoubt)
            assert "did not answer within 1 s" in outcome.detail
        over.set()
    transport.close()


@both
def test_a_proxy_of_the_environment_is_asked(ask: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where HTTP_PROXY is set, that proxy gets the whole URL, with the name and password that it names."""
    heard: list[bytes] = []

    def proxy(connected: socket.socket) -> None:
        while said := connected.recv(65536):
            heard.append(said)
            connected.sendall(OK)

    with serving(proxy) as url:
        monkeypatch.setenv("http_proxy", url.replace("http://", "http://me:p%40ss@"))
        assert [o.body for o in ask("http://cluster.example:8700/ps", GET)] == [b"{}"]
    (said,) = heard
    assert said.startswith(b"GET http://cluster.example:8700/ps/models HTTP/1.1\r\n")
    assert b"proxy-authorization: Basic bWU6cEBzcw==" in said


@both
def test_a_proxy_is_asked_for_a_tunnel(ask: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where HTTPS_PROXY is set, an https URL is reached through a tunnel; one that is refused is unreachable."""
    heard: list[bytes] = []

    def proxy(connected: socket.socket) -> None:
        heard.append(connected.recv(65536).split(b" HTTP")[0])
        connected.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")

    with serving(proxy) as url:
        monkeypatch.setenv("https_proxy", url)
        (outcome,) = ask("https://cluster.example", GET)
    assert isinstance(outcome, Unreachable)
    assert "403" in outcome.detail
    assert heard == [b"CONNECT cluster.example:443"]


@both
@pytest.mark.parametrize(
    ("proxy", "said"),
    [("socks5://p:1", "socks5://p is not an http:// one"), ("http://p:abc", "port could not be cast")],
)
def test_a_proxy_that_cannot_be_used_is_said_so(
    ask: Callable[..., list[Any]], proxy: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster behind a proxy of another kind, or one whose URL is wrong, is unreachable; nothing is sent to it."""
    monkeypatch.setenv("all_proxy", proxy)
    (outcome,) = ask("http://cluster.example", GET)
    assert isinstance(outcome, Unreachable)
    assert said in outcome.detail


@both
def test_a_proxy_that_nobody_can_reach_is_named(ask: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster asked for by way of a proxy is unreachable for another reason than one that is not up; no password."""
    monkeypatch.setenv("http_proxy", "http://me:password@127.0.0.1:9")
    (outcome,) = ask("http://cluster.example:8700", GET)
    assert isinstance(outcome, Unreachable)
    assert outcome.detail == "cannot reach http://cluster.example:8700 (connection refused)"
    assert "the proxy http://127.0.0.1:9 " in outcome.hint
    assert "NO_PROXY" in outcome.hint


@pytest.mark.parametrize(
    "url",
    ["http://localhost:1", "http://127.0.0.2:1", "http://[::1]:1", "http://in.house:1", "http://10.1.2.3:1"],
)
def test_not_everything_goes_through_a_proxy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """URLs of this machine, and hosts in NO_PROXY, are reached directly."""
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "in.house, 10.0.0.0/8")
    assert proxy_of(url) is None
    assert proxy_of("http://elsewhere:1") is not None


@pytest.mark.parametrize(
    ("url", "excepted"),
    [
        ("http://ps.internal:8700", True),
        ("http://ps.internal:8701", False),
        ("https://a.in.house", True),
        ("http://a.in.house", False),
        ("http://10.0.0.5:8700", True),
        ("http://10.0.0.5:1", False),
        ("http://[fd00::1]:8700", True),
        ("http://[fd00::2]:8700", True),
        ("http://[fd00::2]:8701", False),
        ("http://[fd00::3]:8700", False),
    ],
)
def test_what_needs_no_proxy_may_be_given_with_a_port(
    url: str, excepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of NO_PROXY with a port are of that port alone, and IPv6 addresses may be in brackets."""
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "ps.internal:8700,in.house:443,10.0.0.5:8700,[fd00::1],[fd00::2]:8700,fd00::3:8700")
    assert (proxy_of(url) is None) == excepted


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.2:1", True),
        ("http://[::1]:1", True),
        ("http://localhost", True),
        ("http://127.example:1", False),
    ],
)
def test_a_url_of_this_machine_has_its_address(url: str, here: bool) -> None:
    """Loopback addresses and `localhost` are this machine; a name that only begins like one is not."""
    assert is_here(url) == here


async def test_a_cancelled_request_over_http1_leaves_nothing_running() -> None:
    """Once a request on asyncio is cancelled, what still comes for it is not written to its sink."""
    begun, cancelled = threading.Event(), threading.Event()

    def slow(connected: socket.socket) -> None:
        if connected.recv(65536).startswith(b"PRI"):
            return
        connected.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nearl")
        begun.set()
        assert cancelled.wait(20.0)
        assert not connected.recv(65536), "the client has not hung up"

    sink = Kept()
    with serving(slow) as url:
        transport = AsyncTransport((url,), Credentials())
        asking = asyncio.ensure_future(transport.perform([Request("GET", "/pull", sink=sink)]))
        assert await asyncio.to_thread(begun.wait, 20.0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        cancelled.set()
        await transport.close()
    assert sink.ended == 0
