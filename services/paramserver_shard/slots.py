"""The route by which a client on this machine gets a slot of shared memory to write a gradient into."""

from typing import Annotated

from fastapi import APIRouter, Body

from paramserver.limits import BODY_BYTES_MAX
from paramserver_node.roles import role
from paramserver_shard.frames import FrameService
from paramserver_shard.membership import Membership


def router(membership: Membership, frames: FrameService) -> APIRouter:
    """`POST /slots`."""
    routes = APIRouter(tags=["shared memory"])

    @routes.post("/slots", summary="Lend a slot of shared memory, named in a later push in place of a body")
    @role("worker")
    async def lend(
        size_bytes: Annotated[int, Body(alias="bytes", embed=True, ge=1, le=BODY_BYTES_MAX)],
    ) -> dict[str, str]:
        membership.check_serving()
        return {"slot": frames.lend(size_bytes)}

    return routes
