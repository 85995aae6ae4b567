"""The two drivers, one blocking, one on asyncio: they perform the requests of calls.

Requests go over HTTP/2 with prior knowledge, on our own connections (see `direct`): those to a shard's own address, and
those to the URLs that the client was given, of which several are tried in turn, beginning with the one that answered
last (see `addresses`).  A given URL that does not take HTTP/2, or is behind a proxy, gets HTTP/1.1 (see `plain`).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar
from urllib.parse import urlsplit

from msgspec.structs import replace

from paramserver.errors import InDoubt, PsError, Unreachable, problem
from paramserver.net.addresses import Addresses, is_refused_by_others
from paramserver.net.calls import Call, Deadline, Outcome, Pause, Request, Response, foreign, is_problem, json_of
from paramserver.net.concurrent_requests import ConcurrentRequests, Helpers, Interruptible, using_memory
from paramserver.net.credentials import Credentials
from paramserver.net.direct import AsyncDirectTransport, DirectTransport, NotHttp2, unreachable
from paramserver.net.forks import call_in_forked_child
from paramserver.net.plain import PlainTransport
from paramserver.net.proxies import proxy_of
from paramserver.net.schemes import in_scheme_spoken

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")
log = logging.getLogger("paramserver")

PARALLEL_MAX: Final = 256
"""Maximum number of threads of one client, started on demand: helpers of a blocking one, and on asyncio those that
speak HTTP/1.1.  Each request that waits for a commit occupies one: with too few for all workers (threads) of the
client, the pushes that would complete the commit queue."""
_PROBE_S: Final = 2.0
"""Timeout of a probe; of a request that has less than twice as long, half of its own."""
_HTTP1_S: Final = 60.0
"""How long a URL that did not take HTTP/2 is not probed again: its node may only just have been starting."""


class Protocols:
    """Which of the given URLs take HTTP/2 without negotiation, as every node does; what is in front of one may not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._http2: set[str] = set()
        self._http1: dict[str, float] = {}
        """URL -> until when it is not probed again."""

    def of(self, url: str) -> bool | None:
        """Whether the URL takes HTTP/2; None: the answer to a probe must tell."""
        if url in self._http2:
            return True
        if self._http1.get(url, 0.0) > self.clock() or proxy_of(url) is not None:
            return False
        return None

    def learn(self, url: str, outcome: Outcome, *, in_time: bool) -> bool | PsError:
        """Return what the outcome of a probe tells; the error, if it reached nobody.

        Silence, that is an error not `in_time`, tells nothing: HTTP/1.1 is tried, and the next request probes again.
        """
        if isinstance(outcome, Response):
            self._http2.add(url)
            return True
        if in_time:
            if not isinstance(outcome, InDoubt):  # nobody has seen the probe
                return outcome
            log.info("transport.http1 url=%s reason=%s", url, outcome)
            self._http1[url] = self.clock() + _HTTP1_S
        return False

    def forget(self, url: str) -> None:
        """Probe the URL again: it took HTTP/2, but something else is in front of its node now."""
        self._http2.discard(url)


Sending: TypeAlias = Generator[tuple[bool, Request, str], Outcome, Outcome]
"""Yields (whether over HTTP/2, what, to which URL) to send, is sent its outcome, and returns that of the request."""


def _to_given(addresses: Addresses, protocols: Protocols, request: Request) -> Sending:
    """Send a request to one of the URLs that the client was given, the next one if that fails.

    Its timeout is that of all attempts; none may take more of it to connect than would leave as much to each URL after
    it.  Of several that fail, a node's answer says more than a stranger's, and that more than silence.
    """
    outcome: Outcome = problem("unreachable", "no URL given")
    deadline, urls = Deadline.after(request.timeout_s, protocols.clock), addresses.order()
    for tried, url in enumerate(urls):
        if tried and not deadline.left_s():
            break
        found = yield from _in_its_protocol(protocols, request, url, deadline, len(urls) - tried)
        if _says(found) >= _says(outcome):
            outcome = found
        if not addresses.record(url, found):
            break
    return outcome


def _says(outcome: Outcome) -> int:
    """How much an outcome says of the cluster: nothing if nobody was reached, little if only a stranger was."""
    if isinstance(outcome, Unreachable):
        return 0
    return 1 if isinstance(outcome, Response) and is_refused_by_others(outcome) else 2


def _in_its_protocol(protocols: Protocols, request: Request, url: str, deadline: Deadline, left: int) -> Sending:
    """Send a request to this URL: in HTTP/2 if it takes that (if it is not known, a probe tells), else in HTTP/1.1.

    `left`: how many URLs are left to try, with this one.
    """
    takes_http2: bool | PsError | None = protocols.of(url)
    if takes_http2 is None:
        left_s = deadline.attempt_s()
        probe = Request("GET", "/livez", timeout_s=min(_PROBE_S, left_s / 2), connect_s=left_s / left)
        ends = Deadline.after(probe.timeout_s, protocols.clock)
        takes_http2 = protocols.learn(url, (yield True, probe, url), in_time=ends.left_s() > 0)
    if isinstance(takes_http2, PsError):
        return takes_http2
    bound = replace(deadline.bound(request), connect_s=deadline.attempt_s() / left)
    outcome = yield takes_http2, bound, url
    if isinstance(outcome, NotHttp2):
        protocols.forget(url)
    return outcome


