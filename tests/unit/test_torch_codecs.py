"""The codecs on tensors and the flat buffers of gradients give the same bytes as without torch."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paramserver.client.cluster import ModelMap
from paramserver.client.encoding import Draft, Encoded, Encoding, Feedback, ready
from paramserver.client.gradient_arrays import GradientArrays
from paramserver.client.same_host import SameHost
from paramserver.client.values import sendable
from paramserver.codecs.codec import Codec
from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
from paramserver.errors import InDoubt, PsError, RequestError, Unavailable
from paramserver.net.calls import Deadline
from paramserver.types import F32

from .sharding import A, drive, refusal
from .test_error_feedback import Sender

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch: pip install torch==2.13.0", allow_module_level=True)

import torch

from paramserver.torch import ParameterServerOptimizer, buffers, device_codecs, fitting, tables

GOLDEN = Path(__file__).parents[1] / "golden" / "codecs" / "codecs.npz"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]
SHAPES = {"w": (40, 30), "b": (7,), "deep.v": (300,)}


def model_map(owners: tuple[str, ...] = ("a", "b", "a", "b"), prefix: str = "") -> ModelMap:
    """Return the map of a model of four partitions with these owners, and this prefix of its parameters' names."""
    params = {prefix + n: {"shape": s} for n, s in SHAPES.items()}
    spec = ModelSpec.parse({"name": "m", "params": params, "partitions": 4})
    return ModelMap("m", 1, 0, 1, spec, Layout(spec), owners, {}, {})


def gradients(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s, dtype=np.float32) for n, s in SHAPES.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_are_the_golden_ones(device: str) -> None:
    """Three gradients with error feedback give the stored bytes and residuals on every device."""
    stored, size, padded = np.load(GOLDEN), 1000, 1024
    residual, new_residual = torch.zeros(padded, device=device), torch.zeros(padded, device=device)
    residual_k, new_residual_k = torch.zeros(size, device=device), torch.zeros(size, device=device)
    for i in range(3):
        values = torch.zeros(padded, device=device)
        values[:size] = torch.from_numpy(stored[f"gradient.{i}"])

        scales, q, _ = device_codecs.int8_blocks(values, residual, new_residual)
        data, _ = device_codecs.topk(values[:size].clone(), residual_k, new_residual_k, 0.05)

        int8 = torch.cat((scales.view(torch.uint8), q[:size].view(torch.uint8)))
        assert int8.cpu().numpy().tobytes() == stored[f"int8.{i}"].tobytes()
        assert data.cpu().numpy().tobytes() == stored[f"topk:0.05.{i}"].tobytes()
        residual, new_residual, residual_k, new_residual_k = new_residual, residual, new_residual_k, residual_k
    assert residual[:size].cpu().numpy().tobytes() == stored["int8.left"].tobytes()
    assert residual_k.cpu().numpy().tobytes() == stored["topk:0.05.left"].tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("text", ["fp32", "fp16", "bf16", "int8", "topk:0.1", "int8+zstd", "bf16+lz4"])
def test_buffers_send_what_the_plain_client_sends(text: str, device: str) -> None:
    """Every partition has the plain client's bytes over several steps, after a failed push and after moves."""
    codec, memory = Codec.parse(text), Feedback()
    model = model_map()
    made = buffers.GradientBuffers(model, codec, torch.device(device))
    for step in range(5):
        grads = gradients(step)
        if step == 3:
            model = model_map(("a", "a", "c", "b"))
        made.arrange(model)

        ours = made.encode({n: torch.from_numpy(g).to(device) for n, g in grads.items()})
        draft = Draft(memory)
        theirs = ready(model.layout, 1, grads, Encoding(codec), draft)

        for part in theirs.selection.parts:
            if isinstance(theirs, Encoded):
                want = theirs.parts[part.partition][0].tobytes()
            else:
                want = _written(theirs, part)
            assert ours.parts[part.partition][0].tobytes() == want, (step, part.partition)
        if isinstance(theirs, Encoded):
            assert ours.norm == pytest.approx(theirs.norm, rel=1e-6)
        if step == 1:
            draft.give_back()
        else:
            made.keep(ours.parts)
            draft.keep()


def _written(gradient: Any, part: Any) -> bytes:
    from paramserver.client.gradients import Scan

    out = np.empty(gradient.body_bytes([part]), np.uint8)
    gradient.write([part], out.data, Scan())
    return out.tobytes()


def left_out(made: buffers.GradientBuffers) -> list[Any]:
    """Return the residuals of a lossy codec, by partition."""
    return [made._shard_of[partition].residual(partition).cpu().clone() for partition in sorted(made._shard_of)]


