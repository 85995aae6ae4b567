"""The server-side optimizer of a model: its hyperparameters and its learning rate schedule."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Self

from msgspec import Struct, field

from paramserver.core.fields import Reader, finite
from paramserver.errors import PsError

_SCHEDULE: Final = '{"kind": "cosine", "t_max": 1000}, in Python ps.Cosine(t_max=1000)'


class ScheduleSpec(Struct, frozen=True):
    """The learning rate as a function of the number of updates (see `core.shard.schedule`)."""

    kind: str = "constant"
    step_size: int = 1
    gamma: float = 1.0
    t_max: int = 1
    eta_min: float = 0.0
    warmup: int = 0
    """Updates over which the rate rises linearly from 1/warmup of its value, before the schedule begins."""

    KINDS: ClassVar[Mapping[str, Mapping[str, float | None]]] = {
        "constant": {},
        "step": {"step_size": None, "gamma": 0.1},
        "exponential": {"gamma": None},
        "cosine": {"t_max": None, "eta_min": 0.0},
    }
    """The fields of each kind and their defaults; None: it is required."""

    @classmethod
    def read(cls, data: Any, where: str, errors: list[PsError]) -> Self:
        r = Reader(data, where, errors)
        kind = r.choice("kind", "constant", tuple(cls.KINDS))
        values: dict[str, Any] = {"warmup": r.integer("warmup", 0)}
        for name, default in cls.KINDS[kind].items():
            if name in ("step_size", "t_max"):
                values[name] = r.integer(name, 1, 1)
            else:
                values[name] = r.number(name, 0.1 if default is None else default, 0.0)
            if default is None and name not in r.data:
                r.fail(name, "is required")
        r.done()
        return cls(kind, **values)

    def document(self) -> dict[str, Any]:
        return {"kind": self.kind, "warmup": self.warmup, **{n: getattr(self, n) for n in self.KINDS[self.kind]}}


OPTIMIZERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "sgd": {"lr": 1e-3, "weight_decay": 0.0},
    "momentum": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0},
    "nesterov": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0},
    "adagrad": {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
    "rmsprop": {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    "ftrl": {"lr": 1e-2, "beta": 1.0, "l1": 0.0, "l2": 0.0},
    "sum": {},
}
"""The server-side optimizers with their hyperparameters; names and defaults are torch's (ftrl: the paper's)."""


COMMON_FIELDS: Final = ("schedule", "clip_value", "clip_norm", "linear_scaling")


def kept_fields(name: str) -> tuple[str, ...]:
    """Fields kept when a model switches to optimizer `name`: the common ones, lr and weight_decay, if it has them."""
    own = OPTIMIZERS.get(name, {})
    return (*COMMON_FIELDS, *(k for k in ("lr", "weight_decay") if k in own))


class OptimizerSpec(Struct, frozen=True):
    """The server-side optimizer of a model."""

    name: str = "sgd"
    lr: float = 1e-3
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    alpha: float = 0.99
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    centered: bool = False
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    clip_value: float | None = None
    """Each element of a gradient is clamped to [-clip_value, clip_value]."""
    clip_norm: float | None = None
    """A push whose gradient has a larger 2-norm is scaled down to this norm."""
    linear_scaling: bool = False
    """Multiply the learning rate by the number of live workers (Goyal et al. 2017)."""

    @classmethod
    def read(cls, data: Any, where: str, errors: list[PsError]) -> Self:
        r = Reader(data, where, errors)
        name = r.choice("name", "sgd", tuple(OPTIMIZERS))
        values: dict[str, Any] = {}
        for key, default in OPTIMIZERS[name].items():
            if key == "betas":

                def betas_ok(v: Any) -> bool:
                    return isinstance(v, list | tuple) and len(v) == 2 and all(finite(b) and 0 <= b < 1 for b in v)

                b = r.take("betas", default, betas_ok, "two numbers in [0, 1)")
                values[key] = (float(b[0]), float(b[1]))
            elif key == "centered":
                values[key] = r.flag(key, default)
            else:
                values[key] = r.number(key, default, 0.0, 1.0 if key in ("momentum", "alpha") else float("inf"))
        values["schedule"] = ScheduleSpec.read(r.object("schedule", _SCHEDULE), f"{where}.schedule", errors)
        values["clip_value"] = r.optional_number("clip_value")
        values["clip_norm"] = r.optional_number("clip_norm")
        values["linear_scaling"] = r.flag("linear_scaling", False)
        r.done()
        return cls(name, **values)

    def document(self) -> dict[str, Any]:
        own = {k: getattr(self, k) for k in OPTIMIZERS[self.name]}
        if "betas" in own:
            own["betas"] = list(own["betas"])
        return {
            "name": self.name,
            **own,
            "schedule": self.schedule.document(),
            "clip_value": self.clip_value,
            "clip_norm": self.clip_norm,
            "linear_scaling": self.linear_scaling,
        }
