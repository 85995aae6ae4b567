"""Asks the other schedulers whether one of them leads, in case Redis is unreachable for this leader alone."""

import asyncio
from typing import Final

import httpx

from paramserver.client.credentials import Credentials
from paramserver_node.forward import FORWARDED_TO_LEADER
from paramserver_scheduler.http_client import http_client
from paramserver_scheduler.lease import Lease

ASK_S: Final = 1.0


class PeerSchedulers:
    """The other schedulers, as listed when Redis last answered."""

    def __init__(self, lease: Lease, credentials: Credentials) -> None:
        self._lease = lease
        self._http = http_client(
            credentials,
            httpx.Timeout(ASK_S),
            {FORWARDED_TO_LEADER: "0"},  # only a leader answers such a request
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def newer_leader_exists(self) -> bool:
        """Whether one of them leads in a higher term; one that does not answer counts as no."""
        urls = [s.url for s in self._lease.schedulers if s.url != self._lease.url]
        terms = await asyncio.gather(*map(self._term, urls))
        return any(term > self._lease.term for term in terms)

    async def _term(self, url: str) -> int:
        try:
            answer = await self._http.get(url + "/map")
            return int(answer.json()["term"]) if answer.is_success else 0
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return 0
