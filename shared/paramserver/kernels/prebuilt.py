"""Loads the compiled loops from a shared library, if `build.py` has made one: no numba, no LLVM, a faster start.

A library's name, `LEVEL-DIGEST.so`, has a digest of its source; libraries made from other source are ignored.  Of
several processor levels in the folder, the best one that this machine supports is loaded.
"""

import ctypes
import hashlib
import platform
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

FOLDER: Final = Path(__file__).with_name("prebuilt")
LEVELS: Final[dict[str, dict[str, frozenset[str]]]] = {
    "x86_64": {
        "x86-64-v3": frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
        "x86-64": frozenset(),
    },
    "aarch64": {"generic": frozenset()},
}
"""By architecture, best first: LLVM's name of each level, and the flags that it needs in Linux' /proc/cpuinfo."""

_I, _D, _P = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_GRAD = [_P, _I] * 5 + [_I]
ENTRIES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "step": (
        ctypes.c_bool,
        [_I, _I, _P, _P, _I, _P, _I, _P, *[_P, _I] * 3, *_GRAD, _P, _I, _P, *[_P] * 4, _I, ctypes.c_bool],
    ),
    "add": (None, [ctypes.c_bool, _P, _I, *_GRAD, _I, _D]),
    "finite": (ctypes.c_bool, _GRAD),
    "squares": (_D, [*_GRAD, _I]),
    "write_rows": (_I, [_I, _P, _I, _I, _I, _P]),
    "read_data_frames": (_I, [_I, _P, _I, _P, _P, _P, _I, _I, _I, _I, _P]),
}
"""Result and argument types.  An array is passed as its address, followed by its length unless that is known."""


def digest() -> str:
    """Return the digest of a library's source, including this file, because it declares the calls' other side."""
    names = (
        "build.py",
        "codes.py",
        "compiled.py",
        "intrinsics.py",
        "jit.py",
        "loads.py",
        "prebuilt.py",
        "socket_loops.py",
    )
    text = b"".join(Path(__file__).with_name(name).read_bytes() for name in names)
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


def _functions(library: ctypes.CDLL) -> SimpleNamespace:
    calls: dict[str, Any] = {}
    for name, (result, arguments) in ENTRIES.items():
        calls[name] = library[f"ps_{name}"]
        calls[name].restype, calls[name].argtypes = result, arguments
    c_step, c_add, c_finite, c_squares, c_write_rows, c_read_data_frames = (calls[name] for name in ENTRIES)

    def step(kind: int, slots: int, h: Any, spans: Any, table: Any, w: Any, *rest: Any) -> bool:
        s0, s1, s2, *grad, parts, weights, out, o0, o1, o2, nontemporal = rest
        slots_in = (_address(s0), s0.size, _address(s1), s1.size, _address(s2), s2.size)
        mean = (_address(parts), parts.size, _address(weights))
        outputs = (_address(out), _address(o0), _address(o1), _address(o2), out.size, nontemporal)
        numbers = (_address(h), _address(spans), len(spans), _address(table), len(table))
        return bool(c_step(kind, slots, *numbers, _address(w), *slots_in, *_flat(grad), *mean, *outputs))

    def add(first: bool, out: Any, *rest: Any) -> None:
        *grad, start, weight = rest
        c_add(first, _address(out), out.size, *_flat(grad), start, weight)

    def finite(*grad: Any) -> bool:
        return bool(c_finite(*_flat(grad)))

    def squares(*rest: Any) -> float:
        *grad, size = rest
        return float(c_squares(*_flat(grad), size))

    def write_rows(fd: int, rows: Any, wait_ms: int, waits: int, words: Any) -> int:
        return int(c_write_rows(fd, _address(rows), len(rows), wait_ms, waits, _address(words)))

    def read_data_frames(fd: int, rows: Any, scratch: Any, frame: Any, head: Any, *rest: Any) -> int:
        *numbers, words = rest
        buffers = (_address(rows), len(rows), _address(scratch), _address(frame), _address(head))
        return int(c_read_data_frames(fd, *buffers, *numbers, _address(words)))

    functions = (step, add, finite, squares, write_rows, read_data_frames)
    return SimpleNamespace(**{f.__name__: f for f in functions}, SIGNATURES=())


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _flat(grad: Any) -> list[int]:
    """Return the addresses and lengths of a gradient's five typed arrays, then its code."""
    *arrays, code = grad
    return [number for a in arrays for number in (_address(a), a.size)] + [code]
