"""Converts values for parameters to arrays, and checks them before anything is sent."""

from typing import Any, cast

import numpy as np

from paramserver.errors import PsError, problem
from paramserver.types import ITEMSIZE, AnyArray, DType, DTypeLike


def dtype_name(dtype: DTypeLike) -> str:
    """Return the name of a dtype given by name or as NumPy or torch has it; of anything else, its repr."""
    try:
        return dtype if isinstance(dtype, str) else np.dtype(cast(Any, dtype)).name
    except TypeError:
        return repr(dtype).removeprefix("torch.")


def sendable(dtype: DTypeLike, how: str) -> DType:
    """Return the wire dtype that is meant.  Raises RequestError (`invalid_dtype`): any other cannot be `how`."""
    name = dtype_name(dtype)
    if name not in ITEMSIZE:
        raise problem("invalid_dtype", f"dtype '{name:.40}' cannot be {how}", hint=f"one of {', '.join(ITEMSIZE)}")
    return cast(DType, name)


def array_of(what: str, value: Any, where: str) -> AnyArray:
    """Return `value` as an array of numbers, of kind "V" if it is bfloat16.

    Raises RequestError (`invalid_dtype`), which calls it `what`.
    """
    try:
        array = np.asarray(value)
    except Exception as e:  # whatever a foreign __array__ raises: that of a GPU tensor, or one that requires grad
        hint = "a torch tensor needs .detach().cpu(), and .float() if it is bfloat16"
        detail = f"{what} cannot be converted to an array: {e}"
        raise problem("invalid_dtype", detail, hint=hint, where=where) from None
    if type(value) is not np.ndarray and isinstance(value, np.ndarray) and np.ma.is_masked(value):
        detail = f"{what} has masked elements"  # whose values NumPy keeps, and would be sent
        raise problem("invalid_dtype", detail, hint="array.filled(0) has 0 in their place", where=where)
    kind = array.dtype.kind
    if kind in "fiub" or (kind == "V" and array.dtype.name == "bfloat16"):  # NumPy builds the name on each access
        return array
    if kind == "O" and not array.shape:
        found = "None" if value is None else f"a {type(value).__name__}"
        raise problem("invalid_dtype", f"{what} is {found}, not an array of numbers", where=where)
    raise problem("invalid_dtype", f"{what} has dtype {array.dtype}, which cannot hold numbers", where=where)


def values_of(name: str, value: Any) -> AnyArray:
    """Return `value` as an array in native byte order.

    Raises RequestError: `invalid_dtype`, or `non_finite` for values that float32, in which the server computes, cannot
    hold.
    """
    array = array_of(f"'{name}'", value, name)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    with np.errstate(all="ignore"):
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
