"""/internal: what shards report to the scheduler, and the feed from which they learn of every change."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect

from paramserver import __version__, limits
from paramserver.core.scheduler import io
from paramserver.errors import PsError, problem
from paramserver_node.middleware import no_body_deadline
from paramserver_node.roles import role
from paramserver_scheduler import answers, bodies
from paramserver_scheduler.requests import ask, number_of, read, reply, request_body, respond, response_doc, service
from paramserver_scheduler.routes.feed import open_feed
from paramserver_scheduler.routes.models import create

router = APIRouter(prefix="/internal", tags=["internal"])

ClockLine: TypeAlias = tuple[
    bodies.Id, bodies.Count, bodies.Id, bodies.Count, bodies.Count, bodies.Count, bodies.Count, bodies.Count
]
CLOCK_LINE: Final[TypeAdapter[ClockLine]] = TypeAdapter(ClockLine)
LINE_BYTES_MAX: Final = 4096

SHARD = {"name": "shard-0", "addresses": ["http://127.0.0.1:8701"], "version": "0.1.0"}
BEAT = {"epoch": 1, "metrics": {"pushes_per_s": 120.0}, "partitions": [["demo", 1, 0, 4294967297, 7, 5, 0, 0, 0, 0]]}


@router.post(
    "/shards",
    status_code=201,
    responses=response_doc(201, "Joined", answers.JoinedShard),
    openapi_extra=request_body(bodies.JoinShard, SHARD),
)
@role("node")
async def join_shard(request: Request) -> Response:
    """Register a shard process that starts; an older process of the same name is declared dead at once.

    `?redis_term=` is the leader term that the shard found in its Redis (0: none), `?redis_leader=` the leader's id.  If
    the term is lower than the scheduler's, or the leader another one, the shard uses another Redis than the
    schedulers, and the answer is 409 `conflict`.  It is, too, for a shard of another version than the scheduler's,
    which might take what it is told in another sense; the shard asks again until both have been upgraded.
    """
    b, term = await read(request, bodies.JoinShard), number_of(request, "redis_term", None)
    if b.version not in ("", __version__):
        detail = f"shard '{b.name}' has version {b.version:.60}, the leading scheduler {__version__}"
        raise problem("conflict", detail, hint="upgrade all nodes together: docs/operations.md, Upgrade")
    lease = service(request).lease
    schedulers = {s.url.rstrip("/") for s in lease.schedulers}
    if (wrong := next((a for a in b.addresses if a.rstrip("/") in schedulers), None)) is not None:
        hint = "give the shard its own: --advertise, or PARAMSERVER_ADVERTISE"
        raise problem(
            "invalid_field", f"addresses: {wrong} is the address of a scheduler", hint=hint, where="addresses"
        )
    other = request.query_params.get("redis_leader", lease.id) != lease.id
    return await reply(request, lambda n: io.JoinShard(n, **vars(b), redis_term=term, other_leader=other))


@router.put(
    "/shards/{name}",
    responses=response_doc(200, "Alive", answers.ShardBeat),
    openapi_extra=request_body(bodies.ShardHeartbeat, BEAT),
)
@role("node")
async def shard_heartbeat(request: Request, name: str) -> Response:
    """Renew a shard's lease, and report what it serves and has stored.

    After 409 `fenced` the shard owns nothing and must join again.  Success and error both contain the leader's `term`:
    a shard ignores the answers of a deposed leader, which may not have noticed that it was replaced.
    """
    b = await read(request, bodies.ShardHeartbeat, limits.SHARD_HEARTBEAT_BYTES_MAX)
    term = service(request).read.term
    with _in_term(term):
        answer = await ask(request, lambda n: io.ShardHeartbeat(n, name, **vars(b)))
    return respond(request, {**(answer.body or {}), "term": term}, answer.status)


@contextmanager
def _in_term(term: int) -> Iterator[None]:
    """Add the term to errors, so that a shard can ignore those of a deposed leader."""
    try:
        yield
    except PsError as error:
        raise error.plus(term=term) from error


@router.post(
    "/shards/{name}/clocks", status_code=204, responses=response_doc(204, "The body has ended, or this scheduler stops")
)
@role("node")
async def clocks(request: Request, name: str) -> Response:
    """Report iterations that workers have ended with a push, one line each, in a body that need not end.

    A line is `[model, generation, worker, epoch, push number, clock, timeline, shards]`, where `shards` is the number
    of shards that the push went to.  Once all of them have sent it, it counts as the worker's own report of that clock.
    The answer comes when the body ends, this scheduler stops, or it refuses a line.  A standby forwards the request to
    the leader if it has a `Content-Length`; else it answers 503 at once.
    """
    no_body_deadline(request.scope)
    epoch = _needed_epoch(request)
    runtime = service(request).runtime

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
    """Parse one line; raises RequestError (`malformed`)."""
    try:
        return CLOCK_LINE.validate_json(line)
    except ValidationError as e:
        raise problem("malformed", f"invalid clock report: {line[:100]!r}") from e


def _needed_epoch(request: Request) -> int:
    epoch = number_of(request, "epoch", None)
    if epoch is None:
        raise problem("malformed", "query parameter 'epoch' is required")
    return epoch


@router.post("/shards/{name}/drain", responses=response_doc(200, "Its partitions move to the others", answers.Targets))
@role("node")
async def drain_shard(request: Request, name: str) -> Response:
    """Move all partitions of a shard that is about to stop to other shards; sent by that shard, with its `?epoch=`.

    `targets` in the answer is the number of other shards that can take partitions.  With `?cut=1`, which a shard sends
    once it serves no more, its synchronous models at level `applied` are stored where they stand.
    """
    epoch, cut = _needed_epoch(request), bool(number_of(request, "cut", 0))
    return await reply(request, lambda n: io.SetShardState(n, name, "draining", epoch, cut=cut))


@router.delete("/shards/{name}", status_code=204, responses=response_doc(204, "Left"))
@role("node")
async def leave_shard(request: Request, name: str) -> Response:
    """Deregister a shard that stops, with its `?epoch=`; its partitions are given to other shards at once.

    With `?stored=1`, which a shard sends once it has stored everything, the answer may be 200 `{"left": false}`: a
    synchronous model would lose a commit that the shard has not heard of.  That is being stored; ask again.
    """
    epoch, stored = _needed_epoch(request), bool(number_of(request, "stored", 0))
    return await reply(request, lambda n: io.LeaveShard(n, name, epoch, stored=stored))


@router.post(
    "/models/{m}/uploaded",
    status_code=204,
    responses=response_doc(204, "Noted"),
    openapi_extra=request_body(bodies.Uploaded, {"name": "w"}),
)
@role("node")
async def uploaded(request: Request, m: str) -> Response:
    """Report that all owners which lacked the initial values of a parameter now have them; with `partial`, some."""
    b = await read(request, bodies.Uploaded)
    return await reply(request, lambda n: io.ParameterUploaded(n, m, **vars(b)))


@router.post(
    "/models",
    status_code=201,
    responses=response_doc(201, "Created; every partition is served", answers.Model, ["Location"]),
    openapi_extra=request_body(answers.Spec.ref(), answers.SPEC),
)
@role("admin")
async def create_restored(request: Request) -> Response:
    """Create a model, as `POST /models` does, that is `initializing` until a client has set it to its checkpoint.

    `X-Upload-Token` is as there; with it, DELETE removes the model until `restored` has reported the end.
    """
    return await create(request, restore=True)


@router.post(
    "/models/{m}/restored",
    responses=response_doc(200, "Noted", answers.Model),
    openapi_extra=request_body(
        bodies.Restored, {"generation": 1, "timeline": 0, "version": 400, "given": [[0, 4294967297]]}
    ),
)
@role("node")
async def restored(request: Request, m: str) -> Response:
    """Report that a client has set every partition to a checkpoint of its own.

    `workers` has the checkpoint's worker states, for workers that join from now on.  A model whose values were awaited
    is `ready`, or 409 `conflict` if it is not on `timeline` any more, because it has lost some.  A model in sync mode
    that is still on `timeline` begins a new one.  Either gets 409 `conflict` if a partition is not owned under the
    token that `given` has for it: set that one again, under the one of the model's document.  So does a model in sync
    mode on another timeline if none is: a death has undone the restore.  Else that report is taken for a repeated one.
    """
    b = await read(request, bodies.Restored)
    return await reply(request, lambda n: io.ModelRestored(n, m, **vars(b)))


@router.get(
    "/models/{m}/worker",
    responses=response_doc(200, "Its newest epoch", answers.Membership),
)
@role("node")
async def find_worker(request: Request, m: str, worker: str) -> Response:
    """Return the newest epoch issued to `?worker=`, live or dead, and the generation of the model that it is of.

    404 `unknown_worker` if it never joined.
    """
    s = service(request)
    return respond(request, s.read.membership(m, worker, s.now))


@router.get("/feed", responses=response_doc(200, "One JSON document per line, without end"))
@role("node")
async def feed(request: Request) -> StreamingResponse:
    """Stream the whole state once, then each change, as one JSON document per line.

    The documents are maps, models, rosters, commits and deletions of models; a `ping` follows the initial state and
    each second of silence.  With `?shard=` and `?epoch=` the answer is 409 `fenced` if that shard is dead or replaced.
    """
    runtime = service(request).runtime
    with _in_term(runtime.core.read.term):
        opened = await open_feed(runtime, request.query_params.get("shard"), number_of(request, "epoch", None))
    return StreamingResponse(opened.lines(), media_type="application/x-ndjson")
