"""The public functions: they check arguments, turn optimizer specs into tables, and call the compiled loops."""

from collections.abc import Sequence
from functools import lru_cache
from math import inf, sqrt
from threading import Lock
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paramserver.core import ranges as range_arrays
from paramserver.core.optimizer import SegmentStep, adam_corrections, slot_count
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.core.ranges import RangeArray
from paramserver.kernels import codes, prebuilt
from paramserver.types import F32, ITEMSIZE, AnyArray


def _load_loops() -> Any:
    """Return the loops of a prebuilt library if one fits, else those that numba compiles."""
    found = prebuilt.load()
    if found is None:
        from paramserver.kernels import compiled as found
    return found


loops: Final = _load_loops()
_CODES = {
    "float32": (codes.F32_CODE, "f"),
    "float64": (codes.F64_CODE, "d"),
    "float16": (codes.F16_CODE, "eH"),
    "bfloat16": (codes.BF16_CODE, "H"),
    "int8": (codes.INT8_CODE, "B"),
    "topk": (codes.TOPK_CODE, "B"),
}
"""The code of a gradient in each coding, and NumPy's characters of the dtypes of arrays that hold it."""
_KINDS = {
    "sgd": codes.SGD,
    "momentum": codes.MOMENTUM,
    "nesterov": codes.NESTEROV,
    "adagrad": codes.ADAGRAD,
    "rmsprop": codes.RMSPROP,
    "adam": codes.ADAM,
    "adamw": codes.ADAM,
    "ftrl": codes.FTRL,
    "sum": codes.SUM,
}
_NO_SLOT = np.empty(0, np.float32)
_NO_PARTS = np.empty(0, np.int64)
_NO_WEIGHTS = np.ones(1)
_MEAN_BLOCK: Final = 1 << 16
"""Elements of the running sum that `mean` keeps in the second-level cache while it adds up the parts."""
CACHE_BYTES: Final = 48 << 20
"""From this many bytes of values, gradient and state, read and written, nontemporal stores pay off.  Measured with SGD
and Adam: at 56 MiB they are a quarter faster, at 28 MiB no slower."""

FTRL_RATE_MIN: Final = 1e-20
"""Up to this learning rate ftrl makes no step; it would change no float32 that is larger than 1e-12."""
CACHED_STEPS_MAX: Final = 64
"""Segments of which a step's table is kept: thousands of rows, which other pushes do not have, are a megabyte each."""

_compile_lock = Lock()
_compiled = False


def warm_up() -> None:
    """Compile every loop, or load it from numba's cache on disk; later calls do nothing.

    The other functions call it themselves; a service calls it before it serves, so that no push has to wait.
    """
    global _compiled
    with _compile_lock:
        if _compiled:
            return
        prebuilt.compile_all(loops)
        _compiled = True


_U8: Final = np.dtype(np.uint8)
_MEAN: Final = (np.empty(0, _U8), codes.MEAN_CODE)


def _code(a: AnyArray, dtype: str | None) -> int:
    """Return the code of a gradient; raises ValueError if the array cannot hold it.

    The loops take a gradient as its bytes and this code.
    """
    if not _compiled:
        warm_up()
    if a.ndim != 1 or not a.flags.c_contiguous or not a.dtype.isnative:
        raise ValueError(f"need a contiguous vector in native byte order, not shape {a.shape} of {a.dtype}")
    name = dtype or a.dtype.name
    code, held_by = _CODES.get(name, (-1, ""))
    if a.dtype.char not in held_by:
        raise ValueError(f"an array of {a.dtype} does not hold {name}")
    if code >= codes.INT8_CODE and (a.size % 8 if code == codes.TOPK_CODE else 0 < a.size % codes.INT8_ROW < 5):
        raise ValueError(f"no gradient in {name} has {a.size} bytes")
    return code


