"""All errors of the project, in one tree by whose fault it is and whether to retry.

PsError
├── RequestError      the caller's request is wrong; sending it again changes nothing
│   ├── NotFoundError     it names something that does not exist
│   └── ConflictError     it is well formed, but the current state forbids it
│       └── FencedError       a newer epoch, generation or timeline has replaced the sender's
├── StaleMapError     another shard owns the partition now; fetch the map and resend there
├── Unavailable       nobody's fault; retry the same request after `retry_after_s`
│   ├── Unreachable       no node answered at all
│   └── InDoubt           the deadline passed without an answer: it may or may not have been done
├── AuthError         the token is missing, unknown, or its role does not suffice
├── CorruptState      stored bytes do not match their checksum; an operator must intervene
└── InternalError     our bug

A node sends a PsError as RFC 9457 problem details, and the client raises the same class from them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from paramserver import limits

TOLD_MAX: Final = 3
"""Of several errors in one request, how many the text of the one that lists them has."""


class PsError(Exception):
    """Raised when anything in paramserver fails; catch a subclass where you can act on it.

    Create one with :func:`problem`, which chooses the class that belongs to the code.
    """

    def __init__(
        self,
        code: str,
        detail: str,
        /,
        *,
        hint: str = "",
        retry_after_s: float | None = None,
        retryable: bool | None = None,
        errors: tuple[Mapping[str, Any], ...] = (),
        **members: Any,
    ) -> None:
        super().__init__(f"{detail} ({hint})" if hint else detail)
        self.code: Final = code
        self.detail: Final = detail
        self.hint: Final = hint
        self.errors: Final = errors
        """One entry per wrong part of the request: {"where", "code", "detail"}."""
        self.members: Final[Mapping[str, Any]] = members
        """Additional members of the problem document, such as `map_epoch` or `timeline`."""
        info = CODES[code]
        self.status: Final = info.status
        self.retryable: Final = info.retryable if retryable is None else retryable
        """Whether the same request, sent again unchanged, may succeed and cannot count twice."""
        self.retry_after_s: Final = retry_after_s if retry_after_s is not None else info.retry_after_s

    def document(self, request_id: str = "") -> dict[str, Any]:
        """Return the problem details object (RFC 9457) of this error."""
        body: dict[str, Any] = {
            "type": f"urn:paramserver:error:{self.code}",
            "title": CODES[self.code].title,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            "retryable": self.retryable,
        }
        if self.hint:
            body["hint"] = self.hint
        if self.errors:
            body["errors"] = [dict(e) for e in self.errors]
        if self.retry_after_s is not None:
            body["retry_after_s"] = self.retry_after_s
        if request_id:
            body["request_id"] = request_id
        return body | dict(self.members)

    def plus(self, /, **members: Any) -> "PsError":
        """Return the same error with these additional members; `retryable` may be one of them."""
        more = {"retryable": self.retryable, **self.members, **members}
        return self._like_this(self.detail, self.hint, more)

    def with_detail(self, detail: str, hint: str = "") -> "PsError":
        """Return the same error with another detail; and with another hint, if one is given."""
        return self._like_this(detail, hint or self.hint, {"retryable": self.retryable, **self.members})

    def _like_this(self, detail: str, hint: str, members: Mapping[str, Any]) -> "PsError":
        return type(self)(self.code, detail, hint=hint, retry_after_s=self.retry_after_s, errors=self.errors, **members)

    def __reduce__(self) -> tuple[Any, ...]:
        return (from_document, (self.document(),))


class RequestError(PsError):
    """Raised when the request itself is wrong; the same request will fail again."""


class NotFoundError(RequestError):
    """Raised when a request names a model, parameter, worker, run or route that does not exist."""


class ConflictError(RequestError):
    """Raised when a well-formed request conflicts with the current state."""


class FencedError(ConflictError):
    """Raised when a newer worker epoch, model generation or timeline has replaced the sender's."""


class StaleMapError(PsError):
    """Raised when a request was sent to a shard that does not own the partition."""


class Unavailable(PsError):
    """Raised when a node cannot serve the request now; the same request may be sent again."""


class Unreachable(Unavailable):
    """Raised when no node of the cluster could be reached."""


class InDoubt(Unavailable):
    """Raised when the deadline passed before an answer came; sending the same push id again is safe."""


class AuthError(PsError):
    """Raised when a token is missing, unknown, or its role does not allow the route."""


class CorruptState(PsError):
    """Raised when stored bytes fail their checksum and no older state can be used instead."""


class InternalError(PsError):
    """Raised when paramserver itself has a bug."""


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """Properties of a problem code."""

    status: int
    cls: type[PsError]
    title: str
    retryable: bool = False
    retry_after_s: float | None = None


