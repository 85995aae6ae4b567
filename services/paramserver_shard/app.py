"""The shard's HTTP app with all its routes.  Other requests are forwarded to the leading scheduler."""

from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from paramserver import __version__
from paramserver.errors import problem
from paramserver.limits import NPY_BODY_BYTES_MAX
from paramserver_node import docs_page, health, negotiate, problems
from paramserver_node import value_docs as docs
from paramserver_node.access import Access, LocalOnly, guard
from paramserver_node.app import NodeApp
from paramserver_node.conditions import Conditions
from paramserver_node.forward import FORWARDED_BY_SHARD, Forwarder
from paramserver_node.middleware import NodeMiddleware
from paramserver_node.queries import check_query, query_checked, takes_query
from paramserver_node.roles import role
from paramserver_shard import openapi, slots
from paramserver_shard.arrays import NPY_MEDIA, SMALLER, ArrayService, read_npy
from paramserver_shard.endpoints import Pull, Push, PushPull
from paramserver_shard.frames import FrameService
from paramserver_shard.inflight import InFlight, InFlightMiddleware, account, counted
from paramserver_shard.internal import router as internal_router
from paramserver_shard.lending import Lending
from paramserver_shard.membership import Membership
from paramserver_shard.models import Models
from paramserver_shard.names import NameService, push_document
from paramserver_shard.receiving import FrameReader
from paramserver_shard.responses import ChunkedResponse
from paramserver_shard.runtime import Runtime
from paramserver_shard.telemetry import Telemetry

ALL_METHODS: Final = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


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
    lending: Lending | None
    """None: no memory is shared with clients."""
    access: Access | LocalOnly | None
    """None: no access control."""


def make_app(services: Services) -> FastAPI:
    """Build the ASGI app of one shard."""
    s, serving = services, services.membership.serving
    short: dict[tuple[str, str], ASGIApp] = {}
    app = NodeApp(
        short.get,
        title="paramserver shard",
        version=__version__,
        summary="Pushes and pulls of parameters",
        docs_url=None,
        redoc_url=None,
    )
    problems.install(app)
    in_flight, guarded = InFlight(s.membership.memory.limit_bytes), guard(app, s.access)
    app.add_middleware(InFlightMiddleware, in_flight=in_flight)
    app.add_middleware(NodeMiddleware, guard=guarded)
    for path, endpoint in (("/push", Push), ("/pull", Pull), ("/pushpull", PushPull)):
        asgi = endpoint(serving, s.reader, s.frames, s.names, s.telemetry)
        route = Route(path, asgi, methods=["POST"], include_in_schema=False)
        app.router.routes.append(route)
        short["POST", path] = NodeMiddleware(InFlightMiddleware(_routed(route), in_flight), guarded)
    app.include_router(docs_page.router)
    app.include_router(health.router("shard", s.membership.unready, lambda: s.membership.cluster))
    app.include_router(internal_router(serving, s.models, s.runtime, s.reader, s.membership.obey))
    app.include_router(slots.router(serving, s.lending), dependencies=[Depends(query_checked)])
    _add_arrays(app, s)
    _add_forwarding(app, s)
    openapi.describe(app)
    return app


def _routed(route: Route) -> ASGIApp:
    """Return the route's endpoint with what the router does: the route is in the scope, and the query is checked."""

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = route
        check_query(scope)
        await route.app(scope, receive, send)

    return routed


def _add_arrays(app: FastAPI, s: Services) -> None:
    routes, serving = APIRouter(dependencies=[Depends(query_checked)]), s.membership.serving

    @routes.head("/pull/{m}/{name:path}", include_in_schema=False)
    @routes.head("/models/{m}/params/{name:path}", include_in_schema=False)
    @routes.get(
        "/pull/{m}/{name:path}",
        summary="One parameter as a .npy file",
        response_class=Response,
        responses=docs.NPY_ANSWERS,
    )
    @routes.get(
        "/models/{m}/params/{name:path}",
        summary="The same, where PUT assigns it",
        response_class=Response,
        responses=docs.NPY_ANSWERS,
    )
    @role("reader")
    async def get_array(request: Request, m: str, name: str) -> Response:
        began_s = s.telemetry.clock()
        serving.check()
        head = request.method == "HEAD"
        grow = account(request.scope).grow
        answer = await s.arrays.get(m, name, Conditions.of(request.headers), grow, head=head)
        serving.check()
        headers = {
            "etag": answer.etag,
            "x-paramserver-version": str(answer.version),
            "x-paramserver-incarnation": str(answer.incarnation),
            "cache-control": "no-cache",
        }
        if answer.unchanged:
            return Response(status_code=304, headers=headers)
        s.telemetry.pulled(m, len(answer.body), began_s)
        if head:
            headers["content-length"] = str(len(answer.header) + answer.body_bytes)
            return Response(b"", headers=headers, media_type=NPY_MEDIA)
        return ChunkedResponse([answer.header, answer.body], NPY_MEDIA, headers)

    @routes.put(
        "/models/{m}/params/{name:path}",
        summary="Assign a parameter's value, or upload its first one",
        openapi_extra=docs.ASSIGN_BODY,
        responses=docs.ASSIGN_ANSWERS,
    )
    @role("worker")
    @takes_query("start", "stop")
    async def put_array(
        request: Request, m: str, name: str, start: int | None = None, stop: int | None = None
    ) -> Response:
        serving.check()
        negotiate.check_accept(request)
        request = counted(request)
        if negotiate.media_type(request) in (NPY_MEDIA, "application/octet-stream"):
            value: Any = read_npy(await negotiate.read_body(request, NPY_BODY_BYTES_MAX, SMALLER))
        else:
            value = await negotiate.read_tensors(request)
        token, given = request.headers.get("x-upload-token"), Conditions.of(request.headers)
        done = await s.arrays.put(m, name, value, token, given, start, stop)
        serving.check()
        return negotiate.respond(request, push_document(done))

    app.include_router(routes)


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
        """Forward the status page and the login, which need no token; the data that the page loads does."""
        return await forward(request)

    for path, methods in (("/", ["GET"]), ("/static/{path:path}", ["GET"]), ("/login", ["GET", "POST"])):
        app.add_api_route(path, page, methods=methods, include_in_schema=False)
    app.add_api_route("/{path:path}", forward, methods=ALL_METHODS, include_in_schema=False)
