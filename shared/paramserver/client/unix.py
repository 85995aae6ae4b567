"""Requests over a shard's Unix socket: a thin blocking HTTP/1.1 client for small messages on one machine.

It speaks to our own server alone, which always says how long an answer is.  Against a general client it saves what
counts here: a round trip costs two system calls and no second thread.

A shard that stands still keeps its socket open.  So one that is silent for a while is asked on another connection
whether it lives, as HTTP/2 does with its pings; if it does not say so its answer is waited for no longer.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar
from urllib.parse import unquote

from paramserver.client.calls import Outcome, Request, Response
from paramserver.client.credentials import Credentials
from paramserver.errors import PsError, problem

T = TypeVar("T")

SCHEME: Final = "unix://"
SILENCE_S: Final = 5.0
"""How long a shard may be silent before it is asked whether it lives, and how long it has for saying so."""
_KEPT_MAX: Final = 16
"""Idle connections kept for each socket."""
_HEAD_BYTES_MAX: Final = 64 << 10
_BODY_PIECE_BYTES: Final = 1 << 20


def path_of(address: str) -> str:
    """The file system path of a `unix://` address."""
    return unquote(address.removeprefix(SCHEME))


def here(address: str) -> bool:
    """Whether that socket is one of this machine's; another one may advertise it all the same."""
    return hasattr(socket, "AF_UNIX") and os.path.exists(path_of(address))


class _Connection:
    """One connection, used by one request at a time."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address = address
        self._give_up_at = 0.0
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(timeout_s)
        try:
            self.socket.connect(path_of(address))
        except OSError:
            self.socket.close()
            raise
        self.fresh = True

    def __del__(self) -> None:
        # Of a client that was dropped, not closed: nothing is left open, as with its connections over the network.
        if hasattr(self, "socket"):
            self.socket.close()

    def begin(self, timeout_s: float) -> None:
        """A request starts, which may take that long."""
        self._give_up_at = time.monotonic() + timeout_s
        self.socket.settimeout(min(SILENCE_S, timeout_s))

    def _patiently(self, step: Callable[[], T]) -> T:
        """The result of a send or a receive; raises TimeoutError at the request's end, or when the shard is dead."""
        while True:
            try:
                return step()
            except TimeoutError:
                if time.monotonic() >= self._give_up_at or not lives(self._address):
                    raise

    def send(self, head: bytes, body: bytes | memoryview) -> None:
        """Head and body in one call where the socket takes them."""
        body = memoryview(body).cast("B")
        sent = self._patiently(lambda: self.socket.sendmsg((head, body)))
        for piece, at in ((memoryview(head), sent), (body, max(0, sent - len(head)))):
            while at < len(piece):
                at += self._patiently(lambda rest=piece[at:]: self.socket.send(rest))  # type: ignore[misc]

    def receive(self, request: Request, url: str) -> tuple[Response, bool]:
        """The response, and whether the connection can be used again."""
        data = bytearray()
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > _HEAD_BYTES_MAX:
                raise OSError("an answer without an end of its headers")
            piece = self._patiently(lambda: self.socket.recv(_HEAD_BYTES_MAX))
            if not piece:
                raise ConnectionResetError("closed before it answered")
            data += piece
        status_line, _, lines = bytes(data[:end]).partition(b"\r\n")
        status = int(status_line.split(b" ", 2)[1])
        headers: dict[str, str] = {}
        for line in lines.split(b"\r\n"):
            name, _, value = line.partition(b":")
            headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
        if "content-length" not in headers and status not in (204, 304):
            raise OSError("an answer that does not say how long it is")
        length, first = int(headers.get("content-length", 0)), data[end + 4 :]
        if request.sink is None or status != 200:
            body = bytearray(length)
            body[: len(first)] = first
            view, at = memoryview(body), len(first)
            while at < length:
                at += self._into(view[at:])
            response = Response(status, headers, bytes(body), url)
        else:
            request.sink.begin()
            request.sink.feed(memoryview(first))
            left, view = length - len(first), memoryview(bytearray(min(_BODY_PIECE_BYTES, length)))
            while left > 0:
                n = self._into(view[: min(left, len(view))])
                request.sink.feed(view[:n])
                left -= n
            request.sink.end()
            response = Response(status, headers, b"", url)
        return response, headers.get("connection", "").lower() != "close"

    def _into(self, view: memoryview) -> int:
        n = self._patiently(lambda: self.socket.recv_into(view))
        if n == 0:
            raise ConnectionResetError("closed in the middle of an answer")
        return n


def lives(address: str) -> bool:
    """Whether the shard behind that address answers `GET /livez` in time."""
    try:
        connection = _Connection(address, SILENCE_S)
        connection.socket.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return bool(connection.socket.recv(_HEAD_BYTES_MAX))
    except OSError:
        return False


class UnixTransport:
    """Sends requests one at a time per thread; safe to share between threads, and after a fork."""

    def __init__(self, credentials: Credentials) -> None:
        lines = ["host: localhost", "user-agent: paramserver-python"]
        lines += [f"{name}: {value}" for name, value in credentials.headers.items()]
        self._common = "\r\n".join(lines)
        self._idle: dict[str, list[_Connection]] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def send(self, request: Request, address: str) -> Outcome:
        """The outcome of one request to the shard behind that `unix://` address."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._idle = os.getpid(), {}  # the parent's connections are the parent's
            idle = self._idle.setdefault(address, [])
            connection = idle.pop() if idle else None
        if connection is not None:
            outcome = self._attempt(connection, request, address)
            if outcome is not None:
                return outcome  # else the shard had closed the idle connection: a fresh one
        try:
            connection = _Connection(address, min(3.0, request.timeout_s))
        except OSError as e:
            return problem("unreachable", f"cannot reach {address} ({e.strerror or e})")
        return self._attempt(connection, request, address) or problem("in_doubt", f"{address} hung up unasked")

    def _attempt(self, connection: _Connection, request: Request, address: str) -> Outcome | None:
        """The outcome; None if an idle connection turned out to be closed."""
        used, connection.fresh = not connection.fresh, False
        try:
            connection.begin(request.timeout_s)
            connection.send(self._head(request), request.body or b"")
            response, again = connection.receive(request, address)
        except (BrokenPipeError, ConnectionResetError) as e:
            connection.socket.close()
            return None if used else problem("in_doubt", f"the connection to {address} broke ({e})")
        except TimeoutError:
            connection.socket.close()
            return problem("in_doubt", f"{address} did not answer")
        except PsError as e:  # what the sink found wrong
            connection.socket.close()
            return e
        except (OSError, ValueError, IndexError) as e:
            connection.socket.close()
            return problem("in_doubt", f"{address} did not answer in HTTP ({e})")
        with self._lock:
            idle = self._idle.setdefault(address, [])
            if again and len(idle) < _KEPT_MAX:
                idle.append(connection)
            else:
                connection.socket.close()
        return response

    def _head(self, request: Request) -> bytes:
        lines = [f"{request.method} {request.path} HTTP/1.1", self._common]
        lines += [f"{name}: {value}" for name, value in request.headers.items()]
        if request.body is not None or request.method not in ("GET", "HEAD", "DELETE"):
            lines.append(f"content-length: {len(memoryview(request.body or b'').cast('B'))}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            for connection in [c for idle in self._idle.values() for c in idle]:
                connection.socket.close()
            self._idle.clear()
