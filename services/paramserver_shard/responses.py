"""Answers to requests by parameter name, and large ones of any kind: their limits, and how they are built and sent."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgpack
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from paramserver import kernels
from paramserver.core.shard.effects import PushDone
from paramserver.errors import problem
from paramserver.limits import BODY_BYTES_MAX, CHUNK_BYTES, JSON_ELEMENTS_MAX
from paramserver.types import ITEMSIZE
from paramserver.wire.tensor import from_f32, to_json, to_msgpack
from paramserver_node import negotiate
from paramserver_shard.buffers import INLINE_BYTES_MAX, SMALL_BYTES
from paramserver_shard.names import Pulled, PullRequest, push_document


def messages(chunks: Iterable[bytes | memoryview], size: int) -> Iterator[Message]:
    """Yield the ASGI messages of a body, or of its rest, of `size` bytes."""
    for chunk in chunks:
        size -= len(chunk)
        yield {"type": "http.response.body", "body": chunk, "more_body": size > 0}


class ChunkedResponse(Response):
    """A response whose large body is sent in chunks: servers copy what they are given, so chunks bound the copies."""

    def __init__(
        self, pieces: Sequence[bytes | memoryview], media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """`pieces` are the body, end to end; there is at least one byte."""
        self._size = sum(map(len, pieces))
        self._pieces = [b"".join(pieces)] if self._size <= CHUNK_BYTES else pieces
        super().__init__(headers={**(headers or {}), "content-length": str(self._size)}, media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        chunks = (bytes(p[at : at + CHUNK_BYTES]) for p in self._pieces for at in range(0, len(p), CHUNK_BYTES))
        for message in messages(chunks, self._size):
            await send(message)


def check_of(request: Request) -> Callable[[PullRequest], None]:
    """Return the check for pulls too large for an answer in the client's media type, to be made before any work."""
    return check_msgpack if negotiate.accepted(request) == negotiate.MSGPACK else check_json


def check_json(asked: PullRequest) -> None:
    """Refuse more numbers than a JSON answer may hold.  Raises RequestError (`too_large`)."""
    if asked.selection.size > JSON_ELEMENTS_MAX:
        detail = f"{asked.selection.size} numbers do not fit in a JSON response; the limit is {JSON_ELEMENTS_MAX}"
        raise problem("too_large", detail, hint="accept application/msgpack, or name fewer parameters or ranges")


def check_msgpack(asked: PullRequest) -> None:
    """Refuse more bytes than a msgpack answer may hold.  Raises RequestError (`too_large`)."""
    selection = asked.selection
    sizes = [stop - start for start, stop in pairwise(selection.offsets)]
    total = sum(n * ITEMSIZE[asked.dtype or p.dtype] for n, p in zip(sizes, selection.params, strict=True))
    if total > BODY_BYTES_MAX:
        detail = f"{total} bytes do not fit in a response; the limit is {BODY_BYTES_MAX}"
        raise problem("too_large", detail, hint="name fewer parameters or ranges, or pull frames")


async def respond(request: Request, pulled: Pulled, push: PushDone | None = None) -> Response:
    """Return `pull_response`, made in a thread if there is much to convert and copy.  Raises PsError."""
    if pulled.packed.nbytes <= INLINE_BYTES_MAX:
        return pull_response(request, pulled, push)
    return await asyncio.to_thread(pull_response, request, pulled, push)


def pull_response(request: Request, pulled: Pulled, push: PushDone | None) -> Response:
    """Build the answer to a pull by name, or a pushpull, in the media type that the client accepts."""
    as_msgpack = negotiate.accepted(request) == negotiate.MSGPACK
    encode = to_msgpack if as_msgpack else to_json
    own = pulled.known.layout.by_name
    params: dict[str, Any] = {}
    for name, array in pulled.params().items():
        as_dtype = pulled.dtype or own[name].dtype
        converted = from_f32(array, as_dtype)
        if not as_msgpack and not kernels.all_finite(converted.reshape(-1), as_dtype):
            hint = "pull it as float32, or accept application/msgpack"
            raise problem("non_finite", f"'{name}' holds values beyond {as_dtype}", hint=hint, where=name)
        params[name] = encode(converted, as_dtype)
    document: dict[str, Any] = {}
    if push is not None:
        document = {**push_document(push), "push": push_document(push)}
    document |= {
        "model": pulled.known.key.name,
        "version": pulled.version,
        "incarnation": pulled.incarnation,
        "timeline": pulled.timeline,
        "params": params,
    }
    if as_msgpack:
        return ChunkedResponse(packed(document), negotiate.MSGPACK)
    return ChunkedResponse([JSONResponse(document).body], negotiate.JSON)


def packed(document: Mapping[str, Any]) -> list[bytes | memoryview]:
    """Return the document as msgpack, in pieces: large data is not copied, as no other thread runs meanwhile."""
    packer = msgpack.Packer(autoreset=False)
    pieces: list[bytes | memoryview] = []

    def add(value: Any) -> None:
        if isinstance(value, Mapping):
            packer.pack_map_header(len(value))
            for key, item in value.items():
                packer.pack(key)
                add(item)
        elif isinstance(value, memoryview) and len(value) > SMALL_BYTES:
            pieces.extend((packer.bytes() + b"\xc6" + len(value).to_bytes(4, "big"), value))
            packer.reset()
        else:
            packer.pack(value)

    add(document)
    return [*pieces, packer.bytes()]
