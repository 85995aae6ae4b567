"""Timelines: restarting a model's clocks so that nothing from before counts any more (semantics 4)."""

from typing import Any

from paramserver.core.scheduler.cluster import Cluster
from paramserver.core.scheduler.models import Model


def place(model: Model, index: int) -> tuple[int, int]:
    """Where a restore sets a partition: (the model's timeline, the owner's token, or 0 while there is no owner).

    What was set there is gone once these have changed.
    """
    owner = model.owners[index]
    return model.timeline, owner.token if owner.shard is not None else 0


def restart(cluster: Cluster, model: Model, clock: int, *, opening: bool) -> None:
    """Begin a new timeline at that clock; staged gradients and done reports of the old one no longer count.

    `opening`: its first commit is one that lists nothing.
    """
    before = model.gate.first_clock
    model.gate.opening = opening
    for _, commit in model.commits:
        cluster.drop(f"commit:{model.name}:{commit.t}")
    model.restart_at(clock)
    after = model.gate.first_clock
    skipped = after - before if after > before else -model.cuts.skipped
    model.cuts.skipped += skipped
    for run in cluster.runs.values():
        if run.model == model.name and not run.ended:
            run.clock_moved(skipped, after)
            cluster.save_run(run)
    cluster.save_clock(model)
    cluster.model_changed(model)


def reload(cluster: Cluster, model: Model, source: Any, clock: int, *, opening: bool) -> None:
    """Begin a timeline at that clock on which all partitions are loaded from `source`, under new tokens."""
    model.source = source
    model.series.outdate()
    restart(cluster, model, clock, opening=opening)
    for i, owner in enumerate(model.owners):
        owner.previous = None  # what that one may still have in memory is of the old timeline
        if owner.shard is not None:
            cluster.give_token(model, i)


def go_back(cluster: Cluster, model: Model) -> bool:
    """Take a synchronous model at `applied` back to its newest cut, as a whole; return False if it has none.

    If it was restored since, that cut is of the values before, and nothing is left of the restore.
    """
    cut = model.cuts.newest
    if model.durable or not model.ready or cut is None:
        return False
    reload(cluster, model, {"cut": cut}, cut, opening=False)
    return True


def begin_sync(cluster: Cluster, model: Model, clock: int | None = None) -> None:
    """Begin a sync phase, from values other than the initial ones, at `clock`; None: beyond all known clocks.

    A commit without contributions makes the first cut as soon as every partition is served.  Owners keep their tokens:
    the clock is beyond all earlier ones, so each partition can tell that its own clock is of an older timeline.  Until
    the first cut is whole, a restored model has the cut before the restore to go back to.
    """
    model.cuts.want_first()
    restart(cluster, model, model.next_phase_clock if clock is None else clock, opening=True)
