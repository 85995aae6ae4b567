"""Who may come in: a node on loopback is open, any other shows the way to the caller's token.

The mark of a route (`@role`) says who may use it.  A route that somebody forgot to mark takes an admin's token, and a
path without a route any token.
"""

import ipaddress
import logging
import re
import time
from collections.abc import Iterable
from functools import lru_cache
from http.cookies import CookieError, SimpleCookie
from typing import Final

from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import Scope

from paramserver.client.credentials import Credentials
from paramserver.errors import PsError, problem
from paramserver.limits import TOKENS_KNOWN_MAX
from paramserver_node import tokens
from paramserver_node.forward import VOUCHED
from paramserver_node.roles import ROLES, Role, allows, role_of, routes
from paramserver_node.settings import NodeSettings, is_loopback

log = logging.getLogger("paramserver.node")

_VOUCHED: Final = VOUCHED.encode()
COOKIE: Final = "paramserver"
"""Holds a token of a reader, for the status page; taken for reading only."""


class Access:
    """Judges the callers of one node whose tokens are made with these keys."""

    def __init__(self, keys: Iterable[bytes], revoked: Iterable[str] = (), *, secure: bool = False) -> None:
        self.keys = tuple(keys)
        self.revoked = frozenset(revoked)
        """Names of tokens that count no longer."""
        self.secure = secure
        """Whether the node speaks TLS, so that its cookies go nowhere else."""
        self._known: dict[bytes, tokens.Holder] = {}
        """Who came with which header before.  A lookup goes by a keyed hash: how long it takes tells nothing."""

    @classmethod
    def of(cls, settings: NodeSettings) -> "Access | Neighbours | None":
        """Who may use a node: bearers of tokens, anyone on its machine, or everyone (None), because it was said so.

        Raises RequestError (`invalid_field`) with the lines that help, where others can reach it and it has no secret.
        """
        keys = tokens.keys_of(settings.secret)
        if keys:
            revoked = [name.strip() for name in settings.revoked.split(",") if name.strip()]
            return cls(keys, revoked, secure=bool(settings.tls_certificate))
        if is_loopback(settings.host):
            return Neighbours()
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
        """Whose token this is; None for one that does not count (any more)."""
        found = tokens.read(token, self.keys, time.time())
        return found if found is not None and found.name not in self.revoked else None

    def role(self, scope: Scope) -> Role:
        """The role of whoever sent this request: `open` for one without a token.

        Raises AuthError (`unauthorized`) for a token that does not count.
        """
        authorization = cookies = vouched = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization = value
            elif name == b"cookie":
                cookies = value
            elif name == _VOUCHED:
                vouched = value
        if authorization is not None:
            holder = self._bearer(authorization)
            if holder is None:
                raise problem("unauthorized", "the token is not valid, or not any more", hint="psctl token makes one")
            if vouched is not None and holder.role == "node":
                said = vouched.decode("latin-1")
                return next((r for r in ROLES if r == said), "open")
            return holder.role
        if cookies is not None and scope["method"] in ("GET", "HEAD"):
            holder = self.holder(_cookie(cookies.decode("latin-1")))
            if holder is not None:
                return "reader"
        return "open"

    def _bearer(self, authorization: bytes) -> tokens.Holder | None:
        known = self._known.get(authorization)
        if known is not None and (not known.expires_at_s or time.time() < known.expires_at_s):
            return known
        scheme, _, token = authorization.decode("latin-1").partition(" ")
        holder = self.holder(token.strip()) if scheme.lower() == "bearer" else None
        if holder is not None:
            if len(self._known) >= TOKENS_KNOWN_MAX:
                self._known.clear()
            self._known[authorization] = holder
        return holder

    def cookie(self, holder: tokens.Holder, lifetime_s: int) -> str:
        """The `Set-Cookie` value that lets the holder's browser read: for this site only, out of scripts' reach.

        It ends after `lifetime_s` and with the holder's own token, also where that one's name is revoked: for what is
        in it is a token itself, with which another cookie can be asked for.
        """
        now_s = int(time.time())
        if holder.expires_at_s:
            lifetime_s = min(lifetime_s, holder.expires_at_s - now_s)
        token = tokens.make(self.keys[0], "reader", holder.name, now_s + lifetime_s)
        secure = "; Secure" if self.secure else ""
        return f"{COOKIE}={token}; Max-Age={lifetime_s}; Path=/; HttpOnly; SameSite=Strict{secure}"


