"""Compiled passes that round float32 to a dtype, test for NaN and infinity, and sum squares, all in one pass.

Used by workers.  Like `encoding`, this needs numba; a pass is compiled, or loaded from the cache, when first requested.
"""

from functools import cache
from typing import Any, Final

import numpy as np
from numba import types

from paramserver.kernels.jit import jit_entry_point, jit_internal
from paramserver.types import ABS_BITS, INF_BITS

_BLOCK: Final = 2048
"""Elements that are written and then squared while they are still in the first-level cache."""
_LANES: Final = 16
"""Partial sums of squares: they fix the order of addition, whatever the width of vectors."""
_ROWS: Final = 8
"""Squares that a lane sums up before it updates its partial sum in memory."""

# numba types the sum of two uint32 as uint64, and loops over those are not vectorized: so every result is narrowed.
_ONE = np.uint32(1)

_in32 = types.Array(types.float32, 1, "C", readonly=True, aligned=False)
_out16 = types.Array(types.uint16, 1, "C", aligned=False)
_out32 = types.Array(types.uint32, 1, "C", aligned=False)


@cache
def encoder(dtype: str) -> Any:
    """Return the pass for float32, float16 or bfloat16: (values, out) -> sum of the squares of the values.

    Both arrays are 1-D, contiguous and equally long: values are float32; out gets the elements' bits as uint32 or
    uint16, rounded to nearest, ties to even.  NaN stays NaN.  The sum is float64, and infinite if an element in `out`
    is not finite.
    """
    passes = {"float32": _float32, "float16": _float16, "bfloat16": _bfloat16}
    function, signature = passes[dtype], (_in32, _out32 if dtype == "float32" else _out16)
    return jit_entry_point(function, signature)


@jit_internal
def _add_squares(values: Any, lanes: Any) -> None:
    whole = values.size // (_LANES * _ROWS) * (_LANES * _ROWS)
    for i in range(0, whole, _LANES * _ROWS):
        for k in range(_LANES):
            rows = 0.0
            for j in range(_ROWS):
                x = np.float64(values[i + j * _LANES + k])
                rows += x * x
            lanes[k] += rows
    for i in range(whole, values.size):
        x = np.float64(values[i])
        lanes[i % _LANES] += x * x


@jit_internal
def _copy(bits: Any, out: Any, top: Any) -> Any:
    """Copy float32 bits; return the largest magnitude so far, as its bits.  The `_round` functions do the same."""
    for i in range(bits.size):
        u = bits[i]
        out[i] = u
        top = max(top, np.uint32(u & ABS_BITS))
    return top


@jit_internal
def _round_bfloat16(bits: Any, out: Any, top: Any) -> Any:
    for i in range(bits.size):
        u = bits[i]
        size = np.uint32(u & ABS_BITS)
        odd = np.uint32(np.uint32(u >> np.uint32(16)) & _ONE)
        r = np.uint32(np.uint32(u + np.uint32(np.uint32(0x7FFF) + odd)) >> np.uint32(16))
        r = np.uint32(0x7FC0) if size > INF_BITS else r
        out[i] = np.uint16(r)
        top = max(top, size)
    return top


@jit_internal
def _round_float16(bits: Any, out: Any, top: Any) -> Any:
    for i in range(bits.size):
        u = bits[i]
        size = np.uint32(u & ABS_BITS)
        sign = np.uint32(np.uint32(u >> np.uint32(16)) & np.uint32(0x8000))
        odd = np.uint32(np.uint32(size >> np.uint32(13)) & _ONE)
        # Change the exponent's bias from 127 to 15, and round off 13 bits.
        r = np.uint32(np.uint32(size + np.uint32(np.uint32(0xC8000FFF) + odd)) >> np.uint32(13))
        # Results below 2^-14 are multiples of 2^-24; adding 0.5 rounds to one.
        small = np.float32(np.float32(size.view(np.float32)) + np.float32(0.5)).view(np.uint32)
        r = np.uint32(np.uint32(small) - np.uint32(0x3F000000)) if size < np.uint32(0x38800000) else r
        r = np.uint32(0x7C00) if size >= np.uint32(0x47800000) else r
        r = np.uint32(0x7E00) if size > INF_BITS else r
        out[i] = np.uint16(np.uint32(r | sign))
        top = max(top, r)
    return top


@jit_internal
def _total(lanes: Any, finite: Any) -> Any:
    total = 0.0
    for k in range(_LANES):
        total += lanes[k]
    return total if finite else np.inf


def _float32(values: Any, out: Any) -> Any:
    lanes, top, bits = np.zeros(_LANES, np.float64), np.uint32(0), values.view(np.uint32)
    for start in range(0, values.size, _BLOCK):
        end = min(start + _BLOCK, values.size)
        top = _copy(bits[start:end], out[start:end], top)
        _add_squares(values[start:end], lanes)
    return _total(lanes, top < INF_BITS)


def _float16(values: Any, out: Any) -> Any:
    lanes, top, bits = np.zeros(_LANES, np.float64), np.uint32(0), values.view(np.uint32)
    for start in range(0, values.size, _BLOCK):
        end = min(start + _BLOCK, values.size)
        top = _round_float16(bits[start:end], out[start:end], top)
        _add_squares(values[start:end], lanes)
    return _total(lanes, top < np.uint32(0x7C00))


def _bfloat16(values: Any, out: Any) -> Any:
    lanes, top, bits = np.zeros(_LANES, np.float64), np.uint32(0), values.view(np.uint32)
    for start in range(0, values.size, _BLOCK):
        end = min(start + _BLOCK, values.size)
        top = _round_bfloat16(bits[start:end], out[start:end], top)
        _add_squares(values[start:end], lanes)
    return _total(lanes, top < np.uint32(0x7F7F8000))  # halfway above the largest bfloat16: rounds to infinity
