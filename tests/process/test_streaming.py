"""Streamed pushes on a real cluster: they count as one push, and are sent before the last gradient is known."""

import asyncio

import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps

from .cluster import Cluster

pytestmark = pytest.mark.process

SHAPES = {"first": (3000,), "second": (50, 60), "third": (3000,)}


@pytest.fixture
def model(client: ps.Client, request: pytest.FixtureRequest) -> ps.Model:
    """A model of three parameters in seven partitions, some of which hold parts of two parameters."""
    name = str(request.node.name)[:60].replace("[", ".").replace("]", "").replace("+", "-")
    return client.create_model(name, SHAPES, optimizer=ps.Sum(), partitions=7)


def grads(value: float = 1.0) -> dict[str, np.ndarray]:
    return {n: np.full(shape, value, np.float32) for n, shape in SHAPES.items()}


def test_what_is_whole_is_applied_before_the_rest_is_there(model: ps.Model) -> None:
    """The last layer's values change before the first layer's gradient is put, and all pieces are one push."""
    with model.worker() as w:
        w.pull()
        with w.stream() as push:
            push.put("third", grads()["third"])
            eventually(lambda: model.pull("third")["third"][-1] == 1.0, what="the first piece")
            assert model.pull("first")["first"].sum() == 0.0
            for name in ("second", "first"):
                push.put(name, grads()[name])
        assert (push.result.state, push.result.version, push.result.duplicate) == ("applied", 1, False)
        assert w.push(grads()).version == 2
    assert set(model.pull().flat.tolist()) == {2.0}


def test_what_is_not_put_is_not_touched(model: ps.Model) -> None:
    """A streamed push changes only the parameters that were put, even in partitions that also hold others."""
    with model.worker() as w:
        with w.stream(weight=2.0) as push:
            push.put("second", grads()["second"])
        assert push.result.state == "applied"
        with pytest.raises(ps.RequestError, match="holds no gradients"), w.stream():
            pass
    p = model.pull()
    assert [float(p[n].sum()) for n in SHAPES] == [0.0, 6000.0, 0.0]


def test_what_a_push_refuses_is_raised_at_the_end(model: ps.Model) -> None:
    """A gradient of another shape or with NaN is raised when the block ends, and an unknown name ends the push."""
    with model.worker() as w:
        with pytest.raises(ps.RequestError, match="shape"), w.stream() as push:
            push.put("first", np.ones(7))
        with pytest.raises(ps.RequestError, match="NaN"), w.stream() as push:
            push.put("third", np.full(3000, np.nan))
        with pytest.raises(ps.NotFoundError), w.stream() as push:
            push.put("fourth", grads()["second"])
        assert push.result.state == "dropped"
        assert w.push(grads()).state == "applied"


def test_a_refused_last_piece_is_in_no_later_pushs_way(model: ps.Model) -> None:
    """A streamed push whose last piece is refused settles its push id, so that it does not block the push window.

    It is in doubt, as other pieces have been applied; the error says what is wrong.
    """
    last = grads()["first"]
    last[-1] = np.nan  # in a partition that stays incomplete, so it is sent when the block ends
    with model.worker(timeout=5.0) as w:
        with pytest.raises(ps.InDoubt, match="NaN") as met, w.stream() as push:
            push.put("first", last)
        assert met.value.members["refused"] == "non_finite"
        for _ in range(64):
            w.push({"second": grads()["second"]})
        assert w.push({"second": grads()["second"]}).state == "applied"


def test_clipping_by_norm_wants_the_whole(client: ps.Client, model: ps.Model) -> None:
    """A streamed push is refused if the optimizer clips by norm, and the message says to push the gradient whole."""
    clipped = client.create_model(model.name + ".c", {"w": (10,)}, optimizer=ps.SGD(0.1, clip_norm=1.0))
    with clipped.worker() as w, pytest.raises(ps.RequestError, match="push it whole"), w.stream():
        pass


@pytest.mark.parametrize("codec", ["fp16", "int8", "bf16+zstd"])
def test_pieces_may_be_encoded(model: ps.Model, codec: str) -> None:
    """A streamed push with a codec gives the same values as a whole push with that codec."""
    rng = np.random.default_rng(1)
    given = {n: rng.normal(size=shape).astype(np.float32) for n, shape in SHAPES.items()}
    with model.worker(codec=codec) as w:
        with w.stream() as push:
            for name in reversed(SHAPES):
                push.put(name, given[name])
        assert push.result.state == "applied"
        once = model.pull().flat.copy()
    with model.worker(codec=codec) as w:
        w.push(given)
    assert np.allclose(model.pull().flat, 2 * once, atol=2e-6)


def test_pieces_of_a_synchronous_push_commit_together(client: ps.Client, model: ps.Model) -> None:
    """The pieces of a streamed push to a synchronous model are staged, and applied together with their clock."""
    sync = client.create_model(model.name + ".s", SHAPES, optimizer=ps.SGD(1.0), consistency=ps.Sync(), partitions=7)
    with sync.worker() as w:
        w.pull()
        with w.stream() as push:
            for name in reversed(SHAPES):
                push.put(name, grads()[name])
        assert push.result.state == "staged"
        assert sync.pull().flat.sum() == 0.0
        w.clock()
        assert set(w.pull().flat.tolist()) == {-1.0}


def test_on_asyncio_it_is_the_same(shared_cluster: Cluster, model: ps.Model) -> None:
    """On asyncio, complete pieces of a streamed push are sent while its block awaits."""

    async def train() -> str:
        async with ps.AsyncClient(shared_cluster.url) as client, client.model(model.name).worker() as w:
            async with w.stream() as push:
                push.put("third", grads()["third"])
                while (await w.pull("third"))["third"][-1] != 1.0:
                    await asyncio.sleep(0.01)
                push.put("first", grads()["first"])
                push.put("second", grads()["second"])
            return push.result.state

    assert asyncio.run(train()) == "applied"
    assert set(model.pull().flat.tolist()) == {1.0}
