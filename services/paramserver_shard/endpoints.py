"""`POST /push`, `/pull` and `/pushpull` as plain ASGI endpoints, so that frames stream without needless copies.

A body is read to its end before the answer begins.  One that is cut off, or longer or shorter than its header says, is
refused without side effects.
"""

from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final, TypeVar

from msgspec.structs import replace
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paramserver.core.shard.effects import PushDone
from paramserver.errors import PsError, Unavailable, problem
from paramserver.net.retry import may_be_done
from paramserver.wire.frame import MEDIA_TYPE, PullFrame, PushFrame, encode_header
from paramserver_node import negotiate
from paramserver_node.conditions import idempotency_key
from paramserver_node.middleware import omit_request_id
from paramserver_node.race import while_there
from paramserver_node.stream import BODY, TRANSFER_BYTES_MIN, BodyTransfer
from paramserver_shard.accounts import account, counted
from paramserver_shard.arriving import Arriving
from paramserver_shard.buffers import SMALL_BYTES
from paramserver_shard.frames import FrameBody, FrameService, push_reply
from paramserver_shard.names import NameService, after_push, push_document
from paramserver_shard.receiving import Body, FrameReader
from paramserver_shard.responses import check_of, messages, respond
from paramserver_shard.serving import Serving
from paramserver_shard.telemetry import Telemetry, frame_lag, name_lag
from paramserver_shard.unsent import UnsentValues

T = TypeVar("T")

_FRAME: Final = MEDIA_TYPE.encode()
_REPEATABLE: Final = "repeatable_push"


class _Endpoint:
    """Base of the three routes: handles frames, and JSON and msgpack bodies by parameter name."""

    paramserver_role = "worker"

    def __init__(
        self,
        serving: Serving,
        reader: FrameReader,
        frames: FrameService,
        names: NameService,
        telemetry: Telemetry,
        unsent: UnsentValues,
    ) -> None:
        self.check_serving = serving.check
        self._reader = reader
        self._frames = frames
        self._names = names
        self._telemetry = telemetry
        self._unsent = unsent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s = self._telemetry.clock()
        self.check_serving()
        try:
            await self._answer(scope, receive, send, began_s)
        except PsError as error:
            if "push" in error.members:
                self.recheck_serving()
            raise

    async def _answer(self, scope: Scope, receive: Receive, send: Send, began_s: float) -> None:
        for name, value in scope["headers"]:
            if name == b"content-type":
                if value == _FRAME or value.split(b";")[0].strip().lower() == _FRAME:
                    omit_request_id(scope)
                    await self.by_frame(scope, receive, send, began_s)
                    return
                break
        request = counted(Request(scope, receive))
        negotiate.check_accept(request)
        body = await negotiate.read_tensors(request)
        response = await self.by_name(request, body, began_s)
        self.recheck_serving()
        await response(scope, receive, send)

    def recheck_serving(self) -> None:
        """Check again before the answer: the process may have been paused since the request came."""
        self.check_serving()

    async def by_frame(self, scope: Scope, receive: Receive, send: Send, began_s: float) -> None:
        """Answer a frame with a frame, after `recheck_serving`."""
        raise NotImplementedError

    async def by_name(self, request: Request, body: Any, began_s: float) -> Response:
        """Answer a JSON or msgpack body."""
        raise NotImplementedError

    async def _send_values(self, scope: Scope, send: Send, answer: FrameBody) -> None:
        if answer.body_bytes < SMALL_BYTES:  # copied: it may be an element of each of a thousand partitions
            whole = answer.take()
            await send(_start(200, len(whole)))
            await send({"type": "http.response.body", "body": whole})
            return
        with self._unsent.holding(account(scope).address, answer):
            await _send_body(scope, send, answer)

    def _accepted(self, scope: Scope, arriving: Arriving, began_s: float) -> Callable[[PushDone], None]:
        """Return a callback that counts the push once it is accepted, before any wait for its commit.

        Its bytes are no longer in flight then: those that are staged or buffered count as that, and the rest is free.
        Else the pushes that wait could keep out the one that their commit needs.
        """

        def accepted(done: PushDone) -> None:
            account(scope).release()
            frame = arriving.frame
            size = 0 if frame.forwarded else arriving.size  # counted where it came from
            self._telemetry.pushed(done, size, began_s, frame.worker, frame_lag(done, frame))

        return accepted

    def _pushed_names(self, done: PushDone, size_bytes: int, body: Any, began_s: float) -> None:
        lag = name_lag(done, body.get("base_version"))
        self._telemetry.pushed(done, size_bytes, began_s, body.get("worker"), lag)


