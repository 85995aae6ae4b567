"""Requests straight to shards, over HTTP/2 on TCP, TLS or a Unix socket: connections kept and used one at a time."""

import os
import socket
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from paramserver.client.calls import Outcome, Request, Response
from paramserver.client.credentials import Credentials
from paramserver.client.http2 import Connection, Refused
from paramserver.errors import PsError, problem
from paramserver.wire.http2 import Header

if TYPE_CHECKING:
    import ssl

SCHEME: Final = "unix://"
CONNECT_S: Final = 3.0
"""How long a connection may take to come about."""
_KEPT_MAX: Final = 16
"""Idle connections kept for each address."""


def path_of(address: str) -> str:
    """The file system path of a `unix://` address."""
    return unquote(address.removeprefix(SCHEME))


def here(address: str) -> bool:
    """Whether that socket is one of this machine's; another one may advertise it all the same."""
    return hasattr(socket, "AF_UNIX") and os.path.exists(path_of(address))


def unreachable(url: str, reason: str) -> PsError:
    """The error of a URL where nobody answers."""
    return problem("unreachable", f"cannot reach {url} ({reason}): is a cluster up? 'psctl up' starts one")


class DirectTransport:
    """Sends requests one at a time per thread; safe to share between threads, and after a fork.

    One that breaks on a kept connection is sent again on a fresh one: whatever changes something carries its id.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._context: ssl.SSLContext | None = None
        common = {"user-agent": "paramserver-python", **credentials.headers}
        self._common = [(name.encode(), value.encode()) for name, value in common.items()]
        self._idle: dict[str, list[Connection]] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def send(self, request: Request, address: str) -> Outcome:
        """The outcome of one request to the shard at that address."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._idle = os.getpid(), {}  # the parent's connections are the parent's
            idle = self._idle.setdefault(address, [])
            connection = idle.pop() if idle else None
        if connection is not None:
            outcome = self._attempt(connection, request, address, fresh=False)
            if outcome is not None:
                return outcome  # else the shard had closed the idle connection: a fresh one
        try:
            connection = Connection(self._connected(address, min(CONNECT_S, request.timeout_s)))
        except OSError as e:
            reason = (e.strerror or str(e) or type(e).__name__).lower()
            return unreachable(address, reason)
        return self._attempt(connection, request, address, fresh=True) or problem(
            "in_doubt", f"{address} hung up unasked"
        )

    def _attempt(self, connection: Connection, request: Request, address: str, *, fresh: bool) -> Outcome | None:
        """The outcome; None if an idle connection turned out to be closed."""
        body = [memoryview(piece).cast("B") for piece in (request.body or b"", *request.rest)]
        headers = self._headers(request, address, sum(map(len, body)))
        try:
            answer = connection.ask(headers, body, request.sink, request.timeout_s)
        except (BrokenPipeError, ConnectionResetError, Refused) as e:
            connection.close()
            return problem("in_doubt", f"the connection to {address} broke before it answered ({e})") if fresh else None
        except TimeoutError:
            connection.close()
            return problem("in_doubt", f"{address} did not answer within {request.timeout_s:.3g} s")
        except PsError as e:  # what the sink found wrong
            connection.close()
            return e
        except (OSError, ValueError) as e:
            connection.close()
            return problem("in_doubt", f"{address} did not answer in HTTP ({e})")
        with self._lock:
            idle = self._idle.setdefault(address, [])
            if connection.usable and len(idle) < _KEPT_MAX:
                idle.append(connection)
            else:
                connection.close()
        return Response(answer.status, answer.headers, bytes(answer.body), address)

    def _headers(self, request: Request, address: str, size: int) -> list[Header]:
        target, own = _encoded(request.method, address, request.path, tuple(request.headers.items()))
        headers = [*target, *self._common, *own]
        if size or request.method not in ("GET", "HEAD", "DELETE"):
            headers.append((b"content-length", b"%d" % size))
        return headers

    def _connected(self, address: str, timeout_s: float) -> socket.socket:
        if address.startswith(SCHEME):
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connected.settimeout(timeout_s)
                connected.connect(path_of(address))
            except OSError:
                connected.close()
                raise
            return connected
        parts = urlsplit(address)
        secure = parts.scheme == "https"
        connected = socket.create_connection((parts.hostname or "", parts.port or (443 if secure else 80)), timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not secure:
            return connected
        try:
            if self._context is None:
                self._context = self._credentials.context()
                self._context.set_alpn_protocols(["h2"])
            return self._context.wrap_socket(connected, server_hostname=parts.hostname)
        except OSError:
            connected.close()
            raise

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            for connection in [c for idle in self._idle.values() for c in idle]:
                connection.close()
            self._idle.clear()


@lru_cache(maxsize=256)
def _encoded(
    method: str, address: str, path: str, own: tuple[tuple[str, str], ...]
) -> tuple[tuple[Header, ...], tuple[Header, ...]]:
    """What a request asks of whom, and its own headers, as they travel."""
    authority, prefix = ("localhost", "") if address.startswith(SCHEME) else urlsplit(address)[1:3]
    target = (
        (b":method", method.encode()),
        (b":scheme", b"https" if address.startswith("https:") else b"http"),
        (b":authority", authority.encode()),
        (b":path", (prefix + path).encode()),
    )
    return target, tuple([(name.lower().encode(), value.encode("latin-1")) for name, value in own])
