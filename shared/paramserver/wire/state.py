"""Frames between nodes that carry whole partitions: to read one for a checkpoint, to assign values to several.

`GET /internal/state/{model}/{index}` answers a `StateFrame` header and the body: values, then each slot, float32.
`POST /internal/set/{model}` takes a `SetFrame` header and the body: for each part its ranges' elements end to end in
the part's dtype, then each slot of the whole partition, float32.  Headers are framed as in `wire.frame`.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from paramserver import limits
from paramserver.core.optimizer import slot_names
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.core.partition_state import PartitionState
from paramserver.core.ranges import RangeArray
from paramserver.errors import problem
from paramserver.types import ITEMSIZE, AnyArray, DType
from paramserver.wire.frame import Count, Header, ModelName

Version: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=limits.VERSION_MAX)]


class StateFrame(Header, frozen=True, tag_field="kind", tag="state", omit_defaults=False):
    """The header of one partition's whole state."""

    model: ModelName
    generation: Count
    partition: Count
    version: Count
    clock: Count
    size: Count
    """Elements of the values and of each slot."""
    slots: Count
    steps: tuple[Count, ...]
    """Step count of each segment."""
    names: tuple[str, ...]
    """Names of the slots."""

    def body_bytes(self) -> int:
        """Length of the body."""
        return 4 * self.size * (1 + self.slots)

    def fitting(self, state: PartitionState, optimizer: OptimizerSpec) -> PartitionState:
        """Return the state that came with this header, without slots and step counts if another optimizer has them.

        A partition adopts another optimizer only after the model's document names it, and a cut is older still.
        """
        if self.names == slot_names(optimizer):
            return state
        return PartitionState(state.values, (), (0,) * len(state.steps))

    def read(self, body: bytes | bytearray | memoryview) -> PartitionState:
        """Return the state in a body, as views of it; raises RequestError (`malformed`) if the length is wrong."""
        if len(body) != self.body_bytes():
            raise problem("malformed", f"the body has {len(body)} bytes, not {self.body_bytes()}")
        arrays = np.frombuffer(body, np.float32).reshape(1 + self.slots, self.size)
        return PartitionState(arrays[0], tuple(arrays[1:]), self.steps)


def taken_out(held: list[tuple[StateFrame, PartitionState]], optimizer: OptimizerSpec) -> Iterator[PartitionState]:
    """Yield each state as `StateFrame.fitting` gives it, in order, and leave the list empty.

    So a whole model is in memory only once while the partitions are put together.
    """
    held.reverse()
    while held:
        frame, state = held.pop()
        yield frame.fitting(state, optimizer)


class SetPart(msgspec.Struct, frozen=True):
    """One partition's part of a `SetFrame`."""

    partition: Count
    count: Count
    """Elements assigned: of all ranges together, or of the whole partition."""
    ranges: RangeArray | None = None
    """Relative to the partition; None: the whole partition."""
    dtype: DType = "float32"
    size: Count = 0
    """Elements of each slot, if there are slots."""
    slots: Annotated[int, msgspec.Meta(ge=0, le=8)] = 0
    """Number of slots that follow; 0 keeps the existing ones, unless `steps` is given."""
    steps: tuple[Count, ...] | None = None
    """Step count of each segment; None keeps optimizer state and counts as they are."""
    expected: tuple[Count, Count] | None = None
    """(version, owner token) that the partition must have, else nothing is assigned; None: any."""
    version: Version = 0
    """Lowest version that the partition may have afterwards."""

    def body_bytes(self) -> int:
        """Length of this part of the body."""
        return self.count * ITEMSIZE[self.dtype] + 4 * self.size * self.slots


class SetFrame(Header, frozen=True, tag_field="kind", tag="set", omit_defaults=False):
    """The header of an assignment of values."""

    model: ModelName
    generation: Count
    parts: tuple[SetPart, ...]
    restore: bool = False
    """Whether staged and buffered gradients are dropped."""
    timeline: Count | None = None
    """The assignment is refused if the model is on another timeline by then; None: any."""
    slot_names: tuple[str, ...] | None = None
    """Names of the slots that the parts bring.  The assignment is refused (`loading`) while the model's optimizer, as
    far as the shard knows it, has others; None: only their number must be right.  Assignments that bring no slots, all
    but those of a restore, name none."""
    first: bool = False
    """Whether these are first values, which change nothing once the model is complete."""
    term: Count | None = None
    """The sender's leader term: the assignment is refused if a newer leader is known; None: not from a leader."""

    def body_bytes(self) -> int:
        """Length of the body."""
        return sum(p.body_bytes() for p in self.parts)


def restore_frame(
    model: str,
    generation: int,
    index: int,
    state: PartitionState,
    names: tuple[str, ...],
    version: int,
    timeline: int | None = None,
) -> tuple[SetFrame, Sequence[AnyArray]]:
    """Return the frame that replaces all that a partition holds by this state, and its body as arrays.

    `names`: of the state's slots.

    Afterwards the partition has this version, or its own next one if that is greater.
    """
    size = state.values.size
    part = SetPart(index, size, None, "float32", size, len(state.slots), state.steps, version=version)
    return SetFrame(model, generation, (part,), restore=True, timeline=timeline, slot_names=names), [
        state.values,
        *state.slots,
    ]
