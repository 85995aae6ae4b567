"""/models/{m}/tasks and /evaluations: ranges of data that are leased to workers, and evaluation tasks."""

from fastapi import APIRouter, Request, Response

from paramserver.core.scheduler import io
from paramserver_node.queries import takes_query
from paramserver_node.roles import role
from paramserver_scheduler import answers, bodies
from paramserver_scheduler.requests import PAGED, page, read, read_optional, reply, request_body, response_doc, service

router = APIRouter(prefix="/models/{m}", tags=["tasks"])

DATASET = {"dataset": "train", "size": 50000, "task_size": 1000}


@router.post(
    "/tasks",
    status_code=201,
    responses={
        **response_doc(200, "It was registered already", answers.Dataset),
        **response_doc(201, "Registered", answers.Dataset),
    },
    openapi_extra=request_body(bodies.Dataset, DATASET),
)
@role("worker")
async def register(request: Request, m: str) -> Response:
    """Register a dataset, either as `ranges` or as `size` elements cut into pieces of `task_size`.

    Registering the same dataset again is 200; a different one under its name is 409 `conflict`, and so is one more
    than there is room for.
    """
    b = await read(request, bodies.Dataset)
    return await reply(request, lambda n: io.RegisterDataset(n, m, **vars(b)))


@router.get("/tasks", responses=response_doc(200, "The datasets", answers.Page[answers.Dataset]))
@role("reader")
@takes_query(*PAGED)
async def list_datasets(request: Request, m: str) -> Response:
    """List the datasets of a model, with how many ranges each has (`tasks`) and how many are leased and done.

    `done` counts those of all passes: a dataset with `passes` is finished at `tasks` times `passes`.
    """
    return page(request, service(request).read.datasets(m))


@router.delete("/tasks/{dataset}", status_code=204, responses=response_doc(204, "Deleted"))
@role("worker")
async def delete(request: Request, m: str, dataset: str) -> Response:
    """Delete a dataset with its progress, finished or not: a model has at most 256 of them.

    Workers that go on with it get 404 `unknown_task`, those that wait for a range of it at once.  Registered again, it
    begins anew.
    """
    return await reply(request, lambda n: io.DeleteDataset(n, m, dataset))


@router.post(
    "/tasks/lease",
    responses=response_doc(200, "A task, or none now", answers.LeasedTask),
    openapi_extra=request_body(bodies.Lease, {"worker": "demo/w0", "epoch": 1, "dataset": "train", "wait_s": 5}),
)
@role("worker")
async def lease(request: Request, m: str) -> Response:
    """Lease the next range of a dataset, waiting up to `wait_s` for one; the dataset `evaluate` gives evaluations.

    `task` is null if there is none now, and `finished` is true if the worker will get no more. If the worker dies, its
    ranges are free again. An evaluation is `{"id": "evaluate:12:0", "kind": "evaluate", "clock": 12}`. `clock` in the
    answer is the iteration to go on with on `timeline`: no barrier waits for a worker that waits for a range.
    """
    b = await read(request, bodies.Lease)
    return await reply(request, lambda n: io.LeaseTask(n, m, **vars(b)))


@router.post(
    "/tasks/{task:path}/done",
    responses=response_doc(200, "Noted", answers.DoneTask),
    openapi_extra=request_body(bodies.TaskDone, {"worker": "demo/w0", "epoch": 1}),
)
@role("worker")
async def done(request: Request, m: str, task: str) -> Response:
    """Report that a range is processed, or an evaluation made with these `metrics`; idempotent."""
    b = await read(request, bodies.TaskDone)
    return await reply(request, lambda n: io.TaskDone(n, m, task=task, **vars(b)))


@router.post(
    "/evaluations",
    status_code=201,
    responses=response_doc(201, "Waits for a worker", answers.Evaluation),
)
@role("worker")
async def evaluate(request: Request, m: str) -> Response:
    """Request an evaluation at the current clock; the next worker that asks for an evaluation gets it."""
    await read_optional(request, bodies.Nothing)
    return await reply(request, lambda n: io.RequestEvaluation(n, m))
