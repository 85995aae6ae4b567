"""Entry point of the scheduler: a standby until it gets the lease, then the leader until deposed or stopped."""

import asyncio
import logging
import secrets
import socket
import time
from pathlib import Path
from typing import Annotated

import typer
from fastapi import FastAPI
from redis.asyncio import Redis

from paramserver.core.scheduler.core import SchedulerCore
from paramserver.core.urls import listed_urls
from paramserver.errors import CorruptState, PsError, Unavailable, first_cause, problem
from paramserver_node.access import Access, credentials
from paramserver_node.crash import crash_point
from paramserver_node.forward import Forwarder
from paramserver_node.race import race
from paramserver_node.redis import connect
from paramserver_node.server import Tls, freeze_gc, run, serve_tcp, stop_on_signals
from paramserver_node.settings import SchedulerSettings, url_of
from paramserver_scheduler.app import make_app, served
from paramserver_scheduler.checkpoints import CheckpointStore
from paramserver_scheduler.history import History
from paramserver_scheduler.hub import Hub
from paramserver_scheduler.jobs import Jobs, problem_of
from paramserver_scheduler.leadership import Leadership, kept
from paramserver_scheduler.lease import Deposed, Lease
from paramserver_scheduler.login import LINK_S
from paramserver_scheduler.other_schedulers import OtherSchedulers
from paramserver_scheduler.runtime import Runtime
from paramserver_scheduler.service import Service
from paramserver_scheduler.shards import ShardClient
from paramserver_scheduler.store import StateStore
from paramserver_scheduler.watch import watch

log = logging.getLogger("paramserver.scheduler")
app = typer.Typer(add_completion=False)

ACQUIRE_INTERVAL_S = 0.25
"""Interval at which a standby tries to take the lease."""
REWRITE_TIMEOUT_S = 10.0
"""How long the leader has to rewrite an emptied Redis before a standby takes over with empty state."""


class StopRequested(Exception):
    """Raised when this scheduler was told to stop."""


async def wait_for_lease(lease: Lease, stop: asyncio.Event) -> None:
    """Wait until this scheduler leads or `stop` is set.  Raises CorruptState if an expected state is missing."""
    away = logged = False
    emptied_s: float | None = None
    while not stop.is_set():
        try:
            late = emptied_s is not None and time.monotonic() - emptied_s > REWRITE_TIMEOUT_S
            if await lease.try_acquire(even_if_emptied=late):
                return
        except CorruptState:
            raise
        except PsError as e:
            if not away:
                log.warning("redis.away %s", e.detail)
            away = True
        else:
            away = False
            emptied_s = (emptied_s or time.monotonic()) if lease.emptied else None
            if lease.leader is not None and not logged:
                log.info("scheduler.stands_by leader=%s term=%d", lease.leader.url, lease.leader.term)
                logged = True
        await asyncio.sleep(ACQUIRE_INTERVAL_S)


async def lead(
    settings: SchedulerSettings, redis: Redis, bulk_redis: Redis, http: FastAPI, lease: Lease, stop: asyncio.Event
) -> None:
    """Read the state, then serve requests as the leader; `bulk_redis` has no socket timeouts.

    Raises Deposed if another scheduler leads, StopRequested when told to stop, CorruptState if the state cannot be
    read, and any exception of the core, whose state may then be inconsistent; all but the errors of the initial read
    come in an exception group.
    """
    store = StateStore(bulk_redis, lease)
    checkpoints: CheckpointStore = http.state.checkpoints
    crash_point("scheduler.lease_taken")
    async with kept(lease):
        opened = await race(store.open(), stop.wait())  # a Redis that hangs may keep it for a minute
        if opened is None:
            raise StopRequested("told to stop")
        (documents,) = opened
        crash_point("scheduler.state_read")
        try:
            await asyncio.to_thread(checkpoints.sweep)
        except OSError as e:  # a disk that answers nothing must not keep the scheduler from leading
            log.warning("checkpoints.stay %s", problem_of(e))
        origin = (time.monotonic(), store.term, time.time(), secrets.token_hex(8))
        core = await asyncio.to_thread(SchedulerCore.restore, documents, *origin)
    history = History(time.time() - time.monotonic())
    history.begin(core.read)
    runtime = Runtime(core, store, Hub(lambda document: history.note(document, time.monotonic())))
    others = OtherSchedulers(lease, checkpoints, credentials(settings))
    leadership = Leadership(lease, runtime.note_redis, runtime.redis_data_lost, others.newer_leader_exists)
    runtime.confirm = leadership.confirm
    shards, forwarder = ShardClient(credentials(settings), lambda: core.read.term), http.state.forwarder
    over = problem("no_leader", "this scheduler is no longer the leader")
    try:
        async with asyncio.TaskGroup() as group:
            jobs = Jobs(runtime, checkpoints, others, shards, redis, history, group, lease.name)
            runtime.jobs = jobs
            http.state.service = Service(runtime, leadership, jobs, forwarder, history, lease, time.monotonic())
            log.info("scheduler.leads term=%d models=%d url=%s", store.term, len(core.read.models()), lease.url)
            history.add(time.monotonic(), "scheduler_leads", f"scheduler {lease.name} leads (term {store.term})")
            group.create_task(leadership.run())
            group.create_task(runtime.run())
            group.create_task(watch(http.state.service))
            group.create_task(http.state.service.redis_memory.watch(redis))
            group.create_task(http.state.service.redis_file.watch(redis))
            group.create_task(jobs.prune())
            await stop.wait()
            await runtime.finish(over)
            raise StopRequested("told to stop")
    finally:
        http.state.service = None
        # Ends feeds and long polls: their clients retry and are forwarded to the next leader.
        runtime.close(over)
        await others.aclose()
        await shards.aclose()


