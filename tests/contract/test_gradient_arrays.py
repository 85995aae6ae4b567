"""Gradient arrays: a client's arrays that become memory which the shards of this machine read, without changing."""

import asyncio
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps
from paramserver.client import mapped_buffers, same_host
from paramserver.client.gradients import Gradient, Scan
from paramserver.client.model import Model
from paramserver.client.same_host import Slot
from paramserver.core.selection import Part
from paramserver.net.calls import Outcome, Request

from .machine import ON_LINUX, SIZE, lose_sockets, made, requests_of
from .processes import Nodes

pytestmark = ON_LINUX


@pytest.fixture
def client(cluster: Nodes) -> Iterator[ps.Client]:
    """A new client for each test."""
    with ps.connect(cluster.url) as connected:
        yield connected


@pytest.fixture(scope="module")
def alone(lone: Nodes) -> Iterator[ps.Client]:
    """A client of a cluster with one shard."""
    with ps.connect(lone.url) as connected:
        yield connected


@pytest.fixture(params=["one shard", "two shards"])
def either(request: pytest.FixtureRequest, alone: ps.Client, client: ps.Client) -> ps.Client:
    """A client of one shard, or of two shards."""
    return alone if request.param == "one shard" else client


def with_arrays(client: ps.Client) -> tuple[Model, ps.GradientArrays]:
    """Return a model and gradient arrays of it, all -1."""
    model = made(client)
    grads = model.gradients()
    grads.flat[:] = -1.0
    return model, grads


def shared(grads: ps.GradientArrays, access: str = "rw-s") -> float:
    """The fraction of the arrays that is mapped from shards' memory with that access."""
    start, size = grads.flat.ctypes.data, grads.flat.nbytes
    found = 0
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            if "/paramserver-" in line and access in line:  # also if the file is deleted
                low, high = (int(n, 16) for n in line.split()[0].split("-"))
                found += max(0, min(high, start + size) - max(low, start))
    return found / size


