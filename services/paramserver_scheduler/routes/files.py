"""Files of checkpoints: each scheduler hands out those in its own folder, and the leader those of the others too."""

import asyncio
from typing import cast

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse

from paramserver.errors import problem
from paramserver_node.roles import role
from paramserver_scheduler.checkpoints import CheckpointStore, check_name
from paramserver_scheduler.exchange import gives, service
from paramserver_scheduler.holders import FILES, file_path

router = APIRouter(tags=["checkpoints"])


@router.get("/models/{m}/checkpoints/{name}/{file}", responses=gives(200, "The file"))
@role("reader")
async def download(request: Request, m: str, name: str, file: str) -> Response:
    """One file of a checkpoint: `manifest.json`, `model.safetensors`, `optimizer.safetensors` or `workers.json`.

    It comes from the scheduler that wrote it; 503 `unavailable` while that one does not run.
    """
    s = service(request)
    if _held(request, m, name, file):
        return _answer(request, m, name, file)
    holder = str(s.read.checkpoint(m, check_name(name))["scheduler"])
    url = s.jobs.holders.url(holder)
    if url == s.url:
        raise _unknown(m, name, file)
    path = file_path(m, name, file)
    scope = {**request.scope, "path": path, "raw_path": path.encode(), "query_string": b""}
    return await s.forwarder.forward(Request(scope, request.receive), [url], mark=False)


@router.get("/internal/checkpoints/{m}/{name}/{file}", responses=gives(200, "The file"))
@role("reader")  # as `download`, which hands requests on to it in the caller's name
async def own_file(request: Request, m: str, name: str, file: str) -> Response:
    """One file of a checkpoint in this scheduler's own folder, whether it leads or not."""
    return _answer(request, m, name, file)


@router.delete("/internal/checkpoints/{m}/{name}/manifest.json", status_code=204, responses=gives(204, "Gone"))
@role("node")
async def remove_own(request: Request, m: str, name: str, creation: str | None = None) -> Response:
    """Delete this scheduler's own copy of a checkpoint, if it is of that creation of the model. Repeatable."""
    await asyncio.to_thread(_store(request).remove, m, name, creation)
    return Response(status_code=204)


def _store(request: Request) -> CheckpointStore:
    return cast(CheckpointStore, request.app.state.checkpoints)


def _held(request: Request, m: str, name: str, file: str) -> bool:
    return file in FILES and (_store(request).path(m, name) / file).is_file()


def _answer(request: Request, m: str, name: str, file: str) -> Response:
    if not _held(request, m, name, file):
        raise _unknown(m, name, file)
    kind = "application/json" if file.endswith(".json") else "application/octet-stream"
    return FileResponse(_store(request).path(m, name) / file, media_type=kind)


def _unknown(m: str, name: str, file: str) -> Exception:
    return problem(
        "unknown_checkpoint", f"there is no file '{file:.80}' of a checkpoint '{name:.80}' of model '{m:.80}'"
    )
