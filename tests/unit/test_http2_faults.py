"""The client's HTTP/2 connections, blocking and on asyncio, when they end, break or fall silent."""

import asyncio
import gc
import os
import socket
import sys
import threading
import time
import weakref
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.unit.scripted_server import OK, Blocking, Kept, Kind, OnLoop, Peer, Pings, Server, both_clients

from paramserver.errors import PsError
from paramserver.net import connection, http2
from paramserver.net.calls import Outcome, Request, Response, TakenTooSlowly
from paramserver.net.connection import Connection
from paramserver.net.direct import AsyncDirectTransport
from paramserver.wire import http2 as wire


@both_clients
def test_a_connection_that_ends_between_requests_is_replaced(kind: Kind) -> None:
    """If the server closes a connection, sends GOAWAY or refuses a stream, the request is sent on a new connection."""

    def closing(peer: Peer) -> None:
        peer.send(peer.answer(peer.until(wire.HEADERS), b"1"))

    def leaving(peer: Peer) -> None:
        stream = peer.until(wire.HEADERS)
        peer.send(peer.answer(stream, b"2") + wire.goaway(stream, wire.NO_ERROR))
        assert not peer.socket.recv(100)

    def refusing(peer: Peer) -> None:
        peer.send(peer.answer(peer.until(wire.HEADERS), b"3"))
        peer.send(wire.u32_frame(peer.until(wire.HEADERS), wire.RST_STREAM, wire.REFUSED_STREAM))

    with Server(kind, closing, leaving, refusing, closing) as server:
        bodies = [a.body if isinstance(a, Response) else a for a in (server.ask() for _ in range(4))]
        assert bodies == [b"1", b"2", b"3", b"1"]


def test_an_address_without_a_kept_connection_is_forgotten() -> None:
    """Nothing is kept for an address without an idle connection, because restarted shards have new addresses."""

    def leaving(peer: Peer) -> None:
        stream = peer.until(wire.HEADERS)
        peer.send(wire.goaway(stream, wire.NO_ERROR) + peer.answer(stream, b"1"))

    with Server(Blocking, leaving) as server:
        assert isinstance(server.ask(), Response)
        assert isinstance(server.transport, Blocking)
        assert not server.transport._idle.addresses()


@both_clients
def test_a_request_that_breaks_in_the_middle_is_in_doubt(kind: Kind) -> None:
    """A request whose new connection breaks before the response is in doubt: it may have been executed."""

    def dying(peer: Peer) -> None:
        peer.until(wire.HEADERS)

    def talking(peer: Peer) -> None:
        peer.until(wire.HEADERS)
        peer.send(b"HTTP/1.1 200 OK\r\n\r\n" * 10)
        with suppress(ConnectionResetError):
            while peer.socket.recv(100):
                pass

    with Server(kind, dying, talking) as server:
        outcomes = [server.ask(), server.ask()]
        assert [o.code for o in outcomes if isinstance(o, PsError)] == ["in_doubt", "in_doubt"]
        server.thread.join(10.0)
        assert not server.thread.is_alive(), "the client kept a connection that does not speak HTTP/2"


@both_clients
def test_a_request_that_was_not_sent_whole_in_time_is_not_in_doubt(kind: Kind) -> None:
    """A change whose body the server did not take whole by the deadline was certainly not made: so says its error."""

    def reluctant(peer: Peer) -> None:
        peer.send(wire.settings({}))
        peer.until(wire.HEADERS)
        with suppress(AssertionError, OSError):  # the client hangs up
            peer.until(wire.GOAWAY)

    with Server(kind, reluctant) as server:
        outcome = server.transport.send(Request("POST", "/push", bytes(100_000), timeout_s=0.5), server.url)
    assert isinstance(outcome, TakenTooSlowly)
    assert (outcome.code, outcome.retryable, "timeout=" in outcome.hint) == ("unavailable", True, True)
    assert f"{wire.WINDOW_BYTES} of 100000 bytes" in outcome.detail


@both_clients
def test_a_request_that_broke_off_while_it_was_sent_is_not_in_doubt(kind: Kind) -> None:
    """A change whose new connection ended before its whole body was sent was certainly not made."""

    def leaving(peer: Peer) -> None:
        peer.until(wire.HEADERS)

    with Server(kind, leaving) as server:
        outcome = server.transport.send(Request("POST", "/push", bytes(100_000)), server.url)
    assert isinstance(outcome, PsError)
    assert (outcome.code, outcome.retryable) == ("unavailable", True)
    assert "ended while the request was sent" in outcome.detail


