"""Computes an `Apply` effect: each task's new partition state, in pooled buffers."""

import os
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from paramserver import kernels
from paramserver.core import ranges as range_arrays
from paramserver.core.partition_state import PartitionState
from paramserver.core.ranges import RangeArray
from paramserver.core.shard.effects import AssignTask, Task, UpdateTask
from paramserver.core.shard.events import TaskResult
from paramserver.types import F32, AnyArray, Coding
from paramserver.wire.tensor import slice_crc, to_f32
from paramserver_shard import control_groups
from paramserver_shard.buffers import BufferPool

T = TypeVar("T")

INLINE_ELEMENTS_MAX: Final = 1_000_000
"""Jobs of at most this many elements run on the event loop: handing over to a thread costs as much (0.1 to 0.2 ms)."""


def processors(groups: Path = control_groups.ROOT, own_groups: Path = control_groups.OWN) -> int:
    """Return how many processors this process may use, which may be fewer than the machine has.

    A container with the time of two, on however many, counts as having two: more threads would be stopped half-way, and
    an update waits for the last one.
    """
    found = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    for folder in control_groups.folders("cpu", groups, own_groups):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            match control_groups.numbers(folder, *files):
                case [quota, period] if quota > 0 and period > 0:  # of version 1, -1 means none
                    found = min(found, -(-quota // period))
    return found


def shares(items: Sequence[T], threads: int) -> list[Sequence[T]]:
    """Split the items, in order, into at most `threads` shares of equal length; the last may be shorter."""
    size = max(1, -(-len(items) // threads))
    return [items[i : i + size] for i in range(0, len(items), size)]


def task_elements(task: Task) -> int:
    """Elements that a task reads; its run time is proportional to them."""
    size = task.state.values.size
    if isinstance(task, UpdateTask) and task.direct is None:
        size += sum([size if ranges is None else data.size for data, _, _, ranges in task.parts])
    return size


def exceeds_cache(tasks: Sequence[Task]) -> bool:
    """Whether the tasks touch more memory than the caches hold, so that nontemporal stores pay off."""
    updates = [task for task in tasks if isinstance(task, UpdateTask)]
    elements = sum([task.state.values.size for task in updates])
    return bool(updates) and kernels.exceeds_cache(updates[0].optimizer, elements)


def take_outputs(shares: Sequence[Sequence[Task]], pool: BufferPool) -> list[list[F32 | None]]:
    """Take an output buffer for each task; None where a consumed gradient's is reused, or none is free.

    A task can reuse the buffer of the gradient that the task before it in its share consumed (`reuse_direct`).  All
    buffers are taken at once, because clients may release other ones while earlier tasks compute.
    """
    if len(shares) == 1 == len(shares[0]):  # the common case for small models
        return [pool.take_free([shares[0][0].state.values])]
    spent = [[False, *[_consumed_gradient(task) is not None for task in tasks]][: len(tasks)] for tasks in shares]
    values = [task.state.values for task, before in zip(chain(*shares), chain(*spent), strict=True) if not before]
    found = iter(pool.take_free(values))
    return [[None if before else next(found) for before in share] for share in spent]


def compute(
    tasks: Sequence[Task], pool: BufferPool, outputs: Sequence[F32 | None] | None = None, *, nontemporal: bool = False
) -> tuple[TaskResult, ...]:
    """Compute the result of each task into its buffer in `outputs` (from `take_outputs`); None: take the buffers now.

    `nontemporal`: use nontemporal stores.  Inputs are not modified, except a gradient that may be consumed
    (`reuse_direct`): its memory takes the next task's result, so that a push of a whole model needs no third copy.
    """
    results: list[TaskResult] = []
    spare: AnyArray | None = None
    for task, output in zip(tasks, take_outputs([tasks], pool)[0] if outputs is None else outputs, strict=True):
        size = task.state.values.size
        if output is None and spare is not None:
            output = pool.reuse(spare, size)
        values = pool.take(size, shared=True, after=task.state.values) if output is None else output
        results.append(
            _update(task, pool, values, nontemporal) if isinstance(task, UpdateTask) else _assign(task, values)
        )
        spare = _consumed_gradient(task)
    return tuple(results)


def _consumed_gradient(task: Task) -> AnyArray | None:
    """The gradient that is not needed once this task is done, if there is one."""
    return task.direct[0] if isinstance(task, UpdateTask) and task.reuse_direct and task.direct is not None else None


def _update(task: UpdateTask, pool: BufferPool, values: F32, nontemporal: bool) -> TaskResult:
    state, size = task.state, task.state.values.size
    slots = tuple([pool.take(size) for _ in state.slots])
    step = task.optimizer, task.steps, state.values, state.slots
    if (parts := _uniform_parts(task)) is not None:
        ok = kernels.apply_mean(*step, parts, task.divisor, values, slots, nontemporal=nontemporal)
        return TaskResult(PartitionState(values, slots, task.counts) if ok else None)
    (gradient, dtype), ranges = (task.direct, task.ranges) if task.direct is not None else _mean(task, pool)
    # The checksum also brings the gradient into the cache for the update.
    crc = slice_crc(dtype, ((0, size),), gradient) if task.needs_check else None
    # The step does not read the gradient where values stay as they are.
    unread = task.needs_check and any([not s.active or s.lr <= kernels.FTRL_RATE_MIN for s in task.steps])
    if unread and not kernels.all_finite(gradient, dtype):
        return TaskResult(None, bad_gradient=True)
    if not kernels.apply(*step, gradient, dtype, values, slots, ranges=ranges, nontemporal=nontemporal):
        return TaskResult(None, bad_gradient=task.needs_check and not kernels.all_finite(gradient, dtype))
    return TaskResult(PartitionState(values, slots, task.counts), crc)


def _uniform_parts(task: UpdateTask) -> list[tuple[F32, float]] | None:
    """The (gradient, weight) of each part, if all are whole partitions in float32 (the common case), else None."""
    if task.direct is not None:
        return None
    parts = [(data, weight) for data, dtype, weight, ranges in task.parts if ranges is None and dtype == "float32"]
    return parts if len(parts) == len(task.parts) else None


def _mean(task: UpdateTask, pool: BufferPool) -> tuple[tuple[AnyArray, Coding], RangeArray | None]:
    """Return ((the mean of the task's parts, its dtype), the ranges that it has; None: the whole partition)."""
    several = [ranges for *_, ranges in task.parts if ranges is not None]
    ranges = range_arrays.union(several) if len(several) == len(task.parts) else None
    if ranges is None:
        gradient = pool.take(task.state.values.size)
    else:
        gradient = np.empty(range_arrays.elements(ranges), np.float32)
    kernels.mean(task.parts, task.divisor, gradient, ranges)
    return (gradient, "float32"), ranges


def _assign(task: AssignTask, values: F32) -> TaskResult:
    state, part = task.state, task.part
    if part.ranges is None:
        values[:] = to_f32(part.data, part.dtype)
    else:
        np.copyto(values, state.values)
        source, at = to_f32(part.data, part.dtype), 0
        for start, stop in part.ranges.tolist():
            values[start:stop] = source[at : at + stop - start]
            at += stop - start
    if not kernels.all_finite(values):
        return TaskResult(None)
    slots = state.slots if part.slots is None else part.slots
    return TaskResult(PartitionState(values, slots, state.steps if part.steps is None else part.steps))
