"""Computes an `Apply` effect: each task's new partition state, in pooled buffers, off the event loop when it is big."""

from collections.abc import Sequence
from itertools import chain
from typing import Final, TypeVar

import numpy as np

from paramserver import kernels
from paramserver.core.shard_io import AssignTask, PartitionState, Task, TaskResult, UpdateTask
from paramserver.types import F32, AnyArray
from paramserver.wire.tensor import slice_crc, to_f32
from paramserver_shard.buffers import BufferPool

T = TypeVar("T")

INLINE_ELEMENTS_MAX: Final = 1_000_000
"""Up to so many elements the event loop computes by itself: a thread's hand-over costs as much (0.1 to 0.2 ms)."""


def shares(items: Sequence[T], threads: int) -> list[Sequence[T]]:
    """The items in their order, as evenly many for each thread as can be; fewer shares where there are fewer items."""
    size = max(1, -(-len(items) // threads))
    return [items[i : i + size] for i in range(0, len(items), size)]


def task_elements(task: Task) -> int:
    """Elements a task reads, which is what its time goes by."""
    size = task.state.values.size
    if isinstance(task, UpdateTask) and task.direct is None:
        size += sum((piece.stop - piece.start) * len(piece.parts) for piece in task.pieces)
    return size


def beyond_cache(tasks: Sequence[Task]) -> bool:
    """Whether what the tasks make is better written past the caches, for they touch more than stays there."""
    updates = [task for task in tasks if isinstance(task, UpdateTask)]
    elements = sum([task.state.values.size for task in updates])
    return bool(updates) and kernels.beyond_cache(updates[0].optimizer, elements)


def rooms(shares: Sequence[Sequence[Task]], pool: BufferPool) -> list[list[F32 | None]]:
    """Memory for the values that each task makes; None where that of the gradient spent before it will do, or none is
    free.

    It is taken in one moment for all of them: while some compute, clients let go of other memory.
    """
    if len(shares) == 1 == len(shares[0]):  # as most of a small model are
        return [pool.take_free([shares[0][0].state.values])]
    spent = [[False, *[_spent(task) is not None for task in tasks]][: len(tasks)] for tasks in shares]
    values = [task.state.values for task, before in zip(chain(*shares), chain(*spent), strict=True) if not before]
    found = iter(pool.take_free(values))
    return [[None if before else next(found) for before in share] for share in spent]


def compute(
    tasks: Sequence[Task], pool: BufferPool, places: Sequence[F32 | None] | None = None, *, past: bool = False
) -> tuple[TaskResult, ...]:
    """The result of each task, in its one of `places`, which are from `rooms`; taken now where there are none.
    `past`: written past the caches.

    Of what a task refers to, only a gradient that may be spent is written: its memory takes the next task's result, so
    that a push of a whole model needs no third copy of it.
    """
    results: list[TaskResult] = []
    spare: AnyArray | None = None
    for task, place in zip(tasks, rooms([tasks], pool)[0] if places is None else places, strict=True):
        size = task.state.values.size
        if place is None and spare is not None:
            place = pool.again(spare, size)
        values = pool.take(size, shared=True, after=task.state.values) if place is None else place
        results.append(_update(task, pool, values, past) if isinstance(task, UpdateTask) else _assign(task, values))
        spare = _spent(task)
    return tuple(results)


def _spent(task: Task) -> AnyArray | None:
    """The gradient that nobody needs once this task is done."""
    return task.direct[0] if isinstance(task, UpdateTask) and task.spend and task.direct is not None else None


def _update(task: UpdateTask, pool: BufferPool, values: F32, past: bool) -> TaskResult:
    state, size = task.state, task.state.values.size
    slots = tuple([pool.take(size) for _ in state.slots])
    step = task.optimizer, task.steps, state.values, state.slots
    if (parts := _alike(task)) is not None:
        ok = kernels.apply_mean(*step, parts, task.divisor, values, slots, nontemporal=past)
        return TaskResult(PartitionState(values, slots, task.counts) if ok else None)
    gradient: AnyArray
    if task.direct is not None:
        gradient, dtype = task.direct
    else:
        gradient, dtype = pool.take(size), "float32"
        for piece in task.pieces:
            kernels.mean(piece.parts, task.divisor, gradient[piece.start : piece.stop], piece.start)
    crc = slice_crc(dtype, ((0, size),), gradient) if task.look else None  # it is in the cache for what follows
    if not kernels.apply(*step, gradient, dtype, values, slots, nontemporal=past):
        return TaskResult(None, bad_gradient=task.look and not kernels.all_finite(gradient, dtype))
    return TaskResult(PartitionState(values, slots, task.counts), crc)


def _alike(task: UpdateTask) -> list[tuple[F32, float]] | None:
    """The gradients of which the task is the mean, where all are of the whole partition in float32, as most are."""
    if task.direct is not None or len(task.pieces) != 1:
        return None
    (piece,) = task.pieces
    whole = piece.stop - piece.start == task.state.values.size
    parts = [(data, weight) for data, dtype, weight in piece.parts if whole and dtype == "float32"]
    return parts if len(parts) == len(piece.parts) else None


def _assign(task: AssignTask, values: F32) -> TaskResult:
    state, part = task.state, task.part
    if part.ranges is None:
        values[:] = to_f32(part.data, part.dtype)
    else:
        np.copyto(values, state.values)
        source, at = to_f32(part.data, part.dtype), 0
        for start, stop in part.ranges:
            values[start:stop] = source[at : at + stop - start]
            at += stop - start
    if not kernels.all_finite(values):
        return TaskResult(None)
    slots = state.slots if part.slots is None else part.slots
    return TaskResult(PartitionState(values, slots, state.steps if part.steps is None else part.steps))
