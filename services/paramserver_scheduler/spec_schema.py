"""JSON schema of a model's spec, made of the tables by which the core reads one; docs/rest.md says what each field is.

The same schema describes what a request may leave out and what an answer has in full.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import Struct, json

from paramserver import limits
from paramserver.core.fields import INTEGER_MAX, MODEL_NAME
from paramserver.core.optimizer_spec import COMMON_FIELDS, OPTIMIZERS, OptimizerSpec, ScheduleSpec
from paramserver.core.param_spec import FANS, NONLINEARITIES, InitSpec, ParamSpec
from paramserver.core.spec import BEST, LAG, LATE, CheckpointSpec, ConsistencySpec, ModelSpec
from paramserver.types import ITEMSIZE, LEVELS

Schema = dict[str, Any]


def _choice(options: Iterable[str], default: str) -> Schema:
    return {"type": "string", "enum": list(options), "default": default}


def _fields(kind: type[Struct], **own: Schema) -> dict[str, Schema]:
    """The schema of each field of a part of a spec; `own` are those that say more than their types do."""
    told: dict[str, Schema] = json.schema(kind)["$defs"][kind.__name__]["properties"]
    return told | own


def _object(fields: Mapping[str, Schema], required: Iterable[str] = ()) -> Schema:
    return {"type": "object", "properties": dict(fields), "required": list(required), "additionalProperties": False}


def _kinds(
    tag: str,
    kinds: Mapping[str, Iterable[str]],
    common: Iterable[str],
    fields: Mapping[str, Schema],
    defaults: Mapping[str, Mapping[str, Any]] = {},
) -> Schema:
    """An object whose field `tag` decides which others it has; the first kind is that of an object without it.

    `defaults` are those of each kind, instead of those in `fields`; None is none.  A field without one is required.
    """
    variants: list[Schema] = []
    for kind, own in kinds.items():
        named = {n: dict(fields[n]) for n in own}
        for n, default in defaults.get(kind, {}).items():
            named[n].pop("default", None)
            if default is not None:
                named[n]["default"] = default
        required = [n for n in own if "default" not in named[n]]
        shared = {n: fields[n] for n in common}
        variants.append(_object({tag: {"const": kind}, **named, **shared}, [*([tag] if variants else []), *required]))
    return {"anyOf": variants}


_NAME: Final[Schema] = {"type": "string", "pattern": f"^{MODEL_NAME.pattern}$"}
_INIT: Final = _kinds(
    "kind",
    InitSpec.KINDS,
    (),
    _fields(InitSpec, mode=_choice(FANS, FANS[0]), nonlinearity=_choice(NONLINEARITIES, "leaky_relu"), path=_NAME),
)
_SHAPE: Final[Schema] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 1},
    "maxItems": limits.NDIM_MAX,
    "description": "[] is a single number",
}
_PARAM: Final = _fields(ParamSpec, shape=_SHAPE, dtype=_choice(ITEMSIZE, "float32"), init=_INIT)
_SCHEDULE: Final = _kinds("kind", ScheduleSpec.KINDS, ("warmup",), _fields(ScheduleSpec), ScheduleSpec.KINDS)
_PAIR: Final[Schema] = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
_OPTIMIZER: Final = _kinds(
    "name", OPTIMIZERS, COMMON_FIELDS, _fields(OptimizerSpec, betas=_PAIR, schedule=_SCHEDULE), OPTIMIZERS
)
_CONSISTENCY: Final = _kinds(
    "mode",
    ConsistencySpec.MODES,
    ("lag", "lag_bound"),
    _fields(ConsistencySpec, late=_choice(LATE, LATE[0]), lag=_choice(LAG, LAG[0])),
)
_MODEL: Final = _fields(
    ModelSpec,
    name=_NAME,
    params={
        "type": "object",
        "description": "by name, in their order in the flat vector",
        "additionalProperties": _object({k: s for k, s in _PARAM.items() if k != "name"}, ["shape"]),
        "minProperties": 1,
        "maxProperties": limits.PARAMS_PER_MODEL_MAX,
    },
    optimizer=_OPTIMIZER,
    consistency=_CONSISTENCY,
    partitions={
        "type": "integer",
        "minimum": 1,
        "maximum": limits.PARTITIONS_MAX,
        "description": "default: by the size of the model",
    },
    ack=_choice(LEVELS, "applied"),
    evaluate_every={"type": "integer", "minimum": 0, "maximum": INTEGER_MAX, "default": 0},
    checkpoint=_object(_fields(CheckpointSpec, best=_choice(BEST, BEST[0]))),
)
SPEC: Final = _object(_MODEL, ["name", "params"])
