"""Bounds on the work in flight, in total and per client: no client takes the whole node, nothing grows unbounded.

A client is the address that a connection comes from.  What is over a bound is refused: 429 if the client alone has too
much in flight, 503 if the node has.  Both say when to retry.
"""

from paramserver.errors import problem
from paramserver.limits import CLIENT_REQUESTS_MAX, QUEUED_REQUESTS_MAX


class InFlight:
    """Counts of requests in flight and of their bytes."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: most bytes in flight, half of which may be one client's."""
        self.bytes_max = bytes_max
        self.client_bytes_max = bytes_max // 2
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
            raise problem("queue_full", f"this node has {self.requests} requests in flight, its limit")
        return Account(self, client, address)


class _Client:
    __slots__ = ("requests", "size_bytes")

    def __init__(self) -> None:
        self.requests = 0
        self.size_bytes = 0


class Account:
    """Counts one request and its bytes while it is in flight."""

    __slots__ = ("_client", "_whole", "address", "size_bytes")

    def __init__(self, whole: InFlight, client: _Client, address: str) -> None:
        self._whole = whole
        self._client = client
        self.address = address
        self.size_bytes = 0

    def __enter__(self) -> "Account":
        self._whole.clients[self.address] = self._client
        self._whole.requests += 1
        self._client.requests += 1
        return self

    def __exit__(self, *error: object) -> None:
        whole, client = self._whole, self._client
        whole.requests -= 1
        client.requests -= 1
        self.release()
        if not client.requests:
            del whole.clients[self.address]

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
                "queue_full", f"this node has {whole.size_bytes} bytes in flight; its limit is {whole.bytes_max}"
            )
        self.size_bytes += size_bytes
        whole.size_bytes += size_bytes
        client.size_bytes += size_bytes

    def release(self) -> None:
        """Count no bytes any more: what they were for is free by now, or counted elsewhere."""
        self._whole.size_bytes -= self.size_bytes
        self._client.size_bytes -= self.size_bytes
        self.size_bytes = 0
