"""The codecs on tensors, and the flat buffers of gradients: the same bytes as without torch."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paramserver.client.cluster import ModelMap
from paramserver.client.encoding import Draft, Encoded, Feedback, ready
from paramserver.client.gradient_arrays import GradientArrays
from paramserver.client.same_host import SameHost
from paramserver.codecs import Codec
from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
from paramserver.errors import RequestError

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch: pip install torch==2.13.0", allow_module_level=True)

import torch

from paramserver.torch import buffers, device_codecs, fitting

GOLDEN = Path(__file__).parents[1] / "golden" / "codecs" / "codecs.npz"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]
SHAPES = {"w": (40, 30), "b": (7,), "deep.v": (300,)}


def held(owners: tuple[str, ...] = ("a", "b", "a", "b")) -> ModelMap:
    """A model of four partitions."""
    spec = ModelSpec.parse({"name": "m", "params": {n: {"shape": s} for n, s in SHAPES.items()}, "partitions": 4})
    return ModelMap("m", 1, 0, 0, 1, spec, Layout(spec), owners, {}, {})


def gradients(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s, dtype=np.float32) for n, s in SHAPES.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_are_the_golden_ones(device: str) -> None:
    """Three gradients with error feedback give the stored bytes and leave the stored rest, on every device."""
    stored, size, padded = np.load(GOLDEN), 1000, 1024
    residual, left = torch.zeros(padded, device=device), torch.zeros(padded, device=device)
    residual_k, left_k = torch.zeros(size, device=device), torch.zeros(size, device=device)
    for i in range(3):
        values = torch.zeros(padded, device=device)
        values[:size] = torch.from_numpy(stored[f"gradient.{i}"])

        scales, q, _ = device_codecs.int8_blocks(values, residual, left)
        data, _ = device_codecs.topk(values[:size].clone(), residual_k, left_k, 0.05)

        int8 = torch.cat((scales.view(torch.uint8), q[:size].view(torch.uint8)))
        assert int8.cpu().numpy().tobytes() == stored[f"int8.{i}"].tobytes()
        assert data.cpu().numpy().tobytes() == stored[f"topk:0.05.{i}"].tobytes()
        residual, left, residual_k, left_k = left, residual, left_k, residual_k
    assert residual[:size].cpu().numpy().tobytes() == stored["int8.left"].tobytes()
    assert residual_k.cpu().numpy().tobytes() == stored["topk:0.05.left"].tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("text", ["fp32", "fp16", "bf16", "int8", "topk:0.1", "int8+zstd", "bf16+lz4"])
def test_buffers_send_what_the_plain_client_sends(text: str, device: str) -> None:
    """Over steps, a push that was not kept and partitions that move, every partition has the same bytes."""
    codec, memory = Codec.parse(text), Feedback()
    model = held()
    made = buffers.GradientBuffers(model, codec, torch.device(device))
    for step in range(5):
        grads = gradients(step)
        if step == 3:
            model = held(("a", "a", "c", "b"))
        made.arrange(model)

        ours = made.encode({n: torch.from_numpy(g).to(device) for n, g in grads.items()})
        draft = Draft(memory)
        theirs = ready(model.layout, 1, grads, None, None, codec, draft)

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
            made.keep()
            draft.keep()


def _written(gradient: Any, part: Any) -> bytes:
    from paramserver.client.gradients import Scan

    out = np.empty(gradient.body_bytes([part]), np.uint8)
    gradient.write([part], out.data, Scan())
    return out.tobytes()


def test_on_the_cpu_gradients_lie_where_they_are_pushed_from() -> None:
    """Whatever dtype they come in; what has none in a step counts as zero then, and not as it was."""
    arrays = GradientArrays(held().layout, SameHost())
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
    """NaN and infinity are found in the same pass and named; so is what a dtype cannot hold."""
    made = buffers.GradientBuffers(held(), Codec.parse(text), torch.device("cpu"))
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
    """A module and its named parameters are taken; plain parameters are refused with the line to write."""
    net = torch.nn.Linear(3, 2)

    assert list(fitting.named(net)) == list(fitting.named(net.named_parameters())) == ["weight", "bias"]
    for wrong in (net.parameters(), list(net.parameters()), [{"params": list(net.parameters())}], []):
        with pytest.raises(RequestError) as e:
            fitting.named(wrong)
        assert "ParameterServerOptimizer(net.named_parameters(), ...)" in e.value.hint


def test_every_difference_is_listed() -> None:
    """Missing, surplus and differently shaped parameters come in one error."""
    module = {"w": torch.zeros(40, 31), "b": torch.zeros(7), "new": torch.zeros(2)}

    with pytest.raises(RequestError) as e:
        fitting.check_fit(module, held())

    said = {x["where"]: x["code"] for x in e.value.errors}
    assert said == {"w": "invalid_shape", "new": "unknown_parameter", "deep.v": "unknown_parameter"}
    fitting.check_fit({n: torch.zeros(s) for n, s in SHAPES.items()}, replace(held()))
