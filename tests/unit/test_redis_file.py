"""When the leader has Redis rewrite its append-only file, and when it does so again."""

from typing import Any, cast

import pytest
from redis.exceptions import ResponseError

from paramserver_scheduler.redis_file import INTERVAL_S, RETRY_S, RedisFile


class FakeRedis:
    """What Redis says of its disk and of its file, and how often it was told to rewrite that."""

    def __init__(self) -> None:
        self.refused = 0
        self.state: dict[str, Any] = {
            "aof_enabled": 1,
            "aof_last_write_status": "ok",
            "aof_rewrite_in_progress": 0,
            "aof_rewrite_scheduled": 0,
            "aof_rewrites": 3,
            "aof_last_bgrewrite_status": "ok",
        }
        self.asked = 0
        self.refuses = False

    async def info(self, section: str) -> dict[str, Any]:
        """Answer INFO."""
        if section == "persistence":
            return self.state
        return {"errorstat_MISCONF": {"count": self.refused}} if self.refused else {}

    async def bgrewriteaof(self) -> None:
        """Begin a rewrite, or refuse to."""
        self.asked += 1
        if self.refuses:
            raise ResponseError("unknown command 'BGREWRITEAOF'")
        self.state["aof_rewrites"] += 1
        self.state["aof_rewrite_in_progress"] = 1

    def ends(self, status: str) -> None:
        """End the rewrite that is in progress."""
        self.state |= {"aof_rewrite_in_progress": 0, "aof_last_bgrewrite_status": status}


async def look(file: RedisFile, redis: FakeRedis) -> float:
    """Let the leader look once; return after how many seconds it looks again."""
    return await file._look(cast(Any, redis))


async def test_a_file_is_rewritten_once_the_disk_takes_writes_again() -> None:
    """Not while the disk is full or another rewrite is in progress, whose file may have the hole; and then once."""
    file, redis = RedisFile(), FakeRedis()
    await look(file, redis)
    redis.refused = 5
    redis.state |= {"aof_last_write_status": "err", "aof_rewrite_in_progress": 1}
    await look(file, redis)
    redis.state["aof_last_write_status"] = "ok"
    await look(file, redis)
    assert redis.asked == 0
    redis.ends("ok")
    for _ in range(3):
        await look(file, redis)
    assert redis.asked == 1
    assert "append-only file" in file.problem
    redis.ends("ok")
    for _ in range(3):
        await look(file, redis)
    assert redis.asked == 1
    assert file.problem == ""


async def test_writes_that_are_refused_again_want_another_rewrite() -> None:
    """So it is also if Redis has been started anew since, and counts from zero again."""
    file, redis = RedisFile(), FakeRedis()
    for times, refused in enumerate((5, 6, 2), 1):
        redis.refused = refused if refused > 2 else 0
        await look(file, redis)
        redis.refused = refused
        await look(file, redis)
        assert redis.asked == times
        redis.ends("ok")
        await look(file, redis)


@pytest.mark.parametrize("refused", [1, 9])
async def test_a_rewrite_that_failed_is_tried_again_later(refused: int) -> None:
    """One that the disk lacks the room for is not repeated at once: it fills the disk, and all writes are refused."""
    file, redis = RedisFile(), FakeRedis()
    redis.refused = 1
    redis.state["aof_last_bgrewrite_status"] = "err"  # of one that nobody here has asked for
    assert await look(file, redis) == INTERVAL_S
    redis.refused = refused
    redis.ends("err")
    assert await look(file, redis) == RETRY_S
    await look(file, redis)
    assert redis.asked == 2
    assert "append-only file" in file.problem


async def test_a_redis_that_rewrites_no_file_is_asked_once_a_minute() -> None:
    """Some services refuse the command."""
    file, redis = RedisFile(), FakeRedis()
    redis.refused, redis.refuses = 1, True
    assert await look(file, redis) == RETRY_S


@pytest.mark.parametrize("lacks", ["aof_enabled", "aof_rewrites"])
async def test_a_redis_without_such_a_file_is_not_asked(lacks: str) -> None:
    """Without an append-only file there is nothing to rewrite, nor before Redis 7, which has always appended to it."""
    file, redis = RedisFile(), FakeRedis()
    redis.refused = 1
    if lacks == "aof_enabled":
        redis.state[lacks] = 0
    else:
        del redis.state[lacks]
    await look(file, redis)
    assert redis.asked == 0
    assert file.problem == ""
