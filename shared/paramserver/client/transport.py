"""The two drivers, one blocking, one on asyncio: they perform the requests of calls.

Requests to a shard's own address use HTTP/2 with prior knowledge over our own connections (see `direct`).  Those to the
URLs that the client was given go through pyreqwest, in HTTP/1.1 or what TLS negotiates; several URLs are tried in turn,
beginning with the one that answered last (see `addresses`).  Native errors become values: Unreachable if nothing can
have arrived, InDoubt otherwise.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from pyreqwest import exceptions as native
from pyreqwest.client import BaseClientBuilder, Client, ClientBuilder, SyncClient, SyncClientBuilder

from paramserver.client.addresses import Addresses
from paramserver.client.calls import Call, Outcome, Pause, Request, Response
from paramserver.client.concurrent_requests import ConcurrentRequests, Helpers, Interruptible, using_memory
from paramserver.client.credentials import Credentials
from paramserver.client.direct import CONNECT_S, AsyncDirectTransport, DirectTransport, unreachable
from paramserver.client.forks import call_in_forked_child
from paramserver.client.plain import PlainTransport
from paramserver.client.schemes import in_scheme_spoken
from paramserver.errors import InDoubt, PsError, Unreachable, problem

T = TypeVar("T")
B = TypeVar("B", bound=BaseClientBuilder)
log = logging.getLogger("paramserver")

PARALLEL_MAX: Final = 256
"""Maximum number of helper threads of one blocking client, started on demand.  Each request that waits for a commit
occupies one: with too few for all workers (threads) of the client, the pushes that would complete the commit queue."""


def translated(url: str, error: native.PyreqwestError, timeout_s: float) -> PsError:
    """Return the PsError for a native error; only a failure to connect is certain to have had no effect."""
    causes = _causes(error)
    if isinstance(error, native.BuilderError):
        return problem("malformed", f"{url} is not a valid URL: {causes[-1]}")
    if isinstance(error, native.ClientClosedError):
        return problem("in_doubt", "this client was closed while it waited")
    if "client error (Connect)" in causes:  # the class cannot tell: any timeout before the answer is a ConnectTimeout
        return unreachable(url, causes[-1])
    if isinstance(error, TimeoutError):
        return problem("in_doubt", f"{url} did not answer within {timeout_s:.3g} s")
    return problem("in_doubt", f"the connection to {url} broke before it answered ({causes[-1]})")


def _causes(error: native.PyreqwestError) -> list[str]:
    """Return the messages of the error chain, outermost first; the innermost in plain words ('connection refused')."""
    details: Mapping[str, Any] = getattr(error, "details", None) or {}
    causes = [str(c["message"]) for c in details.get("causes") or ()] or [error.message]
    innermost = causes[-1].split(" (os error")[0]
    return [*causes[:-1], innermost[:1].lower() + innermost[1:] if "(" not in innermost else innermost]


def trusting(builder: B, credentials: Credentials) -> B:
    """Make the client trust the credentials' certificate authorities besides those of the system."""
    for certificate in credentials.authorities:
        builder = builder.add_root_certificate_pem(certificate.encode())
    return builder


def _tuned(builder: B, credentials: Credentials, urls: Sequence[str]) -> B:
    """Configure a client for the given URLs."""
    b = trusting(builder, credentials).follow_redirects(False).gzip(False).brotli(False).zstd(False).deflate(False)
    b = b.connect_timeout(timedelta(seconds=CONNECT_S)).tcp_nodelay(True).user_agent("paramserver-python")
    if credentials.token:
        b = b.default_headers(credentials.headers)
    if all(_is_loopback(u) for u in urls):
        b = b.no_proxy()  # a proxy from the environment cannot reach this machine
    return b.http2(True) if any(u.startswith("https:") for u in urls) else b.http1_only()


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


