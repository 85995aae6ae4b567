"""Fixtures of the tests that run real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import paramserver as ps

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


@pytest.fixture
def client(shared_cluster: Cluster) -> Iterator[ps.Client]:
    """A client of the shared cluster."""
    with ps.connect(shared_cluster.url) as c:
        yield c


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A model name that no other test uses."""
    return str(request.node.name)[:60].replace("[", ".").replace("]", "").replace(":", "-")
