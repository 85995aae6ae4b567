"""Tensors on the wire: JSON lists, msgpack maps and raw little-endian bytes, to NumPy and back.

NumPy lacks bfloat16, so such an array is uint16 bits together with its dtype name.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any, Final

import numpy as np
from zlib_ng import zlib_ng

from paramserver import limits
from paramserver.core.layout import Range
from paramserver.core.ranges import RangeArray
from paramserver.errors import PsError, problem
from paramserver.types import F32, ITEMSIZE, AnyArray

assert sys.byteorder == "little", "paramserver runs on little-endian machines only"

NUMPY_DTYPE: Final[dict[str, np.dtype[Any]]] = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
HANDED_OUT: Final = NUMPY_DTYPE | {"bfloat16": np.dtype("<f4")}
"""The same in pulls and files, where bfloat16 is widened, which is exact."""

_BLOCK: Final = 1 << 13
"""Elements rounded at a time, few enough to stay in the cache."""
_SHORT_MAX: Final = 1 << 16
"""Larger arrays are not written in shortest form in JSON, which costs a microsecond per element on the event loop."""


def bf16_to_f32(a: AnyArray) -> F32:
    """Return the float32 values of bfloat16 bits (uint16, any shape); exact."""
    out = np.empty(a.shape, np.float32)
    bf16_bits_to_f32(a, out)
    return out


def bf16_bits_to_f32(bits: AnyArray, out: F32) -> None:
    """Like `bf16_to_f32`, into `out`, of the same shape."""
    np.left_shift(bits, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")


def f32_to_bf16(a: F32) -> AnyArray:
    """Return float32 values rounded to bfloat16 bits (uint16, same shape): nearest, ties to even; NaN stays NaN."""
    values = np.asarray(a, np.float32, order="C")  # ascontiguousarray would make shape [] into [1]
    out = np.empty(values.shape, np.uint16)
    f32_to_bf16_bits(values.reshape(-1), out.reshape(-1))
    return out


def f32_to_bf16_bits(values: F32, out: AnyArray) -> None:
    """Like `f32_to_bf16`, from 1-D values into `out` (uint16), in blocks that stay in the cache."""
    scratch = np.empty(min(values.size, _BLOCK), np.uint32)
    for start in range(0, values.size, _BLOCK):
        block = values[start : start + _BLOCK]
        bits, r = block.view(np.uint32), scratch[: block.size]
        np.right_shift(bits, np.uint32(16), out=r)
        r &= np.uint32(1)
        r += np.uint32(0x7FFF)
        r += bits
        r >>= np.uint32(16)
        nan = np.isnan(block)
        if nan.any():
            r[nan] = np.uint32(0x7FC0)
        out[start : start + _BLOCK] = r


def to_f32(a: AnyArray, dtype: str) -> F32:
    """Return the float32 values of an array of a wire dtype; the array itself if it is float32 already."""
    if dtype == "bfloat16":
        return bf16_to_f32(a)
    with np.errstate(over="ignore"):
        return a.astype(np.float32, copy=False)


def from_f32(a: F32, dtype: str) -> AnyArray:
    """Return float32 values as an array of a wire dtype (bfloat16 as uint16); the array itself for float32."""
    if dtype == "bfloat16":
        return f32_to_bf16(a)
    if dtype == "float32":
        return a
    with np.errstate(over="ignore"):
        return a.astype(NUMPY_DTYPE[dtype], copy=False)


def slice_crc(dtype: str, ranges: RangeArray | tuple[Range], data: AnyArray | memoryview | bytes) -> int:
    """Return the CRC-32 (zlib's) of a partition's slice: dtype name, ranges as little-endian u64 pairs, elements."""
    head = _known_head_crc(dtype, ranges) if isinstance(ranges, tuple) else _head_crc(dtype, ranges)
    return crc_after(head, data)


def _head_crc(dtype: str, ranges: RangeArray | tuple[Range]) -> int:
    return int(zlib_ng.crc32(dtype.encode() + np.asarray(ranges, np.int64).tobytes()))


_known_head_crc: Final = lru_cache(1024)(_head_crc)
"""Cached, because a whole partition has the same one in every push."""


def crc_after(crc: int, data: AnyArray | memoryview | bytes) -> int:
    """Return the CRC-32 `crc` extended by `data`, to compute a slice's checksum block by block."""
    raw = data.view(np.uint8) if isinstance(data, np.ndarray) else data
    return int(zlib_ng.crc32(raw, crc))


def _wrong(where: str, detail: str, code: str = "invalid_shape") -> PsError:
    return problem(code, f"{where}: {detail}", where=where)


def fits(shape: Sequence[int]) -> bool:
    """Whether an array may have this shape; zeros are skipped, as NumPy can still overflow on the other sizes."""
    return len(shape) <= limits.NDIM_MAX and prod(n for n in shape if n) <= limits.MODEL_ELEMENTS_MAX


def from_msgpack(value: Any, where: str) -> tuple[AnyArray, str]:
    """Return (array in its shape, dtype name) of a msgpack tensor `{"dtype", "shape", "data"}`.

    Raises RequestError (`invalid_dtype`, `invalid_shape`, `malformed`), naming `where`.
    """
    if not isinstance(value, Mapping) or set(value) != {"dtype", "shape", "data"}:
        raise _wrong(where, 'a tensor is {"dtype", "shape", "data"}', "malformed")
    dtype, shape, data = value["dtype"], value["shape"], value["data"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise _wrong(where, f"dtype {dtype!r:.40} is not one of {', '.join(ITEMSIZE)}", "invalid_dtype")
    if (
        not isinstance(shape, list)
        or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape)
        or not fits(shape)
    ):
        detail = f"shape must be a list of at most {limits.NDIM_MAX} sizes, of {limits.MODEL_ELEMENTS_MAX} elements"
        raise _wrong(where, detail)
    if not isinstance(data, bytes) or len(data) != prod(shape) * ITEMSIZE[dtype]:
        size = len(data) if isinstance(data, bytes) else None
        raise _wrong(
            where, f"data must be {prod(shape) * ITEMSIZE[dtype]} bytes for shape {shape} of {dtype}, not {size}"
        )
    return np.frombuffer(data, NUMPY_DTYPE[dtype]).reshape(shape), dtype


def from_json(value: Any, where: str) -> tuple[F32, str]:
    """Return (float32 array, "float32") of a number or nested lists of numbers; null is refused.

    Raises RequestError (`invalid_shape` when ragged, `malformed` for anything but numbers, `non_finite` past float32).
    """
    flat: list[Any] = [value]
    shape: list[int] = []
    while (types := set(map(type, flat))) == {list}:  # whole levels are checked in C, as this blocks the event loop
        if len(shape) == limits.NDIM_MAX:
            raise _wrong(where, f"has more than {limits.NDIM_MAX} dimensions")
        if len(set(map(len, flat))) > 1:
            raise _wrong(where, "is ragged: lists of one level differ in length")
        shape.append(len(flat[0]))
        flat = list(chain.from_iterable(flat))
    if list in types:
        raise _wrong(where, "is ragged: numbers and lists are mixed")
    if not types <= {int, float}:  # bool is another type
        raise _wrong(where, "must be a number or nested lists of numbers", "malformed")
    try:
        with np.errstate(over="ignore"):
            out = np.array(flat, np.float64).astype(np.float32).reshape(shape)
    except OverflowError:
        raise _wrong(where, "holds a number beyond float32", "non_finite") from None
    if not np.isfinite(out).all():
        raise _wrong(where, "holds a number beyond float32", "non_finite")
    return out, "float32"


def to_msgpack(a: AnyArray, dtype: str) -> dict[str, Any]:
    """Return the msgpack tensor of an array of a wire dtype; its data is a view of the array, if that is contiguous."""
    return {"dtype": dtype, "shape": list(a.shape), "data": np.ascontiguousarray(a).reshape(-1).view(np.uint8).data}


def to_json(a: AnyArray, dtype: str) -> Any:
    """Return nested lists (a plain number for shape []) that read back as the same float32 values."""
    if dtype == "float64":
        return a.tolist()
    if a.size > _SHORT_MAX:
        return to_f32(a, dtype).tolist()
    # The shortest decimal that reads back as the same float32, rather than the 17 digits of its float64.
    flat = [float(str(x)) for x in to_f32(a, dtype).ravel()]
    out: Any = flat[0] if a.ndim == 0 else np.array(flat, np.float64).reshape(a.shape).tolist()
    return out
