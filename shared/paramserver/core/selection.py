"""Selections: the elements of a model chosen by names, patterns and ranges, as parts of partitions.

The chosen elements, in the order of the flat vector, lie end to end in a *packed* vector; for a whole model that is
the flat vector itself.  Each partition's share of it is contiguous, so that each pulled partition is one copy.
"""

import fnmatch
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paramserver import limits
from paramserver.core import ranges as range_arrays
from paramserver.core.layout import Layout, Range
from paramserver.core.param_spec import ParamSpec
from paramserver.core.ranges import RangeArray
from paramserver.errors import combined, problem

Names: TypeAlias = str | Iterable[str]
Ranges: TypeAlias = Mapping[str, Sequence[Sequence[int]] | npt.NDArray[Any]]


class Piece(Struct, frozen=True):
    """The selected elements of one parameter in one partition, which lie end to end in the packed vector."""

    param: int
    """Index into `Selection.params`."""
    source: int
    """First element within the parameter's share of the packed vector."""
    length: int


class Part(Struct, frozen=True):
    """The selected elements of one partition."""

    partition: int
    ranges: RangeArray | None
    """Relative to the partition; None: the whole partition."""
    start: int
    """First element in the packed vector."""
    stop: int
    pieces: tuple[Piece, ...]
    """One for each parameter."""

    @property
    def range_count(self) -> int:
        """How many ranges a request has to name for it."""
        return 0 if self.ranges is None else len(self.ranges)


class Selection(Struct, frozen=True):
    """Selected elements of a model."""

    params: tuple[ParamSpec, ...]
    """The parameters with selected elements, in the model's order."""
    ranged: Mapping[str, RangeArray]
    """Flat element ranges, by name, of the parameters selected by ranges."""
    offsets: tuple[int, ...]
    """Offset of each of `params` in the packed vector, then the total."""
    parts: tuple[Part, ...]
    """In partition order."""
    shapes: Mapping[str, tuple[int, ...]] = {}
    """Shapes, by name, of parameters that are handed out in other ones."""

    @property
    def size(self) -> int:
        """Elements of the packed vector."""
        return self.offsets[-1]

    def shape(self, index: int) -> tuple[int, ...]:
        """Shape of one of `params` as the caller sees it: its own, or 1-D if it is selected by ranges."""
        p = self.params[index]
        if p.name in self.shapes:
            return self.shapes[p.name]
        return (self.offsets[index + 1] - self.offsets[index],) if p.name in self.ranged else p.shape

    @property
    def key(self) -> tuple[object, ...]:
        """Cache key, equal for selections of the same elements in the same shapes."""
        shapes = tuple([self.shape(i) for i in range(len(self.params))])
        return (tuple((p.name, p.shape) for p in self.params), range_key(self.ranged), shapes)


def range_key(ranged: Mapping[str, RangeArray]) -> tuple[tuple[str, bytes], ...]:
    """Return what can be hashed, and is equal for equal ranges."""
    return tuple([(name, ranged[name].tobytes()) for name in sorted(ranged)])


def listed(names: Names | None, ranges: Ranges | None) -> tuple[tuple[str, ...] | None, dict[str, RangeArray]]:
    """Return names and ranges in a form that can be iterated more than once.

    Raises RequestError (`invalid_field`, `invalid_range`) if they are not names and pairs.
    """
    if names is not None:
        try:
            names = (names,) if isinstance(names, str) else tuple(names)
            "".join(names)
        except TypeError:
            detail = f"names: must be parameter names or patterns, not {names!r:.60}"
            raise problem("invalid_field", detail, hint='pull(["w", "layers.*"])') from None
        if not names:
            raise problem("invalid_field", "names: is empty; leave it out to pull everything")
    if not ranges:
        return names, {}
    if not isinstance(ranges, Mapping):
        detail = f"ranges must be pairs (start, stop) by parameter name, not {ranges!r:.60}"
        raise problem("invalid_range", detail, hint='ranges={"w": [(0, 128)]}')
    return names, {name: _pairs(name, pairs) for name, pairs in ranges.items()}


def _pairs(name: str, pairs: Any) -> RangeArray:
    try:
        return range_arrays.of_pairs(pairs)
    except (TypeError, ValueError, OverflowError):
        detail = f"ranges of '{name}' must be pairs (start, stop) of integers, not {pairs!r:.60}"
        raise problem("invalid_range", detail, hint='ranges={"w": [(0, 128)]}') from None


def matched(layout: Layout, names: Names) -> list[str]:
    """Return the parameters that the names and patterns (`*`, `?`, `[...]`) match, in the model's order.

    Raises NotFoundError (`unknown_parameter`) listing everything without a match, RequestError (`too_large`) for too
    many patterns.
    """
    wanted = [names] if isinstance(names, str) else list(dict.fromkeys(names))
    found = dict.fromkeys([name for name in wanted if name in layout.by_name])
    others = [name for name in wanted if name not in found]
    patterns = [name for name in others if set(name) & set("*?[")]
    _check_patterns(patterns, len(layout.by_name))
    stray = set(others)
    for pattern in patterns:
        matches = re.compile(fnmatch.translate(pattern)).match  # not `fnmatch.filter`, which keeps 32,768 of them
        hits = [name for name in layout.by_name if matches(name)]
        found.update(dict.fromkeys(hits))
        if hits:
            stray.discard(pattern)
    if stray:
        raise combined(layout.spec.unknown([name for name in others if name in stray]))
    return sorted(found, key=layout.offsets.__getitem__)


