"""The head of an HTTP/2 request: a block of headers, which is checked and becomes an ASGI scope."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl

from paramserver.wire.http2 import Header

OF_A_CONNECTION: Final = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
"""Header fields that HTTP/2 does not have (RFC 9113, 8.2.2)."""
_NAME: Final = re.compile(rb"[a-z0-9!#$%&'*+.^_`|~-]+")
"""The name of a header field: a token (RFC 9110, 5.6.2) in lower case (RFC 9113, 8.2.1)."""
_METHOD: Final = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_UNFIT: Final = re.compile(rb"[\0\r\n]|\A[ \t]|[ \t]\Z")
"""What no value of a header field may contain (RFC 9113, 8.2.1): HTTP/1.1 could not pass it on as it is."""
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_OF_A_REQUEST: Final = {b":method", b":scheme", b":path", b":authority"}


class RequestHead(NamedTuple):
    """The parsed headers of a request."""

    scope: dict[str, Any]
    """The request's part of the ASGI scope."""
    length: int | None
    """Announced length of the body, if any."""
    waits: bool = False
    """Whether the client waits to be told to send the body (RFC 9110, 10.1.1)."""


TRAILERS: Final = RequestHead({}, None)
"""In place of a head: the fields are those of no request, but may follow a body."""


def request_of(headers: Sequence[Header]) -> RequestHead | None:
    """Parse the headers of a request; returns None if they are not valid as such (RFC 9113, 8.2 and 8.3).

    Without any pseudo-header they are `TRAILERS`.
    """
    special: dict[bytes, bytes] = {}
    rest: list[Header] = []
    cookies: list[bytes] = []
    length: int | None = None
    host: bytes | None = None
    waits = False
    for name, value in headers:
        if name.startswith(b":"):
            if rest or cookies or name in special or name not in _OF_A_REQUEST or _UNFIT.search(value):
                return None
            special[name] = value
        elif not _NAME.fullmatch(name) or name in OF_A_CONNECTION or _UNFIT.search(value):
            return None
        elif name == b"te" and value.lower() != b"trailers":
            return None
        elif name == b"cookie":
            cookies.append(value)
        else:
            rest.append((name, value))
            if name == b"content-length":
                if not _LENGTH.fullmatch(value) or length not in (None, int(value)):
                    return None
                length = int(value)
            elif name == b"host":
                if host is not None:
                    return None
                host = value
            elif name == b"expect":
                waits = value.lower() == b"100-continue"
    if cookies:  # they may be split into several fields (RFC 9113, 8.2.3)
        rest.append((b"cookie", b"; ".join(cookies)))
    if not special:
        return TRAILERS
    method, path = special.get(b":method", b""), special.get(b":path", b"")
    if not _METHOD.fullmatch(method) or b":scheme" not in special or not path.startswith(b"/"):
        return None
    if authority := special.get(b":authority"):
        if host not in (None, authority):
            return None
        if host is None:
            rest.insert(0, (b"host", authority))
    raw, _, query = path.partition(b"?")
    scope = {
        "method": method.decode("latin-1"),
        "path": unquote(raw.decode(errors="replace")),
        "raw_path": raw,
        "query_string": query,
        "headers": rest,
    }
    return RequestHead(scope, length, waits)


def scope_of(transport: asyncio.Transport, root_path: str) -> dict[str, Any]:
    """Return the part of the ASGI scope that all requests of a connection have in common."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "2",
        "server": get_local_addr(transport),
        "client": get_remote_addr(transport),
        "scheme": "https" if is_ssl(transport) else "http",
        "root_path": root_path,
    }