async def run_election(
    settings: SchedulerSettings, redis: Redis, bulk_redis: Redis, http: FastAPI, lease: Lease, stop: asyncio.Event
) -> None:
    """Alternate between standby and leader until told to stop, then release the lease."""
    try:
        while not stop.is_set():
            await wait_for_lease(lease, stop)
            if stop.is_set():
                break
            try:
                await lead(settings, redis, bulk_redis, http, lease, stop)
            except* (Deposed, StopRequested) as over:
                log.info("scheduler.leads_no_more term=%d %s", lease.term, first_cause(over))
            except* Unavailable as away:
                log.warning("redis.away %s", first_cause(away))
    finally:
        await _release(lease)


async def _release(lease: Lease) -> None:
    """Release the lease so that another scheduler can lead at once; if Redis is away, it expires by itself."""
    try:
        await lease.release()
    except PsError as e:
        log.info("lease.kept %s", e)


def _lease_of(settings: SchedulerSettings, redis: Redis) -> Lease:
    host, advertised = socket.gethostname(), listed_urls(settings.advertise)
    name = settings.name or f"{host}-{settings.port}"
    return Lease(
        redis,
        name=name,
        place=f"{name}@{host}/{settings.host}:{settings.port}",
        url=advertised[0] if advertised else url_of(settings.host, settings.port, tls=bool(settings.tls_certificate)),
        expect_state=settings.expect_state,
    )


async def serve(settings: SchedulerSettings) -> None:
    """Run one scheduler until SIGTERM or SIGINT.

    Raises CorruptState if the state cannot be read, or is missing although one is expected.
    """
    access, tls = Access.of(settings), Tls.of(settings)
    stop = asyncio.Event()
    stop_on_signals(stop)
    http = make_app()
    http.state.checkpoints = CheckpointStore(Path(settings.state_dir).absolute())
    redis, bulk_redis = connect(settings.redis, timeout_s=2.0), connect(settings.redis, timeout_s=None)
    lease, forwarder = _lease_of(settings, redis), Forwarder(credentials(settings), stop)
    freeze_gc()
    try:
        async with asyncio.TaskGroup() as group:
            # Listen before trying for the lease: once the port is bound, no other process can have the same place.
            serving = group.create_task(
                serve_tcp(
                    served(http, lease, forwarder, access), settings.host, settings.port, stop, tls=tls, proxied=True
                )
            )
            if http.state.login is not None:
                at = next(iter(listed_urls(settings.page_url)), lease.url) + http.state.login.link()
                log.info("scheduler.page once within %d s: %s", LINK_S, at)
            await asyncio.sleep(0)
            group.create_task(run_election(settings, redis, bulk_redis, http, lease, stop))
            await serving
    finally:
        await forwarder.aclose()
        await redis.aclose()
        await bulk_redis.aclose()


@app.command()
def scheduler(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default 8700).")] = None,
    redis: Annotated[str | None, typer.Option(help="URL of the Redis that holds the state.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of this scheduler; default: host name and port.")] = None,
    state_dir: Annotated[str | None, typer.Option(help="Folder of checkpoints and of files of initial values.")] = None,
    advertise: Annotated[str | None, typer.Option(help="URL under which others reach it.")] = None,
    expect_state: Annotated[
        bool | None, typer.Option("--expect-state", help="Refuse to start on an empty Redis.")
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Accept requests from other machines without tokens.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = None,
) -> None:
    """Run one scheduler: it tracks live nodes, assigns partitions to shards and coordinates the workers' clocks.

    Of several schedulers on the same Redis one leads; the others stand by and forward every request to it.
    Each option can also be set by an environment variable PARAMSERVER_... or in paramserver.toml.
    """
    run(SchedulerSettings, dict(locals()), serve)
