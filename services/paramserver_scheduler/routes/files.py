"""Files of checkpoints: each scheduler serves those on its own disk; the leader forwards requests for the others."""

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Receive, Scope, Send

from paramserver.errors import NotFoundError, problem
from paramserver_node.conditions import Conditions
from paramserver_node.roles import role
from paramserver_scheduler.checkpoints import CheckpointStore, check_name
from paramserver_scheduler.jobs import problem_of
from paramserver_scheduler.other_schedulers import FILES, file_path, of_creation
from paramserver_scheduler.requests import response_doc, service

router = APIRouter(tags=["checkpoints"])

T = TypeVar("T")
_RANGE: Final = re.compile(r"([0-9]*)-([0-9]*)")


class _File(FileResponse):
    """A file response that honors `Range` and conditions; a malformed `Range` is ignored (RFC 9110, 14.2)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file or the requested ranges, or 304.

        Raises RequestError (`range_not_satisfiable`) if it has none of these, ConflictError (`precondition_failed`).
        """
        self.stat_result = await asyncio.to_thread(os.stat, self.path)
        self.set_stat_headers(self.stat_result)
        size, asked = self.stat_result.st_size, Headers(scope=scope)
        if Conditions.of(asked).unchanged(self.headers["etag"]):
            own = {name: self.headers[name] for name in ("etag", "cache-control")}
            await Response(status_code=304, headers=own)(scope, receive, send)
            return
        text = asked.get("range")
        if text is not None and asked.get("if-range") in (None, self.headers["etag"], self.headers["last-modified"]):
            found = _ranges(text, size)
            if found == []:
                detail = f"the file has {size} bytes, none of which is in {text!r:.80}"
                raise problem("range_not_satisfiable", detail, size_bytes=size)
            headers = MutableHeaders(raw=list(scope["headers"]))
            del headers["range"]
            if found is not None:
                headers["range"] = "bytes=" + ",".join(f"{start}-{stop - 1}" for start, stop in found)
            scope = {**scope, "headers": headers.raw}
        await super().__call__(scope, receive, send)


def _ranges(text: str, size: int) -> list[tuple[int, int]] | None:
    """Return the requested parts `[start, stop)` that the file has; None if the Range header is malformed."""
    unit, _, listed = text.partition("=")
    parts = [part for p in listed.split(",") if (part := p.strip())]
    if unit.strip().lower() != "bytes" or not parts:
        return None
    found: list[tuple[int, int]] = []
    for part in parts:
        match = _RANGE.fullmatch(part)
        if match is None or part == "-":
            return None
        first, last = (int(digits[:19]) if digits else None for digits in match.groups())
        if first is None:
            start, stop = max(0, size - (last or 0)), size
        elif last is not None and last < first:
            return None
        else:
            start, stop = first, size if last is None else min(last + 1, size)
        if start < size:
            found.append((start, stop))
    return found


@router.get(
    "/models/{m}/checkpoints/{name}/{file}",
    response_class=Response,
    responses={
        **response_doc(200, "The file", headers=["ETag", "Last-Modified", "Accept-Ranges"]),
        **response_doc(
            206,
            "The part of it that `Range` names",
            headers=["ETag", "Last-Modified", "Accept-Ranges", "Content-Range"],
        ),
        **response_doc(304, "Unchanged since the ETag in If-None-Match", headers=["ETag"]),
    },
)
@role("reader")
async def download(request: Request, m: str, name: str, file: str) -> Response:
    """Download a file of a checkpoint: `manifest.json`, `model.safetensors`, `optimizer.safetensors` or `workers.json`.

    `name` is a checkpoint in the model's list, `latest` or `best`; 503 `unavailable` if only a scheduler that is not
    running has its files. For a deleted model it is a checkpoint on the leader's own disk. `Range`, `If-Match` and
    `If-None-Match` are supported.
    """
    s = service(request)
    try:
        record, creation = s.read.checkpoint(m, check_name(name)), s.read.creation(m)
    except NotFoundError as e:
        if e.code != "unknown_model" or (path := await _local_file(request, m, name, file, None)) is None:
            raise
        return _file_response(path)
    name = record["name"]
    if (path := await _local_file(request, m, name, file, creation)) is not None:
        return _file_response(path)
    url = s.jobs.others.url(str(record["scheduler"]))
    if url == s.url:
        raise _unknown(m, name, file)
    at, query = file_path(m, name, file), urlencode(of_creation(creation))
    scope = {**request.scope, "path": at, "raw_path": at.encode(), "query_string": query.encode()}
    return await s.forwarder.forward(Request(scope, request.receive), [url])


@router.get("/internal/checkpoints/{m}/{name}/{file}", responses=response_doc(200, "The file"))
@role("reader")  # as for `download`, which forwards requests to it with the caller's role
async def own_file(request: Request, m: str, name: str, file: str, creation: str | None = None) -> Response:
    """Download a file of a checkpoint from this scheduler's own disk, whether it leads or not.

    With `?creation=` only a checkpoint of that creation of the model is served.
    """
    path = await _local_file(request, m, name, file, creation)
    if path is None:
        raise _unknown(m, name, file)
    return _file_response(path)


@router.delete(
    "/internal/checkpoints/{m}/{name}/manifest.json", status_code=204, responses=response_doc(204, "Deleted")
)
@role("node")
async def remove_own(request: Request, m: str, name: str, creation: str | None = None) -> Response:
    """Delete this scheduler's own copy of a checkpoint; idempotent.

    With `?creation=` only a checkpoint of that creation of the model is deleted.
    """
    await _on_disk(_store(request).remove, m, name, creation)
    return Response(status_code=204)


def _store(request: Request) -> CheckpointStore:
    return cast(CheckpointStore, request.app.state.checkpoints)


async def _local_file(request: Request, m: str, name: str, file: str, creation: str | None) -> Path | None:
    if file not in FILES:
        return None
    return await _on_disk(_store(request).file, m, name, file, creation)


async def _on_disk(work: Callable[..., T], *args: Any) -> T:
    """Do this in a thread; an OSError becomes the error that says what the disk refused."""
    try:
        return await asyncio.to_thread(work, *args)
    except OSError as e:
        raise problem_of(e) from e


def _file_response(path: Path) -> Response:
    # By its date alone, a cache would take the file for fresh for days (RFC 9111, 4.2.2), as that of `latest`, too.
    kind = "application/json" if path.suffix == ".json" else "application/octet-stream"
    return _File(path, headers={"cache-control": "no-cache"}, media_type=kind)


def _unknown(m: str, name: str, file: str) -> Exception:
    return problem(
        "unknown_checkpoint", f"there is no file '{file:.80}' of a checkpoint '{name:.80}' of model '{m:.80}'"
    )
