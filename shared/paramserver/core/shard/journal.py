"""The journal of a partition: the commands it executed, in order, with the numbers they used.

Replaying an entry needs nothing but the partition's state before it: no time, no roster, no scheduler (semantics 7).
Entries exist for models whose acknowledgement level is `journaled` or `fsynced`.

Heads hold plain msgpack values; but `ranges` is an array.  Every head has `version`, the partition's version after the
command; by kind:

- `push` (applied at once): `id` [worker, epoch, seq] or None, `key` (Idempotency-Key) or None, `crc`, `dtype`,
  `ranges` [[start, stop], ...] or None for the whole partition, `rate` (the learning rate after schedule, linear
  scaling and lag), `scale` (weight times norm clip; for `sum` also the lag factor).  Arrays: the gradient as received.
- `hold` (staged or buffered): `id`, `key`, `crc`, `dtype`, `ranges`, `scale`, and `clock`, `seq`, `base`
  [version, incarnation] or None, `late` (true: the push id is remembered, the gradient discarded).  Arrays: the
  gradient; no arrays and no `ranges` if late.
- `commit`: `t`, `contributions` [[worker, epoch, rank, clock], ...], `applied`, and if that is true `rate` and
  `weights`, one for each staged part in summation order.
- `flush`: `applied`, and if that is true `rate` and `weights`, one for each buffered (leaving sync: staged) part.
- `config`: `settings` (see `core.settings`), `clock` from here on, `fresh` (the optimizer's state is reset), `unstage`
  (staged parts are dropped, as a new timeline began).
- `set`: `dtype`, `ranges`, `steps` or None, `restore` (staged and buffered parts are dropped), `least` (lower bound of
  the version afterwards).  Arrays: the values, then the optimizer's state if given.
- `drop`: `slots` [[worker, epoch, clock], ...] of staged contributions whose worker's epoch has ended.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from paramserver.types import AnyArray, PartitionKey, Token

if TYPE_CHECKING:
    from paramserver.core.commit import Commit
    from paramserver.core.partition_state import HeldPart
    from paramserver.core.shard.events import AssignPart, PushPart, PushReceived

_HEAD_BYTES: Final = 256  # approximate size of a head without its ranges


class JournalEntry(Struct, frozen=True):
    """One executed command of one partition."""

    key: PartitionKey
    token: Token
    """Token of the owner that executed it; after a renewal it may be written under a newer one."""
    lsn: int
    """1, 2, 3 ... per partition without gaps, continued across owners."""
    kind: str
    """Its kind: see above."""
    head: Mapping[str, Any]
    arrays: tuple[AnyArray, ...] = ()
    """1-D, little-endian; never modified."""

    @property
    def nbytes(self) -> int:
        """Approximate size in bytes, as counted against bounds."""
        ranges = self.head.get("ranges")
        return _HEAD_BYTES + (0 if ranges is None else 16 * len(ranges)) + sum(a.nbytes for a in self.arrays)


Step = tuple[float, list[float]]
"""(learning rate, weight of each part) of an applied mean."""


def push_head(event: "PushReceived", part: "PushPart", version: int, rate: float, scale: float) -> dict[str, Any]:
    """The head of a push that was applied at once."""
    return _accepted(event, part, version) | {"rate": rate, "scale": scale}


def hold_head(event: "PushReceived", part: "PushPart", version: int, held: "HeldPart", late: bool) -> dict[str, Any]:
    """The head of a push that was staged or buffered, or came too late for its clock."""
    base = None if held.base is None else list(held.base)
    numbers = {"scale": held.scale, "clock": held.clock, "seq": held.seq, "base": base, "late": late}
    return _accepted(event, part, version) | numbers | ({"ranges": None} if late else {})


def _accepted(event: "PushReceived", part: "PushPart", version: int) -> dict[str, Any]:
    push_id = event.push_id
    return {
        "version": version,
        "id": None if push_id is None else [push_id.worker, push_id.epoch, push_id.seq],
        "key": event.key,
        "crc": part.crc,
        "dtype": part.dtype,
        "ranges": part.ranges,
    }


def commit_head(commit: "Commit", version: int, step: Step | None) -> dict[str, Any]:
    """The head of a commit; `step` is None if it changed no value."""
    return {"version": version, "t": commit.t, "contributions": commit.rows} | _step(step)


def flush_head(version: int, step: Step | None) -> dict[str, Any]:
    """The head of a flush; `step` is None if the result was not finite and the values were kept."""
    return {"version": version} | _step(step)


def _step(step: Step | None) -> dict[str, Any]:
    return {"applied": False} if step is None else {"applied": True, "rate": step[0], "weights": step[1]}


def config_head(settings: Mapping[str, Any], version: int, clock: int, *, fresh: bool, unstage: bool) -> dict[str, Any]:
    """The head of a change of settings."""
    return {"version": version, "settings": dict(settings), "clock": clock, "fresh": fresh, "unstage": unstage}


def set_head(part: "AssignPart", version: int, restore: bool) -> dict[str, Any]:
    """The head of an assignment."""
    steps = None if part.steps is None else list(part.steps)
    numbers = {"steps": steps, "restore": restore, "least": part.version}
    return {"version": version, "dtype": part.dtype, "ranges": part.ranges} | numbers


def drop_head(slots: Iterable[tuple[str, int, int]], version: int) -> dict[str, Any]:
    """The head of a removal of staged contributions."""
    return {"version": version, "slots": [list(s) for s in slots]}
