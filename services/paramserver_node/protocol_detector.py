"""Protocol detection for new connections: HTTP/2 by prior knowledge or ALPN, else HTTP/1.1.

A connection is handed over once its protocol is clear; to HTTP/1.1 when the head of its first request is complete.
Whatever the protocol, a client that sends no request in time is disconnected.
"""

import asyncio
import logging
import resource
import socket
import sys
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from uvicorn.config import Config
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.server import ServerState

from paramserver.errors import problem
from paramserver.limits import CLIENT_CONNECTIONS_MAX, CONNECTIONS_MAX
from paramserver.wire.http2 import PREFACE
from paramserver_node.http1 import HEAD_S, TOO_LONG, Http1, refusal
from paramserver_node.http2 import HEADER_BYTES_MAX, Connection

if TYPE_CHECKING:
    from paramserver_node.transfer_threads import TransferThreads

log = logging.getLogger("paramserver.server")

KEEPALIVE_IDLE_S: Final = 60
"""Idle time after which the kernel sends TCP keep-alive probes; a live connection may be idle for hours."""
KEEPALIVE_INTERVAL_S: Final = 10
KEEPALIVE_PROBES_MAX: Final = 6
"""Unanswered probes, `KEEPALIVE_INTERVAL_S` apart, after which the peer counts as gone."""
_FILES_FREE_MIN: Final = 8
"""Fewer free file descriptors than this are reported: libuv resets new connections without a word once none is left."""
_REPORT_INTERVAL_S: Final = 60.0
_HEAD_ENDS: Final = (b"\r\n\r\n", b"\n\n")
"""How a request's head ends, and how one ends that HTTP/1.1 refuses: with bare line feeds."""
_HANDSHAKE: Final = b"\x16\x03"
"""Start of a client's first TLS record (RFC 8446, 5.1); no HTTP method starts like this."""
_NO_TLS: Final = refusal(problem("malformed", "this node speaks HTTP without TLS: ask http://, not https://"))
"""A TLS client sees an invalid record in this, and fails at once."""

P = TypeVar("P", bound="_Counted")


class _Counted(asyncio.BaseProtocol):
    """A connection that counts towards those from its address until it is lost."""

    by_address: ClassVar[dict[str, int]] = {}
    """Number of connections from each address."""
    address = ""
    """The client's address; empty if the connection does not count: on a Unix socket, or refused."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Count one connection less."""
        if self.address:
            self.by_address[self.address] -= 1
            if not self.by_address[self.address]:
                del self.by_address[self.address]
        super().connection_lost(exc)


class _Http1(_Counted, Http1):
    """HTTP/1.1, which has its own deadlines."""


class _Http2(_Counted, Connection):
    """HTTP/2 with a deadline for the first request, then for what has begun to arrive; between frames it may rest."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request."""
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._await_rest()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer."""
        super().connection_lost(exc)
        if self._head_timer is not None:
            self._head_timer.cancel()

    def feed(self, data: memoryview, *, in_place: bool = False) -> None:
        """Process the next bytes; start the timer if they end in the middle of a header block, or of another frame."""
        super().feed(data, in_place=in_place)
        if self._head_timer is None and (self._scanner.unfinished or self._heads.unfinished):
            self._await_rest()

    def _await_rest(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._head_overdue, self.unfinished)

    def _head_overdue(self, begun: tuple[int, int]) -> None:
        """Disconnect if no request has come, or what had begun to come when the timer was started is not complete."""
        self._head_timer = None
        if self.transport.is_closing():
            return
        if not self._newest or any([then and then == now for then, now in zip(begun, self.unfinished, strict=True)]):
            self.shutdown()
        elif any(self.unfinished):
            self._await_rest()


class ProtocolDetector(_Counted, asyncio.Protocol):
    """A connection whose protocol is not known yet."""

    alpn_protocols: ClassVar[list[str]] = ["h2", "http/1.1"]
    transfer_threads: "ClassVar[TransferThreads | None]" = None
    """The server's threads for large bodies, if it has any."""
    _reported_s: ClassVar[float] = -inf
    """When the server last reported that few file descriptors are free."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
    ) -> None:
        if not config.loaded:
            config.load()
        self._config, self._server, self._state = config, server_state, app_state
        self._loop = asyncio.get_running_loop()
        self._buffer = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request, or disconnect at once if there are too many connections."""
        self.transport = transport
        client = get_remote_addr(transport)
        address = client[0] if client else ""
        count = self.by_address.get(address, 0)
        if len(self._server.connections) >= CONNECTIONS_MAX or count >= CLIENT_CONNECTIONS_MAX:
            transport.abort()
            return
        if address:
            self.address, self.by_address[address] = address, count + 1
        self._server.connections.add(self)  # type: ignore[arg-type]
        connected = transport.get_extra_info("socket")
        _enable_keepalive(connected)
        self._report_few_files(connected.fileno())
        self._head_timer = self._loop.call_later(HEAD_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection: it ended before its protocol was known."""
        super().connection_lost(exc)
        if self in self._server.connections:
            self._forget()

    def eof_received(self) -> None:
        """Return None: the transport then closes."""

    def shutdown(self) -> None:
        """Close at once, as nothing is in flight."""
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Collect the first bytes until they tell the protocol, then hand the connection over."""
        self._buffer += data
        if self._buffer.startswith(PREFACE):
            self._switch_to(_Http2(self._config, self._server, self._state, self.transfer_threads)).feed(
                memoryview(self._buffer)[len(PREFACE) :]
            )
        elif PREFACE.startswith(self._buffer):
            return
        elif self._buffer.startswith(_HANDSHAKE):
            self._refuse(_NO_TLS)
        elif any([end in self._buffer for end in _HEAD_ENDS]):
            self._switch_to(_Http1(self._config, self._server, self._state, self._loop)).data_received(self._buffer)
        elif len(self._buffer) > HEADER_BYTES_MAX:
            self._refuse(TOO_LONG)

    def _report_few_files(self, newest: int) -> None:
        """Log it, now and then, if few file descriptors are free; `newest` is the lowest that was."""
        files_max, now = resource.getrlimit(resource.RLIMIT_NOFILE)[0], self._loop.time()
        if newest < files_max - _FILES_FREE_MIN or now - self._reported_s < _REPORT_INTERVAL_S:
            return
        type(self)._reported_s = now
        log.warning(
            "nearly all of the %d files that this process may open are open; without a free one, new connections are "
            "reset: raise the limit, as with 'ulimit -n'",
            files_max,
        )

    def _refuse(self, answer: bytes) -> None:
        self.transport.write(answer)
        self.transport.close()

    def _forget(self) -> None:
        self._head_timer.cancel()
        self._server.connections.discard(self)

    def _switch_to(self, protocol: P) -> P:
        self._forget()
        protocol.address = self.address
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        return protocol


def _enable_keepalive(connected: socket.socket) -> None:
    """Enable TCP keep-alive, so that a client that vanished is noticed: an idle one sends nothing by itself."""
    if connected.family == socket.AF_UNIX:
        return
    with suppress(OSError):  # the client may be gone already, which is an error on some systems
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES_MAX)