def _later(title: str, after_s: float = 1.0, status: int = 503, cls: type[PsError] = Unavailable) -> CodeInfo:
    return CodeInfo(status, cls, title, retryable=True, retry_after_s=after_s)


CODES: Final[Mapping[str, CodeInfo]] = {
    "malformed": CodeInfo(400, RequestError, "The body or a query parameter cannot be read"),
    "unauthorized": CodeInfo(401, AuthError, "A valid token is required"),
    "forbidden": CodeInfo(403, AuthError, "The token's role does not allow this"),
    "not_found": CodeInfo(404, NotFoundError, "No such route"),
    "unknown_model": CodeInfo(404, NotFoundError, "No model of that name"),
    "unknown_parameter": CodeInfo(404, NotFoundError, "The model has no such parameter"),
    "unknown_worker": CodeInfo(404, NotFoundError, "No such worker has joined"),
    "unknown_node": CodeInfo(404, NotFoundError, "No such node has joined"),
    "unknown_task": CodeInfo(404, NotFoundError, "No such dataset or task"),
    "unknown_run": CodeInfo(404, NotFoundError, "No such run"),
    "unknown_checkpoint": CodeInfo(404, NotFoundError, "No such checkpoint"),
    "method_not_allowed": CodeInfo(405, RequestError, "The route does not have that method"),
    "not_acceptable": CodeInfo(406, RequestError, "None of the media types in Accept can be produced"),
    "too_slow": _later("The body arrives too slowly", 1.0, 408),
    "conflict": CodeInfo(409, ConflictError, "The present state forbids this"),
    "model_exists": CodeInfo(409, ConflictError, "A model of that name has another spec"),
    "model_replaced": CodeInfo(409, FencedError, "The model was deleted and created again"),
    "rolled_back": CodeInfo(409, FencedError, "The model continues at another clock"),
    "fenced": CodeInfo(409, FencedError, "A newer epoch has taken this one's place"),
    "outside_window": CodeInfo(409, ConflictError, "The push id is too old to tell whether it was applied"),
    "not_enough_memory": CodeInfo(409, ConflictError, "The shards do not have enough memory"),
    "disk_refuses": CodeInfo(409, ConflictError, "The scheduler cannot write to its disk"),
    "slot_gone": CodeInfo(409, ConflictError, "The slot of shared memory is not lent any more", True),
    "worker_required": CodeInfo(409, ConflictError, "This consistency mode accepts pushes from joined workers only"),
    "too_stale": CodeInfo(409, ConflictError, "The gradient's base version is too old"),
    "upload_in_progress": CodeInfo(409, ConflictError, "Another client is uploading the initial values"),
    "precondition_failed": CodeInfo(412, ConflictError, "The precondition does not match the current value"),
    "version_not_reached": CodeInfo(412, ConflictError, "The version asked for was not reached in time", True),
    "too_large": CodeInfo(413, RequestError, "The request exceeds a bound"),
    "unsupported_media_type": CodeInfo(415, RequestError, "The body's media type is not understood"),
    "unknown_codec": CodeInfo(415, RequestError, "The push is in a codec that is not known"),
    "range_not_satisfiable": CodeInfo(416, RequestError, "The file has nothing of the range asked for"),
    "wrong_owner": CodeInfo(421, StaleMapError, "Another shard owns that partition", True),
    "invalid": CodeInfo(422, RequestError, "Several parts of the request are wrong"),
    "invalid_field": CodeInfo(422, RequestError, "A field is unknown, missing or out of range"),
    "invalid_shape": CodeInfo(422, RequestError, "A tensor has the wrong shape"),
    "invalid_dtype": CodeInfo(422, RequestError, "A tensor has a dtype that cannot be used"),
    "invalid_encoding": CodeInfo(422, RequestError, "An encoded gradient does not fit its codec or its partition"),
    "invalid_range": CodeInfo(422, RequestError, "A range lies outside its parameter or overlaps another"),
    "non_finite": CodeInfo(422, RequestError, "A tensor holds NaN or infinity"),
    "non_finite_result": CodeInfo(422, RequestError, "Applying the gradient would give NaN or infinity"),
    "empty_push": CodeInfo(422, RequestError, "The push holds no gradients"),
    "id_reused": CodeInfo(422, RequestError, "The push id was already used with different content"),
    "reserved_worker": CodeInfo(422, RequestError, "Worker ids with a '/' are given out by the scheduler"),
    "not_built": CodeInfo(422, RequestError, "Not supported by this server"),
    "headers_too_large": CodeInfo(431, RequestError, "The request's headers exceed a bound"),
    "too_many_requests": _later("Too many requests are in flight", 0.5, 429),
    "internal": CodeInfo(500, InternalError, "paramserver has a bug"),
    "unavailable": _later("The node cannot serve now"),
    "no_shards": _later("No shard is alive to own the partitions", 2.0),
    "no_leader": _later("No scheduler answers"),
    "initializing": _later("The model's initial values are not complete"),
    "loading": _later("The partition is being recovered", 0.5),
    "queue_full": _later("A bound on queued or staged requests is reached"),
    "storage_unavailable": _later("Redis does not answer"),
    "corrupt_state": CodeInfo(503, CorruptState, "Stored state fails its checksum"),
    "in_doubt": _later("The request may have been done, but its answer is lost", cls=InDoubt),
    # Raised by clients only, never sent by a node.
    "unreachable": _later("No node of the cluster could be reached", cls=Unreachable),
}
"""Every problem code with its HTTP status; a test keeps `docs/errors.md` in step."""


