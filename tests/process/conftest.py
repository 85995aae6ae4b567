"""Fixtures of the tests that run real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import Cluster, cluster


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster of two shards, shared by all tests that leave its processes alone."""
    with cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of two shards for one test, which may kill its processes."""
    with cluster(tmp_path / "cluster") as running:
        yield running
