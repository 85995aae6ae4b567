"""Calls: generators that yield requests and are sent their outcomes, and do no I/O themselves.

A `Call[T]` yields a list of `Request` (performed concurrently) or a `Pause`, is sent the list of outcomes in the same
order (empty after a pause), and returns its result.  An outcome is a `Response` of any status, or the PsError of a
request that got no response.  The blocking and the asyncio client drive the same calls; tests drive them by hand.
"""

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np
from msgspec import Struct, field

from paramserver.errors import TRY_AGAIN, PsError, Unavailable, from_document, problem
from paramserver.wire.sink import Sink as BodySink

T = TypeVar("T")

POLL_S: Final = 2.0
"""How long one request lets a node wait for something before it is sent again: it may be stopping, or no longer the one
to ask."""
ATTEMPT_S: Final = 5.0
"""Timeout of one attempt, for requests that need no waiting and may be repeated: then the request is sent again, to
another node if there is one."""

_ENVOY_LOST: Final = tuple(
    f"reset reason: {reason}".encode()
    for reason in ("connection termination", "remote reset", "local reset", "protocol error")
)
"""What Envoy says if the node may have the request; after its other reasons it has not."""

TIMEOUT_S_MAX: Final = 1_000_000_000
"""About thirty years, which timers can still represent."""


class Sink(BodySink, Protocol):
    """Destination for the body of a 200 response, which otherwise goes into `Response.body`."""

    def begin(self) -> None:
        """Start a response; data from an earlier attempt is discarded."""

    def end(self) -> None:
        """Finish the body.  Raises InDoubt if it is too short."""


class Request(Struct, frozen=True):
    """One HTTP request."""

    method: str
    path: str
    """With the query, percent-encoded; begins with '/'."""
    body: bytes | memoryview | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    to: str | None = None
    """Base URL of a shard to send to directly, over HTTP/2; None: the URLs the client was given."""
    sink: Sink | None = None
    timeout_s: float = 30.0
    """Timeout until the whole response has arrived."""
    rest: Sequence[memoryview] = ()
    """Rest of the body, after `body`; sent in place, without a copy."""
    connect_s: float = inf
    """Timeout until a connection is established, if less than `CONNECT_S`: another URL may be tried then."""

    @property
    def whole(self) -> bytes | memoryview | None:
        """The whole body in one piece."""
        return self.body if not self.rest else b"".join((self.body or b"", *self.rest))


class Response(Struct, frozen=True):
    """One complete HTTP response."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes = b""
    """Empty if it went into the request's sink."""
    url: str = ""
    """Base URL of the node that answered."""


class TakenTooSlowly(Unavailable):
    """The outcome of a request whose whole body a node did not take in time: it was not carried out."""


class Pause(Struct, frozen=True):
    """A wait before the next request."""

    seconds: float


Outcome: TypeAlias = Response | PsError
Effect: TypeAlias = list[Request] | Pause
Call: TypeAlias = Generator[Effect, list[Outcome], T]
Clock: TypeAlias = Callable[[], float]


def seconds(value: Any, name: str = "timeout") -> float:
    """Return a timeout, or another argument in seconds, as a float.  Raises RequestError (`invalid_field`)."""
    if not isinstance(value, (float, Real)) or not 0 <= float(value) <= TIMEOUT_S_MAX:
        raise problem("invalid_field", f"{name} is seconds, from 0 to {TIMEOUT_S_MAX:,}, not {value!r:.40}")
    return float(value)


@dataclass(slots=True)
class Deadline:
    """The time at which a call gives up, on a monotonic clock."""

    at: float
    clock: Clock = time.monotonic
    whole_s: float | None = None
    """The timeout that the caller gave, in seconds, if it is one."""
    attempt_at: float | None = None
    """When the latest attempt was given its timeout."""

    @classmethod
    def after(cls, timeout: float, clock: Clock = time.monotonic) -> "Deadline":
        """Return the deadline `timeout` seconds from now."""
        whole_s = seconds(timeout)
        return cls(clock() + whole_s, clock, whole_s)

    def left_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.at - self.clock())

    def attempt_s(self) -> float:
        """The timeout of another attempt: the seconds left, but above 0, which would make a socket non-blocking."""
        self.attempt_at = self.clock()
        return max(self.at - self.attempt_at, 0.001)

    def bound(self, request: Request, sink: Sink | None = None) -> Request:
        """Return the request with a timeout that ends at this deadline and, if given, another sink."""
        r, left_s = request, self.attempt_s()
        return Request(r.method, r.path, r.body, r.headers, r.to, sink or r.sink, left_s, r.rest)


