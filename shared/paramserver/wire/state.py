"""Frames between nodes that carry whole partitions: reading one for a checkpoint, assigning values to several.

`GET /internal/state/{model}/{index}` answers a `StateFrame` header and the body: values, then each slot, float32.
`POST /internal/set/{model}` takes a `SetFrame` header and the body: for each part its ranges' elements end to end in
the part's dtype, then each slot of the whole partition, float32.  Headers are framed as in `wire.frame`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from paramserver.core.layout import Range
from paramserver.core.shard_io import PartitionState
from paramserver.errors import problem
from paramserver.types import ITEMSIZE, AnyArray, record


@record
class StateFrame:
    """The header of one partition's whole state."""

    model: str
    generation: int
    partition: int
    version: int
    clock: int
    incarnation: int
    size: int
    """Elements of the values and of each slot."""
    slots: int
    steps: tuple[int, ...]
    """Updates of each segment."""

    def to_header(self) -> dict[str, Any]:
        """The msgpack map."""
        return {
            "kind": "state",
            "model": self.model,
            "generation": self.generation,
            "partition": self.partition,
            "version": self.version,
            "clock": self.clock,
            "incarnation": self.incarnation,
            "size": self.size,
            "slots": self.slots,
            "steps": list(self.steps),
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Self:
        """The frame of a decoded header; raises RequestError (`malformed`) when it is none."""
        try:
            return cls(
                str(header["model"]),
                int(header["generation"]),
                int(header["partition"]),
                int(header["version"]),
                int(header["clock"]),
                int(header["incarnation"]),
                int(header["size"]),
                int(header["slots"]),
                tuple(int(s) for s in header["steps"]),
            )
        except (KeyError, TypeError, ValueError) as e:
            raise problem("malformed", f"not a state frame: {e!r:.80}") from None

    def body_bytes(self) -> int:
        """Length of the body."""
        return 4 * self.size * (1 + self.slots)

    def read(self, body: bytes | bytearray | memoryview) -> PartitionState:
        """The state in a body, as views of it; raises RequestError (`malformed`) when the length is wrong."""
        if len(body) != self.body_bytes():
            raise problem("malformed", f"the body has {len(body)} bytes, not {self.body_bytes()}")
        arrays = np.frombuffer(body, np.float32).reshape(1 + self.slots, self.size)
        return PartitionState(arrays[0], tuple(arrays[1:]), self.steps)


@record
class SetPart:
    """One partition's part of a `SetFrame`."""

    partition: int
    count: int
    """Elements assigned: of all ranges, or of the whole partition."""
    ranges: tuple[Range, ...] | None = None
    """Relative to the partition; None: the whole partition."""
    dtype: str = "float32"
    size: int = 0
    """Elements of each slot, where there are slots."""
    slots: int = 0
    """Number of slots that follow; 0 keeps the ones that are there, unless `steps` is given."""
    steps: tuple[int, ...] | None = None
    """Step counts of each segment; None keeps optimizer state and counts as they are."""

    def body_bytes(self) -> int:
        """Length of this part of the body."""
        return self.count * ITEMSIZE[self.dtype] + 4 * self.size * self.slots


@record
class SetFrame:
    """The header of an assignment of values."""

    model: str
    generation: int
    parts: tuple[SetPart, ...]
    restore: bool = False
    """Drops staged and buffered gradients."""

    def to_header(self) -> dict[str, Any]:
        """The msgpack map."""
        return {
            "kind": "set",
            "model": self.model,
            "generation": self.generation,
            "restore": self.restore,
            "parts": [
                {
                    "partition": p.partition,
                    "count": p.count,
                    "ranges": None if p.ranges is None else [list(r) for r in p.ranges],
                    "dtype": p.dtype,
                    "size": p.size,
                    "slots": p.slots,
                    "steps": None if p.steps is None else list(p.steps),
                }
                for p in self.parts
            ],
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Self:
        """The frame of a decoded header; raises RequestError (`malformed`) when it is none."""
        try:
            parts = tuple(
                SetPart(
                    int(p["partition"]),
                    int(p["count"]),
                    None if p["ranges"] is None else tuple((int(a), int(b)) for a, b in p["ranges"]),
                    p["dtype"],
                    int(p["size"]),
                    int(p["slots"]),
                    None if p["steps"] is None else tuple(int(s) for s in p["steps"]),
                )
                for p in header["parts"]
            )
            if any(p.dtype not in ITEMSIZE or min(p.partition, p.count, p.size, p.slots) < 0 for p in parts):
                raise ValueError("a part is out of range")
            return cls(str(header["model"]), int(header["generation"]), parts, bool(header["restore"]))
        except (KeyError, TypeError, ValueError) as e:
            raise problem("malformed", f"not a set frame: {e!r:.80}") from None

    def body_bytes(self) -> int:
        """Length of the body."""
        return sum(p.body_bytes() for p in self.parts)


def restore_frame(
    model: str, generation: int, states: Mapping[int, PartitionState]
) -> tuple[SetFrame, Sequence[AnyArray]]:
    """The frame that puts these whole states in place of what the partitions hold, with its body as arrays."""
    parts: list[SetPart] = []
    body: list[AnyArray] = []
    for index, state in states.items():
        size = state.values.size
        parts.append(SetPart(index, size, None, "float32", size, len(state.slots), state.steps))
        body += [state.values, *state.slots]
    return SetFrame(model, generation, tuple(parts), restore=True), body
