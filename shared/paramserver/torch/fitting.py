"""Matches a module's parameters with a model's: their names, their shapes, and the spec of a model that fits."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from paramserver.client.cluster import ModelMap
from paramserver.client.spec_builder import Param, patch_document
from paramserver.core.spec import ModelSpec, differences
from paramserver.errors import PsError, combined, problem

_DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}


def named_parameters(net: Any) -> dict[str, Tensor]:
    """Return the parameters by name of a module, a mapping, or what `named_parameters()` returned.

    Raises RequestError (`invalid_field`) if there are none or they have no names, (`invalid_dtype`) for dtypes that a
    model cannot have, such as integers.
    """
    if isinstance(net, torch.nn.Module):
        return _checked(dict(net.named_parameters()))
    if isinstance(net, Mapping):
        return _checked(dict(net))
    found = list(net) if isinstance(net, Iterable) else [net]
    if found and all(isinstance(f, Mapping) for f in found):
        raise problem(
            "invalid_field",
            "a model has a single parameter group",
            hint="ParameterServerOptimizer(net.named_parameters(), ...); ps.Param(lr_scale=..., weight_decay=...) sets "
            "these for each parameter of a model that you create first",
        )
    if not found or not all(isinstance(f, tuple) and len(f) == 2 and isinstance(f[0], str) for f in found):
        raise problem(
            "invalid_field",
            "net.parameters() has no names, but the cluster identifies parameters by name",
            hint="ParameterServerOptimizer(net, ...) or ParameterServerOptimizer(net.named_parameters(), ...)",
        )
    return _checked(dict(found))


def _checked(params: dict[str, Tensor]) -> dict[str, Tensor]:
    if not params:
        raise problem("invalid_field", "the module has no parameters")
    wrong = [
        problem("invalid_dtype", f"'{n}' has dtype {p.dtype}, which cannot be trained here", where=n)
        for n, p in params.items()
        if p.dtype not in _DTYPES
    ]
    if wrong:
        raise combined(wrong)
    return params


def as_params(params: Mapping[str, Tensor]) -> dict[str, Param]:
    """Return the parameters for `create_model`, with their current values; `trainable` follows `requires_grad`."""
    return {
        n: Param(p.detach().float().cpu().numpy(), dtype=_DTYPES[p.dtype], trainable=p.requires_grad)
        for n, p in params.items()
    }


def check_fit(params: Mapping[str, Tensor], model_map: ModelMap) -> None:
    """Raise one RequestError (`invalid_shape`) that lists all differences between a module and a model, if any."""
    have, errors = model_map.layout.by_name, list[PsError]()
    for n, p in params.items():
        if n not in have:
            errors.append(problem("unknown_parameter", f"the model lacks '{n}' {list(p.shape)}", where=n))
        elif have[n].shape != tuple(p.shape):
            detail = f"'{n}' is {list(p.shape)} in the module and {list(have[n].shape)} in the model"
            errors.append(problem("invalid_shape", detail, where=n))
    errors += [
        problem("unknown_parameter", f"the module lacks '{n}' {list(spec.shape)}", where=n)
        for n, spec in have.items()
        if n not in params
    ]
    if errors:
        found = "; ".join(e.detail for e in errors[:8]) + ("; ..." if len(errors) > 8 else "")
        raise problem(
            "invalid_shape",
            f"model '{model_map.name}' does not fit the module: {found}",
            hint="choose another model name, or delete the model",
            errors=tuple({"code": e.code, "detail": e.detail, **e.members} for e in errors),
        )


def other_settings(spec: ModelSpec, optimizer: Any, consistency: Any) -> list[str]:
    """Return in which fields a model differs from the optimizer and the consistency given, the learning rate aside.

    Raises RequestError if one of them is not valid.
    """
    given = {"optimizer": optimizer, "consistency": consistency}
    if all(value is None for value in given.values()):
        return []
    asked, have = spec.patched(patch_document(optimizer, consistency, None, {}, {})).document(), spec.document()
    if "lr" in asked["optimizer"]:
        asked["optimizer"]["lr"] = have["optimizer"].get("lr")
    return list(differences(have, asked))


def check_dense(grads: Mapping[str, Tensor | None]) -> None:
    """Raise one RequestError (`invalid_dtype`) that lists all gradients in a sparse layout, which cannot be sent."""
    wrong = {n: g.layout for n, g in grads.items() if g is not None and g.layout != torch.strided}
    if wrong:
        raise problem(
            "invalid_dtype",
            f"gradients must be dense; these are not: {', '.join(repr(n) for n in wrong)}",
            hint="use sparse=False for the layer, or set p.grad = p.grad.to_dense() before the step",
            errors=tuple(
                {"code": "invalid_dtype", "detail": f"'{n}' has a gradient in {layout}", "where": n}
                for n, layout in wrong.items()
            ),
        )
