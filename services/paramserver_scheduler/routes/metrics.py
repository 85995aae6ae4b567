"""/models/{m}/metrics: metrics that workers report (loss, accuracy, samples/s), kept as time series."""

from fastapi import APIRouter, Request, Response

from paramserver.core.scheduler import io
from paramserver_node.queries import takes_query
from paramserver_node.roles import role
from paramserver_scheduler import answers, bodies
from paramserver_scheduler.requests import PAGED, page, read, reply, request_body, response_doc, service

router = APIRouter(prefix="/models/{m}", tags=["metrics"])


@router.post(
    "/metrics",
    responses=response_doc(200, "Stored", answers.Accepted),
    openapi_extra=request_body(bodies.Metrics, {"worker": "demo/w0", "clock": 6, "metrics": {"loss": 0.31}}),
)
@role("worker")
async def report(request: Request, m: str) -> Response:
    """Report current values of metrics; each is added as a point to the model's time series of that name.

    null stands for NaN or infinity, which JSON does not have.  `accepted` in the answer is the number of points added:
    a value that is not finite is shown on the status page as the newest one, but is no point of the series; names
    beyond the maximum are left out, and so is what was measured in another `timeline` or creation of the model.
    """
    b = await read(request, bodies.Metrics)
    return await reply(request, lambda n: io.ReportMetrics(n, m, **vars(b)))


@router.get(
    "/metrics",
    responses=response_doc(200, "The series", answers.Page[answers.Metric]),
)
@role("reader")
@takes_query("name", *PAGED)
async def series(request: Request, m: str) -> Response:
    """Return the time series that workers reported for a model, or only the one that `?name=` selects.

    A point is `[Unix seconds, clock or null, worker, value]`.
    """
    known, name = service(request).read, request.query_params.get("name")
    return page(request, known.metric_names(m, name), lambda n: known.metric(m, n))
