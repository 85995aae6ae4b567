"""Recent history for the status page: events, update rates, and time series of the last day.

It is kept in memory only.  Metrics that workers report are kept by the core (`core/scheduler/series.py`), and survive a
restart.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from paramserver import limits
from paramserver.core.scheduler.reading import Reading
from paramserver.core.scheduler.runs import ENDED
from paramserver_scheduler.rings import RESOLUTIONS, Labels, Rings
from paramserver_scheduler.schema import EventStatus, ModelStatus, NodeStatus, RunStatus, Status

RATE_SAMPLES: Final = 6
"""Samples, one per second, from which a rate is computed: it covers the last five seconds."""

MODEL_METRICS: Final = {
    "model.version": ("version", "versions"),
    "model.updates_per_s": ("updates_per_s", "1/s"),
    "model.pushes_per_s": ("pushes_per_s", "1/s"),
    "model.pulls_per_s": ("pulls_per_s", "1/s"),
    "model.in_bytes_per_s": ("in_bytes_per_s", "B/s"),
    "model.out_bytes_per_s": ("out_bytes_per_s", "B/s"),
    "model.push_p50_s": ("push_p50_s", "s"),
    "model.push_p99_s": ("push_p99_s", "s"),
    "model.pull_p50_s": ("pull_p50_s", "s"),
    "model.pull_p99_s": ("pull_p99_s", "s"),
    "model.lag": ("lag", "versions"),
    "model.clock": ("clock", "clocks"),
}
"""Model metric -> (field of `ModelStatus`, unit)."""
NODE_METRICS: Final = {
    "node.cpu_cores": ("cpu_cores", "processors"),
    "node.rss_bytes": ("rss_bytes", "B"),
    "node.in_bytes_per_s": ("in_bytes_per_s", "B/s"),
    "node.out_bytes_per_s": ("out_bytes_per_s", "B/s"),
    "node.heartbeat_age_s": ("heartbeat_age_s", "s"),
}
"""Node metric -> (field of `NodeStatus`, unit)."""
UNITS: Final = {
    **{name: unit for name, (_, unit) in {**MODEL_METRICS, **NODE_METRICS}.items()},
    "model.durable_behind": "versions",
    "model.workers": "workers",
    "worker.lag": "versions",
    "worker.clock": "clocks",
    "cluster.shards": "shards",
    "cluster.workers": "workers",
    "cluster.pushes_per_s": "1/s",
    "cluster.updates_per_s": "1/s",
    "cluster.bytes_per_s": "B/s",
}
"""Every recorded metric and its unit."""
REPORTED: Final = "reported."
"""Prefix of the metrics that workers report, as in `reported.loss`."""

Level = Literal["good", "info", "bad"]
RUN_LEVELS: Final[Mapping[str, Level]] = {"running": "good", "finished": "good", "failed": "bad"}
"""The states of a run that are good or bad news."""


class History:
    """Turns published documents into readable events, and each second's status into time series."""

    def __init__(self, wall_offset_s: float) -> None:
        self.events: deque[EventStatus] = deque(maxlen=limits.STATUS_EVENTS_MAX)
        """Newest first."""
        self.rings = Rings()
        self.usage: dict[str, float] = {}
        """CPU and memory use of this process in the last second, from `Usage.look`."""
        self.wall_offset_s = wall_offset_s
        """Unix time minus monotonic time."""
        self._models: dict[str, tuple[int, int, int]] = {}
        self._owners: dict[str, list[Any]] = {}
        """Shard and token of each partition, of the models of which a document was seen."""
        self._workers: dict[str, dict[str, int]] = {}
        self._versions: dict[tuple[str, int], deque[tuple[float, int]]] = {}
        self._runs: dict[str, str] | None = None
        self._restarts: dict[str, int] = {}
        self._shards: dict[str, tuple[str, int]] | None = None
        self._moving = 0
        self._redis = "ok"
        self._degraded: set[str] = set()
        self._not_finite: set[tuple[str, str]] = set()
        self._values_kept: set[str] = set()

    def begin(self, read: Reading) -> None:
        """Record the models and workers that exist at the start, so that they cause no events."""
        self._models = {m["name"]: (m["generation"], m["revision"], m["timeline"]) for m in read.models()}
        for name in self._models:
            self._workers[name] = {w["worker"]: w["epoch"] for w in read.workers(name, 0.0) if w["alive"]}

    def follow_clock(self, wall_offset_s: float) -> None:
        """Use another Unix time from now on; time series that then reach far into the future are forgotten.

        Nothing could be added to them for as long.  Less than a slot of the coarsest is not worth a day of them.
        """
        if self.wall_offset_s - wall_offset_s > RESOLUTIONS[-1][0]:
            self.rings = Rings()
        self.wall_offset_s = wall_offset_s

    def add(self, now: float, kind: str, text: str, level: Level = "info") -> None:
        """Add an event at `now` (monotonic seconds); it replaces the newest event if that is the same."""
        if self.events and (self.events[0].kind, self.events[0].text) == (kind, text):
            self.events.popleft()
        self.events.appendleft(EventStatus(at=now + self.wall_offset_s, kind=kind, text=text, level=level))

    # --- documents that the core publishes ---

    def note(self, document: Mapping[str, Any], now: float) -> None:
        """Add the events that follow from a published document."""
        match document["type"]:
            case "model":
                self._note_model(document, now)
            case "roster":
                self._note_roster(document["model"], document["workers"], now)
            case "gone":
                self._models.pop(document["model"], None)
                self._owners.pop(document["model"], None)
                self._workers.pop(document["model"], None)
                self.add(now, "model_deleted", f"model {document['model']} was deleted")

    def _note_model(self, document: Mapping[str, Any], now: float) -> None:
        name = document["name"]
        new = (document["generation"], document["revision"], document["timeline"])
        generation, revision, timeline = self._models.get(name, (0, 0, 0))
        owners, known = [row[:2] for row in document["owners"]], self._owners.get(name)
        self._owners[name] = owners
        if generation != new[0]:
            self.add(now, "model_created", f"model {name} was created")
        else:
            if revision != new[1]:
                self.add(now, "model_changed", f"model {name} has new settings (revision {new[1]})")
            if timeline != new[2]:
                kept = None if known is None else owners == known
                self._note_timeline(name, document["clock"], changed=revision != new[1], kept=kept, now=now)
        self._models[name] = new
        self._note_roster(name, document["workers"], now)

    def _note_timeline(self, name: str, clock: int, *, changed: bool, kept: bool | None, now: float) -> None:
        """Tell of a new timeline; `changed`: settings begin with it, `kept`: its owners keep what they have."""
        if changed and kept is not False:
            self.add(now, "model_in_sync", f"model {name} is synchronous from clock {clock} on")
        elif not kept:
            self.add(now, "model_rolled_back", f"model {name} was rolled back to clock {clock}", "bad")
        else:
            what = "was restored, or has lost a part of its journal, and continues"
            self.add(now, "model_restored", f"model {name} {what} at clock {clock}")

    def _note_roster(self, model: str, workers: Mapping[str, Any], now: float) -> None:
        old, new = self._workers.get(model, {}), {w: int(v[0]) for w, v in workers.items()}
        for worker in sorted(new):
            if old.get(worker) != new[worker]:
                self.add(now, "worker_joined", f"worker {worker} has joined model {model}", "good")
        for worker in sorted(set(old) - set(new)):
            self.add(now, "worker_gone", f"worker {worker} has left model {model}, or died")
        self._workers[model] = new

    # --- the status of each second ---

    def sample(self, read: Reading, now: float) -> None:
        """Record the version of each model whose owners have all reported it; to be called every second."""
        models = {(m["name"], m["generation"]): int(m["version"]) for m in read.models() if m["served"]}
        self._versions = {k: self._versions.get(k, deque(maxlen=RATE_SAMPLES)) for k in models}
        for key, version in models.items():
            self._versions[key].append((now, version))

    def updates_per_s(self, model: str, generation: int) -> float:
        """Versions per second that the model has gained over the last samples; 0 if unknown."""
        samples = self._versions.get((model, generation))
        if not samples or samples[-1][0] <= samples[0][0]:
            return 0.0
        return max(0.0, (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0]))

    def goes_on(self, run: Mapping[str, Any]) -> bool:
        """Whether a run has not ended, or did only after the last status that was recorded: its end is to be told."""
        return run["state"] not in ENDED or (self._runs or {}).get(run["id"], run["state"]) not in ENDED

    def record(self, status: Status, now: float) -> None:
        """Add a status to the time series, and an event for each difference from the previous status."""
        unix_s = status.cluster.now
        alive = sum(n.alive for n in status.nodes if n.role == "shard")
        workers = sum(w.alive for m in status.models for w in m.workers)
        for name, value in (
            ("cluster.shards", alive),
            ("cluster.workers", workers),
            ("cluster.pushes_per_s", sum(m.pushes_per_s for m in status.models)),
            ("cluster.updates_per_s", sum(m.updates_per_s for m in status.models)),
            ("cluster.bytes_per_s", sum(m.in_bytes_per_s + m.out_bytes_per_s for m in status.models)),
        ):
            self.rings.add(name, (), unix_s, value)
        for node in status.nodes:
            if node.role != "pool" and node.alive:
                self._record(NODE_METRICS, node, (("node", node.name),), unix_s)
        for model in status.models:
            if not (self.rings.crowded and _is_quiet(model)):
                self._record_model(model, unix_s)
        self._note_shards(status, now)
        self._note_runs(status.runs, now)
        self._note_troubles(status, now)
        self._note_divergence(status.models, now)

    def _record_model(self, model: ModelStatus, unix_s: float) -> None:
        labels: Labels = (("model", model.name),)
        self._record(MODEL_METRICS, model, labels, unix_s)
        if model.served == model.partitions:
            self.rings.add("model.durable_behind", labels, unix_s, model.durable_behind)
        self.rings.add("model.workers", labels, unix_s, sum(w.alive for w in model.workers))
        for worker in model.workers:
            if worker.alive:
                own: Labels = (*labels, ("worker", worker.worker))
                self.rings.add("worker.lag", own, unix_s, worker.lag)
                self.rings.add("worker.clock", own, unix_s, worker.clock)

    def _record(
        self, metrics: Mapping[str, tuple[str, str]], of: ModelStatus | NodeStatus, labels: Labels, unix_s: float
    ) -> None:
        for metric, (field, _) in metrics.items():
            self.rings.add(metric, labels, unix_s, getattr(of, field))

    def _note_shards(self, status: Status, now: float) -> None:
        states = {n.name: (n.state, n.epoch) for n in status.nodes if n.role == "shard"}
        for name, (state, epoch) in states.items():
            old, old_epoch = (self._shards or {}).get(name, ("", 0))
            if self._shards is None or (old, old_epoch) == (state, epoch):
                continue
            if state == "active" and old == "draining" and epoch == old_epoch:
                self.add(now, "shard_stays", f"shard {name} is no longer draining", "good")
            elif state == "active":
                self.add(now, "shard_joined", f"shard {name} has joined", "good")
            elif state == "draining":
                self.add(now, "shard_draining", f"shard {name} is being drained: its partitions move to the others")
            elif state == "left":
                self.add(now, "shard_left", f"shard {name} has left")
            elif state == "dead":
                self.add(now, "shard_dead", f"shard {name} is dead; its partitions go to the others", "bad")
        self._shards = states
        moving = sum(len(m.moving) for m in status.models)
        if moving and not self._moving:
            self.add(now, "moves_began", "partitions are moving to other shards")
        elif self._moving and not moving:
            self.add(now, "moves_done", "all partition moves are complete", "good")
        self._moving = moving

    def _note_runs(self, runs: Sequence[RunStatus], now: float) -> None:
        states = {r.id: r.state for r in runs}
        for run in reversed(runs):
            if self._runs is not None and self._runs.get(run.id) != run.state:
                why = (run.reason.strip().splitlines() or [""])[-1]
                text = f"run {run.name or run.id} is {run.state}{why and ': ' + why}"
                self.add(now, f"run_{run.state}", text, RUN_LEVELS.get(run.state, "info"))
            again = self._runs is not None and run.restarts > self._restarts.get(run.id, 0)
            if again and run.state not in ENDED:  # else it is told why it has ended
                text = f"run {run.name or run.id} goes on after an exception of {run.error}"
                self.add(now, "run_restarted", text, "bad")
        self._runs = states
        self._restarts = {r.id: r.restarts for r in runs}

    def _note_troubles(self, status: Status, now: float) -> None:
        if status.cluster.redis != self._redis:
            self._redis = status.cluster.redis
            if self._redis == "away":
                self.add(now, "redis_away", "Redis does not answer or refuses; nothing new can be stored", "bad")
            else:
                self.add(now, "redis_back", "Redis accepts writes again", "good")
        degraded = {n.name for n in status.nodes if n.alive and n.metrics.get("degraded")}
        for name in sorted(degraded - self._degraded):
            self.add(now, "shard_degraded", f"shard {name} cannot store its snapshots, or load a partition", "bad")
        for name in sorted(self._degraded - degraded):
            self.add(now, "shard_recovered", f"shard {name} can store and load all its partitions again", "good")
        self._degraded = degraded

    def _note_divergence(self, models: Sequence[ModelStatus], now: float) -> None:
        for model in models:
            for metric, (_, worker) in model.not_finite.items():
                if (model.name, metric) not in self._not_finite:
                    by = f", as worker {worker} reports" if worker else ""
                    self.add(now, "not_finite", f"{metric} of model {model.name} is NaN or infinite{by}", "bad")
            if model.values_kept and model.name not in self._values_kept:
                text = f"results of model {model.name} that are NaN or infinite were discarded by their partitions"
                self.add(now, "values_kept", text, "bad")
        self._not_finite = {(m.name, metric) for m in models for metric in m.not_finite}
        self._values_kept = {m.name for m in models if m.values_kept}


def _is_quiet(model: ModelStatus) -> bool:
    """Whether a model has no live workers and has had no requests or updates for some seconds."""
    moved = model.pushes_per_s or model.pulls_per_s or model.updates_per_s or model.push_p50_s or model.pull_p50_s
    return not moved and not any(w.alive for w in model.workers)
