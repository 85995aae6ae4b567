"""/login: admits a browser by a token typed into a form, or by the one-time link that each scheduler logs.

Any scheduler accepts the link of any other, once: its code is signed with the secret that they share.  Both set a
cookie that permits reading only, until it or the token expires.
"""

import time
from html import escape
from typing import Final
from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response

from paramserver_node import negotiate, tokens
from paramserver_node.access import Access
from paramserver_node.roles import role
from paramserver_node.tokens import Holder

router = APIRouter(include_in_schema=False)

LINK_S: Final = 600.0
"""How long the logged link is valid."""
LINK_HOLDER: Final = Holder("reader", "page", 0)
"""Holder in whose name the link's cookie is issued."""
USED_MAX: Final = 1024
"""With so many used codes, those that have expired are forgotten."""
COOKIE_S: Final = 7 * 24 * 3600
FORM_BYTES_MAX: Final = 4096

_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",  # never send an address that contains the link's code
    "cache-control": "no-store",
}
_FORM: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>paramserver</title>
<link rel="icon" href="static/icon.svg">
<link rel="stylesheet" href="static/page.css">
</head>
<body>
<header><h1><img src="static/icon.svg" alt="" width="20" height="20"> paramserver</h1></header>
<main>
<form method="post">
  <p role="alert">{message}</p>
  <p><label>Token <input name="token" type="password" autocomplete="off" required autofocus></label>
  <button>Open</button></p>
  <p class="dim"><code>psctl token reader</code> prints one; run it where the cluster's secret is available.</p>
</form>
</main>
</body>
</html>
"""


class Login:
    """Issues one scheduler's cookies: to every bearer of a valid token, and once for each link that is still valid."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._used: dict[str, int] = {}
        """Codes redeemed since this process started, with their expiry (Unix time)."""

    def link(self) -> str:
        """Return path and query of a new link that admits one browser at each scheduler within `LINK_S`."""
        return f"/login?once={tokens.make_code(self._access.keys[0], int(time.time() + LINK_S))}"

    def redeem(self, code: str) -> str | None:
        """Return the `Set-Cookie` value for a link's code; None if the code is wrong, used or expired."""
        now_s = time.time()
        expires_at_s = tokens.code_expires_at_s(code, self._access.keys)
        if expires_at_s is None or expires_at_s <= now_s or code in self._used:
            return None
        if len(self._used) >= USED_MAX:  # not before: if the clock is set back, those that have expired are valid again
            self._used = {c: at_s for c, at_s in self._used.items() if at_s > now_s}
        self._used[code] = expires_at_s
        return self._access.cookie(LINK_HOLDER, COOKIE_S)

    def enter(self, token: str) -> str | None:
        """Return the `Set-Cookie` value for a token; None if it is not valid."""
        holder = self._access.holder(token)
        return None if holder is None else self._access.cookie(holder, COOKIE_S)


@router.get("/login")
@role("open")
async def form(request: Request) -> Response:
    """Show the form, or redirect to the status page if the link's code is given or no token is needed."""
    login: Login | None = request.app.state.login
    if login is None:
        return _to_page(None)
    code = request.query_params.get("once")
    if code is None:
        return _ask("This cluster requires a token.", 200)
    cookie = login.redeem(code)
    if cookie is None:
        return _ask("This link has already been used or has expired.", 401)
    return _to_page(cookie)


@router.post("/login")
@role("open")
async def enter(request: Request) -> Response:
    """Accept the form; a valid token sets the cookie and redirects to the status page."""
    login: Login | None = request.app.state.login
    if login is None:
        return _to_page(None)
    body = await negotiate.read_body(request, FORM_BYTES_MAX)
    token = parse_qs(body.decode("latin-1")).get("token", [""])[0].strip()
    cookie = login.enter(token)
    return _ask("This token is invalid, expired or revoked.", 401) if cookie is None else _to_page(cookie)


def _to_page(cookie: str | None) -> Response:
    headers = {**_HEADERS, "location": "./"}
    if cookie is not None:
        headers["set-cookie"] = cookie
    return Response(status_code=303, headers=headers)


def _ask(message: str, status: int) -> Response:
    # A 401 must name a scheme (RFC 9110, 15.5.2); browsers have no dialog for this one.
    headers = _HEADERS if status != 401 else {**_HEADERS, "www-authenticate": 'Bearer realm="paramserver"'}
    return Response(_FORM.format(message=escape(message)), status, headers, media_type="text/html; charset=utf-8")
