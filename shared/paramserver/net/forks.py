"""Resets objects in forked children, which must not use what their parent was lent, or locks that its threads held."""

import itertools
import os
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, Final, cast


def call_in_forked_child(method: Callable[[], None]) -> None:
    """Call this bound method in each child forked from now on, before other code there, while its object is alive."""
    bound, number = cast(MethodType, method), next(_NUMBERS)
    pop = _METHODS.pop  # at exit, this module may be cleared before the object is
    _METHODS[number] = (weakref.ref(bound.__self__, lambda _: pop(number, None)), bound.__name__)


def _call_all() -> None:
    for reference, name in tuple(_METHODS.values()):
        if (owner := reference()) is not None:
            getattr(owner, name)()


_METHODS: Final[dict[int, tuple["weakref.ref[Any]", str]]] = {}
"""Number -> (object, name of its method), in this process."""
_NUMBERS: Final = itertools.count()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_call_all)
