"""Redis as every service uses it: with timeouts, without hidden retries, failing as `storage_unavailable`."""

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from typing import Any, Final, Literal, TypeAlias

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from paramserver.errors import PsError, problem
from paramserver.limits import MIB
from paramserver.types import PartitionKey, Token

TIMEOUT_S: Final = 5.0
"""Timeout for one write or reply; for large transfers see `transfer_timeout`."""
PACE_BYTES_PER_S: Final = 4 * MIB
"""Lowest transfer rate expected of Redis: over a slow disk or network that reaches it, Redis counts as available."""
LEADER_KEY: Final = "ps:leader"
"""JSON with the leader's id, among others (`paramserver_scheduler.lease`); shards compare it at their join."""
TERM_KEY: Final = "ps:term"
"""The number of leaderships; the leader writes it, and shards compare it with what they are told."""
FENCE_KEY: Final = "ps:fence"
"""Hash, also written by the leader: shard name -> highest epoch of it that must not serve any more."""
AWAY: Final = (RedisConnectionError, RedisTimeoutError, OSError)
"""Errors of a Redis that cannot be reached; any other error is an answer from it."""

_CLOSING: Final = (RedisConnectionError, RedisTimeoutError, ReadOnlyError)
"""Errors after which a connection is closed.  A server that has become a replica keeps its connections: only a new one
reaches the server that has taken over its name."""

_REQUEST: Final = re.compile(
    r"""^Command # \d+ \(.*\) of pipeline caused error: \(["']?|["']?,\)$| script: .*$""", re.DOTALL
)
"""What an error says of the one request, where that was in a pipeline or from a script."""
_HAS_DRIVER_INFO: Final = "driver_info" in inspect.signature(AbstractConnection).parameters
_NO_QUESTIONS: Final[dict[str, Any]] = {
    "protocol": 2,
    **({"driver_info": None} if _HAS_DRIVER_INFO else {"lib_name": None, "lib_version": None}),
}
"""A new connection asks nothing before its first command.  By default it asks three times, one after the other, which
takes longer than the timeout of a command if Redis is distant: once lost, the connection was never made again."""

FsyncWay: TypeAlias = Literal["waitaof", "always"]
"""What makes a write reach the disk before it counts: the command WAITAOF after it, or `appendfsync always`."""

FSYNC_HINT: Final = (
    "Redis needs --appendonly yes, and --appendfsync always unless it is Redis 7.2.x, 7.4.3 or later, or 8; where "
    "psctl starts it: psctl up --appendfsync always"
)
FSYNC_SETTINGS: Final = {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no"}
"""Settings with which a write is on the disk before it is answered."""
_WAITS: Final = 5
_WAIT_MS: Final = 500


def token_text(token: Token) -> str:
    """Return an owner token as it is stored: with leading zeros, so that texts compare like numbers."""
    return f"{token:020d}"


def partition_key(key: PartitionKey, name: str) -> str:
    """Return the name in Redis of something of a partition: its `token`, `manifest`, `journal` and so on."""
    return f"{{{key}}}:{name}"


def connect(url: str, *, timeout_s: float | None = TIMEOUT_S) -> Redis:
    """Return a client of the Redis at `url`; it connects when first used.

    `timeout_s` applies to each write and each reply; None: the caller uses `transfer_timeout` instead.
    """
    redis: Redis = Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=2.0 if timeout_s is None else min(timeout_s, 2.0),
        retry=Retry(NoBackoff(), 0, _CLOSING),
        health_check_interval=0,
        **_NO_QUESTIONS,
    )
    pool = redis.connection_pool
    pool.connection_class = type("NoticingConnection", (_NoticesResets, pool.connection_class), {})
    return redis


class _NoticesResets(AbstractConnection):
    """A connection of any kind that is made anew if it has been reset while it was idle.

    redis-py notices only an orderly end.  What it wrote to a transport that uvloop has closed was refused with a
    RuntimeError, which nobody takes for an error of Redis.
    """

    async def connect(self) -> None:
        if self._writer is not None and self._writer.transport.is_closing():
            await self.disconnect(nowait=True)
        await super().connect()  # type: ignore[no-untyped-call, unused-ignore]

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super().send_packed_command(*args, **kwargs)
        except RuntimeError as e:  # reset only now
            raise RedisConnectionError("the connection was reset") from e