class TorchSender(Sender):
    """A `Sender` whose gradients are encoded on their device."""

    def __init__(self, mode: str, codec: Codec, device: str) -> None:
        super().__init__(mode, codec)
        model = drive(self.cluster.map_of("m", Deadline.after(5, self.now)), self.shards, self.now)
        self.device = torch.device(device)
        self.made = buffers.GradientBuffers(model, codec, self.device)

    def content(self, gradient: F32) -> tuple[Any, Codec | None]:
        """Return the encoded gradient of both parameters."""
        flat = torch.from_numpy(gradient).to(self.device)
        return self.made.encode({"w": flat[:50].view(10, 5), "b": flat[50:]}), None

    def left(self) -> Any:
        """Return the residual of each element."""
        return np.concatenate([array.numpy() for array in left_out(self.made)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("text", ["int8", "topk:0.1"])
@pytest.mark.parametrize("way", ["push", "exchange"])
@pytest.mark.parametrize(("outcome", "error"), [("fenced", InDoubt), ("unavailable", Unavailable)])
def test_a_push_that_one_shard_alone_takes_is_sent_once_there(
    way: str, outcome: str, error: type[PsError], text: str, device: str
) -> None:
    """Residuals carried by a push are sent again only to the shards that did not accept it, with the next push."""
    sender = TorchSender("async", Codec.parse(text), device)
    there = np.repeat([True, False, True, False], np.diff(sender.shards.layout.bounds))
    sender.push(0, way)
    sender.shards.says = lambda request: request.to != A and refusal(outcome)
    with pytest.raises(error):
        sender.push(1, way, counts=there)
    sender.check()
    sender.shards.says = lambda _: False
    sender.push(2, way)

    sender.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("text", ["int8", "topk:0.1"])
def test_a_shard_may_take_a_part_of_what_it_owns(text: str, device: str) -> None:
    """When a shard accepts some of its partitions, only their residuals change, although all share one buffer."""
    made = buffers.GradientBuffers(model_map(("a",) * 4), Codec.parse(text), torch.device(device))
    for seed in range(2):
        made.encode({n: torch.from_numpy(g).to(device) for n, g in gradients(seed).items()})
        made.keep(range(4))
    before = left_out(made)
    made.encode({n: torch.from_numpy(g).to(device) for n, g in gradients(2).items()})

    made.keep([1])
    made.keep([1, 2])

    after = left_out(made)
    assert [torch.equal(a, b) for a, b in zip(after, before, strict=True)] == [True, False, False, True]


@pytest.mark.parametrize("text", ["int8", "topk:0.1"])
def test_a_push_that_was_too_late_leaves_the_memory_as_it_was(text: str) -> None:
    """A late push is not applied and leaves the residuals as they were, so the next push carries them."""
    sender = TorchSender("sync", Codec.parse(text), "cpu")
    sender.push(0)
    sender.shards.says = lambda request: request.to == A
    before = sender.shards.arrived.copy()
    assert sender.push(1, counts=False).late
    sender.shards.arrived = before  # the other shard drops its staged part at the commit
    sender.shards.says = lambda _: False
    sender.push(2)

    sender.check()


@pytest.mark.parametrize("text", ["fp16", "int8", "topk:0.1"])
def test_a_model_that_was_created_anew_is_encoded_for(text: str) -> None:
    """Residuals and layout of a deleted model are not used for the one created in its place."""
    codec, cpu = Codec.parse(text), torch.device("cpu")
    spec = ModelSpec.parse({"name": "m", "params": {n: {"shape": s} for n, s in SHAPES.items()}, "partitions": 2})
    anew = ModelMap("m", 3, 0, 1, spec, Layout(spec), ("a", "b"), {}, {})
    made = buffers.GradientBuffers(model_map(), codec, cpu)
    grads = {n: torch.from_numpy(g) for n, g in gradients(0).items()}
    for model in (replace(model_map(), generation=2), anew, replace(model_map(), generation=4)):
        made.encode(grads)
        made.keep(range(4))
        made.arrange(model)

        ours, fresh = made.encode(grads), buffers.GradientBuffers(model, codec, cpu).encode(grads)

        assert ours.generation == model.generation
        assert [p.tobytes() for p, _ in ours.parts.values()] == [p.tobytes() for p, _ in fresh.parts.values()]


def test_on_the_cpu_gradients_lie_where_they_are_pushed_from() -> None:
    """On the CPU gradients of any dtype are copied into the push buffer, where a missing one counts as zero."""
    arrays = GradientArrays(model_map().layout, SameHost())
    made = buffers.HostGradients(arrays)
    first = {n: torch.from_numpy(g) for n, g in gradients(0).items()}
    assert made.encode(first) is arrays
    assert np.array_equal(arrays.flat, np.concatenate([g.numpy().ravel() for g in first.values()]))
    half = first["w"].half()
    made.encode({"w": half, "b": first["b"], "deep.v": None})
    assert np.array_equal(arrays["w"], half.float().numpy())
    assert not arrays["deep.v"].any()


@pytest.mark.parametrize("text", ["fp32", "fp16", "int8", "topk"])
def test_a_gradient_that_is_not_finite_is_refused_by_name(text: str) -> None:
    """A gradient with NaN or infinity is refused by name, and one that fp16 cannot hold is refused, too."""
    made = buffers.GradientBuffers(model_map(), Codec.parse(text), torch.device("cpu"))
    for bad in (np.nan, np.inf):
        grads = {n: torch.from_numpy(g) for n, g in gradients(0).items()}
        grads["b"] = torch.full((7,), bad)
        with pytest.raises(RequestError, match="'b' holds NaN or infinity"):
            made.encode(grads)
    if text == "fp16":
        grads = {n: torch.from_numpy(g) * 1e6 for n, g in gradients(0).items()}
        with pytest.raises(RequestError, match="fp16"):
            made.encode(grads)


def test_names_are_needed() -> None:
    """A module or its named parameters are accepted; plain parameters are refused with the line to write instead."""
    net = torch.nn.Linear(3, 2)

    for accepted in (net, net.named_parameters()):
        assert list(fitting.named_parameters(accepted)) == ["weight", "bias"]
    groups = [{"params": list(net.parameters()), "lr": 0.1}]
    for wrong in (net.parameters(), list(net.parameters()), groups, []):
        with pytest.raises(RequestError, match="single parameter group" if wrong is groups else "names") as e:
            fitting.named_parameters(wrong)
        assert "ParameterServerOptimizer(net.named_parameters(), ...)" in e.value.hint


@pytest.mark.parametrize(
    ("codec", "pull_codec", "wrong"),
    [
        ("float64", "bf16", "codec 'float64'"),
        ("fp32", "int8", "pull_codec 'int8'"),
        ("fp32", "bf16+lz4", "pull_codec 'bf16+lz4'"),
    ],
)
def test_a_codec_that_cannot_be_used_is_named(codec: str, pull_codec: str, wrong: str) -> None:
    """An unusable codec is refused with the name of its argument and of the codec, not of a valid one beside it."""
    with pytest.raises(RequestError) as e:
        ParameterServerOptimizer(torch.nn.Linear(3, 2), "m", codec=codec, pull_codec=pull_codec)
    assert (e.value.code, e.value.detail) == ("unknown_codec", f"{wrong} cannot be used here")


def test_gradients_that_are_sparse_in_another_way_are_listed() -> None:
    """Gradients that are neither dense nor sparse by rows are listed in one error with a hint; all others are taken."""
    rows = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    dense = {"w": rows, "b": None, "view": rows.t(), "expanded": rows[:1].expand(5, 2)}
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    twice = torch.sparse_coo_tensor([[1, 0, 1]], values, (9, 2), check_invariants=True)
    found = tables.sparse_rows({**dense, "rows": twice})
    assert {n: (ids.tolist(), g.tolist()) for n, (ids, g) in found.items()} == {"rows": ([0, 1], [[3, 4], [6, 8]])}

    with pytest.raises(RequestError, match="'coo', 'flat'") as e:
        tables.sparse_rows({"coo": rows.to_sparse(), "w": rows, "rows": twice, "flat": torch.ones(3, 4, 2).to_sparse()})
    assert [(x["code"], x["where"]) for x in e.value.errors] == [("invalid_dtype", "coo"), ("invalid_dtype", "flat")]
    assert ".to_dense()" in e.value.hint


def test_every_difference_is_listed() -> None:
    """Missing, surplus and differently shaped parameters are listed in one error."""
    module = {"w": torch.zeros(40, 31), "b": torch.zeros(7), "new": torch.zeros(2)}

    with pytest.raises(RequestError) as e:
        fitting.check_fit(module, model_map())

    said = {x["where"]: x["code"] for x in e.value.errors}
    assert said == {"w": "invalid_shape", "new": "unknown_parameter", "deep.v": "unknown_parameter"}
    fitting.check_fit({n: torch.zeros(s) for n, s in SHAPES.items()}, replace(model_map()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.half, torch.bfloat16, torch.float32, torch.float64])
def test_a_dtype_may_be_torchs_own(dtype: torch.dtype) -> None:
    """A dtype as torch has it is the one of that name."""
    assert sendable(dtype, "sent") == str(dtype).removeprefix("torch.")
    with pytest.raises(RequestError, match=r"dtype .int32. cannot be sent"):
        sendable(torch.int32, "sent")
