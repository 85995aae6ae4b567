"""Fixtures of several modules of unit tests: a client's cluster without a network, a shard's folder, manifests."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from paramserver.client.cluster import Cluster
from paramserver_shard.shared_folder import SharedFolder

from .manifests import applied, compose_file
from .sharding import Now, Shards


@pytest.fixture
def shards() -> Shards:
    """Shards that answer in memory."""
    return Shards()


@pytest.fixture
def now() -> Now:
    """A clock that only the test moves."""
    return Now()


@pytest.fixture
def cluster() -> Cluster:
    """What a client knows before it has asked anybody."""
    return Cluster(("http://given:1",))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a short path, because that of a Unix socket in it is limited to about 100 bytes."""
    with TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def folder(short_path: Path) -> Iterator[SharedFolder]:
    """The shared folder of one shard."""
    made = SharedFolder.open(str(short_path), "shard-0", 1 << 26)
    assert made is not None
    yield made
    made.close()


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The compose file."""
    return compose_file()


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    """The objects of the Kubernetes manifests."""
    return applied()
