"""What FastAPI leaves out of a node's OpenAPI document or has wrong: the token, parameters, and how requests fail."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from starlette.routing import BaseRoute

from paramserver.core.fields import INTEGER_MAX
from paramserver.limits import IDEMPOTENCY_KEY_BYTES_MAX, STATUS_SPAN_S_MAX, WAIT_S_MAX

_TEXT: Final = {"type": "string"}
_PROBLEM: Final[dict[str, Any]] = {
    "title": "Problem",
    "type": "object",
    "properties": {
        "type": _TEXT,
        "title": _TEXT,
        "status": {"type": "integer"},
        "code": {**_TEXT, "description": "what programs tell errors apart by; docs/errors.md lists them"},
        "detail": _TEXT,
        "retryable": {"type": "boolean", "description": "the same request may succeed later, and cannot count twice"},
        "hint": _TEXT,
        "errors": {
            "type": "array",
            "items": {"type": "object"},
            "description": "each part of the request that is wrong",
        },
        "retry_after_s": {"type": "number"},
        "request_id": _TEXT,
    },
    "required": ["type", "title", "status", "code", "detail", "retryable"],
}
_COUNT: Final = {"type": "integer", "minimum": 0, "maximum": INTEGER_MAX}
_ANSWER_HEADERS: Final[dict[str, dict[str, Any]]] = {
    "Retry-After": {
        "description": "of 429 and 503, if the same request may be sent again: after how many seconds",
        "schema": {"type": "integer", "minimum": 1},
    },
    "X-Paramserver-Version": {"schema": _COUNT},
    "X-Paramserver-Incarnation": {"schema": _COUNT},
}
"""Of the headers of answers that are not any text."""


def answer_headers(*names: str) -> dict[str, Any]:
    """Return the `headers` of a documented answer."""
    return {name: _ANSWER_HEADERS.get(name, {"schema": _TEXT}) for name in names}


_REFUSED: Final[dict[str, Any]] = {
    "description": "A problem document (RFC 9457) with a stable `code`",
    "headers": answer_headers("Retry-After"),
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
"""Any other answer than those that an operation names."""

_SECONDS: Final = {"type": "number", "minimum": 0}
_QUERY: Final[dict[str, dict[str, Any]]] = {
    "limit": {"type": "integer", "minimum": 1},
    "after": {**_TEXT, "pattern": "^[0-9]{1,16}$"},
    "wait_s": {"type": "integer", "minimum": 0, "maximum": int(WAIT_S_MAX)},
    **dict.fromkeys(("cut", "epoch", "generation", "since"), _COUNT),
    **dict.fromkeys(("from", "to"), _SECONDS),
    "step": {**_SECONDS, "maximum": STATUS_SPAN_S_MAX},
}
"""Of the query parameters that are not any text."""
_REQUIRED: Final = ("metric",)
_CONDITIONS: Final = ("If-Match", "If-None-Match")
_HEADERS: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("post", "/models"): ("X-Upload-Token",),
    ("delete", "/models/{m}"): ("X-Upload-Token",),
    ("post", "/push"): ("Idempotency-Key",),
    ("post", "/pushpull"): ("Idempotency-Key",),
    ("get", "/pull/{m}/{name}"): _CONDITIONS,
    ("get", "/models/{m}/params/{name}"): _CONDITIONS,
    ("put", "/models/{m}/params/{name}"): (*_CONDITIONS, "X-Upload-Token"),
    ("get", "/models/{m}/checkpoints/{name}/{file}"): (*_CONDITIONS, "Range"),
}
"""Headers that a client may send, by method and path; the routes read them themselves."""
_HEADER_SCHEMAS: Final = {
    "X-Upload-Token": {**_TEXT, "pattern": "^[A-Za-z0-9_-]{16,128}$"},
    "Idempotency-Key": {**_TEXT, "minLength": 1, "maxLength": IDEMPOTENCY_KEY_BYTES_MAX},
}


def complete(document: dict[str, Any], routes: Iterable[BaseRoute], components: Mapping[str, dict[str, Any]]) -> None:
    """Put what is missing into FastAPI's document of these routes, and problem documents for its own errors' ones.

    `components` are schemas by name that operations refer to.
    """
    told = document.setdefault("components", {})
    told["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"token": []}]  # a cluster without tokens asks for none
    schemas = told.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas |= {"Problem": _PROBLEM, **components}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = _REFUSED
            _add_headers(operation, method, path)
    for route in routes:
        names: tuple[str, ...] = getattr(getattr(route, "endpoint", None), "paramserver_query", ())
        operations = document["paths"].get(getattr(route, "path_format", ""), {})
        for method in getattr(route, "methods", None) or ():
            if names and method.lower() in operations:
                _add_query(operations[method.lower()].setdefault("parameters", []), names)


def _add_query(parameters: list[dict[str, Any]], names: Iterable[str]) -> None:
    """Add those that FastAPI does not know, because the route reads them itself."""
    for name in names:
        if name not in [p["name"] for p in parameters]:
            schema = _QUERY.get(name, _TEXT)
            parameters.append({"name": name, "in": "query", "required": name in _REQUIRED, "schema": schema})


def _add_headers(operation: dict[str, Any], method: str, path: str) -> None:
    """Add the headers of a route to its operation, if it has any."""
    for name in _HEADERS.get((method, path), ()):
        header = {"name": name, "in": "header", "required": False, "schema": _HEADER_SCHEMAS.get(name, _TEXT)}
        operation.setdefault("parameters", []).append(header)
