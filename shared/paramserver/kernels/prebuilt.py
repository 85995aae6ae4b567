"""Loads the compiled loops from a shared library, if `build.py` has made one: no numba, no LLVM, a faster start.

A library's name, `LEVEL-DIGEST.so`, has a digest of its source; libraries made from other source are ignored.  Of
several processor levels in the folder, the best one that this machine supports is loaded.
"""

import ctypes
import hashlib
import platform
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

FOLDER: Final = Path(__file__).with_name("prebuilt")
LEVELS: Final[dict[str, dict[str, frozenset[str]]]] = {
    "x86_64": {
        "x86-64-v3": frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
        "x86-64": frozenset(),
    },
    "aarch64": {"generic": frozenset()},
}
"""By architecture, best first: LLVM's name of each level, and the flags that it needs in Linux' /proc/cpuinfo."""

_I, _D, _B = ctypes.c_int64, ctypes.c_double, ctypes.c_bool
_A = (ctypes.c_void_p, _I)
_GRAD = (*_A, _I)
ENTRIES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "step": (_B, (_I, *_A * 3, *_A * 4, *_GRAD, *_A * 3, *_A * 4, _B)),
    "add": (None, (_B, *_A * 2, *_GRAD, _I, _D, *_A)),
    "finite": (_B, _GRAD),
    "squares": (_D, (*_GRAD, _I)),
    "write_rows": (_I, (_I, *_A, _I, _I, *_A)),
    "read_data_frames": (_I, (_I, *_A * 4, _I, _I, _I, _I, *_A)),
}
"""Result and argument types.  An array is passed as its address and its length, that of its first dimension."""


@cache
def digest() -> str:
    """Return the digest of the loops' source, including this file, which declares the other side of a library's calls.

    Raises OSError if the source is not there.
    """
    names = "build codes compiled intrinsics jit loads prebuilt socket_loops ../types".split()
    text = b"".join((Path(__file__).parent / f"{name}.py").read_bytes() for name in names)
    return hashlib.sha256(text).hexdigest()[:16]


def levels() -> list[str]:
    """Return the levels that this machine's processor supports, best first."""
    known = LEVELS.get(platform.machine(), {})
    try:
        line = next(x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("flags"))
    except (OSError, StopIteration):
        line = ""
    flags = frozenset(line.split())
    return [level for level, needed in known.items() if needed <= flags]


@cache
def load(folder: Path = FOLDER) -> Any:
    """Return the functions of `compiled` and `socket_loops`, or None if no library fits.

    Raises OSError if a library cannot be loaded.
    """
    if not folder.is_dir():
        return None
    made = digest()
    found = next((f for level in levels() if (f := folder / f"{level}-{made}.so").is_file()), None)
    return None if found is None else _functions(ctypes.CDLL(str(found)))


def compile_all(loops: Any) -> None:
    """Compile the entry points of `loops`, or load them from numba's cache; a prebuilt library has none to compile."""
    for function, signature in loops.SIGNATURES:
        with suppress(OSError):  # a full disk: it is compiled, but not cached
            function.compile(signature)
        function.compile(signature)  # does nothing if it is compiled
        function.disable_compile()


def _functions(library: ctypes.CDLL) -> SimpleNamespace:
    calls: dict[str, Any] = {}
    for name, (result, arguments) in ENTRIES.items():
        function = library[f"ps_{name}"]
        function.restype, function.argtypes = result, arguments
        calls[name] = partial(_call, function)
    return SimpleNamespace(**calls, SIGNATURES=())


def _call(function: Any, *arguments: Any) -> Any:
    flat: list[Any] = []
    for a in arguments:
        flat += (a.__array_interface__["data"][0], len(a)) if isinstance(a, np.ndarray) else (a,)
    return function(*flat)
