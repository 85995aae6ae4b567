"""`ParameterServerOptimizer` on a real cluster: equality with torch alone, modes, codecs, and refused input."""

import copy
import gc
import importlib.util
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps

from .cluster import Cluster, get

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch: pip install torch==2.13.0", allow_module_level=True)

import torch
from torch import nn

from paramserver.client.spec_builder import model_document
from paramserver.client.uploads import put_values
from paramserver.errors import problem
from paramserver.torch import ParameterServerOptimizer

pytestmark = pytest.mark.process
WORKERS, BATCH = 2, 8


@pytest.fixture
def client(shared_cluster: Cluster) -> Any:
    """A client of the shared cluster; limits torch to one thread."""
    torch.set_num_threads(1)
    with ps.connect(shared_cluster.url) as connected:
        yield connected


@pytest.fixture
def name(client: ps.Client, request: pytest.FixtureRequest) -> Any:
    """A model name that no other test uses; the model is deleted afterwards."""
    text = "torch-" + "".join(c if c.isalnum() else "-" for c in request.node.name)[-50:].strip("-")
    yield text
    client.model(text).delete()


def module(seed: int = 0) -> nn.Module:
    """A smooth net of 323 elements with values drawn from the seed."""
    rng = np.random.default_rng(seed)
    net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 1))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.from_numpy(rng.normal(0, 0.4, p.shape).astype(np.float32)))
    return net


def loss_of(net: nn.Module, rows: slice, step: int) -> Any:
    """Mean loss over some rows of the step's batch; a step has the same batch in every run."""
    rng = np.random.default_rng(1000 + step)
    x = rng.standard_normal((WORKERS * BATCH, 12), dtype=np.float32)
    y = np.sin(x.sum(1, keepdims=True))
    return nn.functional.mse_loss(net(torch.from_numpy(x[rows])), torch.from_numpy(y[rows]))


def together(work: Callable[[int], Any]) -> list[Any]:
    """Run `work(0)`, `work(1)`, … concurrently and return their results."""
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(work, range(WORKERS)))


def train(
    client: ps.Client, name: str, optimizer: ps.Optimizer, steps: int, scheduler: Any = None, **options: Any
) -> list[nn.Module]:
    """Train with all workers, each on its rows of the batches, and return their nets."""
    joined = threading.Barrier(WORKERS)

    def work(index: int) -> nn.Module:
        net = module(index)  # only the values of the worker that creates the model count
        with ParameterServerOptimizer(net, client.model(name), optimizer, rank=index, **options) as opt:
            rates = scheduler(opt) if scheduler else None
            joined.wait(60)
            for step in range(steps):
                opt.zero_grad()
                loss_of(net, slice(index * BATCH, (index + 1) * BATCH), step).backward()
                opt.step()
                if rates:
                    rates.step()
        return net

    client.create_model(
        name, _values(module()), optimizer=optimizer, consistency=options.get("consistency"), partitions=8
    )
    return together(work)


def _values(net: nn.Module) -> dict[str, Any]:
    return {n: p.detach().numpy().copy() for n, p in net.named_parameters()}


