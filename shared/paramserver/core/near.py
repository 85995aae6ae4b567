"""The nearest known name to one that is not known, for hints, at a cost that no request can drive up."""

import difflib
from collections.abc import Iterable

NEAR_MAX = 8
"""Names compared letter by letter for one hint; difflib takes up to 10 ms for a pair of long ones."""
LENGTH_MAX = 256
"""Longer ones get no hint: no known name is so long."""


def near(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `name` was most likely meant to be, or None."""
    size = len(name)
    if size > LENGTH_MAX:
        return None
    # Whatever differs more in length cannot reach difflib's threshold of 0.6, which is 2 * common / both lengths.
    alike = [n for n in names if 3 * size <= 7 * len(n) and 3 * len(n) <= 7 * size]
    if len(alike) > NEAR_MAX:
        pairs = _pairs(name)
        alike.sort(key=lambda n: len(pairs & _pairs(n)) / max(1, len(n) + size), reverse=True)
    found = difflib.get_close_matches(name, alike[:NEAR_MAX], 1)
    return found[0] if found else None


def _pairs(text: str) -> set[str]:
    return {text[i : i + 2] for i in range(len(text))}
