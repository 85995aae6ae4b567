"""Bounds on the work in flight, in total and per client: no client takes the whole shard, nothing grows unbounded.

Bytes are those of bodies, until what is kept of them is counted elsewhere, of answers by name, and of values collected
from other shards.  A client is the address that a connection comes from.  A request over a bound is refused before its
body is read (one without a length, while it is read) or its answer is collected: 429 if the client alone has too much
in flight, 503 if the shard has.  Both say when to retry.
"""

from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paramserver.errors import problem
from paramserver.limits import CLIENT_REQUESTS_MAX, NPY_BODY_BYTES_MAX, QUEUED_REQUESTS_MAX, RECEIVING_BYTES_MAX
from paramserver_node.negotiate import announced

PROBES: Final = ("/livez", "/readyz", "/version", "/metrics")
"""Paths that are answered however full the shard is."""
MEMORY_SHARE: Final = 4
"""Bodies in flight take at most one part in this many of the process's memory."""


class InFlight:
    """Counts of requests in flight and of the bytes of their bodies."""

    def __init__(self, memory_bytes: int) -> None:
        """`memory_bytes` is the memory limit of the process."""
        self.bytes_max = min(RECEIVING_BYTES_MAX, memory_bytes // MEMORY_SHARE)
        self.client_bytes_max = self.bytes_max // 2
        self.requests = 0
        self.size_bytes = 0
        self.clients: dict[str, _Client] = {}

    def request(self, address: str) -> "Account":
        """Return the account of a new request.  Raises Unavailable (`too_many_requests`, `queue_full`)."""
        client = self.clients.get(address) or _Client()
        if client.requests >= CLIENT_REQUESTS_MAX:
            raise problem(
                "too_many_requests",
                f"this client has {client.requests} requests in flight, the most that one client may have",
            )
        if self.requests >= QUEUED_REQUESTS_MAX:
            raise problem("queue_full", f"this shard has {self.requests} requests in flight, its limit")
        return Account(self, client, address)


class _Client:
    __slots__ = ("requests", "size_bytes")

    def __init__(self) -> None:
        self.requests = 0
        self.size_bytes = 0


class Account:
    """Counts one request and the bytes of its body while it is in flight."""

    __slots__ = ("_address", "_client", "_whole", "size_bytes")

    def __init__(self, whole: InFlight, client: _Client, address: str) -> None:
        self._whole = whole
        self._client = client
        self._address = address
        self.size_bytes = 0

    def __enter__(self) -> "Account":
        self._whole.clients[self._address] = self._client
        self._whole.requests += 1
        self._client.requests += 1
        return self

    def __exit__(self, *error: object) -> None:
        whole, client = self._whole, self._client
        whole.requests -= 1
        client.requests -= 1
        self.release()
        if not client.requests:
            del whole.clients[self._address]

    def grow(self, size_bytes: int) -> None:
        """Count body bytes that are about to be read, or have just been.  Raises as `InFlight.request` does.

        A body of any size is accepted while no other one is in flight.
        """
        whole, client, own = self._whole, self._client, self.size_bytes
        if client.size_bytes > own and client.size_bytes + size_bytes > whole.client_bytes_max:
            raise problem(
                "too_many_requests",
                f"this client has {client.size_bytes} bytes in flight; its limit is {whole.client_bytes_max}",
            )
        if whole.size_bytes > own and whole.size_bytes + size_bytes > whole.bytes_max:
            raise problem(
                "queue_full", f"this shard has {whole.size_bytes} bytes in flight; its limit is {whole.bytes_max}"
            )
        self.size_bytes += size_bytes
        whole.size_bytes += size_bytes
        client.size_bytes += size_bytes

    def release(self) -> None:
        """Count no bytes any more: what they were for is free by now, or counted elsewhere."""
        self._whole.size_bytes -= self.size_bytes
        self._client.size_bytes -= self.size_bytes
        self.size_bytes = 0


class InFlightMiddleware:
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
