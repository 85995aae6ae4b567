"""The result of a push."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from paramserver.errors import problem
from paramserver.wire.frame import PushReply

State: TypeAlias = Literal["applied", "staged", "buffered", "dropped"]


@dataclass(frozen=True, slots=True)
class Pushed:
    """The result of a push."""

    state: State
    """`applied`; `staged` until its clock commits (sync); `buffered` until the next flush; `dropped` (workers only):
    the model went back to an earlier clock, or the worker lost its lease, and nothing of the push will be applied."""
    version: int
    """The lowest version of the partitions touched.  For a staged or buffered push it is the version before it, or the
    one after its commit if the push was `released`."""
    duplicate: bool
    """Whether every partition had received it in an earlier attempt."""
    durable_version: int
    """The lowest version, over the partitions touched, that would survive the loss of the shard."""
    incarnation: int
    """The highest incarnation (owner token) of the partitions touched."""
    late: bool = False
    """sync: it was discarded, as its clock was committed without it: before it came, before it was sent again or, as
    the result of a step, before the step could report its end."""
    released: bool = False
    """sync: it ended its worker's iteration, and the clock has been committed."""


DROPPED: Final = Pushed("dropped", 0, False, 0, 0)


def summed(replies: Sequence[PushReply | Pushed]) -> Pushed:
    """Combine the replies to the parts of one push."""
    if not replies:
        raise problem("internal", "the answer to a pushpull lacks the result of the push")
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
