"""One partition's numbers as they travel: live, captured for a snapshot, and loaded from one."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from paramserver.core.layout import Range
from paramserver.types import F32, AnyArray, Coding, PartitionKey, Token


class PartitionState(Struct, frozen=True):
    """The numbers of one partition at one version: replaced, never written."""

    values: F32
    """The parameters, of the partition's length."""
    slots: tuple[F32, ...]
    """The optimizer's state: `kernels.slot_count(optimizer)` arrays of the partition's length."""
    steps: tuple[int, ...]
    """Updates that touched it, for each `Segment` of the partition in the model's `Layout`."""

    @property
    def nbytes(self) -> int:
        """Bytes of values and slots."""
        return self.values.nbytes + sum(s.nbytes for s in self.slots)


class HeldPart(Struct, frozen=True):
    """A gradient that was accepted and is not applied yet (sync: staged; buffered: held)."""

    worker: str
    """Empty for a push without an id."""
    epoch: int
    clock: int
    """sync: the iteration it belongs to; buffered: -1."""
    seq: int
    """Order within (worker, clock); buffered: order of arrival."""
    base: tuple[int, int] | None
    """(version, incarnation) the gradient was computed from."""
    scale: float
    """Weight times the factor of norm clipping."""
    ranges: tuple[Range, ...] | None
    """Ranges relative to the partition that `data` holds end to end; None: the whole partition."""
    data: AnyArray
    """1-D, of `dtype`; bfloat16 as uint16, a codec's bytes as uint8."""
    dtype: Coding


class Capture(Struct, frozen=True):
    """One partition at one moment, ready to be written away: it shares the live buffers, which never change."""

    key: PartitionKey
    token: Token
    version: int
    clock: int
    """sync: commits applied, so the next commit's `t`; the number a cut is known by."""
    state: PartitionState
    memory: Mapping[str, Any]
    """Windows and idempotency keys: plain lists, strings and integers, to be stored as one msgpack map."""
    held: tuple[HeldPart, ...] = ()
    """Accepted gradients that are not in the values yet (buffered mode); lost parts would be counted as applied."""
    lsn: int = 0
    """Commands this partition has executed, this state included: its journal goes on after it."""
    staged: tuple[HeldPart, ...] = ()
    """Contributions to commits that are still to come (sync); empty in a cut of a model at level `applied`."""
    settings: Mapping[str, Any] | None = None
    """The settings in force (see `core.settings`), plain msgpack values; None only in snapshots of format 1.0."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, which is what a snapshot's budget counts."""
        return self.state.nbytes + sum(h.data.nbytes for h in (*self.held, *self.staged))


class LoadedState(Struct, frozen=True):
    """What a partition starts from: the fields of a stored `Capture`, or drawn initial values at version 0."""

    state: PartitionState
    version: int = 0
    clock: int = 0
    memory: Mapping[str, Any] = field(default_factory=dict)
    held: tuple[HeldPart, ...] = ()
    stored: bool = False
    """Whether it came from a stored snapshot or a journal, so that this version is durable already."""
    lsn: int = 0
    staged: tuple[HeldPart, ...] = ()
    settings: Mapping[str, Any] | None = None
    """None: initial values, or a snapshot of format 1.0; the model's present settings apply."""
    replayed_bytes: int = 0
    """Journal that was replayed on top of the snapshot."""
