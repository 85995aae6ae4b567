"""A Redis for each module that wants one, clusters for all modules, and one for all tests of the REST contract.

The last is reached through a scheduler or a shard, in JSON or msgpack.
"""

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from tests.servers import running_redis

from .processes import Nodes, nodes
from .rest import Face
from .routes import Model

if TYPE_CHECKING:
    from .browser import Pages


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a test that fails show the logs of the nodes that it shares with others."""
    report = yield
    if report.failed:
        found = {v.folder: (name, v) for name, v in item.funcargs.items() if isinstance(v, Nodes)}  # by several names
        report.sections += [(name, v.logs()) for name, v in found.values()]
    return report


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis server for the whole module."""
    with running_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """The nodes of `cluster`."""
    with nodes(tmp_path_factory.mktemp("nodes"), shards=2) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(pair: Nodes) -> Nodes:
    """A scheduler and two shards, without models at the module's begin, which its tests may kill and restart."""
    pair.empty()
    return pair


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """The nodes of `lone`."""
    with nodes(tmp_path_factory.mktemp("lone"), shards=1) as running:
        yield running


@pytest.fixture(scope="module")
def lone(single: Nodes) -> Nodes:
    """A scheduler and a single shard, without models at the module's begin, which its tests may kill and restart."""
    single.empty()
    return single


@pytest.fixture
def emptied(single: Nodes) -> Nodes:
    """The nodes of `lone`, without models; all runs of earlier tests are over."""
    single.empty()
    return single


@pytest.fixture(scope="session")
def rest_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A scheduler and two shards, shared by many tests: no test may stop, kill or empty them.

    Where many models were deleted, workers' epochs begin above 1.
    """
    with nodes(tmp_path_factory.mktemp("rest"), shards=2) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator["Pages"]:
    """What opens a page in a Chromium that runs for the whole module."""
    from .browser import chromium  # needs playwright, which not everybody has who runs other tests

    with chromium() as pages:
        yield pages


@pytest.fixture(params=["scheduler-json", "scheduler-msgpack", "shard-json", "shard-msgpack"])
def face(request: pytest.FixtureRequest, rest_cluster: Nodes) -> Face:
    """A client of the scheduler or of a shard, in JSON or in msgpack."""
    node, kind = request.param.split("-")
    url = rest_cluster.url if node == "scheduler" else f"http://127.0.0.1:{rest_cluster.shard_ports['shard-1']}"
    return Face(rest_cluster, url, kind)


@pytest.fixture
def model(rest_cluster: Nodes) -> Model:
    """A model of two parameters, over four partitions and both shards, that adds up what is pushed."""
    return Model(rest_cluster)
