"""Decorators that compile loops: they run without the GIL, in strict IEEE arithmetic."""

from typing import Any

import numba

from paramserver.kernels.prebuilt import digest

_njit: Any = numba.njit  # some versions of numba have no types for it


def jit_entry_point(function: Any, signature: Any = None) -> Any:
    """Compile an entry point, cached on disk if possible; with a signature, at once."""
    try:
        # Part of the name of the cached file.  numba notices only changes of the entry point's own file, not of the
        # files with what it calls: after an upgrade it would run the earlier version's code.
        function.__qualname__ = f"{function.__name__}_{digest()}"
        return _njit(signature, nogil=True, cache=True, error_model="numpy")(function)
    except (RuntimeError, OSError):  # "no locator available": a read-only installation without a home; or a full disk
        return _njit(signature, nogil=True, error_model="numpy")(function)


def jit_internal(function: Any) -> Any:
    """Compile a loop that only entry points call: as part of them, it needs neither wrappers nor a cache of its own."""
    return _njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
