"""From accepted gradients to the scalars of one optimizer step on one partition (`UpdateTask`); pure functions.

The step count for bias correction is kept per parameter within the partition and rises only for parameters that the
update touches.  Elements outside the ranges that a push names keep their value and moments and are not decayed
(semantics 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paramserver.core import ranges as range_arrays
from paramserver.core.layout import Segment
from paramserver.core.optimizer import COUNTING, SegmentStep
from paramserver.core.partition_state import HeldPart, PartitionState
from paramserver.core.ranges import RangeArray
from paramserver.core.shard.effects import UpdateTask
from paramserver.core.spec import ModelSpec
from paramserver.types import AnyArray, Coding, PartitionKey


@dataclass(slots=True)
class UpdateInput:
    """The state and settings that an update starts from."""

    key: PartitionKey
    state: PartitionState
    spec: ModelSpec
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """Elements of the partition."""
        return self.state.values.size

    def steps(
        self, touched: Sequence[bool] | None, scale: float, rate: float
    ) -> tuple[tuple[SegmentStep, ...], tuple[int, ...]]:
        """Return (a step for each segment, step counts after them) for an update of those touched; None: of all."""
        spec, optimizer = self.spec, self.spec.optimizer
        out: list[SegmentStep] = []
        counts = list(self.state.steps)
        counting = optimizer.name in COUNTING
        for i, segment in enumerate(self.segments):
            param = spec.params[segment.param]
            active = param.trainable and (touched is None or touched[i])
            counts[i] += active
            decay = optimizer.weight_decay if param.weight_decay is None else param.weight_decay
            step = (counts[i] or 1) if counting else 1
            numbers = (rate * param.lr_scale, decay, step, optimizer.clip_value, scale)
            out.append(SegmentStep(segment.start, segment.stop, *numbers, active=active))
        return tuple(out), tuple(counts)

    def touched(self, ranges: Sequence[RangeArray | None]) -> list[bool] | None:
        """Return for each segment whether it has an element of any of these; None if one is the whole partition."""
        some = [r for r in ranges if r is not None]
        if len(some) < len(ranges):
            return None
        bounds = [(s.start, s.stop) for s in self.segments]
        return [any(row) for row in zip(*[range_arrays.touched(r, bounds) for r in some], strict=True)]


def single_task(
    inputs: UpdateInput,
    data: AnyArray,
    dtype: Coding,
    ranges: RangeArray | None,
    scale: float,
    rate: float,
    *,
    reuse_direct: bool = False,
    needs_check: bool = False,
) -> UpdateTask:
    """Return the task that applies one push on its own, at learning rate `rate`.

    For `data` of a whole partition: with `reuse_direct` its memory may be reused once the task is done, and with
    `needs_check` its checksum is part of the result.
    """
    steps, counts = inputs.steps(None if ranges is None else inputs.touched((ranges,)), scale, rate)
    return UpdateTask(
        inputs.key,
        inputs.state,
        inputs.spec.optimizer,
        steps,
        counts,
        (data, dtype),
        ranges,
        reuse_direct=reuse_direct and ranges is None,
        needs_check=needs_check,
    )


def mean_task(inputs: UpdateInput, parts: Sequence[tuple[HeldPart, float]], divisor: float, rate: float) -> UpdateTask:
    """Return the task of one update, at `rate`, by the weighted sum of the parts, in order, over `divisor`."""
    steps, counts = inputs.steps(inputs.touched([h.ranges for h, _ in parts]), 1.0, rate)
    summands = tuple([(h.data, h.dtype, weight, h.ranges) for h, weight in parts])
    return UpdateTask(
        inputs.key, inputs.state, inputs.spec.optimizer, steps, counts, None, parts=summands, divisor=divisor
    )
