"""Clients on the shards' machine: gradients in slots, values by lease, and the same results as over HTTP."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps
from paramserver.client import same_host, transfer
from paramserver.client.frames import PushTerms
from paramserver.client.model import Model
from paramserver.types import PushId

from .machine import ON_LINUX, SIZE, lose_sockets, made, requests_of
from .processes import START_S, Nodes

pytestmark = ON_LINUX


@pytest.fixture
def model(cluster: Nodes) -> Iterator[Model]:
    """A model of two parameters that span the partitions of both shards, with a learning rate of 1."""
    with ps.connect(cluster.url) as client:
        yield made(client)


def ways(model: Model) -> set[str]:
    """How the client reaches the partitions: `unix`, `http` or, through another node, `None`."""
    cluster = model._client.cluster
    model_map = cluster._maps[model.name]
    return {str(cluster.route(model_map, i)).partition(":")[0] for i in range(model_map.spec.partitions)}


def test_values_are_the_shards_own_memory(model: Model) -> None:
    """A read-only pull maps the memory of both shards, and later pushes do not change its values."""
    before = model.pull(copy=False)
    assert ways(model) == {"unix"}
    assert not before.flat.flags.owndata
    assert before["b"].shape == (2, SIZE // 3)
    with pytest.raises(ValueError, match="read-only"):
        before["a"][0] = 1.0
    for _ in range(6):
        model.push({"a": np.full(SIZE // 3, -1.0), "b": np.full((2, SIZE // 3), -1.0)})
    assert not before.flat.any()
    after = model.pull(copy=False)
    assert (after.flat == 6.0).all()
    assert after.version == 6


def test_what_was_lent_for_a_pull_that_fails_is_given_back(model: Model) -> None:
    """If one shard has the version that a pull waits for and the other has not, the lease is given back."""
    client = model._client
    model_map = client.run(client.cluster.map_of(model.name, client.deadline(None)))
    there = frozenset(i for i, owner in enumerate(model_map.owners) if owner == model_map.owners[0])
    terms = PushTerms(PushId("c-x", 1, 1))
    grads = {"a": np.zeros(SIZE // 3), "b": np.zeros((2, SIZE // 3))}
    client.run(transfer.push(client.cluster, model.name, client.deadline(None), grads, terms, partitions=there))
    with pytest.raises(ps.ConflictError, match="version"):
        model.pull(copy=False, min_version=1, wait_s=0.05)
    assert [len(shard.ended) for shard in client.cluster.same_host._shards.values()] == [1]


def test_a_copy_is_the_callers_own(model: Model) -> None:
    """Without `copy=False` a pull returns writable arrays, new ones or those given as `out`."""
    mine = model.pull()
    mine["a"][:] = 5.0
    model.push({"a": np.full(SIZE // 3, -1.0)})
    assert model.pull(out=mine) is mine
    assert (mine["a"] == 1.0).all()
    assert not mine["b"].any()


def test_pushpull_answers_with_what_the_push_made(model: Model) -> None:
    """A `pushpull` through a slot and a lease returns the values after its push."""
    flat = np.full(SIZE, -2.0, np.float32)
    assert (model.pushpull(flat).flat == 2.0).all()
    assert (model.pushpull(flat, out=model.pull()).flat == 4.0).all()


def test_a_synchronous_gradient_keeps_its_slot(model: Model) -> None:
    """A staged gradient does not change when the same client writes its next gradient at once."""
    model.set(consistency=ps.Sync(min_workers=1))
    with model.worker() as worker:
        for i in range(4):
            worker.push({"a": np.full(SIZE // 3, -1.0 - i), "b": np.zeros((2, SIZE // 3))})
            worker.clock()
        assert (worker.pull()["a"] == 10.0).all()


def test_a_buffered_gradient_keeps_its_slot_after_a_pushpull(model: Model) -> None:
    """A buffered gradient does not change although the answer to its `pushpull` brought values as well."""
    model.set(consistency=ps.Buffered(count=4, interval_ms=60_000))
    for i in range(4):
        model.pushpull(np.full(SIZE, -1.0 - i, np.float32))
    assert (model.pull(min_version=1, wait_s=10.0).flat == 2.5).all()


def test_a_gradient_whose_commit_does_not_come_keeps_its_slot(model: Model) -> None:
    """The gradient of an `exchange` that times out stays in its slot, and the client's next push uses another slot."""
    model.set(consistency=ps.Sync(min_workers=2))
    with model.worker() as first, model.worker() as second:
        with pytest.raises(ps.Unavailable, match=second.name):
            first.exchange(np.full(SIZE, -1.0, np.float32), timeout=6.0)
        second.step(np.full(SIZE, -5.0, np.float32), timeout=10.0)
        assert (second.pull().flat == 3.0).all()


