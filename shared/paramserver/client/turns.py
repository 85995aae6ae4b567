"""What only one call of a worker may do at a time, however the call ends."""

import weakref


class Held:
    """What a call holds while it has a turn.

    It is made before a `try`, takes the turn within, and is `over` at the end, which no Ctrl-C can come before: Python
    looks for one at calls, and setting `over` is none.
    """

    __slots__ = ("__weakref__", "over")

    def __init__(self) -> None:
        self.over = False


class Turn:
    """A turn that one call at a time has: from `take` until its `Held` is over, or gone if the `try` was not ended.

    Its user takes the turn under a lock of its own.
    """

    def __init__(self) -> None:
        self._by: weakref.ref[Held] | None = None

    @property
    def taken(self) -> bool:
        """Whether a call has it."""
        held = None if self._by is None else self._by()
        return held is not None and not held.over

    def take(self, held: Held) -> None:
        """Take it, from whoever has it."""
        self._by = weakref.ref(held)
