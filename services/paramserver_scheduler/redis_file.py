"""Has Redis rewrite its append-only file once its disk takes writes again.

Since Redis 7, and in Valkey, the file that a rewrite has begun is not opened for appending: what a full disk took half
of is cut off, and the next write leaves a hole of zeros there.  Redis goes on, but never starts again ("Bad file
format").  Another rewrite, of what it has in memory, leaves that file behind.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from paramserver_node.redis import stop_if_cancelled, trouble

log = logging.getLogger("paramserver.scheduler")

INTERVAL_S: Final = 1.0
RETRY_S: Final = 60.0
"""Pause after a rewrite that failed: one that the disk has no room for fills it, and no write is taken meanwhile."""


class RedisFile:
    """What became of the append-only file of Redis since it last refused writes because of its disk."""

    def __init__(self) -> None:
        self.problem = ""
        """What is wrong, in words; empty if nothing is known to be."""
        self._whole = 0
        """How many writes Redis had refused when it began the last rewrite that succeeded, if it is known."""
        self._asked: tuple[int, int] | None = None
        """The same of the last rewrite that was asked for, and how many rewrites Redis had begun before that."""

    async def watch(self, redis: Redis) -> None:
        """Ask Redis again and again until cancelled."""
        while True:
            pause_s = INTERVAL_S
            try:
                pause_s = await self._look(redis)
            except (RedisError, OSError, KeyError, TypeError, ValueError):  # away, or a service that does not tell
                pass
            stop_if_cancelled()
            await asyncio.sleep(pause_s)

    async def _look(self, redis: Redis) -> float:
        """Have the file rewritten if that is to be; return when to look again, in seconds."""
        refused = int((await redis.info("errorstats")).get("errorstat_MISCONF", {"count": 0})["count"])
        self._whole = min(self._whole, refused)  # Redis counts from its start
        if refused == self._whole:
            self.problem, self._asked = "", None
            return INTERVAL_S
        state: Mapping[str, Any] = await redis.info("persistence")
        if not state["aof_enabled"] or "aof_rewrites" not in state:  # there is no such file, or Redis is older
            self._whole = refused
            return INTERVAL_S
        if state["aof_last_write_status"] != "ok" or state["aof_rewrite_in_progress"] or state["aof_rewrite_scheduled"]:
            return INTERVAL_S
        if self._asked is not None and state["aof_rewrites"] > self._asked[1]:
            if state["aof_last_bgrewrite_status"] != "ok":  # whatever was refused while it filled the disk
                return self._failed("it failed, see its log")
            if refused == self._asked[0]:
                self._whole = refused
                log.info("redis.rewritten")
                return INTERVAL_S
        self._asked = (refused, state["aof_rewrites"])
        self.problem = (
            "Redis could not write to its disk for a while, and may not start again until it has rewritten its"
            " append-only file, which is tried every minute and needs room there"
        )
        try:
            await redis.bgrewriteaof()
        except RedisError as e:
            return self._failed(trouble(e))
        return INTERVAL_S

    def _failed(self, why: str) -> float:
        self._asked = None
        log.warning("redis.not_rewritten %s", why)
        return RETRY_S
