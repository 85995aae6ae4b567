"""One part's bytes: encoded on a CPU with the residual that error feedback keeps, checked, and decoded.

`paramserver.torch.device_codecs` makes the same bytes on a device; golden files hold both to them.
"""

from math import ceil, sqrt

import numpy as np
import numpy.typing as npt

from paramserver.codecs.codec import INT8_BLOCK, Codec, int8_bytes, topk_count_max
from paramserver.errors import problem
from paramserver.types import F32, AnyArray

U8 = npt.NDArray[np.uint8]
_ABS_BITS = np.uint32(0x7FFFFFFF)


def topk_count(elements: int, fraction: float) -> int:
    """How many of so many elements are sent."""
    return min(max(1, ceil(fraction * elements)), topk_count_max(elements))


def encode_whole(codec: Codec, values: F32, residual: F32 | None, left: F32 | None) -> tuple[U8, float]:
    """(bytes, 2-norm of what they decode to) of values + residual, in a codec of whole partitions.

    All arrays are 1-D, contiguous, float32 and of one length; `left`, if given, gets what the bytes do not say, for
    the next `residual`.  The norm is not finite if something in `values` is not, and then nothing else counts.
    """
    if codec.coding == "int8":
        return _encode_int8(values, residual, left)
    return _encode_topk(values, residual, left, codec.fraction)


def _encode_int8(values: F32, residual: F32 | None, left: F32 | None) -> tuple[U8, float]:
    from paramserver.kernels import encoding  # compiled when first used: a client that never does stays light

    out = np.empty(int8_bytes(values.size), np.uint8)
    scales = 4 * -(-values.size // INT8_BLOCK)
    none = np.empty(0, np.float32)
    squares = encoding.int8(
        values,
        none if residual is None else residual,
        out[:scales].view(np.float32),
        out[scales:].view(np.int8),
        none if left is None else left,
    )
    return out, sqrt(squares)


def _encode_topk(values: F32, residual: F32 | None, left: F32 | None, fraction: float) -> tuple[U8, float]:
    v = values if residual is None else values + residual
    size = v.view(np.uint32) & _ABS_BITS  # ordered as the magnitudes are
    count = topk_count(v.size, fraction)
    least = np.partition(size, v.size - count)[v.size - count]
    above = np.flatnonzero(size > least)
    ties = np.flatnonzero(size == least)[: count - above.size]  # of equal magnitudes the first ones
    at = np.sort(np.concatenate((above, ties)))
    chosen = v[at]
    if left is not None:
        left[:] = v
        left[at] = 0.0
    out = np.concatenate((at.astype("<u4").view(np.uint8), chosen.view(np.uint8)))
    wide = chosen.astype(np.float64)
    return out, sqrt(float(wide.dot(wide)))


def check_whole(codec: Codec, size_bytes: int, elements: int) -> None:
    """Refuse a part whose length cannot be that of a partition.  Raises RequestError (`invalid_encoding`)."""
    exact = codec.exact_bytes(elements)
    if exact is not None:
        if size_bytes != exact:
            raise problem(
                "invalid_encoding", f"{elements} elements in {codec.coding} are {exact} bytes, not {size_bytes}"
            )
    elif size_bytes % 8 or not 8 <= size_bytes <= 8 * topk_count_max(elements):
        most = 8 * topk_count_max(elements)
        raise problem(
            "invalid_encoding", f"{elements} elements in topk are a multiple of 8 bytes up to {most}, not {size_bytes}"
        )


def check_content(coding: str, data: AnyArray, elements: int) -> None:
    """Refuse a topk part whose indices do not ascend within the partition.

    Raises RequestError (`invalid_encoding`).
    """
    if coding == "topk":
        at = data[: data.size // 2].view("<u4")
        if int(at[-1]) >= elements or not bool((at[1:] > at[:-1]).all()):
            raise problem("invalid_encoding", f"topk indices must ascend and lie below {elements}")


def decode_whole(coding: str, data: AnyArray, elements: int) -> F32:
    """The float32 values of a checked part; the server's kernels do this block by block instead."""
    if coding == "int8":
        scales = 4 * -(-elements // INT8_BLOCK)
        each: F32 = np.repeat(data[:scales].view(np.float32), INT8_BLOCK)[:elements]
        each *= data[scales:].view(np.int8).astype(np.float32)
        return each
    out = np.zeros(elements, np.float32)
    out[data[: data.size // 2].view("<u4")] = data[data.size // 2 :].view("<f4")
    return out
