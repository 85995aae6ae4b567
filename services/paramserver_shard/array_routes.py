"""Routes of single parameters: read one as a .npy file, assign it, or upload its first value."""

from typing import Any

from fastapi import APIRouter, Request, Response

from paramserver.limits import NPY_BODY_BYTES_MAX
from paramserver_node import negotiate
from paramserver_node.app import FOR_HEAD
from paramserver_node.conditions import Conditions
from paramserver_node.queries import takes_query
from paramserver_node.roles import role
from paramserver_shard.accounts import account, counted
from paramserver_shard.arrays import NPY_MEDIA, SMALLER, ArrayService, read_npy
from paramserver_shard.names import push_document
from paramserver_shard.responses import ChunkedResponse
from paramserver_shard.serving import Serving
from paramserver_shard.telemetry import Telemetry


def router(serving: Serving, arrays: ArrayService, telemetry: Telemetry) -> APIRouter:
    """Return the router of `GET /pull/{m}/{name}`, and of `GET` and `PUT /models/{m}/params/{name}`."""
    routes = APIRouter()

    @routes.get("/pull/{m}/{name:path}")
    @routes.get("/models/{m}/params/{name:path}")
    @role("reader")
    async def get_array(request: Request, m: str, name: str) -> Response:
        began_s = telemetry.clock()
        serving.check()
        head = FOR_HEAD in request.scope
        grow = account(request.scope).grow
        answer = await arrays.get(m, name, Conditions.of(request.headers), grow, head=head)
        serving.check()
        headers = {
            "etag": answer.etag,
            "x-paramserver-version": str(answer.version),
            "x-paramserver-incarnation": str(answer.incarnation),
            "cache-control": "no-cache",
        }
        if answer.unchanged:
            return Response(status_code=304, headers=headers)
        telemetry.pulled(m, len(answer.body), began_s)
        if head:
            headers["content-length"] = str(len(answer.header) + answer.body_bytes)
            return Response(b"", headers=headers, media_type=NPY_MEDIA)
        return ChunkedResponse([answer.header, answer.body], NPY_MEDIA, headers)

    @routes.put("/models/{m}/params/{name:path}")
    @role("worker")
    @takes_query("start", "stop")
    async def put_array(
        request: Request, m: str, name: str, start: int | None = None, stop: int | None = None
    ) -> Response:
        serving.check()
        negotiate.check_accept(request)
        request = counted(request)
        if negotiate.media_type(request) in (NPY_MEDIA, "application/octet-stream"):
            value: Any = read_npy(await negotiate.read_body(request, NPY_BODY_BYTES_MAX, SMALLER))
        else:
            value = await negotiate.read_tensors(request)
        token, given = request.headers.get("x-upload-token"), Conditions.of(request.headers)
        done = await arrays.put(m, name, value, token, given, start, stop)
        serving.check()
        return negotiate.respond(request, push_document(done))

    return routes
