"""Timelines: restarting a model's clocks so that nothing from before counts any more (semantics 4)."""

from paramserver.core.cluster import Cluster
from paramserver.core.models import Model


def restart(cluster: Cluster, model: Model, clock: int, *, opening: bool) -> None:
    """Begin a new timeline at that clock; staged gradients and done reports of the old one no longer count.

    `opening`: its first commit is one that lists nothing.
    """
    before = model.gate.first_clock
    model.gate.opening = model.gate.opening or opening
    for _, commit in model.commits:
        cluster.drop(f"commit:{model.name}:{commit.t}")
    model.restart_at(clock)
    for run in cluster.runs.values():
        if run.model == model.name and not run.ended:
            run.clock_moved(before, model.gate.first_clock)
            cluster.save_run(run)
    cluster.save_clock(model)
    cluster.model_changed(model)


def begin_sync(cluster: Cluster, model: Model, clock: int | None = None) -> None:
    """Begin a sync phase, from values other than the initial ones, at `clock`; None: beyond all known clocks.

    A commit without contributions makes the first cut as soon as every partition is served.  Owners keep their tokens:
    the clock is beyond all earlier ones, so each partition can tell that its own clock is of an older timeline.
    """
    model.cuts.none_left()
    restart(cluster, model, model.next_phase_clock if clock is None else clock, opening=True)
