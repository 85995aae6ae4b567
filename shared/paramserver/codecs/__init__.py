"""Codecs, which make gradients smaller for transport; docs/codecs.md specifies the bytes of each.

    fp32 fp16 bf16       elements of that dtype
    int8                 a scale per 256 elements and a byte per element; error feedback at the worker
    topk, topk:0.02      the largest 1 % (2 %) of each partition with their indices; error feedback at the worker
    …+zstd  …+lz4        a lossless second stage on any of them

`codec` parses a name.  `parts` encodes and checks one partition in int8 or topk, which `kernels` decode; `stage` packs
and unpacks.  Elements of a dtype need no encoder beyond `wire.tensor`.
"""
