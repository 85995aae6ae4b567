"""Compile the loops into shared libraries that need neither numba nor LLVM.

    python -m paramserver.kernels.build [FOLDER]

Builds one library for each feature level of this machine's architecture, to be loaded by `prebuilt.py`.  Needs a C
compiler and binutils.  Meant for container images that should be small and start fast; elsewhere numba compiles for the
exact processor.
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from paramserver.kernels import codes, prebuilt

RUNTIME: Final = r"""
/* Called by numba's code: scratch memory, and error functions, which abort. */
#include <stdlib.h>
typedef struct { size_t count; void *end, *info, *data; size_t size; void *allocator; } Info;
void *NRT_MemInfo_alloc_aligned(size_t size, unsigned align) {
  size_t head = (sizeof(Info) + align - 1) / align * align;
  Info *info = aligned_alloc(align, (head + size + align - 1) / align * align);
  if (info == NULL) abort();
  *info = (Info){1, NULL, NULL, (char *)info + head, size, NULL};
  return info;
}
void NRT_MemInfo_call_dtor(void *info) { free(info); }
#define ABORTS(name) void name(void) { abort(); }
"""
DEFINED: Final = {
    "NRT_MemInfo_alloc_aligned", "NRT_MemInfo_call_dtor", "memset", "memcpy", "memmove",
    "poll", "readv", "setsockopt", "writev",
}  # fmt: skip


def build(folder: Path) -> list[Path]:
    """Build the libraries in `folder` and return their paths; raises CalledProcessError if a compiler fails."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for level in prebuilt.LEVELS.get(platform.machine(), {}):
        # numba reads its target processor when it is imported, so each level is compiled in its own process.
        env = os.environ | {"NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": ""}
        target = folder / f"{level}-{prebuilt.digest()}.so"
        subprocess.run(
            [sys.executable, "-m", "paramserver.kernels.build", "--level", level, str(target)], env=env, check=True
        )
        made.append(target)
    return made


def _pointers(numba_types: Any) -> dict[str, Any]:
    t = numba_types
    p = t.CPointer
    arrays = (p(t.float32), p(t.float64), p(t.uint16), p(t.int8), p(t.uint32))
    grad = (*(x for array in arrays for x in (array, t.int64)), t.int64)
    f = p(t.float32)
    tables = (p(t.float64), p(t.int64), t.int64, p(t.float64), t.int64)
    slots = (f, t.int64) * 3
    mean = (p(t.int64), t.int64, p(t.float64))
    return {
        "step": t.boolean(
            t.int64, t.int64, *tables, f, *slots, *grad, *mean, f, f, f, f, t.int64, t.boolean,
        ),
        "add": t.void(t.boolean, f, t.int64, *grad, t.int64, t.float64),
        "finite": t.boolean(*grad),
        "squares": t.float64(*grad, t.int64),
        "write_rows": t.int64(t.int64, p(t.int64), t.int64, t.int64, t.int64, p(t.int32)),
        "read_data_frames": t.int64(
            t.int64, p(t.int64), t.int64, p(t.int64), p(t.int64), p(t.uint8),
            t.int64, t.int64, t.int64, t.int64, p(t.int32),
        ),
    }  # fmt: skip


