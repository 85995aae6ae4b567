"""The compiled encoder of the int8 codec, used by workers; compiled, or loaded from the cache, on import."""

from functools import partial
from typing import Any, Final

import numpy as np
from numba import types

from paramserver.kernels.jit import jit_entry_point
from paramserver.types import ABS_BITS, INF_BITS, INT8_BLOCK

SCALE: Final = np.float32(1.0 / 127.0)
SMALLEST: Final = np.float32(2.0**-126)
"""The smallest normal float32; smaller scales count as zero, because their reciprocal might not be finite."""

_in32 = types.Array(types.float32, 1, "C", readonly=True, aligned=False)
_out32 = types.Array(types.float32, 1, "C", aligned=False)
_out8 = types.Array(types.int8, 1, "C", aligned=False)


@partial(jit_entry_point, signature=types.float64(_in32, _in32, _out32, _out8, _out32))
def int8(values: Any, residual: Any, scales: Any, q: Any, new_residual: Any) -> Any:
    """Encode values + residual into scales and q, and write the encoding error to `new_residual`.

    All but `scales` are equally long; `residual` and `new_residual` may be empty instead.  Returns the sum of the
    squares of the decoded values in float64; it is infinite if the sum of a value and its residual is not finite.
    """
    v = np.empty(INT8_BLOCK, np.float32)
    bits = np.empty(1, np.uint32)
    largest = bits.view(np.float32)
    total = 0.0
    worst = np.uint32(0)
    for b in range(scales.size):
        start = b * INT8_BLOCK
        n = min(INT8_BLOCK, values.size - start)
        top = np.uint32(0)
        if residual.size:
            for i in range(n):
                v[i] = values[start + i] + residual[start + i]
                top = max(top, np.uint32(np.float32(v[i]).view(np.uint32) & ABS_BITS))
        else:
            for i in range(n):
                v[i] = values[start + i]
                top = max(top, np.uint32(np.float32(v[i]).view(np.uint32) & ABS_BITS))
        worst = max(worst, top)
        bits[0] = top  # the bits of magnitudes have the same order, and integer maxima are vectorized
        scale = np.float32(largest[0] * SCALE)
        inverse = np.float32(0.0)
        if scale < SMALLEST:
            scale = np.float32(0.0)
        else:
            inverse = np.float32(1.0) / scale
        scales[b] = scale
        squares = np.int32(0)
        for i in range(n):
            k = np.int32(np.rint(v[i] * inverse))
            q[start + i] = np.int8(k)
            squares = np.int32(squares + k * k)
        if new_residual.size:
            for i in range(n):
                new_residual[start + i] = v[i] - scale * np.float32(q[start + i])
        total += np.float64(scale) * np.float64(scale) * squares
    return total if worst < INF_BITS else np.inf
