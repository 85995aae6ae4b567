"""/internal: what shards tell the scheduler, and the feed they hear everything from."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect

from paramserver.core import scheduler_io as io
from paramserver.errors import PsError, problem
from paramserver_node.middleware import lasting
from paramserver_node.roles import role
from paramserver_scheduler import bodies
from paramserver_scheduler.exchange import ask, gives, read, reply, respond, service, takes
from paramserver_scheduler.routes.feed import open_feed
from paramserver_scheduler.routes.workers import epoch_of, number_of

router = APIRouter(prefix="/internal", tags=["internal"])

ClockLine: TypeAlias = tuple[
    bodies.Id, bodies.Count, bodies.Id, bodies.Count, bodies.Count, bodies.Count, bodies.Count, bodies.Count
]
CLOCK_LINE: Final[TypeAdapter[ClockLine]] = TypeAdapter(ClockLine)
LINE_BYTES_MAX: Final = 4096

SHARD = {"name": "shard-0", "addresses": ["http://127.0.0.1:8701"], "version": "0.1.0"}
BEAT = {"epoch": 1, "metrics": {"pushes_per_s": 120.0}, "partitions": [["demo", 1, 0, 4294967297, 7, 5]], "cuts": []}


@router.post(
    "/shards",
    status_code=201,
    responses=gives(201, "Joined", {"name": "shard-0", "epoch": 1, "lease_s": 5.0, "term": 1}),
    openapi_extra=takes(bodies.JoinShard, SHARD),
)
@role("node")
async def join_shard(request: Request) -> Response:
    """A shard process starts; an older one of that name is dead at once.

    409 where its Redis, whose term the query value `redis_term` is, is not that of the schedulers.
    """
    b, term = await read(request, bodies.JoinShard), number_of(request, "redis_term")
    return await reply(request, lambda n: io.JoinShard(n, b.name, b.addresses, b.version, term))


@router.put(
    "/shards/{name}",
    responses=gives(200, "Alive", {"state": "active", "term": 1}),
    openapi_extra=takes(bodies.ShardHeartbeat, BEAT),
)
@role("node")
async def shard_heartbeat(request: Request, name: str) -> Response:
    """A sign of life with what is served and stored; 409 `fenced`: join anew, with nothing owned.

    Both tell the `term`, because who was deposed and has not noticed may say either.
    """
    b = await read(request, bodies.ShardHeartbeat)
    told = b.metrics, b.partitions, b.cuts, b.released, b.lost, b.memory, b.loads
    term = service(request).read.term
    with _in_term(term):
        answer = await ask(request, lambda n: io.ShardHeartbeat(n, name, b.epoch, *told))
    return respond(request, {**(answer.body or {}), "term": term}, answer.status)


@contextmanager
def _in_term(term: int) -> Iterator[None]:
    """A refusal says in which term it was decided."""
    try:
        yield
    except PsError as error:
        raise error.plus(term=term) from error


@router.post("/shards/{name}/clocks", status_code=204, responses=gives(204, "This scheduler stops"))
@role("node")
async def clocks(request: Request, name: str) -> Response:
    """Iterations that workers have ended with a push, a line each, without end.

    A line is `[model, generation, worker, epoch, push number, clock, timeline, shards]`; it counts as the worker's own
    report of that clock when all the shards that the push went to have told it.
    """
    epoch = _needed_epoch(request)
    runtime = service(request).runtime
    lasting(request.scope)

    async def take() -> None:
        rest = b""
        try:
            async for piece in request.stream():
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > LINE_BYTES_MAX:
                    raise problem("malformed", f"a line is longer than {LINE_BYTES_MAX} bytes")
                for line in lines:
                    runtime.send(io.ClockStaged(name, epoch, *_clock(line)))
        except ClientDisconnect:
            pass

    await runtime.hub.while_open(take())
    return Response(status_code=204)


def _clock(line: bytes) -> ClockLine:
    """The members of one line; raises RequestError (`malformed`)."""
    try:
        return CLOCK_LINE.validate_json(line)
    except ValidationError as e:
        raise problem("malformed", f"no report of a clock: {line[:100]!r}") from e


def _needed_epoch(request: Request) -> int:
    epoch = epoch_of(request)
    if epoch is None:
        raise problem("malformed", "query value 'epoch' is needed")
    return epoch


@router.post("/shards/{name}/drain", responses=gives(200, "Its partitions move to the others", {"targets": 1}))
@role("node")
async def drain_shard(request: Request, name: str) -> Response:
    """A shard that was told to stop gives away what it owns; `targets`: how many others can take something."""
    epoch = _needed_epoch(request)
    return await reply(request, lambda n: io.SetShardState(n, name, "draining", epoch))


@router.delete("/shards/{name}", status_code=204, responses=gives(204, "Left"))
@role("node")
async def leave_shard(request: Request, name: str) -> Response:
    """A shard stops; its partitions go to the others at once."""
    epoch = _needed_epoch(request)
    return await reply(request, lambda n: io.LeaveShard(n, name, epoch))


@router.post(
    "/models/{m}/uploaded",
    responses=gives(200, "Noted", {"missing": []}),
    openapi_extra=takes(bodies.Uploaded, {"name": "w"}),
)
@role("node")
async def uploaded(request: Request, m: str) -> Response:
    """All owners that lacked them have the first values of one parameter."""
    b = await read(request, bodies.Uploaded)
    return await reply(request, lambda n: io.ParameterUploaded(n, m, b.name, b.token, b.given))


@router.post(
    "/models/{m}/restored",
    responses=gives(200, "Noted"),
    openapi_extra=takes(bodies.Restored, {"generation": 1, "timeline": 0, "version": 400}),
)
@role("node")
async def restored(request: Request, m: str) -> Response:
    """A client has set every partition to a checkpoint of its own, whose worker states it tells.

    In sync a new timeline begins.
    """
    b = await read(request, bodies.Restored)
    return await reply(request, lambda n: io.ModelRestored(n, m, b.generation, b.timeline, b.version, b.workers))


@router.get(
    "/models/{m}/worker",
    responses=gives(200, "Its newest epoch", {"worker": "demo/w0", "epoch": 1, "rank": 0, "alive": True}),
)
@role("node")
async def find_worker(request: Request, m: str, worker: str) -> Response:
    """The newest epoch issued to `?worker=`, live or not; 404 `unknown_worker` if it never joined."""
    s = service(request)
    return respond(request, s.read.worker(m, worker, s.now))


@router.get("/feed", responses=gives(200, "One JSON document per line, without end"))
@role("node")
async def feed(request: Request) -> StreamingResponse:
    """Everything once, then each change: map, models, rosters, commits; a `ping` after each second of silence."""
    runtime = service(request).runtime
    with _in_term(runtime.core.read.term):
        opened = await open_feed(runtime, request.query_params.get("shard"), epoch_of(request))

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for document in opened.documents():
                if document["type"] == "gone":
                    document = {**document, "name": document["model"]}  # as a `model` document calls it
                yield json.dumps(document, separators=(",", ":")).encode() + b"\n"
        finally:
            runtime.hub.unsubscribe(opened)

    return StreamingResponse(lines(), media_type="application/x-ndjson")
