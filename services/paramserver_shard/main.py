"""The command `paramserver-shard`: one shard process."""

import asyncio
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer
from redis.asyncio import Redis
from redis.exceptions import RedisError

from paramserver import kernels
from paramserver.core.fields import check_name
from paramserver.core.shard.core import ShardCore
from paramserver.core.urls import listed_urls
from paramserver.kernels import sockets
from paramserver.limits import MIB, SHARED_BYTES_MAX, STAGED_BYTES_MAX
from paramserver_node import redis as node_redis
from paramserver_node.access import Access, LocalOnly, credentials
from paramserver_node.forward import Forwarder
from paramserver_node.race import race
from paramserver_node.server import Tls, freeze_gc, run, serve_tcp, serve_unix, stop_on_signals
from paramserver_node.settings import ShardSettings, url_of
from paramserver_node.transfer_threads import TransferThreads
from paramserver_shard.app import Services, make_app, served
from paramserver_shard.arrays import ArrayService
from paramserver_shard.arriving import check_part
from paramserver_shard.buffers import BufferPool
from paramserver_shard.clocks import ClockReports
from paramserver_shard.directory import Directory
from paramserver_shard.exchange import Exchange
from paramserver_shard.frames import FrameService
from paramserver_shard.journal import Journal
from paramserver_shard.lending import Lending
from paramserver_shard.link import RETRY_S, SchedulerLink
from paramserver_shard.membership import Membership
from paramserver_shard.memory import Memory, limit_of
from paramserver_shard.models import Models
from paramserver_shard.names import NameService
from paramserver_shard.peers import PeerClient
from paramserver_shard.receiving import FrameReader
from paramserver_shard.runtime import Runtime
from paramserver_shard.scripts import ScriptRunner
from paramserver_shard.shared_folder import SharedFolder
from paramserver_shard.snapshot_store import SnapshotStore
from paramserver_shard.stopping import GRACE_S, Stopping
from paramserver_shard.telemetry import Telemetry, show
from paramserver_shard.unsent import UnsentValues

log = logging.getLogger("paramserver.shard")


EPILOG = """Examples:

  paramserver-shard --name shard-0 --port 8701 --scheduler http://127.0.0.1:8700 --redis redis://127.0.0.1:6379/0

  PARAMSERVER_SCHEDULER=http://10.0.0.5:8700 PARAMSERVER_SECRET_FILE=secret paramserver-shard --host 10.0.0.7
"""

app = typer.Typer(add_completion=False)


