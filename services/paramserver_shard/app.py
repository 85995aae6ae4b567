"""The shard's HTTP app with all its routes.  Other requests are forwarded to the leading scheduler."""

from dataclasses import dataclass
from typing import Final

from fastapi import Depends, FastAPI, Request, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from paramserver.errors import problem
from paramserver_node import health, problems
from paramserver_node.access import Access, LocalOnly, guard
from paramserver_node.app import NodeApp
from paramserver_node.forward import FORWARDED_BY_SHARD, Forwarder
from paramserver_node.in_flight import InFlight
from paramserver_node.middleware import NodeMiddleware
from paramserver_node.queries import check_query, query_checked
from paramserver_node.roles import role
from paramserver_shard import array_routes, slots
from paramserver_shard.accounts import AccountMiddleware, bytes_max
from paramserver_shard.arrays import ArrayService
from paramserver_shard.endpoints import Pull, Push, PushPull
from paramserver_shard.frames import FrameService
from paramserver_shard.internal import router as internal_router
from paramserver_shard.lending import Lending
from paramserver_shard.membership import Membership
from paramserver_shard.models import Models
from paramserver_shard.names import NameService
from paramserver_shard.receiving import FrameReader
from paramserver_shard.runtime import Runtime
from paramserver_shard.telemetry import Telemetry
from paramserver_shard.unsent import UnsentValues

ALL_METHODS: Final = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


@dataclass(frozen=True, slots=True)
class Services:
    """The services that the routes use."""

    membership: Membership
    runtime: Runtime
    models: Models
    frames: FrameService
    names: NameService
    arrays: ArrayService
    reader: FrameReader
    forwarder: Forwarder
    telemetry: Telemetry
    unsent: UnsentValues
    lending: Lending | None
    """None: no memory is shared with clients."""
    access: Access | LocalOnly | None
    """None: no access control."""


def make_app(services: Services) -> FastAPI:
    """Build the app of one shard with all its routes."""
    s, serving = services, services.membership.serving
    short: dict[tuple[str, str], ASGIApp] = {}
    app = NodeApp(short.get, openapi_url=None)  # the scheduler's document has these routes
    problems.install(app)
    for path, endpoint in (("/push", Push), ("/pull", Pull), ("/pushpull", PushPull)):
        asgi = endpoint(serving, s.reader, s.frames, s.names, s.telemetry, s.unsent)
        route = Route(path, asgi, methods=["POST"])
        app.router.routes.append(route)
        short["POST", path] = _routed(route)
    app.include_router(health.router("shard", s.membership.unready, lambda: s.membership.cluster))
    app.include_router(internal_router(serving, s.models, s.runtime, s.reader, s.membership.obey))
    app.include_router(slots.router(serving, s.lending), dependencies=[Depends(query_checked)])
    arrays = array_routes.router(serving, s.arrays, s.telemetry)
    app.include_router(arrays, dependencies=[Depends(query_checked)])
    _add_forwarding(app, s)
    return app


def served(app: FastAPI, s: Services) -> ASGIApp:
    """Wrap the app for the server: request ids, access control, draining of bodies, metrics, bounds on work."""
    in_flight = InFlight(bytes_max(s.membership.memory.limit_bytes))
    return NodeMiddleware(AccountMiddleware(app, in_flight), guard(app, s.access))


def _routed(route: Route) -> ASGIApp:
    """Return the route's endpoint with what the router does: the route is in the scope, and the query is checked."""

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = route
        check_query(scope)
        await route.app(scope, receive, send)

    return routed


def _add_forwarding(app: FastAPI, s: Services) -> None:
    @role("reader")
    async def forward(request: Request) -> Response:
        """Forward the request to the leading scheduler, which checks the caller's role again."""
        if FORWARDED_BY_SHARD in request.headers:
            raise problem("not_found", f"a shard does not serve {request.scope['path'][:200]}")
        urls, headers = s.membership.link.urls, {FORWARDED_BY_SHARD: "1"}
        return await s.forwarder.forward(request, urls, code="no_leader", headers=headers)

    @role("open")
    async def page(request: Request) -> Response:
        """Forward the pages and the login, which need no token; the data that a page loads does."""
        return await forward(request)

    for path in ("/", "/static/{path:path}", "/docs", "/docs/{name}"):
        app.add_api_route(path, page)
    app.add_api_route("/login", page, methods=["GET", "POST"])
    app.add_api_route("/{path:path}", forward, methods=ALL_METHODS)