class BlockingTransport:
    """Performs calls in the calling thread.  Safe to share between threads, and usable after a fork."""

    def __init__(self, urls: Sequence[str], credentials: Credentials) -> None:
        self._addresses, self._credentials = Addresses(urls), credentials
        self._shards = DirectTransport(credentials)
        self._free_lock()
        call_in_forked_child(self._free_lock)
        self._kept_from_parent: list[Any] = []
        self._plain: PlainTransport | None = None
        self._control: SyncClient | None = None
        self._helpers = Helpers(PARALLEL_MAX)
        self._pid = -1
        self._closed = False

    def run(self, call: Call[T], within: Interruptible | None = None) -> T:
        """Drive a call to its result.

        Raises CallerInterrupted if the thread that it is done for (`within`) is interrupted.
        """
        try:
            with using_memory(within):
                effect = next(call)
            while True:
                outcomes: list[Outcome] = []
                if isinstance(effect, Pause):
                    time.sleep(effect.seconds)
                else:
                    outcomes = self.perform(effect, within)
                with using_memory(within):
                    effect = call.send(outcomes)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            call.close()

    def perform(self, requests: Sequence[Request], within: Interruptible | None = None) -> list[Outcome]:
        """Send all requests at once and wait for all outcomes, in order."""
        if self._closed:
            return [_closed("ps.connect()") for _ in requests]
        if self._pid != os.getpid():
            self._start()
        if len(requests) == 1:
            return [self._one(requests[0], within)]
        return ConcurrentRequests(self._one, requests, within).outcomes(self._helpers)

    def close(self) -> None:
        """Close connections; the transport cannot be used afterwards."""
        with self._lock:
            closed, self._closed = self._closed, True
            if closed or self._pid != os.getpid():  # this process has opened nothing yet
                return
            self._shards.close()
            if self._plain is not None:
                self._plain.close()
            self._helpers.close()
            if self._control is not None:
                self._control.close()

    def _free_lock(self) -> None:
        self._lock = threading.Lock()

    def _start(self) -> None:
        with self._lock:
            if self._pid == os.getpid():
                return
            if self._pid != -1:  # a child must not even destroy a native client: its threads belong to the parent
                self._kept_from_parent += [self._control, self._helpers]
            try:
                self._control = _tuned(SyncClientBuilder(), self._credentials, self._addresses.given).build()
            except RuntimeError:  # the native runtime does not start in a child whose parent has used it
                log.info("client.plain reason=forked pid=%d", os.getpid())
                self._plain = PlainTransport(self._credentials)
                self._control = None
            self._helpers = Helpers(PARALLEL_MAX)
            self._pid = os.getpid()

    def _one(self, request: Request, within: Interruptible | None = None) -> Outcome:
        if request.to is not None:
            return self._send(request, request.to, within, direct=True)
        outcome: Outcome = problem("unreachable", "no URL given")
        for url in self._addresses.order():
            outcome = self._send(request, url, within, direct=False)
            if not self._addresses.record(url, outcome):
                break
        return outcome

    def _send(self, request: Request, url: str, within: Interruptible | None, *, direct: bool) -> Outcome:
        if self._closed:
            return _closed("ps.connect()")
        if direct:
            return self._shards.send(request, url, within)
        if self._plain is not None:
            return self._plain.send(request, url, within)
        assert self._control is not None
        try:
            b = self._control.request(request.method, url + request.path).headers(dict(request.headers))
            b = b.timeout(timedelta(seconds=request.timeout_s))
            if (body := request.whole) is not None:
                with using_memory(within):
                    # A native thread sends the body in place and cannot be stopped, so an interruptible call copies it.
                    b = b.body_bytes(body if within is None else bytes(body))
            if request.sink is None:
                r = b.build().send()
                return Response(r.status, _lowered(r.headers), bytes(r.bytes()), url)
            with b.build_streamed() as r:
                if r.status != 200:
                    return Response(r.status, _lowered(r.headers), bytes(r.bytes()), url)
                with using_memory(within):
                    request.sink.begin()
                reader = r.body_reader
                while (chunk := reader.read_chunk()) is not None:
                    with using_memory(within):
                        request.sink.feed(memoryview(chunk))
                with using_memory(within):
                    request.sink.end()
                return Response(r.status, _lowered(r.headers), b"", url)
        except native.PyreqwestError as e:
            return translated(url, e, request.timeout_s)
        except PsError as e:  # raised by the sink
            return e


