"""How clients connect to a host that has several addresses, and what a blocking one does at its deadline."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
import uvloop
from tests.unit.scripted_server import Peer, serving

from paramserver.errors import Unreachable
from paramserver.net.calls import Outcome, Request, Response
from paramserver.net.connect import connect, connect_on_loop
from paramserver.net.credentials import Credentials
from paramserver.net.direct import AsyncDirectTransport, DirectTransport
from paramserver.net.plain import PlainTransport
from paramserver.net.schemes import in_scheme_spoken
from paramserver.net.transport import BlockingTransport
from paramserver.wire import http2 as wire

NAME = "http://ps.test:8700"


@pytest.fixture
def silent() -> Iterator[int]:
    """A port of this machine that answers no connection, because its queue of them is full."""
    with ExitStack() as some:
        listener = some.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            waiting = some.enter_context(socket.socket())
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect(listener.getsockname())
        yield listener.getsockname()[1]


def name(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    """Let every name have these ports of this machine as its addresses."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses(*ports))


def addresses(*ports: int) -> list[Any]:
    """Return these ports of this machine as a look-up does."""
    return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)) for port in ports]


def unused() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_addresses_that_do_not_answer_do_not_hide_one_that_does(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP/2 and HTTP/1.1, of several addresses the one that answers is found, after refusals and silence."""
    monkeypatch.setattr("paramserver.net.connect._NEXT_S", 0.02)
    heard: list[bytes] = []

    def old(connected: socket.socket) -> None:
        heard.append(connected.recv(65536).split(b"\r\n")[0])
        connected.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    with serving(old) as url, closing(BlockingTransport([NAME], Credentials())) as transport:
        name(monkeypatch, unused(), silent, silent, int(url.rsplit(":", 1)[1]))
        (outcome,) = transport.perform([Request("POST", "/runs", b"{}", timeout_s=5.0)])
        assert in_scheme_spoken(NAME.replace("http:", "https:"), 5.0) == NAME
    assert isinstance(outcome, Response), outcome
    assert heard == [b"PRI * HTTP/2.0", b"POST /runs HTTP/1.1", b"HEAD /livez HTTP/1.1"]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_no_address_takes_the_time_of_the_others_on_an_event_loop(
    run: Callable[..., Outcome], silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the event loops of clients and of nodes, too, the address that answers is found, and if none does, why."""
    monkeypatch.setattr("paramserver.net.connect._NEXT_S", 0.02)

    async def send(*ports: int, timeout_s: float) -> Outcome:
        async def look_up(*_: Any, **__: Any) -> list[Any]:
            return addresses(*ports)

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)  # that of uvloop is not Python's
        transport = AsyncDirectTransport(Credentials())
        outcome = await transport.send(Request("GET", "/livez", timeout_s=timeout_s), NAME)
        await transport.close()
        return outcome

    def node(connected: socket.socket) -> None:
        peer = Peer(connected)
        peer.send(peer.answer(peer.until(wire.HEADERS), b"here"))

    with serving(node) as url:
        found = run(send(unused(), silent, silent, int(url.rsplit(":", 1)[1]), timeout_s=20.0))
    assert isinstance(found, Response), found
    assert found.body == b"here"
    refused, late = run(send(unused(), unused(), timeout_s=20.0)), run(send(unused(), silent, timeout_s=0.1))
    assert isinstance(refused, Unreachable)
    assert "connection refused" in refused.detail
    assert isinstance(late, Unreachable)
    assert "timed out" in late.detail


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_an_address_of_one_link_keeps_its_link_on_an_event_loop(
    run: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An IPv6 address that a look-up finds with a zone is connected to in that zone, as without it it is ambiguous."""
    found = [("fe80::1", 1, 0, 4), ("::1", 1, 0, 0), ("127.0.0.1", 1)]

    async def hosts() -> list[str]:
        loop, asked = asyncio.get_running_loop(), list[str]()

        async def look_up(*_: Any, **__: Any) -> list[Any]:
            return [(socket.AF_UNSPEC, socket.SOCK_STREAM, 0, "", address) for address in found]

        async def refuse(_: Any, host: str, port: int, **__: Any) -> None:
            asked.append(host)
            raise ConnectionRefusedError

        monkeypatch.setattr(loop, "getaddrinfo", look_up)
        monkeypatch.setattr(loop, "create_connection", refuse)
        with pytest.raises(ConnectionRefusedError):
            await connect_on_loop(asyncio.Protocol, "ps.test", 1, None)
        return asked

    assert run(hosts()) == ["fe80::1%4", "::1", "127.0.0.1"]


def test_what_can_be_connected_to_nowhere_says_why(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host none of whose addresses answers is unreachable at the timeout; if all refuse, at once."""
    with closing(BlockingTransport([NAME], Credentials())) as transport:
        name(monkeypatch, unused(), silent)
        (late,) = transport.perform([Request("GET", "/livez", timeout_s=0.1)])
        name(monkeypatch, unused(), unused())
        (refused,) = transport.perform([Request("GET", "/livez", timeout_s=20.0)])
    assert isinstance(late, Unreachable)
    assert "timed out" in late.detail
    assert isinstance(refused, Unreachable)
    assert "connection refused" in refused.detail


def test_where_no_thread_can_be_had_names_are_looked_up_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can be started, the caller's looks a name up: at its end an interpreter starts none for a leave."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    with socket.create_server(("127.0.0.1", 0)) as listener, monkeypatch.context() as patched:
        name(patched, listener.getsockname()[1])
        patched.setattr(threading.Thread, "start", refuse)
        connect("ps.test", 8700, 20.0).close()


@pytest.mark.parametrize("kind", [DirectTransport, PlainTransport])
def test_nothing_is_sent_after_the_deadline(kind: type[DirectTransport] | type[PlainTransport]) -> None:
    """A request whose time is over once there is a connection is unreachable, and not carried out."""
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(kind(Credentials())) as transport:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        outcome = transport.send(Request("POST", "/runs", b"{}", timeout_s=0.0), url)
        connected, _ = listener.accept()
        with connected:
            assert connected.recv(65536) == b""
    assert isinstance(outcome, Unreachable)
