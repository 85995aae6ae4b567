"""Checks of JSON values that are stored for clients and returned unchanged: bounded, finite, encodable."""

import json
import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, Final

from paramserver import limits
from paramserver.core.fields import WORKER_NAME
from paramserver.errors import problem

VALUES_MAX: Final = 20_000
TEXT_MAX: Final = 1 << 20
VALUE_SIZE: Final = 16
_INT_MAX: Final = 1 << 63
_PLAIN: Final = (str, int, float, type(None))
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def check_document(value: Any, where: str) -> None:
    """Raise RequestError (`invalid_field`) unless both JSON and msgpack can encode the value and it is within bounds.

    Refused are numbers that are not finite or beyond 64 bits, text that is not Unicode, keys that are not strings and
    other types, and more than 20,000 values, 2**20 characters of text or 32 levels.
    """

    def fail(what: str, hint: str = "") -> Exception:
        return problem("invalid_field", f"{where}: {what}", hint=hint, where=where)

    too_large = f"is too large: at most {VALUES_MAX} values and {TEXT_MAX} characters"
    values, text = 0, 0
    todo: list[tuple[Any, int]] = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        values += 1
        text += len(item) if isinstance(item, str) else 0
        if values > VALUES_MAX or text > TEXT_MAX:
            raise fail(too_large)
        if depth > limits.JSON_DEPTH_MAX:
            raise fail(f"is nested deeper than {limits.JSON_DEPTH_MAX} levels")
        if isinstance(item, _PLAIN):  # first, because the other tests are slow, and there may be millions of these
            if fault := _fault(item):
                raise fail(*fault)
        elif not isinstance(item, Mapping | list | tuple):
            raise fail(f"holds a value of type {type(item).__name__}")
        elif len(item) > VALUES_MAX:
            raise fail(too_large)
        elif isinstance(item, Mapping):
            if not all(isinstance(k, str) for k in item):
                raise fail("has a key that is not a string")
            todo += [(v, depth + 1) for kv in item.items() for v in kv]
        else:
            todo += [(v, depth + 1) for v in item]


def _fault(item: str | float | None) -> tuple[str, str] | None:
    """What is wrong with a value that is neither an object nor a list, and a hint; None if nothing is."""
    if isinstance(item, str):
        return ("contains text that is not valid Unicode", "") if _SURROGATE.search(item) else None
    if isinstance(item, float):
        return None if isfinite(item) else ("holds a number that is not finite", "")
    if item is None or -_INT_MAX <= item < _INT_MAX:
        return None
    return "holds an integer beyond 64 bits", "write it as text"


def size_of(document: Any) -> int:
    """Return the size of a JSON value: its characters of text, and `VALUE_SIZE` for each value in it."""
    size, todo = 0, [document]
    while todo:
        item = todo.pop()
        size += VALUE_SIZE
        if isinstance(item, _PLAIN):
            size += len(item) if isinstance(item, str) else 0
        elif isinstance(item, Mapping):
            todo += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            todo += item
    return size


def in_pieces(states: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield worker states in pieces of at most 256 KiB of JSON; a single larger state is a piece of its own."""
    piece: dict[str, Any] = {}
    size = 0
    for worker, state in states.items():
        more = len(json.dumps(state))
        if piece and size + more > limits.MIB // 4:
            yield piece
            piece, size = {}, 0
        piece[worker] = state
        size += more
    if piece:
        yield piece


def check_states(states: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the states by worker id if every id is a valid worker id and every state passes `check_document`.

    Raises RequestError (`invalid_field`) otherwise.
    """
    for worker, state in states.items():
        if not WORKER_NAME.fullmatch(worker) or len(worker) > limits.WORKER_NAME_BYTES_MAX:
            raise problem("invalid_field", f"workers: {worker!r:.140} is not a valid worker id", where="workers")
        check_document(state, f"workers.{worker}")
    return states