@both_clients
@pytest.mark.parametrize(
    ("path", "repeated"), [("/push", False), ("/internal/set/m", False), ("/pull", True), ("/slots", True)]
)
def test_a_change_is_not_repeated_by_the_transport(kind: Kind, path: str, repeated: bool) -> None:
    """If a kept connection ends after it took a request, only one that changes nothing is sent again at once.

    Any other is in doubt: the answer to a second attempt, such as a refusal, would hide that the first may be done.
    """

    def dying(peer: Peer) -> None:
        peer.send(peer.answer(peer.until(wire.HEADERS), b"1"))
        peer.until(wire.DATA, wire.END_STREAM)

    def answering(peer: Peer) -> None:
        peer.send(peer.answer(peer.until(wire.DATA, wire.END_STREAM), b"2"))

    with Server(kind, dying, answering) as server:
        assert isinstance(server.ask(), Response)
        outcome = server.transport.send(Request("POST", path, b"1"), server.url)
        if isinstance(outcome, PsError):
            assert outcome.code == "in_doubt"
            again = server.transport.send(Request("POST", path, b"1"), server.url)
            assert isinstance(again, Response)
    assert isinstance(outcome, Response) == repeated


@both_clients
def test_a_change_that_a_closed_connection_did_not_take_is_sent_again(kind: Kind) -> None:
    """A request that a kept connection breaks in the middle of is sent on a new one: only whole ones are executed."""

    def leaving(peer: Peer) -> None:
        peer.send(peer.answer(peer.until(wire.HEADERS), b"1"))
        left.set()

    def answering(peer: Peer) -> None:
        peer.send(wire.settings({wire.INITIAL_WINDOW_SIZE: 1 << 24}) + wire.u32_frame(0, wire.WINDOW_UPDATE, 1 << 24))
        peer.send(peer.answer(peer.until(wire.DATA, wire.END_STREAM), b"2"))

    left = threading.Event()
    with Server(kind, leaving, answering) as server:
        assert isinstance(server.ask(), Response)
        assert left.wait(20.0)
        outcome = server.transport.send(Request("POST", "/push", bytes(1 << 20)), server.url)
        assert isinstance(outcome, Response)


