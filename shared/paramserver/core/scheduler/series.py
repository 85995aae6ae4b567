"""Metrics over time, bounded to the newest points of each name."""

from collections import deque
from collections.abc import Mapping
from math import isfinite, nan
from typing import Any, Final, Self

from paramserver import limits
from paramserver.core.fields import INTEGER_MAX, finite, is_integer
from paramserver.errors import problem


def is_metric_name(value: Any) -> bool:
    """Whether a JSON value can name a metric: 1 to 64 printable characters."""
    return isinstance(value, str) and 0 < len(value) <= 64 and value.isprintable()


def check_metrics(metrics: Any) -> dict[str, float]:
    """Return the metrics as floats; raises RequestError (`invalid_field`) unless they are numbers under short names.

    None stands for NaN or infinity, which JSON does not have.
    """
    if not isinstance(metrics, Mapping):
        raise problem("invalid_field", "metrics: must be an object of numbers", where="metrics")
    if len(metrics) > limits.METRIC_NAMES_MAX:
        raise problem("invalid_field", f"metrics: at most {limits.METRIC_NAMES_MAX} names", where="metrics")
    for name, value in metrics.items():
        if not is_metric_name(name):
            raise problem(
                "invalid_field", f"metrics: {name!r:.80} is not a name of 1 to 64 characters", where="metrics"
            )
        diverged = value is None or (isinstance(value, float) and not finite(value))  # as a loss may be: no mistake
        if not diverged and not (finite(value) and abs(value) <= 1e300):
            raise problem("invalid_field", f"metrics.{name}: must be a number", where=f"metrics.{name}")
    return {str(k): nan if v is None else float(v) for k, v in metrics.items()}


def check_points(reported: Any) -> list[tuple[int | None, dict[str, float]]]:
    """Return what a heartbeat reports as (clock, metrics), oldest first; raises like `check_metrics`.

    It is a list of [clock, metrics], or an object of metrics of the worker's present clock, which is None here.
    """
    if not isinstance(reported, list):
        metrics = check_metrics(reported)
        return [(None, metrics)] if metrics else []
    points: list[tuple[int | None, dict[str, float]]] = []
    for point in reported[: limits.METRIC_POINTS_AT_ONCE_MAX + 1]:
        if not (isinstance(point, list) and len(point) == 2 and is_integer(point[0], 0, INTEGER_MAX - 1)):
            raise problem("invalid_field", "metrics: must be an object, or a list of [clock, object]", where="metrics")
        points.append((point[0], check_metrics(point[1])))
    if len(points) > limits.METRIC_POINTS_AT_ONCE_MAX:
        most = f"metrics: at most {limits.METRIC_POINTS_AT_ONCE_MAX} clocks at once"
        raise problem("invalid_field", most, where="metrics")
    return points


def in_json(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return the metrics as JSON has them: NaN and infinity, which it does not have, as None."""
    return {name: value if isfinite(value) else None for name, value in metrics.items()}


Point = tuple[float, int, str, float]
"""(Unix seconds, clock or -1, worker, value)."""

NOT_FINITE_S: Final = 60.0
"""How long a value that is NaN or infinite is remembered after other workers have reported finite ones."""


class Series:
    """The metrics of one model: their points by name."""

    def __init__(self) -> None:
        self.points: dict[str, deque[Point]] = {}
        """The finite values of each name."""
        self.not_finite: dict[str, tuple[float, float, str]] = {}
        """Names whose newest value is NaN or infinite -> (Unix seconds of the first one, of the last one, worker)."""
        self.outdated: set[str] = set()
        """Names without a finite value since `outdate`; another leader does not know them."""
        self._due_s: float | None = None

    @classmethod
    def of(cls, doc: Mapping[str, Any]) -> Self:
        """Rebuild a series from its stored document."""
        series = cls()
        for name, points in doc["points"].items():
            rows = ((float(t), int(c), str(w), float(v)) for t, c, w, v in points)
            series.points[name] = deque(rows, maxlen=limits.METRIC_POINTS_MAX)
        series.not_finite = {n: (float(a), float(b), str(w)) for n, (a, b, w) in doc["not_finite"].items()}
        return series

    def stored(self) -> dict[str, Any]:
        """Stored field `series:NAME`: the newest points of each name."""
        newest = {n: list(p)[-limits.METRIC_POINTS_STORED :] for n, p in self.points.items()}
        bad = {n: list(found) for n, found in self.not_finite.items()}
        return {"points": {n: [list(row) for row in p] for n, p in newest.items()}, "not_finite": bad}

    def due(self, now: float) -> bool:
        """Whether points have waited long enough to be stored; if so, they count as stored from now on."""
        if self._due_s is None or now < self._due_s:
            return False
        self._due_s = None
        return True

    def add(self, now: float, unix_s: float, clock: int | None, worker: str, metrics: Mapping[str, float]) -> int:
        """Append a point for each finite value, except under names beyond the bound; return the number of points.

        Of a value that is not finite, only who reported it when is kept, until that worker reports a finite one.
        """
        added, changed = 0, False
        for name, value in metrics.items():
            if name not in self.points and name not in self.not_finite:
                if len(self.points.keys() | self.not_finite.keys()) >= limits.METRIC_NAMES_MAX:
                    continue
            changed = True
            if not finite(value):
                first, _, by = self.not_finite.get(name, (unix_s, unix_s, worker))
                self.not_finite[name] = first, unix_s, by
                continue
            if name not in self.points:
                self.points[name] = deque(maxlen=limits.METRIC_POINTS_MAX)
            self.outdated.discard(name)
            self.points[name].append((unix_s, -1 if clock is None else clock, worker, value))
            added += 1
            if bad := self.not_finite.get(name):
                if bad[2] == worker or abs(unix_s - bad[1]) > NOT_FINITE_S:
                    del self.not_finite[name]
        if changed and self._due_s is None:
            self._due_s = now + limits.METRICS_STORE_INTERVAL_S
        return added

    def has(self, name: str, clock: int, worker: str) -> bool:
        """Whether that worker has reported a finite value of that name at that clock."""
        return any((c, w) == (clock, worker) for _, c, w, _ in self.points.get(name, ()))

    def outdate(self) -> None:
        """Note that the model was restored, went back or lost values: what all points were measured of is gone."""
        self.outdated = {*self.points}

    def latest(self, name: str) -> float | None:
        """The newest value of that name; None if there is none, it is not finite, or is of values that are gone."""
        points = self.points.get(name) if name not in self.not_finite and name not in self.outdated else None
        return points[-1][3] if points else None

    def document(self, name: str) -> dict[str, Any]:
        """Return {"name", "points": [[Unix seconds, clock or null, worker, value], ...]}, oldest first."""
        return {"name": name, "points": [[t, None if c < 0 else c, w, v] for t, c, w, v in self.points.get(name, ())]}
