"""Fused optimizer steps and reductions over float32 partitions, compiled by numba; independent of models.

    apply(optimizer, steps, w, slots, grad, dtype, w_out, slots_out, ranges=None) -> bool
        one optimizer step of a partition, or of ranges of it, out of place
    apply_mean(optimizer, steps, w, slots, parts, divisor, w_out, slots_out) -> bool
        the same with the weighted mean of float32 gradients
    exceeds_cache(optimizer, elements) -> bool
        whether nontemporal stores pay off for updates of this size
    mean(parts, divisor, out, touched=None)  weighted sum of gradients in the given order, divided
    all_finite(a, dtype=None) -> bool        no NaN, no infinity
    norm2(a, dtype=None) -> float            2-norm, summed in float64
    FTRL_RATE_MIN                            up to this learning rate ftrl makes no step, and reads no gradient
    warm_up()                                compile these functions, or load them from the cache on disk

All arrays are one-dimensional and C-contiguous.  `w`, slots and outputs are float32 and equally long.  A gradient is
float32, float64, float16 (as NumPy's float16, or as uint16 bits), bfloat16 (as uint16 bits), or a whole partition in
the int8 or topk codec (as uint8 bytes, decoded block by block); `dtype` says which.  It may be read-only and
unaligned.  Sums are float32 in a fixed order, without fused multiply-add, so the same inputs give the same bytes on
every machine.  The functions release the GIL and are thread-safe.  Arguments of a wrong shape or type are a bug in the
caller, and raise ValueError before anything is written.
"""

from paramserver.kernels.calls import (
    FTRL_RATE_MIN,
    all_finite,
    apply,
    apply_mean,
    exceeds_cache,
    mean,
    norm2,
    warm_up,
)

__all__ = ["FTRL_RATE_MIN", "all_finite", "apply", "apply_mean", "exceeds_cache", "mean", "norm2", "warm_up"]
