"""Conversion of gradients of every dtype and codec to float32, a block at a time, for the compiled entry points.

A gradient is (raw, code): its bytes, uint8 of any alignment, and what they are.
"""

from typing import Any

import numpy as np

from paramserver.kernels import codes
from paramserver.kernels.intrinsics import float32_at, float64_at, int8_at, uint16_at, uint32_at
from paramserver.kernels.jit import jit_internal
from paramserver.types import ABS_BITS, INT8_BLOCK


@jit_internal
def magnitude_bits(x: Any) -> Any:
    """Return the magnitude of a float32 as its bits, which have the same order; infinity and NaN are the largest."""
    return np.uint32(np.float32(x).view(np.uint32) & ABS_BITS)


@jit_internal
def _load_half(half: Any, g: Any) -> None:
    """g[:] = float16 bits as float32, exactly (numba has no float16 on CPUs)."""
    bits = g.view(np.uint32)
    for i in range(half.size):
        h = np.uint32(half[i])
        magnitude = np.uint32(h & np.uint32(0x7FFF))
        # Subnormals get the exponent of 2^-14, which is subtracted again below; NaN and infinity get the highest one.
        offset = np.uint32((113 if magnitude < np.uint32(0x0400) else 112) << 23)
        offset = np.uint32(224 << 23) if magnitude >= np.uint32(0x7C00) else offset
        bits[i] = np.uint32((magnitude << np.uint32(13)) + offset)
    for i in range(half.size):
        h = np.uint32(half[i])
        value = g[i] - (np.float32(2.0**-14) if h & np.uint32(0x7C00) == np.uint32(0) else np.float32(0.0))
        g[i] = -value if h & np.uint32(0x8000) else value


@jit_internal
def int8_views(raw: Any) -> Any:
    """Return (scales, numbers) of a partition in int8."""
    blocks = -(-raw.size // codes.INT8_ROW)
    return float32_at(raw.ctypes.data, 0, blocks), int8_at(raw.ctypes.data, 4 * blocks, raw.size - 4 * blocks)


@jit_internal
def topk_views(raw: Any) -> Any:
    """Return (indices, values) of a partition in topk."""
    count = raw.size // 8
    return uint32_at(raw.ctypes.data, 0, count), float32_at(raw.ctypes.data, count, count)


@jit_internal
def _load_int8(raw: Any, start: int, g: Any) -> None:
    """g[:] = the int8 numbers from `start` on, each times the scale of its block."""
    scales, q = int8_views(raw)
    i = 0
    while i < g.size:
        block = (start + i) // INT8_BLOCK
        stop = min(g.size, (block + 1) * INT8_BLOCK - start)
        scale = scales[block]
        for j in range(i, stop):
            g[j] = scale * np.float32(q[start + j])
        i = stop


@jit_internal
def _load_topk(raw: Any, start: int, g: Any) -> None:
    """g[:] = the elements from `start` on: the values at the ascending indices, zero elsewhere."""
    at, values = topk_views(raw)
    for i in range(g.size):
        g[i] = np.float32(0.0)
    low, high = 0, at.size
    while low < high:
        middle = (low + high) // 2
        if np.int64(at[middle]) < start:
            low = middle + 1
        else:
            high = middle
    while low < at.size:
        place = np.int64(at[low]) - start
        if place >= g.size:
            break
        if place >= 0:  # always true for ascending indices, but memory before the block must never be written
            g[place] = values[low]
        low += 1


@jit_internal
def load(raw: Any, code: int, start: int, g: Any) -> Any:
    """g[:] = the gradient from `start` on, as float32; returns the largest `magnitude_bits`."""
    n = g.size
    worst = np.uint32(0)
    if code == codes.F32_CODE:
        src = float32_at(raw.ctypes.data, start, n)
        for i in range(n):
            g[i] = src[i]
            worst = max(worst, magnitude_bits(src[i]))
        return worst
    if code == codes.F64_CODE:
        wide = float64_at(raw.ctypes.data, start, n)
        for i in range(n):
            g[i] = np.float32(wide[i])
    elif code == codes.F16_CODE:
        _load_half(uint16_at(raw.ctypes.data, start, n), g)
    elif code == codes.INT8_CODE:
        _load_int8(raw, start, g)
    elif code == codes.TOPK_CODE:
        _load_topk(raw, start, g)
    else:
        brain = uint16_at(raw.ctypes.data, start, n)
        bits = g.view(np.uint32)
        for i in range(n):
            bits[i] = np.uint32(np.uint32(brain[i]) << np.uint32(16))
    for i in range(n):
        worst = max(worst, magnitude_bits(g[i]))
    return worst


@jit_internal
def add_to(first: Any, g: Any, factor: Any, out: Any) -> None:
    """out (+)= factor * g; `first` assigns instead of adding."""
    if first:
        for i in range(g.size):
            out[i] = factor * g[i]
    else:
        for i in range(g.size):
            out[i] = out[i] + factor * g[i]


@jit_internal
def load_mean(parts: Any, weights: Any, start: int, g: Any) -> Any:
    """g[:] = the weighted mean of float32 gradients, from `start` on; returns the largest `magnitude_bits`.

    `parts` are the gradients' addresses, in the order of addition; `weights` holds a weight for each, then the divisor.
    """
    for k in range(parts.size):
        add_to(k == 0, float32_at(parts[k], start, g.size), np.float32(weights[k]), g)
    divisor = np.float32(weights[parts.size])
    if divisor != np.float32(1.0):
        for i in range(g.size):
            g[i] = g[i] / divisor
    worst = np.uint32(0)
    for i in range(g.size):
        worst = max(worst, magnitude_bits(g[i]))
    return worst
