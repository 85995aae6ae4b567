"""The lossless second stage: zstd frames (RFC 8878) and LZ4 blocks, decompressed within a size known beforehand."""

from typing import Final

import lz4.block
import numpy as np
import zstandard

from paramserver.errors import PsError, problem
from paramserver.types import AnyArray

ZSTD_LEVEL: Final = 1
"""Gradients are noise except for their exponents: higher levels are slow and gain next to nothing."""
ZSTD_WINDOW_BYTES_MAX: Final = 8 << 20
"""Largest window that a frame may make the decoder allocate, besides its output."""


def pack(stage: str, data: AnyArray) -> AnyArray:
    """Return `data` (uint8, contiguous) compressed, as uint8."""
    if stage == "zstd":
        return np.frombuffer(zstandard.ZstdCompressor(ZSTD_LEVEL, write_checksum=False).compress(data.data), np.uint8)
    return np.frombuffer(lz4.block.compress(data.data, store_size=False), np.uint8)


def packed_bytes_max(size_bytes: int) -> int:
    """Return the most bytes that `size_bytes` bytes, even incompressible ones, can take once packed."""
    return size_bytes + size_bytes // 128 + 64


def unpack(stage: str, data: AnyArray, size_bytes: int) -> AnyArray:
    """Return the unpacked data as read-only uint8; never allocates more than `size_bytes` for it.

    Raises RequestError (`invalid_encoding`) if it does not unpack to exactly `size_bytes`.
    """
    try:
        raw = _unzstd(data, size_bytes) if stage == "zstd" else _unlz4(data, size_bytes)
    except (zstandard.ZstdError, lz4.block.LZ4BlockError) as e:
        raise _invalid(stage, str(e)[:80]) from None
    if len(raw) != size_bytes:
        raise _invalid(stage, f"it unpacks to {len(raw)} bytes, but the header says {size_bytes}")
    return np.frombuffer(raw, np.uint8)


def _unzstd(data: AnyArray, size_bytes: int) -> bytes:
    content_bytes = zstandard.frame_content_size(data.data)
    if content_bytes not in (-1, size_bytes):
        raise _invalid("zstd", f"the zstd frame holds {content_bytes} bytes, but the header says {size_bytes}")
    decoder = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES_MAX)
    return decoder.decompress(data.data, max_output_size=size_bytes, allow_extra_data=False)


def _unlz4(data: AnyArray, size_bytes: int) -> bytes:
    return bytes(lz4.block.decompress(data.data, uncompressed_size=size_bytes))


def _invalid(stage: str, detail: str) -> PsError:
    return problem("invalid_encoding", f"a part is not valid {stage} data of the announced size: {detail}")
