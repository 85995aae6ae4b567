"""Fused optimizer steps and reductions over float32 partitions, compiled by numba; nothing here knows of models.

    apply(optimizer, steps, w, slots, grad, dtype, w_out, slots_out) -> bool
        one optimizer step, out of place, over a whole partition
    apply_mean(optimizer, steps, w, slots, parts, divisor, w_out, slots_out) -> bool
        the same with the mean of float32 gradients
    beyond_cache(optimizer, elements) -> bool
        whether what it makes is better written past the caches
    mean(parts, divisor, out, start=0)       weighted sum of gradients in the order given, divided
    accumulate(out, grad, dtype, weight)     out += weight * grad
    all_finite(a, dtype=None) -> bool        no NaN, no infinity
    norm2(a, dtype=None) -> float            2-norm, summed in float64
    warm_up()                                compiles everything, or loads it from the cache on disk
    slot_count, slot_names, initial_slots, SegmentStep     re-exported from `core.optimizer`

All arrays are one-dimensional and C-contiguous.  `w`, slots and outputs are float32 of one length.  A gradient is
float32, float64, float16 (as numpy's float16, or as uint16 bits), bfloat16 (as uint16 bits), or a whole partition in
the int8 or topk codec (as uint8 bytes, decoded block by block on the way); `dtype` names which.  It may be read-only
and need not be aligned.  Sums are float32 in a fixed order with no fused multiply-add, so the same
inputs give the same bytes on every machine.  The functions release the GIL and are safe between threads; arguments
of a wrong shape or type are our own bug and raise ValueError before anything is written.
"""

from paramserver.core.optimizer import SegmentStep, initial_slots, slot_count, slot_names
from paramserver.kernels.calls import accumulate, all_finite, apply, apply_mean, beyond_cache, mean, norm2, warm_up

__all__ = [
    "SegmentStep",
    "accumulate",
    "all_finite",
    "apply",
    "apply_mean",
    "beyond_cache",
    "initial_slots",
    "mean",
    "norm2",
    "slot_count",
    "slot_names",
    "warm_up",
]
