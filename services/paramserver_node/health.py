"""Probes: `/livez` (the event loop runs), `/readyz` (ready for requests; never asks Redis), `/version`; `/metrics`."""

import platform
from collections.abc import Callable

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

import paramserver
from paramserver_node.metrics import metrics
from paramserver_node.roles import role


def router(service: str, ready: Callable[[], str]) -> APIRouter:
    """Return the probe routes of a service; `ready` returns why it is not ready yet, or ''."""
    routes = APIRouter(tags=["probes"])

    @routes.head("/livez", include_in_schema=False)
    @routes.get("/livez", summary="Whether the process answers at all")
    @role("open")
    async def livez() -> dict[str, str]:
        return {"status": "ok"}

    @routes.head("/readyz", include_in_schema=False)
    @routes.get("/readyz", summary="Whether the node may be sent requests; independent of Redis")
    @role("open")
    async def readyz() -> Response:
        reason = ready()
        body = {"status": "not ready", "reason": reason} if reason else {"status": "ok"}
        return JSONResponse(body, 503 if reason else 200, {"retry-after": "1"} if reason else {})

    @routes.head("/version", include_in_schema=False)
    @routes.get("/version", summary="Versions of the node and of what it speaks")
    @role("open")
    async def version() -> dict[str, str | int]:
        return {
            "service": service,
            "version": paramserver.__version__,
            "frame_format": 1,
            "python": platform.python_version(),
        }

    routes.add_api_route("/metrics", metrics, summary="Prometheus metrics", response_class=Response)
    return routes
