"""HEAD of everything that can be requested by GET (RFC 9110, 9.1): such a request is served as a GET without a body."""

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paramserver_node.problems import CutOff


def only_get(routes: list[BaseRoute], scope: Scope) -> bool:
    """Whether a HEAD request is for a path that is served by GET and has no route of its own for HEAD, or before it."""
    heads = [i for i, r in enumerate(routes) if r.matches(scope)[0] is Match.FULL]
    gets = [i for i, r in enumerate(routes) if r.matches({**scope, "method": "GET"})[0] is Match.FULL]
    if not gets or not heads:
        return bool(gets)
    return gets[0] < heads[0] and getattr(routes[gets[0]], "path", None) != getattr(routes[heads[0]], "path", None)


async def as_get(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a HEAD request by the app's GET: its status and headers, at once, however long its body would go on."""
    asked = {**scope, "method": "GET"}

    async def head(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        elif message.get("more_body", False):
            raise CutOff("a response to HEAD has no body")

    try:
        await app(asked, receive, head)
    except* CutOff:
        pass
    finally:
        if "route" in asked:
            scope["route"] = asked["route"]
