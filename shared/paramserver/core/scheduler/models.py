"""One model as the scheduler knows it: settings, owners, clocks, cuts, commits, and its documents.

Stored in the fields `model:NAME` (settings), `place:NAME` (owners), `clock:NAME` (what changes with every clock) and
`commit:NAME:T` (one per commit that a shard may still lack).
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from math import inf
from typing import Any, Final
from zlib import crc32

from paramserver import limits
from paramserver.core.commit import Commit
from paramserver.core.layout import Layout
from paramserver.core.optimizer import slot_count
from paramserver.core.param_spec import ParamSpec
from paramserver.core.scheduler.checkpoints import Checkpoints, creation_of
from paramserver.core.scheduler.cuts import Cuts
from paramserver.core.scheduler.gate import Gate
from paramserver.core.scheduler.initial_values import RESTORED, InitialValues
from paramserver.core.scheduler.membership import Roster, Worker
from paramserver.core.scheduler.owner import Owner
from paramserver.core.scheduler.series import Series
from paramserver.core.scheduler.tasks import Dataset, Evaluation
from paramserver.core.scheduler.waiter import Waiter
from paramserver.core.spec import ModelSpec
from paramserver.types import ModelKey, PartitionKey

COMMITS_KEPT: Final = 4096
COMMIT_KEPT_S: Final = 30.0
"""At `applied`, younger commits are kept though no partition needs them: they tell which clocks none has listed."""
COMMITS_PUBLISHED: Final = 64
"""Newest commits repeated in each update of a model's feed document, except those that all partitions have taken.

