"""What a forked child must not go on with: what its parent was lent, and locks that a thread of its parent holds."""

import os
import weakref
from collections.abc import Callable
from typing import Any, Final


def in_child(forget: Callable[[], None]) -> None:
    """That method is called in every child forked from now on, before anything else there, if its object is there."""
    _METHODS.add(weakref.WeakMethod(forget, _METHODS.discard))


def _forget_all() -> None:
    for found in tuple(_METHODS):
        if (forget := found()) is not None:
            forget()


_METHODS: Final[set["weakref.WeakMethod[Any]"]] = set()
"""Of this process; unlike a WeakSet it can be listed while another thread adds to it."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
