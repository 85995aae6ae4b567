"""Resets objects in forked children, which must not use what their parent was lent, or locks that its threads held."""

import itertools
import os
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, Final, cast


def in_child(forget: Callable[[], None]) -> None:
    """Call this bound method in each child forked from now on, before other code there, while its object is alive."""
    method, number = cast(MethodType, forget), next(_NUMBERS)
    pop = _METHODS.pop  # at exit, this module may be cleared before the object is
    _METHODS[number] = (weakref.ref(method.__self__, lambda _: pop(number, None)), method.__name__)


def _forget_all() -> None:
    for found, name in tuple(_METHODS.values()):
        if (its := found()) is not None:
            getattr(its, name)()


_METHODS: Final[dict[int, tuple["weakref.ref[Any]", str]]] = {}
"""Number -> (object, name of its method), in this process."""
_NUMBERS: Final = itertools.count()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