@app.command(epilog=EPILOG)
def shard(
    name: Annotated[str | None, typer.Option(help="Stable identity; default: host name and port.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port for HTTP/1.1 and HTTP/2; default: 8701.")] = None,
    scheduler: Annotated[str | None, typer.Option(help="URL of the scheduler; several separated by commas.")] = None,
    redis: Annotated[str | None, typer.Option(help="URL of the Redis that holds the snapshots.")] = None,
    advertise: Annotated[
        str | None, typer.Option(help="URLs under which others reach this shard; default: what it listens on.")
    ] = None,
    snapshot_mib_per_s: Annotated[float | None, typer.Option(help="Budget of snapshot writes.")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Accept requests from other machines without tokens.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Memory limit, e.g. 8GiB; default: that of the container or machine.")
    ] = None,
    shared_memory: Annotated[
        str | None, typer.Option(help="Folder in memory for clients on this machine; empty: none. Default: /dev/shm.")
    ] = None,
    stop_s: Annotated[
        float | None, typer.Option(help="Seconds from SIGTERM to its end: it hands over or stores what it can.")
    ] = None,
    expect_state: Annotated[
        bool | None, typer.Option("--expect-state", help="Refuse to start on an empty Redis.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = None,
) -> None:
    """Own partitions of models: serve pushes and pulls, and snapshot them to Redis.

    Each option can also be set as PARAMSERVER_... or in paramserver.toml; flags take precedence.
    """
    if not run(ShardSettings, dict(locals()), serve):
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class Shard:
    """The assembled parts of one shard."""

    services: Services
    peers: PeerClient
    redis: Redis
    bulk_redis: Redis
    """Client without socket timeouts for large transfers, which set deadlines by their size."""
    folder: SharedFolder | None

    async def aclose(self) -> None:
        """Close the connections and remove the shared memory."""
        if self.folder is not None:
            self.folder.close()
        await self.services.forwarder.aclose()
        await self.peers.aclose()
        await self.services.membership.link.aclose()
        await self.redis.aclose()
        await self.bulk_redis.aclose()


def assemble(
    settings: ShardSettings,
    group: asyncio.TaskGroup,
    access: Access | LocalOnly | None,
    stop: asyncio.Event,
) -> Shard:
    """Build a shard from its settings; `group` owns its tasks. Nothing is connected yet.

    `stop` is set when its server is to stop.
    """
    own_credentials = credentials(settings)
    clock = asyncio.get_running_loop().time
    name = settings.name or f"{socket.gethostname()}-{settings.port}"
    check_name(name, " for a shard")
    addresses = listed_urls(settings.advertise)
    addresses = addresses or [url_of(settings.host, settings.port, tls=bool(settings.tls_certificate))]
    folder = SharedFolder.open(settings.shared_memory, name, SHARED_BYTES_MAX)
    if folder is not None:
        addresses.append(f"unix://{folder.socket}")
    pool, slots, directory = BufferPool(folder=folder), BufferPool(folder=folder), Directory(name)
    telemetry = Telemetry(time.monotonic, directory.models)
    lending = None if folder is None else Lending(pool, slots, folder.board, clock)
    redis, bulk_redis = node_redis.connect(settings.redis), node_redis.connect(settings.redis, timeout_s=None)
    link = SchedulerLink(listed_urls(settings.scheduler), own_credentials)
    scripts = ScriptRunner(bulk_redis)
    store = SnapshotStore(redis, scripts, pool, clock, settings.snapshot_mib_per_s * MIB)
    memory, clocks = Memory(limit_of(settings.memory_limit), (pool, slots)), ClockReports()
    core = ShardCore(check_part, min(STAGED_BYTES_MAX, memory.limit_bytes // 2))
    runtime = Runtime(core, directory, pool, store, Journal(bulk_redis, scripts), group)
    show(runtime, (pool, slots), memory.limit_bytes)
    unsent = UnsentValues(core.present, memory.limit_bytes)
    runtime.on_superseded.append(unsent.superseded)
    membership = Membership(name, addresses, link, redis, directory, runtime, telemetry, memory, clocks)
    runtime.scheduler, runtime.on_values_kept = membership, telemetry.values_kept
    if folder is not None and lending is not None:
        membership.serving.on_changed = folder.board.set_serving_window
        runtime.on_superseded.append(lending.clear_superseded)
    models = Models(directory, link)
    peers = PeerClient(pool, own_credentials)
    exchange = Exchange(directory, runtime, peers)
    names = NameService(models, exchange)
    frames = FrameService(directory, models, runtime, exchange, clocks, lending)
    arrays = ArrayService(models, exchange, names, link)
    reader, forwarder = FrameReader(pool), Forwarder(own_credentials, stop)
    services = Services(
        membership, runtime, models, frames, names, arrays, reader, forwarder, telemetry, unsent, lending, access
    )
    return Shard(services, peers, redis, bulk_redis, folder)


async def expect_state(url: str) -> None:
    """Wait until the Redis at `url` answers; raises CorruptState if it holds no cluster state."""
    redis, told = node_redis.connect(url), ""
    try:
        while True:
            try:
                found = await redis.exists(node_redis.TERM_KEY)
                break
            except (RedisError, OSError) as error:
                node_redis.stop_if_cancelled()
                if (why := node_redis.trouble(error)) != told:
                    log.warning("%s", why)
                told = why
                await asyncio.sleep(RETRY_S)
    finally:
        await redis.aclose()
    if not found:
        raise node_redis.no_state()


def _compile(with_transfers: bool) -> None:
    kernels.warm_up()
    if with_transfers:
        sockets.warm_up()


async def serve(settings: ShardSettings) -> bool:
    """Run one shard until SIGTERM or SIGINT; return whether everything that only it held is stored or handed over.

    Raises CannotListen, or PsError for invalid settings.
    """
    access, tls = Access.of(settings), Tls.of(settings)
    asked, stop = asyncio.Event(), asyncio.Event()
    stop_on_signals(asked)
    if settings.expect_state and await race(expect_state(settings.redis), asked.wait()) is None:
        return True
    async with asyncio.TaskGroup() as group:
        shard = assemble(settings, group, access, stop)
        membership, runtime, lending = shard.services.membership, shard.services.runtime, shard.services.lending
        try:
            app = served(make_app(shard.services), shard.services)
            threads = TransferThreads.if_supported()
            tcp = serve_tcp(app, settings.host, settings.port, stop, tls=tls, grace_s=GRACE_S, transfer_threads=threads)
            serving = group.create_task(tcp)
            stopping = Stopping(membership, runtime, settings.stop_s)
            loops = [group.create_task(stopping.run(asked, stop))]
            if shard.folder is not None and lending is not None:
                path = str(shard.folder.socket)
                group.create_task(serve_unix(app, path, stop, grace_s=GRACE_S, transfer_threads=threads))
                loops.append(group.create_task(lending.expire_periodically()))
            # Compile before joining, so that no push waits for it.  Told to stop meanwhile, it has nothing to lose.
            compiled = await race(runtime.submit(partial(_compile, threads is not None)), stop.wait())
            if compiled is not None:
                freeze_gc()
                loops.append(group.create_task(membership.run()))
            await serving
            for loop in loops:
                loop.cancel()
            runtime.close()
            if threads is not None:
                threads.close()
        finally:
            await shard.aclose()
    if compiled is None:
        os._exit(0)  # Python would wait at its end for the thread that compiles
    return not stopping.lost
