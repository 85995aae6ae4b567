"""Matches a module's parameters with a model's: their names, their shapes, and the spec of a model that fits."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from paramserver.client.cluster import ModelMap
from paramserver.client.spec_builder import Param, patch_document
from paramserver.core.spec import ModelSpec, differences
from paramserver.errors import PsError, combined, problem

_DTYPES: Final = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
_DEVICES: Final = ("cpu", "cuda")
_WRAPPERS: Final = ("module.", "_orig_mod.")
"""What DataParallel, DistributedDataParallel and torch.compile put before the names of what they wrap."""


def named_parameters(net: Any) -> dict[str, Tensor]:
    """Return the parameters by name of a module, a mapping, or what `named_parameters()` returned, but empty ones.

    Raises RequestError (`invalid_field`) if there are none, they have no names, hold no values yet, are neither on CPU
    nor CUDA, or, but of a module, none requires a gradient, (`invalid_dtype`) for dtypes that a model cannot have, such
    as integers.
    """
    if isinstance(net, torch.nn.Module):
        return _checked(dict(net.named_parameters()))
    if isinstance(net, Mapping):
        return _trained(_checked(dict(net)))
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
    return _trained(_checked(dict(found)))


def _trained(params: dict[str, Tensor]) -> dict[str, Tensor]:
    if not any(p.requires_grad for p in params.values()):
        detail = "no tensor that was passed requires a gradient, so nothing would be trained"
        raise problem("invalid_field", detail, hint="pass the module, or net.named_parameters()")
    return params


def _checked(params: dict[str, Tensor]) -> dict[str, Tensor]:
    wrong = [e for n, p in params.items() if (e := _unfit(n, p)) is not None]
    if wrong:
        raise combined(wrong)
    held = {n: p for n, p in params.items() if p.numel()}
    if not held:
        raise problem("invalid_field", "the module has no parameters")
    return held


def _unfit(name: str, p: Tensor) -> PsError | None:
    """Return the error for a parameter that cannot be trained, if it is one."""
    if is_lazy(p):
        hint = "run a batch through the module first"
        return problem("invalid_field", f"'{name}' has no shape yet", hint=hint, where=name)
    if p.is_meta:
        hint = "net.to_empty(device=...), then initialize or load it"
        return problem("invalid_field", f"'{name}' is on the meta device and has no values", hint=hint, where=name)
    if p.device.type not in _DEVICES:
        detail = f"'{name}' is on {p.device}: only modules on CPU and CUDA can be trained here"
        return problem("invalid_field", detail, hint="net.cpu(), or worker.step() with .cpu() gradients", where=name)
    if p.dtype in _DTYPES:
        return None
    hint = "torch.view_as_real of it is two real parameters in one"
    if not p.is_complex():
        hint = "pass only those that are trained: [(n, p) for n, p in net.named_parameters() if p.requires_grad]"
    detail = f"'{name}' has dtype {p.dtype}, which cannot be trained here"
    return problem("invalid_dtype", detail, hint=hint, where=name)


def as_params(params: Mapping[str, Tensor]) -> dict[str, Param]:
    """Return the parameters for `create_model`, with their current values; `trainable` follows `requires_grad`."""
    return {n: Param(as_array(p), dtype=_DTYPES[p.dtype], trainable=p.requires_grad) for n, p in params.items()}


def as_array(tensor: Tensor) -> Any:
    """Return a tensor's values as a NumPy array, sharing its memory where possible; bfloat16 becomes float32."""
    host = tensor.detach().cpu().resolve_neg()
    return host.float().numpy() if host.dtype == torch.bfloat16 else host.numpy()


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
            hint=_remedy(params, have),
            errors=tuple({"code": e.code, "detail": e.detail, **e.members} for e in errors),
        )


def _remedy(params: Collection[str], have: Collection[str]) -> str:
    for prefix in _WRAPPERS:
        ours, theirs = ({n.replace(prefix, "") for n in names} for names in (params, have))
        if ours == theirs and set(params) != set(have):
            pass_ = "pass the module that it wraps" if ours != set(params) else "pass it: the model was created from it"
            return f"the names differ only by '{prefix}', which a wrapper adds: {pass_}"
    return "choose another model name, or delete the model"


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
