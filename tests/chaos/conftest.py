"""Clusters under load for the chaos tests."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from .busy import KINDS, Busy, Kind
from .cluster import chaos_cluster
from .keeper import Plan


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Busy]]:
    """Return a function that starts a cluster with models under load, which is stopped after the test."""
    with ExitStack() as stack:
        started: list[Busy] = []

        def begin(plan: Plan, kinds: Sequence[Kind] = KINDS) -> Busy:
            cluster = stack.enter_context(chaos_cluster(tmp_path / "cluster", plan))
            started.append(Busy(cluster, kinds))
            return started[-1]

        yield begin
        for busy in started:
            print(busy.cluster.logs())  # pytest shows them if the test fails
