"""Optimizers and schedules against torch (stored results, and live if it is installed), and FTRL against its paper."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.golden.optimizers import generate

from paramserver import kernels
from paramserver.core.optimizer import SegmentStep, initial_slots
from paramserver.core.optimizer_spec import OPTIMIZERS, OptimizerSpec
from paramserver.core.shard.schedule import learning_rate
from paramserver.core.spec import ModelSpec
from paramserver.types import F32, AnyArray

GOLDEN = Path(__file__).parents[1] / "golden" / "optimizers"
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="live comparison: pip install torch==2.13.0"
)
STEP_CASES = sorted(generate.CASES["steps"])
SCHEDULE_CASES = sorted(generate.CASES["schedules"])


@pytest.fixture(scope="module")
def golden() -> Iterator[Any]:
    with np.load(GOLDEN / "torch.npz") as stored:
        yield stored


def optimizer(fields: dict[str, Any]) -> OptimizerSpec:
    """Return the spec with these fields, and the defaults that creating a model fills in."""
    return ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}, "optimizer": fields}).optimizer


def trajectory(
    o: OptimizerSpec, w: F32, grads: F32, decay: float | None = None, rates: Sequence[float] | None = None
) -> F32:
    """Return the values after each step, float32 [steps, size], for gradients of the same shape."""
    slots = initial_slots(o, w)
    out = np.empty_like(grads)
    weight_decay = o.weight_decay if decay is None else decay
    for i, g in enumerate(grads):
        new = tuple(np.empty_like(s) for s in slots)
        steps = [SegmentStep(0, w.size, rates[i] if rates else o.lr, weight_decay, i + 1)]
        assert kernels.apply(o, steps, w, slots, g, "float32", out[i], new)
        w, slots = out[i], new
    return out


def close(ours: AnyArray, theirs: AnyArray) -> None:
    """Assert equality up to 100 float32 roundings: 1e-5 relative, 2e-6 absolute for values of the order of one."""
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", STEP_CASES)
def test_a_hundred_steps_follow_the_stored_trajectory_of_torch(name: str, golden: Any) -> None:
    """Each optimizer, with defaults and with all hyperparameters set, gives torch's stored values over 100 steps."""
    ours = trajectory(optimizer(generate.CASES["steps"][name]["ours"]), golden["w"], golden["grads"])

    theirs = golden[f"steps/{name}"]
    close(ours[list(generate.KEPT)], theirs)
    assert np.abs(theirs[-1] - golden["w"]).max() > 1e-3


@needs_torch
@pytest.mark.parametrize("name", STEP_CASES)
def test_a_hundred_steps_follow_the_installed_torch(name: str) -> None:
    """Each optimizer gives the values of the installed torch at every one of 100 steps."""
    w, grads = generate.inputs()
    case = generate.CASES["steps"][name]

    close(trajectory(optimizer(case["ours"]), w, grads), generate.trajectory_of_torch(case, w, grads))


def test_the_stored_inputs_are_those_the_generator_makes(golden: Any) -> None:
    """The golden file holds the inputs and cases of its generator, which cover all optimizers that torch has."""
    w, grads = generate.inputs()

    np.testing.assert_array_equal(golden["w"], w)
    np.testing.assert_array_equal(golden["grads"], grads)
    stored = {k for k in golden.files if "/" in k}
    assert stored == {f"steps/{n}" for n in STEP_CASES} | {f"schedules/{n}" for n in SCHEDULE_CASES}
    assert {c["ours"]["name"] for c in generate.CASES["steps"].values()} == set(OPTIMIZERS) - {"ftrl", "sum"}


def rates(fields: dict[str, Any]) -> list[float]:
    o = optimizer({"name": "sgd", "lr": generate.RATE, "schedule": fields})
    return [learning_rate(o, t, 1) for t in range(generate.UPDATES)]


@pytest.mark.parametrize("name", SCHEDULE_CASES)
def test_a_schedule_gives_the_stored_rates_of_torch(name: str, golden: Any) -> None:
    """Each schedule, with and without warm-up, gives the stored rates of torch's scheduler."""
    ours = rates(generate.CASES["schedules"][name]["ours"])

    np.testing.assert_allclose(ours, golden[f"schedules/{name}"], rtol=1e-9)