class BlockingTransport:
    """Performs calls in the calling thread.  Safe to share between threads, and usable after a fork."""

    def __init__(self, urls: Sequence[str], credentials: Credentials) -> None:
        self._addresses, self._protocols = Addresses(urls), Protocols()
        self._http2, self._http1 = DirectTransport(credentials), PlainTransport(credentials)
        self._kept_from_parent: list[Helpers] = []
        self._closed = False
        self._helpers = Helpers(PARALLEL_MAX)
        call_in_forked_child(self._begin_in_child)

    def _begin_in_child(self) -> None:
        self._kept_from_parent.append(self._helpers)  # its threads are the parent's, and so is what it does at its end
        self._helpers = Helpers(PARALLEL_MAX)

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
        if len(requests) == 1:
            return [self._one(requests[0], within)]
        return ConcurrentRequests(self._one, requests, within).outcomes(self._helpers)

    def close(self) -> None:
        """Close connections; the transport cannot be used afterwards."""
        if self._closed:
            return
        self._closed = True
        self._http2.close()
        self._http1.close()
        self._helpers.close()

    def _one(self, request: Request, within: Interruptible | None = None) -> Outcome:
        if self._closed:
            return _closed("ps.connect()")
        if request.to is not None:
            return self._http2.send(request, request.to, within)
        sending = _to_given(self._addresses, self._protocols, request)
        try:
            http2, request, url = next(sending)
            while True:
                outcome = (self._http2 if http2 else self._http1).send(request, url, within)
                http2, request, url = sending.send(outcome)
        except StopIteration as done:
            result: Outcome = done.value
            return result


class AsyncTransport:
    """Performs calls on the running event loop, which owns the connections; they are opened on first use."""

    def __init__(self, urls: Sequence[str], credentials: Credentials) -> None:
        self._addresses, self._protocols = Addresses(urls), Protocols()
        self._credentials = credentials
        self._http2, self._http1 = AsyncDirectTransport(credentials), PlainTransport(credentials)
        self._threads: ThreadPoolExecutor | None = None
        self._kept_from_parent: list[object] = []
        self._closed = False
        call_in_forked_child(self._begin_in_child)

    def _begin_in_child(self) -> None:
        self._kept_from_parent += [self._http2, self._threads]  # the connections and threads are the parent's
        self._http2, self._threads = AsyncDirectTransport(self._credentials), None

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
        if len(requests) == 1:
            return [await self._one(requests[0])]
        return list(await asyncio.gather(*(self._one(r) for r in requests)))

    async def close(self) -> None:
        """Close all connections; the transport cannot be used afterwards."""
        if self._closed:
            return
        self._closed = True
        self._http1.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
        await self._http2.close()

    async def _one(self, request: Request) -> Outcome:
        if self._closed:
            return _closed("AsyncClient()")
        if request.to is not None:
            return await self._http2.send(request, request.to)
        sending = _to_given(self._addresses, self._protocols, request)
        try:
            http2, request, url = next(sending)
            while True:
                if self._closed:  # since the last attempt, or the probe before this request: this one was not sent
                    return _closed("AsyncClient()")
                outcome = await (self._http2.send(request, url) if http2 else self._in_thread(request, url))
                http2, request, url = sending.send(outcome)
        except StopIteration as done:
            result: Outcome = done.value
            return result

    async def _in_thread(self, request: Request, url: str) -> Outcome:
        """Send the request over HTTP/1.1; once cancelled, no thread uses its memory any more."""
        if self._threads is None:
            from concurrent.futures import ThreadPoolExecutor

            self._threads = ThreadPoolExecutor(PARALLEL_MAX, "paramserver")
        within = Interruptible()
        sending = asyncio.get_running_loop().run_in_executor(self._threads, self._http1.send, request, url, within)
        try:
            return await sending
        except asyncio.CancelledError:
            within.revoke()
            raise


def _closed(maker: str) -> PsError:
    """Return the outcome of a request on a closed client, an error that is not retried."""
    return problem("conflict", "this client is closed", hint=f"make another with {maker}")


def check(transport: BlockingTransport, urls: Sequence[str], timeout_s: float) -> None:
    """Raise Unreachable, with a readable reason, unless one of the URLs answers at all.

    Raises RequestError (`malformed`) if a node answers that has no such path: the URL names more than a cluster.  So it
    does for a redirection, which no node sends, as requests would not be redirected; and for a page in place of JSON.
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
    if 200 <= outcome.status < 300:
        json_of(outcome)
    if 300 <= outcome.status < 400:
        raise foreign(outcome)
    if outcome.status == 404 and is_problem(outcome):
        hint = f"without its path: {urlsplit(outcome.url)._replace(path='').geturl()}"
        raise problem("malformed", f"'{outcome.url}' is not the URL of a cluster", hint=hint)
