"""Reading of safetensors files, while other threads run.

The functions of `safetensors` copy all that they read in one go, during which no other thread of the process runs: a
scheduler that restored 1 GiB stood still for longer than its lease.
"""

import json
import os
import struct
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np

from paramserver.types import AnyArray

HEAD_BYTES_MAX: Final = 100_000_000
"""Longest header, as in the library that defines the format."""
_DTYPES: Final = {"BOOL": "?", "BF16": "<u2"} | {
    f"{kind}{8 * size}": f"<{code}{size}"
    for kind, code, sizes in (("F", "f", (2, 4, 8)), ("I", "i", (1, 2, 4, 8)), ("U", "u", (1, 2, 4, 8)))
    for size in sizes
}


class TensorFile:
    """An open file, for a `with` block."""

    def __init__(self, path: Path) -> None:
        """Open a file and read its header; raises OSError, or ValueError if it is damaged."""
        self._file = path.open("rb", buffering=0)
        try:
            self._at, self._tensors = self._head()
            self.shapes = {name: shape for name, (_, shape, _) in self._tensors.items()}
            """The shape of each tensor, by name."""
        except BaseException as e:
            self._file.close()
            if isinstance(e, (KeyError, TypeError, ValueError, RecursionError)):
                raise ValueError(f"not a safetensors file, or a damaged one: {e!r:.100}") from e
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        self._file.close()

    def read(self, name: str) -> AnyArray:
        """Return a tensor in its shape, bfloat16 as float32; raises OSError, or ValueError if NumPy lacks its dtype."""
        kind, shape, start = self._tensors[name]
        if kind not in _DTYPES:
            raise ValueError(f"NumPy has no dtype {kind}")
        array = np.empty(shape, _DTYPES[kind])
        into = array.reshape(-1).view(np.uint8).data
        self._file.seek(self._at + start)
        while into:
            count = self._file.readinto(into)
            if not count:
                raise ValueError("the safetensors file has become shorter")
            into = into[count:]
        if kind == "BF16":
            array = array.astype("<u4")
            array <<= 16
            array = array.view("<f4")
        return array

    def _head(self) -> tuple[int, dict[str, tuple[str, tuple[int, ...], int]]]:
        """Return where the data begin, and dtype, shape and place of each tensor."""
        size = os.fstat(self._file.fileno()).st_size
        length = int(struct.unpack("<Q", self._read(8))[0])
        if length > min(size - 8, HEAD_BYTES_MAX):
            raise ValueError(f"a header of {length} bytes")
        head = json.loads(self._read(length))
        if not isinstance(head, dict):
            raise ValueError("its header is no object")
        tensors = {}
        for name, entry in head.items():
            if name != "__metadata__":
                kind, shape, (start, stop) = str(entry["dtype"]), entry["shape"], entry["data_offsets"]
                if any(type(n) is not int or n < 0 for n in (*shape, start, stop)) or stop > size - 8 - length:
                    raise ValueError(f"the place of {name!r:.80}")
                if kind in _DTYPES and prod(shape) * np.dtype(_DTYPES[kind]).itemsize != stop - start:
                    raise ValueError(f"the size of {name!r:.80}")
                tensors[name] = (kind, tuple(shape), start)
        return 8 + length, tensors

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if data is None or len(data) != size:
            raise ValueError("the file ends in its header")
        return data
