"""A model's spec: what `POST /models` takes, checked field by field, with defaults filled in.

`ModelSpec.parse` reports every wrong field at once; `document()` gives the JSON back with all defaults.
"""

import difflib
from collections.abc import Mapping
from math import prod
from typing import Any, Final, Self

from msgspec import Struct, field
from msgspec.structs import fields

from paramserver import limits
from paramserver.core.fields import MODEL_NAME, Reader, check_model_name, check_param_name, merge_patch
from paramserver.errors import PsError, combined, problem
from paramserver.types import ITEMSIZE


class InitSpec(Struct, frozen=True):
    """How a parameter gets its first values."""

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
    """kind `file`: a safetensors file below the scheduler's state directory, as a single path component."""

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
        r = Reader(data, where, errors)
        kind = r.choice("kind", "zeros", tuple(cls.KINDS))
        values: dict[str, Any] = {}
        for name in cls.KINDS[kind]:
            if name == "seed":
                values[name] = r.integer("seed", 0)
            elif name == "mode":
                values[name] = r.choice("mode", "fan_in", ("fan_in", "fan_out"))
            elif name == "nonlinearity":
                kinds = ("linear", "sigmoid", "tanh", "relu", "leaky_relu", "selu")
                values[name] = r.choice("nonlinearity", "leaky_relu", kinds)
            elif name == "path":
                ok = r.take("path", "", lambda v: isinstance(v, str) and bool(MODEL_NAME.fullmatch(v)), "a file name")
                values[name] = ok
                if not ok:
                    r.fail("path", "is needed")
            else:
                low = 0.0 if name == "std" else float("-inf")
                values[name] = r.number(name, float(_DEFAULTS[name]), low)
        r.done()
        return cls(kind, **values)

    def document(self) -> dict[str, Any]:
        return {"kind": self.kind, **{n: getattr(self, n) for n in self.KINDS[self.kind]}}


_DEFAULTS: Final = {"value": 0.0, "mean": 0.0, "std": 1.0, "low": 0.0, "high": 1.0, "gain": 1.0, "a": 0.0}