def json_request(
    method: str,
    path: str,
    data: Any = None,
    *,
    timeout_s: float = 30.0,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Request:
    """Return a control request with a JSON body; without a body if `data` is None."""
    head = {"accept": "application/json", **headers}
    if data is None:
        return Request(method, path, None, head, timeout_s=timeout_s)
    head["content-type"] = "application/json"
    return Request(method, path, json_bytes(data), head, timeout_s=timeout_s)


def json_bytes(data: Any) -> bytes:
    """Return `data` as JSON; numpy scalars and arrays become numbers and lists.

    Raises RequestError (`malformed`) for NaN, infinity and what JSON cannot express.
    """
    try:
        return json.dumps(data, default=_plain, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as e:
        raise problem("malformed", f"this cannot be sent as JSON: {e}", hint="use finite numbers and text") from None


def plain(value: Any) -> Any:
    """Return `value` as a JSON round trip would: numbers of numpy and others as Python's own, sequences as lists."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    try:
        return _plain(value)
    except TypeError:  # left as it is: the code that reads it reports what it must be
        return value


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if hasattr(value, "item"):  # a scalar tensor
        try:
            return value.item()
        except (RuntimeError, ValueError) as e:
            raise TypeError(f"{type(value).__name__}: {e}") from None
    raise TypeError(f"{type(value).__name__} is not JSON")


def json_of(response: Response) -> Any:
    """Return the JSON value of a 2xx response; raise the error of any other."""
    if not 200 <= response.status < 300:
        raise error_of(response)
    try:
        return json.loads(response.body)
    except ValueError:
        raise foreign(response) from None


def json_or_none(response: Response) -> Any:
    """Like `json_of` for a request whose answer may be 204, for which it returns None."""
    return None if response.status == 204 else json_of(response)


def error_of(response: Response) -> PsError:
    """Return the error for a response of status 300 or above."""
    after = response.headers.get("retry-after", "")
    try:
        doc = json.loads(response.body) if response.body else {}
    except ValueError:
        doc = {}
    if isinstance(doc, dict) and type(doc.get("foreign")) is not int:  # another service's member of that name
        doc.pop("foreign", None)
    lost = is_gateway_failure(response)
    if lost or not isinstance(doc, dict) or not isinstance(doc.get("code"), str):
        if response.status < 500 and response.status not in TRY_AGAIN:
            return foreign(response)
        doc = {"status": response.status, "detail": f"{response.url} answered HTTP {response.status}"}
        if lost:
            doc["code"] = "in_doubt"
        elif response.status == 500:
            doc["foreign"] = 500
    if "retry_after_s" not in doc and after.isdecimal():
        doc["retry_after_s"] = float(after)
    return from_document({**doc, "status": response.status})


def is_problem(response: Response) -> bool:
    """Whether it is a problem document, as every refusal of a node is."""
    return response.headers.get("content-type", "").startswith("application/problem+json")


def is_gateway_failure(response: Response) -> bool:
    """Whether a proxy had no answer from the node: the request may be executed.

    No node sends 502, 504, or Cloudflare's 520 and 524 (an answer that it could not read, or none in time).  Envoy
    answers 503 if a connection ended after the request had gone out on it.
    """
    sent = response.status == 503 and any([why in response.body for why in _ENVOY_LOST])
    return sent or response.status in (502, 504, 520, 524)


def foreign(response: Response) -> PsError:
    """Return the error for an answer that is not from a paramserver, or was changed on the way.

    Its member `foreign` is the status of the answer.
    """
    text = bytes(response.body[:80]).decode("utf-8", "replace")
    hint = "is this the address of a paramserver, and does a proxy in front of it leave the path unchanged?"
    if location := response.headers.get("location"):
        hint = f"it refers to {location}: if that is the paramserver, connect to it"
    return from_document(
        {
            "status": response.status,
            "hint": hint,
            "detail": f"{response.url}: HTTP {response.status}: {text!r}",
            "foreign": response.status,
        }
    )
