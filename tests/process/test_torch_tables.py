"""`ParameterServerOptimizer` and tables of `nn.Embedding(…, sparse=True)`: gradients and values by rows."""

import copy
import gc
import importlib.util
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest

import paramserver as ps

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch: pip install torch==2.13.0", allow_module_level=True)

import torch
from torch import nn

from paramserver.torch import ParameterServerOptimizer

pytestmark = pytest.mark.process
ROWS, WIDTH, BATCH = 60, 4, 8


class Net(nn.Module):  # type: ignore[misc, unused-ignore]
    """A table, a bag of another one, and a layer on both."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        rng = np.random.default_rng(7)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.normal(0, 0.5, shape).astype(np.float32))

        self.users = nn.Embedding(ROWS, WIDTH, sparse=sparse, _weight=drawn(ROWS, WIDTH))
        self.words = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse, _weight=drawn(ROWS, WIDTH))
        self.last = nn.Linear(2 * WIDTH, 1)
        with torch.no_grad():
            self.last.weight.copy_(drawn(1, 2 * WIDTH))
            self.last.bias.zero_()

    def forward(self, users: Any, words: Any) -> Any:
        """Return a score for each user and bag of words."""
        return self.last(torch.cat([self.users(users), self.words(input=words)], 1))


def loss_of(net: nn.Module, step: int, part: slice = slice(None)) -> Any:
    """Mean loss of part of the step's batch of 2 * BATCH, in which rows come more than once."""
    rng = np.random.default_rng(100 + step)
    users, words = rng.integers(0, ROWS // 2, 2 * BATCH), rng.integers(0, ROWS // 2, (2 * BATCH, 3))
    wanted = torch.from_numpy(np.sin(users).astype(np.float32))[part, None]
    return nn.functional.mse_loss(net(torch.from_numpy(users)[part], torch.from_numpy(words)[part]), wanted)


def trained(net: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 20) -> nn.Module:
    """Train on whole batches."""
    for step in range(steps):
        net.zero_grad()
        loss_of(net, step).backward()
        for opt in optimizers:
            opt.step()
    return net


def assert_alike(net: nn.Module, wanted: nn.Module) -> None:
    for (name, got), want in zip(net.named_parameters(), wanted.parameters(), strict=True):
        np.testing.assert_allclose(got.detach(), want.detach(), rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(("lazy", "codec"), [(False, "fp32"), (True, "fp32+zstd")], ids=["whole", "lazy"])
def test_sparse_gradients_train_rows(client: ps.Client, name: str, lazy: bool, codec: str) -> None:
    """Training with sparse gradients is that of torch's optimizer for these: other rows keep values and moments."""
    net = Net()
    options: dict[str, Any] = {"codec": codec, "lazy_tables": lazy, "partitions": 1}
    with ParameterServerOptimizer(net, client.model(name), ps.Adam(lr=0.02, eps=1e-12), **options) as opt:
        trained(net, opt)
        opt.pull()

    alone = Net()
    tables = [alone.users.weight, alone.words.weight]
    trained(
        alone,
        torch.optim.SparseAdam(tables, 0.02, eps=1e-12),
        torch.optim.Adam(alone.last.parameters(), 0.02, eps=1e-12),
    )
    assert_alike(net, alone)
    assert torch.equal(net.users.weight[ROWS // 2 :], Net().users.weight[ROWS // 2 :])


def test_synchronous_workers_with_lazy_tables_equal_one_process(client: ps.Client, name: str) -> None:
    """Two workers that pull the rows that they look up train as one process does with both batches."""
    joined = Barrier(2)

    def work(index: int) -> nn.Module:
        net = Net()
        options: dict[str, Any] = {"consistency": ps.Sync(), "lazy_tables": True, "partitions": 4}
        with ParameterServerOptimizer(net, client.model(name), ps.SGD(0.1), rank=index, **options) as opt:
            joined.wait(60)
            for step in range(20):
                opt.zero_grad()
                loss_of(net, step, slice(index * BATCH, (index + 1) * BATCH)).backward()
                opt.step()
            opt.pull()
        return net

    with ThreadPoolExecutor(2) as pool:
        nets = list(pool.map(work, range(2)))

    alone = Net(sparse=False)
    trained(alone, torch.optim.SGD(alone.parameters(), 0.1))
    for net in nets:
        assert_alike(net, alone)
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


def test_lazy_tables_are_pulled_by_the_rows_looked_up(client: ps.Client, name: str) -> None:
    """A forward pass gets the current values of the rows that it looks up; `pull()` gets all; no step gets others.

    After the optimizer is closed or collected, a forward pass asks the cluster no more.
    """
    net, model = Net(), client.model(name)
    with ParameterServerOptimizer(net, model, ps.SGD(0.1), lazy_tables=True) as opt:
        model.assign({"users.weight": np.full((ROWS, WIDTH), 3.0, np.float32)})
        loss_of(net, 0).backward()
        opt.step()
        assert not (net.users.weight[ROWS // 2 :] == 3.0).any()

        found = net.users(torch.tensor([[ROWS - 1, 40], [40, 40]]))
        assert (found == 3.0).all()
        assert (net.users.weight[[ROWS - 1, 40]] == 3.0).all()
        assert not (net.users.weight[41 : ROWS - 1] == 3.0).any()
        assert net.users(torch.zeros(0, dtype=torch.int64)).shape == (0, WIDTH)

        opt.pull()
        assert (net.users.weight[ROWS // 2 :] == 3.0).all()
        model.assign({"users.weight": np.full((ROWS, WIDTH), 4.0, np.float32)})
    assert (net.users(torch.tensor([50])) == 3.0).all()

    opt = ParameterServerOptimizer(net, model, lazy_tables=True)
    left = weakref.ref(opt)
    del opt
    gc.collect()
    assert left() is None
    model.assign({"users.weight": np.full((ROWS, WIDTH), 5.0, np.float32)})
    assert (net.users(torch.tensor([50])) == 4.0).all()


@pytest.mark.parametrize("kind", ["restored", "replaced"])
@pytest.mark.parametrize("lazy", [False, True], ids=["whole", "lazy"])
def test_gradients_of_values_that_are_obsolete_are_dropped(client: ps.Client, lazy: bool, kind: str) -> None:
    """A gradient of values from before a restore, or of a model that was replaced, is dropped; the next one counts.

    What a look-up pulls after it does not make those of the layers valid.
    """
    net, model = Net(), client.model(f"obsolete-{kind}-{lazy}")
    with ParameterServerOptimizer(net, model, ps.SGD(0.1), lazy_tables=lazy, consistency=ps.Sync()) as opt:
        trained(net, opt, steps=1)
        model.save("k")
        trained(net, opt, steps=2)
        if kind == "restored":
            model.restore("k")
        else:
            values = {n: p.detach().numpy() for n, p in Net().named_parameters()}
            model.delete()
            client.create_model(model.name, values, optimizer=ps.SGD(0.1), consistency=ps.Sync())
        states = list[str]()
        for _ in range(2):
            trained(net, opt, steps=1)
            assert opt.pushed is not None
            states.append(opt.pushed.state)
        assert states == ["dropped", "staged"]


def test_rows_are_pulled_once_in_a_step(client: ps.Client, name: str) -> None:
    """What several forward passes of one step look up has one value in all; without gradients it is the current one."""
    net, model, ids = Net(), client.model(name), torch.tensor([[1, 2]], dtype=torch.int32)
    with ParameterServerOptimizer(net, model, ps.SGD(0.1), lazy_tables=True) as opt:
        first = net.users(ids).detach().clone()
        model.assign({"users.weight": np.full((ROWS, WIDTH), 3.0, np.float32)})
        assert torch.equal(net.users(ids), first)
        with torch.no_grad():
            assert (net.users(ids) == 3.0).all()
        net.users(ids).sum().backward()
        opt.step()
        net.words(ids)
        assert torch.allclose(net.users(ids), torch.tensor(2.9))


def test_rows_that_were_not_pulled_have_no_gradient(client: ps.Client, name: str) -> None:
    """A gradient of a row that no announced look-up has pulled is refused: it was computed from an old value.

    That of a kept gradient is, too, and of a table that a replica looked up.
    """
    net = Net()
    with ParameterServerOptimizer(net, client.model(name), ps.SGD(0.1), lazy_tables=True) as opt:
        nn.functional.embedding(torch.tensor([5]), net.users.weight, sparse=True).sum().backward()
        with pytest.raises(ps.RequestError, match=r"row 5 of 'users\.weight'") as e:
            opt.step()
        assert "zero_grad" in e.value.hint
        assert opt.worker.clock_number == 0
        net.users(torch.tensor([5]))
        opt.step()
        with pytest.raises(ps.RequestError, match=r"row 5 of 'users\.weight'"):
            opt.step()


def test_a_copy_of_the_module_asks_nobody(client: ps.Client, name: str) -> None:
    """A deep copy, and what is unpickled, look up their own rows, also after the optimizer is closed."""
    net, model, ids = Net(), client.model(name), torch.tensor([1])
    with ParameterServerOptimizer(net, model, ps.SGD(0.1), lazy_tables=True):
        model.assign({"users.weight": np.full((ROWS, WIDTH), 3.0, np.float32)})
        copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
        for made in copies:
            assert torch.equal(made.users(ids), Net().users(ids))
        assert (net.users(ids) == 3.0).all()
    for made in copies:
        assert torch.equal(made.users(ids), Net().users(ids))


def test_a_module_of_lazy_tables_alone_is_trained(client: ps.Client, name: str) -> None:
    """A module that is nothing but a table needs no other parameters, and a batch without a row changes nothing."""
    net = nn.Embedding(ROWS, WIDTH, sparse=True)
    with ParameterServerOptimizer(net, client.model(name), ps.SGD(0.5), lazy_tables=True) as opt:
        before = net.weight.detach().clone()
        net(torch.zeros(0, dtype=torch.int64)).sum().backward()
        opt.step()
        opt.zero_grad()
        net(torch.tensor([3, 3])).sum().backward()
        opt.step()
        opt.pull()
        moved = (before - net.weight).detach()
        assert opt.worker.clock_number == 2
    assert torch.allclose(moved[3], torch.ones(WIDTH))
    assert moved.count_nonzero() == WIDTH


def test_a_table_that_is_used_for_more_than_lookups(client: ps.Client, name: str) -> None:
    """A table that another layer shares is pulled whole; a lazy one with a dense gradient is refused by name."""
    net: Any = nn.ModuleDict({"in": nn.Embedding(6, 2, sparse=True), "out": nn.Linear(2, 6, bias=False)})
    net["out"].weight = net["in"].weight
    with pytest.raises(ps.RequestError, match="no sparse embedding"):
        ParameterServerOptimizer(net, client.model(name), ps.SGD(0.1), lazy_tables=True)
    with pytest.raises(ps.RequestError, match="no sparse embedding"):
        ParameterServerOptimizer(dict(net.named_parameters()), client.model(name), ps.SGD(0.1), lazy_tables=True)

    net = Net()
    with ParameterServerOptimizer(net, client.model(f"{name}-2"), ps.SGD(0.1), lazy_tables=True) as opt:
        (loss_of(net, 0) + net.users.weight.square().sum()).backward()
        with pytest.raises(ps.RequestError, match=r"'users\.weight'.*dense") as e:
            opt.step()
        assert "lazy_tables=False" in e.value.hint
        assert opt.worker.clock_number == 0


@pytest.mark.parametrize("codec", ["int8", "topk:0.1"])
def test_sparse_gradients_are_refused_with_a_codec_of_partitions(client: ps.Client, name: str, codec: str) -> None:
    """With a codec that takes whole partitions, they are refused with remedies, before anything is sent.

    So are lazy tables at once. Made dense, the gradients are pushed.
    """
    net, model = Net(), client.model(name + codec[:3])
    with pytest.raises(ps.RequestError, match="lazy_tables"):
        ParameterServerOptimizer(net, model, ps.SGD(0.05), codec=codec, lazy_tables=True)
    with ParameterServerOptimizer(net, model, ps.SGD(0.05), codec=codec) as opt:
        loss_of(net, 0).backward()
        opt.param_groups[0]["lr"] = 0.5
        with pytest.raises(ps.RequestError, match=r"'users\.weight'") as e:
            opt.step()
        assert e.value.code == "invalid_encoding"
        assert "sparse=False" in e.value.hint
        said = model.info()
        assert (said["version"], said["spec"]["optimizer"]["lr"], opt.worker.clock_number) == (0, 0.05, 0)
        for table in (net.users, net.words):
            table.weight.grad = table.weight.grad.to_dense()
        opt.step()
        assert opt.pushed is not None
        assert opt.pushed.state == "applied"


def test_gradients_that_are_sparse_in_another_way_are_refused(client: ps.Client, name: str) -> None:
    """A gradient whose elements are sparse, not its rows, is refused by name before anything is sent."""
    net = nn.Linear(3, 2)
    with ParameterServerOptimizer(net, client.model(name), ps.SGD(0.05)) as opt:
        net.weight.grad = torch.ones(2, 3).to_sparse()
        net.bias.grad = torch.ones(2)
        with pytest.raises(ps.RequestError, match="'weight'") as e:
            opt.step()
        assert e.value.code == "invalid_dtype"
        assert ".to_dense()" in e.value.hint
        assert client.model(name).info()["version"] == 0
