"""Error responses: every failure of a route becomes RFC 9457 problem details, never a traceback."""

import logging
from math import ceil
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from paramserver.errors import PsError, as_problem, problem
from paramserver_node import negotiate
from paramserver_node.log import path_of

log = logging.getLogger("paramserver.node")

_BY_STATUS: Final = {
    400: "malformed", 404: "not_found", 405: "method_not_allowed", 406: "not_acceptable", 413: "too_large",
    415: "unsupported_media_type", 422: "invalid_field", 429: "too_many_requests", 503: "unavailable",
}  # fmt: skip

CODE: Final = "problem_code"
"""Key in the state of a request's scope: the code of the error that it was answered with, for the metrics."""
_METHODS: Final = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


class CutOff(Exception):
    """Raised to cut off an answer that its client does not read, or may no longer: neither is an error of ours."""


def response(request: Request, error: PsError) -> Response:
    """Return the response for an error: problem details in JSON, whatever Accept says, and `Retry-After` if useful."""
    request.scope.setdefault("state", {})[CODE] = error.code
    doc = error.document(_id(request))
    headers: dict[str, str] = {}
    if error.status == 401:
        given = ', error="invalid_token"' if "authorization" in request.headers else ""
        headers["www-authenticate"] = f'Bearer realm="paramserver"{given}'
    # Whatever is in between might take it for leave to send again what must not count twice.
    if error.retry_after_s is not None and error.retryable and error.status in (429, 503):
        headers["retry-after"] = str(max(1, ceil(error.retry_after_s)))
    if error.code == "range_not_satisfiable":
        headers["content-range"] = f"bytes */{error.members.get('size_bytes', 0)}"
    return Response(negotiate.json_text(doc), error.status, headers, media_type="application/problem+json")


def _id(request: Request) -> str:
    return str(request.scope.get("state", {}).get("request_id", ""))


def failed(request: Request, error: Exception) -> Response:
    """Return the response to a request that raised `error`; an internal error, which points to the log, is logged."""
    told = as_problem(error)
    if told.code == "internal":
        log.error("request.failed path=%s request_id=%s", path_of(request.scope), _id(request), exc_info=error)
    return response(request, told)


async def _ps_error(request: Request, error: Exception) -> Response:
    return failed(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _BY_STATUS.get(error.status_code, "malformed" if error.status_code < 500 else "internal")
    detail = f"{request.method} {request.scope['path']}: {error.detail}"
    hint = "docs/rest.md and /openapi.json list the routes" if code == "not_found" else ""
    answer = response(request, problem(code, detail[:300], hint=hint))
    if error.status_code == 405:
        answer.headers["allow"] = _allowed(request)
    return answer


def _allowed(request: Request) -> str:
    """Return the methods of all routes of this path; the router would report those of the first one only."""
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    found = {m for m, scope in scopes.items() if any(r.matches(scope)[0] is Match.FULL for r in request.app.routes)}
    return ", ".join(sorted(found | ({"HEAD"} if "GET" in found else set())))


async def _validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    parts: list[dict[str, Any]] = []
    for e in error.errors():
        where = ".".join(str(p) for p in e["loc"])
        parts.append({"where": where, "code": "invalid_field", "detail": f"{where}: {e['msg']}"})
    in_path = any(str(e["loc"][0]) in ("path", "query", "header") for e in error.errors())
    code = "malformed" if in_path else "invalid_field"
    return response(request, problem(code, str(parts[0]["detail"])[:300], errors=tuple(parts)))


async def _unexpected(request: Request, error: Exception) -> Response:
    ours = error.split(CutOff)[1] if isinstance(error, ExceptionGroup) else error
    if ours is None or isinstance(ours, CutOff):
        return Response(status_code=503)  # never sent, as half of another response is out already
    return failed(request, error)


def install(app: FastAPI) -> None:
    """Turn every failure of the app's routes into a problem document."""
    app.add_exception_handler(PsError, _ps_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(Exception, _unexpected)
