"""A run: one training of one model by workers from the pool, with its states and stopping rule.

A run is waiting while none of its places has a worker, else running; it can be paused; it ends as finished, failed or
stopped.  Nothing here starts a process: pool members ask for work.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Final

from msgspec import Struct

from paramserver import limits
from paramserver.core.fields import Reader, finite
from paramserver.core.scheduler.documents import check_document
from paramserver.core.scheduler.series import is_metric_name

RESTARTS_MAX: Final = 3
"""How often in a row a place is restarted after an exception within STEADY_S; the next one fails the run."""
STEADY_S: Final = 3600.0
"""After so long at its place a worker's exception is no part of a loop of crashes; training goes on for days."""
DEATHS_MAX: Final = 5
"""How often in a row the process at a place may die soon after it took it; this many deaths fail the run."""
SOON_S: Final = 60.0
"""A process that lived longer at its place has got somewhere: its function does not end it each time."""
ENDED: Final = ("finished", "failed", "stopped")
ENTRY: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
ALLOWED_BY_DEFAULT: Final = "paramserver.examples"
"""Prefix of the entries that a worker may import which was told of none."""

ALLOWED_LISTED_MAX: Final = 8
"""Allowed prefixes listed in the reason of a run whose entry idle workers may not import."""
_FIELDS: Final = tuple(
    "id name model entry args stop created_s evaluate_every checkpoint_every state reason from_clock ran_s".split()
)
"""Fields of a run that are stored and shown alike."""


@dataclass(slots=True)
class Place:
    """One worker's place in a run."""

    member: str | None = None
    restarts: int = 0
    """After exceptions, in the whole run."""
    done: bool = False
    """The entry has returned."""
    taken_s: float = -inf
    """When the member took it, if under this leader; monotonic, not stored."""
    deaths: int = 0
    """Processes in a row that died here within SOON_S, under this leader; not stored."""
    failures: int = 0
    """Exceptions in a row within STEADY_S, under this leader, but for those in an outage of shards; not stored."""


class StopRule(Struct, frozen=True):
    """Conditions that finish a run, whichever is met first; it also finishes once every entry has returned."""

    clocks: int | None = None
    """Clocks of the model since the run began."""
    minutes: float | None = None
    """Minutes in state running, but for those in which the model waits for `min_workers`."""
    metric: str | None = None
    at_least: float | None = None
    at_most: float | None = None

    @classmethod
    def check(cls, data: Any) -> "StopRule":
        """Return the rule that a JSON object describes; raises RequestError naming each invalid field."""
        r = Reader(data, "stop", [])
        clocks = r.optional_integer("clocks")
        minutes = r.take("minutes", None, _is_minutes, "a positive number below 1e+9")
        metric = r.take("metric", None, _is_metric, 'an object {"name": ..., "at_least" or "at_most": number}') or {}
        r.done()
        r.tell()
        return cls(clocks, minutes, metric.get("name"), metric.get("at_least"), metric.get("at_most"))

    def document(self) -> dict[str, Any]:
        """This rule as a JSON object."""
        out: dict[str, Any] = {}
        if self.clocks is not None:
            out["clocks"] = self.clocks
        if self.minutes is not None:
            out["minutes"] = self.minutes
        if self.metric is not None:
            bound = {"at_least": self.at_least, "at_most": self.at_most}
            out["metric"] = {"name": self.metric} | {k: v for k, v in bound.items() if v is not None}
        return out

    def met_by(self, name: str, value: float) -> str | None:
        """Why this value of a metric ends the run; None if it does not, as no value does that is not finite."""
        if name != self.metric or not isfinite(value):
            return None
        if self.at_least is not None and value >= self.at_least:
            return f"{name} reached {value:g} (stop rule: at least {self.at_least:g})"
        if self.at_most is not None and value <= self.at_most:
            return f"{name} reached {value:g} (stop rule: at most {self.at_most:g})"
        return None


def _is_minutes(value: Any) -> bool:
    return value is None or (finite(value) and 0 < value < 1e9)


def _is_metric(value: Any) -> bool:
    """Whether a JSON value is the metric of a stop rule with its bound, or null."""
    if value is None:
        return True
    if not isinstance(value, Mapping) or not set(value) <= {"name", "at_least", "at_most"}:
        return False
    bounds = [v for v in (value.get("at_least"), value.get("at_most")) if v is not None]
    return is_metric_name(value.get("name")) and len(bounds) == 1 and finite(bounds[0])


