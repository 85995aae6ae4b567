"""Routes that lend shared-memory slots for gradients to clients on this machine, and take them back."""

from typing import Final

from fastapi import APIRouter, Request, Response

from paramserver.errors import problem
from paramserver.limits import BODY_BYTES_MAX
from paramserver_node import negotiate
from paramserver_node.roles import role
from paramserver_shard.lending import Lending
from paramserver_shard.serving import Serving

BODY_SIZE_MAX: Final = 4096
"""Largest body of a request for a slot, which holds one number."""


def router(serving: Serving, lending: Lending | None) -> APIRouter:
    """Return the router of `POST /slots` and `DELETE /slots/{slot}`; without `lending`, no slot is lent."""
    routes = APIRouter()

    @routes.post("/slots")
    @role("worker")
    async def lend(request: Request) -> Response:
        """Lend a slot, which a later push names in place of a body."""
        serving.check()
        negotiate.check_accept(request)
        body = await negotiate.read(request, BODY_SIZE_MAX)
        size_bytes = body.get("bytes") if isinstance(body, dict) else None
        if type(size_bytes) is not int or not 0 < size_bytes <= BODY_BYTES_MAX:
            raise problem("invalid_field", f"bytes: an integer from 1 to {BODY_BYTES_MAX}", where="bytes")
        if lending is None:
            raise problem("queue_full", "this shard lends no shared memory", hint="send a body instead")
        return negotiate.respond(request, {"slot": await lending.allocate_slot(size_bytes)})

    @routes.delete("/slots/{slot}")
    @role("worker")
    async def give_back(slot: str) -> Response:
        """Take a slot back, to which its client never writes again."""
        if lending is not None:
            lending.free_slot(slot)
        return Response(status_code=204)

    return routes
