"""/models/{m}/workers and /models/{m}/clock: joining, heartbeats, and waiting for other workers.

Worker ids contain a '/' (`demo/w0`), plain or as %2F, so they are the rest of the path or precede a fixed suffix.
"""

from urllib.parse import quote

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

router = APIRouter(prefix="/models/{m}", tags=["workers"])


@router.post(
    "/workers",
    status_code=201,
    responses=response_doc(201, "Joined", answers.JoinedWorker, ["Location"]),
    openapi_extra=request_body(bodies.JoinWorker, {"name": "w0"}, False),
)
@role("worker")
async def join(request: Request, m: str) -> Response:
    """Join a model as a worker; the answer has the worker's id, a new epoch, a rank and the duration of its lease.

    A join under a name in use fences its holder, whose requests then get 409 `fenced`. `clock` is the iteration to
    start at, `state` what the previous worker of that name last stored, or null, and `first` whether its rank is the
    lowest of the live workers'.
    """
    b = await read_optional(request, bodies.JoinWorker)
    return await reply(
        request, lambda n: io.JoinWorker(n, m, **vars(b)), lambda w: f"/models/{m}/workers/{quote(w['worker'])}"
    )


@router.get("/workers", responses=response_doc(200, "The roster", answers.Page[answers.Worker]))
@role("reader")
@takes_query(*PAGED)
async def list_workers(request: Request, m: str) -> Response:
    """List the workers of a model, the live ones by rank, then the others.

    Each comes with its clock, its heartbeat age and the state that is stored for it (`kept`).  One that said that it
    leaves is `left`, one whose lease ran out `dead`, and one that a restore has brought a state for, and that has not
    joined since, `restored`.
    """
    s = service(request)
    return page(request, s.read.workers(m, s.now, kept=True))


@router.post(
    "/workers/{w:path}/drain",
    responses=response_doc(200, "Asked to finish", answers.WorkerState),
)
@role("admin")
async def drain(request: Request, m: str, w: str) -> Response:
    """Ask a worker to finish its current work and leave the model.

    It is told so (`state: draining`) in the answers to its heartbeats and clock reports. 404 `unknown_worker` if it is
    not live.
    """
    await read_optional(request, bodies.Nothing)
    return await reply(request, lambda n: io.DrainWorker(n, m, w))


@router.get("/workers/{w:path}", responses=response_doc(200, "The worker", answers.Worker))
@role("reader")
async def get_worker(request: Request, m: str, w: str) -> Response:
    """Return one worker of a model, live or dead: its epoch, rank, clock, heartbeat age and stored state (`kept`)."""
    s = service(request)
    return respond(request, s.read.worker(m, w, s.now, kept=True))


@router.put(
    "/workers/{w:path}",
    responses=response_doc(200, "Alive", answers.WorkerBeat),
    openapi_extra=request_body(bodies.WorkerHeartbeat, {"epoch": 1, "clock": 6, "metrics": {"loss": 0.3}}),
)
@role("worker")
async def heartbeat(request: Request, m: str, w: str) -> Response:
    """Renew a worker's lease; due every second.

    `state` in the answer is what the worker is asked to be: `active`, `draining`, `paused` or `stop`. 409 `fenced`: the
    lease has expired or the name has been joined again, so join again. `state_kept` is false if the `state` in the body
    may not be stored yet: send it with the next heartbeat, too. `metrics` is an object of current values, or a list of
    `[clock, values]`, oldest first. 409 `rolled_back`: the model went back to an earlier
    state, so continue from the `clock` and `timeline` in the error. 409 `model_replaced`: the model was created again
    since the join that returned this `generation`; `epoch` in the error is that of a later worker of this id, if any.
    """
    b = await read(request, bodies.WorkerHeartbeat)
    return await reply(request, lambda n: io.WorkerHeartbeat(n, m, w, **vars(b)))


@router.delete("/workers/{w:path}", status_code=204, responses=response_doc(204, "Left"))
@role("worker")
@takes_query("epoch", "generation")
async def leave(request: Request, m: str, w: str) -> Response:
    """Leave the model, so that no other worker waits for this one any more; idempotent.

    With `?epoch=` only that incarnation leaves; a newer one of the same name stays. With `?generation=`, that of the
    join's answer, a worker of another creation of the model stays: 409 `model_replaced`.
    """
    epoch, generation = number_of(request, "epoch", None), number_of(request, "generation", None)
    return await reply(request, lambda n: io.LeaveWorker(n, m, w, epoch, generation))


@router.post(
    "/clock",
    responses=response_doc(200, "Released, or `wait_s` is over", answers.Released),
    openapi_extra=request_body(bodies.Clock, {"worker": "demo/w0", "epoch": 1, "clock": 1, "wait_s": 5}),
)
@role("worker")
async def clock(request: Request, m: str) -> Response:
    """Report how many iterations a worker has finished, and wait until the consistency mode lets it continue.

    The number is absolute, so the request can be repeated. If the worker is not released within `wait_s`, `released` is
    false and `waiting_for` names what it waits for: it sends the report again before it goes on. `clock` in the answer
    is the iteration to work on next, which is beyond the reported one if the others went on without this worker.
    """
    b = await read(request, bodies.Clock)
    return await reply(request, lambda n: io.ReportClock(n, m, **vars(b)))
