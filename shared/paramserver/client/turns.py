"""What only one call of a worker may do at a time, however the call ends."""

import weakref


class Held:
    """What the call that has the turn holds."""

    __slots__ = ("__weakref__",)


class Turn:
    """A turn that one call at a time has: from `take` until `give_back`, or until the call's `Held` is gone.

    A Ctrl-C between `take` and the `try` whose end gives it back ends the call and nothing else.  Its user takes the
    turn under a lock of its own.
    """

    def __init__(self) -> None:
        self._by: weakref.ref[Held] | None = None

    @property
    def taken(self) -> bool:
        """Whether a call has it."""
        by = self._by
        return by is not None and by() is not None

    def take(self) -> Held:
        """Take it, from whoever has it."""
        held = Held()
        self._by = weakref.ref(held)
        return held

    def give_back(self, held: Held) -> None:
        """End the turn, unless another call has taken it meanwhile."""
        by = self._by
        if by is not None and by() is held:
            self._by = None