def _elements(a: AnyArray, code: int) -> int:
    """Return the number of elements of a gradient that is not in topk, which does not tell."""
    return a.size - 4 * -(-a.size // codes.INT8_ROW) if code == codes.INT8_CODE else a.size


def _check_length(a: AnyArray, code: int, elements: int) -> None:
    """Raise ValueError if a gradient that is not in topk does not have that many.

    In topk its indices do not tell: they are checked when they arrive, but in shared memory their sender may change
    them after that.  The loops leave out what lies beyond the values.
    """
    if code != codes.TOPK_CODE and _elements(a, code) != elements:
        raise ValueError(f"lengths differ: the values have {elements} elements, not so a gradient of {a.nbytes} bytes")


def _constants(o: OptimizerSpec) -> npt.NDArray[np.float64]:
    """Return the constants that all segments share; differences are computed before the loops round to float32."""
    match o.name:
        case "momentum" | "nesterov":
            h = [o.momentum]
        case "adagrad":
            h = [o.eps]
        case "rmsprop":
            h = [o.alpha, 1.0 - o.alpha, o.eps, o.momentum, float(o.centered)]
        case "adam" | "adamw":
            beta1, beta2 = o.betas
            h = [beta1, 1.0 - beta1, beta2, 1.0 - beta2, o.eps]
        case "ftrl":
            h = [o.beta, o.l1, o.l2]
        case _:
            h = []
    return np.array(h + [0.0] * (5 - len(h)))


def _row(o: OptimizerSpec, s: SegmentStep) -> tuple[float, ...]:
    """Return one row of the step table; `codes` names its columns."""
    clip = inf if s.clip_value is None else s.clip_value
    lr, decay = s.lr, s.weight_decay
    match o.name:
        case "adam" | "adamw":
            first, root = adam_corrections(o, s.step)
            if o.name == "adamw":
                return s.scale, clip, 0.0, lr / first, 1.0 / root, 1.0 - lr * decay
            return s.scale, clip, decay, lr / first, 1.0 / root, 1.0
        case "adagrad":
            return s.scale, clip, decay, lr / (1.0 + (s.step - 1) * o.lr_decay), 0.0, 0.0
        case "sum":
            return s.scale, clip, 0.0, 0.0, 0.0, 0.0
        case _:
            return s.scale, clip, decay, lr, 0.0, 0.0


def _tables(
    o: OptimizerSpec, steps: tuple[SegmentStep, ...], size: int
) -> tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return (slot count, spans, step table, constants), as `loops.step` takes them.

    Segments with equal parameters share a row of the table, and adjacent ones are merged into one span.
    """
    spans: list[tuple[int, int, int]] = []
    rows: list[tuple[float, ...]] = []
    known: dict[tuple[float | None, ...], int] = {}
    at, last = 0, -1
    for s in steps:
        start, stop = s.start, s.stop
        if start < at or stop < start:
            raise ValueError(f"segment [{start}, {stop}) after {at}: segments are sorted and do not overlap")
        # ftrl divides by its learning rate, which also bounds its step: next to zero means no step.
        if s.active and start < stop and (s.lr > FTRL_RATE_MIN or o.name != "ftrl"):
            key = (s.lr, s.weight_decay, s.step, s.clip_value, s.scale)
            row = known.get(key, -1)
            if row < 0:
                row = known[key] = len(rows)
                rows.append(_row(o, s))
            if row == last and start == at:
                spans[-1] = (spans[-1][0], stop, row)
            else:
                spans.append((start, stop, row))
            last = row
        else:
            last = -1
        at = stop
    if at > size:
        raise ValueError(f"segments reach to {at}, the partition has {size} elements")
    return (
        slot_count(o),
        np.array(spans, np.int64).reshape(-1, 3),
        np.array(rows, np.float64).reshape(-1, codes.COLUMNS),
        _constants(o),
    )


_tables_of_few = lru_cache(maxsize=256)(_tables)
"""Successive pushes often have the same segments, and for small ones building this takes longer than the step."""


@lru_cache(maxsize=256)
def _whole(size: int) -> RangeArray:
    """Return the one range of a gradient that is not limited to some."""
    return np.array(((0, size),), np.int64)


def _check_ranges(ranges: RangeArray, size: int) -> int:
    """Return their number of elements.  Raises ValueError if they are not sorted, disjoint and within the partition."""
    if not len(ranges) or range_arrays.first_wrong(ranges) is not None or ranges[-1, 1] > size:
        raise ValueError(f"{len(ranges)} ranges that are not sorted, disjoint and within {size} elements")
    return range_arrays.elements(ranges)


def exceeds_cache(optimizer: OptimizerSpec, elements: int) -> bool:
    """Whether an update of `elements` elements in total touches more memory than the caches hold."""
    return ITEMSIZE["float32"] * (3 + 2 * slot_count(optimizer)) * elements >= CACHE_BYTES


def apply(
    optimizer: OptimizerSpec,
    steps: Sequence[SegmentStep],
    w: F32,
    slots: Sequence[F32],
    grad: AnyArray,
    dtype: str,
    w_out: F32,
    slots_out: Sequence[F32],
    *,
    ranges: RangeArray | None = None,
    nontemporal: bool = False,
) -> bool:
    """Write one optimizer step of a partition to `w_out` and `slots_out`; return whether all of it is finite.

    `steps` are sorted and disjoint; elements in none of them, or in an inactive one, are copied, and their gradient is
    not read.  `w`, `grad`, `w_out` and every slot have the partition's length; `slots` and `slots_out` hold
    `slot_count(optimizer)` arrays in the order of `slot_names(optimizer)`.  `w_out` may be `grad` itself; the inputs
    are not modified otherwise.  With `ranges`, the step is one of their elements alone, which `grad`, in no codec,
    holds end to end.  `nontemporal`: bypass the caches when writing (see `exceeds_cache`); the bits are the same.

    Returns False if the gradient read, or any value or slot computed, is NaN or infinite in float32; the outputs are
    then garbage.  Raises ValueError if arrays or steps do not fit.
    """
    code = _code(grad, dtype)
    if ranges is None:
        _check_length(grad, code, w.size)
        ranges = _whole(w.size)
    elif grad.size != _check_ranges(ranges, w.size) or code >= codes.INT8_CODE:
        raise ValueError(f"the ranges do not have the elements of a gradient of {grad.nbytes} bytes")
    gradient = grad.view(_U8), code, _NO_PARTS, _NO_WEIGHTS, ranges
    return _step(optimizer, steps, w, slots, gradient, w_out, slots_out, nontemporal)


def apply_mean(
    optimizer: OptimizerSpec,
    steps: Sequence[SegmentStep],
    w: F32,
    slots: Sequence[F32],
    parts: Sequence[tuple[F32, float]],
    divisor: float,
    w_out: F32,
    slots_out: Sequence[F32],
    *,
    nontemporal: bool = False,
) -> bool:
    """The same as `apply` with the `mean` of these (float32 gradient, weight), which is never stored as a whole.

    Raises ValueError as `apply` and `mean` do.  Outputs must not overlap gradients.
    """
    if not parts or not divisor > 0.0:
        raise ValueError("a mean needs at least one part and a positive divisor")
    for grad, _ in parts:
        _check_length(grad, _code(grad, "float32"), w.size)
    addresses = np.array([grad.__array_interface__["data"][0] for grad, _ in parts], np.int64)
    weights = np.array([*[weight for _, weight in parts], divisor], np.float64)
    gradient = *_MEAN, addresses, weights, _whole(w.size)
    return _step(optimizer, steps, w, slots, gradient, w_out, slots_out, nontemporal)


def _step(
    optimizer: OptimizerSpec,
    steps: Sequence[SegmentStep],
    w: F32,
    slots: Sequence[F32],
    gradient: tuple[AnyArray, int, npt.NDArray[np.int64], npt.NDArray[np.float64], RangeArray],
    w_out: F32,
    slots_out: Sequence[F32],
    nontemporal: bool,
) -> bool:
    size = w.size
    tables = _tables_of_few if len(steps) <= CACHED_STEPS_MAX else _tables
    count, spans, table, constants = tables(optimizer, tuple(steps), size)
    if len(slots) != count or len(slots_out) != count:
        raise ValueError(f"{optimizer.name} has {count} slots, not {len(slots)} and {len(slots_out)}")
    for a in (w_out, *slots, *slots_out):
        if a.size != size:
            raise ValueError(f"lengths differ: the values have {size} elements, another array {a.size}")
    rest = (_NO_SLOT,) * (3 - count)
    ok = loops.step(
        _KINDS[optimizer.name], constants, spans, table, w, *slots, *rest,
        *gradient, w_out, *slots_out, *rest, nontemporal,
    )  # fmt: skip
    return bool(ok)


def mean(
    parts: Sequence[tuple[AnyArray, str, float, RangeArray | None]],
    divisor: float,
    out: F32,
    touched: RangeArray | None = None,
) -> None:
    """out = (sum of weight * gradient over the parts, in their order, in float32) / divisor.

    Each part is (gradient, dtype, weight, ranges), and holds the elements of its ranges end to end; None: the whole
    partition.  If all parts have ranges, `out` holds their `ranges.union`, `touched`, end to end; else the partition.
    Apart from the parts and the divisor, the result's bits depend only on the parts' order.  Raises ValueError if there
    are no parts, the divisor is not positive, or a length does not fit.
    """
    if not parts or not divisor > 0.0:
        raise ValueError("a mean needs at least one part and a positive divisor")
    size = out.size if touched is None else int(touched[-1, 1])
    held = _whole(size) if touched is None else touched
    if range_arrays.elements(held) != out.size:
        raise ValueError(f"lengths differ: {range_arrays.elements(held)} elements do not go into {out.size}")
    pieces: list[tuple[AnyArray, int, float, RangeArray | None]] = []
    for grad, dtype, weight, ranges in parts:
        code = _code(grad, dtype)
        if ranges is None and touched is None:
            _check_length(grad, code, size)
        elif ranges is None or code >= codes.INT8_CODE or grad.size != _check_ranges(ranges, size):
            raise ValueError(f"the ranges do not have the elements of a gradient of {grad.nbytes} bytes")
        elif (held[held[:, 1].searchsorted(ranges[:, 1]), 0] > ranges[:, 0]).any():
            raise ValueError("ranges of a part are not all within those touched")
        pieces.append((grad.view(_U8), code, weight, ranges))
    if all([ranges is None for *_, ranges in pieces]):
        for at in range(0, size, _MEAN_BLOCK):
            block = np.array(((at, min(at + _MEAN_BLOCK, size)),), np.int64)
            for i, (raw, code, weight, _) in enumerate(pieces):
                loops.add(i == 0, out, held, raw, code, at, weight, block)
    else:
        out.fill(-0.0)  # which, unlike 0.0, changes nothing that is added to it: not the sign of a zero either
        for raw, code, weight, ranges in pieces:
            loops.add(False, out, held, raw, code, 0, weight, held if ranges is None else ranges)
    if np.float32(divisor) != 1.0:
        np.divide(out, np.float32(divisor), out=out)


def all_finite(a: AnyArray, dtype: str | None = None) -> bool:
    """Whether the vector is finite in float32: no NaN, no infinity, and no float64 value that rounds to infinity.

    `dtype` is needed for codecs, and for float16 and bfloat16 given as bits.
    """
    code = _code(a, dtype)
    return bool(loops.finite(a.view(_U8), code))


def norm2(a: AnyArray, dtype: str | None = None) -> float:
    """Return the vector's 2-norm, summed in float64; `math.hypot` combines the norms of several vectors."""
    code = _code(a, dtype)
    if code == codes.TOPK_CODE:  # elements that were not sent are zero
        a, code = a[a.size // 2 :].view(np.float32), codes.F32_CODE
    return sqrt(loops.squares(a.view(_U8), code, _elements(a, code)))
