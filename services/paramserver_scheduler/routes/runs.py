"""/runs and /pool: training runs, and the pool of worker processes that take places in them.

Nothing here starts a process or transfers code: a run names a function that its workers must be able to import.
"""

from fastapi import APIRouter, Request, Response

from paramserver.core.scheduler import io
from paramserver_node.queries import takes_query
from paramserver_node.roles import role
from paramserver_scheduler import answers, bodies
from paramserver_scheduler.requests import (
    PAGED,
    number_of,
    page,
    read,
    read_optional,
    reply,
    request_body,
    respond,
    response_doc,
    service,
)

router = APIRouter(tags=["runs"])

RUN = {"model": "demo", "entry": "paramserver.examples.digits:train", "workers": 4, "stop": {"minutes": 5}}


@router.post(
    "/runs",
    status_code=201,
    responses=response_doc(201, "Waits for workers, or runs", answers.Run, ["Location"]),
    openapi_extra=request_body(bodies.Run, RUN),
)
@role("admin")
async def create_run(request: Request) -> Response:
    """Create a run: train one model with worker processes from the pool.

    `entry` is `package.module:function`, which those processes must be able to import. The run waits until a process
    takes one of its places. It ends when the first condition in `stop` (`clocks`, `minutes`, `metric`) is met or when
    all functions have returned, and fails if one has raised more than three times in a row at its place. An exception
    after an hour begins that count anew, and none counts while a partition of the model is not served. 409 `conflict`
    while another run trains the model.
    """
    b = await read(request, bodies.Run)
    return await reply(request, lambda n: io.CreateRun(n, **vars(b)), lambda run: f"/runs/{run['id']}")


@router.get("/runs", responses=response_doc(200, "Newest first", answers.Page[answers.Run]))
@role("reader")
@takes_query(*PAGED)
async def list_runs(request: Request) -> Response:
    """List the runs, newest first; of those that have ended, only the most recent are kept."""
    return page(request, service(request).read.runs())


@router.get("/runs/{run}", responses=response_doc(200, "The run", answers.Run))
@role("reader")
async def get_run(request: Request, run: str) -> Response:
    """Return one run: its state with the reason, its places, and its stopping rule."""
    return respond(request, service(request).read.run(run))


@router.patch(
    "/runs/{run}",
    responses=response_doc(200, "Changed", answers.Run),
    openapi_extra=request_body(bodies.RunPatch, {"state": "paused"}),
)
@role("admin")
async def patch_run(request: Request, run: str) -> Response:
    """Pause, resume or stop a run, or change its number of workers or its stopping rule.

    Omitted fields stay as they are. 409 `conflict` for a run that has ended.
    """
    b = await read(request, bodies.RunPatch)
    return await reply(request, lambda n: io.PatchRun(n, run, **vars(b)))


@router.post(
    "/runs/{run}/places/{place}/done",
    responses=response_doc(200, "Noted", answers.Run),
    openapi_extra=request_body(bodies.PlaceDone, {"member": "pool-0", "epoch": 1, "error": None, "attempt": 0}),
)
@role("worker")
async def place_done(request: Request, run: str, place: int) -> Response:
    """Report that the entry function of a place has returned, or has raised (`error` is the traceback).

    After an exception the place is free for another attempt; more than three in a row at one place fail the run, as
    POST /runs says.
    """
    b = await read(request, bodies.PlaceDone)
    return await reply(request, lambda n: io.PlaceDone(n, run, place, **vars(b)))


@router.post(
    "/pool",
    status_code=201,
    responses=response_doc(201, "Joined", answers.JoinedPool, ["Location"]),
    openapi_extra=request_body(bodies.JoinPool, {"allow": ["paramserver.examples"]}, False),
)
@role("worker")
async def join_pool(request: Request) -> Response:
    """Join the pool: offer a worker process for places in runs.

    `allow` lists the modules and packages whose functions the process may import; it gets no other runs. Places are
    assigned in the answers to heartbeats.
    """
    b = await read_optional(request, bodies.JoinPool)
    return await reply(request, lambda n: io.JoinPool(n, **vars(b)), lambda p: f"/pool/{p['member']}")


@router.get("/pool", responses=response_doc(200, "The pool", answers.Page[answers.PoolMember]))
@role("reader")
@takes_query(*PAGED)
async def list_pool(request: Request) -> Response:
    """List the live worker processes of the pool, with the run and place that each works at."""
    s = service(request)
    return page(request, s.read.pool(s.now))


@router.put(
    "/pool/{member:path}",
    responses=response_doc(200, "Alive", answers.PoolBeat),
    openapi_extra=request_body(bodies.MemberHeartbeat, {"epoch": 1, "metrics": {"cpu_cores": 0.5}}),
)
@role("worker")
async def pool_heartbeat(request: Request, member: str) -> Response:
    """Renew a pool member's lease, due every second; the answer names the place that it was assigned.

    `state` is `idle`, `assigned` or `stop`: leave that place. 409 `fenced` if the lease has expired or the name was
    joined again.
    """
    b = await read(request, bodies.MemberHeartbeat)
    return await reply(request, lambda n: io.PoolHeartbeat(n, member, **vars(b)))


@router.delete("/pool/{member:path}", status_code=204, responses=response_doc(204, "Left"))
@role("worker")
@takes_query("epoch")
async def leave_pool(request: Request, member: str) -> Response:
    """Leave the pool, so that the member's place is free again; idempotent.

    With `?epoch=` only that incarnation leaves; a newer one of the same name stays.
    """
    epoch = number_of(request, "epoch", None)
    return await reply(request, lambda n: io.LeavePool(n, member, epoch))
