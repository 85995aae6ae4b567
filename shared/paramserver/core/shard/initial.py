"""Initial values of parameters: any slice can be drawn alone, with the same bits under every partitioning.

Random values come in blocks of 65,536 elements; block i of a parameter is the start of the stream
`Philox(key=(seed, crc32(name)), counter=(0, 0, 0, i))` (Salmon et al. 2011), so each shard draws only what it owns, and
all agree.  Xavier and Kaiming follow torch.nn.init: the fans of a shape (out, in, ...) are in * rest and out * rest.
"""

from collections.abc import Callable
from math import prod, sqrt
from typing import Final
from zlib import crc32

import numpy as np

from paramserver.core.optimizer import initial_slots, slot_names
from paramserver.core.param_spec import InitSpec, ParamSpec
from paramserver.core.partition_state import LoadedState, PartitionState
from paramserver.core.shard.effects import LoadPartition
from paramserver.types import F32

BLOCK: Final = 65_536
"""Elements drawn from one Philox counter; part of the format: another value would give other initial values."""
ASSIGNED_KINDS: Final = ("upload", "file")
"""Kinds of initial values that reach the owner later, as an assignment."""
_GAINS: Final = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5.0 / 3.0, "relu": sqrt(2.0), "selu": 0.75}
_MAX: Final = float(np.finfo(np.float32).max)


def first_state(load: LoadPartition, take: Callable[[int], F32]) -> LoadedState:
    """Make version 0 of a partition: initial values, fresh optimizer state, step counts of 0.

    Parameters of kind `upload` and `file` are zero until their values are assigned.  `take` returns an uninitialized
    array of so many elements.
    """
    spec, layout, index = load.spec, load.layout, load.key.index
    values = take(layout.partition_size(index))
    base = layout.bounds[index]
    for segment in layout.segments[index]:
        param = spec.params[segment.param]
        into = values[segment.start : segment.stop]
        if param.init.kind in ASSIGNED_KINDS or param.init.kind == "zeros":
            into.fill(0.0)
        else:
            offset = base - layout.offsets[param.name][0]
            into[:] = draw(param, segment.start + offset, segment.stop + offset)
    state = PartitionState(values, initial_slots(spec.optimizer, values), (0,) * len(layout.segments[index]))
    return LoadedState(state, memory={"slots": list(slot_names(spec.optimizer))})


def has_assigned_values(load: LoadPartition) -> bool:
    """Whether the partition has assigned or restored initial values, which cannot be drawn again."""
    if load.restored:
        return True
    segments = load.layout.segments[load.key.index]
    return any(load.spec.params[s.param].init.kind in ASSIGNED_KINDS for s in segments)


def draw(param: ParamSpec, start: int, stop: int) -> F32:
    """Return elements [start, stop) of the parameter's initial values in C order; a new array, all finite.

    An `upload` parameter is zero until its values arrive.  Raises ValueError for a slice outside the parameter, and for
    kind `file`, whose values are read from the file instead.
    """
    if not 0 <= start <= stop <= param.size:
        raise ValueError(f"[{start}, {stop}) lies outside the {param.size} elements of '{param.name}'")
    init = param.init
    match init.kind:
        case "zeros" | "upload":
            return np.zeros(stop - start, np.float32)
        case "constant":
            return np.full(stop - start, init.value, np.float32)
        case "normal":
            return _random(param, start, stop, init.mean, init.std, normal=True)
        case "uniform":
            return _random(param, start, stop, init.low, init.high - init.low, normal=False)
        case "xavier_normal" | "kaiming_normal":
            return _random(param, start, stop, 0.0, deviation(init, param.shape), normal=True)
        case "xavier_uniform" | "kaiming_uniform":
            bound = sqrt(3.0) * deviation(init, param.shape)
            return _random(param, start, stop, -bound, 2.0 * bound, normal=False)
        case kind:
            raise ValueError(f"values of kind '{kind}' are not drawn")


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (fan_in, fan_out) of a shape (out, in, ...), as torch does.

    With fewer than two dimensions, which torch refuses, both are the number of elements.
    """
    if len(shape) < 2:
        return prod(shape), prod(shape)
    field = prod(shape[2:])
    return shape[1] * field, shape[0] * field


def deviation(init: InitSpec, shape: tuple[int, ...]) -> float:
    """Standard deviation of a Xavier (Glorot and Bengio 2010) or Kaiming (He et al. 2015) kind."""
    fan_in, fan_out = fans(shape)
    if init.kind.startswith("xavier"):
        return init.gain * sqrt(2.0 / (fan_in + fan_out))
    gain = _GAINS.get(init.nonlinearity) or sqrt(2.0 / (1.0 + init.a * init.a))
    return gain / sqrt(fan_in if init.mode == "fan_in" else fan_out)


def _random(param: ParamSpec, start: int, stop: int, offset: float, factor: float, *, normal: bool) -> F32:
    """Return offset + factor * x in float32, x standard normal or uniform in [0, 1), clipped to the float32 range."""
    out = np.empty(stop - start, np.float32)
    name = crc32(param.name.encode())
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        first = block * BLOCK
        # The stream is sequential, so the elements of the block before `start` must be drawn as well.
        count = min(stop - first, BLOCK)
        bits = np.random.Philox(
            key=np.array([param.init.seed, name], np.uint64), counter=np.array([0, 0, 0, block], np.uint64)
        )
        rng = np.random.Generator(bits)
        drawn: F32 = rng.standard_normal(count, np.float32) if normal else rng.random(count, np.float32)
        skip = max(start - first, 0)
        out[first + skip - start : first + count - start] = drawn[skip:]
    with np.errstate(over="ignore"):
        out *= np.float32(min(factor, _MAX))
        out += np.float32(offset)
    return np.clip(out, -_MAX, _MAX, out=out)
