"""Synchronous rounds in one request to each shard, which reports the clocks: same values, also through failures."""

import re
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps
from paramserver.client import sends
from paramserver.types import F32

from .processes import Nodes, nodes, unique

pytestmark = pytest.mark.process

SIZE = 1000
CLOCK = "/models/{m}/clock"
WORKERS = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two schedulers, either of which tests may kill and restart, and two shards."""
    with nodes(tmp_path_factory.mktemp("nodes"), shards=2, schedulers=2) as running:
        yield running


def gradient(rank: int, clock: int) -> F32:
    return np.random.default_rng([rank, clock]).normal(size=SIZE).astype(np.float32)


def clock_requests(cluster: Nodes) -> int:
    """How many clock reports both schedulers have received from workers."""
    texts = [cluster.http.get(f"{url}/metrics").text for url in cluster.urls]
    pattern = rf'paramserver_http_requests_total{{[^}}]*method="POST",route="{re.escape(CLOCK)}"[^}}]*}} ([0-9.e+]+)'
    return sum(int(float(n)) for text in texts for n in re.findall(pattern, text))


def train(cluster: Nodes, rounds: int, round_of: Callable[[ps.Worker, ps.Params, F32], ps.Params], name: str) -> F32:
    """Train with both workers for so many rounds; return the final values, which are the same for both."""
    ends: list[F32] = []

    def work(rank: int) -> None:
        with ps.connect(",".join(cluster.urls)) as client, client.model(name).worker(rank=rank) as w:
            values = w.pull()
            for clock in range(rounds):
                values = round_of(w, values, gradient(rank, clock))
                assert values.version == clock + 1
            ends.append(values.flat.copy())

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(WORKERS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(ends) == WORKERS
    assert ends[0].tobytes() == ends[1].tobytes()
    return ends[0]


def made(cluster: Nodes) -> str:
    name = unique("m")
    with ps.connect(cluster.url) as client:
        optimizer, rule = ps.Adam(lr=0.01), ps.Sync(min_workers=WORKERS)
        client.create_model(
            name, {"w": np.zeros(SIZE, np.float32)}, optimizer=optimizer, consistency=rule, partitions=8
        )
    return name


def in_one(w: ps.Worker, values: ps.Params, gradient: F32) -> ps.Params:
    return w.exchange({"w": gradient}, out=values)


def in_three(w: ps.Worker, values: ps.Params, gradient: F32) -> ps.Params:
    w.push({"w": gradient})
    w.clock()
    return w.pull(out=values)


def in_two(w: ps.Worker, values: ps.Params, gradient: F32) -> ps.Params:
    w.step({"w": gradient})
    return w.pull(out=values)


def test_one_request_makes_the_same_bits_as_three(cluster: Nodes) -> None:
    """Push, clock and pull, a step and a pull, and `exchange` give bit-identical values after 20 rounds."""
    ends = {train(cluster, 20, way, made(cluster)).tobytes() for way in (in_one, in_two, in_three)}

    assert len(ends) == 1


@pytest.mark.parametrize("way", [in_one, in_two, in_three])
def test_a_gradient_too_large_for_one_request_makes_the_same_bits(
    cluster: Nodes, monkeypatch: pytest.MonkeyPatch, way: Callable[[ps.Worker, ps.Params, F32], ps.Params]
) -> None:
    """Synchronous rounds whose pushes take several requests to each shard end as those of one request do."""
    name, other = made(cluster), made(cluster)
    whole = train(cluster, 10, in_one, name)
    monkeypatch.setattr(sends, "REQUEST_ELEMENTS_MAX", SIZE // 6)

    assert train(cluster, 10, way, other).tobytes() == whole.tobytes()


def test_a_round_asks_the_scheduler_nothing(cluster: Nodes) -> None:
    """In 60 rounds of `exchange` two workers report fewer than 12 clocks themselves.

    They do report a few, for instance while a shard is still connecting.
    """
    name = made(cluster)
    before = clock_requests(cluster)

    train(cluster, 60, in_one, name)

    assert clock_requests(cluster) - before < 12


def test_the_training_outlives_the_leader(cluster: Nodes) -> None:
    """With the leader killed during training, every commit still is the mean of both gradients."""
    calm = train(cluster, 60, in_one, made(cluster))
    started = threading.Event()

    def beginning(w: ps.Worker, values: ps.Params, gradient: F32) -> ps.Params:
        if values.version == 20:
            started.set()
        return in_one(w, values, gradient)

    def kill() -> None:
        started.wait(60)
        active = [n for n in cluster.get("/status")["nodes"] if n["role"] == "scheduler" and n["state"] == "active"]
        index = cluster.urls.index(active[0]["addresses"][0])
        cluster.kill(f"scheduler-{index}" if index else "scheduler")
        killed.append(index)

    killed: list[int] = []
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        end = train(cluster, 60, beginning, made(cluster))
    finally:
        started.set()
        killer.join()
        for index in killed:
            cluster.start_scheduler(index)

    assert killed
    assert end.tobytes() == calm.tobytes()


def test_what_the_scheduler_asks_of_a_worker_is_heard_in_the_next_round(cluster: Nodes) -> None:
    """A worker that trains by `exchange` learns in the next round that it should drain.

    The commit tells that the scheduler has a request, and the client then reports its clock to the scheduler.
    """
    name = unique("m")
    with ps.connect(cluster.url) as client:
        model = client.create_model(name, {"w": (SIZE,)}, consistency=ps.Sync(), partitions=8)
        with model.worker() as w:
            for _ in range(3):
                w.exchange({"w": np.ones(SIZE)})
            cluster.post(f"/models/{name}/workers/{w.name}/drain")
            w.exchange({"w": np.ones(SIZE)})
            assert w.draining


def test_reports_are_checked(cluster: Nodes) -> None:
    """A shard's clock reports are refused if malformed or without an epoch; a standby passes on bodies with an end."""
    path = "/internal/shards/shard-0/clocks"

    def refused(url: str, body: bytes) -> tuple[int, str]:
        answer = cluster.http.post(url, content=body)
        return answer.status_code, answer.json()["code"]

    def leads(url: str) -> bool:
        return cluster.http.post(f"{url}{path}?epoch=1", content=endless).status_code == 204

    endless: tuple[bytes, ...] = ()  # sent in chunks, without a length

    leading = eventually(lambda: [u for u in cluster.urls if leads(u)], what="a leader")
    (standing_by,) = set(cluster.urls) - set(leading)
    assert refused(f"{leading[0]}{path}?epoch=1", b"[1, 2]\n") == (400, "malformed")
    assert refused(f"{leading[0]}{path}?epoch=1", b"x" * 5000) == (400, "malformed")
    assert refused(f"{leading[0]}{path}", b"") == (400, "malformed")
    assert cluster.http.post(f"{standing_by}{path}?epoch=1", content=endless).json()["code"] == "no_leader"
    unknown = b'["none", 1, "none/w0", 1, 1, 1, 0, 1]\n'
    for url in cluster.urls:
        assert cluster.http.post(f"{url}{path}?epoch=1", content=unknown).status_code == 204
