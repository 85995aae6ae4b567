"""The scheduler's HTTP face: every route in one FastAPI app, with problems, probes and the status page."""

import hashlib
import re
from base64 import b64encode
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, FastAPI, Response
from starlette.types import ASGIApp

import paramserver
from paramserver_node import health, problems
from paramserver_node.middleware import NodeMiddleware
from paramserver_node.roles import role
from paramserver_scheduler.routes import checkpoints, data, feed, metrics, models, nodes, runs, status, tasks, workers

page = APIRouter()


def make_app() -> FastAPI:
    """The app; it answers 503 until `app.state.service` is set."""
    app = FastAPI(
        title="paramserver scheduler",
        version=paramserver.__version__,
        description="Models, workers, runs and checkpoints; pushes and pulls are handed on to the shards.",
        redirect_slashes=False,
        redoc_url=None,
    )
    app.state.service = None
    problems.install(app)

    def not_ready() -> str:
        service = app.state.service
        if service is None:
            return "waiting for Redis, where the state is"
        stopped = service.runtime.stopped
        return "" if stopped is None else str(stopped.detail)

    app.include_router(page)
    app.include_router(health.router("scheduler", not_ready))
    for module in (models, workers, tasks, metrics, checkpoints, data, runs, feed, status, nodes):
        app.include_router(module.router)
    return app


def served(app: FastAPI) -> ASGIApp:
    """The app as the server gets it: request ids, drained bodies and counts around it."""
    return NodeMiddleware(app)


@page.get("/", include_in_schema=False)
@role("open")
async def status_page() -> Response:
    """The status page: one file, nothing from elsewhere; it reads /status each second."""
    text, policy = _page()
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
    return Response(text, media_type="text/html; charset=utf-8", headers=headers)


@cache
def _page() -> tuple[str, str]:
    """The page and the policy that lets nothing but its own script and style run."""
    text = files("paramserver_scheduler").joinpath("page.html").read_text(encoding="utf-8")

    def source(tag: str) -> str:
        found = re.search(f"<{tag}>(.*?)</{tag}>", text, re.S)
        assert found is not None
        return f"'sha256-{b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"

    return text, (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {source('script')}; "
        f"style-src {source('style')}; base-uri 'none'; frame-ancestors 'none'"
    )
