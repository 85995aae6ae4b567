"""Whose documents and requests a shard obeys: those of the newest leader term that it has seen (semantics 6).

A deposed leader that has not noticed may name other owners, or set old values; obeying it would discard partitions in
memory, or what was trained since.
"""

import logging
from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from paramserver.errors import PsError, problem
from paramserver_node.redis import TERM_KEY, stop_if_cancelled
from paramserver_shard.link import SOURCE_URL, SchedulerLink

log = logging.getLogger("paramserver.shard")


class LeaderTerms:
    """Checks the term of every document and request, and leaves a scheduler whose term is over."""

    def __init__(self, link: SchedulerLink, redis: Redis) -> None:
        self._link = link
        self._redis = redis
        self._newest = 0
        """The newest leader term seen."""
        self._last_url = ""
        """URL of the scheduler whose document was accepted last."""

    def check(self, document: Mapping[str, Any]) -> None:
        """Adopt the leader term of a document; if it is stale, switch to the next scheduler and raise Unavailable."""
        url, term = str(document[SOURCE_URL]), int(document.get("term", self._newest))
        if term < self._newest:
            self._link.switch_from(url)
        self._refuse_older(term, url)
        self._newest = term
        self._last_url = url

    def check_request(self, term: int) -> bool:
        """Adopt the term of a leader's request and return what `adopt` does; raise Unavailable if it is stale."""
        self._refuse_older(term, "the sender")
        return self.adopt(term)

    def _refuse_older(self, term: int, sender: str) -> None:
        if term < self._newest:
            raise problem("no_leader", f"{sender} is at leader term {term}; the current term is {self._newest}")

    async def accept(self, document: Mapping[str, Any]) -> None:
        """Like `check`, but accept a lower term if Redis has no higher one: the whole cluster started anew."""
        term = int(document.get("term", self._newest))
        if term < self._newest:
            try:
                in_redis = await self._redis.get(TERM_KEY)
            except (RedisError, OSError):
                in_redis = None
            stop_if_cancelled()
            if in_redis is not None and int(in_redis) <= term:
                self._newest = term
        self.check(document)

    async def is_current(self, refusal: PsError) -> bool:
        """Return whether a refusal of this membership comes from a leader of the current term; log it if not."""
        try:
            await self.accept(refusal.members)
        except PsError as error:
            log.warning("ignoring refusal from a stale leader: %s (%s)", refusal, error)
            return False
        return True

    def adopt(self, term: int) -> bool:
        """Adopt a newer term; return whether that made this shard leave the scheduler in use, which leads no more."""
        if term <= self._newest:
            return False
        self._newest = term
        url = self._link.url
        if self._last_url != url:
            return False
        log.info("%s is no longer the leader; term %d has begun", url, term)
        self._link.switch_from(url)
        return True
