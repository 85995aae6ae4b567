"""Around every request: an id, the drain of a body nobody read, counts and times, and the last word on failures."""

import logging
import re
import time
import uuid
from typing import Any, Final

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paramserver.errors import PsError, problem
from paramserver_node import problems
from paramserver_node.metrics import REQUEST_S, REQUESTS

log = logging.getLogger("paramserver.node")

_ID: Final = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
DRAIN_BYTES_MAX: Final = 64 << 20
"""Most that is read of a body whose request has been refused; a client that sends more is cut off."""


class NodeMiddleware:
    """Outermost ASGI layer of a node.

    A response that ends before its request's body was read would be lost by the shard's server, so what the endpoint
    left is read (and dropped) before the last piece of the response goes out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        started_at = time.monotonic()
        body_ended = False
        status = 0

        async def counted_receive() -> Message:
            nonlocal body_ended
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                body_ended = True
            return message

        async def drained_send(message: Message) -> None:
            nonlocal body_ended, status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
                drained = 0
                while not body_ended and drained <= DRAIN_BYTES_MAX:
                    drained += len((await counted_receive()).get("body", b""))
            await send(message)

        try:
            await self.app(scope, counted_receive, drained_send)
        except PsError as e:
            if status:
                raise
            await problems.response(Request(scope), e)(scope, counted_receive, drained_send)
        except Exception:
            if status:
                raise
            log.exception("request.failed path=%s", scope["path"])
            error = problem("internal", "paramserver has a bug; the node's log has more")
            await problems.response(Request(scope), error)(scope, counted_receive, drained_send)
        finally:
            route: Any = scope.get("route")
            path = getattr(route, "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "OTHER"
            REQUESTS.labels(path, method, str(status)).inc()
            REQUEST_S.labels(path).observe(time.monotonic() - started_at)


_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def _request_id(scope: Scope) -> str:
    """The client's `X-Request-Id` where it is a plain word, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            if _ID.fullmatch(text):
                return text
    return uuid.uuid4().hex
