"""A synchronous push that reached only some shards, or may have: it counts on all partitions or on none."""

from collections.abc import Callable

import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps

from .processes import Nodes, unique

pytestmark = pytest.mark.process

SIZE = 1000


def grads(value: float) -> dict[str, object]:
    return {"w": np.full(SIZE, value, np.float32)}


def whole(w: ps.Worker) -> None:
    with pytest.raises(ps.InDoubt):
        w.push(grads(100.0), timeout=0.5)


def in_pieces(w: ps.Worker) -> None:
    with pytest.raises(ps.InDoubt), w.stream(timeout=0.5) as push:
        push.put("w", grads(100.0)["w"])


def by_push(w: ps.Worker) -> None:
    w.push(grads(1.0))
    w.clock()


def by_step(w: ps.Worker) -> None:
    w.step(grads(1.0))


def by_exchange(w: ps.Worker) -> None:
    w.exchange(grads(1.0))


def by_clock(w: ps.Worker) -> None:
    assert w.clock() == 1, "the iteration whose push is gone begins anew"
    w.exchange(grads(1.0))


@pytest.mark.parametrize("go_on", [by_push, by_step, by_exchange, by_clock])
@pytest.mark.parametrize("pushed", [whole, in_pieces])
def test_what_only_some_shards_have_staged_is_in_no_commit(
    cluster: Nodes, go_on: Callable[[ps.Worker], None], pushed: Callable[[ps.Worker], None]
) -> None:
    """A push that only some shards have staged is in no commit, however its worker continues."""
    name = unique("m")
    with ps.connect(cluster.url, timeout=20.0) as client:
        client.create_model(name, {"w": np.zeros(SIZE)}, optimizer=ps.Sum(), consistency=ps.Sync(), partitions=4)
        with client.model(name).worker() as w:
            w.exchange(grads(1.0))
            with cluster.paused("shard-1"):
                pushed(w)
            go_on(w)
            values = w.pull()
            assert values.version == 2
            assert np.unique(values["w"]).tolist() == [2.0]


def test_a_block_that_fails_takes_back_what_it_has_sent(cluster: Nodes) -> None:
    """If the block of a stream raises after a bucket was staged, the next commit contains nothing of that push."""
    with ps.connect(cluster.url) as client:
        spec = {"a": np.zeros(SIZE), "b": np.zeros(SIZE)}
        model = client.create_model(unique("m"), spec, optimizer=ps.Sum(), consistency=ps.Sync(), partitions=2)
        with model.worker() as w:
            push = w.stream()
            push.__enter__()
            push.put("a", np.full(SIZE, 100.0, np.float32))
            eventually(lambda: push._stream._done, what="a bucket that is there")
            push.__exit__(ZeroDivisionError)
            values = w.exchange({"a": np.ones(SIZE, np.float32), "b": np.ones(SIZE, np.float32)})
            assert np.unique(values.flat).tolist() == [1.0]
