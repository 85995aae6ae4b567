"""Metrics of a shard: for Prometheus, and a summary for its heartbeats."""

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Gauge

from paramserver.core.shard.effects import PushDone
from paramserver.wire.frame import PushFrame
from paramserver_node.tally import Counter, Histogram
from paramserver_node.usage import Usage
from paramserver_shard.buffers import BufferPool

if TYPE_CHECKING:
    from paramserver_shard.runtime import Runtime

BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BUCKETS_VERSIONS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

PUSHES: Final = Counter("paramserver_pushes_total", "Pushes accepted", ["model", "state"])
DUPLICATES: Final = Counter("paramserver_push_duplicates_total", "Pushes recognized as repeated", ["model"])
PULLS: Final = Counter("paramserver_pulls_total", "Pulls answered", ["model"])
RECEIVED: Final = Counter("paramserver_received_bytes_total", "Bytes of gradients received", ["model"])
SENT: Final = Counter("paramserver_sent_bytes_total", "Bytes of values sent", ["model"])
PUSH_S: Final = Histogram(
    "paramserver_push_seconds", "From a push's first byte to its acceptance", ["model"], buckets=BUCKETS_S
)
PULL_S: Final = Histogram(
    "paramserver_pull_seconds", "From a pull's first byte to its answer's last", ["model"], buckets=BUCKETS_S
)
LAG: Final = Histogram(
    "paramserver_push_lag_versions",
    "Versions applied between the pull that a gradient was computed from and its push",
    ["model"],
    buckets=BUCKETS_VERSIONS,
)
VALUES_KEPT: Final = Counter(
    "paramserver_values_kept_total", "Commits and flushes of partitions whose result was not finite", ["model"]
)
PARTITIONS: Final = Gauge("paramserver_partitions", "Partitions that this shard serves")
LENT: Final = Gauge("paramserver_buffer_lent_bytes", "Pooled memory in use")
KEPT: Final = Gauge("paramserver_buffer_kept_bytes", "Pooled memory kept for reuse")
HELD: Final = Gauge("paramserver_held_gradient_bytes", "Gradients that wait for their commit or flush")
HELD_MAX: Final = Gauge("paramserver_held_gradient_limit_bytes", "How much of them this shard holds at most")
MEMORY_MAX: Final = Gauge("paramserver_shard_memory_limit_bytes", "Memory that this shard counts on")
DEGRADED: Final = Gauge(
    "paramserver_shard_degraded", "1 while this shard cannot store its snapshots, or load a partition"
)
JOURNAL_S: Final = Histogram(
    "paramserver_journal_seconds",
    "One write to the journals, of as many entries as waited",
    ["level"],
    buckets=BUCKETS_S,
)
JOURNALED: Final = Counter("paramserver_journaled_bytes_total", "Bytes written to the journals", ["level"])
JOURNAL_WAITING: Final = Gauge("paramserver_journal_waiting_bytes", "Bytes of journal that are not durable yet")
_BY_MODEL: Final = (DUPLICATES, PULLS, RECEIVED, SENT, PUSH_S, PULL_S, LAG, VALUES_KEPT)

INTERVAL_S: Final = 0.9
"""Rates are recomputed at most this often; a little less than the heartbeat interval."""
RATE_INTERVALS: Final = 3
"""Intervals that a rate covers, so that polling once a second misses no burst even if a heartbeat comes between."""
RECENT_S: Final = 10.0
"""Time span that the durations and lags in a heartbeat cover."""
VALUES_KEPT_TOLD_S: Final = 60.0
"""For how long heartbeats tell that a model's values were kept."""
TIMES_KEPT: Final = 1024
LAGS_TOLD: Final = 256
"""Most workers per model whose lag is in a heartbeat."""
STATES: Final = ("applied", "staged", "buffered")


