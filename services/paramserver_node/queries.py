"""Which query values a route takes: any other is refused, as an unknown field of a body is.

Routes between nodes are left alone, because another version may call them, and so is what is handed on: who serves it
looks.  Pages and probes mind none, for links and load balancers add their own.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from starlette.datastructures import QueryParams
from starlette.types import Scope

from paramserver.errors import combined, problem

F = TypeVar("F", bound=Callable[..., Any])


def takes_query(*names: str) -> Callable[[F], F]:
    """Mark an endpoint with the query values that it reads; one without a mark takes none."""

    def mark(endpoint: F) -> F:
        endpoint.__dict__["paramserver_query"] = names
        return endpoint

    return mark


async def query_checked(request: Request) -> None:
    """A dependency of routes: raises as `check_query` does."""
    check_query(request.scope)


def check_query(scope: Scope) -> None:
    """Raises RequestError (`invalid_field`) for a query value that the route of this request does not take."""
    if not scope["query_string"] or scope["path"].startswith("/internal/"):
        return
    known: tuple[str, ...] = getattr(scope["route"].endpoint, "paramserver_query", ())
    unknown = sorted(set(QueryParams(scope["query_string"])) - set(known))
    hint = f"known: {', '.join(known)}" if known else "this route takes none"
    if unknown:
        raise combined(
            [problem("invalid_field", f"query value {n!r:.80} is not known", hint=hint, where=n[:80]) for n in unknown]
        )
