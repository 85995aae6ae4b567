"""Timelines: when a model's clocks begin anew, so that nothing of before counts any more (semantics 4)."""

from paramserver.core.cluster import Cluster
from paramserver.core.models import Model


def restart(cluster: Cluster, model: Model, clock: int) -> None:
    """A new timeline begins at that clock; staged gradients and done reports of the old one count no more."""
    for _, commit in model.commits:
        cluster.drop(f"commit:{model.name}:{commit.t}")
    model.restart_at(clock)
    cluster.save_clock(model)
    cluster.model_changed(model)


def begin_sync(cluster: Cluster, model: Model, clock: int | None = None) -> None:
    """A sync phase begins on values that are not the initial ones; None: at a clock beyond all that is known.

    A commit without contributions makes the first cut as soon as every partition is served.  Owners keep their tokens:
    by a clock that is beyond all there were each partition sees that what it stands at is of an older timeline.
    """
    model.cut = None
    model.switched = model.cut_wanted = model.opening = True
    restart(cluster, model, model.beyond if clock is None else clock)