class _Times:
    """Durations of the newest requests."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, float]] = deque(maxlen=TIMES_KEPT)

    def add(self, now: float, seconds: float) -> None:
        self._kept.append((now, seconds))

    def quantiles(self, now: float) -> tuple[float, float] | None:
        """Return (median, 99th percentile) in seconds over the last 10 s; None without a request."""
        while self._kept and self._kept[0][0] < now - RECENT_S:
            self._kept.popleft()
        if not self._kept:
            return None
        ordered = sorted(s for _, s in self._kept)
        return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


@dataclass(slots=True)
class _Lag:
    """Version lag of one worker's recent pushes."""

    at: float = 0.0
    mean: float = 0.0
    total: int = 0
    count: int = 0


class _Flow:
    """Totals, durations and lags of one model's pushes and pulls."""

    def __init__(self, model: str, since_s: float) -> None:
        self.pushes = 0
        self.received = RECEIVED.labels(model)
        self.push_s = PUSH_S.labels(model)
        self.push_times = _Times()
        self.pulls = PULLS.labels(model)
        self.sent = SENT.labels(model)
        self.pull_s = PULL_S.labels(model)
        self.pull_times = _Times()
        self.lags: dict[str, _Lag] = {}
        self.values_kept = VALUES_KEPT.labels(model)
        self.values_kept_s = float("-inf")
        """When that was last counted."""
        self._marks = deque([(since_s, self._totals())], RATE_INTERVALS)
        """(time, totals) at the start of each of the last intervals."""

    def _totals(self) -> tuple[int, ...]:
        return self.pushes, self.pulls.total, self.received.total, self.sent.total

    def rates(self, now: float) -> dict[str, Any]:
        """Return the numbers for a heartbeat over the last intervals, and start a new interval."""
        totals = self._totals()
        since_s, before = self._marks[0]
        self._marks.append((now, totals))
        rates = [(new - old) / (now - since_s) for new, old in zip(totals, before, strict=True)]
        found: dict[str, Any] = {
            "pushes_per_s": round(rates[0], 2),
            "pulls_per_s": round(rates[1], 2),
            "in_bytes_per_s": round(rates[2]),
            "out_bytes_per_s": round(rates[3]),
        }
        for name, times in (("push", self.push_times), ("pull", self.pull_times)):
            if (both := times.quantiles(now)) is not None:
                found |= {f"{name}_p50_s": round(both[0], 6), f"{name}_p99_s": round(both[1], 6)}
        self.lags = {w: lag for w, lag in self.lags.items() if lag.at > now - RECENT_S}
        for lag in self.lags.values():
            if lag.count:
                lag.mean, lag.total, lag.count = lag.total / lag.count, 0, 0
        if now - self.values_kept_s < VALUES_KEPT_TOLD_S:
            found["values_kept"] = self.values_kept.total
        if self.lags:
            found["lag"] = {w: round(lag.mean, 2) for w, lag in list(self.lags.items())[:LAGS_TOLD]}
        return found


