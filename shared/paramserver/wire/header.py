"""Typed reading of a frame's header: every field is what it should be, or the error says which one is not."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from paramserver import limits
from paramserver.core.fields import MODEL_NAME
from paramserver.errors import PsError, problem
from paramserver.types import ITEMSIZE

Lease: TypeAlias = tuple[int, tuple[str, ...]]
"""Its number, and the file that begins with each part's elements."""


class Header:
    """Typed reading of a frame's header."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        self.header = header

    def _wrong(self, name: str, want: str) -> PsError:
        return problem("malformed", f"frame header: {name} must be {want}, not {self.header.get(name)!r:.60}")

    def take(
        self, name: str, ok: Callable[[Any], bool], want: str, default: Any = None, *, needed: bool = False
    ) -> Any:
        value = self.header.get(name)
        if value is None and not needed:
            return default
        if not ok(value):
            raise self._wrong(name, want)
        return value

    # Each looks first at what is right and there, which nearly every value is: a header has twenty.

    def integer(self, name: str, default: Any = None, *, needed: bool = False) -> Any:
        value = self.header.get(name)
        if type(value) is int and 0 <= value < 1 << 63:
            return value
        if value is None and not needed:
            return default
        return self.take(name, count, "an integer of at least 0", default, needed=needed)

    def text(self, name: str, default: Any = None, *, needed: bool = False, size_max: int = 512) -> Any:
        value = self.header.get(name)
        if value is None and not needed:
            return default
        if type(value) is str and value.isascii() and 0 < len(value) <= size_max:
            return value

        def ok(v: Any) -> bool:
            return isinstance(v, str) and 0 < len(v.encode(errors="surrogatepass")) <= size_max

        return self.take(name, ok, f"a string of at most {size_max} bytes", default, needed=needed)

    def number(self, name: str, default: float | None = None) -> Any:
        value = self.header.get(name)
        if value is None:
            return default
        if type(value) is float and -1e38 < value < 1e38:
            return value

        def ok(v: Any) -> bool:
            return isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e38

        value = self.take(name, ok, "a finite number", default)
        return None if value is None else float(value)

    def model(self) -> str:
        value = self.header.get("model")
        if not isinstance(value, str) or MODEL_NAME.fullmatch(value) is None:
            raise self._wrong("model", "a model's name")
        return value

    def inner(self, name: str) -> dict[str, Any] | None:
        """A map within the header, or None where there is none."""
        value = self.header.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, "a map")
        return value

    def dtype(self) -> str:
        value = self.header.get("dtype")
        if value == "float32":
            return "float32"
        value = self.take("dtype", lambda v: isinstance(v, str), "a string", "float32")
        if value not in ITEMSIZE:
            raise problem("invalid_dtype", f"dtype {value!r:.40} is not one of {', '.join(ITEMSIZE)}")
        return str(value)

    def rows(self, name: str, width: int) -> list[list[Any]]:
        rows = self.header.get(name)
        if type(rows) is not list:
            raise self._wrong(name, "a list")
        if not all([type(r) is list and len(r) == width for r in rows]):
            raise self._wrong(name, f"a list of lists of {width}")
        return rows

    def leases(self) -> tuple[int, ...]:
        if "release" not in self.header:
            return ()
        ok = lambda v: isinstance(v, list) and all(map(count, v))  # noqa: E731
        return tuple(self.take("release", ok, "a list of leases", ()))

    def lease(self) -> Lease | None:
        if "lease" not in self.header:
            return None

        def ok(v: Any) -> bool:
            return (
                isinstance(v, list)
                and len(v) == 2
                and count(v[0])
                and isinstance(v[1], list)
                and all(isinstance(f, str) and f.isalnum() for f in v[1])
            )

        value = self.take("lease", ok, "[number, files]")
        return None if value is None else (value[0], tuple(value[1]))

    def ends(self) -> tuple[int, float] | None:
        """How many shards a push ends its worker's iteration on, and seconds to wait for the others."""
        if "ends" not in self.header:
            return None

        def ok(v: Any) -> bool:
            return (
                isinstance(v, list)
                and len(v) == 2
                and count(v[0])
                and isinstance(v[1], int | float)
                and 0 < v[0] <= limits.PARTITIONS_MAX
                and 0 <= v[1] <= limits.WAIT_S_MAX
            )

        value = self.take("ends", ok, "[shards, seconds]")
        return None if value is None else (value[0], float(value[1]))

    def counts(self, name: str, width: int) -> Any:
        """A tuple of tuples of `width` integers each."""
        rows = self.rows(name, width)
        if not all([type(v) is int and 0 <= v < 1 << 63 for row in rows for v in row]):
            raise self._wrong(name, f"a list of lists of {width} integers of at least 0")
        return tuple([tuple(row) for row in rows])


def count(v: Any) -> bool:
    return isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 63
