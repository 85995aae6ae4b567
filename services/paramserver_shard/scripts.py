"""Writes to Redis: pipelined Lua scripts that compare owner tokens, optionally fsynced before they count."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from paramserver.errors import PsError, problem
from paramserver_node import redis as node_redis

FSYNC_WAIT_MS: Final = 3000
"""Timeout of one WAITAOF: with `appendfsync everysec` a write reaches the disk within a second or two."""


@dataclass(frozen=True, slots=True)
class Script:
    """One invocation of a script."""

    text: str
    keys: list[str]
    args: list[Any]


class ScriptRunner:
    """Runs scripts on one Redis."""

    def __init__(self, redis: Redis) -> None:
        """`redis` is a client without socket timeouts: `run` sets a deadline by the size of the arguments."""
        self.redis = redis
        self._fsync_way: node_redis.FsyncWay | None = None

    async def run(self, scripts: Sequence[Script], *, fsync: bool = False, size_bytes: int = 0) -> list[Any]:
        """Run the scripts in one pipeline and return their results; with `fsync`, once their effects are on disk.

        `size_bytes` is the size of large arguments and extends the deadline. Raises RedisError or OSError if Redis does
        not answer or refuses, TimeoutError if Redis or its disk takes too long, RequestError (`not_built`) if Redis
        cannot confirm that writes are on disk. After an error the scripts may or may not have taken effect.
        """
        try:
            if fsync:
                await self.settle()
            async with node_redis.transfer_timeout(size_bytes):
                return await self._run(scripts, fsync)
        except (RedisError, OSError, PsError):
            self._fsync_way = None  # the next call may reach another server
            raise

    async def settle(self) -> None:
        """Find out how this Redis can confirm that a write is on its disk, unless it is known.

        Raises RequestError (`not_built`) if it cannot, RedisError, OSError or Unavailable if it does not answer.
        """
        if self._fsync_way is None:
            async with node_redis.transfer_timeout(0):
                self._fsync_way = await node_redis.fsync_way(self.redis)

    async def _run(self, scripts: Sequence[Script], fsync: bool) -> list[Any]:
        way = self._fsync_way if fsync else None
        async with self.redis.pipeline(transaction=False) as pipe:
            for script in scripts:
                pipe.eval(script.text, len(script.keys), *script.keys, *script.args)
            if way == "waitaof":  # on the same connection, since it waits for that connection's writes
                pipe.execute_command("WAITAOF", 1, 0, FSYNC_WAIT_MS)
            elif way == "always":  # still
                for name in node_redis.FSYNC_SETTINGS:
                    pipe.config_get(name)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception):
                await node_redis.leave_after(answer, self.redis)
                raise answer
        results, confirmation = answers[: len(scripts)], answers[len(scripts) :]
        if way == "waitaof" and confirmation[0][0] < 1:
            raise TimeoutError(f"the disk of Redis took longer than {FSYNC_WAIT_MS} ms")
        if way == "always" and not node_redis.fsyncs_always(confirmation):
            raise problem("not_built", "Redis no longer waits for its disk", hint=node_redis.FSYNC_HINT)
        return results
