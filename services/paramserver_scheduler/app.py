"""The scheduler's HTTP app: all routes in one FastAPI app, with error handling, probes and the status page."""

from collections.abc import Mapping
from functools import partial
from typing import Final

from fastapi import Depends, FastAPI, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import paramserver
from paramserver_node import docs_page, health, problems
from paramserver_node.access import Access, LocalOnly, guard
from paramserver_node.app import NodeApp
from paramserver_node.forward import Forwarder
from paramserver_node.middleware import NodeMiddleware
from paramserver_node.queries import check_query, query_checked
from paramserver_scheduler import answers, login, page
from paramserver_scheduler.leader_proxy import LeaderProxy
from paramserver_scheduler.lease import Lease
from paramserver_scheduler.routes import (
    checkpoints,
    data,
    feed,
    files,
    metrics,
    models,
    nodes,
    runs,
    shards,
    status,
    tasks,
    workers,
)  # fmt: skip

FREQUENT: Final = (workers.clock, workers.heartbeat, runs.pool_heartbeat, nodes.shard_heartbeat)
"""What each worker, member or shard asks for every second or iteration: these requests bypass the router."""
_FREQUENT_ROUTES: Final = [
    r for m in (workers, runs, nodes) for r in m.router.routes if isinstance(r, Route) and r.endpoint in FREQUENT
]


def _frequent(asked: tuple[str, str]) -> ASGIApp | None:
    """Return the endpoint of a frequent request, by its (method, path); None for any other."""
    method, path = asked
    for route in _FREQUENT_ROUTES:
        if method in (route.methods or ()) and (found := route.path_regex.match(path)):
            return partial(_answer, route, found.groupdict())
    return None


async def _answer(route: Route, names: Mapping[str, str], scope: Scope, receive: Receive, send: Send) -> None:
    scope["route"] = route
    request = Request(scope, receive)
    try:
        check_query(scope)
        answer = await route.endpoint(request, **names)
    except Exception as error:
        answer = problems.failed(request, error)
    await answer(scope, receive, send)


def make_app() -> FastAPI:
    """Build the app; its routes answer 503 unless `app.state.service` is set, as it is while this scheduler leads."""
    app = NodeApp(
        _frequent,
        answers.schemas,
        title="paramserver scheduler",
        version=paramserver.__version__,
        description="Models, workers, runs and checkpoints; pushes and pulls are forwarded to the shards.",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = None
    app.state.lease = None
    app.state.checkpoints = None
    app.state.login = None
    problems.install(app)

    def not_ready() -> str:
        service = app.state.service
        if service is None:
            lease = app.state.lease
            leader = None if lease is None else lease.leader
            return "" if leader is not None and leader.place != lease.place else "there is no leader yet"
        stopped = service.runtime.stopped
        return "" if stopped is None else str(stopped.detail)

    def cluster() -> str:
        return "" if app.state.service is None else app.state.service.read.cluster

    app.include_router(page.router)
    app.include_router(login.router)
    app.include_router(docs_page.router)
    app.include_router(health.router("scheduler", not_ready, cluster))
    for module in (models, workers, tasks, metrics, checkpoints, files, runs, feed, shards, status):
        app.include_router(module.router, dependencies=[Depends(query_checked)])
    for module in (data, nodes):  # queries unchecked: `data` is forwarded to shards, `nodes` is used between nodes
        app.include_router(module.router)
    return app


def served(app: FastAPI, lease: Lease, forwarder: Forwarder, access: Access | LocalOnly | None = None) -> ASGIApp:
    """Wrap the app for the server: request ids, access control, draining of bodies, metrics, dispatch to the leader.

    Args:
        access: who may do what; None: no access control.
    """
    app.state.lease, app.state.forwarder = lease, forwarder
    app.state.login = login.Login(access) if isinstance(access, Access) else None
    return NodeMiddleware(LeaderProxy(app, lease, forwarder), guard(app, access))
