"""Parameter values and whole partitions: forwarded to shards, streamed, so that one address is enough."""

import itertools
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from paramserver.errors import problem
from paramserver.wire.frame import MEDIA_TYPE
from paramserver_node.forward import FORWARDED_TO_SHARD
from paramserver_node.queries import takes_query
from paramserver_node.roles import role
from paramserver_scheduler import value_docs as docs
from paramserver_scheduler.requests import response_doc, service

router = APIRouter(tags=["data"])

_turns = itertools.count()


@router.post("/push", responses=docs.PUSH_ANSWERS, openapi_extra=docs.PUSH_BODY)
@role("worker")
async def push(request: Request) -> Response:
    """Push gradients by parameter name.

    Each tensor is nested lists in JSON, `{dtype, shape, data}` in msgpack. `worker`, `epoch` and `seq` come together or
    not at all and make the push safe to repeat; so does the header `Idempotency-Key`. `ranges` sends flat element
    ranges of parameters. JSON has 262,144 numbers at most; frames are for more.
    """
    return await hand_over(request)


@router.post("/pull", responses=docs.PULL_ANSWERS, openapi_extra=docs.PULL_BODY)
@role("reader")
async def pull(request: Request) -> Response:
    """Pull parameters by name.

    `names` may be patterns such as `layers.*.weight`; left out, everything comes. With `min_version` the answer waits
    up to `wait_s` seconds, then it is 412 `version_not_reached`; with `min_clock` too, for that many commits in mode
    sync.
    """
    return await hand_over(request)


@router.post("/pushpull", responses=docs.PUSHPULL_ANSWERS, openapi_extra=docs.PUSHPULL_BODY)
@role("worker")
async def pushpull(request: Request) -> Response:
    """Push gradients, then pull, in one round trip; `push` in the answer is what the push alone would have got."""
    return await hand_over(request)


@router.get("/pull/{m}/{name:path}", response_class=Response, responses=docs.NPY_ANSWERS)
@router.get("/models/{m}/params/{name:path}", response_class=Response, responses=docs.NPY_ANSWERS)
@role("reader")
async def pull_npy(request: Request, m: str, name: str) -> Response:
    """Pull one parameter as a .npy file with an `ETag`, at either path.

    304 if `If-None-Match` matches, 412 if `If-Match` does not.
    """
    return await hand_over(request)


@router.put("/models/{m}/params/{name:path}", responses=docs.ASSIGN_ANSWERS, openapi_extra=docs.ASSIGN_BODY)
@role("worker")
async def assign(request: Request, m: str, name: str, start: int | None = None, stop: int | None = None) -> Response:
    """Assign a parameter's value, or upload its initial value with the header `X-Upload-Token`.

    With `?start=` and `?stop=` it is a 1-D range of the parameter's elements in C order, for values that are too large
    for one request; ranges of an initial value begin and end where partitions do. An assignment honors `If-Match` and
    `If-None-Match` (412 `precondition_failed`), except of a range. The token comes with the answer to `POST /models`.
    """
    return await hand_over(request)


@router.get(
    "/internal/models/{m}/partitions/{index}",
    tags=["internal"],
    response_class=Response,
    responses=response_doc(200, "The partition's whole state", others=[MEDIA_TYPE]),
)
@role("node")
@takes_query("generation", "cut")
async def read_partition(request: Request, m: str, index: int) -> Response:
    """Read a partition's whole state, for a client that saves a checkpoint to a folder and cannot reach its owner.

    Query and answer are those of the owner's `GET /internal/state/{m}/{index}`.
    """
    return await _to_owner(request, m, index, f"/internal/state/{m}/{index}")


@router.post(
    "/internal/models/{m}/partitions/{index}",
    tags=["internal"],
    response_class=Response,
    responses=response_doc(200, "Set", others=[MEDIA_TYPE]),
    openapi_extra={"requestBody": {"required": True, "content": {MEDIA_TYPE: {}}}},
)
@role("node")
async def set_partition(request: Request, m: str, index: int) -> Response:
    """Set a partition, for a client that restores a folder and cannot reach its owner.

    Body and answer are those of the owner's `POST /internal/set/{m}`.
    """
    return await _to_owner(request, m, index, f"/internal/set/{m}")


async def _to_owner(request: Request, m: str, index: int, path: str) -> Response:
    """Forward the request to the owner of the partition, under the `path` that it has there, and return its answer.

    Raises NotFoundError (`unknown_model`), RequestError (`invalid_range`), Unavailable while it has no owner.
    """
    s = service(request)
    key = s.read.key(m)
    if not 0 <= index < s.read.spec(key).partitions:
        raise problem("invalid_range", f"model '{m}' has no partition {index}")
    there = {**request.scope, "path": path, "raw_path": path.encode()}  # of a model that exists: its name is ASCII
    return await _forwarded(Request(there, request.receive), [s.read.owner(key, index)])


async def hand_over(request: Request) -> Response:
    """Forward the request to a live shard, starting with another one each time, and return its answer."""
    s = service(request)
    live = [shard["addresses"] for shard in s.read.map()["shards"].values() if shard["alive"]]
    if not live:
        raise problem("no_shards", "no shard is alive", hint="start one: paramserver-shard --scheduler URL")
    turn = next(_turns) % len(live)
    urls = [a for addresses in live[turn:] + live[:turn] for a in addresses if a.startswith("http")]
    return await _forwarded(request, urls)


async def _forwarded(request: Request, urls: Sequence[str]) -> Response:
    return await service(request).forwarder.forward(request, urls, headers={FORWARDED_TO_SHARD: "1"})
