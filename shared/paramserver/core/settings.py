"""The settings in force in one partition, as stored in snapshots and journals, so that replay needs nothing else.

A document of plain msgpack values: `revision`, the `optimizer` and `consistency` documents of the spec, and `params`:
for each segment of the partition, [lr_scale, weight_decay or None, trainable] of its parameter.

Commits carry those of the whole model: `params` has a row for each parameter in `own`, which lists the numbers of the
parameters with settings of their own, as there may be thousands without.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from paramserver.core.layout import Segment
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.core.param_spec import ParamSpec
from paramserver.core.spec import ConsistencySpec, ModelSpec
from paramserver.errors import PsError, problem

_PLAIN: Final = {"lr_scale": 1.0, "weight_decay": None, "trainable": True}
"""The settings of a parameter that has none of its own."""


def settings_document(spec: ModelSpec, revision: int, segments: Sequence[Segment]) -> dict[str, Any]:
    """Return the settings document of a partition with these segments."""
    return _document(spec, revision, [s.param for s in segments])


def model_settings_document(spec: ModelSpec, revision: int) -> dict[str, Any]:
    """Return the settings document of a whole model."""
    own = [i for i, p in enumerate(spec.params) if _row(p) != [*_PLAIN.values()]]
    return _document(spec, revision, own) | {"own": own}


def _document(spec: ModelSpec, revision: int, params: Sequence[int]) -> dict[str, Any]:
    return {
        "revision": revision,
        "optimizer": spec.optimizer.document(),
        "consistency": spec.consistency.document(),
        "params": [_row(spec.params[i]) for i in params],
    }


def _row(param: ParamSpec) -> list[Any]:
    return [param.lr_scale, param.weight_decay, param.trainable]


def spec_from_document(
    spec: ModelSpec, document: Mapping[str, Any], segments: Sequence[Segment]
) -> tuple[ModelSpec, int]:
    """Return (spec with the settings of that document, their revision); raises CorruptState if it cannot be read."""
    return _read(spec, document, [s.param for s in segments])


def spec_from_model_document(spec: ModelSpec, document: Mapping[str, Any]) -> ModelSpec:
    """Return the spec with the settings of a whole model's document; raises CorruptState if it cannot be read."""
    plain = [p if _row(p) == [*_PLAIN.values()] else replace(p, **_PLAIN) for p in spec.params]
    return _read(replace(spec, params=tuple(plain)), document, document.get("own", ()))[0]


def _read(spec: ModelSpec, document: Mapping[str, Any], indices: Sequence[int]) -> tuple[ModelSpec, int]:
    errors: list[PsError] = []
    try:
        optimizer = OptimizerSpec.read(document["optimizer"], "optimizer", errors)
        consistency = ConsistencySpec.read(document["consistency"], "consistency", errors)
        params = list(spec.params)
        for i, (lr_scale, weight_decay, trainable) in zip(indices, document["params"], strict=True):
            params[i] = replace(params[i], lr_scale=lr_scale, weight_decay=weight_decay, trainable=trainable)
        revision = int(document["revision"])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise problem("corrupt_state", f"stored settings cannot be read: {type(error).__name__}: {error}") from error
    if errors:
        raise problem("corrupt_state", f"stored settings cannot be read: {errors[0].detail}")
    return replace(spec, optimizer=optimizer, consistency=consistency, params=tuple(params)), revision
