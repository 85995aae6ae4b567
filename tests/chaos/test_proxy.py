"""The fault proxy forwards bytes, holds them in either direction, and delivers them when healed."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from .proxy import Link


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        RECEIVED.append(line)
        writer.write(line.upper())
    writer.close()


RECEIVED: list[bytes] = []


async def answer(reader: asyncio.StreamReader, within_s: float) -> bytes | None:
    try:
        return await asyncio.wait_for(reader.readline(), within_s)
    except TimeoutError:
        return None


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Link, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A link to a server that echoes, and a connection through it."""
    RECEIVED.clear()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    link = Link("a>b", server.sockets[0].getsockname()[1])
    await link.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    try:
        yield link, reader, writer
    finally:
        writer.close()
        await link.stop()
        server.close()
        await server.wait_closed()


async def test_a_link_passes_holds_and_delivers() -> None:
    """A link forwards bytes, holds those of a cut direction, delivers them when healed, and can delay each chunk."""
    async with connected() as (link, reader, writer):
        writer.write(b"one\n")
        assert await answer(reader, 30.0) == b"ONE\n"

        link.cut("there")
        writer.write(b"two\n")
        assert await answer(reader, 0.2) is None
        assert RECEIVED == [b"one\n"], "the request has passed a cut link"
        link.heal()
        assert await answer(reader, 30.0) == b"TWO\n"

        link.cut("back")
        writer.write(b"three\n")
        assert await answer(reader, 0.2) is None
        async with asyncio.timeout(30.0):  # only the answers are held
            while RECEIVED[-1] != b"three\n":
                await asyncio.sleep(0.01)
        link.heal()
        assert await answer(reader, 30.0) == b"THREE\n"

        link.delay_s = 0.1
        before = asyncio.get_running_loop().time()
        writer.write(b"four\n")
        assert await answer(reader, 30.0) == b"FOUR\n"
        assert asyncio.get_running_loop().time() - before >= 0.2, "there and back"


@pytest.mark.skipif(sys.platform != "linux", reason="needs a packet filter of Linux")
async def test_a_link_loses_connections_without_a_word() -> None:
    """What is sent on a lost connection is never acknowledged, so the sender's kernel gives it up; a new one works."""
    async with connected() as (link, reader, writer):
        writer.write(b"one\n")
        assert await answer(reader, 30.0) == b"ONE\n"
        link.lose()
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 200)
        writer.write(b"two\n")
        with pytest.raises(TimeoutError, match="timed out"):
            await asyncio.wait_for(reader.readline(), 30.0)
        assert b"two\n" not in RECEIVED
        again, its_writer = await asyncio.open_connection("127.0.0.1", link.port)
        its_writer.write(b"three\n")
        assert await answer(again, 30.0) == b"THREE\n"
        its_writer.close()


async def test_a_link_reports_that_nobody_listens() -> None:
    """Connections through a link break if the link is reset or if nothing listens on the target port."""
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    link = Link("a>b", server.sockets[0].getsockname()[1])
    await link.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        writer.write(b"one\n")
        assert await answer(reader, 30.0) == b"ONE\n"
        link.reset()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 30.0)
        writer.close()

        server.close()
        await server.wait_closed()
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 30.0)
        writer.close()
    finally:
        await link.stop()