def test_partitions_that_move_while_a_commit_is_awaited_keep_their_gradients(cluster: Nodes, model: Model) -> None:
    """If partitions move between two workers' pushes, each of six commits is still the mean of both."""
    model.set(consistency=ps.Sync(min_workers=2))
    rounds, ends = 6, []

    def train(rank: int) -> None:
        with ps.connect(cluster.url) as client, client.model(model.name).worker(rank=rank) as worker:
            for i in range(rounds):
                if rank:  # the other worker waits at the shards by now
                    state = "draining" if i % 2 == 0 else "active"
                    cluster.call("PUT", "/shards/shard-1", {"state": state}, status=200)
                    if state == "draining":  # what it takes back, and when, depends on other models
                        eventually(drained, what="the move")
                values = worker.exchange(np.full(SIZE, -1.0 - i - 2.0 * rank, np.float32), timeout=60.0)
            ends.append(values.flat.copy())

    def drained() -> bool:
        return all(p["shard"] != "shard-1" for p in cluster.get(f"/models/{model.name}")["partitions"])

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()

    assert [(e.min(), e.max()) for e in ends] == [(27.0, 27.0)] * 2  # the sum of i + 2


def test_a_gradient_with_nan_is_refused_and_its_slot_serves_on(model: Model) -> None:
    """A gradient with NaN is refused, and the next push from the same slots is exact."""
    bad = np.zeros(SIZE, np.float32)
    bad[SIZE // 2] = np.nan
    with pytest.raises(ps.RequestError, match="NaN"):
        model.push(bad)
    model.push(np.full(SIZE, -1.0, np.float32))
    assert (model.pull().flat == 1.0).all()


@pytest.mark.parametrize("way", ["unix", "http"])
@pytest.mark.parametrize("consistency", [ps.Async(), ps.SSP(staleness=2), ps.Sync()], ids=["async", "ssp", "sync"])
def test_one_shard_alone_finds_the_nan(cluster: Nodes, way: str, consistency: ps.Consistency) -> None:
    """If a single shard finds the NaN, nothing changes, the parameter is named, and the worker can go on.

    With one shard the client does not look for NaN before it sends.
    """
    with ps.connect(cluster.url) as client:
        model = made(client, partitions=1, consistency=consistency)
        with model.worker() as worker:
            values = worker.pull()
            if way == "http":
                lose_sockets(model)
            assert ways(model) == {way}
            bad = np.full(SIZE, -1.0, np.float32)
            bad[-1] = np.nan
            for push in (worker.push, worker.pushpull, worker.exchange):
                with pytest.raises(ps.RequestError, match="'b' holds NaN or infinity"):
                    push(bad)
            assert (values.flat == 0.0).all()
            assert model.pull().version == 0
            assert (worker.exchange(np.full(SIZE, -1.0, np.float32)).flat == 1.0).all()
            assert (model.pull().flat == 1.0).all()


def test_a_slot_taken_back_is_replaced(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose slots were taken back gets others and applies its push once, without an error."""
    grads = np.full(SIZE, -1.0, np.float32)
    model.push(grads)
    held = model._client.cluster.same_host
    slots = [s for shard in held._shards.values() for s in shard.slots]
    assert slots
    for slot in slots:
        slot.file = "b0"
    monkeypatch.setattr(same_host, "_FRESH_S", 3600.0)
    model.push(grads)
    assert (model.pull().flat == 2.0).all()


def test_a_closed_client_answers_no_pull_by_itself(cluster: Nodes) -> None:
    """A closed client refuses a pull although it holds the current values."""
    with ps.connect(cluster.url) as client:
        model = made(client)
        model.pull()
        assert client.cluster.lease_cache._models[model.name].found
    with pytest.raises(ps.ConflictError, match="closed"):
        model.pull()


def test_a_closed_client_leaves_its_slots_to_the_next(cluster: Nodes, model: Model) -> None:
    """Clients that are opened and closed one after the other write into the same slots."""

    def slots_after_a_push() -> set[int]:
        with ps.connect(cluster.url) as client:
            client.model(model.name).push(np.full(SIZE, -1.0, np.float32))
            held = client.cluster.same_host
            found = {os.stat(s.path).st_ino for shard in held._shards.values() for s in shard.slots}
        assert not held.take_idle()
        return found

    # Slots of a client that another test killed may become free in between, and be lent first.
    found = [slots_after_a_push() for _ in range(4)]
    assert all(found)
    assert any(later == earlier for earlier, later in pairwise(found))
    assert (model.pull().flat == 4.0).all()


def test_a_closed_client_gives_back_what_nobody_reads(cluster: Nodes, model: Model) -> None:
    """Closing a client ends the leases of values that it kept at once, but not of arrays still in use."""

    async def pulls() -> ps.AsyncClient:
        async with ps.AsyncClient(cluster.url) as other:
            await other.model(model.name).pull(copy=False)
            leased = held(other)
            assert eventually(lambda: other.cluster.same_host.confirmed(leased))
        assert not other.cluster.same_host.confirmed(leased)
        return other

    def held(of: ps.Client | ps.AsyncClient) -> tuple[same_host.Leased, ...]:
        (known,) = [m.found for m in of.cluster.lease_cache._models.values()]
        assert known is not None
        return known[0].leased

    model.push(np.full(SIZE, -1.0, np.float32))
    with ps.connect(cluster.url) as client:
        values = client.model(model.name).pull(copy=False)
        read = held(client)
    with ps.connect(cluster.url) as client:
        client.model(model.name).pull()
        client.model(model.name).pull(copy=False)
        kept = held(client)
        assert eventually(lambda: client.cluster.same_host.confirmed(kept))
    assert not client.cluster.same_host.confirmed(kept)
    asyncio.run(pulls())
    assert eventually(lambda: client.cluster.same_host.confirmed(read))
    assert (values.flat == 1.0).all()


def test_the_asyncio_client_shares_memory_too(cluster: Nodes, model: Model) -> None:
    """`AsyncClient` pushes and pulls through shared memory, too."""

    async def train() -> ps.Params:
        async with ps.AsyncClient(cluster.url) as client:
            there = client.model(model.name)
            await there.push(np.full(SIZE, -3.0, np.float32))
            values: ps.Params = await there.pull(copy=False)
            return values

    values = asyncio.run(train())
    assert (values.flat == 3.0).all()
    assert not values.flat.flags.owndata


def test_a_client_killed_with_memory_in_hand_costs_nobody_anything(cluster: Nodes, model: Model) -> None:
    """After a client with slots and leases gets SIGKILL, others train on the same model exactly."""
    code = (
        "import sys, numpy as np, paramserver as ps\n"
        f"m = ps.connect({cluster.url!r}).model({model.name!r}); g = np.full({SIZE}, -1.0, np.float32)\n"
        "held = []\n"
        "while True:\n"
        "    held.append(m.pull(copy=False)); m.push(g); print('.', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    before = model.pull()
    assert (before.flat >= 3.0).all()  # its last push may have reached only one shard
    for _ in range(20):
        model.push(np.full(SIZE, -1.0, np.float32))
    assert (model.pull().flat == before.flat + 20.0).all()


def test_without_a_folder_bytes_travel(cluster: Nodes, model: Model) -> None:
    """A client that finds the shards' sockets gone works over HTTP without being told to."""
    model.push(np.full(SIZE, -1.0, np.float32))
    assert ways(model) == {"unix"}
    model_map = model._client.cluster._maps[model.name]
    sockets = [Path(a.removeprefix("unix://")) for v in model_map.addresses.values() for a in v if a.startswith("unix")]
    for path in sockets:
        path.rename(path.with_name("moved"))
    try:
        with ps.connect(cluster.url) as other:
            there = other.model(model.name)
            there.push(np.full(SIZE, -1.0, np.float32))
            assert (there.pull(copy=False).flat == 2.0).all()
            assert ways(there) == {"http"}
    finally:
        for path in sockets:
            path.with_name("moved").rename(path)


def test_a_shard_that_starts_anew_is_found_by_its_new_socket(lone: Nodes) -> None:
    """After `kill -9` the client uses the socket of the shard's next process and forgets the old one."""
    with ps.connect(lone.url) as client:
        model = client.create_model("anew", params={"w": (SIZE,)}, optimizer=ps.SGD(lr=1.0))
        model.push(np.full(SIZE, -1.0, np.float32))
        (old,) = {a for v in client.cluster._maps["anew"].addresses.values() for a in v if a.startswith("unix")}
        lone.kill("shard-0")
        lone.start_shard("shard-0")
        model.push(np.full(SIZE, -1.0, np.float32), timeout=START_S)
        assert model.pull(timeout=START_S).flat[0] >= 1.0
        eventually(lambda: model.pull() is not None and ways(model) == {"unix"})
        assert not os.path.exists(same_host._folder(old))
        assert old not in client.cluster.same_host._shards
        assert old not in client.cluster._known
        assert old not in client.transport._http2._idle.addresses()


def test_a_shard_that_stands_still_is_not_waited_for(cluster: Nodes) -> None:
    """A push to a stopped shard goes to its successor within 30 s, far below the deadline."""
    with ps.connect(cluster.url, timeout=60.0) as client:
        model = client.create_model("still", {"w": (64,)}, optimizer=ps.Sum(), partitions=2)
        model.push({"w": np.ones(64, np.float32)})
        with cluster.paused("shard-0"):
            before = time.monotonic()
            model.push({"w": np.ones(64, np.float32)})
            assert time.monotonic() - before < 30.0
        eventually(lambda: cluster.get("/map")["shards"]["shard-0"]["alive"], what="the return")
        assert set(model.pull()["w"]) <= {1.0, 2.0}


def test_what_has_not_changed_is_pulled_without_a_request(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull, copied or not, makes no request if the shards' boards show that the values held are current."""
    asked = requests_of(model, monkeypatch)
    for pushes in range(1, 4):  # more than once, if the machine stood still: a board shows no more than 3 s
        model.push(np.full(SIZE, -1.0, np.float32))
        first = model.pull(copy=False)
        asked.clear()
        again, mine = model.pull(copy=False), model.pull()
        unasked = not asked
        mine.flat[:] = 7.0
        assert (again.flat == pushes).all()
        assert (again.version, again.origin) == (first.version, first.origin)
        assert (model.pull().flat == pushes).all()
        if unasked:
            break
    assert unasked


def test_a_push_brings_what_the_next_pull_wants(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that pulls and pushes in turn only sends pushes, and still sees every version."""
    grads = np.full(SIZE, -1.0, np.float32)
    model.pull(copy=False)
    model.push(grads)
    asked = requests_of(model, monkeypatch)
    for i in range(1, 16):
        values = model.pull(copy=False)
        assert (values.flat == i).all()
        assert values.version == i
        model.push(grads, base=values)
        if i % 5 == 0:  # more than once, if the machine stood still
            if set(asked) == {"/push"}:
                break
            asked.clear()
    assert set(asked) == {"/push"}


def test_a_push_of_another_client_is_seen_by_the_next_pull(cluster: Nodes, model: Model) -> None:
    """A push that any client had acknowledged is seen by every pull that begins afterwards."""
    with ps.connect(cluster.url) as other:
        there, grads = other.model(model.name), np.full(SIZE, -1.0, np.float32)
        for i in range(12):
            (model, there)[i % 2].push(grads)
            assert (model.pull(copy=False).flat == i + 1).all()
            assert (there.pull().flat == i + 1).all()
            assert (model.pull().flat == i + 1).all()


@pytest.mark.parametrize("way", ["unix", "http"])
def test_no_pull_shows_part_of_a_large_push(lone: Nodes, way: str) -> None:
    """While two clients push to partitions that threads compute, each pull has every push whole, and the last has all.

    Over HTTP as well as through shared memory.
    """
    elements, pushes = 3_000_000, 12

    def model(client: ps.Client) -> Model:
        found = client.model(f"large-{way}")
        found.pull()
        if way == "http":
            lose_sockets(found)
        return found

    def push() -> None:
        with ps.connect(lone.url) as client:
            mine, ones = model(client), np.ones(elements, np.float32)
            for _ in range(pushes):
                mine.push(ones)
            assert ways(mine) == {way}

    with ps.connect(lone.url) as client, ThreadPoolExecutor() as pushers:
        client.create_model(f"large-{way}", params={"w": (elements,)}, optimizer=ps.Sum(), partitions=3)
        mine, seen = model(client), [0.0]
        pushing = [pushers.submit(push) for _ in range(2)]
        while not all(p.done() for p in pushing) or len(seen) < 3:
            for values in (mine.pull(copy=False), mine.pull()):
                seen.append(float(values.flat[0]))
                assert (values.flat.min(), values.flat.max()) == (seen[-1], seen[-1])
                assert values.version == seen[-1] >= seen[-2]
        for p in pushing:
            p.result()
        assert ways(mine) == {way}
        assert (mine.pull().flat == 2 * pushes).all()
        mine.delete()


def test_values_that_a_dead_shard_has_lent_are_not_the_present(lone: Nodes) -> None:
    """After `kill -9` a pull asks the new owner although the dead shard's board still shows the lease."""
    with ps.connect(lone.url) as client:
        model = client.create_model("lent", params={"w": (SIZE,)}, optimizer=ps.SGD(lr=1.0))
        model.push(np.full(SIZE, -1.0, np.float32))
        held = model.pull(copy=False)
        (known,) = [m.found for m in client.cluster.lease_cache._models.values()]
        assert known is not None
        leased = known[0].leased
        assert eventually(lambda: client.cluster.same_host.confirmed(leased))
        lone.kill("shard-0")
        assert not client.cluster.same_host.confirmed(leased)
        lone.start_shard("shard-0")
        assert model.pull(timeout=START_S).incarnation > held.incarnation
        assert (held.flat == 1.0).all()


def test_a_forked_child_leaves_its_parents_leases_alone(model: Model) -> None:
    """A forked child that drops values leased to its parent does not give the leases back."""
    model.push(np.full(SIZE, -1.0, np.float32))
    values = [model.pull(copy=False)]
    held = model._client.cluster.same_host
    child = os.fork()
    if not child:
        values.clear()
        model._client.cluster.lease_cache._models.clear()
        os._exit(sum(len(shard.ended) for shard in held._shards.values()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (values[0].flat == 1.0).all()
