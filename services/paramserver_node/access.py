"""Access control: by bearer tokens if the node has a secret, else for callers on its own machine only.

The `@role` mark of a route says who may use it.  A route without a mark requires an admin's token, and a path without a
route requires any valid token.  With the setting `insecure`, everyone may do everything.
"""

import ipaddress
import logging
import re
import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import Scope

from paramserver.core.urls import is_loopback
from paramserver.errors import PsError, problem
from paramserver.limits import TOKENS_KNOWN_MAX
from paramserver.net.credentials import Credentials
from paramserver_node import tokens
from paramserver_node.forward import FORWARDED_ROLE
from paramserver_node.roles import ROLES, Role, allows, role_of, routes
from paramserver_node.settings import NodeSettings

log = logging.getLogger("paramserver.node")

_FORWARDED_ROLE: Final = FORWARDED_ROLE.encode()
ACCESS_ENDS_S: Final = "access_ends_s"
"""Key in a request's state: Unix time at which its token expires; absent if it does not."""
COOKIE: Final = "paramserver"
"""Name of the cookie with a reader's token, for the status page; accepted for GET and HEAD only."""


class Access:
    """Access control of one node, by tokens made with these keys."""

    def __init__(self, keys: Iterable[bytes], revoked: Iterable[str] = (), *, secure: bool = False) -> None:
        self.keys = tuple(keys)
        self.revoked = frozenset(revoked)
        """Names of tokens that are no longer accepted."""
        self.secure = secure
        """Whether the node serves TLS; its cookies are then marked `Secure`."""
        self._known: dict[bytes, tokens.Holder] = {}
        """Holders by verified `Authorization` header.  Lookups use a keyed hash, so their timing reveals nothing."""

    @classmethod
    def of(cls, settings: NodeSettings) -> "Access | LocalOnly | None":
        """Return the access control of a node: by tokens, by machine, or none (None), if the settings say `insecure`.

        Raises RequestError (`invalid_field`) for an invalid secret, and, with the remedies, for a node that other
        machines can reach if neither `secret` nor `insecure` is set.
        """
        keys = tokens.keys_of(settings.secret)
        if keys:
            revoked = [name.strip() for name in settings.revoked.split(",") if name.strip()]
            return cls(keys, revoked, secure=bool(settings.tls_certificate))
        if is_loopback(settings.host):
            return LocalOnly()
        if settings.insecure:
            log.warning("access.open host=%s: whoever reaches this node may read, change and delete", settings.host)
            return None
        raise problem(
            "invalid_field",
            f"{settings.host} can be reached from other machines and no secret is set: anyone could read, change and "
            "delete everything.  One of these lines helps:\n"
            "  psctl secret paramserver.secret && export PARAMSERVER_SECRET_FILE=$PWD/paramserver.secret\n"
            "      (tokens; the same file for every node, and psctl token makes a client's)\n"
            "  --host 127.0.0.1\n"
            "      (this machine only)\n"
            "  --insecure\n"
            "      (no tokens, on a network where everyone may do everything)",
        )

    def holder(self, token: str) -> tokens.Holder | None:
        """Return the holder of a token; None if it is invalid, expired or revoked."""
        found = tokens.read(token, self.keys, time.time())
        return found if found is not None and found.name not in self.revoked else None

    def role(self, scope: Scope) -> Role:
        """Return the role of a request's sender, or of the client for whom a node forwards it; `open` without a token.

        Raises AuthError (`unauthorized`) for an invalid token; one in a cookie is ignored instead.
        """
        authorization = cookies = forwarded = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization = value
            elif name == b"cookie":
                cookies = value
            elif name == _FORWARDED_ROLE:
                forwarded = value
        if authorization is not None:
            holder = self._bearer(authorization)
            if holder is None:
                raise problem(
                    "unauthorized", "the token is invalid, expired or revoked", hint="create one with psctl token"
                )
            _note_end(scope, holder)
            if forwarded is not None and holder.role == "node":
                stated = forwarded.decode("latin-1")
                return next((r for r in ROLES if r == stated), "open")
            return holder.role
        if cookies is not None and scope["method"] in ("GET", "HEAD"):
            holder = self.holder(_token_in(cookies))
            if holder is not None:
                _note_end(scope, holder)
                return "reader"
        return "open"

    def _bearer(self, authorization: bytes) -> tokens.Holder | None:
        known = self._known.get(authorization)
        if known is not None and (not known.expires_at_s or time.time() < known.expires_at_s):
            return known
        scheme, _, token = authorization.decode("latin-1").partition(" ")
        holder = self.holder(token.strip()) if scheme.lower() == "bearer" else None
        if holder is not None and len(authorization) <= 2 * tokens.TOKEN_CHARS_MAX:  # spaces may be any number
            if len(self._known) >= TOKENS_KNOWN_MAX:
                self._known.clear()
            self._known[authorization] = holder
        return holder

    def cookie(self, holder: tokens.Holder, lifetime_s: int) -> str:
        """Return a `Set-Cookie` value that lets the holder's browser read: same-site, and hidden from scripts.

        The cookie holds a token of the holder's name, with which another cookie can be requested.  So it expires no
        later than the holder's own token, even before `lifetime_s`, and revoking the name revokes both.
        """
        now_s = int(time.time())
        if holder.expires_at_s:
            lifetime_s = min(lifetime_s, holder.expires_at_s - now_s)
        token = tokens.make(self.keys[0], "reader", holder.name, now_s + lifetime_s)
        secure = "; Secure" if self.secure else ""
        return f"{COOKIE}={token}; Max-Age={lifetime_s}; Path=/; HttpOnly; SameSite=Strict{secure}"


