"""What an event costs the scheduler of a large cluster, during which it answers nobody; calls are counted."""

from collections import Counter
from functools import partial
from typing import Any

import pytest

from paramserver.core import balance, move_desk
from paramserver.core import scheduler_io as io
from paramserver.core.models import Model

from .scheduling import SPEC, Driver


def test_the_death_of_a_shard_costs_by_the_partitions_of_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard's death looks at each partition a few times, however many models there are."""
    d = Driver()
    for shard in ("s0", "s1", "s2"):
        d.shard(shard)
    names = [f"m{i}" for i in range(40)]
    for spec in [SPEC | {"name": name} for name in names]:
        d.send(partial(io.CreateModel, spec=spec, nonce="secret"))
    d.beats()
    looks = Counter[tuple[str, int]]()
    bytes_of = Model.bytes_of

    def counted(model: Model, index: int) -> int:
        looks[model.name, index] += 1
        return bytes_of(model, index)

    monkeypatch.setattr(Model, "bytes_of", counted)
    d.ask(lambda n: io.LeaveShard(n, "s2", d.shards.pop("s2")))
    assert {owner for name in names for owner in d.owners(name)} == {"s0", "s1"}
    assert max(looks.values()) < 8


def test_moves_are_not_planned_with_each_event_while_a_model_cannot_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model that is not served keeps its partitions from moving, ticks plan for them, other events do not."""
    d = Driver()
    d.model()
    worker = d.join("a")
    d.send(lambda n: io.CreateModel(n, SPEC | {"name": "slow"}, "secret"))
    plans = 0

    def counted(*_args: Any, **_options: Any) -> list[balance.Move]:
        nonlocal plans
        plans += 1
        return []

    monkeypatch.setattr(move_desk, "plan", counted)
    for _ in range(20):
        d.ask(lambda n: io.WorkerHeartbeat(n, "m", "m/a", worker["epoch"], 0))
    assert plans == 0
    d.do(io.Tick())
    assert plans == 1
