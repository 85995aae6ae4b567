"""One HTTP request to a scheduler with a streamed body: lines are sent as they come while the connection lasts.

One request per line would cost both sides ten times as much. Any response ends the request: a refusal, or a scheduler
that is stopping.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final, Self, cast
from urllib.parse import urlsplit

import httptools

from paramserver.net.addresses import SCHEDULERS
from paramserver.net.connect import connect_on_loop
from paramserver.net.credentials import Credentials

log = logging.getLogger("paramserver.shard")

LINES: Final = "application/x-ndjson"
"""Media type of lines of JSON."""
CONNECT_S: Final = 2.0
LOST_S: Final = 3.0
"""How long the other end may leave what it was sent unacknowledged; then the network has lost the connection.  Linux
only: elsewhere the end of another request to the same scheduler tells."""
BUFFER_BYTES_MAX: Final = 1 << 20
"""Most bytes in the send buffer; beyond that the scheduler is taken to be hanging, and the request is aborted."""


class StreamingRequest(asyncio.Protocol):
    """One streamed request: `open` starts it, `close` aborts it."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.ended = False
        """Whether the request has ended, so that nothing more can be sent."""
        self.status = 0
        """Status code of the response; 0 without one."""
        self.schedulers = ""
        """The schedulers named by the response's header, if any."""
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._response = httptools.HttpResponseParser(self)

    @classmethod
    async def open(cls, url: str, credentials: Credentials, on_end: Callable[[], None]) -> Self:
        """Connect and send the request's headers; `on_end` is called when the request has ended. Raises OSError."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        async with asyncio.timeout(CONNECT_S):
            port = parts.port or (443 if secure else 80)
            context = credentials.context() if secure else None
            request = await connect_on_loop(lambda: cls(on_end), parts.hostname or "", port, context)
        assert request._transport is not None
        headers = {"host": parts.netloc, "transfer-encoding": "chunked", "content-type": LINES}
        headers |= credentials.headers
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        lines = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        request._transport.write("\r\n".join(lines).encode("latin-1"))
        return request

    def send(self, data: bytes) -> None:
        """Send a piece of the body; dropped if the request has ended."""
        assert self._transport is not None
        if not self.ended:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            if self._transport.get_write_buffer_size() > BUFFER_BYTES_MAX:
                self.close()

    def close(self) -> None:
        """Abort the request."""
        if self._transport is not None:
            self._transport.abort()
        self._end()

    # -- callbacks of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connected = transport.get_extra_info("socket")
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * LOST_S))

    def data_received(self, data: bytes) -> None:
        try:
            self._response.feed_data(data)
        except httptools.HttpParserError as error:
            log.debug("invalid HTTP response: %s", error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    # -- callbacks of the response parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower().decode("latin-1") == SCHEDULERS:
            self.schedulers = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._response.get_status_code()
        self.close()

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self._on_end()
