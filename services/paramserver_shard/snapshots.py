"""A partition in its stored form: a capture as (head, arrays) and back, and the first values of one that has none."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from paramserver.core import initial
from paramserver.core.layout import Layout
from paramserver.core.optimizer import initial_slots
from paramserver.core.shard_io import Capture, HeldPart, LoadedState, PartitionState
from paramserver.core.spec import ModelSpec
from paramserver.types import F32, AnyArray

Take = Callable[[int], F32]
"""Makes an uninitialised float32 array of so many elements."""

SET_LATER: Final = ("upload", "file")
"""Kinds of initial values that reach the owner as an assignment."""
_HELD_FIELDS: Final = ("worker", "epoch", "clock", "seq", "base", "scale", "ranges", "dtype")


def to_stored(capture: Capture) -> tuple[dict[str, Any], tuple[AnyArray, ...]]:
    """The head and the arrays (values, slots, held and staged gradients, in this order) of a capture."""
    head = {
        "version": capture.version,
        "clock": capture.clock,
        "steps": list(capture.state.steps),
        "slots": len(capture.state.slots),
        "memory": dict(capture.memory),
        "held": [_fields(part) for part in capture.held],
        "lsn": capture.lsn,
        "staged": [_fields(part) for part in capture.staged],
        "settings": None if capture.settings is None else dict(capture.settings),
    }
    waiting = (part.data for part in (*capture.held, *capture.staged))
    return head, (capture.state.values, *capture.state.slots, *waiting)


def from_stored(head: Mapping[str, Any], arrays: Sequence[AnyArray]) -> LoadedState:
    """The partition that `to_stored` wrote, or that format 1.0 did, which had no journal and no staged parts."""
    slots, rest = int(head["slots"]), arrays[1 + int(head["slots"]) :]
    held = head["held"]
    return LoadedState(
        PartitionState(arrays[0], tuple(arrays[1 : 1 + slots]), tuple(int(s) for s in head["steps"])),
        int(head["version"]),
        int(head["clock"]),
        head["memory"],
        tuple(_held(h, data) for h, data in zip(held, rest[: len(held)], strict=True)),
        stored=True,
        lsn=int(head.get("lsn", 0)),
        staged=tuple(_held(h, data) for h, data in zip(head.get("staged", ()), rest[len(held) :], strict=True)),
        settings=head.get("settings"),
    )


def _fields(part: HeldPart) -> dict[str, Any]:
    return {f: getattr(part, f) for f in _HELD_FIELDS}


def _held(head: Mapping[str, Any], data: AnyArray) -> HeldPart:
    base, ranges = head["base"], head["ranges"]
    return HeldPart(
        head["worker"],
        head["epoch"],
        head["clock"],
        head["seq"],
        None if base is None else (base[0], base[1]),
        head["scale"],
        None if ranges is None else tuple((a, b) for a, b in ranges),
        data,
        head["dtype"],
    )


def first_state(spec: ModelSpec, layout: Layout, index: int, take: Take) -> LoadedState:
    """Version 0 of a partition: each parameter's initial values, fresh optimizer state, no step taken.

    Parameters of kind `upload` and `file` are zero until their values are set, as `core.initial` has it.
    """
    values = take(layout.partition_size(index))
    base = layout.bounds[index]
    for segment in layout.segments[index]:
        param = spec.params[segment.param]
        into = values[segment.start : segment.stop]
        if param.init.kind in SET_LATER or param.init.kind == "zeros":
            into.fill(0.0)
        else:
            offset = base - layout.offsets[param.name][0]
            into[:] = initial.draw(param, segment.start + offset, segment.stop + offset)
    slots = initial_slots(spec.optimizer, values)
    return LoadedState(PartitionState(values, slots, (0,) * len(layout.segments[index])))


def set_later(spec: ModelSpec, layout: Layout, index: int) -> bool:
    """Whether a partition holds values that were set after the model was made and cannot be drawn again."""
    return any(spec.params[s.param].init.kind in SET_LATER for s in layout.segments[index])
