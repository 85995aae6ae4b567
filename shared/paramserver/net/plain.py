"""HTTP/1.1 over the standard library's `http.client`, for what is in front of a node and does not take HTTP/2.

Proxies of the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY) are used, except to this machine.  A
connection serves one request at a time and is kept for the next, unless the node closes it.  If a kept connection
breaks, only a request that changes nothing is sent again, because the node may have carried out the first.
"""

import base64
import http.client
import socket
from functools import partial
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from paramserver.errors import PsError, problem
from paramserver.limits import BODY_BYTES_MAX
from paramserver.net.calls import Deadline, Outcome, Request, Response, Sink
from paramserver.net.concurrent_requests import Interruptible, using_memory
from paramserver.net.connect import CONNECT_S, connect
from paramserver.net.connection import ENDED, cut
from paramserver.net.credentials import Credentials
from paramserver.net.direct import changes_nothing, common_headers, taken_too_slowly, unreachable_by
from paramserver.net.idle import Idle
from paramserver.net.proxies import proxy_of

_PIECE_BYTES: Final = 1 << 20
_WAIT_S_MAX: Final = 1e6
"""Longest wait of a socket, which counts milliseconds in 31 bits."""


class PlainTransport:
    """Sends requests one at a time per thread; safe to share between threads, and after a fork."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._headers = common_headers(credentials)
        self._idle = Idle[http.client.HTTPConnection](lambda kept: _silent(kept.sock))

    def close(self) -> None:
        """Close the idle connections; one in use is closed once its answer has arrived."""
        self._idle.close()

    def send(self, request: Request, url: str, within: Interruptible | None = None) -> Outcome:
        """Send one request to the node at `url` and return its outcome.

        Raises CallerInterrupted if the call it belongs to (`within`) has been interrupted.
        """
        deadline = Deadline.after(request.timeout_s)
        ended = problem("in_doubt", f"the connection to {url} broke before it answered")
        if (kept := self._idle.take(url)) is not None:
            outcome = self._attempt(kept, request, url, within, deadline)
            if outcome is not None or not changes_nothing(request):
                return outcome or ended
        fresh: http.client.HTTPConnection | None = None
        try:
            fresh = _connection(url, min(CONNECT_S, request.connect_s, deadline.attempt_s()), self._credentials)
            # A tunnel takes no socket of ours in another way.
            fresh._create_connection = _connect  # type: ignore[attr-defined]
            fresh.connect()
            if not deadline.left_s():
                raise TimeoutError
        except (OSError, http.client.HTTPException, ValueError) as e:
            if fresh is not None:
                fresh.close()
            return unreachable_by(e, url)
        return self._attempt(fresh, request, url, within, deadline) or ended

    def _attempt(
        self,
        connection: http.client.HTTPConnection,
        request: Request,
        url: str,
        within: Interruptible | None,
        deadline: Deadline,
    ) -> Outcome | None:
        """Send the request and return its outcome; None if the connection ended before the whole answer was there."""
        try:
            return self._answer(connection, request, url, within, deadline)
        except ENDED:
            return None
        except TimeoutError:
            self._idle.drop(url)  # if the network has lost them, later requests would time out one by one
            return problem("in_doubt", f"{url} did not answer within {request.timeout_s:.3g} s")
        except PsError as e:
            return e
        except (OSError, http.client.HTTPException) as e:
            return problem("in_doubt", f"the connection to {url} broke before it answered ({e})")

    def _answer(
        self,
        connection: http.client.HTTPConnection,
        request: Request,
        url: str,
        within: Interruptible | None,
        deadline: Deadline,
    ) -> Response:
        """Send the request and return the answer; then the connection is kept, or closed if this raises."""
        connected = connection.sock
        connected.settimeout(_left_s(deadline))
        try:
            with using_memory(within, partial(cut, connected)):
                headers, target = {**self._headers, **request.headers}, urlsplit(url).path + request.path
                proxy = proxy_of(url)
                if proxy is not None and url.startswith("http:"):
                    target, headers = url + request.path, {**headers, **_authorization(proxy)}
                try:
                    connection.request(request.method, target, body=request.whole, headers=headers)
                except TimeoutError as e:
                    self._idle.drop(url)
                    raise taken_too_slowly(request, url) from e
                connected.settimeout(_left_s(deadline))
                response = connection.getresponse()
                if response.status < 200:  # the answer itself is still to come: this connection would be one behind
                    raise http.client.HTTPException(f"HTTP {response.status} before the answer")
                body = _body(response, connected, request.sink if response.status == 200 else None, deadline)
        except BaseException:  # the request is half sent, or its answer would be taken for that of the next request
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            self._idle.keep(url, connection)
        return Response(response.status, {k.lower(): v for k, v in response.getheaders()}, body, url)


def _body(response: http.client.HTTPResponse, connected: socket.socket, sink: Sink | None, deadline: Deadline) -> bytes:
    """Return the body of an answer, empty if it goes to the sink.  Raises TimeoutError at the deadline."""
    body = bytearray()
    if sink is not None:
        sink.begin()
    # Python 3.13 closes the response, and with it a socket that is not kept, with the last byte.
    while not response.isclosed() and (chunk := _piece(response, connected, deadline)):
        if sink is None:
            if len(body) + len(chunk) > BODY_BYTES_MAX:
                raise OSError(f"a body without a place is limited to {BODY_BYTES_MAX} bytes")
            body += chunk
        else:
            sink.feed(memoryview(chunk))
    response.close()  # a body of known length does not, and would keep the connection from its next request
    if response.length:  # reading a piece does not tell that the rest is missing
        raise http.client.IncompleteRead(b"", response.length)
    if sink is not None:
        sink.end()
    return bytes(body)


def _piece(response: http.client.HTTPResponse, connected: socket.socket, deadline: Deadline) -> bytes:
    """Return the next bytes of the body, empty at its end.  Raises TimeoutError at the deadline."""
    if not deadline.left_s():
        raise TimeoutError
    connected.settimeout(_left_s(deadline))
    return response.read1(_PIECE_BYTES)


def _left_s(deadline: Deadline) -> float:
    """Return the time left, as a timeout that a socket takes."""
    return min(deadline.attempt_s(), _WAIT_S_MAX)


def _silent(connected: socket.socket) -> bool:
    """Whether nothing can be read, neither EOF nor unsolicited data, which would be taken for an answer."""
    connected.settimeout(0.0)
    try:
        socket.socket.recv(connected, 1, socket.MSG_PEEK)  # SSLSocket.recv takes no flags
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _authorization(proxy: SplitResult) -> dict[str, str]:
    """Return the header with the name and password in the proxy's URL, if it has them."""
    if proxy.username is None:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"proxy-authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def _connection(url: str, timeout_s: float, credentials: Credentials) -> http.client.HTTPConnection:
    """Return a connection to the node, or to the proxy for it.  Raises ValueError for one that cannot be used."""
    parts, proxy = urlsplit(url), proxy_of(url)
    host, port = parts.hostname or "", parts.port
    if proxy is not None and proxy.scheme != "http":
        raise ValueError(f"its proxy {proxy.scheme}://{proxy.hostname} is not an http:// one")
    if parts.scheme != "https":
        to = (host, port) if proxy is None else (proxy.hostname or "", proxy.port or 80)
        return http.client.HTTPConnection(*to, timeout=timeout_s)
    context = credentials.context()
    if proxy is None:
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    tunnel = http.client.HTTPSConnection(proxy.hostname or "", proxy.port or 80, timeout=timeout_s, context=context)
    tunnel.set_tunnel(host, port or 443, _authorization(proxy))
    return tunnel


def _connect(address: tuple[str, int], timeout_s: float, _: object) -> socket.socket:
    return connect(*address, timeout_s)
