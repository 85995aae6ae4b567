"""A cluster that is begun anew at the address of an earlier one, whose workers and readers live on."""

import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps

from .cluster import Cluster, cluster, get, ones

pytestmark = pytest.mark.process

STEPS = 3
MODES: Final[dict[str, ps.Consistency]] = {"async": ps.Async(), "sync": ps.Sync()}
"""The consistency of the model of that name."""


def created(running: Cluster, name: str, value: float) -> ps.Model:
    """Create a model that begins with this value and to which gradients are added."""
    first = {"w": np.full(4, value, np.float32)}
    return ps.connect(running.url).create_model(name, first, optimizer=ps.Sum(), consistency=MODES[name])


def stepped(worker: ps.Worker) -> ps.Worker:
    """Have the worker train for `STEPS` iterations; return it."""
    for _ in range(STEPS):
        worker.pull()
        worker.step(ones(4))
    return worker


def test_a_worker_outlives_a_wiped_cluster(tmp_path: Path) -> None:
    """What a worker of the old cluster pushes and says is not taken for that of the new one's worker of the same id.

    Each push of that one counts, and it stays a member when the old one leaves.  A reader's ETag is stale.
    """
    state, at = tmp_path / "cluster", ("--port", "31900")  # the last block: others take the first that is free
    with cluster(state, shards=1, args=at) as running:
        before = {name: stepped(created(running, name, 0.0).worker().__enter__()) for name in MODES}
        tags = {name: get(f"{running.url}/pull/{name}/w").headers["etag"] for name in MODES}
    shutil.rmtree(state)

    with cluster(state, shards=1, args=at) as running, ExitStack() as stack:
        models = {name: created(running, name, 100.0) for name in MODES}
        # By name, as the old ones may have joined first.
        after = {name: stack.enter_context(model.worker(name="w0")) for name, model in models.items()}
        for name in MODES:  # of both, before a heartbeat tells one of them
            old, new = before[name], stepped(after[name])
            assert new.name == old.name
            answer = get(f"{running.url}/pull/{name}/w", {"if-none-match": tags[name]})
            assert answer.status_code == 200
            for _ in range(STEPS):
                with suppress(ps.FencedError):  # once it has been told
                    old.pull()
                with pytest.raises(ps.FencedError):
                    old.step(ones(4))
                new.pull()
                assert not new.step(ones(4)).duplicate
        for name, model in models.items():
            old, new = before[name], after[name]
            eventually(lambda old=old: old.draining, what="the end of the old worker")  # type: ignore[misc]
            old.__exit__(None, None, None)
            assert new.step(ones(4)).state != "dropped"
            assert new.pull()["w"].tolist() == [100.0 + 2 * STEPS + 1] * 4
            assert [(w["worker"], w["state"]) for w in model.workers()] == [(f"{name}/w0", "active")]
