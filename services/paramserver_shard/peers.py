"""Client for frames to other shards, over HTTP/2 with prior knowledge, two connections per shard."""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, TypeVar

import numpy as np
from pyreqwest.client import Client, ClientBuilder
from pyreqwest.exceptions import PyreqwestError

from paramserver.client.credentials import Credentials
from paramserver.client.transport import translated, trusting
from paramserver.errors import PsError, Unavailable, Unreachable, from_document, problem
from paramserver.limits import BODY_BYTES_MAX, CHUNK_BYTES, JOURNAL_WAIT_S, LEASE_S, PACE_BYTES_PER_S
from paramserver.types import AnyArray
from paramserver.wire.frame import MEDIA_TYPE, Header, PullFrame, chunks, decode_header, encode_header
from paramserver_shard.buffers import U8, BufferPool

REQUEST_BASE_TIMEOUT_S: Final = LEASE_S + JOURNAL_WAIT_S + 5.0
"""Base timeout of a request: at its owner a push waits for its turn, then for the journal; the rest is network."""
CONNECT_S: Final = 2.0

H = TypeVar("H", bound=Header)


class PeerClient:
    """The client side of shard-to-shard requests."""

    def __init__(self, pool: BufferPool, credentials: Credentials) -> None:
        self._pool = pool
        self._client = _client(credentials)
        self._polling = _client(credentials)  # for requests that wait: they may take every stream of a connection

    async def call(
        self,
        url: str,
        header: Header,
        body: Sequence[AnyArray],
        of: type[H],
        *,
        wait_s: float = 0.0,
        asked_bytes: int = 0,
    ) -> tuple[H, U8]:
        """POST one frame; returns the header, decoded as `of`, and the body of the response frame.

        `wait_s` is how long the request asks the other shard to wait, `asked_bytes` the expected size of the response
        body; both extend the timeout. Raises the PsError that the other shard answered. Without an answer, raises
        Unavailable, or InDoubt if the other shard may have changed something all the same.
        """
        lost = "unavailable" if isinstance(header, PullFrame) else "in_doubt"
        prefix = encode_header(header)
        size = len(prefix) + sum(a.nbytes for a in body)
        timeout_s = REQUEST_BASE_TIMEOUT_S + wait_s + (size + asked_bytes) / PACE_BYTES_PER_S  # for the whole exchange
        client = self._polling if wait_s else self._client
        request = client.post(url).header("content-type", MEDIA_TYPE).timeout(timedelta(seconds=timeout_s))
        if size <= CHUNK_BYTES:
            request = request.body_bytes(b"".join((prefix, *(a.data.cast("B") for a in body))))
        else:
            request = request.header("content-length", str(size)).body_stream(chunks(prefix, body))
        try:
            async with request.build_streamed() as response:
                declared = int(response.get_header("content-length") or 0)
                if declared > BODY_BYTES_MAX:
                    raise problem(lost, f"{url} responded with {declared} bytes; the limit is {BODY_BYTES_MAX}")
                received = self._pool.take_bytes(declared) if declared else np.empty(0, np.uint8)
                view, at = received.data, 0
                while (chunk := await response.body_reader.read_chunk()) is not None:
                    if at + len(chunk) > declared:
                        raise problem(lost, f"{url} sent more than the content-length of its response")
                    view[at : at + len(chunk)] = chunk
                    at += len(chunk)
                status = response.status
        except PyreqwestError as e:
            error = translated(url, e, timeout_s)
            if isinstance(header, PullFrame) or isinstance(error, Unreachable):
                error = problem("unavailable", f"the shard at {url} does not answer ({error.detail})")
            raise error from e
        if status >= 300:
            raise _refusal(status, bytes(view[:at]))
        if at != declared:
            raise problem(lost, f"{url} closed the connection before its response was complete")
        try:
            head, offset = decode_header(view, of)
        except PsError as e:
            raise problem(lost, f"the response of {url} cannot be read: {e.detail}") from e
        return head, received[offset:]


def _client(credentials: Credentials) -> Client:
    return (
        trusting(ClientBuilder(), credentials)
        .default_headers(credentials.headers)
        .http2_prior_knowledge()
        .http2_max_frame_size(CHUNK_BYTES)
        .http2_initial_stream_window_size(16 * CHUNK_BYTES)
        .http2_initial_connection_window_size(16 * CHUNK_BYTES)
        .connect_timeout(timedelta(seconds=CONNECT_S))
        .no_proxy()
        .build()
    )


def _refusal(status: int, body: bytes) -> Exception:
    try:
        document = json.loads(body)
    except ValueError:
        document = {}
    error = from_document({**(document if isinstance(document, dict) else {}), "status": status})
    if error.status >= 500 and not isinstance(error, Unavailable):
        return problem("unavailable", f"another shard failed: {error.detail}")
    return error
