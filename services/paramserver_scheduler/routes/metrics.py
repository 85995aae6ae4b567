"""/models/{m}/metrics: what workers report (loss, accuracy, samples/s), kept as time series."""

from fastapi import APIRouter, Request, Response

from paramserver.core import scheduler_io as io
from paramserver_node.queries import takes_query
from paramserver_node.roles import role
from paramserver_scheduler import bodies
from paramserver_scheduler.exchange import PAGED, gives, page, read, reply, service, takes

router = APIRouter(prefix="/models/{m}", tags=["metrics"])


@router.post(
    "/metrics",
    responses=gives(200, "Kept", {"accepted": 1}),
    openapi_extra=takes(bodies.Metrics, {"worker": "demo/w0", "clock": 6, "metrics": {"loss": 0.31}}),
)
@role("worker")
async def report(request: Request, m: str) -> Response:
    """Add one point to each series named."""
    b = await read(request, bodies.Metrics)
    return await reply(request, lambda n: io.ReportMetrics(n, m, b.metrics, b.worker, b.clock))


@router.get("/metrics", responses=gives(200, "The series", {"items": [{"name": "loss", "points": []}], "next": None}))
@role("reader")
@takes_query("name", *PAGED)
async def series(request: Request, m: str) -> Response:
    """All series of a model; `?name=` gives one."""
    name = request.query_params.get("name")
    return page(request, service(request).read.metrics(m, None if name is None else [name]))
