"""Which snapshots of a partition are kept once a new one is stored."""

from collections.abc import Sequence
from typing import Final

KEPT: Final = 2
"""Snapshots that are kept at least, once there are as many."""


def kept_snapshots(cuts: Sequence[int | None], pinned: int | None) -> list[int]:
    """Return the indices of the snapshots that are kept: the new one, and the pinned cut or else the one before it.

    `cuts` has the clock of each that is a cut, else None; newest first, so the new one's is the first.
    If a cut is pinned and the new one is no cut, the newest cut is kept, too: the leader may go back to it before
    anyone here hears of that.
    """
    older = range(1, len(cuts))
    old_cuts = [i for i in older if pinned is not None and cuts[i] is not None]
    beside = ([i for i in old_cuts if cuts[i] == pinned] or [*older])[: KEPT - 1]
    newest_cut = old_cuts[:1] if cuts[0] is None else []
    return sorted({0, *beside, *newest_cut})
