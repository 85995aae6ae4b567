"""/models/{m}/checkpoints and /restore: checkpoints in the scheduler's state directory.

Names are single path components.  Checkpoints that the SDK writes to the client's disk do not pass through here.
"""

from fastapi import APIRouter, Request, Response

from paramserver.core.fields import check_model_name
from paramserver.core.scheduler import io
from paramserver_node import negotiate
from paramserver_node.queries import takes_query
from paramserver_node.roles import role
from paramserver_scheduler import answers, bodies
from paramserver_scheduler.checkpoints import check_name
from paramserver_scheduler.requests import (
    PAGED,
    number_of,
    page,
    read_optional,
    reply,
    request_body,
    respond,
    response_doc,
    service,
)

router = APIRouter(prefix="/models/{m}", tags=["checkpoints"])


@router.post(
    "/checkpoints",
    status_code=201,
    responses=response_doc(201, "Written", answers.Checkpoint),
    openapi_extra=request_body(bodies.Checkpoint, {"name": "before-tuning"}, False),
)
@role("admin")
@takes_query("generation")
async def write(request: Request, m: str) -> Response:
    """Write a checkpoint of a model; answered once it is on the scheduler's disk.

    In sync mode it is of a single clock. A checkpoint with a `name` of your own is never removed automatically; the
    names `latest` and `best` are reserved. 409 `conflict` if the name is in use, 409 `disk_refuses` if the scheduler
    cannot write to its disk. With `?generation=`, 409 `model_replaced` if the model was deleted and created again.
    """
    b = await read_optional(request, bodies.Checkpoint)
    name, generation = None if b.name is None else check_name(b.name), number_of(request, "generation", None)
    return await reply(request, lambda n: io.RequestCheckpoint(n, m, name, generation))


@router.get("/checkpoints", responses=response_doc(200, "The checkpoints", answers.Page[answers.Checkpoint]))
@role("reader")
@takes_query(*PAGED)
async def list_checkpoints(request: Request, m: str) -> Response:
    """List the checkpoints of a model, oldest first."""
    s, store = service(request), request.app.state.checkpoints
    found = s.read.checkpoints(m)
    for checkpoint in found:
        if checkpoint["scheduler"] == s.lease.name:  # its folder may have been moved since
            checkpoint["path"] = str(store.path(m, checkpoint["name"]))
    return page(request, found)


@router.delete("/checkpoints/{name}", status_code=204, responses=response_doc(204, "Deleted"))
@role("admin")
async def delete(request: Request, m: str, name: str) -> Response:
    """Delete a checkpoint with its files; one of an earlier model of that name, too, if it is in the leader's folder.

    503 `unavailable` if another scheduler that may have its files does not answer.
    """
    await service(request).jobs.delete(check_model_name(m), check_name(name))
    return Response(status_code=204)


@router.post(
    "/restore",
    responses={
        **response_doc(200, "Restored", answers.Model),
        **response_doc(201, "Restored into a new model", answers.Model),
    },
    openapi_extra=request_body(bodies.Restore, {"checkpoint": "latest", "as": "demo2", "partitions": 4}, False),
)
@role("admin")
@takes_query("generation")
async def restore(request: Request, m: str) -> Response:
    """Restore a checkpoint of this model, into itself or into the model named by `as`, which is created if missing.

    The numbers of partitions and shards may differ from those when it was written. Optimizer state is restored if the
    optimizer is the same. 409 `model_exists` if another model named by `as` exists and `exist_ok` is false. With
    `?generation=`, 409 `model_replaced` if this model was deleted and created again; one that is gone is restored.
    """
    negotiate.check_accept(request)
    b = await read_optional(request, bodies.Restore)
    source, target = check_model_name(m), check_model_name(m if b.into is None else b.into)
    name, generation = check_name(b.checkpoint), number_of(request, "generation", None)
    answer = await service(request).jobs.restore(
        source, name, target, b.partitions, exist_ok=b.exist_ok, generation=generation
    )
    return respond(request, answer.body, answer.status)
