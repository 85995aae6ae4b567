"""The learning rate of an update: warm-up, the end of schedules, and scaling by workers."""

import pytest
from msgspec.structs import replace

from paramserver.core.optimizer_spec import OptimizerSpec, ScheduleSpec
from paramserver.core.shard.schedule import learning_rate

PLAIN = OptimizerSpec("sgd", lr=0.1)


def test_warm_up_rises_to_the_whole_rate_before_the_schedule_begins() -> None:
    """Warm-up rises from 1/warmup of the rate to the whole rate; step 0 of the schedule follows."""
    o = replace(PLAIN, schedule=ScheduleSpec("step", step_size=2, gamma=0.5, warmup=4))

    rates = [learning_rate(o, t, 1) for t in range(9)]

    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.05, 0.05, 0.025])


def test_cosine_stays_at_its_end() -> None:
    """After t_max updates the rate stays at eta_min, which linear scaling does not multiply, and rises no more."""
    o = replace(PLAIN, schedule=ScheduleSpec("cosine", t_max=10, eta_min=0.01))

    assert learning_rate(o, 0, 1) == pytest.approx(0.1)
    assert learning_rate(o, 5, 1) == pytest.approx(0.055)
    assert [learning_rate(o, t, 1) for t in (10, 11, 20, 10**9)] == pytest.approx([0.01] * 4)

    scaled = replace(o, linear_scaling=True)
    assert [learning_rate(scaled, t, 8) for t in (0, 5, 10, 11)] == pytest.approx([0.8, 0.405, 0.01, 0.01])


@pytest.mark.parametrize("kind", ["constant", "step", "exponential", "cosine"])
def test_linear_scaling_multiplies_by_the_live_workers(kind: str) -> None:
    """With linear scaling the rate is multiplied by the live workers, none counting as one; else they do not matter."""
    o = replace(PLAIN, schedule=ScheduleSpec(kind, step_size=3, gamma=0.9, t_max=20, warmup=2))
    scaled = replace(o, linear_scaling=True)

    for t in range(12):
        one = learning_rate(o, t, 1)
        assert learning_rate(o, t, 8) == one
        assert learning_rate(scaled, t, 8) == pytest.approx(8 * one)
        assert learning_rate(scaled, t, 0) == pytest.approx(one)


def test_a_growing_schedule_stays_a_number() -> None:
    """A schedule with a gamma above one never ends in an overflow error or an infinite rate."""
    for kind in ("step", "exponential"):
        o = replace(PLAIN, schedule=ScheduleSpec(kind, gamma=10.0))
        assert 1e30 < learning_rate(o, 1 << 40, 1) < 3.5e38
