"""What callers use: arguments are checked, specs become tables of numbers, and the compiled loops are called."""

from collections.abc import Sequence
from functools import lru_cache
from math import inf, sqrt
from threading import Lock
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paramserver.core.optimizer import SegmentStep, adam_corrections, slot_count
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.kernels import codes, prebuilt
from paramserver.types import F32, ITEMSIZE, AnyArray


def _found() -> Any:
    """The loops as a library, where one was built; else compiled by numba."""
    found = prebuilt.load()
    if found is None:
        from paramserver.kernels import compiled as found
    return found


loops: Final = _found()
_CODES = {
    "float32": codes.F32_CODE,
    "float64": codes.F64_CODE,
    "float16": codes.F16_CODE,
    "bfloat16": codes.BF16_CODE,
    "int8": codes.INT8_CODE,
    "topk": codes.TOPK_CODE,
}
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
_NONE32 = np.empty(0, np.float32)
_NONE64 = np.empty(0, np.float64)
_NONE16 = np.empty(0, np.uint16)
_NONE8 = np.empty(0, np.int8)
_NONE_AT = np.empty(0, np.uint32)
_NO_PARTS = np.empty(0, np.int64)
_NO_WEIGHTS = np.ones(1)
_MEAN_BLOCK = 1 << 16
"""Elements of the running sum that `mean` keeps in the second-level cache while it goes through the parts."""
CACHE_BYTES: Final = 48 << 20
"""What values, gradient and state, read and written, may take before writing past the caches pays: measured with SGD
and Adam; with 56 MiB it is a quarter faster, with 28 no slower."""

_compile_lock = Lock()
_compiled = False


def warm_up() -> None:
    """Compiles every loop, or loads it from numba's cache on disk; any later call does nothing.

    The other functions call it themselves; a service calls it before it serves, so that no push waits for it.
    """
    global _compiled
    with _compile_lock:
        if _compiled:
            return
        for function, signature in loops.SIGNATURES:
            function.compile(signature)
            function.disable_compile()
        _compiled = True


Views = tuple[F32, npt.NDArray[np.float64], npt.NDArray[np.uint16], npt.NDArray[np.int8], npt.NDArray[np.uint32], int]

_MEAN: Final[Views] = (_NONE32, _NONE64, _NONE16, _NONE8, _NONE_AT, codes.MEAN_CODE)