PAIRS: dict[str, tuple[ps.Optimizer, Any]] = {
    "sgd": (ps.SGD(0.05), lambda p: torch.optim.SGD(p, 0.05)),
    "momentum": (ps.Momentum(0.02, momentum=0.9), lambda p: torch.optim.SGD(p, 0.02, momentum=0.9)),
    "adam": (ps.Adam(lr=2e-3), lambda p: torch.optim.Adam(p, 2e-3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("optimizer", sorted(PAIRS))
def test_synchronous_workers_equal_one_process(client: ps.Client, name: str, optimizer: str, scheduled: bool) -> None:
    """100 steps of two workers with batch 8 give what torch gives with batch 16, up to float32 rounding.

    The same with a learning-rate scheduler: rank 0 changes the rate, which takes effect for all at the same clock.
    """
    ours, theirs = PAIRS[optimizer]
    schedule = (lambda o: torch.optim.lr_scheduler.StepLR(o, 30, 0.5)) if scheduled else None

    nets = train(client, name, ours, 100, schedule, consistency=ps.Sync())

    alone = module()
    opt = theirs(alone.parameters())
    rates = schedule(opt) if schedule else None
    for step in range(100):
        opt.zero_grad()
        loss_of(alone, slice(None), step).backward()
        opt.step()
        if rates:
            rates.step()
    moved = max(
        float((a - b).abs().max().detach()) for a, b in zip(alone.parameters(), module().parameters(), strict=True)
    )
    assert moved > 0.05
    for net in nets:
        for got, want in zip(net.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(got, want, rtol=1e-4, atol=2e-5), (got - want).abs().max()
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


PULLS = {"fp16": "fp16", "bf16": "bf16", "int8": "fp32"}


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "topk:0.1", "int8+zstd", "fp32+lz4"])
def test_codecs_stay_near_the_exact_training(client: ps.Client, name: str, codec: str) -> None:
    """30 synchronous steps with a codec reduce the loss about as much as exact ones, and both workers end up equal."""
    nets = train(client, name, ps.SGD(0.05), 30, consistency=ps.Sync(), codec=codec, pull_codec=PULLS.get(codec))

    exact = module()
    opt = torch.optim.SGD(exact.parameters(), 0.05)
    for step in range(30):
        opt.zero_grad()
        loss_of(exact, slice(None), step).backward()
        opt.step()
    start, end, ours = (float(loss_of(n, slice(None), 999).detach()) for n in (module(), exact, nets[0]))
    assert end < 0.9 * start
    assert abs(ours - end) < 0.25 * (start - end)
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


@pytest.mark.parametrize(("codec", "elements"), [(None, range(1, 20)), ("fp32", range(200, 324))])
def test_the_codec_is_that_of_the_model_or_worker_passed(
    client: ps.Client, name: str, codec: str | None, elements: range
) -> None:
    """Gradients are sent in the codec of the `ps.Model` or `ps.Worker` passed, unless the optimizer gets its own."""
    net = module()
    model = client.create_model(name, _values(net), optimizer=ps.SGD(0.05))

    def changed(given: Any) -> int:
        with ParameterServerOptimizer(net, given, codec=codec) as opt:
            before = _values(net)
            loss_of(net, slice(None), 0).backward()
            opt.step()
        return sum(int((value != before[n]).sum()) for n, value in _values(net).items())

    with model.worker(codec="topk:0.01") as worker:
        assert changed(worker) in elements
    assert changed(client.model(name, codec="topk:0.01")) in elements


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "ssp", "sync", "buffered"])
def test_the_example_learns_in_every_mode(client: ps.Client, mode: str) -> None:
    """Two workers with int8 reach 80 % in 120 steps of the digits example (mostly 94 %; 97 % takes 400 steps)."""
    from paramserver.examples import digits_torch

    assert digits_torch.once(client, mode, "int8", workers=2, steps=120) >= 0.8


def test_one_worker_uploads_and_the_others_take(client: ps.Client, name: str) -> None:
    """If no model exists, one of the workers creates it, and all start from that worker's values."""

    def begin(index: int) -> dict[str, Any]:
        net = module(index)
        with ParameterServerOptimizer(net, client.model(name), ps.Adam(lr=1e-3)):
            return _values(net)

    first, second = together(begin)

    assert all(np.array_equal(first[n], second[n]) for n in first)
    assert any(all(np.array_equal(first[n], v) for n, v in _values(module(i)).items()) for i in range(WORKERS))


@pytest.mark.parametrize("died", [True, False])
def test_first_values_that_another_process_has_not_sent_are_sent_or_waited_for(
    client: ps.Client, name: str, monkeypatch: pytest.MonkeyPatch, died: bool
) -> None:
    """If whoever was uploading a model's first values is gone, the next process creates it, with its own values.

    One whose token does not allow that starts from the values that come.
    """
    body, values = model_document(name, _values(module(1)), ps.SGD(0.05), None, {})
    token = client.request("POST", "/models", body)["upload_token"]
    create = client.create_model

    def meanwhile(*args: Any, **options: Any) -> Any:
        if died:
            client.model(name).delete()  # as if a minute had passed, after which the token is anybody's
            return create(*args, **options)
        until = client.deadline(None)
        client.run(put_values(client.cluster, client.run(client.cluster.map_of(name, until)), values, until, token))
        raise problem("forbidden", "the token's role is worker")

    monkeypatch.setattr(client, "create_model", meanwhile)
    net = module()
    ParameterServerOptimizer(net, client.model(name), ps.SGD(0.05)).close()

    assert all(np.array_equal(v, _values(module(0 if died else 1))[n]) for n, v in _values(net).items())


