"""Where each parameter lies in a model's flat vector, and how that vector is divided into partitions."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from msgspec import Struct

from paramserver.core.param_spec import ParamSpec
from paramserver.core.spec import ModelSpec

Range = tuple[int, int]
"""Half-open element range [start, stop)."""

_ALIGN = (1024, 16)
"""Alignments of partition bounds, in float32 elements: a memory page, a cache line.

The first that fits at least four times into the average partition is used; if neither does, bounds are not aligned.
"""


class Segment(Struct, frozen=True):
    """The part of one parameter that lies in one partition."""

    param: int
    """Index into `ModelSpec.params`."""
    start: int
    """First element, relative to the partition."""
    stop: int


@dataclass(frozen=True, eq=False)
class Layout:
    """The flat vector of one model: all parameters in spec order, in C order, end to end.

    Compared and hashed by identity, so that lookups in caches keyed by a layout are cheap.
    """

    spec: ModelSpec

    @cached_property
    def offsets(self) -> dict[str, Range]:
        """Range of each parameter in the flat vector."""
        out: dict[str, Range] = {}
        at = 0
        for p in self.spec.params:
            out[p.name] = (at, at + p.size)
            at += p.size
        return out

    @cached_property
    def by_name(self) -> dict[str, ParamSpec]:
        """Each parameter's spec under its name."""
        return {p.name: p for p in self.spec.params}

    @cached_property
    def size(self) -> int:
        """Elements of the flat vector."""
        return self.spec.size

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Partition i is [bounds[i], bounds[i+1]); every partition holds at least one element."""
        count, size = self.spec.partitions, self.size
        align = next((a for a in _ALIGN if size >= count * a * 4), 1)
        inner = (size * i // count // align * align for i in range(1, count))
        return (0, *inner, size)

    @cached_property
    def segments(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each partition, in order; the optimizer counts steps per segment."""
        out: list[tuple[Segment, ...]] = []
        flat = [(i, *self.offsets[p.name]) for i, p in enumerate(self.spec.params)]
        first = 0
        for lo, hi in self.partitions():
            while flat[first][2] <= lo:
                first += 1
            here: list[Segment] = []
            for i, start, stop in flat[first:]:
                if start >= hi:
                    break
                here.append(Segment(i, max(start, lo) - lo, min(stop, hi) - lo))
            out.append(tuple(here))
        return tuple(out)

    def partitions(self) -> Iterator[Range]:
        """The range of each partition in the flat vector."""
        return zip(self.bounds, self.bounds[1:], strict=False)

    def partition_size(self, index: int) -> int:
        """Elements of one partition."""
        return self.bounds[index + 1] - self.bounds[index]
