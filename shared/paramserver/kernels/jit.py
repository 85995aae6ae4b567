"""Decorators that compile loops: they run without the GIL, in strict IEEE arithmetic."""

from typing import Any

import numba

_njit: Any = numba.njit  # some versions of numba have no types for it


def jit_entry_point(function: Any, signature: Any = None) -> Any:
    """Compile an entry point, cached on disk if a folder is writable; with a signature, at once."""
    try:
        return _njit(signature, nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # "cannot cache function: no locator available": a read-only installation without a home
        return _njit(signature, nogil=True, error_model="numpy")(function)


def jit_internal(function: Any) -> Any:
    """Compile a loop that only entry points call: as part of them, it needs neither wrappers nor a cache of its own."""
    return _njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
