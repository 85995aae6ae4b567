"""The app of a node: FastAPI's, with a shortcut past its router, and HEAD wherever there is GET (RFC 9110, 9.1)."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paramserver_node import api_document, roles
from paramserver_node.problems import CutOff

FOR_HEAD: Final = "for_head"
"""Key in the scope of a GET by which a HEAD request is served: nobody gets its body."""


class NodeApp(FastAPI):
    """A FastAPI app in which the most frequent requests do not take the router, a tenth of a small request's time.

    The router has their routes, too, for whatever inspects them.
    """

    def __init__(
        self,
        find_endpoint: Callable[[tuple[str, str]], ASGIApp | None],
        schemas: Callable[[], Mapping[str, dict[str, Any]]] = dict,
        **options: Any,
    ) -> None:
        """`find_endpoint` returns the endpoint for a (method, path), or None to leave the request to the router.

        `schemas` returns those, by name, that the routes refer to in the OpenAPI document: made when it is asked for,
        as what FastAPI makes of them takes a tenth of a second of each start.
        """
        super().__init__(**options)
        self._schemas = schemas
        self._find_endpoint = find_endpoint

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, with what FastAPI leaves out."""
        if self.openapi_schema is None:
            api_document.complete(super().openapi(), roles.routes(self), self._schemas())
        return super().openapi()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._find_endpoint((scope["method"], scope["path"]))
        if scope["method"] == "HEAD":
            await self._head(scope, receive, send)
        elif endpoint is None:
            await super().__call__(scope, receive, send)
        else:
            scope["app"] = self
            await endpoint(scope, receive, send)

    async def _head(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a HEAD request by GET: its status and headers, at once, however long its body would go on."""
        asked = {**scope, "method": "GET", FOR_HEAD: True}

        async def head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif message.get("more_body", False):
                raise CutOff("a response to HEAD has no body")

        try:
            await super().__call__(asked, receive, head)
        except* CutOff:
            pass
        finally:
            if "route" in asked:
                scope["route"] = asked["route"]
