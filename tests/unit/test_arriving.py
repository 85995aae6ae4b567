"""What is looked at in a push while it arrives."""

import numpy as np
import pytest

from paramserver.types import Coding
from paramserver.wire.tensor import slice_crc
from paramserver_shard.arriving import BLOCK_BYTES, checked

DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": np.uint16}


@pytest.mark.parametrize("coding", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("size_bytes", [8, BLOCK_BYTES, BLOCK_BYTES + 8, 3 * BLOCK_BYTES + 1000])
def test_blocks_are_checked_like_the_whole(coding: Coding, size_bytes: int) -> None:
    """The checksum is that of the whole slice; one number that is not finite is found wherever it is."""
    data = (np.arange(size_bytes // np.dtype(DTYPES[coding]).itemsize) % 97).astype(DTYPES[coding])
    ranges = ((0, data.size),)

    assert checked(data, coding, ranges) == (True, slice_crc(coding, ranges, data))
    assert checked(data, coding, None) == (True, 0)
    for place in (0, data.size // 2, data.size - 1):
        bad = data.copy()
        bad[place] = 0x7FC0 if coding == "bfloat16" else np.nan
        assert checked(bad, coding, ranges)[0] is False
        assert checked(bad, coding, ranges)[1] == slice_crc(coding, ranges, bad)