@dataclass(slots=True)
class Run:
    """One training of one model."""

    id: str
    name: str
    model: str
    entry: str
    args: Mapping[str, Any]
    stop: StopRule
    places: list[Place]
    created_s: float
    """Unix time."""
    evaluate_every: int = 0
    checkpoint_every: int = 0
    state: str = "waiting"
    reason: str = ""
    from_clock: int = 0
    """Clock of the model when the run was created, or when the first worker took a place; a new timeline moves it."""
    ran_s: float = 0.0
    """Seconds of training up to `counted_s`; see `StopRule.minutes`."""
    counted_s: float = 0.0
    """Time up to which `ran_s` is counted; monotonic, not stored."""
    saved_s: float = 0.0
    """When `ran_s` was last stored; monotonic."""
    awaited: int | None = None
    """How many more workers must join the model before any may begin; None: not known yet.  Not stored."""
    error: str = ""
    """The last line of the newest exception, and whose it is; empty if this leader knows of none.  Not stored."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def active(self) -> bool:
        """Whether its workers should work: it is waiting or running, not paused or ended."""
        return self.state in ("waiting", "running")

    def worker_name(self, place: int) -> str:
        """Name of the worker at that place."""
        return f"{self.id}/w{place}"

    def has(self, place: int, member: str | None) -> bool:
        """Whether the place is still the member's (None: is free); it may have been removed, or given to another."""
        return place < len(self.places) and self.places[place].member == member

    def attempt(self, place: int) -> int:
        """Number of restarts of that place after exceptions; 0 if the place no longer exists."""
        return self.places[place].restarts if place < len(self.places) else 0

    def count_time(self, now: float) -> None:
        """Add the time since the last call to `ran_s` if the run was running and its workers could train."""
        if self.state == "running" and not self.awaited:
            self.ran_s += max(0.0, now - self.counted_s)
        self.counted_s = now

    def clock_moved(self, skipped: int, after: int) -> None:
        """Note that a new timeline goes on at clock `after`: clocks that it skips are not the run's.

        It may also return to before `-skipped` clocks that were skipped earlier.
        """
        self.from_clock = min(self.from_clock + skipped, after)

    def settle(self, now: float, how: str, awaited: int) -> None:
        """Set an active run to waiting or running; the reason says which workers are missing and how to start them."""
        self.count_time(now)
        self.awaited = awaited
        filled = sum(p.member is not None for p in self.places)
        open_places = sum(p.member is None and not p.done for p in self.places)
        self.state = "running" if filled else "waiting"
        wanted = len(self.places)
        reasons = []
        if awaited and filled:
            reasons.append(f"training begins when {awaited} more worker{'s have' if awaited > 1 else ' has'} joined")
        if open_places and filled:
            reasons.append(f"{filled} of {wanted} workers; {open_places} more can join: {how}")
        elif open_places:
            reasons.append(f"no worker has taken one of its {wanted} places: {how}")
        self.reason = "; ".join(reasons)

    def change(self, state: str, now: float, reason: str = "") -> None:
        """Change the state and the reason shown for it."""
        self.count_time(now)
        self.state, self.reason = state, reason

    def stored(self) -> dict[str, Any]:
        """Stored field `run:ID`."""
        return {**self._fields(), "places": [[p.member, p.restarts, p.done] for p in self.places]}

    @classmethod
    def of(cls, doc: Mapping[str, Any], now: float) -> "Run":
        """Rebuild a run from its stored document."""
        fields = {name: doc[name] for name in _FIELDS} | {"stop": StopRule.check(doc["stop"])}
        places = [Place(m, r, d) for m, r, d in doc["places"]]
        return cls(**fields, places=places, counted_s=now, saved_s=now)

    def document(self) -> dict[str, Any]:
        """Body of `GET /runs/{id}`."""
        return {
            **self._fields(),
            "workers": len(self.places),
            "error": self.error,
            "places": [
                {"place": i, "worker": self.worker_name(i), "member": p.member, "restarts": p.restarts, "done": p.done}
                for i, p in enumerate(self.places)
            ],
        }

    def _fields(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in _FIELDS}
        return fields | {"args": dict(self.args), "stop": self.stop.document()}


def how_to_start(entry: str, barred: Sequence[Sequence[str]]) -> str:
    """How to start workers for an entry; `barred` has the allowed prefixes of each idle one that may not import it."""
    if not barred and is_allowed(entry, [ALLOWED_BY_DEFAULT]):
        return "start one with 'paramserver-worker'"
    start = f"start one with 'paramserver-worker --allow {entry.partition(':')[0]}'"
    if not barred:
        return start
    allowed = sorted({p for prefixes in barred for p in prefixes})
    listed = ", ".join(allowed[:ALLOWED_LISTED_MAX]) + (", ..." if len(allowed) > ALLOWED_LISTED_MAX else "")
    return (
        f"{len(barred)} idle worker{'s' if len(barred) > 1 else ''} may not import '{entry}' "
        f"(allowed: {listed or 'nothing':.200}): {start}"
    )


def is_allowed(entry: str, prefixes: Sequence[str]) -> bool:
    """Whether the entry's module equals a prefix or is below one: `a.b` allows `a.b` and `a.b.c`."""
    module = entry.partition(":")[0]
    return any(module == p or module.startswith(f"{p}.") for p in prefixes)


def check_run(entry: Any, workers: Any, args: Any, evaluate_every: Any, checkpoint_every: Any) -> None:
    """Raise RequestError naming each invalid field of a new run."""
    given = {"entry": entry, "workers": workers, "args": args}
    r = Reader(given | {"evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every}, "", [])
    r.take("entry", "", _is_entry, "an entry point", "write 'package.module:function'")
    r.integer("workers", 1, 1, limits.WORKERS_PER_MODEL_MAX)
    check_document(r.object("args"), "args")
    r.integer("evaluate_every", 0)
    r.integer("checkpoint_every", 0)
    r.tell()


def _is_entry(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 256 and ENTRY.fullmatch(value) is not None