class AsyncTransport:
    """Performs calls on the running event loop, which owns the connections; they are opened on first use."""

    def __init__(self, urls: Sequence[str], credentials: Credentials) -> None:
        self._addresses, self._credentials = Addresses(urls), credentials
        self._shards = AsyncDirectTransport(credentials)
        self._kept_from_parent: list[Any] = []
        self._plain: PlainTransport | None = None
        self._control: Client | None = None
        self._pid = -1
        self._closed = False

    async def run(self, call: Call[T]) -> T:
        """Drive a call to its result."""
        try:
            effect = next(call)
            while True:
                if isinstance(effect, Pause):
                    await asyncio.sleep(effect.seconds)
                    effect = call.send([])
                else:
                    effect = call.send(await self.perform(effect))
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            call.close()

    async def perform(self, requests: Sequence[Request]) -> list[Outcome]:
        """Send all requests at once and wait for all outcomes, in order."""
        if self._closed:
            return [_closed("AsyncClient()") for _ in requests]
        if self._pid != os.getpid():
            self._start()
        if len(requests) == 1:
            return [await self._one(requests[0])]
        return list(await asyncio.gather(*(self._one(r) for r in requests)))

    async def close(self) -> None:
        """Close connections; the transport cannot be used afterwards."""
        closed, self._closed = self._closed, True
        if closed or self._pid != os.getpid():  # this process has opened nothing yet
            return
        await self._shards.close()
        if self._plain is not None:
            self._plain.close()
        if self._control is not None:
            await self._control.close()

    def _start(self) -> None:
        if self._pid != -1:
            self._kept_from_parent += [self._control, self._shards]
            self._shards = AsyncDirectTransport(self._credentials)
        try:
            self._control = _tuned(ClientBuilder(), self._credentials, self._addresses.given).build()
        except RuntimeError:
            log.info("client.plain reason=forked pid=%d", os.getpid())
            self._plain = PlainTransport(self._credentials)
            self._control = None
        self._pid = os.getpid()

    async def _one(self, request: Request) -> Outcome:
        if request.to is not None:
            return await self._send(request, request.to, direct=True)
        outcome: Outcome = problem("unreachable", "no URL given")
        for url in self._addresses.order():
            outcome = await self._send(request, url, direct=False)
            if not self._addresses.record(url, outcome):
                break
        return outcome

    async def _send(self, request: Request, url: str, *, direct: bool) -> Outcome:
        if self._closed:
            return _closed("AsyncClient()")
        if direct:
            return await self._shards.send(request, url)
        if self._plain is not None:
            return await asyncio.to_thread(self._plain.send, request, url)
        assert self._control is not None
        try:
            b = self._control.request(request.method, url + request.path).headers(dict(request.headers))
            b = b.timeout(timedelta(seconds=request.timeout_s))
            if (body := request.whole) is not None:
                b = b.body_bytes(body)
            if request.sink is None:
                r = await b.build().send()
                return Response(r.status, _lowered(r.headers), bytes(await r.bytes()), url)
            async with b.build_streamed() as r:
                if r.status != 200:
                    return Response(r.status, _lowered(r.headers), bytes(await r.bytes()), url)
                request.sink.begin()
                reader = r.body_reader
                while (chunk := await reader.read_chunk()) is not None:
                    request.sink.feed(memoryview(chunk))
                request.sink.end()
                return Response(r.status, _lowered(r.headers), b"", url)
        except native.PyreqwestError as e:
            return translated(url, e, request.timeout_s)
        except PsError as e:
            return e


def _lowered(headers: Any) -> dict[str, str]:
    return {str(k).lower(): str(v) for k, v in headers.items()}


def _closed(maker: str) -> PsError:
    """Return the outcome of a request on a closed client, an error that is not retried."""
    return problem("conflict", "this client is closed", hint=f"make another with {maker}")


def check(transport: BlockingTransport, urls: Sequence[str], timeout_s: float) -> None:
    """Raise Unreachable, with a readable reason, unless one of the URLs answers at all.

    Raises RequestError (`malformed`) if a node answers that has no such path: the URL names more than a cluster.
    """
    for _ in urls:  # after a timeout, the next attempt begins with another URL
        (outcome,) = transport.perform([Request("GET", "/livez", timeout_s=timeout_s)])
        if not isinstance(outcome, InDoubt):
            break
    if isinstance(outcome, InDoubt | Unreachable):
        right = in_scheme_spoken(urls[0], timeout_s)
        if right != urls[0]:
            raise problem("unreachable", f"{urls[0]} does not answer, {right} does", hint=f"connect to {right}")
    if isinstance(outcome, InDoubt):
        raise unreachable(urls[0], outcome.detail)
    if isinstance(outcome, PsError):
        raise outcome
    if outcome.status == 404 and outcome.headers.get("content-type", "").startswith("application/problem+json"):
        hint = f"without its path: {urlsplit(outcome.url)._replace(path='').geturl()}"
        raise problem("malformed", f"'{outcome.url}' is not the URL of a cluster", hint=hint)
