"""The learning rate as a function of a partition's update count; pure, so every shard computes the same.

The schedules are torch's closed forms: `StepLR`, `ExponentialLR`, `CosineAnnealingLR`.  Warm-up is linear, from
1/warmup of the rate to the full rate; the schedule begins after it.  Linear scaling multiplies the rate by the number
of live workers (Goyal et al. 2017, "Accurate, Large Minibatch SGD").
"""

from math import cos, pi

from paramserver.core.optimizer_spec import OptimizerSpec, ScheduleSpec


def learning_rate(opt: OptimizerSpec, updates: int, live_workers: int) -> float:
    """Return the rate of the update that follows `updates` earlier ones (the partition's version; in sync the clock).

    `live_workers` matters only with `linear_scaling`, and counts as at least one.  A parameter's `lr_scale` and the
    factor for version lag are not included.
    """
    rate = opt.lr * max(1, live_workers) if opt.linear_scaling else opt.lr
    warmup = opt.schedule.warmup
    if updates < warmup:
        return rate * (updates + 1) / warmup
    return scheduled(opt.schedule, rate, updates - warmup)


def scheduled(schedule: ScheduleSpec, rate: float, updates: int) -> float:
    """Return the rate after `updates` updates of a schedule that began at `rate`."""
    match schedule.kind:
        case "step":
            return rate * power(schedule.gamma, updates // schedule.step_size)
        case "exponential":
            return rate * power(schedule.gamma, updates)
        case "cosine":
            # Falls to eta_min within t_max updates and stays there; torch's closed form would rise again.
            progress = min(updates, schedule.t_max) / schedule.t_max
            return schedule.eta_min + (rate - schedule.eta_min) * (1.0 + cos(pi * progress)) / 2.0
        case _:
            return rate


def power(gamma: float, exponent: int) -> float:
    """Return gamma ** exponent, capped at 3.4e38 (about the largest float32) instead of raising OverflowError."""
    try:
        return min(gamma**exponent, 3.4e38)
    except OverflowError:
        return 3.4e38
