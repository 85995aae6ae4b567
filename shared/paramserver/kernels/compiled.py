"""The compiled loops: each block of a gradient is converted to float32 scratch if necessary, then stepped.

A block (8 KiB of float32) stays in the first-level cache between conversion, step and the test for NaN, so a pass costs
only the memory traffic of its operands, and gradients of every dtype share one step function.  Each entry point has one
compiled signature: dtype and optimizer are numbers, not types, so nothing is compiled during a push.
"""

from typing import Any

import numpy as np
from numba import types

from paramserver.kernels import codes
from paramserver.kernels.intrinsics import (
    LINE_BYTES,
    fence,
    float32_at,
    float64_at,
    store_nontemporal,
    subarray,
    uint16_at,
)
from paramserver.kernels.jit import jit_entry_point, jit_internal
from paramserver.kernels.loads import add_to, int8_views, load, load_mean, magnitude_bits, topk_views
from paramserver.types import INF_BITS

_in32 = types.Array(types.float32, 1, "C", readonly=True, aligned=False)
OUT = _out32 = types.Array(types.float32, 1, "C", aligned=False)
_spans = types.Array(types.int64, 2, "C")
_ranges = types.Array(types.int64, 2, "C", readonly=True, aligned=False)
_table = types.Array(types.float64, 2, "C")
_numbers = types.Array(types.float64, 1, "C")
_addresses = types.Array(types.int64, 1, "C")
_NORMAL_MIN = np.finfo(np.float32).tiny


@jit_internal
def _prepare(g: Any, w: Any, scale: Any, clip: Any, decay: Any) -> None:
    """Scale and clip one block of the gradient, then add weight decay."""
    if scale != np.float32(1.0):
        for i in range(g.size):
            g[i] = scale * g[i]
    if clip < np.float32(np.inf):
        for i in range(g.size):
            g[i] = min(max(g[i], -clip), clip)
    if decay != np.float32(0.0):
        for i in range(g.size):
            g[i] = g[i] + decay * w[i]


@jit_internal
def _settled(x: Any, least: Any = _NORMAL_MIN) -> Any:
    """Return decaying state, or 0 if it is denormal: it would stay so, and every later step take ten times as long."""
    return np.float32(0.0) if abs(x) < least else x


@jit_internal
def _least(eps: Any) -> Any:
    """What second moments below are settled at: without eps their root is divided by, and they never become 0."""
    return _NORMAL_MIN if eps > np.float32(0.0) else np.float32(0.0)


@jit_internal
def _store(a: Any, i: int, x: Any) -> None:
    a[i] = x


@jit_internal
def _store_nontemporal(a: Any, i: int, x: Any) -> None:
    store_nontemporal(a, i, x)


@jit_internal
def _line_aligned(a: Any) -> Any:
    return a.size == 0 or a.ctypes.data % LINE_BYTES == 0