def int8_views(a: AnyArray) -> tuple[F32, npt.NDArray[np.int8]]:
    """(scales, numbers) of a partition in the int8 codec, as views of its uint8 bytes."""
    scales = 4 * -(-a.size // (codes.INT8_BLOCK + 4))
    return a[:scales].view(np.float32), a[scales:].view(np.int8)


def topk_views(a: AnyArray) -> tuple[npt.NDArray[np.uint32], F32]:
    """(indices, values) of a partition in the topk codec, as views of its uint8 bytes."""
    return a[: a.size // 2].view(np.uint32), a[a.size // 2 :].view(np.float32)


def _encoded_views(a: AnyArray, code: int) -> Views:
    if a.dtype != np.uint8:
        raise ValueError(f"an array of {a.dtype} does not hold an encoded gradient")
    if code == codes.INT8_CODE:
        scales, q = int8_views(a)
        return scales, _NONE64, _NONE16, q, _NONE_AT, code
    at, values = topk_views(a)
    return values, _NONE64, _NONE16, _NONE8, at, code


def _check_length(a: AnyArray, views: Views, dtype: str, size: int) -> None:
    """Raises ValueError where a gradient is not one of `size` elements."""
    code = views[-1]
    if code == codes.TOPK_CODE:
        at = views[4]
        wrong = at.size > 0 and int(at[-1]) >= size
    else:
        wrong = (views[3].size if code == codes.INT8_CODE else a.size) != size
    if wrong:
        raise ValueError(f"lengths differ: the values have {size} elements, a gradient in {dtype} has {a.nbytes} bytes")


def _views(a: AnyArray, dtype: str | None) -> Views:
    """The tensor as the typed arguments that fit (the others empty), and its code."""
    if not _compiled:
        warm_up()
    if a.ndim != 1 or not a.flags.c_contiguous or not a.dtype.isnative:
        raise ValueError(f"need a contiguous vector in native byte order, not shape {a.shape} of {a.dtype}")
    name = dtype or ("bfloat16" if a.dtype == np.uint16 else a.dtype.name)
    code = _CODES.get(name, -1)
    if code >= codes.INT8_CODE:
        return _encoded_views(a, code)
    if code == codes.F32_CODE and a.dtype == np.float32:
        return a, _NONE64, _NONE16, _NONE8, _NONE_AT, code
    if code == codes.F64_CODE and a.dtype == np.float64:
        return _NONE32, a, _NONE16, _NONE8, _NONE_AT, code
    if code >= codes.F16_CODE and a.dtype == np.uint16:
        return _NONE32, _NONE64, a, _NONE8, _NONE_AT, code
    if code == codes.F16_CODE and a.dtype == np.float16:
        return _NONE32, _NONE64, a.view(np.uint16), _NONE8, _NONE_AT, code
    raise ValueError(f"an array of {a.dtype} does not hold {name}")


def _constants(o: OptimizerSpec) -> npt.NDArray[np.float64]:
    """The numbers of a step that are the same for every segment; differences are taken before rounding to float32."""
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
    """One row of the table of steps, by the columns named in `codes`."""
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


@lru_cache(maxsize=256)
def _tables(
    o: OptimizerSpec, steps: tuple[SegmentStep, ...], size: int
) -> tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """How many slots there are, spans to step, their numbers, and the constants; equal numbers share a row, and
    neighbours that do become one span.

    Push after push they are often the same, and making them costs a small one more than the step.
    """
    spans: list[tuple[int, int, int]] = []
    rows: list[tuple[float, ...]] = []
    known: dict[tuple[float | None, ...], int] = {}
    at, last = 0, -1
    for s in steps:
        start, stop = s.start, s.stop
        if start < at or stop < start:
            raise ValueError(f"segment [{start}, {stop}) after {at}: segments are sorted and do not overlap")
        # ftrl divides by its rate: a rate of zero means no step, as for the others.
        if s.active and start < stop and (s.lr > 0.0 or o.name != "ftrl"):
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


def beyond_cache(optimizer: OptimizerSpec, elements: int) -> bool:
    """Whether an update of so many elements in all is of more memory than stays in a cache until it is read again."""
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
    nontemporal: bool = False,
) -> bool:
    """One optimizer step over a whole partition, written to `w_out` and `slots_out`; inputs stay as they are.

    `steps` are sorted and disjoint; elements in none of them, or in an inactive one, are copied, and their gradient
    is not read.  `w`, `grad`, `w_out` and every slot have the partition's length; `slots` and `slots_out` hold
    `slot_count(optimizer)` arrays in the order of `slot_names(optimizer)`.  `w_out` may be `grad` itself.
    `nontemporal`: they are written past the caches (see `beyond_cache`), with the same bits.

    Returns False if the gradient read, or any value or slot computed, is NaN or infinite in float32; the outputs are
    then garbage.  Raises ValueError for arrays or steps that do not fit.
    """
    views = _views(grad, dtype)
    _check_length(grad, views, dtype, w.size)
    return _step(optimizer, steps, w, slots, views, _NO_PARTS, _NO_WEIGHTS, w_out, slots_out, nontemporal)


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
    """The same with what `mean` makes of these (float32 gradient, weight), which is never written down as a whole.

    Raises ValueError as both do.  Outputs and gradients are apart.
    """
    if not parts or not divisor > 0.0:
        raise ValueError("a mean needs at least one part and a positive divisor")
    for grad, _ in parts:
        _check_length(grad, _views(grad, "float32"), "float32", w.size)
    addresses = np.array([grad.__array_interface__["data"][0] for grad, _ in parts], np.int64)
    weights = np.array([*[weight for _, weight in parts], divisor], np.float64)
    return _step(optimizer, steps, w, slots, _MEAN, addresses, weights, w_out, slots_out, nontemporal)


def _step(
    optimizer: OptimizerSpec,
    steps: Sequence[SegmentStep],
    w: F32,
    slots: Sequence[F32],
    views: Views,
    parts: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float64],
    w_out: F32,
    slots_out: Sequence[F32],
    nontemporal: bool,
) -> bool:
    size = w.size
    count, spans, table, constants = _tables(optimizer, tuple(steps), size)
    if len(slots) != count or len(slots_out) != count:
        raise ValueError(f"{optimizer.name} has {count} slots, not {len(slots)} and {len(slots_out)}")
    for a in (w_out, *slots, *slots_out):
        if a.size != size:
            raise ValueError(f"lengths differ: the values have {size} elements, another array {a.size}")
    rest = (_NONE32,) * (3 - count)
    ok = loops.step(
        _KINDS[optimizer.name], count, constants, spans, table, w, *slots, *rest,
        *views, parts, weights, w_out, *slots_out, *rest, nontemporal,
    )  # fmt: skip
    return bool(ok)


