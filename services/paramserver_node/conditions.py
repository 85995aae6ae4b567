"""Headers `If-Match` and `If-None-Match` (RFC 9110, 13.1.1 and 13.1.2) and `Idempotency-Key`."""

from dataclasses import dataclass
from typing import Final, Self

from starlette.datastructures import Headers

from paramserver.core.shard.set_operation import precondition_failed
from paramserver.errors import problem
from paramserver.limits import IDEMPOTENCY_KEY_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Conditions:
    """The entity tags of both headers, or `*`; "" if absent."""

    match: str = ""
    none_match: str = ""

    @classmethod
    def of(cls, headers: Headers) -> Self:
        """Return the conditions of a request; the tags of a repeated header are joined."""
        return cls(*(", ".join(headers.getlist(name)) for name in ("if-match", "if-none-match")))

    def check(self, tag: str) -> None:
        """Check the conditions of a change against the present tag, which is "" if there is no value yet.

        Raises ConflictError (`precondition_failed`) if they do not hold.
        """
        self._check_match(tag)
        if tag and _matches(self.none_match, tag):
            raise precondition_failed(f"there is a value, and its ETag is {tag}")

    def unchanged(self, tag: str) -> bool:
        """Return whether a reader's copy is current; raises ConflictError (`precondition_failed`) by `If-Match`."""
        self._check_match(tag)
        return _matches(self.none_match, tag)

    def _check_match(self, tag: str) -> None:
        if self.match and not (tag and _matches(self.match, tag, weakly=False)):
            raise precondition_failed(
                f"the present ETag is {tag}, none of {self.match:.200}" if tag else "the parameter has no value yet"
            )


ANY: Final = Conditions()


def idempotency_key(headers: Headers) -> str | None:
    """Return the `Idempotency-Key` of a push, if it has one, as one character per byte.

    Raises RequestError (`invalid_field`) for a wrong length, or for bytes that are not UTF-8, because a node that
    forwards the push cannot pass them on unchanged.
    """
    key = headers.get("idempotency-key")
    if key is None:
        return None
    try:
        key.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise problem("invalid_field", "Idempotency-Key must be UTF-8", where="Idempotency-Key") from None
    if not 0 < len(key) <= IDEMPOTENCY_KEY_BYTES_MAX:
        detail = f"Idempotency-Key must be of 1 to {IDEMPOTENCY_KEY_BYTES_MAX} bytes"
        raise problem("invalid_field", detail, where="Idempotency-Key")
    return key


def _matches(tags: str, tag: str, *, weakly: bool = True) -> bool:
    candidates = [t.strip() for t in tags.split(",")]
    if weakly:
        candidates = [t.removeprefix("W/") for t in candidates]
    return "*" in candidates or tag in candidates