def test_its_timeout_is_that_of_all_it_asks(client: ps.Client, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout=` counts for the creation of the model and for its settings, too, whatever the client's own is."""
    monkeypatch.setattr(client, "timeout", 1e-4)
    with ParameterServerOptimizer(module(), client.model(name), ps.SGD(0.1), timeout=60.0) as opt:
        opt.param_groups[0]["lr"] = 0.2
        opt.step()
        assert get(f"{client.url}/models/{name}").json()["spec"]["optimizer"]["lr"] == 0.2


def test_what_does_not_fit_is_listed(client: ps.Client, name: str, shared_cluster: Cluster) -> None:
    """Another module, a missing model, an invalid URL and parameters without names are each refused with the reason."""
    with pytest.raises(ps.NotFoundError, match="optimizer="):
        ParameterServerOptimizer(module(), client.model(name))
    with pytest.raises(ps.NotFoundError):
        ParameterServerOptimizer(module(), client.model(name), ps.SGD(), create=False)
    ParameterServerOptimizer(module(), f"{shared_cluster.url}/models/{name}", ps.SGD(0.1)).close()

    with pytest.raises(ps.RequestError, match="does not fit") as e:
        ParameterServerOptimizer(nn.Sequential(nn.Linear(12, 17), nn.Tanh(), nn.Linear(16, 6)), client.model(name))
    assert {x["where"] for x in e.value.errors} == {"0.weight", "0.bias", "4.weight", "4.bias"}
    with pytest.raises(ps.RequestError, match="named_parameters"):
        ParameterServerOptimizer(module().parameters(), client.model(name))
    with pytest.raises(ps.RequestError, match="URL"):
        ParameterServerOptimizer(module(), f"{shared_cluster.url}/nothing")
    assert [w["alive"] for w in client.model(name).workers()] == [False]


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
def test_training_goes_on_in_a_model_that_was_created_anew(client: ps.Client, name: str, codec: str) -> None:
    """After a model is deleted and created again, training continues in the new one after the next pull.

    This holds for every codec, and for another number of partitions and another order of the parameters.
    """
    net = module()
    model = client.model(name)

    def trained() -> str:
        try:
            opt.pull()
            opt.zero_grad()
            loss_of(net, slice(None), 0).backward()
            opt.step()
        except ps.PsError as e:
            return e.code
        assert opt.pushed is not None
        return opt.pushed.state

    with ParameterServerOptimizer(net, model, ps.SGD(0.05), codec=codec) as opt:
        assert trained() == "applied"
        for partitions in (1, 5):
            model.delete()
            values = dict(reversed(_values(module(1)).items()))
            client.create_model(name, values, optimizer=ps.SGD(0.05), partitions=partitions)

            eventually(lambda: trained() == "applied", what="a step in the new model")
            assert trained() == "applied"
            pulled = model.pull()
            assert all(np.array_equal(value, pulled[n]) for n, value in _values(net).items())


def test_a_model_that_was_created_anew_for_another_module_is_refused(client: ps.Client, name: str) -> None:
    """If a model was deleted and created again for another module, a step lists every difference and pushes nothing."""
    net = module()
    model = client.model(name)
    with ParameterServerOptimizer(net, model, ps.SGD(0.05), codec="int8") as opt:
        model.delete()
        client.create_model(name, _values(nn.Linear(12, 17)), optimizer=ps.SGD(0.05))

        def said() -> Any:
            with pytest.raises(ps.PsError) as e:
                opt.step()
            return e.value.errors

        loss_of(net, slice(None), 0).backward()
        found = eventually(said, what="the differences")
    assert {x["where"] for x in found} == {"weight", "bias", *dict(module().named_parameters())}
    assert model.info()["version"] == 0


def test_parameters_without_a_gradient_stay(client: ps.Client, name: str) -> None:
    """Frozen parameters, and those without a gradient in a step, are not changed by it, even with weight decay.

    A step without any gradient reports its loss, too.
    """
    net: Any = module()
    net[0].weight.requires_grad_(False)
    before = _values(net)
    with ParameterServerOptimizer(net, client.model(name), ps.Adam(lr=0.1, weight_decay=0.1)) as opt:
        opt.step(lambda: torch.tensor(0.25))
        assert [p.value for p in opt.model.metrics("loss")] == [0.25]
        net[4].bias.grad = torch.ones(1)
        opt.step()
        assert opt.pushed is not None
        moved = {n for n, v in _values(net).items() if not np.array_equal(v, before[n])}
        assert moved == {"4.bias"}
        loss_of(net, slice(None), 0).backward()
        opt.step(lambda: torch.tensor(0.5))
        moved = {n for n, v in _values(net).items() if not np.array_equal(v, before[n])}
        assert moved == set(before) - {"0.weight"}
        assert opt.worker.clock_number == 3


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_an_unfrozen_parameter_is_reported_and_can_be_trained(
    client: ps.Client, name: str, codec: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A gradient of a parameter that was frozen at the model's creation is ignored with one warning that says why.

    The call that the warning names trains it from then on.
    """
    net: Any = module()
    net[0].weight.requires_grad_(False)
    before = _values(net)["0.weight"]
    with ParameterServerOptimizer(net, client.model(name), ps.SGD(0.1), codec=codec) as opt:
        net[0].weight.requires_grad_(True)
        for step in range(2):
            opt.zero_grad()
            loss_of(net, slice(None), step).backward()
            opt.step()
        np.testing.assert_array_equal(_values(net)["0.weight"], before)
        (warning,) = [r.getMessage() for r in caplog.records if "not trained" in r.getMessage()]
        assert "'0.weight'" in warning
        assert "trainable" in warning

        opt.model.set(params={"0.weight": {"trainable": True}})

        def moved() -> bool:
            opt.zero_grad()
            loss_of(net, slice(None), 0).backward()
            opt.step()
            return not np.array_equal(_values(net)["0.weight"], before)

        eventually(moved, what="a trained parameter")


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8", "topk:0.1"])
def test_the_default_device_of_torch_does_not_matter(client: ps.Client, name: str, codec: str) -> None:
    """Training works on the module's device under another `torch.set_default_device()`."""
    net = module()
    loss_of(net, slice(None), 0).backward()
    before = _values(net)
    with torch.device("meta"), ParameterServerOptimizer(net, client.model(name), ps.SGD(0.05), codec=codec) as opt:
        opt.step()
    assert not np.array_equal(_values(net)["0.weight"], before["0.weight"])


def test_a_gradient_that_torch_holds_negated_is_pushed(client: ps.Client, name: str) -> None:
    """The imaginary part of a conjugate, which torch negates only when it is read, is a gradient like any other."""
    net: Any = nn.Linear(2, 1)
    before = _values(net)["weight"]
    with ParameterServerOptimizer(net, client.model(name), ps.SGD(1.0)) as opt:
        net.weight.grad = torch.tensor([[1 + 2j, 3 + 4j]]).conj().imag
        opt.step()
    np.testing.assert_array_equal(_values(net)["weight"], before + np.array([[2, 4]], np.float32))


def test_a_gradient_in_float64_beyond_float32_is_refused_as_that(client: ps.Client, name: str) -> None:
    """A float64 gradient that float32 cannot hold is refused as too large, one with infinity as not finite."""
    net = nn.Linear(2, 1, bias=False).double()
    with ParameterServerOptimizer(net, client.model(name), ps.SGD(0.05)) as opt:
        net.weight.grad = torch.tensor([[1e39, 1.0]], dtype=torch.float64)
        with pytest.raises(ps.RequestError, match="'weight' holds numbers that are too large for float32"):
            opt.step()
        net.weight.grad = torch.tensor([[torch.inf, 1.0]], dtype=torch.float64)
        with pytest.raises(ps.RequestError, match="'weight' holds NaN or infinity"):
            opt.step()


@pytest.mark.parametrize("code", ["unavailable", "version_not_reached"])
def test_a_step_whose_values_do_not_come_says_that_it_is_done(
    client: ps.Client, name: str, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """If the parameters cannot be pulled after the push, the error says that the gradient counts; a pull goes on."""

    def unavailable(*_: Any, **__: Any) -> Any:
        raise problem(code, "not yet")

    net = module()
    with ParameterServerOptimizer(net, client.model(name), ps.SGD(0.05)) as opt:
        before = _values(net)
        loss_of(net, slice(None), 0).backward()
        with monkeypatch.context() as patch:
            patch.setattr(opt.worker, "pull", unavailable)
            with pytest.raises(ps.Unavailable, match=r"opt\.pull\(\)"):
                opt.step()
        assert client.model(name).pull().version == 1
        opt.pull()
        assert not np.array_equal(_values(net)["0.weight"], before["0.weight"])


@pytest.mark.parametrize("field", ["weight_decay", "betas", "momentum"])
def test_settings_in_the_parameter_group_are_refused(client: ps.Client, name: str, field: str) -> None:
    """What is written into the parameter group besides the rate would be ignored: a step refuses it, and says why."""
    with ParameterServerOptimizer(module(), client.model(name), ps.AdamW()) as opt:
        opt.param_groups[0][field] = 0.5

        with pytest.raises(ps.RequestError, match=field) as e:
            opt.step()

        assert "opt.model.set(" in e.value.hint
        assert opt.worker.clock_number == 0
        del opt.param_groups[0][field]
        opt.step()


def test_a_state_of_another_optimizer_is_refused(client: ps.Client, name: str) -> None:
    """The moments of a torch.optim.Adam cannot be loaded, because nothing would use them; the rate stays."""
    net = module()
    adam = torch.optim.Adam(net.parameters(), 0.5)
    loss_of(net, slice(None), 0).backward()
    adam.step()
    with ParameterServerOptimizer(net, client.model(name), ps.Adam(lr=0.25)) as opt:
        for state in (adam.state_dict(), torch.optim.SGD(net.parameters(), 0.5).state_dict()):
            with pytest.raises(ps.RequestError, match="another optimizer"):
                opt.load_state_dict(state)
        assert (opt.param_groups[0]["lr"], len(opt.state)) == (0.25, 0)


def test_it_is_an_optimizer_of_torch(client: ps.Client, name: str) -> None:
    """zero_grad, closures, state_dict and bfloat16 modules work as in torch; a second parameter group is refused."""
    net = module().to(torch.bfloat16)
    with ParameterServerOptimizer(net, client.model(name), ps.SGD(0.05), codec="bf16") as opt:
        assert isinstance(opt, torch.optim.Optimizer)
        assert client.model(name).info()["spec"]["params"]["0.weight"]["dtype"] == "bfloat16"

        def closure() -> Any:
            opt.zero_grad()
            loss = (net(torch.ones(4, 12, dtype=torch.bfloat16)) - 2).square().mean()
            loss.backward()
            return loss

        first = float(opt.step(closure).detach())
        assert float(opt.step(closure).detach()) < first
        state = opt.state_dict()
        state["param_groups"][0]["lr"] = 0.025
        opt.load_state_dict(state)
        opt.step(closure)
        assert client.model(name).info()["spec"]["optimizer"]["lr"] == 0.025
        with pytest.raises(ps.RequestError, match="single parameter group"):
            opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def test_settings_that_an_existing_model_does_not_take_are_reported(
    client: ps.Client, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Another optimizer or mode than the existing model's is named in the log; its own, or another rate, is not.

    What could not be an optimizer at all is refused, as for a new model.
    """

    def warned(optimizer: Any, **options: Any) -> list[str]:
        caplog.clear()
        ParameterServerOptimizer(module(), client.model(name), optimizer, **options).close()
        return [r.getMessage() for r in caplog.records if r.getMessage().startswith("model.differs")]

    assert not warned(ps.Momentum(0.05), consistency=ps.Sync())
    assert not warned(ps.Momentum(0.1), consistency="sync")
    assert not warned(None)
    (said,) = warned(ps.Momentum(0.05, weight_decay=0.1))
    assert "optimizer.weight_decay is 0.0, not 0.1;" in said
    (said,) = warned(ps.Adam(lr=1e-3), consistency=ps.SSP(3), create=False)
    assert "optimizer.name is 'momentum', not 'adam'; consistency.mode is 'sync', not 'ssp';" in said
    with pytest.raises(ps.RequestError, match="Adam"):
        ParameterServerOptimizer(module(), client.model(name), torch.optim.Adam(module().parameters()))


def test_a_graph_from_before_a_step_is_refused_after_it(client: ps.Client, name: str) -> None:
    """A step tells torch that it has changed the parameters: a graph that needs the old values raises, as in torch."""
    net = module()
    with ParameterServerOptimizer(net, client.model(name), ps.SGD(0.05)) as opt:
        loss = loss_of(net, slice(None), 0)
        loss.backward(retain_graph=True)
        opt.step()

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied_or_pickled(client: ps.Client, name: str, copied: Callable[[Any], Any]) -> None:
    """Copying or pickling an optimizer says at once what to do instead; a copy would not be a member of the cluster."""
    with (
        ParameterServerOptimizer(module(), client.model(name), ps.SGD(0.05)) as opt,
        pytest.raises(TypeError, match="state_dict"),
    ):
        copied(opt)


def test_an_optimizer_that_was_not_closed_leaves_whoever_collects_it(
    client: ps.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer that is garbage leaves the cluster, though its own heartbeat collects it, and holds a lock."""
    kept = [ParameterServerOptimizer(module(), client.model(name), ps.SGD(0.05))]
    worker = kept[0].worker
    heartbeats, beat = worker._thread, worker._beat
    assert heartbeats is not None

    def collecting() -> Any:
        with worker._session._lock:
            kept.clear()
            gc.collect()
        return beat()

    monkeypatch.setattr(worker, "_beat", collecting)
    heartbeats.join(20.0)

    assert not heartbeats.is_alive()
    eventually(lambda: not any(w["alive"] for w in client.model(name).workers()), what="its leaving")