All that are kept are in that of a new feed, which a shard asks for if it lacks any, and in those of a model that leaves
sync, as a partition that lacks one then asks for none.
"""
BETWEEN_CUTS_S: Final = 1.0
"""From the end of a cut to the next one by the interval, so that moves can begin: several ticks."""


@dataclass
class Model:
    """One creation of a named model, identified by its generation."""

    spec: ModelSpec
    created: Mapping[str, Any]
    """The spec as created, defaults filled in; a repeated create request is compared with it."""
    generation: int
    unix_s: float
    """Unix time of its creation."""
    revision: int = 0
    timeline: int = 0
    began: int = 0
    """Clock at which this timeline began; a partition at an earlier clock is still on an older timeline."""
    ended_clock: int = 0
    """Highest clock of the timelines that have ended under this leader: snapshots of it may be left."""
    source: Any = "init"
    """Where a partition loads its state from under a new token: "init", "snapshot" or {"cut": clock}."""
    owners: list[Owner] = field(default_factory=list)
    initial: InitialValues = field(default_factory=InitialValues)
    cuts: Cuts = field(default_factory=Cuts)
    left_sync: int = 0
    """Revision that ended the last sync phase; 0: none."""
    last_commit_s: float = float("-inf")
    restoring: bool = False
    """A restore is in progress, so no commits are made."""
    restore_began: int | None = None
    """Timeline that a client's report of a restore has begun: that report may come again.  Never stored."""
    clock_stored: int = 0
    """Modes other than sync: the clock last stored, with which another leader would start."""
    commits: deque[tuple[float, Commit]] = field(default_factory=deque)
    """(time decided, commit) of this timeline, oldest first."""
    evaluated: int = 0
    """Clock of the newest evaluation requested."""
    evaluations: list[Evaluation] = field(default_factory=list)
    worker_count: int = 0
    """Worker names generated so far, and the number of the next one."""
    roster: Roster = field(default_factory=Roster)
    datasets: dict[str, Dataset] = field(default_factory=dict)
    series: Series = field(default_factory=Series)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    creators: list[Waiter] = field(default_factory=list)
    clock_waiters: list[Waiter] = field(default_factory=list)
    waits_for: float = inf
    """No parked clock report is released before this clock; -1: each is to be looked at."""
    clock_waits_end_s: float = inf
    """No wait of one of them ends before."""
    _tagged: tuple[ModelSpec | None, int] = (None, 0)
    task_waiters: list[Waiter] = field(default_factory=list)

    @cached_property
    def layout(self) -> Layout:
        """Partition boundaries; PATCH cannot change them."""
        return Layout(self.spec)

    @cached_property
    def gate(self) -> Gate:
        """The consistency gate, with the model's clocks."""
        return Gate(self.spec.consistency)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def settings_tag(self) -> int:
        """Changes with the settings that clients go by, all of which then fetch the document.

        The revision also changes with each learning rate of a schedule and, with linear scaling, each join.
        """
        spec, tag = self._tagged
        if spec is not self.spec:  # every heartbeat is told, and there may be thousands of parameters
            frozen = [p.name for p in self.spec.params if not p.trainable]
            known = self.spec.consistency.mode, self.spec.optimizer.clip_norm is not None, frozen
            self._tagged = self.spec, (tag := crc32(repr(known).encode()))
        return tag

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.name, self.generation)

    @property
    def creation(self) -> str:
        """Identifier of this creation in checkpoint manifests, unique across clusters as well."""
        return creation_of(self.generation, self.unix_s)

    @property
    def ready(self) -> bool:
        """Whether its initial values are complete."""
        return not self.initial.missing

    @property
    def served(self) -> bool:
        """Whether every partition's owner has reported that it serves it."""
        return all(o.from_version is not None for o in self.owners)

    @property
    def durable(self) -> bool:
        """Whether acknowledged pushes survive the loss of a shard, so that the model never rolls back."""
        return self.spec.ack != "applied"

    @property
    def moving(self) -> bool:
        """Whether a move of one of its partitions is in progress."""
        return any(o.release for o in self.owners)

    @property
    def ending_sync(self) -> bool:
        """Whether a partition may still have to apply commits, or what it has staged, of a sync phase that has ended.

        It does so before it adopts the settings that end the phase; the next phase would begin without them.
        """
        left = self.left_sync
        return not self.gate.sync and left > 0 and any(o.revision is None or o.revision < left for o in self.owners)

    @property
    def unheard(self) -> bool:
        """Whether the version of a partition is not known: this leader has taken over, and no owner has reported it."""
        return not all(o.heard for o in self.owners)

    @property
    def movable(self) -> bool:
        """Whether its partitions may move now: nothing is in progress that only their present owners can finish."""
        cutting = self.cuts.pending is not None
        busy = self.restoring or self.gate.opening or cutting or self.checkpoints.reading
        return self.ready and self.served and not busy

    @property
    def may_cut(self) -> bool:
        """Whether a cut can begin now: the present owner of every partition will be the one to reach its clock."""
        return self.cuts.pending is None and not self.checkpoints.reading and not self.moving and self.served

    def cut_due(self, now: float) -> bool:
        """Whether the next commit is to be a cut, if one can begin then."""
        cuts = self.cuts
        due = now - cuts.began_s >= limits.SNAPSHOT_INTERVAL_S and now - cuts.ended_s >= BETWEEN_CUTS_S
        return cuts.wanted or (not self.durable and due)

    @property
    def beyond_cut(self) -> bool:
        """sync: whether there are commits that only the memory of its shards holds."""
        return not self.durable and self.gate.clock > self.cuts.reached

    def moves_wait(self, now: float) -> bool:
        """Whether no more of its moves begin until those in progress, of which there are few, have made way for a cut.

        A cut that takes longer than the interval leaves as much time for moves before the next one is due for them.
        """
        due = self.cuts.wanted or now - self.cuts.ended_s >= limits.SNAPSHOT_INTERVAL_S
        return self.gate.sync and (self.checkpoints.waiting or (self.beyond_cut and due))

    def needs_idle_cut(self, now: float) -> bool:
        """Whether to make the current clock a cut although no commit comes.

        Otherwise the commits since the last cut would be lost with a shard, however long ago they were made, and before
        the first one what was assigned.
        """
        wanted = self.cuts.wanted_now or now - self.last_commit_s >= limits.SNAPSHOT_INTERVAL_S
        return wanted and self.beyond_cut and not self.gate.opening and self.may_cut

    @property
    def version(self) -> int:
        """Lowest version the partitions reported; in sync at least the clock, which all have or are about to reach."""
        reported = min((o.version for o in self.owners), default=0)
        return max(self.gate.clock, reported) if self.gate.sync else reported

    def partition(self, index: int) -> PartitionKey:
        return PartitionKey(self.key, index)

    def params_in(self, index: int) -> set[ParamSpec]:
        """Parameters that have elements in one partition."""
        return {self.spec.params[s.param] for s in self.layout.segments[index]}

    def bytes_of(self, index: int) -> int:
        """Bytes of one partition's values."""
        return 4 * self.layout.partition_size(index)

    def held_bytes_of(self, index: int) -> int:
        """Bytes of one partition's values and optimizer state."""
        return self.bytes_of(index) * (1 + slot_count(self.spec.optimizer))

    def held_bytes(self) -> Mapping[tuple[str | None, bool], int]:
        """Bytes of values and optimizer state, by owner and whether it has yet to load them."""
        held = Counter[tuple[str | None, bool]]()
        bounds, copies = self.layout.bounds, 1 + slot_count(self.spec.optimizer)
        for i, owner in enumerate(self.owners):
            held[owner.shard, owner.must_load] += 4 * copies * (bounds[i + 1] - bounds[i])
        return held

    def waiters(self) -> list[Waiter]:
        """All parked requests."""
        return [*self.creators, *self.clock_waiters, *self.task_waiters]

    def forget(self, request: int, now: float) -> bool:
        """Drop a parked request; returns whether there was one."""
        for queue in (self.creators, self.clock_waiters, self.task_waiters):
            for w in queue:
                if w.request == request:
                    queue.remove(w)
                    self.unpark(w, now)
                    return True
        return False

    def unpark(self, waiter: Waiter, now: float) -> None:
        """Note that a long poll of its worker has ended; until now it kept the worker alive."""
        worker = self.roster.workers.get(waiter.worker)
        if worker is not None and worker.epoch == waiter.epoch:  # else a later incarnation has replaced it
            worker.open_polls -= 1
            worker.heard_s = now

    @property
    def awaits_evaluation(self) -> bool:
        """Whether a requested evaluation is not leased to any worker yet."""
        return any(v.leased is None for v in self.evaluations)

    def left_out(self, worker: Worker, clock: int) -> bool:
        """sync: whether the commit of the clock that this worker has just finished is kept, and none lists it."""
        its = worker.name, worker.epoch, clock - 1
        later = [c for _, c in takewhile(lambda kept: kept[1].t >= clock - 1, reversed(self.commits))]
        listed = any([(x.worker, x.epoch, x.clock) == its for c in later for x in c.contributions])
        return not listed and any([c.t == clock - 1 for c in later])

    @property
    def commits_full(self) -> bool:
        """Whether there is no room for another commit."""
        return len(self.commits) >= COMMITS_KEPT

    def prune_commits(self, now: float) -> list[Commit]:
        """Remove and return the commits that no partition needs any more, at `applied` if old or more than fit.

        Old are those that are among the newest ones no more, unless the sync phase is over.
        """
        old: list[Commit] = []
        floor = min(o.commits_from for o in self.owners)
        while self.commits and self.commits[0][1].t < floor:
            newest = self.gate.sync and len(self.commits) <= COMMITS_PUBLISHED
            young = newest or now - self.commits[0][0] <= COMMIT_KEPT_S
            if young and not self.durable and not self.commits_full:
                break
            old.append(self.commits.popleft()[1])
        return old

    @property
    def next_phase_clock(self) -> int:
        """A clock after all clocks so far, and not before any version that a partition has reported."""
        return max(self.gate.clock + 1, self.ended_clock + 1, *(o.version for o in self.owners))

    def restart_at(self, clock: int) -> None:
        """Begin a new timeline, with every partition and worker at `clock`."""
        self.timeline += 1
        self.began = clock
        self.ended_clock = max(self.ended_clock, self.gate.clock)
        for owner in self.owners:
            owner.withdraw_move()  # What was captured for a move belongs to the old timeline.
            owner.commits_from = min(owner.commits_from, clock)
        self.gate.reset(self.roster, clock)
        self.commits.clear()
        self.cuts.restart_at(clock)
        self.waits_for = -1  # all are told of it
        self.evaluated = min(self.evaluated, clock)
        # Those that are being made are made again: of values that may be gone.
        self.evaluations = [Evaluation(e.clock, self.timeline) for e in self.evaluations if e.clock <= clock]
        self.checkpoints.last_clock = min(self.checkpoints.last_clock, clock)
        self.checkpoints.void_current()

    # --- documents ---

    def stored(self) -> dict[str, Any]:
        """Stored field `model:NAME`."""
        return {
            "generation": self.generation,
            "revision": self.revision,
            "created": dict(self.created),
            "spec": self.spec.document(),
            **self.initial.stored(),
            "restoring": self.restoring,
            "left_sync": self.left_sync,
            "worker_count": self.worker_count,
            "epoch_floor": self.roster.floor,
            "created_s": self.unix_s,
        }

    def stored_place(self) -> dict[str, Any]:
        """Stored field `place:NAME`."""
        return {"source": self.source, "owners": [o.row() for o in self.owners]}

    def stored_clock(self) -> dict[str, Any]:
        """Stored field `clock:NAME`."""
        return {
            "clock": self.gate.clock,
            "opened": self.gate.opened,
            "timeline": self.timeline,
            "began": self.began,
            "cut": self.cuts.newest,
            "pending_cut": self.cuts.pending,
            "switched": self.cuts.lacks_first,
            "skipped": self.cuts.skipped,
            "cut_wanted": self.cuts.wanted,
            "opening": self.gate.opening,
            "late": self.gate.late(self.roster),
            "folds_from": self.gate.folds_from,
            "evaluated": self.evaluated,
            "evaluations": [[e.clock, *(e.leased or ())] for e in self.evaluations],
            "checkpoint_number": self.checkpoints.number,
            "checkpoint_clock": self.checkpoints.last_clock,
        }

    @classmethod
    def of(cls, doc: Mapping[str, Any], place: Mapping[str, Any], clock: Mapping[str, Any], now: float) -> "Model":
        """Rebuild a model from its three stored documents."""
        m = cls(ModelSpec.parse(doc["spec"]), doc["created"], doc["generation"], doc["created_s"])
        m.revision = doc["revision"]
        m.initial = InitialValues.of(doc, now)
        m.restoring, m.worker_count = doc["restoring"], doc["worker_count"]
        m.roster.floor, m.left_sync = doc["epoch_floor"], doc["left_sync"]
        m.source = place["source"]
        m.owners = [Owner.of(row) for row in place["owners"]]
        m.gate.clock, m.gate.opened, m.gate.opening = clock["clock"], clock["opened"], clock["opening"]
        m.gate.folds_from = clock["folds_from"]
        m.timeline, m.began = clock["timeline"], clock["began"]
        m.cuts = Cuts(
            clock["cut"],
            clock["pending_cut"],
            wanted=clock["cut_wanted"],
            lacks_first=clock["switched"],
            skipped=clock["skipped"],
            moved=True,  # Owners may have changed since.
        )
        m.evaluated = clock["evaluated"]
        m.evaluations = [
            Evaluation(c, m.timeline, (who[0], who[1]) if who else None) for c, *who in clock["evaluations"]
        ]
        m.checkpoints.number, m.checkpoints.last_clock = clock["checkpoint_number"], clock["checkpoint_clock"]
        m.checkpoints.last_s = now
        return m

    def roster_document(self) -> dict[str, Any]:
        """Feed document of type `roster`."""
        return {
            "type": "roster",
            "model": self.name,
            "generation": self.generation,
            "workers": {w.name: [w.epoch, w.rank] for w in self.roster.live()},
        }

    def feed_document(self, all_commits: bool) -> dict[str, Any]:
        """Feed document of type `model`."""
        kept = [c for _, c in self.commits]
        if not all_commits and not self.ending_sync:
            needed = min(o.commits_from for o in self.owners)
            kept = [c for c in kept[-COMMITS_PUBLISHED:] if c.t >= needed]
        return {
            "type": "model",
            "name": self.name,
            "generation": self.generation,
            "revision": self.revision,
            "timeline": self.timeline,
            "clock": self.gate.clock,
            "began": self.began,
            "opening": self.gate.opening,
            "spec": self.spec.document(),
            "state": "ready" if self.ready else "initializing",
            "owners": [o.feed_row() for o in self.owners],
            "source": self.source,
            "restored": self.initial.restored and not self.initial.awaits_restore,
            "cut": self.cuts.newest,
            "cut_asked": self.cuts.pending,
            "cut_urgent": self.cuts.urgent,
            "upload": self.initial.upload_document(),
            "workers": {w.name: [w.epoch, w.rank] for w in self.roster.live()},
            "commits": [c.document(self.key) for c in kept],
        }

    def gone_document(self) -> dict[str, Any]:
        """Feed document of type `gone`."""
        return {"type": "gone", "model": self.name, "generation": self.generation}

    def partition_lines(self) -> list[dict[str, Any]]:
        """The entry of each partition in `GET /models/{m}`."""
        return [
            {
                "index": i,
                "shard": o.shard,
                "incarnation": o.token,
                "version": o.version,
                "durable_version": o.durable_version,
                "from_version": o.from_version,
                "served": o.from_version is not None,
            }
            for i, o in enumerate(self.owners)
        ]

    def outline(self, map_epoch: int, addresses: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
        """Body of `GET /models/{m}`, without the spec and the partitions."""
        return {
            "name": self.name,
            "generation": self.generation,
            "revision": self.revision,
            "settings_tag": self.settings_tag,
            "timeline": self.timeline,
            "clock": self.gate.first_clock,
            "min_clock": self.gate.min_clock(self.roster),
            "version": self.version,
            "cut": self.cuts.newest if self.cuts.reached >= self.began else None,
            "state": "ready" if self.ready else "initializing",
            "missing": sorted(self.initial.missing - {RESTORED}),
            "files_error": self.initial.files_error,
            "served": self.served,
            "live_workers": len(self.roster.live()),
            "created_s": self.unix_s,
            "bounds": list(self.layout.bounds),
            "map_epoch": map_epoch,
            "shards": {
                s: {"addresses": list(addresses[s])}
                for s in sorted({o.shard for o in self.owners if o.shard})
                if s in addresses
            },
        }
