"""A model's spec: the body of `POST /models`, validated field by field, with defaults filled in.

`ModelSpec.parse` reports all wrong fields at once; `document()` returns the JSON with all defaults.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Self

from msgspec import Struct, field
from msgspec.structs import asdict

from paramserver import limits
from paramserver.core.fields import Reader, check_model_name, merge_patch
from paramserver.core.near import near
from paramserver.core.optimizer_spec import OptimizerSpec, kept_fields
from paramserver.core.param_spec import ParamSpec
from paramserver.errors import PsError, combined, problem
from paramserver.types import LEVELS

_MODES_ELSEWHERE: Final = {
    "synchronous": '"sync"',
    "bsp": '"sync"',
    "asynchronous": '"async"',
    "asp": '"async"',
}
_KEPT: Final = {"consistency": ("lag", "lag_bound"), "schedule": ("warmup",)}
"""Fields that stay when the kind of that part changes; of an optimizer, `kept_fields` names them."""

LATE: Final = ("drop", "fold")
LAG: Final = ("ignore", "scale", "reject")
BEST: Final = ("max", "min")


class ConsistencySpec(Struct, frozen=True):
    """When pushes are applied and who waits for whom."""

    mode: str = "async"
    staleness: int = 0
    """ssp: clocks that a worker may be ahead of the slowest live one."""
    quorum: float = 1.0
    """sync: fraction of the live roster that must have reported a clock before it commits."""
    quorum_count: int | None = None
    """sync: number of workers, instead of the fraction, which has no effect then."""
    min_workers: int = 1
    """sync: clock 0 opens once this many workers have joined; ssp: until then, the missing ones are at clock 0."""
    late: str = "drop"
    count: int = 8
    """buffered: a partition applies the mean of every `count` pushes, ..."""
    interval_ms: int = 1000
    """... or of what it holds when its oldest push has waited this long."""
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
        """Whether each push is applied on its own, at once."""
        return self.mode in ("async", "ssp") or (self.mode == "buffered" and self.count == 1)

    @classmethod
    def read(cls, data: Any, where: str, errors: list[PsError]) -> Self:
        r = Reader(data, where, errors)
        mode = r.choice("mode", "async", tuple(cls.MODES), _MODES_ELSEWHERE)
        values: dict[str, Any] = {}
        own = cls.MODES[mode]
        if "staleness" in own:
            values["staleness"] = r.integer("staleness", 0)
        if "quorum" in own:
            values["quorum"] = r.number("quorum", 1.0, 0.0, 1.0, "quorum_count is a number of workers")
            if values["quorum"] <= 0.0:
                r.fail("quorum", "must be above 0")
            values["quorum_count"] = r.optional_integer("quorum_count")
            values["late"] = r.choice("late", "drop", LATE)
        if "min_workers" in own:
            values["min_workers"] = r.integer("min_workers", 1, 1, limits.WORKERS_PER_MODEL_MAX)
        if "count" in own:
            values["count"] = r.integer("count", 8, 1, limits.QUEUED_REQUESTS_MAX)
            values["interval_ms"] = r.integer("interval_ms", 1000, 1, 3_600_000)
        values["lag"] = r.choice("lag", "ignore", LAG)
        values["lag_bound"] = r.integer("lag_bound", 16)
        r.done()
        return cls(mode, **values)

    def document(self) -> dict[str, Any]:
        own = {n: getattr(self, n) for n in self.MODES[self.mode]}
        return {"mode": self.mode, **own, "lag": self.lag, "lag_bound": self.lag_bound}


class CheckpointSpec(Struct, frozen=True):
    """When the scheduler writes a checkpoint of the model on its own, and how many it keeps."""

    every_clocks: int = 0
    """Clocks between two checkpoints; 0: not by clocks."""
    every_minutes: float = limits.CHECKPOINT_INTERVAL_MIN
    """Minutes between two checkpoints; 0: not by time."""
    keep: int = 3
    metric: str = "accuracy"
    """The checkpoint with the best value of this metric is kept as well."""
    best: str = "max"

    @classmethod
    def read(cls, data: Any, where: str, errors: list[PsError]) -> Self:
        r = Reader(data, where, errors)
        spec = cls(
            r.integer("every_clocks", 0),
            r.number("every_minutes", limits.CHECKPOINT_INTERVAL_MIN, 0.0),
            r.integer("keep", 3, 1, 1000),
            r.take("metric", "accuracy", lambda v: isinstance(v, str) and 0 < len(v) <= 64, "a metric's name"),
            r.choice("best", "max", BEST),
        )
        r.done()
        return spec

    def document(self) -> dict[str, Any]:
        return asdict(self)


def differences(have: Mapping[str, Any], asked: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Yield what differs between two documents of specs, or of parts of them below `at`, in words.

    Of two kinds of something, such as optimizers, only the kinds differ, as their other fields say little.
    """
    for key in dict.fromkeys((*have, *asked)):
        where = f"{at}{key}"
        if key not in asked or key not in have:
            yield f"{where} is {'there' if key in have else 'not there'}"
            continue
        old, new = have[key], asked[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            kinds = [k for k in ("name", "mode", "kind") if isinstance(old.get(k), str) and old[k] != new.get(k)]
            if kinds:
                yield f"{where}.{kinds[0]} is {old[kinds[0]]!r}, not {new.get(kinds[0])!r}"
            else:
                yield from differences(old, new, f"{where}.")
        elif old != new:
            yield f"{where} is {old!r:.60}, not {new!r:.60}"


class ModelSpec(Struct, frozen=True):
    """A named set of parameters with one optimizer and one consistency setting."""

    name: str
    params: tuple[ParamSpec, ...]
    """In the order given, which is also their order in the flat vector."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    consistency: ConsistencySpec = field(default_factory=ConsistencySpec)
    partitions: int = 1
    ack: str = "applied"
    """Durability of an acknowledged push: `applied` (in the shard's memory only), `journaled` or `fsynced`."""
    evaluate_every: int = 0
    """Clocks between two evaluation tasks; 0: none."""
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)

    @property
    def size(self) -> int:
        """Number of elements of the flat vector."""
        return sum(p.size for p in self.params)

    @property
    def uploads(self) -> tuple[str, ...]:
        """Names of the parameters whose initial values a client uploads."""
        return tuple(p.name for p in self.params if p.init.kind == "upload")

    @property
    def files(self) -> dict[str, str]:
        """File names of the parameters whose initial values the scheduler reads from files, by parameter."""
        return {p.name: p.init.path for p in self.params if p.init.kind == "file"}

    @classmethod
    def parse(cls, data: Any, params: tuple[ParamSpec, ...] = ()) -> Self:
        """Return the spec that a JSON object describes, with defaults filled in.

        `params`, if given, are its parameters, read before: reading thousands takes a tenth of a second.

        Raises RequestError (`invalid_field`) naming each wrong field.
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
            r.fail("params", "is required")
        if len(raw) > limits.PARAMS_PER_MODEL_MAX:
            r.fail("params", f"holds {len(raw)} parameters; at most {limits.PARAMS_PER_MODEL_MAX} are allowed")
            raw = {}
        params = params or tuple(ParamSpec.read(str(n), d, errors) for n, d in raw.items())
        size = sum(p.size for p in params)
        if size > limits.MODEL_ELEMENTS_MAX:
            r.fail("params", f"hold {size} elements; at most {limits.MODEL_ELEMENTS_MAX} are allowed")
            size = 1
        least = max(1, -(-size * 4 // limits.PARTITION_BYTES_MAX))
        small = min(limits.PARTITIONS_SMALL, -(-size * 4 // limits.PARTITION_BYTES_SMALL))
        default = min(max(least, small, -(-size * 4 // limits.PARTITION_BYTES_DEFAULT)), limits.PARTITIONS_MAX)
        partitions = r.integer("partitions", default, 1, limits.PARTITIONS_MAX)
        if size and not least <= partitions <= max(size, 1):
            r.fail("partitions", f"must be from {least} to {min(size, limits.PARTITIONS_MAX)} for {size} elements")
        spec = cls(
            name,
            params,
            OptimizerSpec.read(r.object("optimizer", 'such as {"name": "adam", "lr": 0.001}'), "optimizer", errors),
            ConsistencySpec.read(r.object("consistency", 'such as {"mode": "sync"}'), "consistency", errors),
            partitions,
            r.choice("ack", "applied", tuple(LEVELS)),
            r.integer("evaluate_every", 0),
            CheckpointSpec.read(r.object("checkpoint"), "checkpoint", errors),
        )
        r.done()
        r.tell()
        return spec

    @classmethod
    def asked(cls, data: Any) -> Self:
        """Return the spec that a request asks for: what `parse` reads of a stored one is not all accepted of a new one.

        Raises RequestError (`invalid_field`) as `parse` does, and for a quorum of both kinds.
        """
        spec = cls.parse(data)
        _refuse_two_quorums(data)
        return spec

    def document(self) -> dict[str, Any]:
        """Return the JSON object of this spec, with every default written out."""
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

    def unknown(self, wrong: Iterable[str]) -> list[PsError]:
        """Return an error for each parameter that the model lacks; the first few hint at the nearest known name."""
        names = [p.name for p in self.params]
        some = f"it has {', '.join(names[:8])}{', ...' if names[8:] else ''}"
        errors: list[PsError] = []
        for name in wrong:
            found = near(name, names) if len(errors) < limits.HINTS_MAX else None
            hint = f"did you mean '{found}'?" if found else some
            told = name[: limits.PARAM_NAME_BYTES_MAX]
            detail = f"model '{self.name}' has no parameter '{told}'"
            errors.append(problem("unknown_parameter", detail, hint=hint, where=told))
            if len(errors) >= limits.ERRORS_FOUND_MAX:
                break
        return errors

    def patched(self, patch: Any) -> Self:
        """Return this spec after a JSON merge patch; raises RequestError (422) for fields that cannot change.

        When the optimizer's name, its schedule's kind or the consistency mode changes, the other fields of that start
        from their defaults, except those of the optimizer that `kept_fields` names, `warmup`, `lag` and `lag_bound`.
        A quorum of one kind, `quorum` or `quorum_count`, takes the place of the other.
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
            raise combined(self.unknown(stray))
        _start_anew(base, patch, "optimizer", "name")
        _start_anew(base, patch, "consistency", "mode")
        _start_anew(base["optimizer"], patch.get("optimizer"), "schedule", "kind")
        rule = _consistency(patch)
        for kind, other in (("quorum", "quorum_count"), ("quorum_count", "quorum")):
            if rule.get(kind) is not None and other not in rule:
                base["consistency"].pop(other, None)
        merged = merge_patch(base, patch)
        new_spec = type(self).parse(merged, () if "params" in patch else self.params)
        if new_spec.params is not self.params and [(p.name, p.shape, p.dtype, p.init) for p in new_spec.params] != [
            (p.name, p.shape, p.dtype, p.init) for p in self.params
        ]:
            raise problem("invalid_field", "params: names, shapes, dtypes and init cannot be changed")
        _refuse_two_quorums(patch)
        return new_spec


def _consistency(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The consistency that a request names; empty if it names none."""
    rule = body.get("consistency")
    return rule if isinstance(rule, Mapping) else {}


def _refuse_two_quorums(body: Mapping[str, Any]) -> None:
    """Raise RequestError (`invalid_field`) if a request asks for a fraction of the workers and for a number of them."""
    rule = _consistency(body)
    if rule.get("quorum_count") is not None and rule.get("quorum") not in (None, 1.0):
        where = "consistency.quorum"
        hint = "name one of the two; for a fraction, set quorum_count to null"
        raise problem("invalid_field", f"{where}: has no effect beside quorum_count", hint=hint, where=where)


def _start_anew(base: dict[str, Any], patch: Any, part: str, tag: str) -> None:
    """Remove from a part of a document, if the patch changes its kind, what is not kept then."""
    new = patch.get(part) if isinstance(patch, Mapping) else None
    if isinstance(new, Mapping) and new.get(tag, base[part][tag]) != base[part][tag]:
        kept = kept_fields(str(new[tag])) if part == "optimizer" else _KEPT[part]
        base[part] = {k: base[part][k] for k in kept if k in base[part]}