@needs_torch
@pytest.mark.parametrize("name", SCHEDULE_CASES)
def test_a_schedule_gives_the_rates_of_the_installed_torch(name: str) -> None:
    """Each schedule gives the rates of the installed torch's scheduler."""
    case = generate.CASES["schedules"][name]

    np.testing.assert_allclose(rates(case["ours"]), generate.rates_of_torch(case), rtol=1e-9)


def ftrl_of_the_paper(grads: AnyArray, rates: Sequence[float], beta: float, l1: float, l2: float) -> AnyArray:
    """Algorithm 1 of McMahan et al. (2013), "Ad Click Prediction: a View from the Trenches", line by line, float64.

    `rates` are alpha in each step, which the paper keeps constant; sigma is 1/eta_t - 1/eta_(t-1), as it defines it.
    """
    z, n = np.zeros(grads.shape[1]), np.zeros(grads.shape[1])
    out = np.zeros_like(grads, np.float64)

    def weights(alpha: float) -> AnyArray:
        w = -(1.0 / ((beta + np.sqrt(n)) / alpha + l2)) * (z - np.sign(z) * l1)
        return np.where(np.abs(z) <= l1, 0.0, w)

    before = rates[0]
    for t, (g, alpha) in enumerate(zip(grads.astype(np.float64), rates, strict=True)):
        w = weights(before)
        sigma = (beta + np.sqrt(n + g * g)) / alpha - (beta + np.sqrt(n)) / before
        z = z + g - sigma * w
        n = n + g * g
        out[t], before = weights(alpha), alpha
    return out


@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.5, 0.0), (2.0, 0.1)])
def test_ftrl_follows_the_paper(l1: float, l2: float) -> None:
    """FTRL gives the weights of the paper's algorithm over 100 steps, with its exact zeros under l1."""
    _, grads = generate.inputs()
    o = optimizer({"name": "ftrl", "lr": 0.1, "beta": 0.7, "l1": l1, "l2": l2})

    ours = trajectory(o, np.zeros(grads.shape[1], np.float32), grads)

    theirs = ftrl_of_the_paper(grads, [0.1] * len(grads), 0.7, l1, l2)
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-5)
    assert np.abs(theirs).max() > 0.05
    if l1:
        sparse = theirs[:, :4] == 0.0
        assert sparse.any()
        assert (ours[:, :4][sparse] == 0.0).all()


@pytest.mark.parametrize("rates", [(0.1, 0.1), (0.001, 0.01, 0.1), (0.1, 1e-6, 1e-45, 0.0, 3.0)])
@pytest.mark.parametrize("l1", [0.0, 0.25])
def test_ftrl_keeps_values_without_a_gradient_whatever_the_rate(rates: tuple[float, ...], l1: float) -> None:
    """Steps with a zero gradient keep all values, initial ones too, though FTRL's rate changes from step to step."""
    w = np.array([0.5, -2.0, 0.0, 1e-3], np.float32)
    o = optimizer({"name": "ftrl", "lr": 0.1, "l1": l1, "l2": 0.1})

    np.testing.assert_array_equal(trajectory(o, w, np.zeros((len(rates), 4), np.float32), rates=rates)[-1], w)


@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.5, 0.0), (2.0, 0.1)])
def test_ftrl_goes_on_from_its_values_when_its_rate_changes(l1: float, l2: float) -> None:
    """FTRL gives the paper's weights at a rate that differs in each step, by the paper's definition of sigma."""
    _, grads = generate.inputs()
    rates = tuple(0.1 * (1.0 + 0.9 * np.sin(np.arange(len(grads)) / 5.0)))
    o = optimizer({"name": "ftrl", "lr": 0.1, "beta": 0.7, "l1": l1, "l2": l2})

    ours = trajectory(o, np.zeros(grads.shape[1], np.float32), grads, rates=rates)

    theirs = ftrl_of_the_paper(grads, rates, 0.7, l1, l2)
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-5)


def test_sum_adds_gradients() -> None:
    """`sum` computes w += g, whatever the decay."""
    w, grads = generate.inputs()

    ours = trajectory(optimizer({"name": "sum"}), w, grads, decay=0.5)

    expected = w
    for g in grads:
        expected = expected + g
    np.testing.assert_array_equal(ours[-1], expected)
