"""Several requests that one call waits for: who performs them, and what an interrupt leaves behind."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from paramserver.client.calls import Request, Response
from paramserver.client.credentials import NO_CREDENTIALS
from paramserver.client.together import Helpers
from paramserver.client.transport import BlockingTransport

TRAINS_ON = """
import atexit, sys, threading
from paramserver.client.calls import Request
from paramserver.client.credentials import NO_CREDENTIALS
from paramserver.client.transport import BlockingTransport

transport = BlockingTransport(sys.argv[1:], NO_CREDENTIALS)

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


def eventually(true: Callable[[], bool]) -> None:
    """Wait until it is."""
    deadline = time.monotonic() + 20.0
    while not true():
        assert time.monotonic() < deadline
        gc.collect()


def ctrl_c() -> None:
    """As the terminal sends it."""
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of what serves each HTTP/1.1 connection in a thread; what fails there fails here."""
    failed: list[BaseException] = []

    def run(connected: socket.socket) -> None:
        with connected:
            try:
                serve(connected)
            except BaseException as e:
                failed.append(e)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=run, args=listener.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
    assert not failed, failed


def answering(connected: socket.socket) -> None:
    """Every request without a body, with 200."""
    while connected.recv(65536):
        connected.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")


def statuses(transport: BlockingTransport, *requests: Request) -> list[int]:
    """Of the answers."""
    return [o.status for o in transport.perform(requests) if isinstance(o, Response)]


def test_threads_train_on_after_the_main_one_has_ended() -> None:
    """Requests to several shards included, and what a program does at its exit."""
    with serving(answering) as url:
        done = subprocess.run([sys.executable, "-c", TRAINS_ON, url], capture_output=True, text=True, timeout=60.0)
    assert (done.stdout, done.stderr) == ("[200, 200]\n" * 22, "")


def test_where_no_thread_can_be_had_requests_are_performed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has no more of them, or the interpreter is ending and makes none."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("paramserver"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with serving(answering) as url:
        transport = BlockingTransport((url,), NO_CREDENTIALS)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            assert statuses(transport, *[Request("GET", "/livez")] * 3) == [200] * 3
        transport.close()


def test_what_is_asked_for_at_the_same_time_is_done_at_the_same_time() -> None:
    """A thread that has just been made for one piece of work is not promised to another one."""
    helpers = Helpers(40)
    together = threading.Barrier(41)
    for _ in range(40):
        helpers.ask(lambda: together.wait(10.0))
    together.wait(10.0)
    helpers.close()


def test_threads_end_with_the_client_they_help() -> None:
    """One that is dropped without being closed leaves none behind."""
    done: list[threading.Thread] = []
    helpers = Helpers(2)
    for i in range(4):
        helpers.ask(lambda: done.append(threading.current_thread()))
        eventually(lambda i=i: len(done) > i)  # type: ignore[misc]
    del helpers

    eventually(lambda: not any(t.is_alive() for t in done))
