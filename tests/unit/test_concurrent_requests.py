"""Concurrent requests of one call: which threads perform them, and what an interrupt leaves behind."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from functools import partial

import pytest
from tests.unit.scripted_server import OK, Blocking, Kept, Peer, Server, serving
from tests.waiting import eventually

from paramserver.client.uploads import AT_ONCE
from paramserver.net.calls import Call, Request, Response
from paramserver.net.concurrent_requests import CallerInterrupted, ConcurrentRequests, Helpers, Interruptible
from paramserver.net.credentials import Credentials
from paramserver.net.direct import DirectTransport
from paramserver.net.plain import PlainTransport
from paramserver.net.transport import BlockingTransport
from paramserver.wire import http2 as wire

TRAINS_ON = """
import atexit, sys, threading
from paramserver.net.calls import Request
from paramserver.net.credentials import Credentials
from paramserver.net.transport import BlockingTransport

transport = BlockingTransport(sys.argv[1:], Credentials())

def ask():
    print([o.status for o in transport.perform([Request("GET", "/livez")] * 2)], flush=True)

def train():
    threading.main_thread().join()
    for _ in range(20):
        ask()

ask()
threading.Thread(target=train).start()
atexit.register(ask)
"""
BEGINS_LATE = """
import sys, threading
import paramserver as ps

def train():
    threading.main_thread().join()
    with ps.connect(sys.argv[1]) as client:
        print(client)

threading.Thread(target=train).start()
"""


def ctrl_c() -> None:
    """Send SIGINT, as a terminal does, once the main thread waits for a helper or for its own answer."""
    main = threading.main_thread().ident
    eventually(lambda: sys._current_frames()[main or 0].f_code.co_name in ("outcomes", "_read"))
    os.kill(os.getpid(), signal.SIGINT)


def answering(connected: socket.socket) -> None:
    """Answer every request, which must have no body, with 200 and an empty object."""
    while connected.recv(65536):
        connected.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")


def statuses(transport: BlockingTransport, *requests: Request) -> list[int]:
    """Perform the requests and return the status of each response."""
    return [o.status for o in transport.perform(requests) if isinstance(o, Response)]


def test_threads_train_on_after_the_main_one_has_ended() -> None:
    """Threads and exit handlers can perform concurrent requests after the main thread has ended."""
    with serving(answering) as url:
        done = subprocess.run([sys.executable, "-c", TRAINS_ON, url], capture_output=True, text=True, timeout=60.0)
    assert (done.stdout, done.stderr) == ("[200, 200]\n" * 22, "")


def test_a_thread_may_begin_after_the_main_one_has_ended() -> None:
    """A thread that makes the process's first client after the main thread has ended can use it."""
    with serving(answering) as url:
        done = subprocess.run([sys.executable, "-c", BEGINS_LATE, url], capture_output=True, text=True, timeout=60.0)
    assert (done.stdout, done.stderr) == (f"<Client of {url}>\n", "")