class _Pushing(_Endpoint):
    """Base of routes that push: a shard that was paused may have applied the push after it lost its partitions."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except PsError as error:
            if may_be_done(error) and _REPEATABLE not in scope["state"]:
                raise error.plus(retryable=False) from error
            raise

    async def _read_frame(self, scope: Scope, receive: Receive) -> Arriving:
        async def prepare(frame: PushFrame) -> tuple[Arriving, Body]:
            key = idempotency_key(Headers(scope=scope))
            return await self._frames.prepare_push(frame if key is None else replace(frame, key=key))

        arriving = await self._reader.read(scope, receive, PushFrame, prepare)
        frame = arriving.frame
        if frame.forwarded or frame.seq is not None or frame.key is not None:
            scope["state"][_REPEATABLE] = True
        return arriving

    def _key(self, request: Request, body: Any) -> str | None:
        """Return the `Idempotency-Key`, after noting whether the push has that or a push id."""
        key = idempotency_key(request.headers)
        if key is not None or (isinstance(body, dict) and body.get("seq") is not None):
            request.scope["state"][_REPEATABLE] = True
        return key

    def recheck_serving(self) -> None:
        """Raises InDoubt (`in_doubt`) if the shard may no longer serve."""
        try:
            self.check_serving()
        except Unavailable as error:
            detail = f"{error.detail}; it accepted the push, but may have lost ownership before that"
            raise problem(
                "in_doubt", detail, hint="retry with the same push id; without an id it may be applied twice"
            ) from error


class Push(_Pushing):
    """`POST /push`."""

    async def by_frame(self, scope: Scope, receive: Receive, send: Send, began_s: float) -> None:
        arriving = await self._read_frame(scope, receive)
        done, commit_values = await self._frames.push(arriving, self._accepted(scope, arriving, began_s))
        reply = push_reply(done, commit_values, self._frames.lease_after(arriving.frame, done, commit_values))
        status = 200 if done.state == "applied" or reply.released else 202
        self.recheck_serving()
        body = encode_header(reply)
        await send(_start(status, len(body)))
        await send({"type": "http.response.body", "body": body})

    async def by_name(self, request: Request, body: Any, began_s: float) -> Response:
        done = await self._names.push(body, self._key(request, body))
        self._pushed_names(done, account(request.scope).size_bytes, body, began_s)
        return negotiate.respond(request, push_document(done), 200 if done.state == "applied" else 202)


class Pull(_Endpoint):
    """`POST /pull`."""

    paramserver_role = "reader"

    async def by_frame(self, scope: Scope, receive: Receive, send: Send, began_s: float) -> None:
        frame = await self._reader.read(scope, receive, PullFrame, _prepare_pull)
        answer = await _while_there(receive, frame.wait_s, self._frames.pull(frame, account(scope).grow))
        self.recheck_serving()
        # Only now: pulls that waited for one version each would keep them all.
        self._unsent.check(account(scope).address, answer.body_bytes)
        await self._send_values(scope, send, answer)
        self._telemetry.pulled(frame.model, 0 if frame.forwarded else answer.values_bytes, began_s)

    async def by_name(self, request: Request, body: Any, began_s: float) -> Response:
        wait_s = body.get("wait_s") if isinstance(body, dict) else None
        pulling = self._names.pull(body, check_of(request), account(request.scope).grow)
        pulled = await _while_there(request.receive, wait_s, pulling)
        self._telemetry.pulled(pulled.known.key.name, pulled.packed.nbytes, began_s)
        return await respond(request, pulled)


class PushPull(_Pushing):
    """`POST /pushpull`."""

    async def by_frame(self, scope: Scope, receive: Receive, send: Send, began_s: float) -> None:
        arriving = await self._read_frame(scope, receive)
        accepted, own = self._accepted(scope, arriving, began_s), account(scope)
        answer = await self._frames.pushpull(arriving, partial(self._unsent.check, own.address), accepted, own.grow)
        self.recheck_serving()
        await self._send_values(scope, send, answer)
        self._telemetry.pulled(arriving.frame.model, answer.values_bytes, began_s)

    async def by_name(self, request: Request, body: Any, began_s: float) -> Response:
        own = account(request.scope)
        size_bytes = own.size_bytes  # of the body: from here on it has those of the answer, too
        done, pulled = await self._names.pushpull(body, self._key(request, body), check_of(request), own.grow)
        self._pushed_names(done, size_bytes, body, began_s)
        self._telemetry.pulled(pulled.known.key.name, pulled.packed.nbytes, began_s)
        try:
            return await respond(request, pulled, done)
        except PsError as error:
            raise after_push(error, done) from error


async def _while_there(receive: Receive, wait_s: object, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; with `wait_s`, cancel it and raise Unavailable if the client disconnects first."""
    return await (while_there(receive, work) if wait_s else work)


async def _prepare_pull(frame: PullFrame) -> tuple[PullFrame, Body]:
    return frame, Body(())


def _start(status: int, size_bytes: int) -> Message:
    headers = [(b"content-type", _FRAME), (b"content-length", str(size_bytes).encode())]
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _send_body(scope: Scope, send: Send, answer: FrameBody) -> None:
    first = answer.header()
    size = len(first) + answer.body_bytes
    await send(_start(200, size))
    arrival: BodyTransfer | None = scope.get("extensions", {}).get(BODY)
    chunks: Iterable[bytes | memoryview] = answer.chunks(first)
    if arrival is not None and size >= TRANSFER_BYTES_MIN and answer.zero_copy:
        chunks = await arrival.send_rest([memoryview(chunk) for chunk in chunks])
        size = sum(map(len, chunks))
    for message in messages(chunks, size):
        await send(message)
