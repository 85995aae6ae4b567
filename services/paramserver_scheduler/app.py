"""The scheduler's HTTP face: every route in one FastAPI app, with problems, probes and the status page."""

from fastapi import FastAPI
from starlette.types import ASGIApp

import paramserver
from paramserver_node import health, problems
from paramserver_node.middleware import NodeMiddleware
from paramserver_scheduler import page
from paramserver_scheduler.routes import checkpoints, data, feed, metrics, models, nodes, runs, status, tasks, workers


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

    app.include_router(page.router)
    app.include_router(health.router("scheduler", not_ready))
    for module in (models, workers, tasks, metrics, checkpoints, data, runs, feed, status, nodes):
        app.include_router(module.router)
    return app


def served(app: FastAPI) -> ASGIApp:
    """The app as the server gets it: request ids, drained bodies and counts around it."""
    return NodeMiddleware(app)
