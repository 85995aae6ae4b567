"""Starts one scheduler: reads its state from Redis, then serves until it is told to stop."""

import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from fastapi import FastAPI
from redis.asyncio import Redis

from paramserver.core.scheduler import SchedulerCore
from paramserver.errors import CorruptState, PsError, problem
from paramserver_node.forward import Forwarder
from paramserver_node.log import setup
from paramserver_node.redis import connect
from paramserver_node.server import serve_uvicorn, stop_on_signals
from paramserver_node.settings import SchedulerSettings, url_of
from paramserver_scheduler import telemetry
from paramserver_scheduler.app import make_app, served
from paramserver_scheduler.checkpoints import CheckpointStore
from paramserver_scheduler.exchange import Service
from paramserver_scheduler.history import History
from paramserver_scheduler.hub import Hub
from paramserver_scheduler.jobs import Jobs
from paramserver_scheduler.runtime import Runtime
from paramserver_scheduler.shards import ShardClient
from paramserver_scheduler.store import Deposed, StateStore

log = logging.getLogger("paramserver.scheduler")
app = typer.Typer(add_completion=False)

REDIS_RETRY_S = 0.5


async def decide(settings: SchedulerSettings, redis: Redis, http: FastAPI, stop: asyncio.Event) -> None:
    """Reads the state, then decides until cancelled.  Raises Deposed, or CorruptState from the first reading."""
    store = StateStore(redis)
    while True:
        try:
            documents = await store.open()
            break
        except CorruptState:
            raise
        except PsError as e:
            log.warning("redis.away %s", e.detail)
            await asyncio.sleep(REDIS_RETRY_S)
    checkpoints = CheckpointStore(Path(settings.state_dir).absolute())
    await asyncio.to_thread(checkpoints.sweep)
    core = SchedulerCore.restore(documents, time.monotonic(), store.term, time.time())
    history = History(time.time() - time.monotonic())
    history.begin(core.read)
    runtime = Runtime(core, store, Hub(lambda document: history.note(document, time.monotonic())))
    shards, forwarder = ShardClient(), Forwarder()
    try:
        async with asyncio.TaskGroup() as group:
            jobs = Jobs(runtime, checkpoints, shards, redis, history, group)
            runtime.jobs = jobs
            url = settings.advertise or url_of(settings.host, settings.port)
            http.state.service = Service(runtime, jobs, forwarder, history, url, time.monotonic())
            log.info("scheduler.ready term=%d models=%d url=%s", store.term, len(core.read.models()), url)
            history.add(time.monotonic(), "scheduler_started", f"the scheduler has started (term {store.term})")
            group.create_task(runtime.run())
            group.create_task(_observe(runtime, history))
            await stop.wait()
            # Feeds and long polls end now; the server then has nothing left to wait for.
            runtime.close(problem("unavailable", "the scheduler is stopping"))
            await asyncio.get_running_loop().create_future()
    finally:
        await shards.aclose()
        await forwarder.aclose()


async def _observe(runtime: Runtime, history: History) -> None:
    """Samples rates and gauges each second."""
    while True:
        now = time.monotonic()
        history.sample(runtime.core.read, now)
        telemetry.update(runtime.core.read, now, redis_away=runtime.redis_away)
        await asyncio.sleep(1.0)


async def serve(settings: SchedulerSettings) -> None:
    """Runs one scheduler until a signal; raises Deposed when a newer one has started on the same Redis."""
    stop = asyncio.Event()
    stop_on_signals(stop)
    http = make_app()
    redis = connect(settings.redis, timeout_s=2.0)
    try:
        async with asyncio.TaskGroup() as group:
            deciding = group.create_task(decide(settings, redis, http, stop))
            await serve_uvicorn(served(http), settings.host, settings.port, stop)
            deciding.cancel()
    finally:
        await redis.aclose()


@app.command()
def scheduler(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default 8700).")] = None,
    redis: Annotated[str | None, typer.Option(help="URL of the Redis that holds the state.")] = None,
    state_dir: Annotated[str | None, typer.Option(help="Folder of checkpoints.")] = None,
    advertise: Annotated[str | None, typer.Option(help="URL under which others reach it.")] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = None,
) -> None:
    """Run one scheduler: who is alive, who owns what, how far every worker has come.

    Each option is also an environment variable PARAMSERVER_... and a line of paramserver.toml.
    """
    flags = {
        "host": host,
        "port": port,
        "redis": redis,
        "state_dir": state_dir,
        "advertise": advertise,
        "log_level": log_level,
    }
    try:
        settings = SchedulerSettings.load(flags)
        setup(settings.log_level)
        _run(settings)
    except PsError as e:
        sys.exit(f"paramserver-scheduler: {e}")
    except BaseExceptionGroup as group:
        expected = group.subgroup((Deposed, PsError))
        if expected is None:
            raise
        sys.exit(f"paramserver-scheduler: {_first(expected)}")


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _run(settings: SchedulerSettings) -> None:
    if sys.platform == "win32":
        asyncio.run(serve(settings))
    else:
        import uvloop

        uvloop.run(serve(settings))
