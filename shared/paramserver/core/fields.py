"""Validation of JSON objects: reads field by field, collects every error, suggests the nearest known name."""

import re
from collections.abc import Callable, Iterable, Mapping
from math import inf, isfinite
from operator import index
from reprlib import Repr
from types import MappingProxyType
from typing import Any, Final

from paramserver import limits
from paramserver.core.near import near
from paramserver.errors import PsError, combined, problem

NUMBER_MAX: Final = 1e38
"""Bound for numbers in requests, near the largest float32: shards compute in float32."""
INTEGER_MAX: Final = 1 << 53
"""Bound for integers in requests: up to here, every JSON reader gets them exactly."""
MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MODEL_NAME_HINT: Final = "letters, digits, '.', '_' and '-', starting with a letter or digit, at most 64"
WORKER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?", re.ASCII)
_SHORT: Final = Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Reader:
    """Reader of the fields of one JSON object that collects every error instead of stopping at the first.

    Raises RequestError for more than `limits.FIELDS_MAX` fields (`too_large`), and as soon as there are
    `limits.ERRORS_FOUND_MAX` errors.
    """

    def __init__(self, data: Any, where: str, errors: list[PsError]) -> None:
        self.where, self.errors = where, errors
        if not isinstance(data, Mapping):
            self.fail("", f"must be an object, not {type(data).__name__}")
            data = {}
        if len(data) > limits.FIELDS_MAX:
            detail = f"{where or 'the body'}: has {len(data)} fields; at most {limits.FIELDS_MAX} are allowed"
            raise problem("too_large", detail, where=where)
        self.data: dict[str, Any] = {k: v for k, v in data.items() if isinstance(k, str)}
        self.known: list[str] = []

    def fail(self, name: str, what: str, hint: str = "") -> None:
        path = f"{self.where}.{name}" if self.where and name else self.where or name
        self.errors.append(problem("invalid_field", f"{path or 'the body'}: {what}", hint=hint, where=path))
        if len(self.errors) >= limits.ERRORS_FOUND_MAX:
            raise combined(self.errors)

    def near(self, name: str, names: Iterable[str]) -> str:
        """Return a hint at the nearest of `names`; empty if none is similar, or after `limits.HINTS_MAX` errors."""
        found = near(name, names) if len(self.errors) < limits.HINTS_MAX else None
        return f"did you mean '{found}'?" if found else ""

    def take(self, name: str, default: Any, ok: Callable[[Any], bool], want: str, hint: str = "") -> Any:
        self.known.append(name)
        if name not in self.data:
            return default
        value = self.data[name]
        if not ok(value):
            self.fail(name, f"must be {want}, not {_SHORT.repr(value):.60}", hint)
            return default
        return value

    def number(self, name: str, default: float, low: float = -inf, high: float = inf, hint: str = "") -> float:
        def ok(v: Any) -> bool:
            return finite(v) and abs(v) < NUMBER_MAX and low <= v <= high

        least = f"above {-NUMBER_MAX:g}" if low == -inf else f"of at least {low:g}"
        most = f"below {NUMBER_MAX:g}" if high == inf else f"at most {high:g}"
        return float(self.take(name, default, ok, f"a number {least} and {most}", hint))

    def integer(self, name: str, default: int, low: int = 0, high: int = INTEGER_MAX) -> int:
        return int(self.take(name, default, lambda v: is_integer(v, low, high), f"an integer from {low} to {high}"))

    def optional_number(self, name: str) -> float | None:
        if self.data.get(name, None) is None:
            self.known.append(name)
            return None
        return self.number(name, 0.0, 0.0)

    def optional_integer(self, name: str, low: int = 1) -> int | None:
        if self.data.get(name, None) is None:
            self.known.append(name)
            return None
        return self.integer(name, low, low)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.take(name, default, lambda v: isinstance(v, bool), "true or false"))

    def object(self, name: str, hint: str = "") -> Mapping[str, Any]:
        """Return a field that is an object, for a reader of its own; empty by default."""
        found: Mapping[str, Any] = self.take(name, {}, lambda v: isinstance(v, Mapping), "an object", hint)
        return found

    def choice(
        self, name: str, default: str, options: tuple[str, ...], elsewhere: Mapping[str, str] = MappingProxyType({})
    ) -> str:
        """Return one of the options; `elsewhere` is what to write here for names that other libraries use."""
        value = self.take(name, default, lambda v: isinstance(v, str), f"one of {', '.join(options)}")
        if value not in options:
            meant = elsewhere.get(value.casefold())
            hint = f"write {meant}" if meant else self.near(value, options)
            self.fail(name, f"'{value:.60}' is not one of {', '.join(options)}", hint)
            return default
        return str(value)

    def done(self) -> None:
        for name in self.data:
            if name not in self.known:
                hint = self.near(name, self.known) or f"known fields: {', '.join(sorted(self.known))}"
                self.fail(name[:60], "is not a known field", hint)

    def tell(self) -> None:
        """Raise RequestError naming each error, if there are any."""
        if self.errors:
            raise combined(self.errors)


def is_name(value: Any) -> bool:
    """Whether a JSON value can name a model, shard, pool member, run, dataset or checkpoint."""
    return isinstance(value, str) and MODEL_NAME.fullmatch(value) is not None


def check_name(value: Any, of: str = "") -> None:
    """Raise RequestError (`invalid_field`) unless a JSON value can be a name; `of`: whose, such as " for a shard"."""
    if not is_name(value):
        raise problem("invalid_field", f"name: {value!r:.80} is not allowed{of}", hint=MODEL_NAME_HINT, where="name")


def check_model_name(name: Any) -> str:
    """Return the name if it is a valid model name; raises RequestError (`invalid_field`) otherwise."""
    if not is_name(name):
        raise problem("invalid_field", f"model name {name!r:.80} is not allowed", hint=MODEL_NAME_HINT)
    return str(name)


def check_param_name(name: Any) -> str:
    """Return the name if it is a valid parameter name: 1 to 256 bytes of UTF-8 without control characters.

    Raises RequestError (`invalid_field`) otherwise.
    """
    if (
        not isinstance(name, str)
        or not name
        or _CONTROL.search(name)
        or len(name.encode()) > limits.PARAM_NAME_BYTES_MAX
    ):
        raise problem("invalid_field", f"parameter name {name!r:.80} is not allowed", hint="1 to 256 bytes of UTF-8")
    return name


def merge_patch(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7396); neither argument is changed."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def finite(value: Any) -> bool:
    """Whether a JSON value is a finite number, below 1e308 in magnitude."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and isfinite(value if abs(value) < 1e308 else inf)
    )


def is_integer(value: Any, low: int = 0, high: int = INTEGER_MAX) -> bool:
    """Whether a JSON value is an integer from `low` to `high`."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def whole_number(name: str, value: Any, low: int = 0) -> int:
    """Return an argument as an integer; raises RequestError (`invalid_field`) unless it is one of at least `low`."""
    try:
        number = -1 if isinstance(value, bool) else index(value)
    except TypeError:
        number = -1
    if not low <= number <= INTEGER_MAX:
        detail = f"{name}: must be an integer from {low} to {INTEGER_MAX}, not {value!r:.40}"
        raise problem("invalid_field", detail, where=name)
    return number
