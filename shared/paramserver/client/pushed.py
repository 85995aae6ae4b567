"""What became of a push."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from paramserver.errors import problem
from paramserver.wire.frame import PushReply

State: TypeAlias = Literal["applied", "staged", "buffered", "dropped"]


@dataclass(frozen=True, slots=True)
class Pushed:
    """What became of a push."""

    state: State
    """`applied`; `staged` until its clock commits (sync); `buffered` until the next flush; `dropped` (workers only):
    the model went back to an earlier clock, or the worker had been given up, and nothing of it will be applied."""
    version: int
    """The lowest version of the partitions touched; of a staged or buffered push the one before it, or where it was
    `released` the one after it."""
    duplicate: bool
    """Whether every partition had it already from an earlier attempt."""
    durable_version: int
    """The lowest version among the partitions touched that would survive the loss of its shard."""
    incarnation: int
    """The highest incarnation (ownership number) of the partitions touched."""
    late: bool = False
    """sync with `late="drop"`: its clock had been committed already, so it was discarded."""
    released: bool = False
    """sync: it ended its worker's iteration, whose clock has been committed."""


DROPPED: Final = Pushed("dropped", 0, False, 0, 0)


def summed(replies: Sequence[PushReply | Pushed]) -> Pushed:
    """What became of a push whose parts were answered one by one."""
    if not replies:
        raise problem("internal", "the answer to a pushpull does not say what became of the push")
    states = {r.state for r in replies}
    state: Any = next((s for s in ("staged", "buffered") if s in states), "applied")
    return Pushed(
        state,
        min([r.version for r in replies]),
        all([r.duplicate for r in replies]),
        min([r.durable_version for r in replies]),
        max([r.incarnation for r in replies]),
        any([r.late for r in replies]),
        all([r.released for r in replies]),
    )
