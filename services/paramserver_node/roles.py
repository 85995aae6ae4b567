"""Which role may use a route: every route carries a mark, so that a route nobody classified can be found by a test."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

if TYPE_CHECKING:  # psctl makes tokens of these roles, and starts without loading a server
    from fastapi import FastAPI
    from starlette.routing import BaseRoute

Role = Literal["open", "reader", "worker", "node", "admin"]
"""open: anyone (probes); reader: pulls and lists; worker: pushes too; node: between services; admin: everything.

Each may do what those before it may."""

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


def allows(have: Role, need: Role) -> bool:
    """Whether a bearer of the role `have` may use a route marked `need`."""
    return ROLES.index(have) >= ROLES.index(need)


def role_of(route: "BaseRoute") -> Role | None:
    """The role that a route is marked with; None if it has no mark."""
    endpoint = getattr(route, "endpoint", None)
    mark = getattr(endpoint, "paramserver_role", None)
    return mark if mark in ROLES else None


def routes(app: "FastAPI") -> "Iterator[BaseRoute]":
    """Every route of an app, those of included routers too; the document that FastAPI makes of them is left out."""
    for route in _flat(app.routes):
        if getattr(route, "path", None) != app.openapi_url:
            yield route


def _flat(found: "Iterable[BaseRoute]") -> "Iterator[BaseRoute]":
    for route in found:
        # Newer FastAPI keeps an included router as one entry; older ones copied its routes into the app.
        inner = getattr(route, "original_router", None)
        if inner is None:
            yield route
        else:
            yield from _flat(inner.routes)


def unmarked(app: "FastAPI") -> list[str]:
    """Paths of the routes that carry no mark; a test holds that there are none."""
    return [str(getattr(r, "path", r)) for r in routes(app) if role_of(r) is None]