@asynccontextmanager
async def transfer_timeout(
    size_bytes: int, pace_bytes_per_s: int | None = None, timeout_s: float | None = None
) -> AsyncIterator[None]:
    """Limit the time of a block that transfers `size_bytes` to or from Redis; raises TimeoutError if it is too slow.

    The lowest rate expected is `PACE_BYTES_PER_S`, and the time for what is small `TIMEOUT_S`, unless others are given.
    """
    within_s = (TIMEOUT_S if timeout_s is None else timeout_s) + size_bytes / (pace_bytes_per_s or PACE_BYTES_PER_S)
    try:
        async with asyncio.timeout(within_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise  # the block's own
        what = f"{size_bytes} bytes" if size_bytes > PACE_BYTES_PER_S else "a request"
        raise TimeoutError(f"{what} took longer than {within_s:.2g} s") from None


def trouble(error: BaseException) -> str:
    """Describe an error of Redis: it does not answer, or refuses, because it is full or for another reason.

    Which of the requests it was is left out: one trouble has one text, for all requests and from all nodes.
    """
    # What it says of the second kind, to large requests, names no password.
    if isinstance(error, AuthenticationError) or "unauthenticated" in str(error):
        return "Redis refuses: it wants another password than its URL here has (--redis, PARAMSERVER_REDIS)"
    text = _REQUEST.sub("", str(error)).rstrip(".")
    return f"Redis {'does not answer' if isinstance(error, AWAY) else 'refuses'}: {text or type(error).__name__}"


@contextmanager
def unavailable_if_away() -> Iterator[None]:
    """Turn errors of Redis, whether it is away or refuses, into Unavailable (`storage_unavailable`)."""
    try:
        yield
    except (RedisError, OSError) as e:
        raise problem("storage_unavailable", trouble(e)) from e


def stop_if_cancelled() -> None:
    """Raise CancelledError if this task has been cancelled; for loops, to be called each time Redis has answered.

    The Redis client uses `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes with a reply.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def leave_after(error: BaseException, *clients: Redis) -> None:
    """After an error that may be that of every connection, close the idle ones of these clients.

    So it is if the server has become a replica (see `_CLOSING`), or is silent: perhaps a network has lost the
    connections, and each would make one more request wait for its timeout.
    """
    if isinstance(error, (ReadOnlyError, RedisTimeoutError, TimeoutError)):
        for idle in [c for redis in clients for c in redis.connection_pool._available_connections]:
            await idle.disconnect(nowait=True)  # that of the pool waits for the other end, under TLS, and may fail


def no_state() -> PsError:
    """Return the error for an empty Redis where the setting `expect_state` requires one with a cluster's state."""
    return problem(
        "corrupt_state",
        "Redis holds no state, but --expect-state requires one",
        hint="is it the right Redis, with its data? Start without --expect-state for a new cluster",
    )


def memory_of(info: Mapping[str, Any]) -> tuple[int, int]:
    """Return what counts towards `maxmemory`, and that limit (0: none), in bytes, from the answer to `INFO memory`."""
    return int(info["used_memory"]) - int(info.get("mem_not_counted_for_evict", 0)), int(info.get("maxmemory", 0))


async def fsync_way(redis: Redis) -> FsyncWay:
    """Return how this Redis can confirm that a write is on its disk, which the level `fsynced` requires.

    Takes up to three seconds.  Raises RequestError (`not_built`) if it cannot, Unavailable (`storage_unavailable`) if
    it does not answer.
    """
    with unavailable_if_away():
        try:
            found = [await redis.config_get(name) for name in FSYNC_SETTINGS]
        except ResponseError:  # managed Redis services often disable CONFIG
            found = []
        if fsyncs_always(found):
            return "always"
        if not (why := await _why_not_waitaof(redis)):
            return "waitaof"
    seen = ", ".join(f"{_text(name)} {_text(value)}" for answer in found for name, value in answer.items())
    settings = (
        f"it has {seen}" if seen else "CONFIG GET, which would tell whether it has appendfsync always, is refused"
    )
    raise problem("not_built", f"'fsynced' is not possible: {why}, and {settings}", hint=FSYNC_HINT)


def fsyncs_always(found: Sequence[Mapping[Any, Any]]) -> bool:
    """Whether Redis answers a write only once it is on the disk, by its answers to CONFIG GET of `FSYNC_SETTINGS`."""
    return {_text(name): _text(value) for answer in found for name, value in answer.items()} == FSYNC_SETTINGS


async def _why_not_waitaof(redis: Redis) -> str:
    """Return why WAITAOF cannot confirm that a write is on the disk; "" if it can."""
    async with redis.pipeline(transaction=False) as pipe:
        for _ in range(_WAITS):
            pipe.set("ps:probe", "", px=1)
            pipe.execute_command("WAITAOF", 1, 0, _WAIT_MS)
            pipe.time()
        answers = await pipe.execute(raise_on_error=False)
    writes, waits, times = answers[::3], answers[1::3], answers[2::3]
    for answer in (*writes, *times):
        if isinstance(answer, Exception):
            raise answer
    for answer in waits:
        if isinstance(answer, Exception):
            return "this Redis has no WAITAOF" if "unknown command" in str(answer) else trouble(answer)
    confirmed_s = [s + us / 1e6 for (local, _), (s, us) in zip(waits, times, strict=True) if local]
    return "this Redis answers WAITAOF before a write is on its disk" if are_early(confirmed_s) else ""


def are_early(confirmed_s: Sequence[float]) -> bool:
    """Whether WAITAOF confirmed writes that followed one another earlier than `everysec` can have synced them.

    The file is synced once a second, so two confirmations are at least half a second apart, but for one that comes as
    the file is replaced, or late.  Redis 7.4.0 to 7.4.2, and Valkey up to 9.1 at least, confirm after a tenth of a
    second or two (github.com/redis/redis/pull/13793).  Times are by the server's clock: its distance does not count.
    """
    return sum(later - at < _WAIT_MS / 1000 for at, later in pairwise(confirmed_s)) > 1


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
