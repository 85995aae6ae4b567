"""What a number of steps by ones makes of a model's values and of its optimizer's state: the papers, in float64."""

from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import Any, Final

import numpy as np

from paramserver.core.partition_state import PartitionState

OPTIMIZERS: Final = ("sum", "momentum", "adam")
LR: Final = 0.5
MOMENTUM: Final = 0.5
BETAS: Final = (0.5, 0.75)
EPS: Final = 1e-8


@dataclass(frozen=True)
class Reference:
    """The course of a model whose values begin at 0 and whose every gradient is 1."""

    name: str = "sum"
    gamma: float = 1.0
    """Factor of the learning rate from one step to the next."""

    @property
    def spec(self) -> dict[str, Any]:
        """The optimizer, as in a model's spec."""
        if self.name == "sum":
            return {"name": "sum"}
        own = {"momentum": MOMENTUM} if self.name == "momentum" else {"betas": list(BETAS), "eps": EPS}
        return {"name": self.name, "lr": LR, **own, "schedule": {"kind": "exponential", "gamma": self.gamma}}

    @cache  # noqa: B019 -- a handful of references, of a few hundred steps each
    def after(self, steps: int) -> tuple[float, ...]:
        """Return (value, then an element of each of the optimizer's arrays) after that many steps."""
        if self.name == "sum":
            return (float(steps),)
        value, first, second, rate = 0.0, 0.0, 0.0, LR
        for step in range(1, steps + 1):
            if self.name == "momentum":
                first = MOMENTUM * first + 1.0
                value -= rate * first
            else:
                first += (1.0 - BETAS[0]) * (1.0 - first)
                second += (1.0 - BETAS[1]) * (1.0 - second)
                corrected = first / (1.0 - BETAS[0] ** step), second / (1.0 - BETAS[1] ** step)
                value -= rate * corrected[0] / (sqrt(corrected[1]) + EPS)
            rate *= self.gamma
        return (value, first) if self.name == "momentum" else (value, first, second)

    def steps(self, state: PartitionState) -> float:
        """Return how many steps have led to this state; with `sum`, its value.

        Raises AssertionError if no number of steps leads to all of it.
        """
        if self.name == "sum":
            assert state.values.min() == state.values.max(), f"a torn read: {state.values}"
            return float(state.values[0])
        steps = max(state.steps)
        assert min(state.steps) == steps, f"parameters have taken {state.steps} steps"
        for array, wanted in zip((state.values, *state.slots), self.after(steps), strict=True):
            assert np.allclose(array, wanted, rtol=1e-4, atol=1e-6), f"{array} after {steps} steps, not {wanted}"
        return float(steps)