def test_from_the_second_push_on_gradients_lie_where_shards_read_them(either: ps.Client) -> None:
    """After the first push the arrays lie in slots and stay writable, and each push applies their current contents."""
    model = made(either)
    grads = model.gradients()
    assert {name: a.shape for name, a in grads.items()} == {"a": (SIZE // 3,), "b": (2, SIZE // 3)}
    assert not grads.flat.any()
    assert shared(grads) == 0.0
    total = np.zeros(SIZE, np.float32)
    for i in range(1, 6):
        grads["a"][:] = -i
        grads["b"][1] = -10.0 * i
        total -= grads.flat
        model.push(grads)
        assert shared(grads) == 1.0
    assert (grads["b"][1] == -50.0).all()
    assert (model.pull().flat == total).all()


def test_a_gradient_of_the_wrong_kind_is_copied(client: ps.Client) -> None:
    """Gradients pushed as float16, with a codec or as ranges are copied and leave the arrays private."""
    model, grads = with_arrays(client)
    model.push(grads, dtype="float16")
    model.push(grads, codec="bf16")
    model.push({"a": grads["a"][:5]}, ranges={"a": [(0, 5)]})
    assert shared(grads) == 0.0
    model.push(grads)
    values = model.pull()
    assert (values["a"][:5] == 4.0).all()
    assert (values["b"] == 3.0).all()


def test_partitions_that_end_within_a_page_are_copied(alone: ps.Client) -> None:
    """Arrays whose partitions do not end at page boundaries are copied into a slot at each push."""
    model = alone.create_model("pages", {"w": (20_001,)}, optimizer=ps.SGD(lr=1.0), partitions=8)
    grads = model.gradients()
    for i in range(1, 4):
        grads["w"][:] = -float(i)
        model.push(grads)
    assert shared(grads) == 0.0
    assert (model.pull()["w"] == 6.0).all()


def test_what_is_staged_stays_as_it_was_pushed(client: ps.Client) -> None:
    """After a push that is staged the arrays are private, and writing to them does not change the staged gradient."""
    model = made(client, consistency=ps.Sync(min_workers=1))
    with model.worker() as worker:
        grads = worker.gradients()
        for i in range(4):
            grads.flat[:] = -1.0 - i
            worker.push(grads)
            assert (grads.flat == -1.0 - i).all()
            assert shared(grads) == 0.0
            grads.flat[:] = 99.0
            worker.clock()
        assert (worker.pull().flat == 10.0).all()


def test_arrays_keep_their_contents_though_their_shard_is_done_first(
    cluster: Nodes, client: ps.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that a shard has kept serves nobody else, as its client reads on there until every shard has answered."""
    model = made(client, consistency=ps.Sync(min_workers=1))
    with model.worker() as worker, ps.connect(cluster.url) as other:
        grads = worker.gradients()
        grads.flat[:] = -1.0
        worker.exchange(grads)
        assert shared(grads) == 1.0
        ended = grads.place.push_ended

        def last(slot: Slot, parts: Sequence[Part], *, ours: bool) -> None:
            if not ours and not written:  # each shard has its part; of a deleted model they keep none
                other.model(model.name).delete()
                theirs = made(other)
                for _ in range(3):
                    written.append(theirs.push({"a": np.full(SIZE // 3, 7.0), "b": np.full((2, SIZE // 3), 7.0)}))
            ended(slot, parts, ours=ours)

        written: list[ps.Pushed] = []
        monkeypatch.setattr(grads.place, "push_ended", last)
        worker.push(grads)
        assert written
        assert (grads.flat == -1.0).all()


def test_rounds_in_one_request_share_their_gradients(client: ps.Client) -> None:
    """After `exchange` or `pushpull` the arrays lie in slots, because the shards no longer need the gradient."""
    model = made(client, consistency=ps.Sync(min_workers=1))
    with model.worker() as worker:
        grads = worker.gradients()
        for i in range(1, 4):
            grads.flat[:] = -float(i)
            values = worker.exchange(grads, copy=False)
            assert shared(grads) == 1.0
        assert (values.flat == 6.0).all()
    model = made(client)
    grads = model.gradients()
    for i in range(1, 4):
        grads.flat[:] = -float(i)
        values = model.pushpull(grads)
        assert shared(grads) == 1.0
    assert (values.flat == 6.0).all()


def test_nan_is_refused_whole_and_named(either: ps.Client) -> None:
    """A push with NaN changes nothing and names the parameter, and the corrected arrays can be pushed."""
    model = made(either)
    grads = model.gradients()
    grads.flat[:] = -1.0
    for _ in range(2):  # first copied into slots, then already there
        grads["b"][1, 7] = np.nan
        with pytest.raises(ps.RequestError, match="'b' holds NaN"):
            model.push(grads)
        assert (grads["a"] == -1.0).all()
        grads["b"][1, 7] = -1.0
        model.push(grads)
    assert (model.pull().flat == 2.0).all()


def test_a_norm_is_clipped_as_ever(client: ps.Client) -> None:
    """Clipping by norm gives the same values for gradient arrays in slots as for a plain array."""
    model = made(client, optimizer=ps.SGD(lr=1.0, clip_norm=1.0))
    plain = made(client, optimizer=ps.SGD(lr=1.0, clip_norm=1.0))
    grads = model.gradients()
    for i in range(1, 4):
        grads.flat[:] = np.linspace(-i, i, SIZE)
        plain.push(grads.flat.copy())
        model.push(grads)
    assert shared(grads) == 1.0
    assert (model.pull().flat == plain.pull().flat).all()
    assert model.pull().flat.any()


def test_a_client_goes_on_when_a_model_begins_to_clip(either: ps.Client) -> None:
    """A client that began to push before another one set `clip_norm` goes on, and its gradients are clipped."""
    model = made(either, optimizer=ps.SGD(lr=1.0))
    grads = model.gradients()
    model.push(grads)
    with ps.connect(either.url) as other:
        other.model(model.name).set(clip_norm=1.0)
    grads.flat[:] = 1.0

    def clipped() -> bool:
        before = model.pull().flat[0]
        model.push(grads)
        return bool(before - model.pull().flat[0] < 0.5)

    eventually(clipped, what="the new setting")
    before = model.pull().flat
    model.push(grads)
    np.testing.assert_allclose(before - model.pull().flat, SIZE**-0.5, rtol=1e-2)


def test_a_slot_taken_back_is_replaced(client: ps.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that its shard has taken back is replaced, whether the client or the shard notices first."""
    model, grads = with_arrays(client)
    model.push(grads)
    for found in grads.place._mapped.values():
        found.slot.file = "b0"
    model.push(grads)  # a slot that its shard has never lent
    assert shared(grads) == 1.0
    monkeypatch.setattr(same_host, "_FRESH_S", 0.0)
    asked = requests_of(model, monkeypatch)
    model.push(grads)
    assert "/slots" in asked
    assert (model.pull().flat == 3.0).all()


def test_a_push_interrupted_while_it_is_written_changes_nothing(
    client: ps.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push interrupted while it is written to its slot leaves the arrays private and unchanged."""
    model, grads = with_arrays(client)

    def half(self: Gradient, parts: Sequence[Part], body: memoryview, scan: Scan) -> None:
        body[: len(body) // 2] = bytes(len(body) // 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Gradient, "write", half)
        with pytest.raises(KeyboardInterrupt):
            model.push(grads)
    assert shared(grads) == 0.0
    assert (grads.flat == -1.0).all()
    model.push(grads)
    assert (model.pull().flat == 1.0).all()


def push_interrupted(model: Model, grads: ps.GradientArrays, monkeypatch: pytest.MonkeyPatch) -> None:
    """Push, and be interrupted while the next requests are sent."""

    def interrupted(requests: list[Request], *within: object) -> list[Outcome]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model._client.transport, "perform", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.push(grads)


def test_an_interrupted_push_leaves_its_slots(client: ps.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push interrupted while it is sent makes the arrays private, because a shard may still read the slots."""
    model, grads = with_arrays(client)
    model.push(grads)
    assert shared(grads) == 1.0
    push_interrupted(model, grads, monkeypatch)
    assert shared(grads) == 0.0
    assert (grads.flat == -1.0).all()
    model.push(grads)
    assert (model.pull().flat == 2.0).all()


def test_a_push_interrupted_while_it_asks_for_a_slot_is_over(
    client: ps.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push interrupted while it asks for a slot leaves the other shard's slot in place for the next push."""
    model, grads = with_arrays(client)
    model.push(grads)
    lying, stale = grads.place._mapped.values()
    stale.slot.used_at -= same_host._FRESH_S
    push_interrupted(model, grads, monkeypatch)
    assert not lying.pushing
    assert shared(grads) > 0.0
    model.push(grads)
    assert shared(grads) == 1.0
    assert (model.pull().flat == 2.0).all()


@pytest.mark.parametrize("clients", [1, 2])
def test_pushes_of_the_same_arrays_at_once_are_exact(cluster: Nodes, client: ps.Client, clients: int) -> None:
    """Concurrent pushes of the same arrays, by one or two clients, are exact and do not change the arrays."""
    model, grads = with_arrays(client)

    def push(mine: Model) -> None:
        for _ in range(100):
            mine.push(grads)

    with ps.connect(cluster.url) as other:
        there = [model, (client, other)[clients - 1].model(model.name)]
        threads = [threading.Thread(target=push, args=(mine,)) for mine in there]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert (grads.flat == -1.0).all()
    assert (model.pull().flat == 200.0).all()
    model.push(grads)
    assert shared(grads) == 1.0


def no_memory(patch: pytest.MonkeyPatch, after: int) -> None:
    """Make `mmap` fail with ENOMEM after so many calls."""
    mmap, left = mapped_buffers._mmap, [after]

    def scarce(*how: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOMEM, "cannot map")
        return mmap(*how)

    patch.setattr(mapped_buffers, "_mmap", scarce)


def test_a_push_is_applied_though_its_slot_cannot_take_the_arrays_place(
    client: ps.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push is applied and its arrays keep their contents even if memory for them cannot be mapped."""
    model = made(client)
    pushes = 0
    for after in range(5):
        grads = model.gradients()
        with monkeypatch.context() as patch:
            no_memory(patch, after)
            for _ in range(3):
                grads.flat[:] = -1.0
                assert model.push(grads).state == "applied"
                assert (grads.flat == -1.0).all()
                pushes += 1
        for _ in range(2):
            model.push(grads)
            pushes += 1
        assert shared(grads) == 1.0
    assert (model.pull().flat == pushes).all()


def test_arrays_that_cannot_leave_a_slot_do_not_change_what_is_in_it(
    client: ps.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays that cannot leave a slot with a staged gradient are read-only until memory can be mapped again."""
    model, grads = with_arrays(client)
    model.push(grads)
    model.set(consistency=ps.Sync(min_workers=1))
    with model.worker() as worker:
        with monkeypatch.context() as patch:
            no_memory(patch, 0)
            for _ in range(2):
                assert worker.push(grads).state == "staged"
                assert (grads.flat == -1.0).all()
                assert shared(grads, "r--s") == 1.0
                worker.clock()
        worker.push(grads)
        assert shared(grads) == 0.0
        grads.flat[:] = 99.0
        worker.clock()
        assert (worker.pull().flat == 4.0).all()


def test_a_closed_client_leaves_the_arrays_to_their_owner(cluster: Nodes, client: ps.Client) -> None:
    """When its client is closed, arrays become private and unchanged, and their slots serve the next client."""
    model = made(client)
    with ps.connect(cluster.url) as other:
        grads = other.model(model.name).gradients()
        grads.flat[:] = -1.0
        other.model(model.name).push(grads)
        lent = {os.stat(f.slot.path).st_ino for f in grads.place._mapped.values()}
    assert shared(grads) == 0.0
    assert (grads.flat == -1.0).all()
    mine = model.gradients()
    model.push(mine)
    assert {os.stat(f.slot.path).st_ino for f in mine.place._mapped.values()} == lent


def test_a_forked_child_cannot_touch_its_parents_gradients(client: ps.Client) -> None:
    """In a forked child gradient arrays are private and zero, and writing to them does not affect the parent's."""
    model, grads = with_arrays(client)
    model.push(grads)
    child = os.fork()
    if not child:
        fine = shared(grads) == 0.0 and not grads.flat.any()
        grads.flat[:] = 5.0
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shared(grads) == 1.0
    model.push(grads)
    assert (model.pull().flat == 2.0).all()


def test_arrays_for_each_step_write_into_the_same_slots(client: ps.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradient arrays created for each step reuse the slots of the previous step's arrays."""
    model = made(client)
    model.push(model.gradients())
    asked = requests_of(model, monkeypatch)
    for _ in range(20):
        grads = model.gradients()
        grads.flat[:] = -1.0
        model.push(grads)
    assert set(asked) == {"/push"}
    assert shared(grads) == 1.0
    assert (model.pull().flat == 20.0).all()


def test_a_view_keeps_the_slots_of_its_arrays(client: ps.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a view of gradient arrays exists, no other push uses their slots; a forked child sees zeros in it."""
    model, grads = with_arrays(client)
    model.push(grads)
    view = grads["b"][1, 1:]
    del grads
    others = [model.gradients() for _ in range(3)]
    for other in others:
        other.flat[:] = -5.0
        model.push(other)
    assert (view == -1.0).all()
    view[:] = 7.0
    assert all((other.flat == -5.0).all() for other in others)

    child = os.fork()
    if not child:
        os._exit(int(view.any()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (view == 7.0).all()

    del view
    asked = requests_of(model, monkeypatch)
    model.push(model.gradients())
    assert "/slots" not in asked
    assert (model.pull().flat == 16.0).all()


def test_two_sets_of_arrays_take_turns(client: ps.Client) -> None:
    """Two sets of arrays that are pushed in turn lie in slots of their own."""
    model = made(client)
    sets = [model.gradients(), model.gradients()]
    for i in range(6):
        sets[i % 2].flat[:] = -1.0 - i
        model.push(sets[i % 2])
    assert [shared(s) for s in sets] == [1.0, 1.0]
    assert (model.pull().flat == 21.0).all()


def test_the_asyncio_client_has_them_too(cluster: Nodes, client: ps.Client) -> None:
    """Models and workers of the asyncio client have gradient arrays, too."""
    model = made(client)

    async def train() -> list[float]:
        async with ps.AsyncClient(cluster.url) as other:
            there = other.model(model.name)
            async with there.worker() as worker:
                found = []
                for grads, push in ((await there.gradients(), there.push), (await worker.gradients(), worker.push)):
                    grads.flat[:] = -1.0
                    await push(grads)
                    await push(grads)
                    found.append(shared(grads))
                return found

    assert asyncio.run(train()) == [1.0, 1.0]
    assert (model.pull().flat == 4.0).all()


def test_without_shared_memory_they_are_plain_arrays(client: ps.Client) -> None:
    """Over HTTP, or too small for a slot, gradient arrays are plain arrays."""
    model = made(client)
    small = client.create_model("small", params={"w": (10,)}, optimizer=ps.SGD(lr=1.0))
    grads, few = model.gradients(), small.gradients()
    grads.flat[:], few["w"][:] = -1.0, -1.0
    for _ in range(2):
        small.push(few)
    assert shared(few) == 0.0
    assert (small.pull()["w"] == 2.0).all()
    lose_sockets(model)
    for _ in range(2):
        model.push(grads)
    assert shared(grads) == 0.0
    assert (model.pull().flat == 2.0).all()


def test_partitions_that_move_take_their_gradients_along(cluster: Nodes, client: ps.Client) -> None:
    """While one shard's partitions move to the other and back, each push of gradient arrays is applied once."""
    for m in client.models():
        client.model(m).delete()
    model = made(client)
    grads = model.gradients()
    pushes = 0

    def owners() -> set[str]:
        nonlocal pushes
        grads.flat[:] = -1.0 - pushes % 3
        model.push(grads)
        pushes += 1
        return {p["shard"] for p in cluster.get(f"/models/{model.name}")["partitions"]}

    assert owners() == {"shard-0", "shard-1"}
    cluster.call("PUT", "/shards/shard-1", {"state": "draining"}, status=200)
    eventually(lambda: owners() == {"shard-0"}, what="the move")
    cluster.call("PUT", "/shards/shard-1", {"state": "active"}, status=200)
    eventually(lambda: owners() == {"shard-0", "shard-1"}, what="the move back")
    eventually(lambda: bool(owners()) and shared(grads) == 1.0, what="slots of both")
    assert (model.pull().flat == sum(1.0 + i % 3 for i in range(pushes))).all()
