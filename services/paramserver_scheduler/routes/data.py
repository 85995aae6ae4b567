"""/push, /pull, /pushpull and parameter values: forwarded to a live shard, streamed, so that one address is enough."""

import itertools

from fastapi import APIRouter, Request, Response

from paramserver.errors import problem
from paramserver_node.roles import role
from paramserver_scheduler.exchange import request_body, response_doc, service

router = APIRouter(tags=["data"])

_turns = itertools.count()

PUSH = {"model": "demo", "grads": {"w": [[0.1, 0.2]]}, "worker": "w0", "epoch": 1, "seq": 7}
PUSHED = {
    "model": "demo",
    "version": 7,
    "state": "applied",
    "duplicate": False,
    "durable_version": 5,
    "incarnation": 1,
    "timeline": 0,
}
PULL = {"model": "demo", "names": ["w"], "min_version": 7, "wait_s": 5}
PULLED = {"model": "demo", "version": 7, "incarnation": 1, "timeline": 0, "params": {"w": [[0.1, 0.2]]}}


@router.post(
    "/push",
    responses=response_doc(200, "Applied (202: staged or buffered)", PUSHED),
    openapi_extra=request_body(None, PUSH),
)
@role("worker")
async def push(request: Request) -> Response:
    """Push gradients by parameter name.

    `worker`, `epoch` and `seq` are given together or not at all; with them the push can safely be repeated. The request
    is forwarded to a live shard, whose API page has the details of this route.
    """
    return await hand_over(request)


@router.post("/pull", responses=response_doc(200, "The values", PULLED), openapi_extra=request_body(None, PULL))
@role("reader")
async def pull(request: Request) -> Response:
    """Pull parameters by name.

    With `min_version` the answer waits up to `wait_s` seconds for that version, then it is 412 `version_not_reached`.
    The request is forwarded to a live shard, whose API page has the details of this route.
    """
    return await hand_over(request)


@router.post(
    "/pushpull",
    responses=response_doc(200, "The values, and what the push did", {**PUSHED, **PULLED, "push": PUSHED}),
    openapi_extra=request_body(None, {**PUSH, "names": ["w"]}),
)
@role("worker")
async def pushpull(request: Request) -> Response:
    """Push gradients, then pull the resulting values, in one round trip.

    The request is forwarded to a live shard, whose API page has the details of this route.
    """
    return await hand_over(request)


@router.head("/pull/{m}/{name:path}", include_in_schema=False)
@router.get("/pull/{m}/{name:path}", responses=response_doc(200, "A .npy file, with an ETag"))
@role("reader")
async def pull_npy(request: Request, m: str, name: str) -> Response:
    """Pull one parameter as a .npy file with an `ETag`; 304 if `If-None-Match` matches, 412 if `If-Match` does not."""
    return await hand_over(request)


@router.put(
    "/models/{m}/params/{name:path}",
    responses=response_doc(200, "Assigned", PUSHED),
    openapi_extra=request_body(None, [[0.0, 1.0]]),
)
@role("worker")
async def assign(request: Request, m: str, name: str) -> Response:
    """Assign a parameter's value, or upload its initial value with the header `X-Upload-Token`.

    An assignment honors `If-Match` and `If-None-Match` (412 `precondition_failed`). The token comes with the answer to
    `POST /models`.
    """
    return await hand_over(request)


async def hand_over(request: Request) -> Response:
    """Forward the request to a live shard, starting with another one each time, and return its answer."""
    s = service(request)
    live = [shard["addresses"] for shard in s.read.map()["shards"].values() if shard["alive"]]
    if not live:
        raise problem("no_shards", "no shard is alive", hint="start one: paramserver-shard --scheduler URL")
    turn = next(_turns) % len(live)
    urls = [a for addresses in live[turn:] + live[:turn] for a in addresses if a.startswith("http")]
    return await s.forwarder.forward(request, urls, by_shard=False)