class ParamSpec(Struct, frozen=True):
    """One dense parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    """What pulls return unless asked otherwise; the shard computes in float32."""
    init: InitSpec = field(default_factory=InitSpec)
    lr_scale: float = 1.0
    weight_decay: float | None = None
    """Overrides the optimizer's."""
    trainable: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @classmethod
    def read(cls, name: str, data: Any, errors: list[PsError]) -> Self:
        where = f"params.{name}"
        try:
            check_param_name(name)
        except PsError as e:
            errors.append(e)
        r = Reader(data, where, errors)

        def shape_ok(v: Any) -> bool:
            return (
                isinstance(v, list | tuple)
                and len(v) <= limits.RANK_MAX
                and all(
                    isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= limits.MODEL_ELEMENTS_MAX for n in v
                )
            )

        if "shape" not in r.data:
            r.fail("shape", "is needed", 'a list of positive integers; "shape": [] is a single number')
        shape = r.take(
            "shape", (), shape_ok, f"a list of at most {limits.RANK_MAX} integers from 1 to {limits.MODEL_ELEMENTS_MAX}"
        )
        spec = cls(
            name,
            tuple(shape),
            r.choice("dtype", "float32", tuple(ITEMSIZE)),
            InitSpec.read(r.take("init", {}, lambda v: isinstance(v, Mapping), "an object"), f"{where}.init", errors),
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


class ScheduleSpec(Struct, frozen=True):
    """How the learning rate changes with the number of updates (see `core.schedule`)."""

    kind: str = "constant"
    step_size: int = 1
    gamma: float = 1.0
    t_max: int = 1
    eta_min: float = 0.0
    warmup: int = 0
    """Updates over which the rate rises linearly from 1/warmup of its value; then the schedule begins."""

    KINDS = {"constant": (), "step": ("step_size", "gamma"), "exponential": ("gamma",), "cosine": ("t_max", "eta_min")}

    @classmethod
    def read(cls, data: Any, where: str, errors: list[PsError]) -> Self:
        r = Reader(data, where, errors)
        kind = r.choice("kind", "constant", tuple(cls.KINDS))
        values: dict[str, Any] = {"warmup": r.integer("warmup", 0)}
        for name in cls.KINDS[kind]:
            if name in ("step_size", "t_max"):
                values[name] = r.integer(name, 1, 1)
                if name not in r.data:
                    r.fail(name, "is needed")
            else:
                values[name] = r.number(name, 1.0 if name == "gamma" else 0.0, 0.0)
        r.done()
        return cls(kind, **values)

    def document(self) -> dict[str, Any]:
        return {"kind": self.kind, "warmup": self.warmup, **{n: getattr(self, n) for n in self.KINDS[self.kind]}}


_OPTIMIZERS: Final[Mapping[str, Mapping[str, Any]]] = {
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

    NAMES = tuple(_OPTIMIZERS)

    @classmethod
    def read(cls, data: Any, where: str, errors: list[PsError]) -> Self:
        r = Reader(data, where, errors)
        name = r.choice("name", "sgd", cls.NAMES)
        values: dict[str, Any] = {}
        for key, default in _OPTIMIZERS[name].items():
            if key == "betas":

                def betas_ok(v: Any) -> bool:
                    return (
                        isinstance(v, list | tuple)
                        and len(v) == 2
                        and all(isinstance(b, int | float) and not isinstance(b, bool) and 0 <= b < 1 for b in v)
                    )

                b = r.take("betas", default, betas_ok, "two numbers of at least 0 and below 1")
                values[key] = (float(b[0]), float(b[1]))
            elif key == "centered":
                values[key] = r.flag(key, default)
            else:
                values[key] = r.number(key, default, 0.0, 1.0 if key in ("momentum", "alpha") else float("inf"))
        schedule = r.take("schedule", {}, lambda v: isinstance(v, Mapping), "an object")
        values["schedule"] = ScheduleSpec.read(schedule, f"{where}.schedule", errors)
        values["clip_value"] = r.optional_number("clip_value")
        values["clip_norm"] = r.optional_number("clip_norm")
        values["linear_scaling"] = r.flag("linear_scaling", False)
        r.done()
        return cls(name, **values)

    def document(self) -> dict[str, Any]:
        own = {k: getattr(self, k) for k in _OPTIMIZERS[self.name]}
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


class ConsistencySpec(Struct, frozen=True):
    """When pushes are applied and who waits for whom."""

    mode: str = "async"
    staleness: int = 0
    """ssp: how many clocks a worker may be ahead of the slowest live one."""
    quorum: float = 1.0
    """sync: fraction of the live roster that must have reported a clock before it commits."""
    quorum_count: int | None = None
    """sync: a count in place of the fraction."""
    min_workers: int = 1
    """sync and ssp: clock 0 opens when so many have joined."""
    late: str = "drop"
    count: int = 8
    """buffered: a partition applies the mean of every `count` pushes ..."""
    interval_ms: int = 1000
    """... or of what it holds after so long."""
    lag: str = "ignore"
    """Version lag: `ignore`, `scale` the step by 1/(1+lag), or `reject` beyond `lag_bound`."""
    lag_bound: int = 16

    MODES = {
        "async": (),
        "ssp": ("staleness", "min_workers"),
        "sync": ("quorum", "quorum_count", "min_workers", "late"),
        "buffered": ("count", "interval_ms"),
    }

    @property
    def immediate(self) -> bool:
        """Whether each push is applied by itself, at once."""
        return self.mode in ("async", "ssp") or (self.mode == "buffered" and self.count == 1)

    @classmethod
    def read(cls, data: Any, where: str, errors: list[PsError]) -> Self:
        r = Reader(data, where, errors)
        mode = r.choice("mode", "async", tuple(cls.MODES))
        values: dict[str, Any] = {}
        own = cls.MODES[mode]
        if "staleness" in own:
            values["staleness"] = r.integer("staleness", 0)
        if "quorum" in own:
            values["quorum"] = r.number("quorum", 1.0, 0.0, 1.0)
            if values["quorum"] <= 0.0:
                r.fail("quorum", "must be above 0")
            values["quorum_count"] = r.optional_integer("quorum_count")
            values["late"] = r.choice("late", "drop", ("drop", "fold"))
        if "min_workers" in own:
            values["min_workers"] = r.integer("min_workers", 1, 1, limits.WORKERS_PER_MODEL_MAX)
        if "count" in own:
            values["count"] = r.integer("count", 8, 1, limits.QUEUED_REQUESTS_MAX)
            values["interval_ms"] = r.integer("interval_ms", 1000, 1, 3_600_000)
        values["lag"] = r.choice("lag", "ignore", ("ignore", "scale", "reject"))
        values["lag_bound"] = r.integer("lag_bound", 16)
        r.done()
        return cls(mode, **values)

    def document(self) -> dict[str, Any]:
        own = {n: getattr(self, n) for n in self.MODES[self.mode]}
        return {"mode": self.mode, **own, "lag": self.lag, "lag_bound": self.lag_bound}


class CheckpointSpec(Struct, frozen=True):
    """When the scheduler writes a checkpoint of the model by itself, and how many it keeps."""

    every_clocks: int = 0
    """0: not by clocks."""
    every_minutes: float = limits.CHECKPOINT_INTERVAL_MIN
    """0: not by time."""
    keep: int = 3
    metric: str = "accuracy"
    """The checkpoint at which this metric was best is kept as well."""
    best: str = "max"

    @classmethod
    def read(cls, data: Any, where: str, errors: list[PsError]) -> Self:
        r = Reader(data, where, errors)
        spec = cls(
            r.integer("every_clocks", 0),
            r.number("every_minutes", limits.CHECKPOINT_INTERVAL_MIN, 0.0),
            r.integer("keep", 3, 1, 1000),
            r.take("metric", "accuracy", lambda v: isinstance(v, str) and 0 < len(v) <= 64, "a metric's name"),
            r.choice("best", "max", ("max", "min")),
        )
        r.done()
        return spec

    def document(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


class ModelSpec(Struct, frozen=True):
    """A named set of parameters with one optimizer and one consistency setting."""

    name: str
    params: tuple[ParamSpec, ...]
    """In the order given, which is their order in the flat vector."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    consistency: ConsistencySpec = field(default_factory=ConsistencySpec)
    partitions: int = 1
    ack: str = "applied"
    """What survives of a push that was acknowledged: `applied` (nothing but memory), `journaled`, `fsynced`."""
    evaluate_every: int = 0
    """Clocks between two evaluation tasks; 0: none."""
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)

    @property
    def size(self) -> int:
        """Number of elements of the flat vector."""
        return sum(p.size for p in self.params)

    @property
    def uploads(self) -> tuple[str, ...]:
        """Names of the parameters whose first values a client uploads."""
        return tuple(p.name for p in self.params if p.init.kind == "upload")

    @classmethod
    def parse(cls, data: Any) -> Self:
        """The spec that a JSON object describes, defaults filled in.

        Raises RequestError: `invalid_field` naming each wrong field.
        """
        errors: list[PsError] = []
        r = Reader(data, "", errors)
        name = r.take("name", "", lambda v: isinstance(v, str), "a string")
        try:
            check_model_name(name)
        except PsError as e:
            errors.append(e)
        raw = r.take(
            "params", {}, lambda v: isinstance(v, Mapping) and len(v) > 0, "an object of at least one parameter"
        )
        if "params" not in r.data:
            r.fail("params", "is needed")
        if len(raw) > limits.PARAMS_PER_MODEL_MAX:
            r.fail("params", f"holds {len(raw)} parameters; at most {limits.PARAMS_PER_MODEL_MAX} are allowed")
            raw = {}
        params = tuple(ParamSpec.read(str(n), d, errors) for n, d in raw.items())
        size = sum(p.size for p in params)
        if size > limits.MODEL_ELEMENTS_MAX:
            r.fail("params", f"hold {size} elements; at most {limits.MODEL_ELEMENTS_MAX} are allowed")
            size = 1
        least = max(1, -(-size * 4 // limits.PARTITION_BYTES_MAX))
        default = max(least, -(-size * 4 // limits.PARTITION_BYTES_DEFAULT), min(limits.PARTITIONS_DEFAULT_MIN, size))
        default = max(1, min(default, limits.PARTITIONS_MAX))
        partitions = r.integer("partitions", default, 1, limits.PARTITIONS_MAX)
        if size and not least <= partitions <= max(size, 1):
            r.fail("partitions", f"must be from {least} to {min(size, limits.PARTITIONS_MAX)} for {size} elements")
        obj = lambda v: isinstance(v, Mapping)  # noqa: E731
        spec = cls(
            name,
            params,
            OptimizerSpec.read(r.take("optimizer", {}, obj, "an object"), "optimizer", errors),
            ConsistencySpec.read(r.take("consistency", {}, obj, "an object"), "consistency", errors),
            partitions,
            r.choice("ack", "applied", ("applied", "journaled", "fsynced")),
            r.integer("evaluate_every", 0),
            CheckpointSpec.read(r.take("checkpoint", {}, obj, "an object"), "checkpoint", errors),
        )
        r.done()
        if errors:
            raise combined(errors)
        return spec

    def document(self) -> dict[str, Any]:
        """The JSON object of this spec, with every default written out."""
        return {
            "name": self.name,
            "params": {p.name: p.document() for p in self.params},
            "optimizer": self.optimizer.document(),
            "consistency": self.consistency.document(),
            "partitions": self.partitions,
            "ack": self.ack,
            "evaluate_every": self.evaluate_every,
            "checkpoint": self.checkpoint.document(),
        }

    def unknown(self, name: str) -> PsError:
        """The error of a parameter's name that the model lacks, with the nearest one it has."""
        names = [p.name for p in self.params]
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(names[:8])}{', ...' if names[8:] else ''}"
        return problem("unknown_parameter", f"model '{self.name}' has no parameter '{name}'", hint=hint, where=name)

    def patched(self, patch: Any) -> Self:
        """This spec after a JSON merge patch; what cannot change while the model lives is refused (422).

        Changing the optimizer's name or the consistency mode starts its other fields from their defaults.
        """
        if not isinstance(patch, Mapping):
            raise problem("malformed", "a merge patch is a JSON object")
        fixed = [k for k in ("name", "partitions", "ack") if k in patch]
        if fixed:
            raise problem("invalid_field", f"{', '.join(fixed)}: cannot be changed", hint="create another model")
        base = self.document()
        named = patch.get("params")
        stray = [str(n) for n in named if n not in base["params"]] if isinstance(named, Mapping) else []
        if stray:
            raise combined([self.unknown(n) for n in stray])
        for part, tag in (("optimizer", "name"), ("consistency", "mode")):
            new = patch.get(part)
            if isinstance(new, Mapping) and new.get(tag, base[part][tag]) != base[part][tag]:
                keep = (
                    "schedule",
                    "clip_value",
                    "clip_norm",
                    "linear_scaling",
                    "lag",
                    "lag_bound",
                    "lr",
                    "weight_decay",
                )
                allowed = _OPTIMIZERS.get(str(new.get(tag)), {})
                base[part] = {
                    k: v for k, v in base[part].items()
                    if k in keep and (part == "consistency" or k not in ("lr", "weight_decay") or k in allowed)
                }  # fmt: skip
        merged = merge_patch(base, patch)
        new_spec = type(self).parse(merged)
        if [(p.name, p.shape, p.dtype, p.init) for p in new_spec.params] != [
            (p.name, p.shape, p.dtype, p.init) for p in self.params
        ]:
            raise problem("invalid_field", "params: names, shapes, dtypes and init cannot be changed")
        return new_spec
