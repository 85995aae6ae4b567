"""The compiled way of float32 into elements of a dtype, where it is worth having; elsewhere NumPy does it."""

from collections.abc import Callable
from functools import cache
from typing import Final, TypeAlias

import numpy as np

from paramserver.types import F32, ITEMSIZE, AnyArray

COMPILED_FROM: Final = {"float32": 1 << 20, "float16": 1 << 18, "bfloat16": 1 << 18}
"""By dtype the elements of a gradient from which on the first push may wait for numba, which takes a second or two.

Below, NumPy takes no more than about a millisecond for a push.
"""

Encoder: TypeAlias = Callable[[F32, AnyArray], float]
"""Writes 1-D, contiguous values as elements of a dtype (bfloat16 as uint16) and returns the sum of their squares, in
float64; it is infinite where what was written is not finite."""


def encoder(dtype: str, elements: int) -> Encoder | None:
    """The compiled encoder for gradients of so many elements; None where NumPy is to do it.

    What decides does not change while a program runs, so the same gradient gets the same norm to the last bit.
    """
    least = COMPILED_FROM.get(dtype)
    return None if least is None or elements < least else _compiled(dtype)


@cache
def _compiled(dtype: str) -> Encoder | None:
    try:
        from paramserver.kernels import elements  # numba is loaded when first used: who only pulls stays light
    except ImportError:  # an image without numba
        return None
    loop, bits = elements.encoder(dtype), np.dtype(f"<u{ITEMSIZE[dtype]}")

    def encode(values: F32, out: AnyArray) -> float:
        return float(loop(values, out.view(bits)))

    return encode
