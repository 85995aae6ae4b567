"""/models/{m}/checkpoints and /restore: folders under the scheduler's state directory.

Names are single path components; the SDK's own checkpoints on the client's disk do not pass through here.
"""

from fastapi import APIRouter, Request, Response

from paramserver.core import scheduler_io as io
from paramserver.core.fields import check_model_name
from paramserver_node.queries import takes_query
from paramserver_node.roles import role
from paramserver_scheduler import bodies
from paramserver_scheduler.checkpoints import check_name
from paramserver_scheduler.exchange import PAGED, gives, page, read_optional, reply, respond, service, takes

router = APIRouter(prefix="/models/{m}", tags=["checkpoints"])

CHECKPOINT = {
    "name": "000012-clock-400",
    "number": 12,
    "clock": 400,
    "created_s": 1763700000.0,
    "bytes": 5120,
    "versions": [400, 400],
    "metric": {"name": "accuracy", "value": 0.97},
    "kept": False,
    "path": "/var/lib/paramserver/checkpoints/demo/000012-clock-400",
    "scheduler": "scheduler",
}


@router.post(
    "/checkpoints",
    status_code=201,
    responses=gives(201, "Written", CHECKPOINT),
    openapi_extra=takes(bodies.Checkpoint, {"name": "before-tuning"}, False),
)
@role("admin")
async def write(request: Request, m: str) -> Response:
    """Write a checkpoint now; in sync it is of one clock. Answered when on disk; `latest` and `best` are no names.

    409 `disk_refuses` where the scheduler's disk does not take it.
    """
    b = await read_optional(request, bodies.Checkpoint)
    name = None if b.name is None else check_name(b.name)
    return await reply(request, lambda n: io.RequestCheckpoint(n, m, name))


@router.get("/checkpoints", responses=gives(200, "The checkpoints", {"items": [CHECKPOINT], "next": None}))
@role("reader")
@takes_query(*PAGED)
async def list_checkpoints(request: Request, m: str) -> Response:
    """The checkpoints of a model that are kept, oldest first."""
    return page(request, service(request).read.checkpoints(m))


@router.post(
    "/restore",
    responses=gives(200, "Set; 201 if the model was made"),
    openapi_extra=takes(bodies.Restore, {"checkpoint": "latest", "as": "demo2", "partitions": 4}, False),
)
@role("admin")
async def restore(request: Request, m: str) -> Response:
    """Put a checkpoint of this model back, into itself or another model; one that is not there is made.

    Partitions and shards may be others than when it was written. Optimizer state comes with it where the optimizer is
    the same.
    """
    b = await read_optional(request, bodies.Restore)
    source, target = check_model_name(m), check_model_name(m if b.into is None else b.into)
    answer = await service(request).jobs.restore(source, check_name(b.checkpoint), target, b.partitions)
    return respond(request, answer.body, answer.status)