class Neighbours:
    """Lets in whoever is on this machine, but not the web pages of elsewhere that a browser here shows.

    Such a page can send requests to 127.0.0.1, and reads the answers too if its own name comes to mean 127.0.0.1 (DNS
    rebinding).  A browser says where a request comes from and by which name: a name with a dot is somebody else's.
    """

    def check(self, scope: Scope) -> Role:
        """`admin`, for everyone may do everything here; raises AuthError (`forbidden`) for such a page."""
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
            "this node lets in what runs on its machine, and no web page of elsewhere",
            hint="a node that is to be reached under another name takes a secret: psctl secret",
        )


class Guard:
    """Lets requests into an app, or not, by the marks of its routes."""

    def __init__(self, app: FastAPI, access: Access) -> None:
        self._app, self._access = app, access
        self._table: _Table | None = None

    def check(self, scope: Scope) -> Role:
        """The caller's role; raises AuthError: `unauthorized` without a token, `forbidden` with one of too low a role.

        A caller of an open route is not asked.
        """
        need = self._need(scope)
        if need == "open":
            return "open"
        have = self._access.role(scope)
        if allows(have, need):
            return have
        raise _refusal(have, need)

    def _need(self, scope: Scope) -> Role:
        if self._table is None:  # made with the first request: an app gets its routes after its middleware
            self._table = _Table(self._app)
        return self._table.role(scope["method"], scope["path"])


class _Table:
    """The mark of every route of an app, to be looked up faster than the app's router does."""

    def __init__(self, app: FastAPI) -> None:
        self._patterns: list[tuple[re.Pattern[str], frozenset[str], Role]] = []
        self._plain: dict[tuple[str, str], Role] = {}
        """Routes without a name in their path."""
        for route in routes(app):
            if not isinstance(route, Route) or not route.methods:
                raise TypeError(f"a route of this kind cannot be guarded: {route!r}")
            self._patterns.append((route.path_regex, frozenset(route.methods), role_of(route) or "admin"))
            if "{" not in route.path:
                self._plain |= {(method, route.path): self._find(method, route.path) for method in route.methods}

    def role(self, method: str, path: str) -> Role:
        """The mark of the first route that fits, as the router goes through them; `reader` where none does."""
        plain = self._plain.get((method, path))
        return plain if plain is not None else self._find(method, path)

    def _find(self, method: str, path: str) -> Role:
        for pattern, methods, role in self._patterns:
            if method in methods and pattern.match(path):
                return role
        return "reader"


def _refusal(have: Role, need: Role) -> PsError:
    if have == "open":
        return problem("unauthorized", "this needs a token", hint="psctl token prints one, PARAMSERVER_TOKEN takes it")
    return problem("forbidden", f"this needs a token of the role '{need}'; yours is '{have}'", role=need)


def guard(app: FastAPI, access: Access | Neighbours | None) -> Guard | Neighbours | None:
    """What asks the callers of an app, if anything does."""
    return Guard(app, access) if isinstance(access, Access) else access


def credentials(settings: NodeSettings) -> Credentials:
    """What a node shows to the others."""
    keys = tokens.keys_of(settings.secret)
    return Credentials.of(tokens.make(keys[0], "node") if keys else None, settings.ca)


@lru_cache(maxsize=256)
def _is_local(host: bytes) -> bool:
    """Whether an authority names an address, or a name that nobody can register: one word, or `localhost`."""
    name = host.decode("latin-1").lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.rpartition(":")[0] or name
    if "." not in name.rstrip(".") or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value
