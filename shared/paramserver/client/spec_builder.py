"""Builds JSON documents for the cluster from the arguments of `create_model` and `set`."""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any, Final, TypeAlias

import numpy as np

from paramserver.client.choices import Choice
from paramserver.client.consistency import Consistency
from paramserver.client.optimizers import Optimizer
from paramserver.client.values import dtype_name, values_of
from paramserver.core.fields import check_param_name
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError, combined, problem
from paramserver.net.calls import plain
from paramserver.types import AnyArray, DTypeLike

Init: TypeAlias = str | Mapping[str, Any]
_INITS: Final = '"zeros" or {"kind": "constant", "value": 0.5}; an array goes in place of the shape'
_FIXED_FIELDS: Final = {
    "ack": 'a push may ask for more: push(grads, ack="journaled")',
    "partitions": "a checkpoint can be restored as another model, with partitions=…",
}
_CONSISTENCY_FIELDS: Final = {"mode", *(f.name for mode in Consistency.__subclasses__() for f in fields_of(mode))}


@dataclass(frozen=True)
class Param:
    """One parameter of a model to be created.

    `value` is its shape, or an array of its initial values.  `init` is a kind (`"zeros"`, `"xavier_uniform"`, ...) or a
    mapping with the kind's own fields: `{"kind": "normal", "std": 0.02, "seed": 1}`.
    """

    value: Any
    dtype: DTypeLike | None = None
    init: Init | None = None
    lr_scale: float = 1.0
    weight_decay: float | None = None
    trainable: bool = True


Shape: TypeAlias = tuple[int, ...] | list[int] | int
ParamLike: TypeAlias = Param | Shape | Mapping[str, Any] | Any


def model_document(
    name: str,
    params: Mapping[str, ParamLike],
    optimizer: Optimizer | Mapping[str, Any] | str | None,
    consistency: Consistency | Mapping[str, Any] | str | None,
    others: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, AnyArray]]:
    """Return the body of `POST /models`, and the arrays to upload once it is accepted.

    Raises RequestError, listing everything that is wrong; nothing has been sent then.
    """
    if not isinstance(params, Mapping):
        raise problem("invalid_field", "params must map names to arrays or shapes", hint='{"w": w0, "b": (10,)}')
    uploads: dict[str, AnyArray] = {}
    errors: list[PsError] = []
    documents: dict[str, Any] = {}
    for key, value in params.items():
        try:
            # A name that is text is checked with the rest of the spec, so that one error lists whatever else is wrong.
            documents[key] = _param(key if isinstance(key, str) else check_param_name(key), value, uploads)
        except PsError as e:
            errors.append(e)
    body: dict[str, Any] = {"name": name, "params": documents}
    if optimizer is not None:
        body["optimizer"] = _optimizer(optimizer)
    if consistency is not None:
        body["consistency"] = _consistency(consistency)
    body |= {k: v for k, v in others.items() if v is not None}
    if errors:
        raise combined(errors)
    body = plain(body)
    ModelSpec.asked(body)
    return body, uploads


def patch_document(
    optimizer: Optimizer | Mapping[str, Any] | str | None,
    consistency: Consistency | Mapping[str, Any] | str | None,
    params: Mapping[str, Mapping[str, Any]] | None,
    others: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the merge patch of `Model.set`; `fields` are single fields of the optimizer, such as `lr`."""
    body: dict[str, Any] = {k: v for k, v in others.items() if v is not None}
    change: dict[str, Any] = _optimizer(optimizer) if optimizer is not None else {}
    for key, value in fields.items():
        if key in _CONSISTENCY_FIELDS:
            detail = f"{key}: belongs to the consistency; single fields are the optimizer's"
            raise problem("invalid_field", detail, hint="set(consistency=ps.Sync(quorum=0.75))", where=key)
        if key in _FIXED_FIELDS:
            detail = f"{key}: is fixed when the model is created"
            raise problem("invalid_field", detail, hint=_FIXED_FIELDS[key], where=key)
        change[key] = value.document() if isinstance(value, Choice) else value
    if change:
        body["optimizer"] = change
    if consistency is not None:
        body["consistency"] = _consistency(consistency)
    if params is not None:
        body["params"] = {k: _document(f"params.{k}", v) for k, v in _document("params", params).items()}
    if not body:
        raise problem("invalid_field", "nothing to set", hint="set(lr=0.05), set(consistency=ps.SSP(3)), ...")
    changed: dict[str, Any] = plain(body)
    return changed


def _optimizer(value: Optimizer | Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"name": value}
    return _document("optimizer", value, 'ps.Adam(lr=1e-3) or "adam"', Optimizer)


def _consistency(value: Consistency | Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"mode": value}
    return _document("consistency", value, 'ps.SSP(3), ps.Sync() or "sync"', Consistency)


def _document(where: str, value: Any, example: str = "", family: type[Choice] | None = None) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if family is not None and isinstance(value, family):
        return value.document()
    kind = value if isinstance(value, type) else type(value)
    ours = [c.__name__ for c in family.__subclasses__()] if family is not None else []
    hint = f"ps.{kind.__name__}(...) makes one" if kind.__name__ in ours else example  # torch has an Adam, too
    found = (
        f"{kind.__name__} is a class"
        if kind is value
        else f"must be an object, not {' '.join(repr(value).split()):.60}"
    )
    raise problem("invalid_field", f"{where}: {found}", hint=hint, where=where)


def _param(name: str, value: ParamLike, uploads: dict[str, AnyArray]) -> dict[str, Any]:
    if isinstance(value, Mapping):
        if "shape" not in value:
            detail = f"params.{name}: an object without `shape` is no parameter"
            raise problem("invalid_field", detail, hint=f"name those inside it: {{'{name}.w': array}}")
        return dict(value)
    p = value if isinstance(value, Param) else Param(value)
    out: dict[str, Any] = {}
    dtype = None if p.dtype is None else dtype_name(p.dtype)
    if _is_shape(p.value):
        out["shape"] = [int(n) for n in ((p.value,) if isinstance(p.value, int | np.integer) else p.value)]
        out["dtype"] = dtype or "float32"
        init = p.init if p.init is not None else "zeros"
        out["init"] = {"kind": init} if isinstance(init, str) else _document(f"params.{name}.init", init, _INITS)
    else:
        if p.init is not None:
            raise problem("invalid_field", f"params.{name}: give either an array or init=, not both")
        array = values_of(name, p.value)
        native = array.dtype.name
        out["shape"] = list(array.shape)
        out["dtype"] = dtype or (native if native in ("float16", "bfloat16") else "float32")
        out["init"] = {"kind": "upload"}
        uploads[name] = array
    if p.lr_scale != 1.0:
        out["lr_scale"] = p.lr_scale
    if p.weight_decay is not None:
        out["weight_decay"] = p.weight_decay
    if not p.trainable:
        out["trainable"] = False
    return out


def _is_shape(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, int | np.integer):
        return True
    return isinstance(value, tuple | list) and all(
        isinstance(n, int | np.integer) and not isinstance(n, bool) for n in value
    )
