"""The account of each request to a shard: bytes of its body, of an answer by name, of values from other shards.

Those of bodies count until what is kept of them is counted elsewhere.  A request over a bound is refused before its
body is read (one without a length, while it is read) or its answer is collected.
"""

from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paramserver.limits import NPY_BODY_BYTES_MAX, RECEIVING_BYTES_MAX
from paramserver_node.in_flight import Account, InFlight
from paramserver_node.negotiate import announced

PROBES: Final = ("/livez", "/readyz", "/version", "/metrics")
"""Paths that are answered however full the shard is."""
MEMORY_SHARE: Final = 4
"""What is in flight takes at most one part in this many of the process's memory."""


def bytes_max(memory_bytes: int) -> int:
    """Return how many bytes a shard with this memory limit may have in flight."""
    return min(RECEIVING_BYTES_MAX, memory_bytes // MEMORY_SHARE)


class AccountMiddleware:
    """ASGI middleware that opens an account for every request; endpoints get it with `account`."""

    def __init__(self, app: ASGIApp, in_flight: InFlight) -> None:
        self.app = app
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:
            await self.app(scope, receive, send)
            return
        client = scope.get("client")
        with self._in_flight.request(client[0] if client else "") as opened:
            scope.setdefault("state", {})["account"] = opened
            await self.app(scope, receive, send)


def account(scope: Scope) -> Account:
    """Return the account of a request."""
    found: Account = scope["state"]["account"]
    return found


def counted(request: Request) -> Request:
    """Return a request by parameter name with its body counted: at once if its length is announced, else as it is read.

    Raises as `Account.grow` does, now or while the body is read.
    """
    opened, length = account(request.scope), announced(request)
    if length is not None:
        opened.grow(min(length, NPY_BODY_BYTES_MAX))  # no more of it is read
        return request

    async def receive() -> Message:
        message = await request.receive()
        opened.grow(len(message.get("body", b"")))
        return message

    return Request(request.scope, receive)
