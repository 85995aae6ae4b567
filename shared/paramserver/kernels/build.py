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


def _loops() -> list[Any]:
    """Return the loops in the order of `prebuilt.ENTRIES`, compiled for this process's level."""
    import numba
    from numba import types

    from paramserver.kernels import compiled, socket_loops

    own = types.Array(types.float32, 1, "C")
    _numba: Any = numba  # some versions of numba have no types for it
    loops = []
    for function, signature in (*compiled.SIGNATURES, *socket_loops.SIGNATURES):
        # Outputs are our own, aligned arrays; numba does not convert those to array types that may be unaligned.
        loop = _numba.njit(nogil=True, error_model="numpy")(function.py_func)
        loop.compile(tuple(own if t == compiled.OUT else t for t in signature))
        loop.disable_compile()
        loops.append(loop)
    return loops


def _c_signature(loop: Any) -> Any:
    """Return the type of the C function that wraps a loop (see `prebuilt.ENTRIES`)."""
    import numba

    types: Any = numba.types
    (signature,) = loop.nopython_signatures
    arguments: list[Any] = []
    for t in signature.args:
        arguments += (types.CPointer(t.dtype), types.int64) if isinstance(t, types.Array) else (t,)
    return signature.return_type(*arguments)


def _wrappers(loops: list[Any]) -> list[Any]:
    """Return the C functions, each of which calls a loop."""
    import numba

    _numba: Any = numba
    array = _numba.carray  # (address, shape) -> the array there
    c_step, c_add, c_finite, c_squares, c_write_rows, c_read_data_frames = loops
    columns = codes.COLUMNS

    def step(  # type: ignore[no-untyped-def]
        kind, h, n_h, spans, n_spans, table, n_rows, w, n_w, s0, n0, s1, n1, s2, n2, raw, n_raw, code,
        parts, n_parts, weights, n_weights, ranges, n_ranges, out, n_out, o0, m0, o1, m1, o2, m2, nontemporal,
    ):  # fmt: skip
        return c_step(
            kind, array(h, n_h), array(spans, (n_spans, 3)), array(table, (n_rows, columns)), array(w, n_w),
            array(s0, n0), array(s1, n1), array(s2, n2), array(raw, n_raw), code, array(parts, n_parts),
            array(weights, n_weights), array(ranges, (n_ranges, 2)),
            array(out, n_out), array(o0, m0), array(o1, m1), array(o2, m2), nontemporal,
        )  # fmt: skip

    def add(  # type: ignore[no-untyped-def]
        first, out, n, touched, n_touched, raw, n_raw, code, start, weight, ranges, n_ranges
    ):
        c_add(
            first, array(out, n), array(touched, (n_touched, 2)), array(raw, n_raw), code, start, weight,
            array(ranges, (n_ranges, 2)),
        )  # fmt: skip

    def finite(raw, n_raw, code):  # type: ignore[no-untyped-def]
        return c_finite(array(raw, n_raw), code)

    def squares(raw, n_raw, code, size):  # type: ignore[no-untyped-def]
        return c_squares(array(raw, n_raw), code, size)

    def write_rows(fd, rows, n, wait_ms, waits, words, n_words):  # type: ignore[no-untyped-def]
        return c_write_rows(fd, array(rows, (n, 2)), wait_ms, waits, array(words, n_words))

    def read_data_frames(  # type: ignore[no-untyped-def]
        fd, rows, n, scratch, n_scratch, frame, n_frame, head, n_head, low, bytes_max, wait_ms, waits, words, n_words,
    ):  # fmt: skip
        return c_read_data_frames(
            fd, array(rows, (n, 2)), array(scratch, (n_scratch, 2)), array(frame, n_frame), array(head, n_head),
            low, bytes_max, wait_ms, waits, array(words, n_words),
        )  # fmt: skip

    return [step, add, finite, squares, write_rows, read_data_frames]


def _compile(level: str, target: Path) -> None:
    import numba
    from llvmlite import binding as llvm

    loops = _loops()  # this also makes numba initialize LLVM
    triple = llvm.get_process_triple()
    machine = llvm.Target.from_triple(triple).create_target_machine(level, "", 3, reloc="pic", codemodel="default")
    with tempfile.TemporaryDirectory() as scratch:
        objects = []
        for name, loop, function in zip(prebuilt.ENTRIES, loops, _wrappers(loops), strict=True):
            compiled: Any = numba.cfunc(_c_signature(loop))(function)
            text = str(compiled._library._final_module).replace(compiled.native_name, f"ps_{name}")
            objects.append(Path(scratch) / f"{name}.o")
            objects[-1].write_bytes(machine.emit_object(llvm.parse_assembly(text)))
        listed = subprocess.run(["nm", "-u", *objects], capture_output=True, text=True, check=True).stdout
        missing = {line.split()[1] for line in listed.splitlines() if line.split()[:1] in (["U"], ["w"])} - DEFINED
        runtime = Path(scratch) / "runtime.c"
        runtime.write_text(RUNTIME + "\n".join(f"ABORTS({name})" for name in sorted(missing)))
        exported = [f"-Wl,--export-dynamic-symbol=ps_{name}" for name in prebuilt.ENTRIES]
        strict = "-Wl,-Bsymbolic,-z,text,-z,noexecstack"
        flags = ["-O2", "-w", "-fPIC", "-fno-builtin", "-shared", "-s", strict, *exported]
        subprocess.run(["cc", *flags, "-o", str(target), *map(str, objects), str(runtime)], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--level"]:
        _compile(sys.argv[2], Path(sys.argv[3]))
    else:
        for path in build(Path(sys.argv[1]) if len(sys.argv) > 1 else prebuilt.FOLDER):
            print(path)
