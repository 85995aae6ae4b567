"""What an encoded gradient stands for, in NumPy, to compare the product with: its kernels decode block by block."""

import numpy as np

from paramserver.types import F32, INT8_BLOCK, AnyArray


def decode_partition(coding: str, data: AnyArray, elements: int) -> F32:
    """Return the float32 values of a partition in int8 or topk."""
    if coding == "int8":
        scales = data.size - elements
        each: F32 = np.repeat(data[:scales].view(np.float32), INT8_BLOCK)[:elements]
        each *= data[scales:].view(np.int8).astype(np.float32)
        return each
    out = np.zeros(elements, np.float32)
    out[data[: data.size // 2].view("<u4")] = data[data.size // 2 :].view("<f4")
    return out
