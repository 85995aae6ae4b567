"""Rows of tables by number: a pull returns them in the order asked, and a push may name one more than once.

On the way they are ranges, in which each row comes once and adjacent ones are one range.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from paramserver.client.arrays import Params
from paramserver.client.values import array_of
from paramserver.core import ranges as range_arrays
from paramserver.core.layout import Layout
from paramserver.core.param_spec import ParamSpec
from paramserver.core.ranges import RangeArray
from paramserver.errors import PsError, problem
from paramserver.types import AnyArray
from paramserver.wire.tensor import to_f32

Rows: TypeAlias = Mapping[str, Sequence[int] | npt.NDArray[Any]]
"""Numbers of rows, which are the elements of the first dimension, by parameter name."""
Ids: TypeAlias = npt.NDArray[np.int64]


class Chosen(Struct, frozen=True):
    """Rows of one parameter."""

    ids: Ids
    """As the caller named them."""
    each: Ids
    """Those of them, each once, ascending."""
    places: Ids | None
    """Where each of `ids` is in `each`; None if they are the same."""

    def ranges(self, width: int) -> RangeArray:
        """Return the elements of the rows, of that many each, as ranges."""
        return range_arrays.joined(np.column_stack((self.each, self.each + 1)) * width)


def ids_of(rows: Rows | None) -> dict[str, Ids]:
    """Return the row numbers as arrays of their own.  Raises RequestError (`invalid_range`) if they are none."""
    if rows is None:
        return {}
    if not isinstance(rows, Mapping):
        raise _wrong(f"rows must be row numbers by parameter name, not {rows!r:.60}")
    return {name: _numbers(name, ids) for name, ids in rows.items()}


def _numbers(name: str, ids: Any) -> Ids:
    found = array_of(f"the rows of '{name}'", ids, name)
    if found.ndim != 1:
        hint = "ids.ravel(), and .reshape() what comes back" if found.ndim else 'rows={"emb": [3, 17]}'
        raise problem("invalid_range", f"rows of '{name}' have shape {list(found.shape)}, not one dimension", hint=hint)
    if found.size and found.dtype.kind not in "iu":
        raise _wrong(f"rows of '{name}' must be integers, not {found.dtype}")
    return found.astype(np.int64)


def _wrong(detail: str) -> PsError:
    return problem("invalid_range", detail, hint='rows={"emb": [3, 17]}')


def chosen(layout: Layout, rows: Mapping[str, Ids]) -> dict[str, Chosen]:
    """Return the rows, checked against the model.

    Raises NotFoundError (`unknown_parameter`) or RequestError (`invalid_range`).
    """
    out: dict[str, Chosen] = {}
    for name, ids in rows.items():
        param = layout.by_name.get(name)
        if param is None:
            (error,) = layout.spec.unknown([name])
            raise error
        if not param.shape:
            raise problem("invalid_range", f"'{name}' is a single number and has no rows")
        outside = (ids < 0) | (ids >= param.shape[0])
        if outside.any():
            detail = f"rows of '{name}': {ids[outside.argmax()]} is not one of its {param.shape[0]} rows"
            raise problem("invalid_range", detail, hint="rows are counted from 0")
        if (ids[1:] > ids[:-1]).all():
            out[name] = Chosen(ids, ids, None)
        else:
            out[name] = Chosen(ids, *np.unique(ids, return_inverse=True))
    return out


def width_of(param: ParamSpec) -> int:
    """Return the number of elements of a row."""
    return param.size // param.shape[0]


def with_rows(
    layout: Layout, ranges: Mapping[str, RangeArray], rows: Mapping[str, Chosen], *, probe: bool = False
) -> dict[str, RangeArray]:
    """Return ranges that name the rows, too.  Raises RequestError (`invalid_range`) if a parameter is in both.

    `probe`: if they would name no element, they name one, as a pull tells the versions of what it touches.
    """
    both = ranges.keys() & rows.keys()
    if both:
        raise problem("invalid_range", f"'{min(both)}' is in ranges= and in rows=", hint="name it in one of them")
    named = {**ranges, **{name: of.ranges(width_of(layout.by_name[name])) for name, of in rows.items()}}
    if probe and not any(map(len, named.values())):
        named[next(iter(rows))] = range_arrays.of_pairs([(0, 1)])
    return named


def summed(param: ParamSpec, of: Chosen, gradient: Any) -> AnyArray:
    """Return the gradient of each row, end to end as in `of.ranges`: the sum of those given for it, in their order.

    Where a row is named more than once, the result is float32.  Raises RequestError (`invalid_shape`,
    `invalid_dtype`).
    """
    array = array_of(f"'{param.name}'", gradient, param.name)
    shape = (of.ids.size, *param.shape[1:])
    if array.shape != shape:
        detail = f"'{param.name}' has shape {list(array.shape)}, and {of.ids.size} rows of it {list(shape)}"
        raise problem("invalid_shape", detail, where=param.name)
    flat = array.reshape(of.ids.size, width_of(param))
    if of.places is None:
        return flat.reshape(-1)
    if of.each.size == of.ids.size:
        return flat[of.places.argsort()].reshape(-1)
    bits = flat.view(np.uint16) if flat.dtype.kind == "V" else flat
    total = np.full((of.each.size, width_of(param)), -0.0, np.float32)  # to which a first summand is added unchanged
    with np.errstate(all="ignore"):  # what is not finite is found when the gradient is sent
        np.add.at(total, of.places, to_f32(bits, "bfloat16" if bits is not flat else flat.dtype.name))
    return total.reshape(-1)


def arranged(params: Params, rows: Mapping[str, Chosen]) -> Params:
    """Return pulled ranges as the rows that were asked for, in their order and in the parameters' shapes."""
    if not rows:
        return params
    selection, parts, offsets = params.selection, list[AnyArray](), [0]
    shapes: dict[str, tuple[int, ...]] = {}
    for param in selection.params:
        values = params[param.name].reshape(-1)
        if (of := rows.get(param.name)) is not None:
            shapes[param.name] = (of.ids.size, *param.shape[1:])
            if not of.ids.size:
                values = values[:0]
            elif of.places is not None:
                values = values.reshape(-1, width_of(param))[of.places].reshape(-1)
        parts.append(values)
        offsets.append(offsets[-1] + values.size)
    moved = offsets[-1] != params.flat.size or any([of.places is not None for of in rows.values()])
    flat = np.concatenate(parts) if moved else params.flat
    return Params(replace(selection, offsets=tuple(offsets), shapes=shapes), flat, params.origin)


def row_key(rows: Mapping[str, Ids]) -> Hashable:
    """Return what can be hashed, and is equal for the same rows in the same order."""
    return tuple([(name, rows[name].tobytes()) for name in sorted(rows)])
