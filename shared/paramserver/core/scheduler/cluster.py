"""The scheduler's state, and the effects collected while an event is handled.

The desks (`shard_desk`, `model_desk`, ...) change the `Cluster` and record what to store, publish and answer;
`effects()` returns that in the safe order: stored before anyone is told.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from paramserver import limits
from paramserver.core.commit import Commit
from paramserver.core.heartbeat_rows import Row
from paramserver.core.near import near
from paramserver.core.scheduler.balance import COPIES
from paramserver.core.scheduler.io import Effect, ForgetOthers, LoadFiles, Publish, Reply, Store
from paramserver.core.scheduler.membership import Member, Shard, Worker, current
from paramserver.core.scheduler.models import Model
from paramserver.core.scheduler.owner import Owner
from paramserver.core.scheduler.runs import ENDED, Run
from paramserver.core.scheduler.waiter import Waiter
from paramserver.errors import PsError, problem
from paramserver.types import ModelKey, PartitionKey, Token, make_token

FLOORS_MAX: Final = 64
"""Deleted models whose workers' epochs are remembered by name; stored with the cluster's document."""
STORED: Final = tuple(
    "id map_epoch generations run_count member_count shard_floor member_floor worker_floor worker_floors".split()
)
"""What the stored field `cluster` has of a `Cluster`."""


@dataclass
class Cluster:
    """The scheduler's whole state."""

    term: int
    wall_offset_s: float
    """Unix time minus the monotonic `now`."""
    id: str = ""
    """Random, of the cluster's first start: tells its shards from those of another at the same addresses."""
    map_epoch: int = 0
    generations: int = 0
    """The last one given out; that of the first model is the Unix time of the first start in milliseconds, plus 1."""
    run_count: int = 0
    member_count: int = 0
    shards: dict[str, Shard] = field(default_factory=dict)
    shard_floor: int = 0
    """Highest epoch of any shard whose name was forgotten."""
    member_floor: int = 0
    """Highest epoch of any pool member whose name was forgotten."""
    worker_floor: int = 0
    """Highest epoch of any worker of a deleted model that is not in `worker_floors`."""
    worker_floors: dict[str, int] = field(default_factory=dict)
    """Highest epoch of any worker of the newest `FLOORS_MAX` deleted models, by the model's name."""
    models: dict[str, Model] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    runs_ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDED, 0))
    """How many runs have ended under this leader, by state; not stored."""
    members: dict[str, Member] = field(default_factory=dict)
    tokens_given: int = 0
    """Numbers issued in this term (`next_token`)."""
    _fields: dict[str, Callable[[], Mapping[str, Any]] | None] = field(default_factory=dict)
    _tokens: list[tuple[PartitionKey, Token]] = field(default_factory=list)
    _fences: dict[str, int] = field(default_factory=dict)
    _map_changed: bool = False
    _models_changed: dict[str, None] = field(default_factory=dict)
    _rosters_changed: dict[str, None] = field(default_factory=dict)
    _published: list[Publish] = field(default_factory=list)
    _early: list[Effect] = field(default_factory=list)
    _late: list[Effect] = field(default_factory=list)
    dirty: dict[str, None] = field(default_factory=dict)
    """Models whose gates, checkpoints and waiters are to be advanced once the event is handled."""
    storage_away: bool = False
    """Whether nothing can be stored now."""
    waits_end_s: float = inf
    """No parked request's wait ends before; the first one's end as of the last tick."""
    unbalanced: bool = False
    """Whether shards or owners have changed, or an owner has begun to serve, since a plan found nothing to move."""

    # --- effects of an event ---

    def save(self, name: str, document: Callable[[], Mapping[str, Any]]) -> None:
        """Store that field; `document` is called once the event has been handled."""
        self._fields[name] = document

    def drop(self, name: str) -> None:
        """Delete that field."""
        self._fields[name] = None

    def raise_worker_floor(self, model: Model) -> None:
        """Record the epochs of a model that is deleted: the workers of a later one of that name begin above them."""
        self.worker_floors[model.name] = max(self.worker_floors.pop(model.name, 0), model.roster.highest_epoch())
        while len(self.worker_floors) > FLOORS_MAX:
            oldest = next(iter(self.worker_floors))
            self.worker_floor = max(self.worker_floor, self.worker_floors.pop(oldest))

    def save_cluster(self) -> None:
        self.save("cluster", self.stored)

    def extend_leases(self, pause_s: float) -> None:
        """Extend every lease by a time in which this process stood still and heard nobody."""
        holders = [*self.shards.values(), *self.members.values()]
        for holder in [*holders, *(w for m in self.models.values() for w in m.roster)]:
            holder.heard_s += pause_s

    def save_shard(self, shard: Shard) -> None:
        self.save(f"shard:{shard.name}", lambda: shard.stored(self.wall_offset_s))

    def save_model(self, model: Model) -> None:
        self.drop_filled(model)
        self.save(f"model:{model.name}", model.stored)

    def save_filled(self, model: Model, names: Iterable[str]) -> None:
        """Store that these parameters have initial values, until the model itself is stored again."""
        for name in names:
            model.initial.filled.add(name)
            self.save(f"filled:{model.name}:{name}", dict)

    def drop_filled(self, model: Model) -> None:
        for name in model.initial.filled:
            self.drop(f"filled:{model.name}:{name}")
        model.initial.filled.clear()

    def save_clock(self, model: Model) -> None:
        self.save(f"clock:{model.name}", model.stored_clock)

    def save_worker(self, model: Model, worker: Worker) -> None:
        self.save(f"worker:{model.name}:{worker.name}", lambda: worker.stored(self.wall_offset_s))

    def save_dataset(self, model: Model, dataset: str) -> None:
        self.save(f"tasks:{model.name}:{dataset}", model.datasets[dataset].progress)

    def drop_dataset(self, model: Model, dataset: str) -> None:
        """Forget what is stored of a dataset."""
        self.drop(f"dataset:{model.name}:{dataset}")
        self.drop(f"tasks:{model.name}:{dataset}")

    def save_commit(self, model: Model, commit: Commit) -> None:
        self.save(f"commit:{model.name}:{commit.t}", lambda: commit.document(model.key))

    def save_run(self, run: Run) -> None:
        self.save(f"run:{run.id}", run.stored)

    def save_member(self, member: Member) -> None:
        self.save(f"member:{member.name}", member.stored)

    def save_everything(self) -> None:
        """Store all fields again, for a Redis that has lost them."""
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

    def next_token(self) -> int:
        """Return a number that no leader has issued before."""
        self.tokens_given += 1
        return make_token(self.term, self.tokens_given)

    def give_token(self, model: Model, index: int, source: Any = None) -> None:
        """Begin a new ownership of that partition, with state from `source`, or from the model's source if None."""
        owner = model.owners[index]
        owner.token, owner.source, owner.kept_from, owner.previous = self.next_token(), source, 0, None
        owner.from_version = owner.revision = owner.handed_lsn = None
        owner.withdraw_move()
        self._tokens.append((model.partition(index), owner.token))

    def load_files(self, model: Model) -> None:
        """Read the parameters that the model lacks from their files; see `InitialValues.begin_reading`."""
        if files := model.initial.begin_reading(model.spec.files):
            self.perform(LoadFiles(model.key, files, sorted(model.initial.lost)))

    def forget_others(self) -> None:
        """Delete what Redis has of models that are gone, by what is stored then.

        After each deletion; by a new leader, as the last one may not have come to it; and if Redis lost that they are.
        """
        if self.generations:
            self.perform(ForgetOthers(frozenset(m.key for m in self.models.values()), self.generations))

    def renew_token(self, model: Model, index: int) -> None:
        """Continue the same ownership under a new token, because Redis has lost the old one."""
        owner = model.owners[index]
        first, handed_lsn = owner.kept_from or owner.token, owner.handed_lsn
        source = model.source if owner.source is None else owner.source
        unbegun = source == "init" and owner.from_version is None
        # An owner that lacks the state after all must not take the initial values for the model's, nor one that has yet
        # to begin with these what is stored, which is of an ended timeline.
        self.give_token(model, index, "snapshot" if model.initial.were_complete and not unbegun else source)
        owner.kept_from, owner.durable_version, owner.commits_from, owner.handed_lsn = first, 0, 0, handed_lsn

    def fence(self, shard: str, epoch: int) -> None:
        """Forbid all incarnations of that shard up to this epoch to serve; 0 deletes the fence."""
        self._fences[shard] = epoch

    def place_changed(self, model: Model) -> None:
        """Store and publish the model's changed owners, under a new map epoch."""
        self.save(f"place:{model.name}", model.stored_place)
        self.map_changed()
        self.model_changed(model)

    def map_changed(self) -> None:
        """Raise the map epoch, once per event, because shards or owners have changed."""
        self.unbalanced = True
        if not self._map_changed:
            self._map_changed = True
            self.map_epoch += 1
            self.save_cluster()

    def model_changed(self, model: Model) -> None:
        """Publish the model's document to the shards."""
        self._models_changed[model.name] = None
        self.mark_dirty(model)

    def roster_changed(self, model: Model) -> None:
        """Publish the roster after a change; with linear scaling that also is a new revision (semantics 8)."""
        if model.spec.optimizer.linear_scaling:
            model.revision += 1
            self.save_model(model)
            self.model_changed(model)
        self._rosters_changed[model.name] = None
        self.mark_dirty(model)

    def mark_dirty(self, model: Model) -> None:
        """Have that model advanced once the event is handled; if it is being advanced, once more right after."""
        self.dirty[model.name] = None

    def publish(self, document: Mapping[str, Any]) -> None:
        self._published.append(Publish(document))

    def answer(self, request: int, outcome: Mapping[str, Any] | PsError | None, status: int = 200) -> None:
        """Answer a request, once everything stored before is safe."""
        if isinstance(outcome, PsError):
            status = outcome.status
        self._late.append(Reply(request, outcome, status))

    def answer_now(self, request: int, outcome: Mapping[str, Any] | PsError) -> None:
        """Answer a request without waiting for stores; the answer must reveal nothing that is not stored yet."""
        status = outcome.status if isinstance(outcome, PsError) else 200
        self._early.append(Reply(request, outcome, status, waits=False))

    def park(self, queue: list[Waiter], waiter: Waiter, now: float) -> None:
        """Have a request wait; one that is not to wait is answered once the event has been handled."""
        queue.append(waiter)
        if waiter.deadline_s > now:
            self.waits_end_s = min(self.waits_end_s, waiter.deadline_s)

    def answer_waiter(self, model: Model, waiter: Waiter, outcome: Mapping[str, Any] | PsError, now: float) -> None:
        """Answer a worker's long poll and end it."""
        (model.clock_waiters if waiter in model.clock_waiters else model.task_waiters).remove(waiter)
        model.unpark(waiter, now)
        self.answer(waiter.request, outcome)

    def perform(self, effect: Effect) -> None:
        """Add another effect, after all stores."""
        self._late.append(effect)

    def effects(self) -> list[Effect]:
        """Return and clear the effects collected since the last call, in the order to perform them."""
        out: list[Effect] = list(self._early)
        if self._fields or self._tokens or self._fences:
            fields = {k: None if v is None else v() for k, v in self._fields.items()}
            out.append(Store(fields, tuple(self._tokens), tuple(self._fences.items())))
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

    # --- lookups ---

    def model(self, name: Any, generation: int | None = None) -> Model:
        """Return the model of that name, and of that generation if one is given.

        Raises NotFoundError (`unknown_model`), or FencedError (`model_replaced`) if it is another creation.
        """
        model = self.models.get(name) if isinstance(name, str) else None
        if model is None:
            found = near(name, self.models) if isinstance(name, str) else None
            hint = f"did you mean '{found}'?" if found else "create it, or look for its name in the list of models"
            raise problem("unknown_model", f"no model {name!r:.80}", hint=hint)
        if generation not in (None, model.generation):
            detail = f"model '{model.name}' was deleted and created again"
            hint = "the present one is meant without a generation, in Python by a new handle: client.model()"
            raise problem("model_replaced", detail, hint=hint, generation=model.generation)
        return model

    def created(self, key: ModelKey) -> Model:
        """Return that creation of a model; raises like `model`."""
        return self.model(key.name, key.generation)

    def run(self, id_: Any) -> Run:
        """Return the run of that id; raises NotFoundError (`unknown_run`)."""
        found = self.runs.get(id_) if isinstance(id_, str) else None
        if found is None:
            raise problem("unknown_run", f"no run {id_!r:.80}", hint="the list of runs has their ids")
        return found

    def joined_shard(self, name: str, epoch: int) -> Shard:
        """Return the shard if it is alive in that epoch; raises like `current` (`unknown_node`)."""
        return current(self.shards.get(name), epoch, f"shard {name!r:.80}", "unknown_node")

    def of_key(self, key: ModelKey) -> Model | None:
        """That creation of a model, if it still exists."""
        model = self.models.get(key.name)
        return model if model is not None and model.generation == key.generation else None

    def owned(self, shard: str, row: Row) -> Model | None:
        """The row's model, if that shard owns that partition of it under that token."""
        model = self.of_key(ModelKey(row.model, row.generation))
        if model is None or not 0 <= row.partition < len(model.owners):
            return None
        owner = model.owners[row.partition]
        return model if owner.shard == shard and owner.token == row.token else None

    def check_room(self, more: int, spared: Container[Worker] = ()) -> list[tuple[Model, Worker]]:
        """Return the dead workers whose states are to go for those of all workers to be larger by `more` (`size_of`).

        Those longest unheard of come first; none is `spared`, or has what a restore has brought and nobody has taken.
        Raises RequestError (`too_large`) if that would not be enough.
        """
        if more <= 0:
            return []
        size = more + sum([w.state_size for m in self.models.values() for w in m.roster])
        gone: list[tuple[Model, Worker]] = []
        if size > limits.WORKER_STATES_MAX:
            every = ((m, w) for m in self.models.values() for w in m.roster)
            dead = [(m, w) for m, w in every if w.state_size and not (w.alive or w.brought or w in spared)]
            for model, worker in sorted(dead, key=lambda found: found[1].heard_s):
                if size <= limits.WORKER_STATES_MAX:
                    break
                gone.append((model, worker))
                size -= worker.state_size
        if size > limits.WORKER_STATES_MAX:
            detail = f"state: with it, those of all workers have size {size}; the limit is {limits.WORKER_STATES_MAX}"
            raise problem("too_large", detail, hint="store less, or delete models", where="state")
        return gone

    def make_room(self, more: int, spared: Container[Worker] = ()) -> None:
        """Forget these states; raises like `check_room`, and forgets none then."""
        for model, worker in self.check_room(more, spared):
            worker.keep(None)
            self.save_worker(model, worker)

    def live_shards(self) -> list[str]:
        """Names of the live shards, sorted."""
        return sorted(s.name for s in self.shards.values() if s.alive)

    def eligible_shards(self) -> list[str]:
        """Names of the shards that may be given partitions: live, and not draining, and answered by Redis.

        Without such, draining ones: they can load what they are given.  Then ones that Redis does not answer.
        """
        live = self.live_shards()
        answered = [n for n in live if not self.shards[n].storage_away] or live
        return [n for n in answered if not self.shards[n].draining] or answered

    def free_bytes(self) -> dict[str, int | None]:
        """Memory that each live shard has for more partitions; None if its limit is unknown.

        Each partition that it owns counts with what it takes while it trains, whatever the shard uses by now: the
        optimizer's arrays come with the first push, and between pushes there is no version that is being computed.
        """
        training = dict.fromkeys(self.live_shards(), 0)
        coming = dict(training)
        for model in self.models.values():
            for (name, must_load), size in model.held_bytes().items():
                if name in training:
                    (coming if must_load else training)[name] += COPIES * size
        return {n: self.shards[n].free_bytes(training[n], coming[n]) for n in training}

    def ownerless_bytes(self) -> int:
        """Bytes of values and optimizer state that no shard owns."""
        held = (item for model in self.models.values() for item in model.held_bytes().items())
        return sum(size for (name, _), size in held if name is None)

    def addresses(self) -> dict[str, tuple[str, ...]]:
        """Addresses of every shard, by name."""
        return {s.name: s.addresses for s in self.shards.values()}

    def shard_lines(self, shards: Iterable[Shard], now: float) -> list[dict[str, Any]]:
        """The entries of these shards in `GET /shards`."""
        owned: dict[str | None, list[tuple[Model, int, Owner]]] = {}
        for model in self.models.values():
            for i, owner in enumerate(model.owners):
                owned.setdefault(owner.shard, []).append((model, i, owner))
        return [self._shard_line(s, owned.get(s.name, []), now) for s in shards]

    def shard_line(self, shard: Shard, now: float) -> dict[str, Any]:
        """The entry of that shard in `GET /shards`."""
        return self.shard_lines([shard], now)[0]

    def _shard_line(self, shard: Shard, owned: list[tuple[Model, int, Owner]], now: float) -> dict[str, Any]:
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
        return {**self.outline(model), "partitions": model.partition_lines(), "spec": model.spec.document()}

    def outline(self, model: Model) -> dict[str, Any]:
        """The model's public document without its partitions and its spec."""
        return {**model.outline(self.map_epoch, self.addresses()), "cluster": self.id}

    def model_document(self, model: Model, all_commits: bool = False) -> dict[str, Any]:
        """The feed's `model` document."""
        return {**model.feed_document(all_commits), "term": self.term}

    def map_document(self) -> dict[str, Any]:
        """The feed's `map` document."""
        return {
            "type": "map",
            "term": self.term,
            "cluster": self.id,
            "map_epoch": self.map_epoch,
            "shards": {
                s.name: {"addresses": list(s.addresses), "alive": s.alive} for s in self.shards.values() if s.listed
            },
        }

    def stored(self) -> dict[str, Any]:
        """The stored field `cluster`."""
        return {name: getattr(self, name) for name in STORED}
