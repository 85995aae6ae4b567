"""Optimizer state per element, and the parameters of one step; the arithmetic itself is in `kernels`.

An optimizer's state is a tuple of float32 arrays ("slots"), each as long as the partition. The names follow torch's
`state_dict` where torch has the optimizer; ftrl's are the paper's.
"""

from math import sqrt
from typing import Final

import numpy as np
from msgspec import Struct

from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.types import F32


class SegmentStep(Struct, frozen=True):
    """One step of the elements [start, stop) of a partition.

    The gradient used is clamp(scale * g, -clip_value, +clip_value), then weight decay is added.
    """

    start: int
    """First element, relative to the partition."""
    stop: int
    lr: float
    """Effective learning rate, with schedule, lr_scale, linear scaling and lag applied. `sum` does not use it."""
    weight_decay: float = 0.0
    """adamw subtracts lr * weight_decay * w; the others add weight_decay * w to the gradient; `sum` ignores it."""
    step: int = 1
    """Number of steps of these elements, including this one (from 1), for bias correction and adagrad's lr_decay.
    Always 1 for optimizers not in `COUNTING`, so that successive steps are equal and `kernels` can cache their tables.
    """
    clip_value: float | None = None
    scale: float = 1.0
    """Factor of the gradient: the push's weight and its norm clipping."""
    active: bool = True
    """False copies values and slots unchanged: a range the push did not touch, or a parameter that is not trainable."""


def slot_names(optimizer: OptimizerSpec) -> tuple[str, ...]:
    """Names of the optimizer's state arrays, in the order in which `kernels.apply` takes them."""
    match optimizer.name:
        case "momentum" | "nesterov":
            return ("momentum_buffer",)
        case "adagrad":
            return ("sum",)
        case "rmsprop":
            centered = ("grad_avg",) if optimizer.centered else ()
            momentum = ("momentum_buffer",) if optimizer.momentum > 0 else ()
            return ("square_avg", *centered, *momentum)
        case "adam" | "adamw":
            return ("exp_avg", "exp_avg_sq")
        case "ftrl":
            return ("z", "n")
        case _:
            return ()


def slot_count(optimizer: OptimizerSpec) -> int:
    """Number of float32 state arrays of the partition's length: sgd and sum 0, momentum 1, adam 2, ..."""
    return len(slot_names(optimizer))


def initial_slots(optimizer: OptimizerSpec, values: F32) -> tuple[F32, ...]:
    """Return new state arrays, as long as `values`, for elements that have these values and were never stepped.

    All zeros, with two exceptions: adagrad's sum starts at `initial_accumulator_value`; ftrl's z is what its closed
    form needs to give `values` back (0 for 0, as in the paper).
    """
    slots = {name: np.zeros(values.size, np.float32) for name in slot_names(optimizer)}
    if optimizer.name == "adagrad":
        slots["sum"].fill(optimizer.initial_accumulator_value)
    if optimizer.name == "ftrl":
        slots["z"] = ftrl_z(optimizer, values, slots["n"])
    return tuple(slots.values())


def ftrl_z(optimizer: OptimizerSpec, values: F32, n: F32) -> F32:
    """The z for which ftrl's closed form gives `values` under the squared-gradient sums `n` (McMahan et al. 2013)."""
    if optimizer.lr <= 0.0:
        return np.zeros(values.size, np.float32)
    rate = (np.float32(optimizer.beta) + np.sqrt(n)) / np.float32(optimizer.lr) + np.float32(optimizer.l2)
    with np.errstate(over="ignore"):  # infinite for values near the largest float32, whose steps are then refused
        return np.asarray(-values * rate - np.sign(values) * np.float32(optimizer.l1), np.float32)


COUNTING: Final = ("adam", "adamw", "adagrad")
"""Optimizers whose step depends on the step count."""


def adam_corrections(optimizer: OptimizerSpec, step: int) -> tuple[float, float]:
    """adam's (1 - beta1^step, sqrt(1 - beta2^step)) for a step from 1 (Kingma and Ba 2015, algorithm 1)."""
    beta1, beta2 = optimizer.betas
    return 1.0 - beta1**step, sqrt(1.0 - beta2**step)
