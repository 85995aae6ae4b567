"""Query parameters: a route declares those it takes, each once; others are refused, like an unknown field of a body.

Not checked are routes between nodes, because another version may call them, and forwarded requests, which the node that
serves them checks.  Pages and probes ignore all, because links and load balancers add their own.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from starlette.datastructures import QueryParams
from starlette.types import Scope

from paramserver.errors import combined, problem

F = TypeVar("F", bound=Callable[..., Any])


def takes_query(*names: str) -> Callable[[F], F]:
    """Mark an endpoint with the query parameters that it reads; one without a mark takes none."""

    def mark(endpoint: F) -> F:
        endpoint.__dict__["paramserver_query"] = names
        return endpoint

    return mark


async def query_checked(request: Request) -> None:
    """Check the query, as a dependency of routes; raises like `check_query`."""
    check_query(request.scope)


def check_query(scope: Scope) -> None:
    """Raise RequestError (`invalid_field`) for a query parameter that the route does not take, or that is repeated."""
    if not scope["query_string"] or scope["path"].startswith("/internal/"):
        return
    known: tuple[str, ...] = getattr(scope["route"].endpoint, "paramserver_query", ())
    given = Counter(name for name, _ in QueryParams(scope["query_string"]).multi_items())
    hint = f"known: {', '.join(known)}" if known else "this route accepts none"
    errors = [
        problem("invalid_field", f"unknown query parameter {n!r:.80}", hint=hint, where=n[:80])
        for n in sorted(given.keys() - set(known))
    ]
    errors += [
        problem("invalid_field", f"query parameter '{n}' is given {given[n]} times", where=n)
        for n in known
        if given[n] > 1
    ]
    if errors:
        raise combined(errors)