def problem(
    code: str,
    detail: str,
    /,
    *,
    hint: str = "",
    retry_after_s: float | None = None,
    retryable: bool | None = None,
    errors: tuple[Mapping[str, Any], ...] = (),
    **members: Any,
) -> PsError:
    """Return the error for a code, in the code's class: `raise problem("unknown_model", "...")`."""
    return CODES[code].cls(
        code, detail, hint=hint, retry_after_s=retry_after_s, retryable=retryable, errors=errors, **members
    )


def as_problem(error: Exception) -> PsError:
    """Return the error to send for an exception: itself if it is a PsError, else `internal`, caused by it."""
    if isinstance(error, PsError):
        return error
    found = problem("internal", "paramserver has a bug; the node's log has more")
    found.__cause__ = error
    return found


def first_cause(error: BaseException) -> BaseException:
    """Return the first error in an exception group, however nested; else the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def validating() -> Iterator[None]:
    """Turn unexpected exceptions into `internal` errors, in code that only validates a request and changes nothing."""
    try:
        yield
    except PsError:
        raise
    except Exception as error:
        raise as_problem(error) from error


def combined(errors: Sequence[PsError], found: int = 0) -> PsError:
    """Return one error for several found in one request: the error itself if there is one, else one that lists them.

    Its code is the one they share, or `invalid`; its text has the first few.  `found` is their number if `errors` does
    not hold them all.  The list is bounded; its last entry says how many more there are.
    """
    count = max(found, len(errors))
    if count == 1:
        return errors[0]
    codes = {e.code for e in errors}
    code = codes.pop() if len(codes) == 1 else "invalid"
    listed = errors[: limits.ERRORS_LISTED_MAX]
    parts = [{"code": e.code, "detail": e.detail, **e.members} for e in listed]
    least = "at least " if count >= limits.ERRORS_FOUND_MAX else ""
    if count > len(listed):
        parts.append({"code": code, "detail": f"and {least}{count - len(listed)} more"})
    told = "; ".join(e.detail for e in errors[:TOLD_MAX]) + ("; ..." if count > TOLD_MAX else "")
    detail = f"{least}{count} parts of the request are wrong: {told}"
    return problem(code, detail, hint=errors[0].hint, errors=tuple(parts))


def is_foreign(error: PsError) -> bool:
    """Whether somebody else has answered in a node's place: it says nothing of what the cluster knows."""
    return "foreign" in error.members


TRY_AGAIN: Final = (408, 425, 429)
"""Statuses of refusals that are temporary: a proxy has not taken or not passed on the request."""
_STANDARD = {
    "type", "title", "status", "code", "detail", "retryable", "hint", "errors", "retry_after_s", "request_id"
}  # fmt: skip


def from_document(doc: Mapping[str, Any]) -> PsError:
    """Return the error that a problem document describes, also one of a newer version or of another service.

    For an unknown code, it is one of its status' class; what has not the type that we send is left out.
    """
    code, status, after, errors = str(doc.get("code")), doc.get("status"), doc.get("retry_after_s"), doc.get("errors")
    if code not in CODES:
        status = status if isinstance(status, int) else 500
        if status in TRY_AGAIN or status >= 502:
            code = "unavailable"
        elif status < 500:
            code = {401: "unauthorized", 404: "not_found", 409: "conflict", 413: "too_large"}.get(status, "malformed")
        else:
            code = "internal"
    return problem(
        code,
        str(doc.get("detail") or doc.get("title") or f"HTTP {status}"),
        hint=str(doc.get("hint") or ""),
        retry_after_s=after if isinstance(after, int | float) and 0 <= after < inf else None,
        retryable=doc.get("retryable") if code == doc.get("code") else None,
        errors=tuple([e for e in errors if isinstance(e, dict)]) if isinstance(errors, list) else (),
        **{k: v for k, v in doc.items() if k not in _STANDARD and k.isidentifier()},
    )
