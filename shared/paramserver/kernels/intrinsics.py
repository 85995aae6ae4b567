"""Operations that Python cannot express: array views without reference counts, nontemporal stores, a fence."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np import arrayobj

_arrays: Any = arrayobj  # some versions of numba have no types for it

LINE_BYTES = 64
"""Bytes of a cache line, and of the widest vector store."""


def _subarray(typing_context: Any, array: Any, start: Any, size: Any, model: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = context.make_array(array)(context, builder, args[0])
        made = context.make_array(model)(context, builder)
        start_of = builder.gep(whole.data, [args[1]])
        _arrays.populate_array(made, start_of, [args[2]], [whole.itemsize], whole.itemsize, None)
        return made._getvalue()

    return model(array, types.intp, types.intp, model), generate


def _elements(item: Any) -> Any:
    """Return the intrinsic that is described below, for items of that type."""
    model = types.Array(item, 1, "C", readonly=True, aligned=False)

    def at(typing_context: Any, address: Any, start: Any, size: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            made = context.make_array(model)(context, builder)
            first = builder.gep(builder.inttoptr(args[0], made.data.type), [args[1]])
            item_bytes = context.get_constant(types.intp, item.bitwidth // 8)
            _arrays.populate_array(made, first, [args[2]], [item_bytes], item_bytes, None)
            return made._getvalue()

        return model(types.intp, types.intp, types.intp), generate

    return intrinsic(at)


def _store_nontemporal(typing_context: Any, array: Any, at: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        store = builder.store(args[2], builder.gep(data, [args[1]]), align=LINE_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), generate


def _fence(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


subarray: Any = intrinsic(_subarray)
"""subarray(array, start, size, model): array[start : start + size] with the type of `model`, so that a loop is
compiled for one type only.  The view keeps no memory alive: reference counting takes a locked instruction, which waits
for all earlier stores."""

float32_at, float64_at = _elements(types.float32), _elements(types.float64)
int8_at, uint16_at, uint32_at = _elements(types.int8), _elements(types.uint16), _elements(types.uint32)
"""float32_at(address, start, size): elements [start, start + size) of the array at that address, which may be
unaligned, as such a view; likewise for other items."""

store_nontemporal: Any = intrinsic(_store_nontemporal)
"""store_nontemporal(array, at, value): array[at] = value as a nontemporal store, which neither reads the cache line nor
keeps it in the cache (Intel 64 and IA-32 Architectures Optimization Reference Manual, "Non-temporal Stores").

`array` must start on a cache line.  For loops over the whole array, which the compiler vectorizes: vector stores have
the alignment declared here, and the scalar stores of the remainder need none.
"""

fence: Any = intrinsic(_fence)
"""fence(): a thread that sees a store made after the fence also sees all nontemporal stores made before it."""
