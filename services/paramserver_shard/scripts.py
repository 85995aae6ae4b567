"""Writes to Redis: Lua scripts that compare owner tokens, sent together, and if asked on the disk before they count."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from paramserver.errors import PsError
from paramserver_node import redis as node_redis

FSYNC_WAIT_MS: Final = 3000
"""How long one WAITAOF waits: `appendfsync everysec` brings a write to the disk within a second or two."""


@dataclass(frozen=True, slots=True)
class Script:
    """One run of a script."""

    text: str
    keys: list[str]
    args: list[Any]


class ScriptRunner:
    """Runs scripts on one Redis."""

    def __init__(self, redis: Redis) -> None:
        """`redis` is a client without timeouts of its own: scripts have as long as their bytes take."""
        self._redis = redis
        self._fsync_way: node_redis.FsyncWay | None = None

    async def run(self, scripts: Sequence[Script], *, fsync: bool = False, size_bytes: int = 0) -> list[Any]:
        """What each of them returned; with `fsync` their effects are on the disk by then.

        `size_bytes`: of their arguments, where that is much.  Nothing is known of their effects when it raises:
        RedisError or OSError when Redis does not answer or refuses, TimeoutError when it or its disk took too long,
        RequestError (`not_built`) if it cannot say what is on the disk.
        """
        try:
            async with node_redis.patience(size_bytes):
                return await self._run(scripts, fsync)
        except (RedisError, OSError, PsError):
            self._fsync_way = None  # it may be another server the next time
            raise

    async def _run(self, scripts: Sequence[Script], fsync: bool) -> list[Any]:
        if fsync and self._fsync_way is None:
            self._fsync_way = await node_redis.fsync_way(self._redis)
        wait = fsync and self._fsync_way == "waitaof"
        async with self._redis.pipeline(transaction=False) as pipe:
            for script in scripts:
                pipe.eval(script.text, len(script.keys), *script.keys, *script.args)
            if wait:  # on this connection: it waits for the writes of its own
                pipe.execute_command("WAITAOF", 1, 0, FSYNC_WAIT_MS)
            results: list[Any] = await pipe.execute(raise_on_error=False)
        for result in results:
            if isinstance(result, Exception):
                raise result
        if wait and results.pop()[0] < 1:
            raise TimeoutError(f"the disk of Redis took longer than {FSYNC_WAIT_MS} ms")
        return results
