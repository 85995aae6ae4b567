"""Redis, as every service uses it: with timeouts, without hidden retries, failing as `storage_unavailable`."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Literal, TypeAlias

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from paramserver.errors import problem
from paramserver.limits import MIB

TIMEOUT_S: Final = 5.0
"""How long Redis may be silent; for what is large see `patience`."""
PACE_BYTES_PER_S: Final = 4 * MIB
"""The least that Redis takes or gives: a slow disk or network that brings so much is not one that is gone."""
AWAY: Final = (RedisConnectionError, RedisTimeoutError, OSError)
"""What a Redis that is not there raises; anything else it raises is an answer."""

FsyncWay: TypeAlias = Literal["waitaof", "always"]
"""How a write is made to reach the disk before it counts: the command WAITAOF after it, or `appendfsync always`."""

FSYNC_HINT: Final = (
    "use Redis 7.2 or newer, or Valkey, with --appendonly yes; or --appendfsync always with an older one"
)


def connect(url: str, *, timeout_s: float | None = TIMEOUT_S) -> Redis:
    """A client of the Redis at `url`; it connects when first used.

    `timeout_s`: for each write and each answer; None: whoever uses it has `patience`.
    """
    return Redis.from_url(  # type: ignore[no-any-return, unused-ignore]
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=2.0 if timeout_s is None else min(timeout_s, 2.0),
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
    )


@asynccontextmanager
async def patience(size_bytes: int) -> AsyncIterator[None]:
    """A block in which so many bytes go to Redis or come from it; raises TimeoutError when they are too slow."""
    within_s = TIMEOUT_S + size_bytes / PACE_BYTES_PER_S
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        raise TimeoutError(f"{size_bytes} bytes took longer than {within_s:.3g} s") from None


def trouble(error: BaseException) -> str:
    """What is wrong with Redis: it is not there, or full, or refuses for another reason."""
    return f"Redis {'does not answer' if isinstance(error, AWAY) else 'refuses'}: {error or type(error).__name__}"


@contextmanager
def unavailable_if_away() -> Iterator[None]:
    """Turn a Redis that is away, or refuses, into Unavailable (`storage_unavailable`)."""
    try:
        yield
    except (RedisError, OSError) as e:
        raise problem("storage_unavailable", trouble(e)) from e


def stop_if_cancelled() -> None:
    """To be called by whoever goes on after Redis has answered, round after round.

    The client uses `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes with an answer.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def fsync_way(redis: Redis) -> FsyncWay:
    """How this Redis can be made to say that a write is on its disk, which the level `fsynced` rests on.

    Raises RequestError (`not_built`) where it cannot, Unavailable (`storage_unavailable`) where it does not answer.
    """
    with unavailable_if_away():
        try:
            await redis.execute_command("WAITAOF", 1, 0, 1000)  # type: ignore[no-untyped-call, unused-ignore]
            return "waitaof"
        except ResponseError as e:
            if "unknown command" not in str(e):
                raise problem("not_built", f"this Redis cannot offer 'fsynced': {e}", hint=FSYNC_HINT) from e
        try:
            settings = {**await redis.config_get("appendonly"), **await redis.config_get("appendfsync")}
        except ResponseError as e:  # CONFIG is often closed where others run the Redis
            raise problem(
                "not_built", f"this Redis has no WAITAOF, and its settings cannot be read: {e}", hint=FSYNC_HINT
            ) from e
    found = {_text(name): _text(value) for name, value in settings.items()}
    if found.get("appendonly") == "yes" and found.get("appendfsync") == "always":
        return "always"
    raise problem(
        "not_built",
        f"this Redis has no WAITAOF, and appendonly is '{found.get('appendonly', '?')}', appendfsync "
        f"'{found.get('appendfsync', '?')}'",
        hint=FSYNC_HINT,
    )


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
