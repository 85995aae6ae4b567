"""/status: the cluster's current status and recent history, as JSON documents with a schema and as a stream."""

import re
from collections.abc import Iterator

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from paramserver import limits
from paramserver.errors import NotFoundError, problem
from paramserver_node import negotiate
from paramserver_node.queries import takes_query
from paramserver_node.roles import role
from paramserver_scheduler.history import REPORTED, UNITS
from paramserver_scheduler.overview import describe
from paramserver_scheduler.pause import Pause
from paramserver_scheduler.requests import number_of, respond, service
from paramserver_scheduler.rings import Grid, Labels
from paramserver_scheduler.schema import Events, SeriesAnswer, Status
from paramserver_scheduler.service import Service

router = APIRouter(prefix="/status", tags=["status"])

_COMMA = re.compile(rf",(?=(?:{'|'.join({n.partition('.')[0] for n in UNITS} | {REPORTED[:-1]})})\.|$)")
"""A comma before a metric or at the end: others belong to the name of a metric that workers report."""
SPAN_S = 900.0
"""Default time span of a series, if the request has no `from`."""
POINTS = 300
"""Approximate number of points of a series, if the request has no `step`."""


@router.get("", responses={200: {"model": Status, "description": "The cluster"}})
@role("reader")
async def status(request: Request) -> Response:
    """Return the current status of the cluster.

    It has the nodes with heartbeat ages, the models with versions, clocks, rates and lag, the runs, and recent events.
    """
    return respond(request, (await describe(service(request))).model_dump())


@router.get(
    "/stream",
    response_class=StreamingResponse,
    responses={200: {"description": "Server-sent events `status`, with `GET /status` as data"}},
)
@role("reader")
async def stream(request: Request) -> StreamingResponse:
    """Stream the status once a second as server-sent events: each has the document of `GET /status`."""
    return StreamingResponse(
        service(request).broadcast.stream(),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


@router.get("/events", responses={200: {"model": Events, "description": "Events, newest first"}})
@role("reader")
@takes_query("from", "to", "kind", "limit")
async def events(request: Request) -> Response:
    """Return recent events, newest first, such as shards, workers and runs that joined, left or failed.

    `?from=` and `?to=` (Unix seconds) select a time span, `?kind=` selects one kind, `?limit=` bounds the number
    (default 100).
    """
    s = service(request)
    from_s, to_s = seconds_of(request, "from", 0.0), seconds_of(request, "to", float("inf"))
    kind, limit = request.query_params.get("kind"), number_of(request, "limit", 100, 1, limits.STATUS_EVENTS_MAX)
    found = [e for e in s.history.events if from_s <= e.at <= to_s and kind in (None, e.kind)]
    return respond(request, Events(items=found[:limit]).model_dump())


@router.get("/series", responses={200: {"model": SeriesAnswer, "description": "Values on a grid of times"}})
@role("reader")
@takes_query("metric", "from", "to", "step", "model", "node", "worker")
async def series(request: Request) -> Response:
    """Return time series, such as `?metric=model.pushes_per_s`; separate several metrics by commas.

    `?from=` and `?to=` are Unix seconds (default: the last quarter of an hour), `?step=` is in seconds (default: as for
    about 300 points; at most 30 days). `?model=`, `?node=` and `?worker=` select series by label. The scheduler keeps a
    quarter of an hour at a resolution of one second, three hours at ten seconds and a day at one minute, since it began
    to lead; a step that is too short for the span is increased. `reported.NAME` is a metric that workers report, which
    is kept since the model was created. docs/metrics.md lists the other metrics.
    """
    names = [n for n in _COMMA.split(request.query_params.get("metric", "")) if n]
    if not 0 < len(names) <= limits.STATUS_METRICS_MAX:
        hint = f"?metric=model.pushes_per_s; known: {', '.join(UNITS)}, {REPORTED}NAME"
        raise problem("malformed", f"1 to {limits.STATUS_METRICS_MAX} metrics must be named", hint=hint)
    s = service(request)
    now_s = s.now + s.history.wall_offset_s
    to_s = min(seconds_of(request, "to", now_s), now_s)
    from_s = max(seconds_of(request, "from", to_s - SPAN_S), now_s - limits.STATUS_SPAN_S_MAX)
    if from_s > to_s:
        raise problem("malformed", "query parameter 'from' must not be later than 'to'")
    step_s = seconds_of(request, "step", (to_s - from_s) / POINTS, limits.STATUS_SPAN_S_MAX)
    grid = Grid.of(from_s, to_s, step_s, now_s)
    only = {k: request.query_params[k] for k in ("model", "node", "worker") if k in request.query_params}
    for name in names:
        if name not in UNITS and not name.startswith(REPORTED):
            raise problem("malformed", f"no metric {name!r:.80}", hint=f"known: {', '.join(UNITS)}, {REPORTED}NAME")
    head = {"start_s": grid.start_s, "step_s": grid.step_s, "count": grid.count}
    encode, pause = negotiate.encoder(request), Pause()
    items: list[bytes] = []  # each encoded by itself: a thousand series at once would hold everybody up
    for name in names:
        reported = name.removeprefix(REPORTED)
        found = s.history.rings.read(name, only, grid) if name in UNITS else _reported(s, reported, only, grid)
        for labels, values in found:
            if any(v is not None for v in values):
                line = {"metric": name, "unit": UNITS.get(name, ""), "labels": dict(labels), "values": values}
                items.append(encode(line))
            await pause()
    return negotiate.respond_items(request, head, items)


def _reported(s: Service, name: str, only: dict[str, str], grid: Grid) -> Iterator[tuple[Labels, list[float | None]]]:
    """Series of a metric that workers report, from the models' own records; of one worker if `only` names one."""
    if "node" in only:
        return
    for model in [only["model"]] if "model" in only else [m["name"] for m in s.read.models()]:
        try:
            points = s.read.points(model).get(name, ())
        except NotFoundError:
            if "model" in only:
                raise
            continue  # it was deleted while others were answered
        if "worker" in only:
            points = [p for p in points if p[2] == only["worker"]]
        if points:
            means = grid.means(np.array([p[0] for p in points]), np.array([p[3] for p in points]))
            yield (("model", model),), means


def seconds_of(request: Request, name: str, default: float, high: float = 1e12) -> float:
    """Return a query parameter that is a time or duration in seconds, from 0 to `high`; raises RequestError."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= high:
        raise problem("malformed", f"query parameter '{name}' must be a number of seconds from 0 to {high:.0f}")
    return value