def _entries() -> dict[str, Any]:
    """Return the C functions by name, each a wrapper of the loop of that name."""
    import numba
    from numba import types

    from paramserver.kernels import compiled, socket_loops

    own = types.Array(types.float32, 1, "C")
    _numba: Any = numba  # some versions of numba have no types for it
    carray = _numba.carray
    loops = []
    for function, signature in (*compiled.SIGNATURES, *socket_loops.SIGNATURES):
        # Outputs are our own, aligned arrays; numba does not convert those to array types that may be unaligned.
        loop = _numba.njit(nogil=True, error_model="numpy")(function.py_func)
        loop.compile(tuple(own if t == compiled.OUT else t for t in signature))
        loop.disable_compile()
        loops.append(loop)
    c_step, c_add, c_finite, c_squares, c_write_rows, c_read_data_frames = loops
    columns = codes.COLUMNS

    def step(  # type: ignore[no-untyped-def]
        kind, slots, h, spans, n_spans, table, n_rows, w, s0, n0, s1, n1, s2, n2,
        g32, a, g64, b, g16, c, g8, d, at, e, code, parts, n_parts, weights, out, o0, o1, o2, n, nontemporal,
    ):  # fmt: skip
        return c_step(
            kind, slots, carray(h, 5), carray(spans, (n_spans, 3)), carray(table, (n_rows, columns)), carray(w, n),
            carray(s0, n0), carray(s1, n1), carray(s2, n2), carray(g32, a), carray(g64, b), carray(g16, c),
            carray(g8, d), carray(at, e), code, carray(parts, n_parts), carray(weights, n_parts + 1),
            carray(out, n), carray(o0, n0), carray(o1, n1), carray(o2, n2), nontemporal,
        )  # fmt: skip

    def add(first, out, n, g32, a, g64, b, g16, c, g8, d, at, e, code, start, weight):  # type: ignore[no-untyped-def]
        grad = (carray(g32, a), carray(g64, b), carray(g16, c), carray(g8, d), carray(at, e))
        c_add(first, carray(out, n), grad[0], grad[1], grad[2], grad[3], grad[4], code, start, weight)

    def finite(g32, a, g64, b, g16, c, g8, d, at, e, code):  # type: ignore[no-untyped-def]
        return c_finite(carray(g32, a), carray(g64, b), carray(g16, c), carray(g8, d), carray(at, e), code)

    def squares(g32, a, g64, b, g16, c, g8, d, at, e, code, size):  # type: ignore[no-untyped-def]
        return c_squares(carray(g32, a), carray(g64, b), carray(g16, c), carray(g8, d), carray(at, e), code, size)

    def write_rows(fd, rows, n, wait_ms, waits, words):  # type: ignore[no-untyped-def]
        return c_write_rows(fd, carray(rows, (n, 2)), wait_ms, waits, carray(words, 2))

    def read_data_frames(  # type: ignore[no-untyped-def]
        fd, rows, n, scratch, frame, head, low, bytes_max, wait_ms, waits, words,
    ):  # fmt: skip
        return c_read_data_frames(
            fd, carray(rows, (n, 2)), carray(scratch, (n + 1, 2)), carray(frame, 4), carray(head, 9),
            low, bytes_max, wait_ms, waits, carray(words, 2),
        )  # fmt: skip

    return {f.__name__: f for f in (step, add, finite, squares, write_rows, read_data_frames)}


def _compile(level: str, target: Path) -> None:
    import numba
    from llvmlite import binding as llvm
    from numba import types

    signatures = _pointers(types)
    entries = _entries()  # this also makes numba initialize LLVM
    triple = llvm.get_process_triple()
    machine = llvm.Target.from_triple(triple).create_target_machine(level, "", 3, reloc="pic", codemodel="default")
    with tempfile.TemporaryDirectory() as scratch:
        objects = []
        for name, function in entries.items():
            compiled: Any = numba.cfunc(signatures[name])(function)
            text = str(compiled._library._final_module).replace(compiled.native_name, f"ps_{name}")
            objects.append(Path(scratch) / f"{name}.o")
            objects[-1].write_bytes(machine.emit_object(llvm.parse_assembly(text)))
        listed = subprocess.run(["nm", "-u", *objects], capture_output=True, text=True, check=True).stdout
        missing = {line.split()[1] for line in listed.splitlines() if line.split()[:1] in (["U"], ["w"])} - DEFINED
        runtime = Path(scratch) / "runtime.c"
        runtime.write_text(RUNTIME + "\n".join(f"ABORTS({name})" for name in sorted(missing)))
        exported = [f"-Wl,--export-dynamic-symbol=ps_{name}" for name in prebuilt.ENTRIES]
        flags = [
            "-O2",
            "-w",
            "-fPIC",
            "-fno-builtin",
            "-shared",
            "-s",
            "-Wl,-Bsymbolic,-z,text,-z,noexecstack",
            *exported,
        ]
        subprocess.run(["cc", *flags, "-o", str(target), *map(str, objects), str(runtime)], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--level"]:
        _compile(sys.argv[2], Path(sys.argv[3]))
    else:
        for path in build(Path(sys.argv[1]) if len(sys.argv) > 1 else prebuilt.FOLDER):
            print(path)
