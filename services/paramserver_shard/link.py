"""The way from a shard to the schedulers: requests, and the feed that tells everything."""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import httpx

from paramserver.client.addresses import SCHEDULERS, named
from paramserver.client.credentials import Credentials
from paramserver.errors import PsError, from_document, problem
from paramserver_shard.upload import Upload

FEED_SILENCE_S: Final = 3.0
"""The feed pings each second; after so long without a word the connection counts as dead."""
REQUEST_S: Final = 2.0
RETRY_S: Final = 0.3
"""Pause before what did not answer is tried again."""


class SchedulerLink:
    """Requests to whichever scheduler answers."""

    def __init__(self, urls: Sequence[str], credentials: Credentials) -> None:
        self._given = tuple(u.rstrip("/") for u in urls)
        self._urls = list(self._given)
        self._credentials = credentials
        self._client = httpx.AsyncClient(
            headers=credentials.headers,
            verify=credentials.context(),
            timeout=httpx.Timeout(REQUEST_S),
            trust_env=False,
        )

    @property
    def url(self) -> str:
        """The scheduler in use."""
        return self._urls[0]

    @property
    def urls(self) -> tuple[str, ...]:
        """All schedulers, the one in use first."""
        return tuple(self._urls)

    def turn(self) -> None:
        """The next scheduler is used from now on."""
        self._urls = [*self._urls[1:], self._urls[0]]

    async def request(self, method: str, path: str, body: Any = None, params: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer; each scheduler is asked once.

        Raises the PsError that a scheduler answered, or Unavailable (`no_leader`) when none did.
        """
        reason = ""
        for _ in range(len(self._urls)):
            try:
                response = await self._client.request(method, self.url + path, json=body, params=params)
            except httpx.HTTPError as e:
                reason = f"{self.url}: {e or type(e).__name__}"
                self.turn()
                continue
            self._learn(response.headers.get(SCHEDULERS, ""))
            if response.is_success:
                return response.json() if response.content else None
            error = _error(response)
            if error.status != 503:
                raise error
            reason = f"{self.url}: {error.detail}"
            self.turn()
        raise problem("no_leader", f"no scheduler answers ({reason})")

    async def upload(self, path: str, changed: Callable[[], None]) -> Upload:
        """A request to the scheduler in use whose body is still to be sent; raises OSError."""
        return await Upload.open(self.url + path, self._credentials, changed)

    def heed(self, upload: Upload) -> None:
        """An upload is over: take up what its answer says."""
        self._learn(upload.schedulers)
        if upload.status == 503:
            self.turn()

    def _learn(self, header: str) -> None:
        """Take up the schedulers that an answer names, behind the one in use."""
        found = named(self.url, header) if header else ()
        if found:
            known = [u for u in self._urls if u in self._given or u in found]
            self._urls = list(dict.fromkeys([self.url, *known, *found]))

    async def feed(self, shard: str, epoch: int) -> AsyncIterator[dict[str, Any]]:
        """The documents of the feed, until the connection ends; raises PsError or httpx.HTTPError."""
        timeout = httpx.Timeout(REQUEST_S, read=FEED_SILENCE_S)
        params: dict[str, str | int] = {"shard": shard, "epoch": epoch}
        async with self._client.stream("GET", f"{self.url}/internal/feed", params=params, timeout=timeout) as response:
            if not response.is_success:
                await response.aread()
                raise _error(response)
            async for line in response.aiter_lines():
                if line:
                    yield json.loads(line)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._client.aclose()


def _error(response: httpx.Response) -> PsError:
    try:
        document = response.json()
    except ValueError:
        document = {}
    return from_document({"status": response.status_code, **(document if isinstance(document, dict) else {})})