def _block_step(store: Any) -> Any:
    """Return the step function for one block, which writes its results with `store`."""

    # Each function returns the largest `magnitude_bits` of its results, omitting those whose NaN or infinity would show
    # up in another result as well.  NaN or infinity in the gradient always shows up.

    @jit_internal
    def _sgd(w: Any, g: Any, out: Any, lr: Any) -> Any:
        """torch's SGD without momentum.  Here and below, g already includes weight decay."""
        worst = np.uint32(0)
        for i in range(g.size):
            new = w[i] - lr * g[i]
            store(out, i, new)
            worst = max(worst, magnitude_bits(new))
        return worst

    @jit_internal
    def _momentum(w: Any, m: Any, g: Any, out: Any, m_out: Any, lr: Any, mu: Any) -> Any:
        """torch's SGD with momentum, dampening 0."""
        worst = np.uint32(0)
        for i in range(g.size):
            buf = mu * m[i] + g[i]
            new = w[i] - lr * buf
            store(m_out, i, _settled(buf))
            store(out, i, new)
            worst = max(worst, magnitude_bits(new))
        return worst

    @jit_internal
    def _nesterov(w: Any, m: Any, g: Any, out: Any, m_out: Any, lr: Any, mu: Any) -> Any:
        """torch's SGD with nesterov=True."""
        worst = np.uint32(0)
        for i in range(g.size):
            buf = mu * m[i] + g[i]
            new = w[i] - lr * (g[i] + mu * buf)
            store(m_out, i, _settled(buf))
            store(out, i, new)
            worst = max(worst, magnitude_bits(new))
        return worst

    @jit_internal
    def _adagrad(w: Any, s: Any, g: Any, out: Any, s_out: Any, lr: Any, eps: Any) -> Any:
        """Adagrad (Duchi et al. 2011), as in torch; lr includes lr_decay."""
        worst = np.uint32(0)
        for i in range(g.size):
            total = s[i] + g[i] * g[i]
            new = w[i] - lr * (g[i] / (np.sqrt(total) + eps))
            store(s_out, i, total)
            store(out, i, new)
            worst = max(worst, max(magnitude_bits(total), magnitude_bits(new)))
        return worst

    @jit_internal
    def _mean_square(s: Any, g: Any, s_out: Any, root: Any, alpha: Any, rest: Any, eps: Any) -> Any:
        """Write rmsprop's running mean square to s_out, and the gradient's divisor, its root + eps, to `root`."""
        worst, least = np.uint32(0), _least(eps)
        for i in range(g.size):
            square = alpha * s[i] + rest * (g[i] * g[i])
            store(s_out, i, _settled(square, least))
            root[i] = np.sqrt(square) + eps
            worst = max(worst, magnitude_bits(square))
        return worst

    @jit_internal
    def _variance(s: Any, a: Any, g: Any, s_out: Any, a_out: Any, root: Any, alpha: Any, rest: Any, eps: Any) -> Any:
        """The same, centered: the square of the running mean is subtracted."""
        worst, least = np.uint32(0), _least(eps)
        zero = np.float32(0.0)
        for i in range(g.size):
            square = alpha * s[i] + rest * (g[i] * g[i])
            mean = alpha * a[i] + rest * g[i]
            store(s_out, i, _settled(square, least))
            store(a_out, i, _settled(mean))
            # Rounding can make the difference of nearly equal numbers slightly negative.
            spread = square - mean * mean
            root[i] = np.sqrt(spread if spread > zero else zero) + eps
            worst = max(worst, max(magnitude_bits(square), magnitude_bits(mean)))
        return worst

    @jit_internal
    def _divided(w: Any, g: Any, root: Any, out: Any, lr: Any) -> Any:
        worst = np.uint32(0)
        for i in range(g.size):
            new = w[i] - lr * (g[i] / root[i])
            store(out, i, new)
            worst = max(worst, magnitude_bits(new))
        return worst

    @jit_internal
    def _divide(g: Any, root: Any) -> None:
        for i in range(g.size):
            root[i] = g[i] / root[i]

    @jit_internal
    def _adam(
        w: Any, m: Any, v: Any, g: Any, out: Any, m_out: Any, v_out: Any,
        b1: Any, r1: Any, b2: Any, r2: Any, eps: Any, size: Any, grow: Any, keep: Any,
    ) -> Any:  # fmt: skip
        """size = lr / (1 - beta1^t), grow = 1 / sqrt(1 - beta2^t), keep = 1 - lr * decoupled weight decay."""
        worst, least = np.uint32(0), _least(eps)
        for i in range(g.size):
            first = b1 * m[i] + r1 * g[i]
            second = b2 * v[i] + r2 * (g[i] * g[i])
            new = keep * w[i] - size * (first / (np.sqrt(second) * grow + eps))
            store(m_out, i, _settled(first))
            store(v_out, i, _settled(second, least))
            store(out, i, new)
            worst = max(worst, max(magnitude_bits(second), magnitude_bits(new)))
        return worst

    @jit_internal
    def _ftrl(
        w: Any, z: Any, n: Any, g: Any, out: Any, z_out: Any, n_out: Any, alpha: Any, beta: Any, l1: Any, l2: Any
    ) -> Any:
        """Per-coordinate FTRL-Proximal (McMahan et al. 2013, algorithm 1), whose alpha may differ from step to step.

        What the paper has after subtracting sigma * w, the difference of two strengths times w, is computed from w: by
        its closed form z + w * (the last step's strength) is what l1 takes off, or z itself where w is 0.
        """
        worst = np.uint32(0)
        zero = np.float32(0.0)
        for i in range(g.size):
            after = n[i] + g[i] * g[i]
            strength = (beta + np.sqrt(after)) / alpha + l2
            held = min(max(z[i], -l1), l1)
            held = -l1 if w[i] > zero else held
            held = l1 if w[i] < zero else held
            linear = held + g[i] - strength * w[i]
            size = max(abs(linear) - l1, zero) / strength
            new = -size if linear > zero else size
            new = w[i] if g[i] == zero else new  # exactly, without rounding
            store(z_out, i, linear)
            store(n_out, i, after)
            store(out, i, new)
            worst = max(worst, max(magnitude_bits(linear), max(magnitude_bits(after), magnitude_bits(new))))
        return worst

    @jit_internal
    def _sum(w: Any, g: Any, out: Any) -> Any:
        worst = np.uint32(0)
        for i in range(g.size):
            new = w[i] + g[i]
            store(out, i, new)
            worst = max(worst, magnitude_bits(new))
        return worst

    @jit_internal
    def _dispatch(
        kind: int, w: Any, s0: Any, s1: Any, s2: Any, g: Any, out: Any, o0: Any, o1: Any, o2: Any,
        roots: Any, h0: Any, h1: Any, h2: Any, h3: Any, h4: Any, a: Any, b: Any, c: Any,
    ) -> Any:  # fmt: skip
        """Step one block; return the largest `magnitude_bits` of the results."""
        if kind == codes.SGD:
            return _sgd(w, g, out, a)
        if kind == codes.MOMENTUM:
            return _momentum(w, s0, g, out, o0, a, h0)
        if kind == codes.NESTEROV:
            return _nesterov(w, s0, g, out, o0, a, h0)
        if kind == codes.ADAGRAD:
            return _adagrad(w, s0, g, out, o0, a, h0)
        if kind == codes.ADAM:
            return _adam(w, s0, s1, g, out, o0, o1, h0, h1, h2, h3, h4, a, b, c)
        if kind == codes.FTRL:
            return _ftrl(w, s0, s1, g, out, o0, o1, a, h0, h1, h2)
        if kind != codes.RMSPROP:
            return _sum(w, g, out)
        root = subarray(roots, 0, g.size, out)
        # h: alpha, 1 - alpha, eps, momentum, centered
        if h4 != np.float32(0.0):
            worst = _variance(s0, s1, g, o0, o1, root, h0, h1, h2)
        else:
            worst = _mean_square(s0, g, o0, root, h0, h1, h2)
        if h3 == np.float32(0.0):
            return max(worst, _divided(w, g, root, out, a))
        _divide(g, root)
        last, o_last = (s2, o2) if h4 != np.float32(0.0) else (s1, o1)
        return max(worst, _momentum(w, last, subarray(root, 0, g.size, g), out, o_last, a, h3))

    return _dispatch


