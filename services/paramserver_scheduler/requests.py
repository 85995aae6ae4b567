"""Control requests: reads their bodies, waits for the core's replies, and builds the responses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from fastapi import Request, Response

from paramserver import limits
from paramserver.core.fields import INTEGER_MAX
from paramserver.core.scheduler import io
from paramserver.errors import InDoubt, problem
from paramserver_node import negotiate
from paramserver_node.api_document import answer_headers
from paramserver_node.forward import changes_something, in_doubt
from paramserver_scheduler import bodies
from paramserver_scheduler.answers import Answer as Documented
from paramserver_scheduler.runtime import Answer
from paramserver_scheduler.service import Service

B = TypeVar("B", bound=bodies.Body)
D = TypeVar("D")
PAGE_MAX = 1000
PAGED = ("limit", "after")
"""Query parameters of every paged list."""


def service(request: Request) -> Service:
    """Return the leader's services; raises Unavailable (`no_leader`) if this scheduler no longer leads."""
    found = request.app.state.service
    if found is None:
        raise problem("no_leader", "this scheduler is not the leader")
    return cast(Service, found)


async def read_json(request: Request, *, optional: bool = False, size_max: int = limits.CONTROL_BODY_BYTES_MAX) -> Any:
    """Return the body, sent as JSON or msgpack, as plain JSON values; if `optional`, no body is an empty object.

    Raises RequestError (`malformed`, `too_large`, `unsupported_media_type`), Unavailable (`too_many_requests`,
    `queue_full`).
    """
    large_bodies = service(request).large_bodies
    with large_bodies.reading(request, size_max):
        raw, parse = await negotiate.read_encoded(request, size_max, optional=optional)
        return await large_bodies.parsed(raw, lambda body: _plain(parse(body)))


def _plain(value: Any) -> Any:
    """Return the value; refuse what msgpack can express and JSON cannot, so that what is stored can be sent in both."""
    open_values = [value]
    while open_values:
        v = open_values.pop()
        if type(v) is int:  # first, because heartbeats, sent every second, hold little else
            if not -(1 << 63) <= v < 1 << 64:
                raise problem("malformed", "an integer does not fit 64 bits")
        elif isinstance(v, dict):
            open_values += v.values()
        elif isinstance(v, list):
            open_values += v
        elif not (v is None or isinstance(v, str | bool | float)):
            raise problem("malformed", f"values of type {type(v).__name__} are not allowed in this body")
    return value


async def read(request: Request, kind: type[B], size_max: int = limits.CONTROL_BODY_BYTES_MAX) -> B:
    """Return the body, validated as `kind`."""
    return bodies.check(kind, await read_json(request, size_max=size_max))


async def read_optional(request: Request, kind: type[B]) -> B:
    """Return the body, validated as `kind`; no body at all counts as an empty object."""
    length = request.headers.get("content-length")
    announced = length is not None or request.scope["http_version"] != "2"  # over HTTP/2 a body need not be announced
    if announced and (length or "0") == "0" and "transfer-encoding" not in request.headers:
        return bodies.check(kind, {})
    return bodies.check(kind, await read_json(request, optional=True))


async def ask(request: Request, make: Callable[[int], io.Event]) -> Answer:
    """Return the core's answer to this request's event; the wait ends when the client hangs up.

    Raises InDoubt if it may have been done; not between nodes, which send each request again until it is answered.
    """
    negotiate.check_accept(request)
    changes = changes_something(request.scope) and not request.scope["path"].startswith("/internal/")
    try:
        return await service(request).runtime.ask(make, request.receive, changes=changes)
    except InDoubt as e:
        raise in_doubt(request.scope, e.detail) from e


async def reply(
    request: Request, make: Callable[[int], io.Event], location: Callable[[Any], str] | None = None
) -> Response:
    """Return the core's answer as a response in the client's media type, with a `Location` if its status is 201."""
    answer = await ask(request, make)
    headers = {"location": location(answer.body)} if location is not None and answer.status == 201 else {}
    return respond(request, answer.body, answer.status, headers)


def respond(
    request: Request, body: Mapping[str, Any] | None, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Build a response in the media type that the client accepts; 204 without a body."""
    if body is None:
        return Response(status_code=204, headers=dict(headers or {}))
    return negotiate.respond(request, body, status, headers)


def page(
    request: Request, items: Sequence[Any], document: Callable[[Any], Mapping[str, Any]] = lambda item: item
) -> Response:
    """Return one page of a list: up to `?limit=` items from position `?after=`, the `next` of the page before.

    Large items are fewer, as many as `limits.PAGE_BYTES_MAX` permits; `document` makes what is sent of each.
    """
    limit = number_of(request, "limit", PAGE_MAX, 1, PAGE_MAX)
    start = number_of(request, "after", 0)
    encode = negotiate.encoder(request)
    encoded: list[bytes] = []
    size = 0
    for item in items[start : start + limit]:
        encoded.append(encode(document(item)))
        size += len(encoded[-1])
        if len(encoded) > 1 and size > limits.PAGE_BYTES_MAX:
            encoded.pop()
            break
    end = start + len(encoded)
    return negotiate.respond_items(request, {"next": str(end) if end < len(items) else None}, encoded)


def number_of(request: Request, name: str, default: D, low: int = 0, high: int = INTEGER_MAX) -> int | D:
    """Return an integer query parameter; raises RequestError (`malformed`) unless it is from `low` to `high`."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 17 and low <= int(text) <= high):
        raise problem("malformed", f"query parameter '{name}' must be an integer from {low} to {high}")
    return int(text)


def request_body(
    kind: type[bodies.Body] | dict[str, Any], example: Any, required: bool = True, others: Sequence[str] = ()
) -> dict[str, Any]:
    """OpenAPI of a route's request body: its schema, a working example, and other media types that it may have."""
    schema = kind if isinstance(kind, dict) else kind.model_json_schema()
    content = _content(schema, example) | {other: {} for other in others}
    return {"requestBody": {"required": required, "content": content}}


def response_doc(
    status: int,
    text: str,
    answer: type[Documented] | None = None,
    headers: Sequence[str] = (),
    others: Sequence[str] = (),
) -> dict[int | str, dict[str, Any]]:
    """OpenAPI of a route's answer: a description and, if given, its fields, its headers, and other media types."""
    told: dict[str, Any] = {"description": text}
    if headers:
        told["headers"] = answer_headers(*headers)
    if answer is not None or others:
        own = {} if answer is None else _content(answer.ref(), answer.example())
        told["content"] = own | {kind: {} for kind in others}
    return {status: told}


def _content(schema: Mapping[str, Any], example: Any) -> dict[str, Any]:
    """What a body or an answer is in JSON, and that it may be the same in msgpack."""
    return {
        negotiate.JSON: {"schema": schema, "example": example},
        negotiate.MSGPACK: {"schema": {"type": "string", "format": "binary"}},
    }
