"""What a module's parameters may be: what is left out, and what is refused in words."""

import importlib.util
from itertools import count
from threading import BrokenBarrierError
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

import paramserver as ps
from paramserver.client.spec_builder import model_document
from paramserver.errors import RequestError

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch: pip install torch==2.13.0", allow_module_level=True)

import torch
from torch import nn

from paramserver.torch import ParameterServerOptimizer
from paramserver.torch.fitting import as_params, check_fit, named_parameters

from .test_torch_codecs import model_map


def refused(net: Any) -> Any:
    """Return the error that the module's parameters are refused with."""
    with pytest.raises(RequestError) as e:
        named_parameters(net)
    return e.value


def test_parameters_without_values_are_refused() -> None:
    """Parameters on the meta device, into which values would be lost without a word, are refused, as are lazy ones."""
    said = refused(nn.Linear(3, 2, device="meta"))
    assert {e["where"] for e in said.errors} == {"weight", "bias"}
    assert "no values" in said.detail
    assert "to_empty" in said.hint

    said = refused(nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(1)))
    assert {e["where"] for e in said.errors} == {"1.weight", "1.bias"}
    assert "a batch" in said.hint


def test_parameters_on_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module on a device other than a CPU or a CUDA GPU is refused at once, not by an error of its first step."""
    monkeypatch.setattr(nn.Parameter, "device", torch.device("mps"))  # as on a Mac: this machine need not have it
    said = refused(nn.Linear(3, 2))
    assert {e["where"] for e in said.errors} == {"weight", "bias"}
    assert "'weight' is on mps" in said.detail
    assert "CPU and CUDA" in said.detail


def test_parameters_that_cannot_be_trained_come_with_a_remedy() -> None:
    """Complex parameters, and frozen integers as of a quantized module, are refused with what to do instead."""
    said = refused({"c": nn.Parameter(torch.zeros(2, dtype=torch.complex64))})
    assert (said.code, said.members["where"]) == ("invalid_dtype", "c")
    assert "view_as_real" in said.hint

    said = refused({"q": nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)})
    assert (said.code, said.members["where"]) == ("invalid_dtype", "q")
    assert "named_parameters()" in said.hint


def test_tensors_that_get_no_gradients_are_refused() -> None:
    """The tensors of a `state_dict()` need no gradient: the model would be frozen, and train without a word."""
    net = nn.Linear(3, 2)
    for frozen in (net.state_dict(), list(net.state_dict().items())):
        said = refused(frozen)
        assert (said.code, said.hint) == ("invalid_field", "pass the module, or net.named_parameters()")
    assert list(named_parameters(net.state_dict(keep_vars=True))) == ["weight", "bias"]
    assert list(named_parameters(net.requires_grad_(False))) == ["weight", "bias"]


def test_empty_parameters_are_left_out() -> None:
    """A parameter without elements is no part of the model: there is nothing to train."""
    net = {"none": nn.Parameter(torch.zeros(0, 4)), "w": nn.Parameter(torch.ones(2))}
    assert list(named_parameters(net)) == ["w"]
    assert "no parameters" in refused({"none": net["none"]}).detail


def test_first_values_beyond_float32_are_refused_as_that() -> None:
    """float64 values that float32 cannot hold are too large, not infinite."""
    params = as_params({"w": nn.Parameter(torch.tensor([1e300, 1.0], dtype=torch.float64))})
    with pytest.raises(RequestError, match="'w' holds numbers that are too large for float32"):
        model_document("m", params, None, None, {})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_first_values_keep_their_dtype(dtype: torch.dtype) -> None:
    """The model gets the values and the dtype of each parameter."""
    document, uploads = model_document(
        "m", as_params({"w": nn.Parameter(torch.tensor([0.5, -2.0], dtype=dtype))}), None, None, {}
    )
    assert document["params"]["w"]["dtype"] == str(dtype).removeprefix("torch.")
    np.testing.assert_array_equal(np.asarray(uploads["w"], np.float32), [0.5, -2.0])


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod."])
def test_a_wrapper_that_renames_is_named(wrapper: str) -> None:
    """If only the prefix of a wrapper differs, the hint says which of the two to pass, not to delete the model."""
    bare, wrapped = model_map(), model_map(prefix=wrapper)
    for net, model, hint in ((wrapped, bare, "that it wraps"), (bare, wrapped, "was created from it")):
        with pytest.raises(RequestError) as e:
            check_fit({n: torch.zeros(p.shape) for n, p in net.layout.by_name.items()}, model)
        assert f"'{wrapper}'" in e.value.hint
        assert hint in e.value.hint


@pytest.mark.parametrize("options", [{"rank": 1}, {"worker": "a"}, {"timeout": 5.0}], ids=str)
def test_what_a_worker_has_already_is_refused_with_it(options: dict[str, Any]) -> None:
    """`rank`, `worker` and `timeout` are those of the worker, where one is passed."""
    with ps.Client("http://127.0.0.1:9") as client, pytest.raises(ps.RequestError, match=r"those of the ps\.Worker"):
        ParameterServerOptimizer(nn.Linear(1, 1), client.model("m").worker(), **options)


def test_the_example_ends_with_a_worker_that_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are to begin together do not wait for ever for one that has failed before."""
    from paramserver.examples import digits_torch

    turns = count()

    def made(*args: Any, **options: Any) -> Any:
        if next(turns) == 0:
            raise ConnectionError
        return MagicMock()

    monkeypatch.setattr(digits_torch, "BEGIN_S", 0.01)
    monkeypatch.setattr(digits_torch, "ParameterServerOptimizer", made)
    with pytest.raises((ConnectionError, BrokenBarrierError)):
        digits_torch.once(MagicMock(), "async", "fp32", workers=2, steps=1)
