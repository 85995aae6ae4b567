"""From accepted gradients to the scalars of one optimizer step on one partition (`UpdateTask`); pure functions.

The step count for bias correction is kept per parameter within the partition and rises only for parameters that the
update touches.  Elements outside the ranges that a push names keep their value and moments and are not decayed
(semantics 1).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paramserver.core.layout import Range, Segment
from paramserver.core.optimizer import COUNTING, SegmentStep
from paramserver.core.partition_state import HeldPart, PartitionState
from paramserver.core.shard.effects import Piece, UpdateTask
from paramserver.core.spec import ModelSpec
from paramserver.types import ITEMSIZE, AnyArray, Coding, PartitionKey


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

    def steps(self, touched: Sequence[Range], scale: float, rate: float) -> tuple[list[SegmentStep], list[int]]:
        """Return (steps covering the partition, step counts after them) for an update of sorted, disjoint ranges."""
        spec, optimizer = self.spec, self.spec.optimizer
        out: list[SegmentStep] = []
        counts = list(self.state.steps)
        whole = touched[0] == (0, self.size) if touched else False
        counting = optimizer.name in COUNTING
        for i, segment in enumerate(self.segments):
            param, at, end = spec.params[segment.param], segment.start, segment.stop
            if not param.trainable:
                own: Sequence[Range] = ()
            elif whole:
                own = ((at, end),)
            else:
                own = _clipped(touched, at, end)
            counts[i] += bool(own)
            decay = optimizer.weight_decay if param.weight_decay is None else param.weight_decay
            step = (counts[i] or 1) if counting else 1
            numbers = (rate * param.lr_scale, decay, step, optimizer.clip_value, scale)
            for start, stop in own:
                if start > at:
                    out.append(SegmentStep(at, start, *numbers, active=False))
                out.append(SegmentStep(start, stop, *numbers))
                at = stop
            if at < end:
                out.append(SegmentStep(at, end, *numbers, active=False))
        return out, counts


def single_task(
    inputs: UpdateInput,
    data: AnyArray,
    dtype: Coding,
    ranges: tuple[Range, ...] | None,
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
    touched = ranges or ((0, inputs.size),)
    steps, counts = inputs.steps(touched, scale, rate)
    optimizer = inputs.spec.optimizer
    if ranges is None or ranges == ((0, inputs.size),):
        direct = (data, dtype)
        return UpdateTask(
            inputs.key,
            inputs.state,
            optimizer,
            tuple(steps),
            tuple(counts),
            direct,
            reuse_direct=reuse_direct,
            needs_check=needs_check,
        )
    pieces, at = [], 0
    for start, stop in ranges:
        pieces.append(Piece(start, stop, ((data[at : at + stop - start], dtype, 1.0),)))
        at += stop - start
    return UpdateTask(inputs.key, inputs.state, optimizer, tuple(steps), tuple(counts), None, tuple(pieces))


def mean_task(inputs: UpdateInput, parts: Sequence[tuple[HeldPart, float]], divisor: float, rate: float) -> UpdateTask:
    """Return the task of one update, at `rate`, by the weighted sum of the parts, in order, over `divisor`."""
    pieces = split_at_edges([(h.ranges or ((0, inputs.size),), h.data, h.dtype, weight) for h, weight in parts])
    steps, counts = inputs.steps(_joined((p.start, p.stop) for p in pieces), 1.0, rate)
    return UpdateTask(
        inputs.key, inputs.state, inputs.spec.optimizer, tuple(steps), tuple(counts), None, tuple(pieces), divisor
    )


def split_at_edges(parts: Sequence[tuple[tuple[Range, ...], AnyArray, Coding, float]]) -> list[Piece]:
    """Cut the parts at every boundary of any of them; each piece lists the parts that cover it, in their order.

    Encoded parts hold a whole partition and are not cut: the kernels decode the piece's share of them.
    """
    edges = sorted({edge for ranges, *_ in parts for r in ranges for edge in r})
    covering: list[list[tuple[AnyArray, Coding, float]]] = [[] for _ in edges]
    for ranges, data, dtype, weight in parts:
        at = 0
        for start, stop in ranges:
            i = bisect_left(edges, start)
            while edges[i] < stop:
                offset = at + edges[i] - start
                share = data[offset : offset + edges[i + 1] - edges[i]] if dtype in ITEMSIZE else data
                covering[i].append((share, dtype, weight))
                i += 1
            at += stop - start
    return [Piece(edges[i], edges[i + 1], tuple(held)) for i, held in enumerate(covering) if held]


def _clipped(ranges: Sequence[Range], low: int, high: int) -> list[Range]:
    """The portions of sorted, disjoint ranges that lie in [low, high)."""
    first = bisect_right(ranges, low, key=lambda r: r[1])
    last = bisect_left(ranges, high, key=lambda r: r[0])
    return [(max(a, low), min(b, high)) for a, b in ranges[first:last]]


def _joined(ranges: Iterable[Range]) -> list[Range]:
    out: list[Range] = []
    for start, stop in ranges:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out
