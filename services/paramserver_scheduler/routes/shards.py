"""/shards: the owners of partitions, and draining one of them while training continues."""

from fastapi import APIRouter, Request, Response

from paramserver.core.scheduler import io
from paramserver_node.queries import takes_query
from paramserver_node.roles import role
from paramserver_scheduler import answers, bodies
from paramserver_scheduler.requests import PAGED, page, read, reply, request_body, respond, response_doc, service

router = APIRouter(tags=["shards"])


@router.get("/shards", responses=response_doc(200, "All shards", answers.Page[answers.Shard]))
@role("reader")
@takes_query(*PAGED)
async def list_shards(request: Request) -> Response:
    """List the shards by name, including those that left or died recently.

    Each comes with its state, what it owns, how busy it is, and the moves of partitions away from it.
    """
    s = service(request)
    return page(request, s.read.shards(s.now))


@router.get("/shards/{name}", responses=response_doc(200, "The shard", answers.Shard))
@role("reader")
async def get_shard(request: Request, name: str) -> Response:
    """Return one shard, with the fields of `GET /shards`."""
    s = service(request)
    return respond(request, s.read.shard(name, s.now))


@router.put(
    "/shards/{name}",
    responses=response_doc(200, "Noted; its partitions move one after the other", answers.ShardWithTargets),
    openapi_extra=request_body(bodies.ShardState, {"state": "draining"}),
)
@role("admin")
async def set_shard_state(request: Request, name: str) -> Response:
    """Drain a shard, or make it active again.

    `draining` moves all its partitions to other shards while training continues; `active` stops that, and the shard
    keeps the partitions it still has. 409 `not_enough_memory`, with `needed_bytes` and `free_bytes`, if the other
    shards could not hold its partitions.
    """
    b = await read(request, bodies.ShardState)
    return await reply(request, lambda n: io.SetShardState(n, name, b.state))
