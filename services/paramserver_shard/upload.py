"""One request to a scheduler whose body grows line by line, for as long as the connection lasts.

A request for each line would cost either side ten times as much.  What answers such a request ends it: a refusal, or a
scheduler that stops.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Self, cast
from urllib.parse import urlsplit

import httptools

from paramserver.client.addresses import SCHEDULERS
from paramserver.client.credentials import Credentials

log = logging.getLogger("paramserver.shard")

CONNECT_S: Final = 2.0
BUFFER_BYTES_MAX: Final = 1 << 20
"""What may wait to be sent; a scheduler that takes no more than that stands still."""


class Upload(asyncio.Protocol):
    """One such request; `open` begins it, `close` breaks it off."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.over = False
        """Nothing can be sent any more."""
        self.status = 0
        """Of the answer; 0 without one."""
        self.schedulers = ""
        """Which ones there are, if the answer says so."""
        self._changed = changed
        self._transport: asyncio.Transport | None = None
        self._answer = httptools.HttpResponseParser(self)

    @classmethod
    async def open(cls, url: str, credentials: Credentials, changed: Callable[[], None]) -> Self:
        """A request to that URL, of which the head is sent; `changed` is called when it is over.  Raises OSError."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        async with asyncio.timeout(CONNECT_S):
            transport, upload = await asyncio.get_running_loop().create_connection(
                lambda: cls(changed),
                parts.hostname or "",
                parts.port or (443 if secure else 80),
                ssl=credentials.context() if secure else None,
            )
        told = {"host": parts.netloc, "transfer-encoding": "chunked", "content-type": "application/x-ndjson"}
        told |= credentials.headers
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        lines = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items()), "", ""]
        transport.write("\r\n".join(lines).encode("latin-1"))
        return upload

    def send(self, data: bytes) -> None:
        """Sends some of the body; what does not get through any more is seen by `over`."""
        assert self._transport is not None
        if not self.over:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            if self._transport.get_write_buffer_size() > BUFFER_BYTES_MAX:
                self.close()

    def close(self) -> None:
        """Breaks the request off."""
        if self._transport is not None:
            self._transport.abort()
        self._end()

    # -- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so

    def data_received(self, data: bytes) -> None:
        try:
            self._answer.feed_data(data)
        except httptools.HttpParserError as error:
            log.debug("an answer that is no HTTP: %s", error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    # -- what the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower().decode("latin-1") == SCHEDULERS:
            self.schedulers = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._answer.get_status_code()
        self.close()

    def _end(self) -> None:
        if not self.over:
            self.over = True
            self._changed()
