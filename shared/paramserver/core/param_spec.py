"""One parameter of a model: shape, dtype, initial values, and its own training settings."""

from math import prod
from typing import Any, Final, Self

from msgspec import Struct, field

from paramserver import limits
from paramserver.core.fields import Reader, check_param_name, is_integer, is_name
from paramserver.errors import PsError
from paramserver.types import ITEMSIZE

_KINDS_ELSEWHERE: Final = {
    "ones": '{"kind": "constant", "value": 1}',
    "random": '{"kind": "normal", "std": 0.02}',
    "glorot_uniform": '"xavier_uniform"',
    "glorot_normal": '"xavier_normal"',
    "he_uniform": '"kaiming_uniform"',
    "he_normal": '"kaiming_normal"',
}
_DTYPES_ELSEWHERE: Final = {
    "fp16": '"float16"',
    "half": '"float16"',
    "bf16": '"bfloat16"',
    "fp32": '"float32"',
    "single": '"float32"',
    "fp64": '"float64"',
    "double": '"float64"',
}

FANS: Final = ("fan_in", "fan_out")
NONLINEARITIES: Final = ("linear", "sigmoid", "tanh", "relu", "leaky_relu", "selu")


class InitSpec(Struct, frozen=True):
    """How a parameter gets its initial values."""

    kind: str = "zeros"
    value: float = 0.0
    mean: float = 0.0
    std: float = 1.0
    low: float = 0.0
    high: float = 1.0
    gain: float = 1.0
    a: float = 0.0
    mode: str = "fan_in"
    nonlinearity: str = "leaky_relu"
    seed: int = 0
    path: str = ""
    """kind `file`: a safetensors file below the scheduler's state directory; a single path component."""

    KINDS = {
        "zeros": (),
        "constant": ("value",),
        "normal": ("mean", "std", "seed"),
        "uniform": ("low", "high", "seed"),
        "xavier_uniform": ("gain", "seed"),
        "xavier_normal": ("gain", "seed"),
        "kaiming_uniform": ("a", "mode", "nonlinearity", "seed"),
        "kaiming_normal": ("a", "mode", "nonlinearity", "seed"),
        "file": ("path",),
        "upload": (),
    }

    @classmethod
    def read(cls, data: Any, where: str, errors: list[PsError]) -> Self:
        r, default = Reader(data, where, errors), cls()
        kind = r.choice("kind", default.kind, tuple(cls.KINDS), _KINDS_ELSEWHERE)
        values: dict[str, Any] = {}
        for name in cls.KINDS[kind]:
            if name == "seed":
                values[name] = r.integer("seed", default.seed)
            elif name == "mode":
                values[name] = r.choice("mode", default.mode, FANS)
            elif name == "nonlinearity":
                values[name] = r.choice("nonlinearity", default.nonlinearity, NONLINEARITIES)
            elif name == "path":
                hint = "of a safetensors file directly below the scheduler's state directory"
                values[name] = r.take("path", "", is_name, "a file name", hint)
                if "path" not in r.data:
                    r.fail("path", "is required", hint)
            else:
                low = 0.0 if name == "std" else float("-inf")
                values[name] = r.number(name, getattr(default, name), low)
        if kind == "uniform" and values["low"] > values["high"]:
            r.fail("low", f"must not be above high, {values['high']}")
        r.done()
        return cls(kind, **values)

    def document(self) -> dict[str, Any]:
        return {"kind": self.kind, **{n: getattr(self, n) for n in self.KINDS[self.kind]}}


class ParamSpec(Struct, frozen=True):
    """One dense parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    """Dtype that pulls return by default; the shard computes in float32."""
    init: InitSpec = field(default_factory=InitSpec)
    lr_scale: float = 1.0
    weight_decay: float | None = None
    """Overrides the optimizer's `weight_decay`."""
    trainable: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @classmethod
    def read(cls, name: str, data: Any, errors: list[PsError]) -> Self:
        where = f"params.{name[: limits.PARAM_NAME_BYTES_MAX]}"
        try:
            check_param_name(name)
        except PsError as e:
            errors.append(e)
        r = Reader(data, where, errors)

        def shape_ok(v: Any) -> bool:
            return (
                isinstance(v, list | tuple)
                and len(v) <= limits.NDIM_MAX
                and all(is_integer(n, 1, limits.MODEL_ELEMENTS_MAX) for n in v)
            )

        if "shape" not in r.data:
            r.fail("shape", "is required", 'a list of positive integers; "shape": [] is a single number')
        shape = r.take(
            "shape", (), shape_ok, f"a list of at most {limits.NDIM_MAX} integers from 1 to {limits.MODEL_ELEMENTS_MAX}"
        )
        spec = cls(
            name,
            tuple(shape),
            r.choice("dtype", "float32", tuple(ITEMSIZE), _DTYPES_ELSEWHERE),
            InitSpec.read(r.object("init"), f"{where}.init", errors),
            r.number("lr_scale", 1.0, 0.0),
            r.optional_number("weight_decay"),
            r.flag("trainable", True),
        )
        r.done()
        return spec

    def document(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "init": self.init.document(),
            "lr_scale": self.lr_scale,
            "weight_decay": self.weight_decay,
            "trainable": self.trainable,
        }
