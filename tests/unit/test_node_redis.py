"""A Redis that is down, silent or refusing becomes one error, `storage_unavailable`; and ports for test servers."""

import asyncio
import socket

import pytest
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError, RedisError

from paramserver.errors import Unavailable
from paramserver_node import redis as node_redis
from paramserver_node import redis_server


@pytest.mark.parametrize("listening", [False, True])
async def test_a_redis_that_does_not_answer_is_storage_unavailable(listening: bool) -> None:
    """A Redis that is down, or never answers, becomes `storage_unavailable` with a time after which to retry."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if not listening:
            silent.close()
        client = node_redis.connect(f"redis://127.0.0.1:{port}/0", timeout_s=0.2)
        try:
            with pytest.raises(Unavailable) as caught, node_redis.unavailable_if_away():
                await client.get("key")
        finally:
            await client.aclose()

    assert caught.value.code == "storage_unavailable"
    assert caught.value.retry_after_s is not None


async def test_a_new_connection_to_redis_begins_with_the_command_itself() -> None:
    """A new connection sends the caller's command first: each question before it would cost a distant Redis' delay."""
    said = bytearray()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said.extend(await reader.read(1 << 16))
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        client = node_redis.connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
        with pytest.raises(Unavailable), node_redis.unavailable_if_away():
            await client.get("key")
        await client.aclose()

    assert said.split() == [b"*2", b"$3", b"GET", b"$3", b"key"]


@pytest.mark.parametrize(
    "error", [OutOfMemoryError("maxmemory"), ReadOnlyError("replica"), BusyLoadingError("loading")]
)
def test_a_redis_that_refuses_is_storage_unavailable(error: RedisError) -> None:
    """The errors of a full, read-only or loading Redis become `storage_unavailable`."""
    with pytest.raises(Unavailable) as caught, node_redis.unavailable_if_away():
        raise error

    assert caught.value.code == "storage_unavailable"


@pytest.mark.parametrize(
    ("error", "text"),
    [(TimeoutError(), "does not answer: TimeoutError"), (OutOfMemoryError("maxmemory"), "refuses: maxmemory")],
)
def test_the_trouble_of_redis_has_words(error: Exception, text: str) -> None:
    """An error without a text of its own, such as a timeout, is told by its name; the sentence ended at the colon."""
    assert node_redis.trouble(error) == f"Redis {text}"


def test_no_port_is_given_twice() -> None:
    """`free_port` never returns a port twice, so that two servers about to start do not share one."""
    ports = [redis_server.free_port() for _ in range(1000)]
    assert len(set(ports)) == len(ports)
