"""Encodes and checks one part's bytes on the CPU, with the residual that error feedback keeps; the kernels decode them.

`paramserver.torch.device_codecs` produces the same bytes on a device; both are tested against golden files.
"""

from math import ceil, sqrt

import numpy as np

from paramserver.codecs.codec import Codec, int8_bytes, topk_count_max
from paramserver.errors import problem
from paramserver.types import ABS_BITS, F32, U8, AnyArray


def topk_count(elements: int, fraction: float) -> int:
    """Return how many elements of a partition topk sends."""
    return min(max(1, ceil(fraction * elements)), topk_count_max(elements))


def encode_partition(codec: Codec, values: F32, residual: F32 | None, new_residual: F32 | None) -> tuple[U8, float]:
    """Encode values + residual in int8 or topk; return (bytes, 2-norm of what they decode to).

    All arrays are 1-D, contiguous, float32 and equally long; `new_residual`, if given, gets what the bytes leave out.
    If an element of `values` is not finite, neither is the norm, and the other results are invalid.
    """
    if codec.coding == "int8":
        return _encode_int8(values, residual, new_residual)
    return _encode_topk(values, residual, new_residual, codec.fraction)


def _encode_int8(values: F32, residual: F32 | None, new_residual: F32 | None) -> tuple[U8, float]:
    from paramserver.kernels import encoding  # imported here, because importing compiles it

    out = np.empty(int8_bytes(values.size), np.uint8)
    scales = out.size - values.size
    none = np.empty(0, np.float32)
    squares = encoding.int8(
        values,
        none if residual is None else residual,
        out[:scales].view(np.float32),
        out[scales:].view(np.int8),
        none if new_residual is None else new_residual,
    )
    return out, sqrt(squares)


def _encode_topk(values: F32, residual: F32 | None, new_residual: F32 | None, fraction: float) -> tuple[U8, float]:
    with np.errstate(over="ignore"):
        v = values if residual is None else values + residual
    size = v.view(np.uint32) & ABS_BITS  # has the same order as the magnitudes
    count = topk_count(v.size, fraction)
    least = np.partition(size, v.size - count)[v.size - count]
    above = np.flatnonzero(size > least)
    ties = np.flatnonzero(size == least)[: count - above.size]  # of equal magnitudes, the first ones
    at = np.sort(np.concatenate((above, ties)))
    chosen = v[at]
    if new_residual is not None:
        new_residual[:] = v
        new_residual[at] = 0.0
    out = np.concatenate((at.astype("<u4").view(np.uint8), chosen.view(np.uint8)))
    wide = chosen.astype(np.float64)
    return out, sqrt(float(wide.dot(wide)))


def check_encoded_size(codec: Codec, size_bytes: int, elements: int) -> None:
    """Raise RequestError (`invalid_encoding`) if an encoded partition of `elements` elements cannot have this size."""
    exact = codec.exact_bytes(elements)
    if exact is not None:
        if size_bytes != exact:
            detail = f"a partition of {elements} elements takes {exact} bytes in {codec.coding}, not {size_bytes}"
            raise problem("invalid_encoding", detail)
    elif size_bytes % 8 or not 8 <= size_bytes <= 8 * topk_count_max(elements):
        most = 8 * topk_count_max(elements)
        detail = (
            f"a partition of {elements} elements in topk takes a multiple of 8 bytes, at most {most}, not {size_bytes}"
        )
        raise problem("invalid_encoding", detail)


def check_content(coding: str, data: AnyArray, elements: int) -> None:
    """Raise RequestError (`invalid_encoding`) unless a topk part's indices ascend and lie within the partition."""
    if coding == "topk":
        at = data[: data.size // 2].view("<u4")
        if int(at[-1]) >= elements or not bool((at[1:] > at[:-1]).all()):
            raise problem("invalid_encoding", f"topk indices must ascend and lie below {elements}")
