"""Ranges of elements as arrays: an update of an embedding table names thousands of them."""

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

RangeArray: TypeAlias = npt.NDArray[np.int64]
"""One row for each range [start, stop), sorted and disjoint, of shape (n, 2); never written to once it is made."""


def of_pairs(pairs: Any) -> RangeArray:
    """Return integer pairs as an array, unchecked.  Raises TypeError, ValueError or OverflowError for anything else."""
    if isinstance(pairs, list | tuple | np.ndarray):
        found = np.asarray(pairs)
        if found.dtype.kind in "iu" and found.ndim == 2 and found.shape[1] == 2:
            out = found.astype(np.int64)
            if found.dtype.kind == "u" and (out < 0).any():
                raise OverflowError("a range ends beyond 2^63 - 1")
            return out
    rows = [(operator.index(start), operator.index(stop)) for start, stop in pairs]
    return np.array(rows, np.int64).reshape(-1, 2)


def of_bytes(data: bytes) -> RangeArray:
    """Return the ranges whose array has these bytes, little-endian.  Raises ValueError for half a range."""
    return np.frombuffer(data, np.int64).reshape(-1, 2)


def elements(ranges: RangeArray) -> int:
    """Return the number of elements in all of them together."""
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def first_wrong(ranges: RangeArray) -> int | None:
    """Return the index of the first range that is empty, begins below 0 or before the end of the one before it."""
    before = np.concatenate(((0,), ranges[:-1, 1]))
    wrong = (ranges[:, 0] < before) | (ranges[:, 0] >= ranges[:, 1])
    return int(wrong.argmax()) if wrong.any() else None


def joined(ranges: RangeArray) -> RangeArray:
    """Return the ranges with those that touch as one."""
    if len(ranges) < 2 or (apart := ranges[1:, 0] != ranges[:-1, 1]).all():
        return ranges
    starts = np.concatenate((ranges[:1, 0], ranges[1:, 0][apart]))
    stops = np.concatenate((ranges[:-1, 1][apart], ranges[-1:, 1]))
    return np.column_stack((starts, stops))


def union(several: Sequence[RangeArray]) -> RangeArray:
    """Return the ranges that hold the elements of any of these, those that touch as one; there is at least one."""
    if len(several) == 1:
        return joined(several[0])
    together = np.concatenate(several)
    together = together[together[:, 0].argsort(kind="stable")]
    reached = np.maximum.accumulate(together[:, 1])
    apart = together[1:, 0] > reached[:-1]
    starts = np.concatenate((together[:1, 0], together[1:, 0][apart]))
    return np.column_stack((starts, np.concatenate((reached[:-1][apart], reached[-1:]))))


def touched(ranges: RangeArray, bounds: Sequence[tuple[int, int]]) -> list[bool]:
    """Return for each of `bounds`, non-empty [start, stop), whether it has an element of the ranges."""
    at = np.array(bounds, np.int64).reshape(-1, 2)
    first = ranges[:, 1].searchsorted(at[:, 0], "right")
    past = ranges[:, 0].searchsorted(at[:, 1], "left")
    found: list[bool] = (first < past).tolist()
    return found
