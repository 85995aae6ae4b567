"""How a loop is compiled: without the interpreter's lock, in strict IEEE arithmetic."""

from typing import Any

import numba

_njit: Any = numba.njit  # which versions of numba publish types for it differs


def entry(function: Any) -> Any:
    """An entry point: releases the GIL, strict IEEE arithmetic, cached on disk where some folder can be written."""
    try:
        return _njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # "cannot cache function: no locator available": a read-only installation without a home
        return _njit(nogil=True, error_model="numpy")(function)


def part(function: Any) -> Any:
    """A loop that only entry points call: compiled into them, so it needs neither wrappers nor a cache of its own."""
    return _njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
