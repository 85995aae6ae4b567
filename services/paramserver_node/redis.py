"""Redis, as every service uses it: with timeouts, without hidden retries, failing as `storage_unavailable`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from paramserver.errors import problem

TIMEOUT_S: Final = 5.0
AWAY: Final = (RedisConnectionError, RedisTimeoutError, OSError)
"""What a Redis that is not there raises; anything else it raises is an answer."""


def connect(url: str, *, timeout_s: float = TIMEOUT_S) -> Redis:
    """A client of the Redis at `url`; it connects when first used."""
    return Redis.from_url(  # type: ignore[no-any-return, unused-ignore]
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=min(timeout_s, 2.0),
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
    )


@contextmanager
def unavailable_if_away() -> Iterator[None]:
    """Turn a Redis that is away, or refuses, into Unavailable (`storage_unavailable`)."""
    try:
        yield
    except AWAY as e:
        raise problem("storage_unavailable", f"Redis does not answer: {e}") from e
    except RedisError as e:
        raise problem("storage_unavailable", f"Redis refuses: {e}") from e
