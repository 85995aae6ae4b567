"""The compiled conversion of float32 gradients to a dtype, for those large enough; NumPy converts the others."""

from collections.abc import Callable
from functools import cache
from typing import Final, TypeAlias

import numpy as np

from paramserver.types import F32, ITEMSIZE, AnyArray

COMPILED_FROM: Final = {"float32": 1 << 20, "float16": 1 << 18, "bfloat16": 1 << 18}
"""By dtype, the gradient size in elements from which on the first push may wait a second or two for numba.

Below it, NumPy takes at most about a millisecond per push.
"""

Encoder: TypeAlias = Callable[[F32, AnyArray], float]
"""Writes 1-D, contiguous values as elements of a dtype (bfloat16 as uint16) and returns the sum of the values' squares
in float64; it is infinite if an element written is not finite."""


def encoder(dtype: str, elements: int) -> Encoder | None:
    """Return the compiled encoder for gradients of `elements` elements in total; None if NumPy should be used.

    The choice does not change while a process runs, so the same gradient gets the same norm to the last bit.
    """
    least = COMPILED_FROM.get(dtype)
    return None if least is None or elements < least else _compiled(dtype)


@cache
def _compiled(dtype: str) -> Encoder | None:
    try:
        from paramserver.kernels import elements  # imported here, so that clients that only pull do not load numba
    except ImportError:  # an image without numba
        return None
    loop, bits = elements.encoder(dtype), np.dtype(f"<u{ITEMSIZE[dtype]}")

    def encode(values: F32, out: AnyArray) -> float:
        return float(loop(values, out.view(bits)))

    return encode
