"""JSON documents of everything the scheduler knows, for GET routes. Changes nothing."""

from collections.abc import Collection, Mapping
from math import inf
from typing import Any, Final

from paramserver.core.scheduler.balance import ShardLoad, worst_loss
from paramserver.core.scheduler.checkpoints import no_checkpoint
from paramserver.core.scheduler.cluster import Cluster
from paramserver.core.scheduler.membership import JOIN_FIRST, Holder, Worker
from paramserver.core.scheduler.models import Model
from paramserver.core.scheduler.series import Point, in_json
from paramserver.core.scheduler.timeline import place
from paramserver.core.spec import ModelSpec
from paramserver.errors import problem
from paramserver.types import ModelKey

DEAD_SHOWN_S: Final = 60.0
"""How long the overview shows a dead worker after its last heartbeat."""


class Reading:
    """Read-only view of a `Cluster`. Methods that take a model's name raise NotFoundError (`unknown_model`)."""

    def __init__(self, cluster: Cluster) -> None:
        self._c = cluster

    @property
    def term(self) -> int:
        """Leader term of this scheduler."""
        return self._c.term

    @property
    def cluster(self) -> str:
        """The cluster's id."""
        return self._c.id

    def map(self) -> dict[str, Any]:
        """{"term", "cluster", "map_epoch", "shards": {name: {"addresses", "alive"}}}."""
        return {k: v for k, v in self._c.map_document().items() if k != "type"}

    def shards(self, now: float) -> list[dict[str, Any]]:
        """All shards that are live or only recently gone, by name.

        `state` is `active`, `draining`, `left` (it left by itself) or `dead`; `moves` are the moves away from it.
        """
        shown = [s for s in self._c.shards.values() if s.listed]
        return self._c.shard_lines(sorted(shown, key=lambda s: s.name), now)

    def shard(self, name: str, now: float) -> dict[str, Any]:
        """One shard; raises NotFoundError (`unknown_node`)."""
        found = self._c.shards.get(name)
        if found is None:
            raise problem("unknown_node", f"no shard {name!r:.80}")
        return self._c.shard_line(found, now)

    def check_shard(self, name: str, epoch: int) -> None:
        """Raise FencedError if that incarnation of a shard is dead; NotFoundError if it never joined."""
        self._c.joined_shard(name, epoch)

    def missing_after_loss(self) -> tuple[int, int] | None:
        """(needed, free) bytes of the shard that the others have the least memory to take the place of.

        None if they could take the partitions of any one.  A drain of that shard is refused; if it is lost, they are
        given its partitions nevertheless, as otherwise nobody would serve them.
        """
        free = self._c.free_bytes()
        held = dict.fromkeys(free, 0)
        for model in self._c.models.values():
            for (name, _), size in model.held_bytes().items():
                if name in held:
                    held[name] += size
        return worst_loss(held, [ShardLoad(n, self._c.shards[n].draining, free[n]) for n in free])

    def models(self) -> list[dict[str, Any]]:
        """A summary of each model, by name."""
        return [_summary(m) for _, m in sorted(self._c.models.items())]

    def model(self, name: str) -> dict[str, Any]:
        """The full document of `GET /models/{m}`."""
        return self._c.public(self._c.model(name))

    def outline(self, name: str) -> tuple[dict[str, Any], ModelSpec]:
        """The full document without `partitions` and `spec`, and what `spec` is made of."""
        model = self._c.model(name)
        return self._c.outline(model), model.spec

    def partitions(self, name: str) -> list[dict[str, Any]]:
        """The `partitions` of the full document."""
        return self._c.model(name).partition_lines()

    def key(self, name: str, generation: int | None = None) -> ModelKey:
        """The present creation of a model; raises FencedError (`model_replaced`) if another one is given."""
        return self._c.model(name, generation).key

    def spec(self, key: ModelKey) -> ModelSpec:
        """The settings of that creation of a model; raises FencedError (`model_replaced`) if there is a later one."""
        return self._c.created(key).spec

    def place(self, key: ModelKey, index: int) -> tuple[int, int]:
        """The `timeline.place` of a partition of that creation of a model; raises like `spec`."""
        return place(self._c.created(key), index)

    def owner(self, key: ModelKey, index: int) -> str:
        """Base URL of the shard that owns a partition; raises Unavailable while none does, else like `spec`."""
        name = self._c.created(key).owners[index].shard
        shard = self._c.shards.get(name) if name is not None else None
        if shard is None or not shard.addresses:
            raise problem("unavailable", f"partition {index} of '{key.name}' has no owner now")
        return shard.addresses[0]

    def workers(self, name: str, now: float, *, kept: bool = False, dead_s: float = inf) -> list[dict[str, Any]]:
        """The workers of a model: the live ones by rank, then the dead; see `worker`.

        With `kept`, also those that a restore has brought a state for and that have not joined yet; of the dead, those
        heard from in the last `dead_s`.
        """
        model = self._c.model(name)
        shown = (w for w in model.roster if (w.epoch or kept) and (w.alive or now - w.heard_s < dead_s))
        ordered = sorted(shown, key=lambda w: (not w.alive, w.rank, w.name))
        return [_worker(model, w, now, kept) for w in ordered]

    def worker(self, name: str, worker: str, now: float, *, kept: bool = False) -> dict[str, Any]:
        """One worker; raises NotFoundError (`unknown_worker`) if it never joined.

        `kept` includes the state it stores with checkpoints, which may be large.
        """
        model = self._c.model(name)
        found = model.roster.workers.get(worker)
        if found is None or not (found.epoch or kept):
            raise problem("unknown_worker", f"worker {worker!r:.140} has not joined model '{name}'", hint=JOIN_FIRST)
        return _worker(model, found, now, kept)

    def membership(self, name: str, worker: str, now: float) -> dict[str, Any]:
        """One worker, and the generation of the model that it has joined; raises like `worker`."""
        return {**self.worker(name, worker, now), "generation": self._c.model(name).generation}

    def datasets(self, name: str) -> list[dict[str, Any]]:
        """The datasets of a model and their progress."""
        return [d.document() for d in self._c.model(name).datasets.values()]

    def metric_names(self, name: str, only: str | None) -> list[str]:
        """Names of the metrics that workers of a model have reported: all of them, or `only` that one."""
        return [n for n in self._c.model(name).series.points if only in (None, n)]

    def points(self, name: str) -> Mapping[str, Collection[Point]]:
        """The points of each metric, oldest first, as they are kept: a copy of all of them takes most of a second."""
        return self._c.model(name).series.points

    def metric(self, name: str, metric: str) -> dict[str, Any]:
        """One metric of a model: {"name", "points": [[Unix seconds, clock or null, worker, value], ...]}."""
        return self._c.model(name).series.document(metric)

    def latest(self, name: str) -> dict[str, tuple[float, float]]:
        """For each metric: (Unix seconds of its newest point, mean of the points in the second up to it).

        Those before a clock that was set back are not of that second.
        """
        found: dict[str, tuple[float, float]] = {}
        for metric, points in self._c.model(name).series.points.items():
            newest = points[-1][0]
            values: list[float] = []
            for unix_s, _, _, value in reversed(points):
                if not newest - 1.0 < unix_s <= newest:
                    break
                values.append(value)
            found[metric] = newest, sum(values) / len(values)
        return found

    def not_finite(self, name: str) -> dict[str, tuple[float, str]]:
        """For each metric whose newest value is NaN or infinite: (Unix seconds, worker) of the first such report."""
        found = self._c.model(name).series.not_finite
        return {metric: (first, worker) for metric, (first, _, worker) in found.items()}

    def waiting_for(self, name: str) -> list[str]:
        """What the parked workers of a model wait for: names of workers, or a phrase such as "the commit"."""
        model = self._c.model(name)
        out: dict[str, None] = {}
        for clock in dict.fromkeys([w.clock for w in model.clock_waiters]):  # of thousands, nearly all wait for one
            out |= dict.fromkeys(model.gate.waiting_for(clock, model.roster))
        return list(out)

    def checkpoints(self, name: str) -> list[dict[str, Any]]:
        """The checkpoints of a model, oldest first."""
        records = self._c.model(name).checkpoints.records.values()
        return [r.document() for r in sorted(records, key=lambda r: r.number)]

    def creation(self, name: str) -> str:
        """Identifier of a model in checkpoint manifests (`Model.creation`); raises NotFoundError."""
        return self._c.model(name).creation

    def checkpoint(self, name: str, checkpoint: str) -> dict[str, Any]:
        """One checkpoint by its name, `latest` or `best`; raises NotFoundError (`unknown_checkpoint`)."""
        model = self._c.model(name)
        record = model.checkpoints.find(checkpoint, model.spec.checkpoint)
        if record is None:
            raise no_checkpoint(name, checkpoint)
        return record.document()

    def runs(self) -> list[dict[str, Any]]:
        """All runs that are kept, newest first."""
        return [r.document() for r in reversed(self._c.runs.values())]

    def run(self, run: str) -> dict[str, Any]:
        """One run; raises NotFoundError (`unknown_run`)."""
        return self._c.run(run).document()

    def pool(self, now: float) -> list[dict[str, Any]]:
        """The live members of the worker pool."""
        return [
            {
                "member": m.name,
                **_lease(m, now),
                "allow": list(m.allow),
                "run": m.place[0] if m.place else None,
                "place": m.place[1] if m.place else None,
                "metrics": dict(m.metrics),
            }
            for m in self._c.members.values()
            if m.alive
        ]

    def status(self, now: float) -> dict[str, Any]:
        """Overview: map, shards, names of the models (see `model_status`), runs (oldest first), pool.

        `runs_ended` counts the runs that have ended under this leader, by state.
        """
        return {
            "term": self._c.term,
            "map_epoch": self._c.map_epoch,
            "now": now + self._c.wall_offset_s,
            "shards": self.shards(now),
            "models": sorted(self._c.models),
            "runs": self.runs()[::-1],
            "runs_ended": dict(self._c.runs_ended),
            "pool": self.pool(now),
        }

    def model_status(self, name: str, now: float) -> dict[str, Any] | None:
        """One model of the overview: its summary, partitions and workers, without its spec; None if it is gone."""
        model = self._c.models.get(name)
        if model is None:
            return None
        return {
            **_summary(model),
            "lr": model.spec.optimizer.document().get("lr"),
            "created_s": model.unix_s,
            "parameters": len(model.spec.params),
            "files_error": model.initial.files_error,
            "checkpoint_error": model.checkpoints.error,
            "partition_lines": model.partition_lines(),
            "durable_behind_s": _durable_behind_s(model, now),
            "waiting_for": self.waiting_for(name),
            "workers": self.workers(name, now, dead_s=DEAD_SHOWN_S),
        }


