"""Servers on real sockets that follow a test's script, and both client transports to call them with."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import pytest

from paramserver.errors import PsError
from paramserver.net import http2
from paramserver.net.calls import Request, Response
from paramserver.net.credentials import Credentials
from paramserver.net.direct import AsyncDirectTransport, DirectTransport
from paramserver.wire import http2 as wire

OK = wire.encoded([(b":status", b"200"), (b"etag", b"7")])


class Peer:
    """The server's end of one connection."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.scanner = wire.Scanner(1 << 20, 1 << 16)
        preface = b""
        while len(preface) < len(wire.PREFACE):
            preface += connected.recv(len(wire.PREFACE) - len(preface))
        self.frames: list[tuple[int, int, int, bytes]] = []
        self.seen: list[tuple[int, int, int, bytes]] = []
        self.received = 0

    def send(self, data: bytes) -> None:
        """Send raw bytes."""
        self.socket.sendall(data)

    def until(self, kind: int, flags: int = 0) -> int:
        """Read frames up to one of this kind and flags; return its stream.  DATA bytes count in `received`."""
        while True:
            while self.frames:
                k, f, stream, payload = self.frames.pop(0)
                self.received += len(payload) if k == wire.DATA else 0
                if k == kind and f & flags == flags:
                    return stream
            data = self.socket.recv(65536)
            assert data, "the client hung up"
            came = [(k, f, s, bytes(p)) for k, f, s, p, _ in self.scanner.scan(memoryview(data))]
            self.frames += came
            self.seen += came

    def answer(self, stream: int, body: bytes) -> bytes:
        """Return the frames of a response."""
        return wire.frame(wire.HEADERS, wire.END_HEADERS, stream, OK) + wire.frame(
            wire.DATA, wire.END_STREAM, stream, body
        )


class Blocking(DirectTransport):
    """The blocking transport."""

    def __init__(self) -> None:
        super().__init__(Credentials())


class OnLoop:
    """The asyncio transport, with the interface of the blocking one."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.transport = AsyncDirectTransport(Credentials())

    def send(self, request: Request, address: str) -> Response | PsError:
        """Send one request and return its outcome."""
        return self.runner.run(self.transport.send(request, address))

    def close(self) -> None:
        """Close all connections, and the event loop."""
        self.runner.run(self.transport.close())
        self.runner.close()


class Pings:
    """A client that pings waits until its server has shown a sign of life, so that neither need be quick.

    The client's `SILENCE_S` may then be short: a server that gets no CPU time for a while is not taken for dead.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pinging, self._shown = threading.Semaphore(0), threading.Semaphore(0)
        ping = http2.Client.ping

        def pinging(client: http2.Client) -> None:
            ping(client)
            self._pinging.release()
            assert self._shown.acquire(timeout=20.0)

        monkeypatch.setattr(http2.Client, "ping", pinging)
        monkeypatch.setattr(http2, "SILENCE_S", 0.02)

    def answer(self, peer: Peer, data: bytes = wire.frame(wire.PING, wire.ACK, 0, bytes(8))) -> None:
        """Wait for the client's next PING, send `data`, and read the PING itself."""
        assert self._pinging.acquire(timeout=20.0)
        peer.send(data)
        self._shown.release()
        peer.until(wire.PING)


Kind: TypeAlias = type[Blocking] | type[OnLoop]


both_clients = pytest.mark.parametrize("kind", [Blocking, OnLoop])
"""Runs a test with each transport: both follow the same rules."""


class Server:
    """Runs one script per connection, in order; exiting the context fails if a script has failed."""

    def __init__(self, kind: Kind, *scripts: Callable[[Peer], None], tls: ssl.SSLContext | None = None) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.tls = tls
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.listener.getsockname()[1]}"
        self.failed: list[BaseException] = []
        self.thread = threading.Thread(target=self.serve, args=(scripts,), daemon=True)
        self.transport: DirectTransport | OnLoop = kind()

    def serve(self, scripts: tuple[Callable[[Peer], None], ...]) -> None:
        """Accept one connection per script, and run it."""
        try:
            for script in scripts:
                connected, _ = self.listener.accept()
                if self.tls is not None:
                    connected = self.tls.wrap_socket(connected, server_side=True)
                with connected:
                    connected.settimeout(20.0)
                    script(Peer(connected))
        except BaseException as e:
            self.failed.append(e)

    def __enter__(self) -> "Server":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()
        self.thread.join(20.0)
        self.listener.close()
        assert not self.failed, self.failed

    def ask(self, body: bytes | None = None, timeout_s: float = 20.0, sink: "Kept | None" = None) -> Response | PsError:
        """Send one request and return its outcome."""
        method = "GET" if body is None else "POST"
        return self.transport.send(Request(method, "/p", body, {}, self.url, sink, timeout_s), self.url)


@contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the URL of a server that calls `serve` in a thread per HTTP/1.1 connection; raises if a call failed."""
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


class Kept:
    """A sink that keeps the body; up to `memory_bytes` bytes at a time are written into its memory, else it is fed."""

    def __init__(self, memory_bytes: int = 0) -> None:
        self.data = b""
        self.ended = 0
        self.put = 0
        self._memory = bytearray(memory_bytes)

    def begin(self) -> None:
        """Discard the data of an earlier attempt."""
        self.data = b""

    def feed(self, chunk: memoryview) -> None:
        """Append a chunk."""
        self.data += chunk

    def room(self) -> memoryview:
        """Return the memory for the next bytes; empty without `memory_bytes`."""
        return memoryview(self._memory)

    def filled(self, size: int) -> None:
        """Append `size` bytes that were written into the memory, and count them in `put`."""
        self.data += self._memory[:size]
        self.put += size

    def end(self) -> None:
        """Count the end of a response."""
        self.ended += 1
