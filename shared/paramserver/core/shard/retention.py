"""Which snapshots of a partition are kept once a new one is stored."""

from collections.abc import Sequence
from typing import Final

KEPT: Final = 2
"""Snapshots that are kept at least, once there are as many."""


def kept_snapshots(cuts: Sequence[int | None], pinned: int | None) -> list[int]:
    """Return the indices of the snapshots that are kept: the new one, and the pinned cut or else the one before it.

    `cuts` has the clock of each that is a cut, else None; newest first, so the new one's is the first.  One of the new
    one's clock counts no more.
    If a cut is pinned and the new one is no cut, another cut is kept, too: the leader may go back to a newer one before
    anyone here hears of that, or another leader to an older one, where Redis has lost that the pinned one is whole.
    """
    older = range(1, len(cuts))
    old_cuts = [i for i in older if pinned is not None and cuts[i] not in (None, cuts[0])]
    old_cuts.sort(key=lambda i: cuts[i] != pinned)  # the pinned one first, then the newest
    beside = old_cuts[: KEPT if cuts[0] is None else KEPT - 1] or older[: KEPT - 1]
    return sorted({0, *beside})