_step_block = _block_step(_store)
_step_block_nontemporal = _block_step(_store_nontemporal)


@jit_internal
def _copy(w: Any, s0: Any, s1: Any, s2: Any, out: Any, o0: Any, o1: Any, o2: Any, a: int, b: int) -> None:
    """Copy elements [a, b) of values and slots; the arrays of slots that the optimizer does not have are empty."""
    out[a:b] = w[a:b]
    o0[a:b] = s0[a:b]
    o1[a:b] = s1[a:b]
    o2[a:b] = s2[a:b]


@jit_entry_point
def step(
    kind: int, h: Any, spans: Any, table: Any, w: Any, s0: Any, s1: Any, s2: Any,
    raw: Any, code: int, parts: Any, weights: Any, ranges: Any,
    out: Any, o0: Any, o1: Any, o2: Any, nontemporal: Any,
) -> Any:  # fmt: skip
    """Make one optimizer step of a partition; return whether the gradient read and every result is finite.

    Each row of `spans` is (start, stop, row of `table`), and each of `ranges` (start, stop), both sorted and disjoint.
    Elements that are not in both are copied.  The gradient holds the elements of the ranges end to end: it is `raw` and
    `code` (see `loads`), or with `MEAN_CODE` the mean of `parts` with `weights` (see `load_mean`).  `nontemporal`: use
    nontemporal stores for blocks that start on a cache line.
    """
    f = np.float32
    h0, h1, h2, h3, h4 = f(h[0]), f(h[1]), f(h[2]), f(h[3]), f(h[4])
    scratch = np.empty(codes.BLOCK, np.float32)
    roots = np.empty(codes.BLOCK, np.float32)
    worst = np.uint32(0)
    out_of_place = out.ctypes.data != raw.ctypes.data  # in-place loops are not vectorized
    nontemporal = nontemporal and _line_aligned(out) and _line_aligned(o0) and _line_aligned(o1) and _line_aligned(o2)
    lanes = LINE_BYTES // 4
    at = k = j = before = 0
    while k < spans.shape[0] and j < ranges.shape[0]:
        start, stop = max(spans[k, 0], ranges[j, 0]), min(spans[k, 1], ranges[j, 1])
        shift = before - ranges[j, 0]  # from a place in the partition to that in the gradient
        r = spans[k, 2]
        if spans[k, 1] <= ranges[j, 1]:
            k += 1
        else:
            before += ranges[j, 1] - ranges[j, 0]
            j += 1
        if start >= stop:
            continue
        _copy(w, s0, s1, s2, out, o0, o1, o2, at, start)
        at = stop
        scale, clip, decay = f(table[r, codes.SCALE]), f(table[r, codes.CLIP]), f(table[r, codes.DECAY])
        a, b, c = f(table[r, codes.A]), f(table[r, codes.B]), f(table[r, codes.C])
        ready = out_of_place and code == codes.F32_CODE and scale == f(1.0) and clip == f(np.inf) and decay == f(0.0)
        while start < stop:
            n = min(codes.BLOCK - start % lanes, stop - start)  # so that the next block starts on a cache line
            wb, ob = subarray(w, start, n, w), subarray(out, start, n, out)
            b0, b1, b2 = subarray(s0, start, n, s0), subarray(s1, start, n, s1), subarray(s2, start, n, s2)
            p0, p1, p2 = subarray(o0, start, n, o0), subarray(o1, start, n, o1), subarray(o2, start, n, o2)
            if ready:
                g = float32_at(raw.ctypes.data, start + shift, n)
            else:
                block = subarray(scratch, 0, n, out)
                if code == codes.MEAN_CODE:
                    worst = max(worst, load_mean(parts, weights, start + shift, block))
                else:
                    worst = max(worst, load(raw, code, start + shift, block))
                _prepare(block, wb, scale, clip, decay)
                g = subarray(scratch, 0, n, w)
            if nontemporal and start % lanes == 0:
                new = _step_block_nontemporal(
                    kind, wb, b0, b1, b2, g, ob, p0, p1, p2, roots, h0, h1, h2, h3, h4, a, b, c
                )
            else:
                new = _step_block(kind, wb, b0, b1, b2, g, ob, p0, p1, p2, roots, h0, h1, h2, h3, h4, a, b, c)
            worst = max(worst, new)
            start += n
    _copy(w, s0, s1, s2, out, o0, o1, o2, at, out.size)
    if nontemporal:
        fence()
    return worst < INF_BITS


