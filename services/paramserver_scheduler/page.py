"""The status page: static files of this package, with no build step and nothing loaded from other hosts."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from fastapi import APIRouter, Request, Response

from paramserver.errors import problem
from paramserver_node.conditions import Conditions
from paramserver_node.roles import role

router = APIRouter(include_in_schema=False)

INDEX: Final = "index.html"
_KINDS: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS: Final = {
    # Scripts and styles from this origin only, none inline: a name received over the network cannot run as code.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Revalidated on each load (usually 304), so the page and its modules are always of the same version.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page."""

    body: bytes
    media_type: str
    etag: str


@router.get("/")
@role("open")
async def index(request: Request) -> Response:
    """Serve the status page; it redirects to the login itself if it needs a token."""
    return _serve(request, INDEX)


@router.get("/static/{name:path}")
@role("open")
async def asset(request: Request, name: str) -> Response:
    """Serve a script, stylesheet or image of the page."""
    return _serve(request, name)


def _serve(request: Request, name: str) -> Response:
    found = assets().get(name)
    if found is None:
        raise problem("not_found", f"the page has no file {name!r:.80}")
    headers = {**_HEADERS, "etag": found.etag}
    if Conditions.of(request.headers).unchanged(found.etag):
        return Response(status_code=304, headers=headers)
    return Response(found.body, headers=headers, media_type=found.media_type)


@cache
def assets() -> dict[str, Asset]:
    """All files of known types below `static`, by their paths there; read once."""
    return dict(_read(files("paramserver_scheduler") / "static", ""))


def _read(folder: Traversable, prefix: str) -> list[tuple[str, Asset]]:
    found: list[tuple[str, Asset]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _read(entry, f"{prefix}{entry.name}/")
        elif (kind := _KINDS.get(entry.name.rpartition(".")[2])) is not None:
            body = entry.read_bytes()
            found.append((prefix + entry.name, Asset(body, kind, f'"{hashlib.sha256(body).hexdigest()[:20]}"')))
    return found
