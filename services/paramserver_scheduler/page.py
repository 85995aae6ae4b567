"""The status page: static files of this package, with no build step and nothing loaded from other hosts."""

from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.staticfiles import StaticFiles

from paramserver_node.roles import role

router = APIRouter(include_in_schema=False)

INDEX: Final = "index.html"
_FILES: Final = StaticFiles(packages=[("paramserver_scheduler", "static")])
_HEADERS: Final = {
    # Scripts and styles from this origin only, none inline: a name received over the network cannot run as code.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Revalidated on each load (usually 304), so the page and its modules are always of the same version.
    "cache-control": "no-cache",
}


@router.get("/")
@role("open")
async def index(request: Request) -> Response:
    """Serve the status page; it redirects to the login itself if it needs a token."""
    return await _serve(request, INDEX)


@router.get("/static/{name:path}")
@role("open")
async def asset(request: Request, name: str) -> Response:
    """Serve a script, stylesheet or image of the page."""
    return await _serve(request, name)


async def _serve(request: Request, name: str) -> Response:
    answer = await _FILES.get_response(name, request.scope)
    answer.headers.update(_HEADERS)
    return answer
