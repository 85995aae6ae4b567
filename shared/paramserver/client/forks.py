"""What a forked child must not go on with: what its parent was lent, and locks that a thread of its parent holds."""

import itertools
import os
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, Final, cast


def in_child(forget: Callable[[], None]) -> None:
    """That method is called in every child forked from now on, before anything else there, if its object is there."""
    method, number = cast(MethodType, forget), next(_NUMBERS)
    pop = _METHODS.pop  # this module may be gone before the object is
    _METHODS[number] = (weakref.ref(method.__self__, lambda _: pop(number, None)), method.__name__)


def _forget_all() -> None:
    for found, name in tuple(_METHODS.values()):
        if (its := found()) is not None:
            getattr(its, name)()


_METHODS: Final[dict[int, tuple["weakref.ref[Any]", str]]] = {}
"""Of this process: objects and the names of their methods."""
_NUMBERS: Final = itertools.count()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
