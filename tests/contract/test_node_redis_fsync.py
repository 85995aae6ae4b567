"""Whether a Redis can confirm that a write is on disk: by WAITAOF, by `appendfsync always`, or not at all."""

from pathlib import Path

import pytest
from tests.refusals import refused_with

from paramserver.errors import RequestError, Unavailable
from paramserver_node import redis as node_redis
from paramserver_node import redis_server

pytestmark = pytest.mark.process

NO_WAITAOF = ("--rename-command", "WAITAOF", "without-it")
"""Options that hide WAITAOF, as on servers before Redis 7.2."""


@pytest.mark.parametrize(
    ("more", "want"),
    [
        ((), "waitaof"),
        (("--appendfsync", "always"), "waitaof"),
        ((*NO_WAITAOF, "--appendfsync", "always"), "always"),
        (NO_WAITAOF, None),
        (("--appendonly", "no"), None),
        ((*NO_WAITAOF, "--appendonly", "no", "--appendfsync", "always"), None),
        (("--rename-command", "CONFIG", "without-it"), "waitaof"),
    ],
)
async def test_the_way_to_the_disk(tmp_path: Path, more: tuple[str, ...], want: str | None) -> None:
    """Fsync uses WAITAOF with an append-only file, else `appendfsync always`, else is refused with a hint."""
    with redis_server.running(tmp_path, more=more) as url:
        redis = node_redis.connect(url)
        try:
            if want is not None:
                assert await node_redis.fsync_way(redis) == want
            else:
                with refused_with("not_built", RequestError, match="appendonly yes"):
                    await node_redis.fsync_way(redis)
        finally:
            await redis.aclose()


async def test_a_redis_that_is_away_is_no_refusal() -> None:
    """An unreachable Redis raises `Unavailable`, not a refusal of fsync."""
    redis = node_redis.connect(redis_server.url(redis_server.free_port()))
    with pytest.raises(Unavailable):
        await node_redis.fsync_way(redis)
    await redis.aclose()
