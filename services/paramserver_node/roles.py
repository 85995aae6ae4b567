"""Which role may use a route: every route is marked with one, so that a test can find routes nobody classified."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

if TYPE_CHECKING:  # psctl makes tokens of these roles, and starts without loading a web framework
    from fastapi import FastAPI
    from starlette.routing import BaseRoute

Role = Literal["open", "reader", "worker", "node", "admin"]
"""open: anyone (probes); reader: pulls and lists; worker: pushes too; node: between services; admin: everything.

Each may do what those before it may, too."""

ROLES: Final[tuple[Role, ...]] = ("open", "reader", "worker", "node", "admin")
F = TypeVar("F", bound=Callable[..., Any])


def role(name: Role) -> Callable[[F], F]:
    """Mark an endpoint with the lowest role that may use it."""
    if name not in ROLES:
        raise ValueError(f"no such role: {name}")

    def mark(endpoint: F) -> F:
        endpoint.__dict__["paramserver_role"] = name
        return endpoint

    return mark


def allows(have: Role, need: Role) -> bool:
    """Whether a caller with the role `have` may use a route marked `need`."""
    return ROLES.index(have) >= ROLES.index(need)


def role_of(route: "BaseRoute") -> Role | None:
    """Return the role that a route is marked with; None if it has no mark."""
    endpoint = getattr(route, "endpoint", None)
    mark = getattr(endpoint, "paramserver_role", None)
    return mark if mark in ROLES else None


def routes(app: "FastAPI") -> "Iterator[BaseRoute]":
    """Yield every route of an app, including those of its routers, except FastAPI's own for the OpenAPI document."""
    for route in _flat(app.routes):
        if getattr(route, "path", "") != app.openapi_url:
            yield route


def _flat(found: "Iterable[BaseRoute]") -> "Iterator[BaseRoute]":
    for route in found:
        # Newer versions of FastAPI keep an included router as one entry; older ones copy its routes into the app.
        inner = getattr(route, "original_router", None)
        if inner is None:
            yield route
        else:
            yield from _flat(inner.routes)
