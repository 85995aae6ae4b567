"""Probes: `/livez` (the event loop runs), `/readyz` (ready for requests; never asks Redis), `/version`; `/metrics`."""

import platform
from collections.abc import Callable
from typing import Any, Final

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

import paramserver
from paramserver.wire.frame import FORMAT
from paramserver_node.api_document import answer_headers
from paramserver_node.roles import role


def _example(value: object) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {"application/json": {"example": value}}}}


_NOT_READY: Final[dict[int | str, dict[str, Any]]] = {
    503: {
        "description": "Not ready",
        "headers": answer_headers("Retry-After"),
        "content": {"application/json": {"example": {"status": "not ready", "reason": "there is no leader yet"}}},
    }
}


def router(service: str, ready: Callable[[], str], cluster: Callable[[], str]) -> APIRouter:
    """Return the probe routes of a service.

    `ready` returns why it is not ready yet, or ''; `cluster` the id of its cluster, '' while it does not know that.
    """
    routes = APIRouter(tags=["probes"])
    versions: dict[str, str | int] = {
        "service": service,
        "version": paramserver.__version__,
        "frame_format": FORMAT,
        "python": platform.python_version(),
    }

    @routes.get(
        "/livez",
        summary="Whether the process answers at all, and of which cluster it is",
        responses=_example({"status": "ok", "cluster": "6f1c90b2a4d3e857"}),
    )
    @role("open")
    async def livez() -> dict[str, str]:
        return {"status": "ok", "cluster": cluster()}

    @routes.get(
        "/readyz",
        summary="Whether the node may be sent requests; independent of Redis",
        responses=_example({"status": "ok"}) | _NOT_READY,
    )
    @role("open")
    async def readyz() -> Response:
        reason = ready()
        body = {"status": "not ready", "reason": reason} if reason else {"status": "ok"}
        return JSONResponse(body, 503 if reason else 200, {"retry-after": "1"} if reason else {})

    @routes.get("/version", summary="Versions of the node and of what it speaks", responses=_example(versions))
    @role("open")
    async def version() -> dict[str, str | int]:
        return versions

    @routes.get("/metrics", summary="Prometheus metrics", response_class=Response)
    @role("reader")
    async def metrics() -> Response:
        """All metrics of this process in Prometheus' text format."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return routes
