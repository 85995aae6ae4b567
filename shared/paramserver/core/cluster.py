"""Everything the scheduler knows, and the effects that one event has gathered.

The desks (`shard_desk`, `model_desk`, ...) change the `Cluster` and say what must be stored, published and answered;
`effects()` then puts that into the order that makes it safe.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paramserver.core.gate import Commit
from paramserver.core.membership import Member, Shard, Worker
from paramserver.core.models import FORMAT, Model
from paramserver.core.runs import Run
from paramserver.core.scheduler_io import Effect, ForgetModel, LoadFiles, Publish, Reply, SetTokens, Store
from paramserver.core.waiter import Waiter
from paramserver.errors import PsError, problem
from paramserver.types import ModelKey, PartitionKey, Token, make_token


@dataclass
class Cluster:
    """The scheduler's whole state."""

    term: int
    wall_offset_s: float
    """Unix time minus the monotonic `now`."""
    map_epoch: int = 0
    generations: int = 0
    run_count: int = 0
    member_count: int = 0
    shards: dict[str, Shard] = field(default_factory=dict)
    shard_floor: int = 0
    """No epoch of a shard whose name was forgotten was higher."""
    models: dict[str, Model] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    tokens_given: int = 0
    """In this term."""
    _fields: dict[str, Callable[[], Mapping[str, Any]] | None] = field(default_factory=dict)
    _tokens: list[tuple[PartitionKey, Token]] = field(default_factory=list)
    _fences: dict[str, int] = field(default_factory=dict)
    _map_changed: bool = False
    _models_changed: dict[str, None] = field(default_factory=dict)
    _rosters_changed: dict[str, None] = field(default_factory=dict)
    _published: list[Publish] = field(default_factory=list)
    _early: list[Effect] = field(default_factory=list)
    _late: list[Effect] = field(default_factory=list)
    touched: dict[str, None] = field(default_factory=dict)
    """Models whose gates, checkpoints and waiters are to be looked at once the event is handled."""
    unfinished: dict[str, None] = field(default_factory=dict)
    """Of these, the ones to be looked at once more."""
    unbalanced: bool = False
    """Shards or owners have changed since it was last seen that nothing needs to move."""

    # --- what an event brings about ---

    def save(self, name: str, document: Callable[[], Mapping[str, Any]]) -> None:
        """That field is written with what `document` gives when the event is handled."""
        self._fields[name] = document

    def drop(self, name: str) -> None:
        """That field is deleted."""
        self._fields[name] = None

    def save_cluster(self) -> None:
        self.save("cluster", self.stored)

    def prolong(self, pause_s: float) -> None:
        """This process stood still, so nobody could be heard: that time does not count against any lease."""
        holders = [*self.shards.values(), *self.members.values()]
        for holder in [*holders, *(w for m in self.models.values() for w in m.roster)]:
            holder.heard_s += pause_s

    def save_shard(self, shard: Shard) -> None:
        self.save(
            f"shard:{shard.name}",
            lambda: {
                "format": FORMAT,
                "epoch": shard.epoch,
                "alive": shard.alive,
                "addresses": list(shard.addresses),
                "version": shard.version,
                "draining": shard.draining,
                "left": shard.left,
                "listed": shard.listed,
            },
        )

    def save_model(self, model: Model) -> None:
        self.save(f"model:{model.name}", model.stored)

    def save_clock(self, model: Model) -> None:
        self.save(f"clock:{model.name}", model.stored_clock)

    def save_worker(self, model: Model, worker: Worker) -> None:
        self.save(
            f"worker:{model.name}:{worker.name}",
            lambda: {
                "format": FORMAT,
                "epoch": worker.epoch,
                "alive": worker.alive,
                "rank": worker.rank,
                "clock": worker.done,
                "timeline": worker.timeline,
                "lease_s": worker.lease_s,
                "state": worker.state,
                "draining": worker.draining,
            },
        )

    def save_dataset(self, model: Model, dataset: str) -> None:
        self.save(f"tasks:{model.name}:{dataset}", model.datasets[dataset].progress)

    def save_commit(self, model: Model, commit: Commit) -> None:
        self.save(f"commit:{model.name}:{commit.t}", lambda: commit.document(model.name, model.generation))

    def save_run(self, run: Run) -> None:
        self.save(f"run:{run.id}", run.stored)

    def save_member(self, member: Member) -> None:
        self.save(
            f"member:{member.name}",
            lambda: {
                "format": FORMAT,
                "epoch": member.epoch,
                "alive": member.alive,
                "allow": list(member.allow),
                "place": list(member.place) if member.place else None,
            },
        )

    def save_everything(self) -> None:
        """All fields, for a Redis that has lost them."""
        self.save_cluster()
        for shard in self.shards.values():
            self.save_shard(shard)
        for model in self.models.values():
            self.save_model(model)
            self.save_clock(model)
            self.save(f"place:{model.name}", model.stored_place)
            self.save(f"series:{model.name}", model.series.stored)
            for _, commit in model.commits:
                self.save_commit(model, commit)
            for worker in model.roster:
                self.save_worker(model, worker)
            for name, dataset in model.datasets.items():
                self.save(f"dataset:{model.name}:{name}", dataset.spec.document)
                self.save_dataset(model, name)
            for record in model.checkpoints.records.values():
                self.save(f"checkpoint:{model.name}:{record.name}", record.document)
        for run in self.runs.values():
            self.save_run(run)
        for member in self.members.values():
            self.save_member(member)

    def number(self) -> int:
        """A number that no leader has given out before."""
        self.tokens_given += 1
        return make_token(self.term, self.tokens_given)

    def give_token(self, model: Model, index: int, source: Any = None) -> None:
        """A new ownership of that partition begins, from `source` or from where the model says."""
        owner = model.owners[index]
        owner.token, owner.source, owner.renewed, owner.previous = self.number(), source, 0, None
        owner.from_version = owner.revision = None
        owner.stay()
        self._tokens.append((model.partition(index), owner.token))

    def load_files(self, model: Model) -> None:
        """What it lacks of its files is read; one reading at a time, so that none sets what another has made good."""
        model.read_at_s = float("inf")
        files = {p.name: p.init.path for p in model.spec.params if p.init.kind == "file" and p.name in model.missing}
        if not files or model.restored:
            return
        model.read_again = model.reading
        if not model.reading:
            model.reading = True
            self.perform(LoadFiles(model.key, files, sorted(model.lost)))

    def forget_model(self, key: ModelKey, partitions: int) -> None:
        """Its keys in Redis are deleted; that they are to be is stored, else a death would leave them there."""
        self.save(f"gone:{key}", lambda: {"model": key.name, "generation": key.generation, "partitions": partitions})
        self.perform(ForgetModel(key, partitions))

    def renew_token(self, model: Model, index: int) -> None:
        """The same ownership goes on under a new token, because Redis has lost the old one."""
        owner = model.owners[index]
        first, source = owner.renewed or owner.token, owner.source
        # Who lacks it nevertheless must not take the first values for the model's.
        self.give_token(model, index, "snapshot" if model.ready or model.lost else source)
        owner.renewed, owner.durable_version, owner.durable_clock = first, 0, 0

    def fence(self, shard: str, epoch: int) -> None:
        """No incarnation of that shard up to this epoch may serve; 0 forgets the name."""
        self._fences[shard] = epoch

    def place_changed(self, model: Model) -> None:
        """The model's owners are others; also makes a new map epoch."""
        self.save(f"place:{model.name}", model.stored_place)
        self.map_changed()
        self.model_changed(model)

    def map_changed(self) -> None:
        """Shards or owners have changed: a new map epoch, once for each event."""
        self.unbalanced = True
        if not self._map_changed:
            self._map_changed = True
            self.map_epoch += 1
            self.save_cluster()

    def model_changed(self, model: Model) -> None:
        """Shards must see the model's document."""
        self._models_changed[model.name] = None
        self.touch(model)

    def roster_changed(self, model: Model) -> None:
        """Workers have joined or gone; with linear scaling that is a new revision (semantics 8)."""
        if model.spec.optimizer.linear_scaling:
            model.revision += 1
            self.save_model(model)
            self.model_changed(model)
        self._rosters_changed[model.name] = None
        self.touch(model)

    def touch(self, model: Model) -> None:
        self.touched[model.name] = None

    def again(self, model: Model) -> None:
        """There is more to decide for that model: look at it once more, at once."""
        self.unfinished[model.name] = None

    def publish(self, document: Mapping[str, Any]) -> None:
        self._published.append(Publish(document))

    def answer(self, request: int, outcome: Mapping[str, Any] | PsError | None, status: int = 200) -> None:
        """The reply, seen only when all that was stored before is safe."""
        if isinstance(outcome, PsError):
            status = outcome.status
        self._late.append(Reply(request, outcome, status))

    def answer_now(self, request: int, outcome: Mapping[str, Any] | PsError | None, status: int = 200) -> None:
        """A reply that says nothing which is not stored."""
        if isinstance(outcome, PsError):
            status = outcome.status
        self._early.append(Reply(request, outcome, status, waits=False))

    def answer_waiter(self, model: Model, waiter: Waiter, outcome: Mapping[str, Any] | PsError, now: float) -> None:
        """The answer to a worker's long poll, which is over."""
        (model.clock_waiters if waiter in model.clock_waiters else model.task_waiters).remove(waiter)
        model.unpark(waiter, now)
        self.answer(waiter.request, outcome)

    def perform(self, effect: Effect) -> None:
        """Another effect, after everything stored."""
        self._late.append(effect)

    def effects(self) -> list[Effect]:
        """What the events since the last call brought about, in the order in which it is to be performed."""
        out: list[Effect] = list(self._early)
        if self._fields:
            out.append(Store({k: None if v is None else v() for k, v in self._fields.items()}))
        if self._tokens or self._fences:
            out.append(SetTokens(tuple(self._tokens), tuple(self._fences.items())))
        if self._map_changed:
            out.append(Publish(self.map_document()))
        for name in self._models_changed:
            if name in self.models:
                out.append(Publish(self.model_document(self.models[name])))
        for name in self._rosters_changed:
            if name in self.models and name not in self._models_changed:
                out.append(Publish(self.models[name].roster_document()))
        out += [*self._published, *self._late]
        self._fields, self._tokens, self._fences, self._map_changed = {}, [], {}, False
        self._models_changed, self._rosters_changed = {}, {}
        self._published, self._early, self._late = [], [], []
        return out

    # --- looking things up ---

    def model(self, name: Any) -> Model:
        """The model of that name; raises NotFoundError."""
        model = self.models.get(name) if isinstance(name, str) else None
        if model is None:
            raise problem("unknown_model", f"no model {name!r:.80}", hint="POST /models creates one")
        return model

    def of_key(self, name: str, generation: int) -> Model | None:
        """That very creation of the model, if it is still there."""
        model = self.models.get(name)
        return model if model is not None and model.generation == generation else None

    def owned(self, shard: str, name: str, generation: int, index: int, token: Token) -> Model | None:
        """The model, if that shard owns that partition of it under that token."""
        model = self.of_key(name, generation)
        if model is None or not 0 <= index < len(model.owners):
            return None
        owner = model.owners[index]
        return model if owner.shard == shard and owner.token == token else None

    def live_shards(self) -> list[str]:
        """Names, sorted."""
        return sorted(s.name for s in self.shards.values() if s.alive)

    def takers(self) -> list[str]:
        """Names of those that may be given partitions: the living that do not drain, else all that live."""
        return [n for n in self.live_shards() if not self.shards[n].draining] or self.live_shards()

    def addresses(self) -> dict[str, tuple[str, ...]]:
        """Of every shard."""
        return {s.name: s.addresses for s in self.shards.values()}

    def shard_line(self, shard: Shard, now: float) -> dict[str, Any]:
        """A line of `GET /shards`."""
        owned = [(m, i, o) for m in self.models.values() for i, o in enumerate(m.owners) if o.shard == shard.name]
        return {
            "name": shard.name,
            "epoch": shard.epoch,
            "alive": shard.alive,
            "state": shard.state,
            "heartbeat_age_s": max(0.0, now - shard.heard_s),
            "addresses": list(shard.addresses),
            "version": shard.version,
            "partitions": len(owned),
            "bytes": sum(m.bytes_of(i) for m, i, _ in owned),
            "bytes_per_s": sum(o.load for _, _, o in owned),
            "memory": {"limit_bytes": shard.memory_limit_bytes, "used_bytes": shard.memory_used_bytes},
            "moves": [{"model": m.name, "partition": i, "to": o.target} for m, i, o in owned if o.release],
            "metrics": dict(shard.metrics),
        }

    def public(self, model: Model) -> dict[str, Any]:
        """The model's public document."""
        return model.public(self.map_epoch, self.addresses())

    def model_document(self, model: Model, all_commits: bool = False) -> dict[str, Any]:
        """The feed's `model`."""
        return {**model.feed_document(all_commits), "term": self.term}

    def map_document(self) -> dict[str, Any]:
        """The feed's `map`."""
        return {
            "type": "map",
            "term": self.term,
            "map_epoch": self.map_epoch,
            "shards": {
                s.name: {"addresses": list(s.addresses), "alive": s.alive} for s in self.shards.values() if s.listed
            },
        }

    def stored(self) -> dict[str, Any]:
        """Field `cluster`."""
        return {
            "format": FORMAT,
            "map_epoch": self.map_epoch,
            "generations": self.generations,
            "run_count": self.run_count,
            "member_count": self.member_count,
            "shard_floor": self.shard_floor,
        }
