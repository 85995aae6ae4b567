"""Hands a request on to another node, streaming both ways: the one-address rule."""

from collections.abc import AsyncIterator, Sequence
from typing import Final

import httpx
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from paramserver.errors import PsError, problem

MARK: Final = "x-paramserver-forwarded"
"""Set on what a shard sends on to another node: the receiver must not forward it again."""

_HOP_BY_HOP: Final = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"host", b"expect", b"x-request-id", b"date", b"server",
}  # fmt: skip
_TIMEOUT: Final = httpx.Timeout(connect=2.0, read=75.0, write=75.0, pool=10.0)


class Forwarder:
    """A pool of connections to other nodes; `aclose()` ends it."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=512, max_keepalive_connections=64, keepalive_expiry=30.0)
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, limits=limits, trust_env=False, follow_redirects=False)

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def forward(
        self, request: Request, urls: Sequence[str], *, mark: bool, code: str = "unavailable"
    ) -> Response:
        """The answer of the first of `urls` that can be reached, to this very request.

        Once the body has begun to flow there is no second try; raises Unavailable (`code`) when no node answered.
        """
        path = request.scope.get("raw_path") or request.url.path.encode()
        target = path.decode("latin-1").split("?")[0]
        if query := request.scope.get("query_string", b""):
            target += "?" + query.decode("latin-1")
        headers = [(k, v) for k, v in request.headers.raw if k.lower() not in _HOP_BY_HOP]
        headers.append((b"x-request-id", str(request.scope.get("state", {}).get("request_id", "")).encode()))
        if mark:
            headers.append((MARK.encode(), b"1"))
        body = _Body(request)
        last: Exception | None = None
        for url in urls:
            if body.started:
                break
            outgoing = self._client.build_request(
                request.method,
                url.rstrip("/") + target,
                headers=headers,
                content=body.pieces() if body.expected else None,
            )
            try:
                answer = await self._client.send(outgoing, stream=True)
            except (httpx.TransportError, httpx.InvalidURL) as e:
                last = e
                continue
            except ClientDisconnect:
                raise problem("malformed", "the body was cut off") from None
            kept = [(k.lower(), v) for k, v in answer.headers.raw if k.lower() not in _HOP_BY_HOP]
            response = StreamingResponse(
                answer.aiter_raw(), answer.status_code, background=BackgroundTask(answer.aclose)
            )
            response.raw_headers = kept
            return response
        raise _unreachable(code, last)


class _Body:
    """The request's body, read once; remembers whether any of it was taken."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.started = False
        length = request.headers.get("content-length")
        self.expected = "transfer-encoding" in request.headers or (
            length != "0" if length is not None else request.method in ("POST", "PUT", "PATCH")
        )

    async def pieces(self) -> AsyncIterator[bytes]:
        self.started = True
        async for piece in self._request.stream():
            if piece:
                yield piece


def _unreachable(code: str, last: Exception | None) -> PsError:
    why = f": {type(last).__name__} {last}".rstrip() if last is not None else ""
    return problem(code, f"the node that serves this does not answer{why}")