def _check_patterns(patterns: Sequence[str], names: int) -> None:
    """Raise RequestError (`too_large`) for more patterns than are compiled and compared with so many names at once."""
    bound = min(limits.PATTERNS_MAX, limits.PATTERN_TESTS_MAX // max(1, names))
    size = sum(map(len, patterns))
    if len(patterns) > bound:
        detail = f"{len(patterns)} patterns; of a model of {names} parameters at most {bound} can be used"
    elif size > limits.PATTERN_CHARACTERS_MAX:
        detail = f"patterns of {size} characters; together they may have {limits.PATTERN_CHARACTERS_MAX}"
    else:
        return
    raise problem("too_large", detail, hint="give the names themselves, or leave `names` out for all", where="names")


def select(layout: Layout, names: Names | None = None, ranges: Ranges | None = None) -> Selection:
    """Select the parameters in `names` and in `ranges` (all if neither is given), limited to `ranges` where given.

    Raises NotFoundError (`unknown_parameter`) or RequestError (`invalid_range`, `too_large`).
    """
    if names is None and not ranges:
        return _whole(layout)
    ranges = ranges or {}
    if stray := [name for name in ranges if name not in layout.by_name]:  # patterns, too: ranges are of one parameter
        raise combined(layout.spec.unknown(stray))
    ranged = {name: _checked(layout, name, pairs) for name, pairs in ranges.items()}
    chosen = dict.fromkeys(ranged)
    if names is not None:
        chosen |= dict.fromkeys(matched(layout, names))
    if not ranged and len(chosen) == len(layout.by_name):
        return _whole(layout)
    selection = _selected(layout, chosen, ranged)
    if ranged and not selection.parts:
        raise problem("invalid_range", f"the ranges of '{next(iter(ranged))}' hold no element")
    return selection


_WHOLE: Final[WeakKeyDictionary[Layout, Selection]] = WeakKeyDictionary()
"""For each layout in use, the selection of all elements, which nearly every pull and push uses."""


def _whole(layout: Layout) -> Selection:
    whole = _WHOLE.get(layout)
    if whole is None:
        whole = _WHOLE[layout] = _selected(layout, layout.by_name, {})
    return whole


def _selected(layout: Layout, chosen: Iterable[str], ranged: Mapping[str, RangeArray]) -> Selection:
    at = layout.offsets.__getitem__  # order by it, not by the model's parameters, of which there may be thousands
    params = tuple([layout.by_name[n] for n in sorted(chosen, key=at)])
    touched: dict[int, tuple[int, list[Range | RangeArray], list[Piece]]] = {}
    base = end = 0  # of the current partition
    offsets = [0]
    for i, p in enumerate(params):
        (start, last), share = layout.offsets[p.name], 0
        left = ranged[p.name] + start if p.name in ranged else None  # None: all from `start` on
        while start < last if left is None else len(left):
            if left is not None:
                start = int(left[0, 0])
            if start >= end:
                index = bisect_right(layout.bounds, start) - 1
                base, end = layout.bounds[index : index + 2]
                _, ranges, pieces = touched[index] = (end - base, [], [])
            if left is None:
                stop = last if last < end else end
                ranges.append((start - base, stop - base))
                start, length = stop, stop - start
            else:
                own, left = _cut(left, end)
                ranges.append(own - base)
                length = range_arrays.elements(own)
            pieces.append(Piece(i, share, length))
            share += length
        offsets.append(offsets[-1] + share)
    parts: list[Part] = []
    packed = 0
    for index, (size, ranges, pieces) in touched.items():
        after = packed + sum([p.length for p in pieces])
        whole = after - packed == size
        parts.append(Part(index, None if whole else _merged(index, ranges), packed, after, tuple(pieces)))
        packed = after
    return Selection(params, ranged, tuple(offsets), tuple(parts))


def _cut(ranges: RangeArray, end: int) -> tuple[RangeArray, RangeArray]:
    """Return the ranges before `end`, where one may be cut, and those after; the array given is used for them."""
    count = int(ranges[:, 0].searchsorted(end))
    own = ranges[:count]
    if own[-1, 1] <= end:
        return own, ranges[count:]
    own = own.copy()
    own[-1, 1] = ranges[count - 1, 0] = end
    return own, ranges[count - 1 :]


def _merged(index: int, ranges: Sequence[Range | RangeArray] | RangeArray) -> RangeArray:
    """Return all ranges of a partition, in order, as one array.  Raises RequestError (`too_large`) for too many."""
    if any([isinstance(r, np.ndarray) for r in ranges]):
        ranges = np.concatenate([np.array(r, np.int64).reshape(-1, 2) for r in ranges])
    out = range_arrays.joined(np.array(ranges, np.int64))
    if len(out) > limits.RANGES_PER_REQUEST_MAX:
        detail = f"{len(out)} ranges lie in partition {index}; at most {limits.RANGES_PER_REQUEST_MAX} are allowed"
        raise problem("too_large", detail, hint="name fewer, or all of the parameter", where="ranges")
    return out


def _checked(layout: Layout, name: str, ranges: Any) -> RangeArray:
    size, found = layout.by_name[name].size, _pairs(name, ranges)
    outside = (found[:, 0] < 0) | (found[:, 0] >= found[:, 1]) | (found[:, 1] > size)
    if outside.any():
        start, stop = found[outside.argmax()]
        raise problem("invalid_range", f"ranges of '{name}': [{start}, {stop}) is not within its {size} elements")
    if (wrong := range_arrays.first_wrong(found)) is not None:
        detail = f"ranges of '{name}' must be sorted and must not overlap at {found[wrong, 0]}"
        raise problem("invalid_range", detail)
    return range_arrays.joined(found)
