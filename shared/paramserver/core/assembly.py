"""Conversion between partitions and the named arrays of a checkpoint.

The number of partitions may differ between writing and restoring, because both divide the same flat vector.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from paramserver.core.layout import Layout
from paramserver.core.optimizer import initial_slots, slot_count, slot_names
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.core.partition_state import PartitionState
from paramserver.errors import problem
from paramserver.types import F32


def gather(
    layout: Layout, states: Iterable[PartitionState]
) -> tuple[dict[str, F32], dict[str, list[F32]], dict[str, int]]:
    """Return the values, optimizer state and step counts of a model's parameters by name.

    `states` are all its partitions by index.  The arrays have their parameters' shapes and are views of one flat vector
    for the values and one for each optimizer slot.  If partitions of one parameter have different step counts (after
    pushes to ranges of it), the highest is taken.  Raises ConflictError (`conflict`) if the partitions keep different
    numbers of optimizer arrays.
    """
    vectors: list[F32] = []
    steps = {p.name: 0 for p in layout.spec.params}
    for (lo, hi), segments, state in zip(layout.partitions(), layout.segments, states, strict=True):
        vectors = vectors or [np.empty(layout.size, np.float32) for _ in range(1 + len(state.slots))]
        if len(state.slots) != len(vectors) - 1:
            raise problem("conflict", "the optimizer is being changed; try again")
        for vector, part in zip(vectors, (state.values, *state.slots), strict=True):
            vector[lo:hi] = part
        for segment, count in zip(segments, state.steps, strict=True):
            name = layout.spec.params[segment.param].name
            steps[name] = max(steps[name], count)
    params = {n: _view(layout, vectors[0], n) for n in layout.offsets}
    slots = {n: [_view(layout, v, n) for v in vectors[1:]] for n in layout.offsets}
    return params, slots, steps


def scatter(
    layout: Layout,
    params: dict[str, F32],
    slots: dict[str, list[F32]],
    steps: Mapping[str, int],
    source: OptimizerSpec,
) -> list[PartitionState]:
    """Return the partitions of a layout, by index, filled from these named arrays.

    `params` and `slots` are empty afterwards: each array is given up once it is copied, so that a model is in memory
    only once.

    Optimizer state and step counts are kept if the optimizer that they are of, `source`, has the same arrays as the
    layout's, and every parameter has them; otherwise both start afresh.  Raises RequestError if names or shapes differ
    from the layout's.
    """
    for p in layout.spec.params:
        if p.name not in params:
            raise problem("unknown_parameter", f"the checkpoint lacks parameter '{p.name}'", name=p.name)
        if params[p.name].shape != p.shape:
            shapes = f"{params[p.name].shape} in the checkpoint and {p.shape} in the model"
            raise problem("invalid_shape", f"parameter '{p.name}' has shape {shapes}")
    for name in params:
        if name not in layout.offsets:
            raise problem("unknown_parameter", f"the model has no parameter '{name}'", name=name)
    optimizer = layout.spec.optimizer
    wanted = slot_count(optimizer)
    same = slot_names(source) == slot_names(optimizer)
    keep = same and all(len(slots.get(n, ())) == wanted for n in layout.offsets)
    if not keep:
        slots.clear()
    vectors = [_flat(layout, params.pop)]
    if keep:
        vectors += [_flat(layout, lambda name: slots[name].pop(0)) for _ in range(wanted)]
    slots.clear()
    out: list[PartitionState] = []
    for (lo, hi), segments in zip(layout.partitions(), layout.segments, strict=True):
        counts = tuple(int(steps.get(layout.spec.params[s.param].name, 0)) if keep else 0 for s in segments)
        values = vectors[0][lo:hi]
        state = tuple(v[lo:hi] for v in vectors[1:]) if keep else initial_slots(optimizer, values)
        out.append(PartitionState(values, state, counts))
    return out


def versions(layout: Layout, source: Layout, held: Sequence[int]) -> list[int]:
    """Return the lowest version each partition may have after a restore from `source`, saved at versions `held`.

    If both layouts have the same bounds and parameters, each partition keeps its own version; otherwise all get the
    highest.  In sync all get one less than the highest: the new phase's first commit, which is empty, raises them to
    it.
    """
    top, count = max(held, default=0), layout.spec.partitions
    if layout.spec.consistency.mode == "sync":
        return [max(0, top - 1)] * count
    same = layout.bounds == source.bounds and layout.offsets == source.offsets and len(held) == count
    return list(held) if same else [top] * count


def _view(layout: Layout, vector: F32, name: str) -> F32:
    lo, hi = layout.offsets[name]
    return vector[lo:hi].reshape(layout.by_name[name].shape)


def _flat(layout: Layout, take: Callable[[str], F32]) -> F32:
    vector = np.empty(layout.size, np.float32)
    for name, (lo, hi) in layout.offsets.items():
        vector[lo:hi] = take(name).reshape(-1)
    return vector