def mean(parts: Sequence[tuple[AnyArray, str, float]], divisor: float, out: F32, start: int = 0) -> None:
    """out = (sum of weight * gradient over the parts, in their order, in float32) / divisor.

    Each part is (gradient, dtype, weight); the result's bits depend on the order of the parts and on nothing else.
    Encoded parts are of a whole partition, of which `out` is the piece that begins at `start`; the others are of the
    length of `out`.  Raises ValueError if there are no parts, the divisor is not positive, or a length does not fit.
    """
    if not parts or not divisor > 0.0:
        raise ValueError("a mean needs at least one part and a positive divisor")
    views = [_views(grad, dtype) for grad, dtype, _ in parts]
    offsets = [start if view[-1] >= codes.INT8_CODE else 0 for view in views]
    for view, (grad, dtype, _) in zip(views, parts, strict=True):
        if view[-1] < codes.INT8_CODE:
            _check_length(grad, view, dtype, out.size)
        elif view[-1] == codes.INT8_CODE and view[3].size < start + out.size:
            raise ValueError(f"a gradient of {view[3].size} elements has none at [{start}, {start + out.size})")
    divide = np.float32(divisor)
    for at in range(0, out.size, _MEAN_BLOCK):
        block = out[at : at + _MEAN_BLOCK]
        for i, (view, (_, _, weight)) in enumerate(zip(views, parts, strict=True)):
            loops.add(i == 0, block, *view, at + offsets[i], weight)
        if divide != 1.0:
            np.divide(block, divide, out=block)


def accumulate(out: F32, grad: AnyArray, dtype: str, weight: float = 1.0) -> None:
    """out += weight * grad in float32; both of one length.  Raises ValueError if they are not."""
    view = _views(grad, dtype)
    _check_length(grad, view, dtype, out.size)
    loops.add(False, out, *view, 0, weight)


def all_finite(a: AnyArray, dtype: str | None = None) -> bool:
    """Whether the vector is finite in float32: no NaN, no infinity, and of float64 nothing that rounds to one.

    `dtype` is needed for float16 given as bits and for codecs.
    """
    views = _views(a, dtype)
    if dtype == "int8":
        with np.errstate(over="ignore", invalid="ignore"):
            views = (views[0] * np.float32(128.0), *views[1:])  # the largest number that a scale may stand for
    return bool(loops.finite(*views))


def norm2(a: AnyArray, dtype: str | None = None) -> float:
    """The vector's 2-norm, accumulated in float64; `math.hypot` joins the norms of several vectors."""
    views = _views(a, dtype)
    if views[-1] == codes.TOPK_CODE:  # what it leaves out adds nothing
        views = (views[0], _NONE64, _NONE16, _NONE8, _NONE_AT, codes.F32_CODE)
        a = views[0]
    return sqrt(loops.squares(*views, views[3].size or a.size))