def _lease(holder: Holder, now: float) -> dict[str, Any]:
    return {
        "epoch": holder.epoch,
        "alive": holder.alive,
        "state": "active" if holder.alive else "dead",
        "heartbeat_age_s": max(0.0, now - holder.heard_s),
    }


def _worker(model: Model, w: Worker, now: float, kept: bool) -> dict[str, Any]:
    lease = _lease(w, now)
    if w.alive and (w.draining or w.resting):
        lease["state"] = "draining" if w.draining else "resting"
    elif not w.epoch:
        lease["state"] = "restored"
    elif w.left:
        lease["state"] = "left"
    return {
        "worker": w.name,
        **lease,
        "rank": w.rank,
        "clock": w.done,
        "next_clock": model.gate.next_clock(w),
        "metrics": in_json(w.metrics),
        **({"kept": w.state} if kept else {}),
    }


def _summary(model: Model) -> dict[str, Any]:
    """The public document without spec and partitions."""
    return {
        "name": model.name,
        "generation": model.generation,
        "revision": model.revision,
        "timeline": model.timeline,
        "clock": model.gate.first_clock,
        "version": model.version,
        "state": "ready" if model.ready else "initializing",
        "mode": model.spec.consistency.mode,
        "optimizer": model.spec.optimizer.name,
        "size": model.spec.size,
        "partitions": len(model.owners),
        "served": model.served,
        "live_workers": len(model.roster.live()),
    }


def _durable_behind_s(model: Model, now: float) -> float:
    """For how long the partition that has waited longest has had something to store, and stored nothing more.

    What a restore sets is stored, or in sync part of a cut, only once it has ended.
    """
    if not model.ready or model.restoring:
        return 0.0
    served = (o for o in model.owners if o.from_version is not None)
    waiting = (o for o in served if o.version > o.durable_version)
    return max((now - o.stored_s for o in waiting), default=0.0)
