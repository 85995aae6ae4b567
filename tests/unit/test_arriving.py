"""Checks of a push while it arrives."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
from paramserver.types import Coding, ModelKey
from paramserver.wire.frame import PushFrame, PushPart
from paramserver.wire.tensor import slice_crc
from paramserver_shard.arriving import BLOCK_BYTES, Arriving, Threads, checked
from paramserver_shard.directory import KnownModel

DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": np.uint16}


@pytest.mark.parametrize("coding", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("size_bytes", [8, BLOCK_BYTES, BLOCK_BYTES + 8, 3 * BLOCK_BYTES + 1000])
def test_blocks_are_checked_like_the_whole(coding: Coding, size_bytes: int) -> None:
    """Checking a slice in blocks yields the CRC of the whole slice, and finds a single NaN wherever it is."""
    data = (np.arange(size_bytes // np.dtype(DTYPES[coding]).itemsize) % 97).astype(DTYPES[coding])
    ranges = ((0, data.size),)

    assert checked(data, coding, ranges) == (True, slice_crc(coding, ranges, data))
    assert checked(data, coding, None) == (True, 0)
    for place in (0, data.size // 2, data.size - 1):
        bad = data.copy()
        bad[place] = 0x7FC0 if coding == "bfloat16" else np.nan
        assert checked(bad, coding, ranges)[0] is False
        assert checked(bad, coding, ranges)[1] == slice_crc(coding, ranges, bad)


@pytest.mark.asyncio
@pytest.mark.parametrize("fields", [{"map_epoch": 7}, {"forwarded": True}])
async def test_a_push_that_came_before_its_partition_has_a_checksum(fields: dict[str, Any]) -> None:
    """A push that is forwarded or names a map epoch gets a CRC even if another shard owns its partition on arrival."""
    spec = ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}, "partitions": 1})
    known = KnownModel(ModelKey("m", 1), Layout(spec), 0, "ready", (("other", 1),), None, None)
    frame = PushFrame("m", [PushPart(0, None, None)], worker="a", epoch=1, seq=1, **fields)
    gradient = np.ones(4, np.float32)

    arriving = Arriving(known, frame, False, [gradient.nbytes], cast(Threads, SimpleNamespace(threads=2)))
    arriving.check([(0, gradient.view(np.uint8))])
    (part,) = await arriving.parts()

    assert part.crc == slice_crc("float32", ((0, 4),), gradient)
