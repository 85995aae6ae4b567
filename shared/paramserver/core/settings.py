"""The settings in force in one partition, as stored in snapshots and journals, so that replay needs nothing else.

A document of plain msgpack values: `revision`, the `optimizer` and `consistency` documents of the spec, and `params`:
for each segment of the partition, [lr_scale, weight_decay or None, trainable] of its parameter.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from paramserver.core.layout import Segment
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.core.spec import ConsistencySpec, ModelSpec
from paramserver.errors import PsError, problem


def settings_document(spec: ModelSpec, revision: int, segments: Sequence[Segment]) -> dict[str, Any]:
    """Return the settings document of a partition with these segments."""
    own = [spec.params[s.param] for s in segments]
    return {
        "revision": revision,
        "optimizer": spec.optimizer.document(),
        "consistency": spec.consistency.document(),
        "params": [[p.lr_scale, p.weight_decay, p.trainable] for p in own],
    }


def spec_from_document(
    spec: ModelSpec, document: Mapping[str, Any], segments: Sequence[Segment]
) -> tuple[ModelSpec, int]:
    """Return (spec with the settings of that document, their revision); raises CorruptState if it cannot be read."""
    errors: list[PsError] = []
    try:
        optimizer = OptimizerSpec.read(document["optimizer"], "optimizer", errors)
        consistency = ConsistencySpec.read(document["consistency"], "consistency", errors)
        params = list(spec.params)
        for segment, (lr_scale, weight_decay, trainable) in zip(segments, document["params"], strict=True):
            params[segment.param] = replace(
                params[segment.param], lr_scale=lr_scale, weight_decay=weight_decay, trainable=trainable
            )
        revision = int(document["revision"])
    except (KeyError, TypeError, ValueError) as error:
        raise problem("corrupt_state", f"stored settings cannot be read: {type(error).__name__}: {error}") from error
    if errors:
        raise problem("corrupt_state", f"stored settings cannot be read: {errors[0].detail}")
    return replace(spec, optimizer=optimizer, consistency=consistency, params=tuple(params)), revision
