"""The known name nearest to an unknown one, for hints, at a cost that no request can drive up."""

import difflib
from collections.abc import Iterable

NEAR_MAX = 8
"""Candidates that difflib compares for one hint; it takes up to 10 ms for a pair of long names."""
LENGTH_MAX = 256
"""Longer names get no hint, because no known name is that long."""


def near(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that was most likely meant by `name`, or None."""
    size = len(name)
    if size > LENGTH_MAX:
        return None
    # Names that differ more in length cannot reach difflib's cutoff of 0.6: 2 * common letters / sum of lengths.
    alike = [n for n in names if 3 * size <= 7 * len(n) and 3 * len(n) <= 7 * size]
    folded = name.casefold()
    for n in alike:  # difflib finds nothing alike in 'SSP' and 'ssp'
        if len(n) == size and n.casefold() == folded:
            return n
    if len(alike) > NEAR_MAX:
        pairs = _pairs(name)
        alike.sort(key=lambda n: len(pairs & _pairs(n)) / max(1, len(n) + size), reverse=True)
    found = difflib.get_close_matches(name, alike[:NEAR_MAX], 1)
    return found[0] if found else None


def _pairs(text: str) -> set[str]:
    return {text[i : i + 2] for i in range(len(text))}
