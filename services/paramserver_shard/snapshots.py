"""A partition in its stored form: a capture as (head, arrays) and back, and the first values of one that has none."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError, safe_open

from paramserver import kernels
from paramserver.core import initial
from paramserver.core.layout import Layout
from paramserver.core.shard_io import Capture, HeldPart, LoadedState, PartitionState
from paramserver.core.spec import ModelSpec, ParamSpec
from paramserver.errors import problem
from paramserver.types import F32, AnyArray

Take = Callable[[int], F32]
"""Makes an uninitialised float32 array of so many elements."""

_HELD_FIELDS: Final = ("worker", "epoch", "clock", "seq", "base", "scale", "ranges", "dtype")


def to_stored(capture: Capture) -> tuple[dict[str, Any], tuple[AnyArray, ...]]:
    """The head and the arrays (values, slots, held gradients, in this order) of a capture."""
    head = {
        "version": capture.version,
        "clock": capture.clock,
        "steps": list(capture.state.steps),
        "slots": len(capture.state.slots),
        "memory": dict(capture.memory),
        "held": [{f: getattr(part, f) for f in _HELD_FIELDS} for part in capture.held],
    }
    return head, (capture.state.values, *capture.state.slots, *(part.data for part in capture.held))


def from_stored(head: Mapping[str, Any], arrays: Sequence[AnyArray]) -> LoadedState:
    """The partition that `to_stored` wrote."""
    slots = int(head["slots"])
    held = tuple(_held(h, data) for h, data in zip(head["held"], arrays[1 + slots :], strict=True))
    return LoadedState(
        PartitionState(arrays[0], tuple(arrays[1 : 1 + slots]), tuple(int(s) for s in head["steps"])),
        int(head["version"]),
        int(head["clock"]),
        head["memory"],
        held,
        stored=True,
    )


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


def first_state(spec: ModelSpec, layout: Layout, index: int, take: Take, files_dir: Path | None) -> LoadedState:
    """Version 0 of a partition: each parameter's initial values, optimizer state zero, no step taken.

    Parameters of kind `upload` are zero until they are uploaded.  Raises PsError when a file of initial values is
    missing or does not fit.
    """
    size = layout.partition_size(index)
    base = layout.bounds[index]
    values = take(size)
    for segment in layout.segments[index]:
        param = spec.params[segment.param]
        offset = base - layout.offsets[param.name][0]
        into = values[segment.start : segment.stop]
        if param.init.kind == "file":
            into[:] = _from_file(param, segment.start + offset, segment.stop + offset, files_dir)
        elif param.init.kind in ("zeros", "upload"):
            into.fill(0.0)
        else:
            into[:] = initial.draw(param, segment.start + offset, segment.stop + offset)
    slots = []
    for _ in range(kernels.slot_count(spec.optimizer)):
        slot = take(size)
        slot.fill(spec.optimizer.initial_accumulator_value if spec.optimizer.name == "adagrad" else 0.0)
        slots.append(slot)
    return LoadedState(PartitionState(values, tuple(slots), (0,) * len(layout.segments[index])))


def _from_file(param: ParamSpec, start: int, stop: int, files_dir: Path | None) -> AnyArray:
    """Elements [start, stop) of a parameter from a safetensors file; only the rows that hold them are read."""
    if files_dir is None:
        raise problem("invalid_field", f"params.{param.name}.init: this shard has no folder of initial values")
    path = files_dir / param.init.path
    try:
        with safe_open(path, framework="numpy") as file:
            part = file.get_slice(param.name)
            if tuple(part.get_shape()) != param.shape:
                raise problem("invalid_shape", f"{path.name}: '{param.name}' has shape {part.get_shape()}")
            if not param.shape:
                return np.asarray(file.get_tensor(param.name), np.float32).reshape(-1)[start:stop]
            row = param.size // param.shape[0]
            first, last = start // row, -(-stop // row)
            rows = np.asarray(part[first:last], np.float32).reshape(-1)
            return rows[start - first * row : stop - first * row]
    except FileNotFoundError:
        raise problem("invalid_field", f"params.{param.name}.init: there is no file '{path.name}'") from None
    except (SafetensorError, OSError, ValueError, TypeError) as e:
        raise problem("invalid_field", f"params.{param.name}.init: '{path.name}' cannot be read: {e}") from None
