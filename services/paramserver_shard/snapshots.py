"""Convert captures to their stored form (head, arrays) and back; make the initial state of a partition."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from paramserver.core import initial
from paramserver.core.layout import Layout
from paramserver.core.optimizer import initial_slots
from paramserver.core.shard_io import Capture, HeldPart, LoadedState, PartitionState
from paramserver.core.spec import ModelSpec
from paramserver.types import F32, AnyArray

Take = Callable[[int], F32]
"""Returns an uninitialized float32 array of that many elements."""

ASSIGNED_KINDS: Final = ("upload", "file")
"""Kinds of initial values that reach the owner later, as an assignment."""
_HELD_FIELDS: Final = ("worker", "epoch", "clock", "seq", "base", "scale", "ranges", "dtype")


def to_stored(capture: Capture) -> tuple[dict[str, Any], tuple[AnyArray, ...]]:
    """Return a capture's head and its arrays: values, slots, buffered and staged gradients, in this order."""
    head = {
        "version": capture.version,
        "clock": capture.clock,
        "steps": list(capture.state.steps),
        "slots": len(capture.state.slots),
        "memory": dict(capture.memory),
        "held": [_fields(part) for part in capture.buffered],
        "lsn": capture.lsn,
        "staged": [_fields(part) for part in capture.staged],
        "settings": None if capture.settings is None else dict(capture.settings),
    }
    waiting = (part.data for part in (*capture.buffered, *capture.staged))
    return head, (capture.state.values, *capture.state.slots, *waiting)


def from_stored(head: Mapping[str, Any], arrays: Sequence[AnyArray]) -> LoadedState:
    """Rebuild the state that `to_stored` wrote, or format 1.0, which had no journal and no staged parts."""
    slots, rest = int(head["slots"]), arrays[1 + int(head["slots"]) :]
    buffered = head["held"]
    return LoadedState(
        PartitionState(arrays[0], tuple(arrays[1 : 1 + slots]), tuple(int(s) for s in head["steps"])),
        int(head["version"]),
        int(head["clock"]),
        head["memory"],
        tuple(_held(h, data) for h, data in zip(buffered, rest[: len(buffered)], strict=True)),
        stored=True,
        lsn=int(head.get("lsn", 0)),
        staged=tuple(_held(h, data) for h, data in zip(head.get("staged", ()), rest[len(buffered) :], strict=True)),
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
    """Make version 0 of a partition: initial values, fresh optimizer state, step counts of 0.

    Parameters of kind `upload` and `file` are zero until their values are assigned.
    """
    values = take(layout.partition_size(index))
    base = layout.bounds[index]
    for segment in layout.segments[index]:
        param = spec.params[segment.param]
        into = values[segment.start : segment.stop]
        if param.init.kind in ASSIGNED_KINDS or param.init.kind == "zeros":
            into.fill(0.0)
        else:
            offset = base - layout.offsets[param.name][0]
            into[:] = initial.draw(param, segment.start + offset, segment.stop + offset)
    slots = initial_slots(spec.optimizer, values)
    return LoadedState(PartitionState(values, slots, (0,) * len(layout.segments[index])))


def has_assigned_values(spec: ModelSpec, layout: Layout, index: int) -> bool:
    """Return whether a partition has parameters with assigned initial values, which cannot be drawn again."""
    return any(spec.params[s.param].init.kind in ASSIGNED_KINDS for s in layout.segments[index])
