"""Converts values for parameters to arrays, and checks them before anything is sent."""

from typing import Any

import numpy as np

from paramserver.errors import PsError, problem
from paramserver.types import AnyArray


def values_of(name: str, value: Any) -> AnyArray:
    """Return `value` as an array in native byte order.

    Raises RequestError: `invalid_dtype`, or `non_finite` for values that float32, in which the server computes, cannot
    hold.
    """
    try:
        array = np.asarray(value)
    except Exception as e:  # a foreign __array__ may raise anything
        raise problem("invalid_dtype", f"'{name}' cannot be converted to an array: {e}", where=name) from None
    if array.dtype.name != "bfloat16" and array.dtype.kind not in "fiub":
        raise problem("invalid_dtype", f"'{name}' has dtype {array.dtype}, which cannot hold values", where=name)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    with np.errstate(over="ignore"):
        fits = bool(np.isfinite(array.astype(np.float32, copy=False)).all())
    if not fits:
        finite = array.dtype.kind == "f" and bool(np.isfinite(array).all())
        raise not_held(name, "float32" if finite else None)
    return array


def not_held(name: str, dtype: str | None) -> PsError:
    """Return the error for a parameter that holds NaN or infinity or, with `dtype`, numbers too large for it."""
    if dtype is None:
        return problem("non_finite", f"'{name}' holds NaN or infinity", where=name)
    return problem("non_finite", f"'{name}' holds numbers that are too large for {dtype}", where=name)
