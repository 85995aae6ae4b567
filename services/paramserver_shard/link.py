"""A shard's connection to the schedulers: requests, and the feed of all cluster changes."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

from paramserver.errors import PsError, problem
from paramserver.net.addresses import SCHEDULERS, named
from paramserver.net.calls import Outcome, Request, Response, error_of, json_or_none, json_request
from paramserver.net.credentials import Credentials
from paramserver.net.direct import AsyncDirectTransport
from paramserver_shard.streaming_request import LINES, StreamingRequest

FEED_SILENCE_S: Final = 3.0
"""The feed pings every second; after this much silence the connection counts as dead."""
REQUEST_S: Final = 2.0
FOR_EVER_S: Final = 1e8
RETRY_S: Final = 0.3
"""Pause before a failed attempt is retried."""
SOURCE_URL: Final = "told_by"
"""Key added to each answer, error and feed document: the URL of the scheduler that it came from."""


class SchedulerLink:
    """Requests to whichever scheduler answers."""

    def __init__(self, urls: Sequence[str], credentials: Credentials) -> None:
        self._given = tuple(u.rstrip("/") for u in urls)
        self._urls = list(self._given)
        self.on_switch: Callable[[], None] = lambda: None
        """Called when another scheduler may be in use from now on."""
        self._credentials = credentials
        self._transport = AsyncDirectTransport(credentials)

    @property
    def url(self) -> str:
        """The scheduler in use."""
        return self._urls[0]

    @property
    def urls(self) -> tuple[str, ...]:
        """All schedulers, the one in use first."""
        return tuple(self._urls)

    def switch_from(self, url: str) -> None:
        """Switch from that scheduler to the next one; do nothing if another one is in use already.

        Several requests may learn at the same time that it does not lead, and a second switch could lead back to it.
        """
        if url == self.url:
            self._urls = [*self._urls[1:], url]
            self.on_switch()

    def _use(self, url: str) -> None:
        """Use that scheduler from now on."""
        self._urls = [url, *(u for u in self._urls if u != url)]
        self.on_switch()

    async def request(self, method: str, path: str, body: Any = None, params: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON answer of the first scheduler that does not answer 503; each is tried once.

        Raises the PsError that it answered, or Unavailable (`no_leader`) if no scheduler answered.
        """
        return await self._send(json_request(method, _target(path, params), body, timeout_s=REQUEST_S))

    async def post_lines(self, path: str, lines: bytes) -> None:
        """Send lines of JSON in one request that ends, which a standby passes on.  Raises like `request`."""
        await self._send(Request("POST", path, lines, {"content-type": LINES}, timeout_s=REQUEST_S))

    async def _send(self, asked: Request) -> Any:
        reason = ""
        for url in self.urls:
            outcome = await self._transport.send(asked, url)
            if isinstance(outcome, Response):
                self.learn(url, outcome.headers.get(SCHEDULERS, ""))
                if outcome.status != 503:
                    return _with_source(url, outcome)
                outcome = error_of(outcome)
            else:
                self._transport.close_rested()
            reason = f"{url}: {outcome.detail}"
            self.switch_from(url)
        raise problem("no_leader", f"no scheduler answers ({reason})")

    async def open_stream(self, url: str, path: str, on_end: Callable[[], None]) -> StreamingRequest:
        """Open a request to that scheduler whose body is sent later.  Raises OSError."""
        return await StreamingRequest.open(url + path, self._credentials, on_end)

    async def turn_to_leader(self, url: str, path: str) -> None:
        """Switch from the standby `url` to the leader once that answers here; return then, or after any other switch.

        `path` is one that a standby refuses with 503, whatever the method.
        """
        while url == self.url:
            for other in self.urls:
                outcome = await self._transport.send(Request("GET", path, timeout_s=REQUEST_S), other)
                if isinstance(outcome, Response) and outcome.status != 503 and url == self.url:
                    self._use(other)
                    return
            await asyncio.sleep(RETRY_S)

    def learn(self, url: str, header: str) -> None:
        """Add the schedulers named in an answer from `url`, and drop others that were only named before."""
        found = named(url, header) if header else ()
        if found:
            known = [u for u in self._urls if u in self._given or u in found]
            self._urls = list(dict.fromkeys([self.url, *known, *found]))

    async def feed(self, shard: str, epoch: int) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the documents of the feed until the connection ends.  Raises PsError, or TimeoutError on silence."""
        lines, url = _Lines(), self.url
        target = _target("/internal/feed", {"shard": shard, "epoch": epoch})
        asked = Request("GET", target, sink=lines, timeout_s=FOR_EVER_S)
        connection = asyncio.ensure_future(self._transport.send(asked, url))
        connection.add_done_callback(lines.over)
        try:
            while (line := await lines.next()) is not None:
                yield {**json.loads(line), SOURCE_URL: url}
        except PsError as error:
            raise error.plus(**{SOURCE_URL: url}) from error
        finally:
            connection.cancel()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.close()


def _with_source(url: str, response: Response) -> dict[str, Any]:
    """Return the answer, or raise the error it holds, with the scheduler's URL added."""
    try:
        return {**(json_or_none(response) or {}), SOURCE_URL: url}
    except PsError as error:
        raise error.plus(**{SOURCE_URL: url}) from error


def _target(path: str, params: Mapping[str, Any] | None) -> str:
    return f"{path}?{urlencode(params)}" if params else path


class _Lines:
    """The sink of the feed's body; splits it into lines.

    A feed that the transport opens again, because its connection broke, is refused: its documents begin anew, and the
    reader would not notice what was deleted in between.
    """

    def __init__(self) -> None:
        self._begun = 0
        self._whole: deque[bytes] = deque()
        self._rest = b""
        self._news = asyncio.Event()
        self._outcome: Outcome | None = None

    def begin(self) -> None:
        self._begun += 1

    def room(self) -> memoryview:
        return memoryview(b"")

    def filled(self, size: int) -> None:
        raise AssertionError("nothing has room here")

    def feed(self, data: memoryview) -> None:
        if self._begun > 1:
            raise problem("unavailable", "its connection broke")
        *whole, self._rest = (self._rest + data).split(b"\n")
        self._whole += whole
        self._news.set()

    def end(self) -> None:
        pass

    def over(self, connection: "asyncio.Future[Outcome]") -> None:
        """Take the outcome of the connection, which has ended."""
        if not connection.cancelled():
            self._outcome = connection.result()
        self._news.set()

    async def next(self) -> bytes | None:
        """Return the next line, or None after a 200 answer.  Raises PsError for others, TimeoutError on silence."""
        while not self._whole:
            outcome = self._outcome
            if isinstance(outcome, PsError):
                raise outcome
            if outcome is not None:
                if outcome.status != 200:
                    raise error_of(outcome)
                return None
            self._news.clear()
            async with asyncio.timeout(FEED_SILENCE_S):
                await self._news.wait()
        return self._whole.popleft()