@jit_internal
def _add(first: Any, out: Any, raw: Any, code: int, start: int, factor: Any, scratch: Any) -> None:
    """out (+)= factor * gradient[start : start + out.size] in float32; `first` assigns instead of adding."""
    if code == codes.F32_CODE:
        add_to(first, float32_at(raw.ctypes.data, start, out.size), factor, out)
        return
    at = 0
    while at < out.size:
        end = min(at + codes.BLOCK, out.size)
        g = scratch[: end - at]
        load(raw, code, start + at, g)
        add_to(first, g, factor, out[at:end])
        at = end


@jit_entry_point
def add(first: Any, out: Any, touched: Any, raw: Any, code: int, start: int, weight: float, ranges: Any) -> None:
    """Add weight * the gradient's elements from `start` on, which are those of `ranges` end to end, in float32.

    `out` holds the elements of `touched` end to end; each of `ranges` lies within one of these.  `first` assigns
    instead of adding.
    """
    scratch = np.empty(codes.BLOCK, np.float32)
    k = before = 0
    for j in range(ranges.shape[0]):
        n = ranges[j, 1] - ranges[j, 0]
        while touched[k, 1] < ranges[j, 1]:
            before += touched[k, 1] - touched[k, 0]
            k += 1
        place = before + ranges[j, 0] - touched[k, 0]
        _add(first, subarray(out, place, n, out), raw, code, start, np.float32(weight), scratch)
        start += n