def test_where_no_thread_can_be_had_requests_are_performed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no helper thread can be started, the calling thread performs all requests itself.

    The system may be out of threads, or the interpreter is shutting down.
    """
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("paramserver"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with serving(answering) as url:
        transport = BlockingTransport((url,), Credentials())
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            assert statuses(transport, *[Request("GET", "/livez")] * 3) == [200] * 3
        transport.close()


def test_what_is_asked_for_at_the_same_time_is_done_at_the_same_time() -> None:
    """Work submitted at the same time runs at the same time.

    A thread just started for one piece of work must not be assigned to another.
    """
    helpers = Helpers(40)
    together = threading.Barrier(41)
    for _ in range(40):
        helpers.submit(lambda: together.wait(10.0))
    together.wait(10.0)
    helpers.close()


@pytest.mark.parametrize("kind", [DirectTransport, PlainTransport])
def test_what_is_sent_at_once_again_and_again_connects_once(kind: type[DirectTransport] | type[PlainTransport]) -> None:
    """As many requests as a call sends at once to one node leave their connections to the next call, all of them."""
    together, connections = threading.Barrier(AT_ONCE), list[socket.socket]()

    def serve(connected: socket.socket) -> None:
        connections.append(connected)
        if kind is PlainTransport:
            while connected.recv(65536):
                together.wait(20.0)
                connected.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        peer = Peer(connected)
        peer.send(wire.settings({}))
        with suppress(AssertionError):  # the client hung up
            while stream := peer.until(wire.HEADERS):
                together.wait(20.0)
                peer.send(peer.answer(stream, b""))

    transport, helpers = kind(Credentials()), Helpers(AT_ONCE)
    with serving(serve) as url:
        for _ in range(3):
            requests = [Request("GET", "/models")] * AT_ONCE
            call = ConcurrentRequests(lambda request, within: transport.send(request, url, within), requests, None)
            assert [o.status for o in call.outcomes(helpers) if isinstance(o, Response)] == [200] * AT_ONCE
        transport.close()
    helpers.close()
    assert len(connections) == AT_ONCE


def test_threads_end_with_the_client_they_help() -> None:
    """Helper threads end when their pool is dropped without being closed."""
    done: list[threading.Thread] = []
    helpers = Helpers(2)
    for i in range(4):
        helpers.submit(lambda: done.append(threading.current_thread()))
        eventually(lambda i=i: len(done) > i)  # type: ignore[misc]
    del helpers

    eventually(lambda: not any(t.is_alive() for t in done))


def has_nothing_new(peer: Peer) -> None:
    """Receive all that the client still sends, and check that nothing written after the interrupt is in it."""
    with suppress(OSError):
        for stream in (0, 1):
            peer.send(wire.u32_frame(stream, wire.WINDOW_UPDATE, 2 << 20))
        while data := peer.socket.recv(65536):
            assert b"new gradient" not in data


def waiting(peer: Peer, begun: threading.Event, *, answers: bool) -> None:
    """Play a shard that answers once another has its request, or never.

    It waits for `begun`, so that a helper performs the request to the other shard.
    """
    stream = peer.until(wire.HEADERS)
    assert begun.wait(20.0)
    if answers:
        peer.send(peer.answer(stream, b""))
    with suppress(OSError):
        while peer.socket.recv(65536):
            pass


@pytest.mark.parametrize("answers", [True, False])
def test_an_interrupted_push_sends_nothing_any_more(answers: bool) -> None:
    """After Ctrl-C a push sends nothing more, whether the caller waited for a helper or for its own answer.

    The caller may overwrite its array as soon as the interrupt is raised.
    """
    begun, overwritten = threading.Event(), threading.Event()
    gradient = bytearray(1 << 20)

    def slow(peer: Peer) -> None:
        peer.until(wire.DATA)
        begun.set()
        ctrl_c()
        assert overwritten.wait(20.0)
        has_nothing_new(peer)

    first = partial(waiting, begun=begun, answers=answers)
    with Server(Blocking, first) as one, Server(Blocking, slow) as two:
        transport = BlockingTransport((one.url,), Credentials())
        with pytest.raises(KeyboardInterrupt):
            transport.perform([Request("POST", "/push", memoryview(gradient), to=s.url) for s in (one, two)])
        gradient[:] = b"new gradient" * (len(gradient) // 12) + b"    "
        overwritten.set()
        transport.close()


def test_what_a_thread_sends_for_another_one_ends_with_it() -> None:
    """After `revoke` no thread that works for the caller sends from its array any more, and the call is not retried."""
    begun, overwritten = threading.Barrier(3), threading.Event()
    gradient = bytearray(1 << 20)
    owner, ended = Interruptible(), list[type[BaseException]]()

    def slow(peer: Peer) -> None:
        peer.until(wire.DATA)
        begun.wait(20.0)
        assert overwritten.wait(20.0)
        has_nothing_new(peer)

    def pushes(*urls: str) -> Call[None]:
        while True:
            yield [Request("POST", "/push", memoryview(gradient), to=url) for url in urls]

    def send() -> None:
        try:
            transport.run(pushes(one.url, two.url), owner)
        except BaseException as e:
            ended.append(type(e))

    with Server(Blocking, slow) as one, Server(Blocking, slow) as two:
        transport = BlockingTransport((one.url,), Credentials())
        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        begun.wait(20.0)
        owner.revoke()
        gradient[:] = b"new gradient" * (len(gradient) // 12) + b"    "
        overwritten.set()
        sender.join(20.0)
        transport.close()
    assert ended == [CallerInterrupted]


@pytest.mark.parametrize("answers", [True, False])
def test_an_interrupted_pull_writes_nothing_any_more(answers: bool) -> None:
    """What a shard sends after Ctrl-C is not written to the sink of the interrupted pull; the connection is closed."""
    begun, interrupted = threading.Event(), threading.Event()
    sink = Kept()

    def slow(peer: Peer) -> None:
        stream = peer.until(wire.HEADERS)
        peer.send(wire.frame(wire.HEADERS, wire.END_HEADERS, stream, OK) + wire.frame(wire.DATA, 0, stream, b"early"))
        eventually(lambda: sink.data == b"early")
        begun.set()
        ctrl_c()
        assert interrupted.wait(20.0)
        with suppress(OSError):
            peer.send(wire.frame(wire.DATA, wire.END_STREAM, stream, b"late"))
            assert not peer.socket.recv(65536), "the client has not hung up"

    first = partial(waiting, begun=begun, answers=answers)
    with Server(Blocking, first) as one, Server(Blocking, slow) as two:
        transport = BlockingTransport((one.url,), Credentials())
        with pytest.raises(KeyboardInterrupt):
            transport.perform([Request("GET", "/pull", to=one.url), Request("GET", "/pull", to=two.url, sink=sink)])
        interrupted.set()
        transport.close()
    assert (sink.data, sink.ended) == (b"early", 0)


def test_neither_do_requests_over_http1() -> None:
    """Interrupted requests over HTTP/1.1 send no data written later, and write nothing to their sinks."""
    seen: list[bytes] = []
    begun, interrupted, gone = threading.Event(), threading.Event(), threading.Event()

    def serve(connected: socket.socket) -> None:
        while (body := connected.recv(65536)) and b"/second" not in body:
            assert b"/livez" in body or begun.wait(20.0)  # until a helper has sent the second one
            connected.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        if not body:
            return
        begun.set()
        ctrl_c()
        assert interrupted.wait(20.0)
        with suppress(OSError):
            while len(body) < len(gradient) and (data := connected.recv(65536)):
                body += data
            assert b"new" not in body
            connected.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\nlate")
        gone.set()

    gradient = bytearray(16 << 20)
    sink = Kept()
    sink.feed = seen.append  # type: ignore[method-assign, assignment]
    end = weakref.ref(sink)
    with serving(serve) as url:
        transport = BlockingTransport((url,), Credentials())
        transport.perform([Request("GET", "/livez")])
        asked = [Request("GET", "/first"), Request("POST", "/second", memoryview(gradient), sink=sink)]
        with pytest.raises(KeyboardInterrupt):
            transport.perform(asked)
        gradient[:] = b"new " * (len(gradient) // 4)
        del asked, sink
        interrupted.set()
        assert gone.wait(20.0)
        gc.collect()  # the traceback of the error references the sink
        eventually(lambda: end() is None)
        transport.close()
    assert not seen
