"""A scheduler that leads a new cluster, without a Redis: nothing is stored until a test says so."""

import asyncio
import time
from types import SimpleNamespace

from fastapi import FastAPI
from starlette.types import ASGIApp

from paramserver.core.scheduler.core import SchedulerCore
from paramserver.net.credentials import Credentials
from paramserver_node.forward import Forwarder
from paramserver_node.redis import connect
from paramserver_scheduler.app import make_app, served
from paramserver_scheduler.hub import Hub
from paramserver_scheduler.large_bodies import LargeBodies
from paramserver_scheduler.lease import Lease, Scheduler
from paramserver_scheduler.runtime import Runtime
from paramserver_scheduler.store import StateStore


def leading() -> tuple[Runtime, FastAPI, ASGIApp]:
    """Return a leader's runtime, whose tasks do not run, its app, and that as it is served; it knows of a standby."""
    redis = connect("redis://127.0.0.1:1/0")  # never asked
    lease = Lease(redis, name="s1", place="here", url="http://127.0.0.1:1")
    lease.schedulers = (Scheduler("s1", lease.url), Scheduler("s2", "http://127.0.0.1:2"))
    core = SchedulerCore.restore({}, time.monotonic(), 1, time.time())
    runtime = Runtime(core, StateStore(redis, lease), Hub(lambda _: None))

    async def confirm() -> bool:
        return True

    app = make_app()
    app.state.service = SimpleNamespace(
        runtime=runtime, read=core.read, large_bodies=LargeBodies(), leadership=SimpleNamespace(confirm=confirm)
    )
    return runtime, app, served(app, lease, Forwarder(Credentials(), asyncio.Event()))
