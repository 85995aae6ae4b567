"""Whether a Redis can say that a write is on its disk: the ways in which it can, and a clear no where it cannot."""

from pathlib import Path

import pytest

from paramserver.errors import RequestError, Unavailable
from paramserver_node import redis as node_redis
from paramserver_node import redis_server

pytestmark = [pytest.mark.process, pytest.mark.asyncio]

NO_WAITAOF = ("--rename-command", "WAITAOF", "without-it")
"""As servers before Redis 7.2 have it."""


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
    """WAITAOF with an append-only file, else `appendfsync always`, else a refusal that says what to set."""
    with redis_server.running(tmp_path, more=more) as url:
        redis = node_redis.connect(url)
        try:
            if want is not None:
                assert await node_redis.fsync_way(redis) == want
            else:
                with pytest.raises(RequestError, match="appendonly yes") as caught:
                    await node_redis.fsync_way(redis)
                assert caught.value.code == "not_built"
        finally:
            await redis.aclose()


async def test_a_redis_that_is_away_is_no_refusal() -> None:
    """It cannot be asked, so the answer is to come back later."""
    redis = node_redis.connect(redis_server.url(redis_server.free_port()))
    with pytest.raises(Unavailable):
        await node_redis.fsync_way(redis)
    await redis.aclose()