class Telemetry:
    """Prometheus totals, and recent rates for heartbeats."""

    def __init__(self, clock: Callable[[], float], models: Container[str]) -> None:
        """`models` are the names of those that exist; nothing is counted for others."""
        self.clock = clock
        self._models = models
        self._usage = Usage(clock)
        self._since = clock()
        self._flows: dict[str, _Flow] = {}
        self._rates: dict[str, Any] = {}

    def pushed(
        self, done: PushDone, size_bytes: int, began_s: float, worker: str | None = None, lag: int | None = None
    ) -> None:
        """Count a push accepted now that began to arrive at `began_s`; `lag` is from `frame_lag` or `name_lag`."""
        model = done.model.name
        now, flow = self.clock(), self._flow(model)
        if flow is None:
            return
        PUSHES.labels(model, done.state).inc()
        if done.duplicate:
            DUPLICATES.labels(model).inc()
        flow.pushes += 1
        flow.received.inc(size_bytes)
        flow.push_s.observe(now - began_s)
        flow.push_times.add(now, now - began_s)
        if lag is not None:
            LAG.labels(model).observe(lag)
        if lag is not None and worker is not None:
            known = flow.lags.setdefault(worker, _Lag())
            known.at, known.total, known.count = now, known.total + lag, known.count + 1

    def pulled(self, model: str, size_bytes: int, began_s: float) -> None:
        """Count a pull answered now that arrived at `began_s`."""
        now, flow = self.clock(), self._flow(model)
        if flow is None:
            return
        flow.pulls.inc()
        flow.sent.inc(size_bytes)
        flow.pull_s.observe(now - began_s)
        flow.pull_times.add(now, now - began_s)

    def values_kept(self, model: str) -> None:
        """Count that the result of a commit or flush of a partition was not finite."""
        if (flow := self._flow(model)) is not None:
            flow.values_kept.inc()
            flow.values_kept_s = self.clock()

    def _flow(self, model: str) -> _Flow | None:
        """Return the flow of a model; None if it was deleted meanwhile, as its series must not come back."""
        flow = self._flows.get(model)
        if flow is None and model in self._models:
            flow = self._flows[model] = _Flow(model, self._since)
        return flow

    def forget(self, model: str) -> None:
        """Remove the series of a deleted model, so that their number stays bounded by the existing models."""
        self._flows.pop(model, None)
        for state in STATES:
            PUSHES.remove(model, state)
        for metric in _BY_MODEL:
            metric.remove(model)

    def rates(self) -> dict[str, Any]:
        """Return the metrics for a heartbeat, over the last three seconds; recomputed at most every `INTERVAL_S`.

        For the process: `cpu_cores` (1.0 is one processor) and `rss_bytes`. In total and for each model in `models`:
        `pushes_per_s`, `pulls_per_s`, `in_bytes_per_s`, `out_bytes_per_s`. For each model also `push_p50_s`,
        `push_p99_s`, `pull_p50_s`, `pull_p99_s` if it had such requests in the last 10 s, `lag`: the mean version
        lag of each worker's pushes, and `values_kept`: how often the result of a commit or flush was not finite, if
        that was so in the last minute.
        """
        now = self.clock()
        if now - self._since >= INTERVAL_S:
            models = {m: flow.rates(now) for m, flow in self._flows.items()}
            sums = ("pushes_per_s", "pulls_per_s", "in_bytes_per_s", "out_bytes_per_s")
            total = {name: round(sum(m[name] for m in models.values()), 2) for name in sums}
            self._rates = {**self._usage.look(), **total, "models": models}
            # A model with nothing but zeros is left out until it has traffic again.
            self._flows = {m: f for m, f in self._flows.items() if any(models[m].values())}
            self._since = now
        return dict(self._rates)


def show(runtime: "Runtime", pools: Sequence[BufferPool], memory_limit_bytes: int) -> None:
    """Have the gauges tell what the shard holds at the moment at which they are read."""
    PARTITIONS.set_function(lambda: sum(1 for _ in runtime.core.partitions()))
    LENT.set_function(lambda: sum(pool.lent_bytes for pool in pools))
    KEPT.set_function(lambda: sum(pool.kept_bytes for pool in pools))
    HELD.set_function(lambda: runtime.core.held_bytes)
    HELD_MAX.set_function(lambda: runtime.core.held_bytes_max)
    MEMORY_MAX.set(memory_limit_bytes)
    JOURNAL_WAITING.set_function(lambda: runtime.core.durability.queued_bytes)
    DEGRADED.set_function(lambda: bool(runtime.degraded))


def frame_lag(done: PushDone, frame: PushFrame) -> int | None:
    """Return the version lag of an applied push, the largest over its parts; None if unknown or a duplicate."""
    if done.state != "applied" or done.duplicate:
        return None
    bases = {p.partition: p.base for p in frame.parts}
    lags = [
        p.version - 1 - base[0]
        for p in done.parts
        if (base := bases.get(p.partition)) is not None and base[1] == p.incarnation
    ]
    return max(0, *lags) if lags else None


def name_lag(done: PushDone, base_version: object) -> int | None:
    """Return the version lag of an applied push by name; None without a base version or for a duplicate."""
    if done.state != "applied" or done.duplicate or not isinstance(base_version, int):
        return None
    return max(0, done.version - 1 - base_version)
