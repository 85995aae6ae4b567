"""The state of one partition: live, captured for a snapshot, and loaded from one."""

from collections.abc import Mapping
from typing import Any, Self

from msgspec import Struct, field

from paramserver.core.ranges import RangeArray
from paramserver.types import F32, AnyArray, Coding, PartitionKey, Token


class PartitionState(Struct, frozen=True):
    """The arrays of one partition at one version; replaced, never written to."""

    values: F32
    """The parameters, of the partition's length."""
    slots: tuple[F32, ...]
    """The optimizer's state: `slot_count(optimizer)` arrays of the partition's length."""
    steps: tuple[int, ...]
    """Number of updates that touched each `Segment` of the partition in the model's `Layout`."""

    @property
    def nbytes(self) -> int:
        """Bytes of values and slots."""
        return self.values.nbytes + sum(s.nbytes for s in self.slots)


class HeldPart(Struct, frozen=True):
    """A gradient accepted but not yet applied: staged (sync) or buffered."""

    worker: str
    """Empty for a push without a push id."""
    epoch: int
    clock: int
    """sync: the iteration it belongs to; buffered: -1."""
    seq: int
    """The push's, which orders the parts of one contribution; 0 without a push id."""
    base: tuple[int, int] | None
    """(version, incarnation) the gradient was computed from."""
    scale: float
    """Weight times the norm clipping factor."""
    ranges: RangeArray | None
    """Ranges, relative to the partition, whose elements `data` holds end to end; None: the whole partition."""
    data: AnyArray
    """1-D, of `dtype`; bfloat16 as uint16, a codec's bytes as uint8."""
    dtype: Coding

    @property
    def nbytes(self) -> int:
        """Bytes of its data and ranges, as bounds count them."""
        return held_bytes(self.ranges, self.data)


def held_bytes(ranges: RangeArray | None, data: AnyArray) -> int:
    """Bytes that a gradient of these ranges takes while it waits to be applied."""
    return data.nbytes + (0 if ranges is None else ranges.nbytes)


class PartitionContents(Struct, frozen=True):
    """What is stored of one partition, but for its settings; shares the live buffers, which never change."""

    state: PartitionState
    version: int = 0
    clock: int = 0
    """sync: number of commits applied, which is the next commit's `t`; identifies a cut."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """Windows and idempotency keys, as `PushMemory.export` returns them, to be stored as one msgpack map."""
    buffered: tuple[HeldPart, ...] = ()
    """Not yet in the values; `memory` has their pushes as accepted, so losing them loses pushes."""
    lsn: int = 0
    """Number of the last command in this state; the journal continues after it."""
    staged: tuple[HeldPart, ...] = ()
    """Contributions to future commits (sync); empty in a cut of a model at level `applied`."""


class Capture(PartitionContents, frozen=True, kw_only=True):
    """One partition at one moment, ready to be stored."""

    key: PartitionKey
    token: Token
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings in force (see `core.settings`), plain msgpack values."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, as the snapshot budget counts them."""
        return self.state.nbytes + sum(h.nbytes for h in (*self.buffered, *self.staged))


class LoadedState(PartitionContents, frozen=True, kw_only=True):
    """The state a partition starts from: that of a stored `Capture`, or drawn initial values at version 0."""

    stored: bool = False
    """Whether it came from a stored snapshot or a journal, so that this version is durable already."""
    settings: Mapping[str, Any] | None = None
    """None: initial values; the model's current settings apply."""
    replayed_bytes: int = 0
    """Bytes of journal replayed on top of the snapshot."""

    @classmethod
    def of(cls, capture: Capture) -> Self:
        """Return the state that a capture restores once it is stored."""
        contents = [getattr(capture, name) for name in PartitionContents.__struct_fields__]
        return cls(*contents, stored=True, settings=capture.settings)
