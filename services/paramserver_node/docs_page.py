"""`/docs`: the OpenAPI document as a page for reading it and trying out requests.

Its script and style are Swagger UI's, from the package fastapi-offline: nothing is loaded from the web.
"""

from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.staticfiles import StaticFiles

from paramserver_node.roles import role

router = APIRouter(include_in_schema=False)

_FILES: Final = StaticFiles(packages=[("fastapi_offline", "static")])
_POLICY: Final = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""'unsafe-inline' is for the line that starts Swagger UI, and for the styles that it writes."""


@router.get("/docs")
@role("open")
async def page(request: Request) -> Response:
    """Return the page, which then fetches the OpenAPI document itself."""
    answer = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=request.app.title,
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
    )
    answer.headers["content-security-policy"] = _POLICY
    return answer


@router.get("/docs/{name}")
@role("open")
async def file(request: Request, name: str) -> Response:
    """Return a script, stylesheet or image of the page."""
    answer = await _FILES.get_response(name, request.scope)
    answer.headers["cache-control"] = "no-cache"
    return answer