@both_clients
def test_an_answer_without_a_place_is_bounded(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that goes into no sink and exceeds the bound on bodies is given up, so that no server can fill memory."""
    monkeypatch.setattr(http2, "BODY_BYTES_MAX", 100)

    def script(peer: Peer) -> None:
        peer.send(peer.answer(peer.until(wire.HEADERS), bytes(100)))
        peer.send(peer.answer(peer.until(wire.HEADERS), bytes(101)))

    with Server(kind, script) as server:
        assert isinstance(server.ask(), Response)
        refused = server.ask()
        assert isinstance(refused, PsError)
        assert "limited to 100 bytes" in refused.detail


@both_clients
@pytest.mark.parametrize("intruder", [wire.frame(wire.DATA, 0, 1, b"lost"), wire.frame(wire.CONTINUATION, 0, 3)])
def test_a_frame_inside_a_header_block_ends_the_connection(kind: Kind, intruder: bytes) -> None:
    """DATA, or another stream's headers, between HEADERS and their end is no HTTP/2 (RFC 9113, 6.10).

    The request ends at once, in doubt.
    """

    def interleaving(peer: Peer) -> None:
        stream = peer.until(wire.HEADERS)
        peer.send(
            wire.frame(wire.HEADERS, 0, stream, b"\x88")
            + intruder
            + wire.frame(wire.CONTINUATION, wire.END_HEADERS, stream, b"")
            + wire.frame(wire.DATA, wire.END_STREAM, stream, b"kept")
        )
        with suppress(ConnectionResetError):
            while peer.socket.recv(100):
                pass

    with Server(kind, interleaving) as server:
        outcome = server.ask()
    assert isinstance(outcome, PsError), outcome
    assert outcome.code == "in_doubt"


@both_clients
def test_a_silent_server_that_lives_is_waited_for(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent server that acknowledges every PING is waited for."""
    pings = Pings(monkeypatch)

    def script(peer: Peer) -> None:
        stream = peer.until(wire.HEADERS)
        for _ in range(3):
            pings.answer(peer)
        pings.answer(peer, peer.answer(stream, b"late"))

    with Server(kind, script) as server:
        answer = server.ask()
        assert isinstance(answer, Response)
        assert answer.body == b"late"


@both_clients
def test_a_slow_server_is_waited_for(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece of a slow response counts as a sign of life, even in the middle of a large frame."""
    pings, body = Pings(monkeypatch), bytes(range(250)) * 400

    def script(peer: Peer) -> None:
        stream = peer.until(wire.HEADERS)
        head = wire.frame(wire.HEADERS, wire.END_HEADERS, stream, OK)
        peer.send(wire.settings({}) + head + wire.head(len(body), wire.DATA, wire.END_STREAM, stream))
        for at in range(0, len(body), 20_000):
            pings.answer(peer, body[at : at + 20_000])

    with Server(kind, script) as server:
        kept = Kept(1 << 20)
        assert isinstance(server.ask(sink=kept), Response)
        assert kept.data == body


@both_clients
def test_a_silent_server_that_is_dead_is_given_up(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ignores a PING, or still has not answered at the request's timeout, is given up as in doubt."""
    monkeypatch.setattr(http2, "SILENCE_S", 0.05)

    def dead(peer: Peer) -> None:
        peer.until(wire.PING)
        while peer.socket.recv(100):
            pass

    def chatty(peer: Peer) -> None:
        try:
            while True:
                peer.until(wire.PING)
                peer.send(wire.frame(wire.PING, wire.ACK, 0, bytes(8)))
        except (AssertionError, OSError):
            pass  # the client has disconnected

    with Server(kind, dead, chatty) as server:
        outcomes = [server.ask(), server.ask(timeout_s=1.0)]
        assert [o.code for o in outcomes if isinstance(o, PsError)] == ["in_doubt", "in_doubt"]


def test_a_server_that_was_slow_to_read_is_pinged_like_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """If sending to a server once timed out, its later silence is still answered with a PING before it is given up."""
    pings = Pings(monkeypatch)

    class Stalling(socket.socket):
        """A socket whose first send times out."""

        stalls = True

        def send(self, data: Any, flags: int = 0) -> int:
            if self.stalls:
                self.stalls = False
                raise TimeoutError
            return super().send(data, flags)

    def script(peer: Peer) -> None:
        stream = peer.until(wire.HEADERS)
        pings.answer(peer, wire.frame(wire.PING, wire.ACK, 0, bytes(8)) + peer.answer(stream, b"late"))

    with Server(Blocking, script) as server, closing(Stalling()) as connected:
        connected.connect(server.listener.getsockname())
        assert isinstance(server.transport, Blocking)
        headers = server.transport._headers(Request("GET", "/p"), server.url, [])
        assert Connection(connected).ask(headers, [], None, 20.0).body == b"late"


def test_a_body_that_is_read_slowly_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that keeps reading a little of a large body is not waited for beyond the request's timeout."""
    clock = Clock()
    monkeypatch.setattr(connection, "time", clock)

    class Trickling(socket.socket):
        """A socket that takes 100 bytes a second."""

        def send(self, data: Any, flags: int = 0) -> int:
            clock.s += 1.0
            return super().send(data[:100], flags)

        def sendmsg(self, buffers: Any, *_: Any) -> int:
            return self.send(b"".join(buffers))

    def script(peer: Peer) -> None:
        while peer.socket.recv(1 << 16):
            pass

    with Server(Blocking, script) as server, closing(Trickling()) as connected:
        connected.connect(server.listener.getsockname())
        assert isinstance(server.transport, Blocking)
        body = [memoryview(bytes(60_000))]
        headers = server.transport._headers(Request("PUT", "/p"), server.url, body)
        with pytest.raises(TimeoutError):
            Connection(connected).ask(headers, body, None, 20.0)
        assert 20.0 <= clock.s < 25.0


class Clock:
    """A clock in the place of the module `time`, which only the test moves."""

    s = 0.0

    def monotonic(self) -> float:
        return self.s


@both_clients
def test_a_request_that_is_sent_again_has_no_more_time(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry on a new connection gets only the time that the first attempt has left of the request's timeout."""
    monkeypatch.setattr(http2, "SILENCE_S", 0.5)

    def pong(peer: Peer) -> None:
        peer.until(wire.PING)
        peer.send(wire.frame(wire.PING, wire.ACK, 0, bytes(8)))

    def breaking(peer: Peer) -> None:
        peer.send(peer.answer(peer.until(wire.HEADERS), b"1"))
        peer.until(wire.HEADERS)
        for _ in range(3):  # 1.5 s
            pong(peer)

    pings = count()

    def chatty(peer: Peer) -> None:
        with suppress(AssertionError, OSError):  # the client disconnects
            while True:
                pong(peer)
                next(pings)

    with Server(kind, breaking, chatty) as server:
        assert isinstance(server.ask(), Response)
        begun_s = time.monotonic()
        outcome = server.ask(timeout_s=3.0)
        assert time.monotonic() - begun_s >= 3.0
        # The client sends one each 0.5 s: at most 3 in the 1.5 s that are left, 5 or 6 in a whole timeout of its own.
        assert next(pings) <= 4
        assert isinstance(outcome, PsError)
        assert (outcome.code, "3 s" in outcome.detail) == ("in_doubt", True)


@both_clients
def test_an_idle_connection_keeps_nothing_of_its_last_request(kind: Kind) -> None:
    """An idle connection keeps no reference to its last request's sink, which could keep the client itself alive."""

    def script(peer: Peer) -> None:
        peer.send(peer.answer(peer.until(wire.HEADERS), b"abc"))
        assert not peer.socket.recv(100)

    with Server(kind, script) as server:
        kept = Kept()
        assert isinstance(server.ask(sink=kept), Response)
        gone = weakref.ref(kept)
        del kept
        gc.collect()  # asyncio of Python 3.12 and 3.13.0 leaves a cycle that holds its callers when it connects
        assert gone() is None


def test_a_client_that_is_dropped_leaves_no_socket_open() -> None:
    """A dropped client closes its sockets even as part of a reference cycle, whose parts are collected in any order."""

    def serve(peer: Peer) -> None:
        peer.send(wire.settings({}) + peer.answer(peer.until(wire.HEADERS), b"1"))
        with pytest.raises(AssertionError, match="hung up"):
            peer.until(wire.HEADERS)

    gc.collect()  # what earlier tests have left
    with Server(Blocking, serve) as server:
        assert isinstance(server.transport.send(Request("GET", "/"), server.url), Response)
        server.transport.itself = server.transport  # type: ignore[union-attr]
        server.transport = Blocking()
        with pytest.MonkeyPatch.context() as patch:
            failed: list[object] = []
            patch.setattr(sys, "unraisablehook", failed.append)
            gc.collect()
        assert not failed


@both_clients
@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="Linux tells whose socket it is")
def test_a_socket_of_another_user_is_told_nothing(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Unix socket that another user listens on is unreachable, and is sent nothing: the token goes to nobody else."""
    user = os.geteuid()
    with socket.socket(socket.AF_UNIX) as listener, closing(kind()) as transport:
        listener.bind(str(tmp_path / "requests"))
        listener.listen()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        outcome = transport.send(Request("GET", "/livez"), f"unix://{tmp_path}/requests")
        assert isinstance(outcome, PsError)
        assert (outcome.code, "another user" in outcome.detail) == ("unreachable", True)
        with listener.accept()[0] as connected:
            assert connected.recv(100) == b""


@both_clients
def test_nobody_there_is_unreachable(kind: Kind) -> None:
    """A refused connection is `unreachable`, as the request was certainly not executed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with closing(kind()) as transport:
        outcomes = [transport.send(Request("GET", "/", to=to), url) for to in (None, url)]
    assert [str(o) for o in outcomes] == [
        f"cannot reach {url} (connection refused): is a cluster up? 'psctl up' starts one",
        f"cannot reach the shard at {url} (connection refused)",
    ]
    assert [o.code for o in outcomes if isinstance(o, PsError)] == ["unreachable"] * 2


@both_clients
@pytest.mark.parametrize(
    ("method", "path", "code"),
    [("POST", "/push", "in_doubt"), ("POST", "/internal/set/m", "in_doubt"), ("POST", "/pull", "unreachable"),
     ("GET", "/livez", "unreachable")],
)  # fmt: skip
def test_a_push_that_a_shard_may_have_heard_before_it_died_is_in_doubt(
    kind: Kind, method: str, path: str, code: str
) -> None:
    """If a shard dies with a request in flight, and the retry reaches nobody, a change is in doubt, a read is not."""

    def dying(peer: Peer) -> None:
        peer.send(peer.answer(peer.until(wire.HEADERS), b"1"))
        peer.until(wire.HEADERS)
        server.listener.close()

    with Server(kind, dying) as server:
        assert isinstance(server.ask(), Response)
        request = Request(method, path, b"1" if method == "POST" else None)
        outcomes = [server.transport.send(request, server.url) for _ in range(2)]

    assert [o.code for o in outcomes if isinstance(o, PsError)] == [code, "unreachable"]


def test_when_nobody_is_there_any_more_all_kept_connections_are_let_go() -> None:
    """Once a shard cannot be reached, all idle connections to it are dropped, so the next request does not try them."""

    def two(peer: Peer) -> None:
        stream, other = peer.until(wire.HEADERS), server.listener.accept()[0]
        with other:
            second = Peer(other)
            second.send(second.answer(second.until(wire.HEADERS), b"2"))
            assert idle.wait(20.0)
            peer.send(peer.answer(stream, b"1"))
            peer.until(wire.HEADERS)
            server.listener.close()

    idle = threading.Event()
    with Server(Blocking, two) as server:
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(server.ask) for _ in range(2)]
            wait(asked, return_when=FIRST_COMPLETED)
            idle.set()  # the other connection becomes idle last, so the next request uses it
            assert all(isinstance(a.result(), Response) for a in asked)
        request = Request("POST", "/push", b"1")
        outcomes = [server.transport.send(request, server.url) for _ in range(2)]

    assert [o.code for o in outcomes if isinstance(o, PsError)] == ["in_doubt", "unreachable"]


@both_clients
def test_a_connection_that_a_request_timed_out_on_takes_no_other(kind: Kind) -> None:
    """A request that hears nothing until its timeout leaves its connection: a network may have lost that one alone."""

    def lost(peer: Peer) -> None:
        peer.send(peer.answer(peer.until(wire.HEADERS), b"1"))
        peer.until(wire.HEADERS)
        connected.append(peer.socket.dup())  # stays open, and silent

    def fresh(peer: Peer) -> None:
        peer.send(peer.answer(peer.until(wire.HEADERS), b"2"))

    connected: list[socket.socket] = []
    with Server(kind, lost, fresh) as server:
        outcomes = [server.ask(timeout_s=t) for t in (20.0, 0.3, 20.0)]
        assert [o.body if isinstance(o, Response) else o.code for o in outcomes] == [b"1", "in_doubt", b"2"]
    connected[0].close()


def test_a_request_that_times_out_on_a_connection_that_lives_leaves_it() -> None:
    """A long request goes on where it is, and others follow it there, if one beside it is answered too late."""

    def slow(peer: Peer) -> None:
        first = peer.until(wire.HEADERS)
        late = peer.until(wire.HEADERS)
        peer.send(wire.settings({}))  # it lives
        peer.until(wire.RST_STREAM)
        peer.send(peer.answer(late, b"late") + peer.answer(peer.until(wire.HEADERS), b"3") + peer.answer(first, b"1"))

    async def asked(transport: AsyncDirectTransport, url: str) -> list[Outcome]:
        long = asyncio.ensure_future(transport.send(Request("GET", "/p", timeout_s=20.0), url))
        await asyncio.sleep(0)
        short = await transport.send(Request("GET", "/p", timeout_s=1.0), url)
        third = await transport.send(Request("GET", "/p", timeout_s=20.0), url)
        return [await long, short, third]

    with Server(OnLoop, slow) as server:
        assert isinstance(server.transport, OnLoop)
        outcomes = server.transport.runner.run(asked(server.transport.transport, server.url))
        assert [o.body if isinstance(o, Response) else o.code for o in outcomes] == [b"1", "in_doubt", b"3"]


def test_after_a_timeout_all_kept_connections_are_let_go() -> None:
    """Once a request to a shard hears nothing, the idle connections to it are dropped: they may be lost as well."""

    def two(peer: Peer) -> None:
        stream, other = peer.until(wire.HEADERS), server.listener.accept()[0]
        second = Peer(other)
        second.send(second.answer(second.until(wire.HEADERS), b"2"))
        assert idle.wait(20.0)
        peer.send(peer.answer(stream, b"1"))
        connected.extend([peer.socket.dup(), other])  # stay open, and silent

    def fresh(peer: Peer) -> None:
        peer.send(peer.answer(peer.until(wire.HEADERS), b"3"))

    idle, connected = threading.Event(), list[socket.socket]()
    with Server(Blocking, two, fresh) as server:
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(server.ask) for _ in range(2)]
            wait(asked, return_when=FIRST_COMPLETED)
            idle.set()
            assert all(isinstance(a.result(), Response) for a in asked)
        outcomes = [server.ask(timeout_s=t) for t in (0.3, 5.0)]
        assert [o.body if isinstance(o, Response) else o.code for o in outcomes] == ["in_doubt", b"3"]
    for c in connected:
        c.close()