@jit_internal
def _largest(values: Any, factor: Any) -> Any:
    """Return the largest `magnitude_bits` of the products."""
    worst = np.uint32(0)
    for i in range(values.size):
        worst = max(worst, magnitude_bits(factor * values[i]))
    return worst


@jit_entry_point
def finite(raw: Any, code: int) -> Any:
    """Whether a gradient is finite in float32; of int8, whether no scale is so large that a number might not be."""
    if code == codes.F64_CODE:
        wide = float64_at(raw.ctypes.data, 0, raw.size // 8).view(np.uint64)
        widest = np.uint64(0)
        for i in range(wide.size):
            widest = max(widest, np.uint64(wide[i] & np.uint64(0x7FFFFFFFFFFFFFFF)))
        return widest < np.uint64(0x47EFFFFFF0000000)  # 2**128 - 2**103, halfway above the largest float32: rounds up
    if code == codes.F16_CODE or code == codes.BF16_CODE:
        half = uint16_at(raw.ctypes.data, 0, raw.size // 2)
        top = np.uint16(0x7C00) if code == codes.F16_CODE else np.uint16(0x7F80)
        most = np.uint16(0)
        for i in range(half.size):
            most = max(most, np.uint16(half[i] & np.uint16(0x7FFF)))
        return most < top
    if code == codes.INT8_CODE:
        return _largest(int8_views(raw)[0], np.float32(128.0)) < INF_BITS
    values = topk_views(raw)[1] if code == codes.TOPK_CODE else float32_at(raw.ctypes.data, 0, raw.size // 4)
    return _largest(values, np.float32(1.0)) < INF_BITS


@jit_entry_point
def squares(raw: Any, code: int, size: int) -> float:
    """Return the sum of squares of `size` elements in float64, in a fixed order.

    They are added to 16 interleaved partial sums, which can be vectorized.
    """
    lanes = np.empty(16, np.float64)
    for k in range(16):
        lanes[k] = 0.0
    scratch = np.empty(codes.BLOCK, np.float32)
    at = 0
    while at < size:
        end = min(at + codes.BLOCK, size)
        if code == codes.F64_CODE:
            wide = float64_at(raw.ctypes.data, at, end - at)
            for i in range(wide.size):
                lanes[i & 15] += wide[i] * wide[i]
        else:
            g = scratch[: end - at]
            load(raw, code, at, g)
            whole = g.size // 16 * 16
            for i in range(0, whole, 16):
                for k in range(16):
                    x = np.float64(g[i + k])
                    lanes[k] += x * x
            for i in range(whole, g.size):
                x = np.float64(g[i])
                lanes[i & 15] += x * x
        at = end
    total = 0.0
    for k in range(16):
        total += lanes[k]
    return total


_grad = (types.Array(types.uint8, 1, "C", readonly=True), types.int64)
SIGNATURES = (
    (step, (types.int64, _numbers, _spans, _table, _in32, _in32, _in32, _in32, *_grad,
            _addresses, _numbers, _ranges, _out32, _out32, _out32, _out32, types.boolean)),
    (add, (types.boolean, _out32, _ranges, *_grad, types.int64, types.float64, _ranges)),
    (finite, _grad),
    (squares, (*_grad, types.int64)),
)  # fmt: skip
