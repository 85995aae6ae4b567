"""Codecs, which make gradients smaller for transport; docs/codecs.md specifies the bytes of each.

    fp32 fp16 bf16       elements of that dtype
    int8                 a scale per 256 elements and a byte per element; error feedback at the worker
    topk, topk:0.02      the largest 1 % (2 %) of each partition with their indices; error feedback at the worker
    …+zstd  …+lz4        a lossless second stage on any of them

`Codec.parse` parses a name.  `encode_partition`, `check_encoded_size` and `check_content` work on one partition in int8
or topk, which `kernels` decode; `stage` packs and unpacks.  Elements of a dtype need no encoder beyond `wire.tensor`.
"""

from paramserver.codecs.codec import NAMES, STAGES, Codec, int8_bytes, topk_count_max
from paramserver.codecs.parts import check_content, check_encoded_size, encode_partition, topk_count

__all__ = [
    "NAMES",
    "STAGES",
    "Codec",
    "check_content",
    "check_encoded_size",
    "encode_partition",
    "int8_bytes",
    "topk_count",
    "topk_count_max",
]
