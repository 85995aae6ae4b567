"""What loops need and Python has no words for: pieces of arrays that are not counted, stores past the caches."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np import arrayobj

_arrays: Any = arrayobj  # which versions of numba publish types for it differs

LINE_BYTES = 64
"""A line of the cache, and the longest vector that is stored at once."""


def _uncounted(typing_context: Any, array: Any, start: Any, size: Any, model: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = context.make_array(array)(context, builder, args[0])
        made = context.make_array(model)(context, builder)
        start_of = builder.gep(whole.data, [args[1]])
        _arrays.populate_array(made, start_of, [args[2]], [whole.itemsize], whole.itemsize, None)
        return made._getvalue()

    return model(array, types.intp, types.intp, model), generate


def _uncounted_at(typing_context: Any, address: Any, start: Any, size: Any, model: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = context.make_array(model)(context, builder)
        first = builder.gep(builder.inttoptr(args[0], made.data.type), [args[1]])
        item_bytes = context.get_constant(types.intp, model.dtype.bitwidth // 8)
        _arrays.populate_array(made, first, [args[2]], [item_bytes], item_bytes, None)
        return made._getvalue()

    return model(types.intp, types.intp, types.intp, model), generate


def _past(typing_context: Any, array: Any, at: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        store = builder.store(args[2], builder.gep(data, [args[1]]), align=LINE_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), generate


def _seen(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


piece: Any = intrinsic(_uncounted)
"""piece(array, start, size, model): array[start : start + size] of the type of `model`, so that a loop is compiled for
one type.  It keeps no memory alive: counting who does is a locked instruction, which waits for all stores before it."""

piece_at: Any = intrinsic(_uncounted_at)
"""piece_at(address, start, size, model): the same of the array that begins at that address."""

put_past: Any = intrinsic(_past)
"""put_past(array, at, value): array[at] = value, without reading the line it lies in or keeping it in the cache
(Intel 64 and IA-32 Architectures Optimization Reference Manual, "Non-temporal Stores").

`array` must begin a line.  It is for loops over all of it, of which the compiler makes vectors: their stores are
aligned as it says here, and the single ones that are left over need not be.
"""

fence: Any = intrinsic(_seen)
"""fence(): whoever sees what is written after it sees all that was written past the caches before it."""