class LocalOnly:
    """Admits callers on this machine, but not web pages from elsewhere in a browser that runs on it.

    Such a page can send requests to 127.0.0.1, and can read the responses if its own host name is made to resolve to
    127.0.0.1 (DNS rebinding).  Browsers send the page's `Origin` and the `Host` that was asked for: the two must match,
    and a host name with a dot is refused, as somebody else may own it.
    """

    def check(self, scope: Scope) -> Role:
        """Return `admin`, as local callers may do everything; raises AuthError (`forbidden`) for such a page."""
        host = origin = b""
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name == b"origin":
                origin = value
        if (not host or (len(host) < 300 and _is_local(host))) and (not origin or origin.partition(b"://")[2] == host):
            return "admin"
        raise problem(
            "forbidden",
            "this node accepts requests from its own machine only, not from web pages of other origins",
            hint="set a secret (psctl secret) to use another host name",
        )


class Guard:
    """Checks the callers of an app's routes against the roles that the routes are marked with."""

    def __init__(self, app: FastAPI, access: Access) -> None:
        self._app, self._access = app, access
        self._table: _Table | None = None

    def check(self, scope: Scope) -> Role:
        """Return the caller's role; on an open route this is `open`, and no token is checked.

        Raises AuthError: `unauthorized` without a valid token, `forbidden` if the token's role is too low.
        """
        need = self._need(scope)
        if need == "open":
            return "open"
        have = self._access.role(scope)
        if allows(have, need):
            return have
        raise _refusal(have, need)

    def _need(self, scope: Scope) -> Role:
        if self._table is None:  # built on the first request: an app gets its routes after its middleware
            self._table = _Table(self._app)
        return self._table.role(scope["method"], scope["path"])


class _Table:
    """The roles of an app's routes, for faster lookup than by the app's router."""

    def __init__(self, app: FastAPI) -> None:
        self._patterns: list[tuple[re.Pattern[str], frozenset[str], Role]] = []
        self._plain: dict[tuple[str, str], Role] = {}
        """Roles by (method, path), for routes without path parameters."""
        for route in routes(app):
            if not isinstance(route, Route) or not route.methods:
                raise TypeError(f"a route of this type cannot be guarded: {route!r}")
            self._patterns.append((route.path_regex, frozenset(route.methods), role_of(route) or "admin"))
            if "{" not in route.path:
                self._plain |= {(method, route.path): self._find(method, route.path) for method in route.methods}

    def role(self, method: str, path: str) -> Role:
        """Return the role of the first route that matches, in the router's order; `reader` if none does."""
        plain = self._plain.get((method, path))
        return plain if plain is not None else self._find(method, path)

    def _find(self, method: str, path: str) -> Role:
        for pattern, methods, role in self._patterns:
            asked = method in methods or (method == "HEAD" and "GET" in methods)
            if asked and pattern.match(path):
                return role
        return "reader"


def _token_in(cookies: bytes) -> str:
    """Return the token in a Cookie header; "" if it has none.

    Other programs under this host name, on any port, set cookies in all sorts of syntax.  The standard library's parser
    is not used: before Python 3.11.10 and 3.12.6 it takes 20 s for a long one that is quoted (CVE-2024-7592).
    """
    token = ""
    for cookie in cookies.decode("latin-1").split(";"):
        name, _, value = cookie.partition("=")
        if name.strip() == COOKIE:
            token = value.strip()
    return token


def _note_end(scope: Scope, holder: tokens.Holder) -> None:
    """Note when the request's token expires, which also ends a stream that it has opened (see `middleware`)."""
    if holder.expires_at_s:
        scope.setdefault("state", {})[ACCESS_ENDS_S] = holder.expires_at_s


def _refusal(have: Role, need: Role) -> PsError:
    if have == "open":
        hint = "create one with psctl token and set PARAMSERVER_TOKEN"
        return problem("unauthorized", "this request requires a token", hint=hint)
    return problem("forbidden", f"this request requires a token with the role '{need}'; yours has '{have}'", role=need)


def guard(app: FastAPI, access: Access | LocalOnly | None) -> Guard | LocalOnly | None:
    """Return the object that checks an app's callers; None if there is no access control."""
    return Guard(app, access) if isinstance(access, Access) else access


def credentials(settings: NodeSettings) -> Credentials:
    """Return the credentials with which a node calls other nodes."""
    return Credentials.of(tokens.of_secret(settings.secret, "node"), settings.ca)


@lru_cache(maxsize=256)
def _is_local(host: bytes) -> bool:
    """Whether an authority is an address, or a name nobody can register: a single label, or one under `localhost`."""
    name = host.decode("latin-1").lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.rpartition(":")[0] or name
    if "." not in name.rstrip(".") or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
