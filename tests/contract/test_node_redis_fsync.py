"""Whether a Redis can confirm that a write is on disk: by WAITAOF, by `appendfsync always`, or not at all.

And what a full one says.
"""

from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError
from tests.refusals import refused_with
from tests.servers import free_port, running_redis

from paramserver.errors import RequestError, Unavailable
from paramserver_node import redis as node_redis
from paramserver_node import redis_server

pytestmark = pytest.mark.process

NO_WAITAOF = ("--rename-command", "WAITAOF", "without-it")
"""Options that hide WAITAOF, as on servers before Redis 7.2."""


@pytest.mark.parametrize(
    ("more", "want"),
    [
        (("--appendfsync", "no"), "waitaof"),  # which waits, be it for nothing
        (("--appendfsync", "always"), "always"),
        ((*NO_WAITAOF, "--appendfsync", "always"), "always"),
        ((), "answers WAITAOF before .* has appendonly yes, appendfsync everysec, no-appendfsync-on-rewrite no "),
        (NO_WAITAOF, "has no WAITAOF, .* appendfsync everysec"),
        (("--appendonly", "no"), "WAITAOF cannot be used .* has appendonly no, "),
        ((*NO_WAITAOF, "--appendonly", "no", "--appendfsync", "always"), "has no WAITAOF, .* has appendonly no, "),
        (
            (*NO_WAITAOF, "--appendfsync", "always", "--no-appendfsync-on-rewrite", "yes"),
            "no-appendfsync-on-rewrite yes",
        ),
        (("--rename-command", "CONFIG", "without-it"), "before .* CONFIG GET, .* is refused"),
    ],
)
async def test_the_way_to_the_disk(tmp_path: Path, more: tuple[str, ...], want: str) -> None:
    """Fsync uses `appendfsync always`, else WAITAOF where that waits for the disk, else is refused with the reason."""
    with running_redis(tmp_path, more=more) as url:
        redis = node_redis.connect(url)
        try:
            if want in ("waitaof", "always"):
                assert await node_redis.fsync_way(redis) == want
            else:
                with refused_with("not_built", RequestError, match=want):
                    await node_redis.fsync_way(redis)
        finally:
            await redis.aclose()


@pytest.mark.parametrize(
    ("confirmed_s", "early"),
    [
        ([0.02, 1.13, 2.21], False),  # Redis 8.2
        ([0.02, 0.05, 1.1, 2.1], False),  # one more, as the file was replaced
        ([0.9, 1.2, 2.2], False),  # one that was late
        ([], False),
        ([0.2, 0.4, 0.6, 0.8, 1.0], True),  # Valkey 9.1
        ([0.1, 0.2, 1.3, 1.4], True),  # the same on a machine that stood still
    ],
)
def test_a_redis_that_waits_for_its_disk_is_told_by_its_pace(confirmed_s: list[float], early: bool) -> None:
    """Confirmations that wait for the disk are a second apart, but for one; those that are not are early."""
    assert node_redis.are_early(confirmed_s) is early


async def test_a_redis_that_is_away_is_no_refusal() -> None:
    """An unreachable Redis raises `Unavailable`, not a refusal of fsync."""
    redis = node_redis.connect(redis_server.url(free_port()))
    with pytest.raises(Unavailable):
        await node_redis.fsync_way(redis)
    await redis.aclose()


async def test_a_full_redis_says_the_same_to_each_request(tmp_path: Path) -> None:
    """What a full Redis refuses is told without the request's own keys and lines: one trouble, whoever meets it."""
    with running_redis(tmp_path) as url:
        redis = node_redis.connect(url)
        told = []
        try:
            await redis.config_set("maxmemory", 1)
            pipeline = redis.pipeline(transaction=False)
            pipeline.set("{m.1/0}:a", "value")
            script = redis.eval("redis.call('set', KEYS[1], 'value')", 1, "b")
            for request in (redis.set("c", "value"), pipeline.execute(), script):
                with pytest.raises(RedisError) as caught:
                    await request
                told.append(node_redis.trouble(caught.value))
        finally:
            await redis.aclose()
    assert told == ["Redis refuses: command not allowed when used memory > 'maxmemory'"] * 3


async def test_a_redis_with_another_password_says_so_to_each_request(tmp_path: Path) -> None:
    """Requests of many words are refused for their length, others for want of a password: it is one trouble."""
    with running_redis(tmp_path) as url:
        with Redis.from_url(url) as plain:
            plain.config_set("requirepass", "new")
        told = set[str]()
        for given, words in ((url, 1), (url, 20), (url.replace("//", "//:old@"), 1)):
            redis = node_redis.connect(given)
            with pytest.raises(RedisError) as caught:
                await redis.mset({f"key-{i}": 1 for i in range(words)})
            told.add(node_redis.trouble(caught.value))
            await redis.aclose()
    assert told == {"Redis refuses: it wants another password than its URL here has (--redis, PARAMSERVER_REDIS)"}
