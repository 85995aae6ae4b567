"""Gradients on their way out: checked against the model, and written into frame bodies in one pass.

The pass converts each piece to its wire dtype, tests it for NaN and infinity and sums its squares, block by block while
the block is in the cache.  NumPy copies float32 as fast as a compiled loop does; where values are rounded, or squares
summed in float64, large gradients use a compiled loop.  float32 for a single shard is not scanned: the shard does that,
and refuses the gradient as a whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from typing import Any, Final, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from paramserver.client.gradient_arrays import ArrayMemory, GradientArrays
from paramserver.client.rows import Chosen, Rows, chosen, ids_of, summed, with_rows
from paramserver.client.values import array_of, not_held, sendable
from paramserver.codecs.elements import Encoder, encoder
from paramserver.core.layout import Layout
from paramserver.core.ranges import RangeArray
from paramserver.core.selection import Part, Ranges, Selection, listed, select
from paramserver.errors import PsError, combined, problem
from paramserver.types import ITEMSIZE, AnyArray, DType, DTypeLike
from paramserver.wire.tensor import NUMPY_DTYPE, bf16_bits_to_f32, f32_to_bf16_bits

Grads: TypeAlias = Mapping[str, Any] | Any
"""Arrays by parameter name, or one flat vector of the whole model."""

VIEW_BYTES_MIN: Final = 64 << 10
"""A smaller piece is cheaper to copy than to send by itself."""
_BLOCK: Final = 1 << 13
"""Elements converted and scanned at a time: they stay in the cache, and BLAS starts no threads for so few."""
_BLOCK_F32: Final = 1 << 15
"""Elements scanned at a time where nothing is converted: fewer, larger steps."""
_EXPONENT: Final = {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}
"""Exponent bits of the 2-byte dtypes, which are all set in infinities and NaNs."""
_BEYOND_F32: Final = 2.0**128 - 2.0**103
"""The smallest float64 that becomes infinite in float32."""
_SQUARES_F64: Final = 2.0**254
"""If a sum of squares is below this, each of the float64 elements fits into float32."""
_NARROW: Final = {np.dtype(np.float16): "float16"}
"""Source dtypes that are sent unconverted, besides float32 and bfloat16."""


class Gradient(Struct, frozen=True):
    """A gradient whose names and shapes fit its model; its values are not checked yet."""

    selection: Selection
    sources: tuple[AnyArray, ...]
    """The elements of each of `selection.params`, 1-D and contiguous; bfloat16 as uint16."""
    bf16: tuple[bool, ...]
    """Which of the sources hold bfloat16 bits."""
    dtype: DType
    """Wire dtype."""
    memory: ArrayMemory | None = None
    """Its memory, if slots can be mapped over it and it is sent unconverted; else None."""

    def body_bytes(self, parts: Sequence[Part]) -> int:
        """Return the size, in bytes, of a body of these parts."""
        return sum([p.stop - p.start for p in parts]) * ITEMSIZE[self.dtype]

    def write(self, parts: Sequence[Part], body: memoryview, scan: "Scan") -> None:
        """Write the elements of `parts` end to end into `body`, scanning them."""
        out = np.frombuffer(body, dtype=NUMPY_DTYPE[self.dtype])
        fast, at = _float32_encoder(self, scan), 0
        for part in parts:
            for piece in part.pieces:
                source = self.sources[piece.param][piece.source : piece.source + piece.length]
                target = out[at : at + piece.length]
                at += piece.length
                squares = inf if fast is None or source.dtype != np.float32 else fast(source, target)
                if not isfinite(squares):  # or the elements are so large that float32 cannot hold their squares
                    squares = _copy(source, self.bf16[piece.param], target, self.dtype)
                scan.squares += squares
                if not squares < _SQUARES_F64 and not _finite(target, self.dtype):
                    held = _finite(source, "bfloat16" if self.bf16[piece.param] else "float32")
                    narrow = "float32" if self.dtype == "float64" else self.dtype  # the server computes in float32
                    scan.found_bad(self.selection.params[piece.param].name, narrow if held else None)
        assert at == out.size

    def views(self, parts: Sequence[Part], scan: "Scan") -> list[memoryview] | None:
        """Return the elements of `parts` in place, scanned; None if they need conversion or are in small pieces."""
        size_bytes = self.body_bytes(parts)
        if self.dtype != "float32" or scan.exact or size_bytes < VIEW_BYTES_MIN:
            return None
        out: list[AnyArray] = []
        squares, param, end = 0.0, -1, -1
        for piece in (piece for part in parts for piece in part.pieces):
            source, stop = self.sources[piece.param], piece.source + piece.length
            if source.dtype != np.float32:
                return None
            if scan.scan_unconverted:
                squares += _squares(source[piece.source : stop])
            if (piece.param, piece.source) == (param, end):
                out[-1] = source[stop - piece.length - out[-1].size : stop]
            else:
                out.append(source[piece.source : stop])
            param, end = piece.param, stop
        if not isfinite(squares) or size_bytes < VIEW_BYTES_MIN * len(out):
            return None
        scan.squares += squares
        return [view.data.cast("B") for view in out]

    def find_bad(self, scan: "Scan") -> None:
        """Find NaN and infinity in the float32 sources, which a scan may have skipped."""
        for param, source in zip(self.selection.params, self.sources, strict=True):
            if source.dtype == np.float32 and not _finite(source, "float32"):
                scan.found_bad(param.name)


def prepare(
    layout: Layout,
    grads: Grads,
    ranges: Ranges | None = None,
    dtype: DTypeLike | None = None,
    partitions: frozenset[int] | None = None,
    rows: Rows | None = None,
) -> Gradient:
    """Check `grads` against the model and return them as a gradient; one error lists every mismatch.

    With `partitions`, only the elements in these are included.

    float64 and integers are sent as float32, in which the server computes, unless `dtype` says otherwise.
    Raises NotFoundError (`unknown_parameter`) or RequestError (`invalid_shape`, `invalid_dtype`, `invalid_range`,
    `empty_push`, or `invalid` if several kinds are wrong).
    """
    dtype = None if dtype is None else sendable(dtype, "sent")
    if isinstance(grads, list | tuple) and any(np.ndim(g) for g in grads):
        hint = f"push({{'{layout.spec.params[0].name}': array}})"
        raise problem(
            "invalid_field", "gradients are arrays by name, or one flat vector, not a list of arrays", hint=hint
        )
    if isinstance(grads, np.ndarray) or not isinstance(grads, Mapping):
        return _flat(layout, grads, ranges or rows, dtype)
    if not grads:
        raise problem("empty_push", "the push holds no gradients", hint="pass an array for at least one parameter")
    errors: list[PsError] = []
    errors += layout.spec.unknown([str(n) for n in grads if n not in layout.by_name])
    known = [n for n in grads if n in layout.by_name]
    touched, only = _limited(layout, grads, ranges, rows, errors) if ranges or rows else ({}, {})
    selection = select(layout, known, only)
    arrays: list[tuple[AnyArray, bool]] = []
    for i, p in enumerate(selection.params):
        try:
            gradient = grads[p.name] if p.name not in touched else summed(p, touched[p.name], grads[p.name])
            arrays.append(_array(f"'{p.name}'", gradient, selection.shape(i), p.name, ranged=p.name in only))
        except PsError as e:
            errors.append(e)
    if errors:
        raise combined(errors)
    if partitions is not None:
        selection = replace(selection, parts=tuple(p for p in selection.parts if p.partition in partitions))
    made = _gradient_of(selection, arrays, dtype)
    whole = partitions is None and not only and made.dtype == "float32"
    if isinstance(grads, GradientArrays) and whole and list(grads) == list(layout.by_name):
        return replace(made, memory=grads.place)  # laid out like the model's flat vector
    return made


def _limited(
    layout: Layout, grads: Mapping[str, Any], ranges: Ranges | None, rows: Rows | None, errors: list[PsError]
) -> tuple[dict[str, Chosen], dict[str, RangeArray]]:
    """Return what the arrays that are of rows or ranges are of, and all of it as ranges; appends to `errors`."""
    known = [n for n in grads if n in layout.by_name]
    named = {"ranges": listed(None, ranges)[1], "rows": ids_of(rows)}
    for how, by_name in named.items():
        stray = [n for n in by_name if n not in grads]
        errors += [problem("invalid_range", f"{how} name '{n}', which has no array", where=n) for n in stray]
    touched = chosen(layout, {n: ids for n, ids in named["rows"].items() if n in known})
    only = with_rows(layout, {n: r for n, r in named["ranges"].items() if n in known}, touched)
    if only and len(only) == len(known) and not any(map(len, only.values())):
        raise problem("empty_push", "the push names no element", hint="worker.clock() ends an iteration without a push")
    return touched, only


def _flat(layout: Layout, grads: Any, ranges: Ranges | Rows | None, dtype: str | None) -> Gradient:
    if ranges:
        raise problem(
            "invalid_range",
            "ranges and rows need gradients by parameter name",
            hint='push({"w": values}, ranges={"w": …})',
        )
    array, bf16 = _array("the flat gradient", grads, (layout.size,), "")
    selection = select(layout)
    at = selection.offsets
    return _gradient_of(selection, [(array[at[i] : at[i + 1]], bf16) for i in range(len(selection.params))], dtype)


def _array(what: str, value: Any, shape: tuple[int, ...], where: str, *, ranged: bool = False) -> tuple[AnyArray, bool]:
    """Return `value` as a contiguous 1-D array, and whether it holds bfloat16 bits."""
    array = array_of(what, value, where)
    if array.shape != shape:
        needed = f"its ranges are {list(shape)}" if ranged else f"the model's is {list(shape)}"
        hint = "a range is one of flat elements: rows= takes rows" if ranged else ""
        raise problem("invalid_shape", f"{what} has shape {list(array.shape)}, {needed}", hint=hint, where=where)
    flat = np.ascontiguousarray(array).reshape(-1)
    return (flat.view(np.uint16), True) if flat.dtype.kind == "V" else (flat, False)


def _gradient_of(selection: Selection, arrays: Sequence[tuple[AnyArray, bool]], dtype: str | None) -> Gradient:
    kinds = {"bfloat16" if bf16 else _NARROW.get(a.dtype, "float32") for a, bf16 in arrays}
    chosen: Any = dtype or (kinds.pop() if len(kinds) == 1 else "float32")
    return Gradient(selection, tuple([a for a, _ in arrays]), tuple([b for _, b in arrays]), chosen)


@dataclass(slots=True)
class Scan:
    """What the pass over a gradient has found so far."""

    exact: bool = True
    """Whether squares are summed in float64 throughout, as clipping needs; else in float32 within a block."""
    scan_unconverted: bool = True
    """Whether float32 that is sent unconverted is scanned too."""
    squares: float = 0.0
    """Sum of the squares of the elements, before they are rounded to two bytes."""
    bad: dict[str, PsError] = field(default_factory=dict)
    """Errors of the parameters that cannot be sent, by name."""

    @property
    def norm(self) -> float:
        """The 2-norm of what was scanned."""
        return sqrt(self.squares)

    def found_bad(self, name: str, dtype: str | None = None) -> None:
        """Record that a parameter holds NaN or infinity or, with `dtype`, numbers too large for that."""
        self.bad.setdefault(name, not_held(name, dtype))

    def raise_for_bad(self) -> None:
        """Raise RequestError (`non_finite`) naming the parameters that cannot be sent."""
        if self.bad:
            raise combined(list(self.bad.values()))


def _float32_encoder(gradient: Gradient, scan: Scan) -> Encoder | None:
    """Return the fast path for float32 sources, if any; where its result is not finite, they are checked again."""
    if gradient.dtype == "float32" and not scan.exact:
        return _squares if scan.scan_unconverted else _copy_unscanned
    return encoder(gradient.dtype, gradient.selection.size)


def _squares(source: AnyArray, out: AnyArray | None = None) -> float:
    """Copy float32 to `out`; return its sum of squares, not finite if an element is not, or is very large."""
    total = 0.0
    with np.errstate(all="ignore"):
        for start in range(0, source.size, _BLOCK_F32):
            block = source[start : start + _BLOCK_F32]
            if out is not None:
                out[start : start + _BLOCK_F32] = block
            total += float(block.dot(block))
    return total


def _copy_unscanned(source: AnyArray, out: AnyArray) -> float:
    """Copy without scanning; the 0 returned counts as finite."""
    out[...] = source
    return 0.0


def _copy(source: AnyArray, source_bf16: bool, out: AnyArray, dtype: str) -> float:
    """Convert `source` into `out`; return the source's sum of squares, not finite if `out` is not."""
    total = 0.0
    wide = np.empty(min(_BLOCK, out.size), np.float64)
    narrow = np.empty(min(_BLOCK, out.size), np.float32)
    exponent = _EXPONENT.get(dtype)
    with np.errstate(all="ignore"):
        for start in range(0, out.size, _BLOCK):
            src, dst = source[start : start + _BLOCK], out[start : start + _BLOCK]
            f32, f64 = narrow[: dst.size], wide[: dst.size]
            if source_bf16:
                bf16_bits_to_f32(src, f32)
            elif exponent is not None:
                f32[...] = src
            if source_bf16 and dtype == "bfloat16":
                dst[...] = src
            elif dtype == "bfloat16":
                f32_to_bf16_bits(f32, dst)
            else:
                dst[...] = f32 if source_bf16 else src
            f64[...] = dst if exponent is None else f32
            total += float(f64.dot(f64))
            # What is finite in float32 may be infinite in two bytes.
            if exponent is not None and bool(((dst.view(np.uint16) & exponent) == exponent).any()):
                total = inf
    return total


def _finite(out: AnyArray, dtype: str) -> bool:
    exponent = _EXPONENT.get(dtype)
    if exponent is not None:
        return not bool(((out.view(np.uint16) & exponent) == exponent).any())
    if dtype == "float64":
        return bool((np.abs(out) < _BEYOND_F32).all())
    return bool(np.isfinite(out).all())
