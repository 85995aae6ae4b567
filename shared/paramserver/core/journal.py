"""The journal of a partition: the commands it executed, in order, with the numbers they used.

Replaying an entry needs nothing but the partition's state before it: no time, no roster, no scheduler (semantics 7).
Entries exist for models whose acknowledgement level is `journaled` or `fsynced`.

Heads hold plain msgpack values.  Every head has `version`, the partition's version after the command; by kind:

- `push` (applied at once): `id` [worker, epoch, seq] or None, `key` (Idempotency-Key) or None, `crc`, `dtype`,
  `ranges` [[start, stop], ...] or None for the whole partition, `rate` (the learning rate with everything in it),
  `scale` (weight, norm clip).  Arrays: the gradient as received.
- `hold` (staged or buffered): `id`, `key`, `crc`, `dtype`, `ranges`, `scale`, and `clock`, `seq`, `base`
  [version, incarnation] or None, `late` (true: remembered and discarded).  Arrays: the gradient; none if late.
- `commit`: `t`, `contributions` [[worker, epoch, rank, clock, weight], ...], `applied`, and where that is true `rate`
  and `weights`, one for each staged part that is summed, in their order.
- `flush`: `applied`, `rate`, `weights`, one for each buffered part.
- `config`: `settings` (see `core.settings`), `clock` from here on, `fresh` (the optimizer's state begins anew),
  `unstage` (what was staged is dropped).
- `set`: `dtype`, `ranges`, `steps` or None, `restore` (what is staged or buffered is dropped).  Arrays: the values,
  then the optimizer's state if it was given.
- `drop`: `slots` [[worker, epoch, clock], ...] of staged contributions whose worker's epoch has ended.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from paramserver.types import AnyArray, PartitionKey, Token

KINDS: Final = ("push", "hold", "commit", "flush", "config", "set", "drop")
_HEAD_BYTES: Final = 256  # about what a head takes; ranges come on top


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One executed command of one partition."""

    key: PartitionKey
    token: Token
    """Of the owner that executed it; a renewed owner may write it under a newer one."""
    lsn: int
    """1, 2, 3 ... per partition without holes; goes on over owners."""
    kind: str
    """One of `KINDS`."""
    head: Mapping[str, Any]
    arrays: tuple[AnyArray, ...] = ()
    """1-D, little-endian; they are never written again."""

    @property
    def nbytes(self) -> int:
        """About the bytes it takes, which is what bounds count."""
        return _HEAD_BYTES + 18 * len(self.head.get("ranges") or ()) + sum(a.nbytes for a in self.arrays)
