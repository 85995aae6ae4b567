"""The codecs for tensors on any device: the same bytes as `paramserver.codecs`, tested against the same golden files.

Every operation rounds once, in IEEE float32, in the same order as in the compiled encoder.  There is no division by a
Python number, because CUDA would multiply by the inverse instead, which rounds twice.
"""

from typing import Final

import torch
from torch import Tensor

from paramserver.codecs.codec import Codec
from paramserver.codecs.parts import topk_count
from paramserver.types import INT8_BLOCK

_SCALE: Final = 1.0 / 127.0
_SMALLEST: Final = 2.0**-126
_DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def elements(values: Tensor, coding: str) -> tuple[Tensor, Tensor]:
    """Return (bytes as uint8, sum of squares) of a float32 vector as elements of a dtype.

    The sum, float64 of shape [], is of the values before rounding; it is NaN if one of them is infinite in a narrower
    dtype.
    """
    narrow = values.to(_DTYPES[coding])
    squares = torch.linalg.vector_norm(values, dtype=torch.float64).square()
    if coding != "float32":
        squares = squares + narrow.abs().amax().double() * 0.0
    return narrow.view(torch.uint8), squares


def int8_blocks(values: Tensor, residual: Tensor, new_residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (scales, numbers, sum of squares) of values + residual, float32 vectors of a multiple of 256 elements.

    `new_residual` gets the encoding error.  Scales are float32, one per block; numbers are int8; the sum,
    float64 of shape [], is of the decoded values.
    """
    v = (values + residual).view(-1, INT8_BLOCK)
    scales = v.abs().amax(1) * _SCALE
    zero = scales < _SMALLEST
    scales = scales.masked_fill(zero, 0.0)
    inverse = scales.reciprocal().masked_fill(zero, 0.0)
    q = (v * inverse[:, None]).round()
    torch.sub(v, q * scales[:, None], out=new_residual.view(-1, INT8_BLOCK))
    squares = (q.square().sum(1).double() * scales.double().square()).sum()  # below 2^24: exact in float32
    return scales, q.to(torch.int8).view(-1), squares


def topk(values: Tensor, residual: Tensor, new_residual: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Return (bytes as uint8, sum of squares) of the largest elements of values + residual, float32 of one partition.

    `new_residual` gets the elements that are not sent, and zero for the others.
    """
    v = values + residual
    size = v.view(torch.int32) & 0x7FFFFFFF  # has the same order as the magnitudes
    count = topk_count(v.numel(), fraction)
    least = size.topk(count, sorted=False).values.amin()
    above, equal = size > least, size == least
    chosen = above | (equal & (equal.cumsum(0) <= count - above.sum()))  # of equal magnitudes, the first ones
    at = chosen.nonzero().view(-1)
    sent = v[at]
    new_residual.copy_(v)
    new_residual[at] = 0.0
    data = torch.cat((at.to(torch.int32).view(torch.uint8), sent.view(torch.uint8)))
    return data, sent.double().square().sum()


def part_bytes(codec: Codec, elements_: int) -> int:
    """Return the bytes of an encoded partition of `elements_` elements, before the second stage."""
    exact = codec.exact_bytes(elements_)
    return 8 * topk_count(elements_, codec.fraction) if exact is None else exact
