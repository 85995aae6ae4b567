"""Which role may use a route: every route carries a mark, so that a route nobody classified can be found by a test."""

from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, TypeVar

from fastapi import FastAPI
from starlette.routing import BaseRoute, Route

Role = Literal["open", "reader", "worker", "node", "admin"]
"""open: anyone (probes); reader: pulls and lists; worker: pushes too; node: between services; admin: everything."""

ROLES: Final[tuple[Role, ...]] = ("open", "reader", "worker", "node", "admin")
F = TypeVar("F", bound=Callable[..., Any])


def role(name: Role) -> Callable[[F], F]:
    """Mark an endpoint with the least role that may use it."""
    if name not in ROLES:
        raise ValueError(f"no such role: {name}")

    def mark(endpoint: F) -> F:
        endpoint.__dict__["paramserver_role"] = name
        return endpoint

    return mark


def role_of(route: BaseRoute) -> Role | None:
    """The role that a route is marked with; None if it has no mark."""
    endpoint = getattr(route, "endpoint", None)
    mark = getattr(endpoint, "paramserver_role", None)
    return mark if mark in ROLES else None


def routes(app: FastAPI) -> Iterator[Route]:
    """All routes of an app that answer HTTP requests, those of OpenAPI's own pages left out."""
    own = {app.openapi_url, app.docs_url, app.redoc_url, app.swagger_ui_oauth2_redirect_url}
    for route in app.routes:
        if isinstance(route, Route) and route.path not in own:
            yield route
