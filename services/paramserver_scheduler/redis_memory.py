"""How full Redis is, and what it does at its `maxmemory`.

As it is to be set, it refuses every write then, so nothing is durable and nothing can be decided.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from paramserver.limits import REDIS_NEARLY_FULL
from paramserver_node.redis import memory_of, stop_if_cancelled

INTERVAL_S: Final = 5.0


@dataclass(slots=True)
class RedisMemory:
    """What Redis last said about its memory."""

    used_bytes: int | None = None
    """What counts towards its limit; None: not known now."""
    limit_bytes: int | None = None
    """Its `maxmemory`; None: it has none, or it is not known now."""
    policy: str = ""
    """Its `maxmemory-policy`; empty: not known now."""

    async def watch(self, redis: Redis) -> None:
        """Ask Redis again and again until cancelled."""
        while True:
            try:
                info = await redis.info("memory")
                self.used_bytes, limit_bytes = memory_of(info)
                self.limit_bytes, self.policy = limit_bytes or None, str(info.get("maxmemory_policy", ""))
            except (RedisError, OSError, KeyError, TypeError, ValueError):  # away, or a service that does not tell
                self.used_bytes, self.limit_bytes, self.policy = None, None, ""
            stop_if_cancelled()
            await asyncio.sleep(INTERVAL_S)

    @property
    def problem(self) -> str:
        """What is wrong, in words; empty if nothing is."""
        if self.policy.startswith("allkeys"):  # the others delete nothing: no key has a time to live
            return (
                f"Redis deletes what is stored once it is full (maxmemory-policy {self.policy}): CONFIG SET"
                " maxmemory-policy noeviction, and in its redis.conf"
            )
        if not self.limit_bytes or self.used_bytes is None or self.used_bytes < REDIS_NEARLY_FULL * self.limit_bytes:
            return ""
        return (
            f"Redis uses {100 * self.used_bytes // self.limit_bytes} % of its maxmemory; when that is full, nothing is"
            " stored any more: raise it, or delete models while it still takes writes"
        )
