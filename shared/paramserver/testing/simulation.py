"""A whole cluster in one process on virtual time: real cores, seeded faults, exact sums.

    python -m paramserver.testing.simulation --seed 17     # one run, with the end of its trace if it fails

Two schedulers, three shards, three workers, one Redis.  Every worker pushes ones for a fixed number of clocks to a
model whose optimizer adds them up, so the values count what was applied: in sync, each commit adds exactly one;
otherwise each push adds one, and none may be counted twice.  In some of the synchronous runs, an operator restores the
model, assigns values or changes its mode during training.  Mode, level, faults and operator are derived from the seed
unless given.  With `--change modes`, each push adds to an element of its own, and the operator changes to any mode;
with `--deaths` as well, he also removes workers right after that.  With `--change optimizers`, he changes the optimizer
around restores and phases out of sync, and partitions must stay alike.  With `--change recreations`, he deletes the
model and creates it again under the same name, and the elements show which pushes each creation has.  With another
`--optimizer`, all pushes are ones, values and optimizer state must be what some number of steps gives, and that number
counts.  With `--models 2`, another model is trained by workers of its own on the same shards.  With `--data`, workers
lease a range of data for each iteration, and end with the data.  With `--given`, first values are not 0 but uploaded or
(in `async`) restored, again if they are lost before they are stored; for `sum` without an operator.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from paramserver.core.scheduler import io
from paramserver.core.scheduler.core import SchedulerCore
from paramserver.core.shard.effects import PulledPart
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError
from paramserver.testing.data import ASSIGNMENTS, PASSES, RANGES, Tasks
from paramserver.testing.operators import ASSIGNED, SimOperator
from paramserver.testing.reference import OPTIMIZERS, Reference
from paramserver.testing.schedulers import Ledger, SimScheduler
from paramserver.testing.stopping import StoppableShard
from paramserver.testing.storage import SimRedis
from paramserver.testing.trouble import KINDS, RARE_KINDS, Trouble, drain
from paramserver.testing.uploads import FIRST, Uploader
from paramserver.testing.workers import DATASET, SimClient, SimWorker, element_of
from paramserver.testing.world import Faults, Script, World
from paramserver.types import ModelKey, PushId

MODEL: Final = "count"
OTHER: Final = "other"
CONSISTENCY: Final[dict[str, dict[str, Any]]] = {
    "async": {"mode": "async"},
    "ssp": {"mode": "ssp", "staleness": 2, "min_workers": 3},
    "sync": {"mode": "sync", "min_workers": 3},
    "buffered": {"mode": "buffered", "count": 3, "interval_ms": 500},
}
LEVELS: Final = ("applied", "journaled")
CLOCKS: Final = 8
"""Iterations of each worker."""
CHANGES: Final = ("none", "restores", "puts", "flips")
"""What an operator does to a model; chosen by the seed if that is synchronous."""
MODES: Final = "modes"
"""A change that is made only if it is asked for: the model goes from any mode to any other, again and again."""
SETTINGS: Final = "settings"
"""A change that is made only if it is asked for: another setting of the synchronous mode."""
OTHER_OPTIMIZERS: Final = "optimizers"
"""A change that is made only if it is asked for: another optimizer, before a restore or around a phase out of sync."""
RECREATIONS: Final = "recreations"
"""A change that is made only if it is asked for: the model is deleted and created again, in any mode, at any level."""
ASKED: Final = (MODES, SETTINGS, OTHER_OPTIMIZERS, RECREATIONS)
DECAY: Final = 0.9
"""Factor of the learning rate from one update to the next, where an update is a step."""
UNDONE_MAX_S: Final = 15.0
"""For how long a synchronous model may have gone on since it was stored, when a death takes it back: 5 s, what comes
until the next commit, and two attempts to store each partition."""
DATA_CLOCKS_MAX: Final = 400
"""More than the data lasts for, whatever is worked on twice."""
REST_S: Final = 20.0
"""Longer than the lease of a dead shard, the rest before a cut, and the storing of it together."""
_SHARES: Final = np.array([0.0, *(1 / n for n in range(1, 25))], np.float32)
"""What one push can add to its element: nothing yet, or its share in the mean of so many."""
_CHOSEN: Final = {"default": "", "help": "override the seed's choice"}
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "mode": {"choices": sorted(CONSISTENCY), **_CHOSEN},
    "level": {"choices": LEVELS, **_CHOSEN},
    "kind": {"choices": [*KINDS, *RARE_KINDS], **_CHOSEN},
    "change": {"choices": (*CHANGES, *ASKED), **_CHOSEN},
    "clocks": {"type": int, "default": CLOCKS, "help": "iterations of each worker"},
    "checkpoints": {"type": int, "default": 0, "help": "clocks between checkpoints; 0: none"},
    "late": {"choices": ["fold", "drop"], "default": "", "help": "sync: policy for late reports, with a quorum of 2"},
    "optimizer": {"choices": OPTIMIZERS, "default": "sum", "help": "the model's optimizer"},
    "models": {"type": int, "choices": (1, 2), "default": 1, "help": "models trained at the same time"},
    "deaths": {"action": "store_true", "help": "workers die, too"},
    "data": {"action": "store_true", "help": "each iteration needs a range of a dataset"},
    "given": {"choices": ["upload", "restore"], "default": "", "help": "first values; with --change none"},
}
"""The fields of a `Simulation` that the command line sets, and the arguments of `add_argument` for each."""


@dataclass
class Simulation:
    """One run: its nodes and workers, and what the workers were promised."""

    seed: int
    mode: str = ""
    level: str = ""
    kind: str = ""
    change: str = ""
    clocks: int = CLOCKS
    checkpoints: int = 0
    """Clocks between automatic checkpoints, 0: none.  In sync they request cuts, which nothing else does at
    `journaled`."""
    late: str = ""
    """sync: policy for late reports, with a quorum of two of the three workers; empty: the quorum is all three."""
    deaths: bool = False
    """Whether workers die, too: between any two of their requests; they join again, perhaps within their lease."""
    faults: Faults | None = None
    patience_s: float = 600.0
    """By when, in virtual seconds, the workers must have finished: ten times what the longest runs take."""
    optimizer: str = "sum"
    """One of `OPTIMIZERS`."""
    models: int = 1
    """2: another model is trained at the same time, in another mode."""
    data: bool = False
    """Whether an iteration needs a range of a dataset; the workers end with its last pass, whatever their clocks."""
    given: str = ""
    """What brings the first values, all of them `FIRST`: an "upload" or a "restore"; empty: they are 0."""
    beside: "Simulation | None" = None
    """The run on whose cluster this one trains the other model; None: it has a cluster of its own."""
    world: World = field(init=False)
    finished: int = 0
    acknowledged: dict[int, set[PushId]] = field(default_factory=dict)
    """Pushes acknowledged, by partition."""
    sent: dict[int, set[PushId]] = field(default_factory=dict)
    """Pushes sent, by partition; one whose sender was fenced may be applied without an answer."""
    observed: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """(worker, partition, incarnation) -> version last pulled, which must never decrease."""
    begun: dict[tuple[int, int], int] = field(default_factory=dict)
    """(worker, seq) -> generation of the model that the push is meant for."""
    ended: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    """(worker, seq) -> (generation, timeline, clock) of the pushes whose iteration has ended: they count, unless they
    were late."""
    epochs: dict[tuple[str, int], int] = field(default_factory=dict)
    """(worker, epoch) -> generation of the model that it joined."""
    timeline: int = 0
    """The model's final timeline, in runs with an operator."""

    def __post_init__(self) -> None:
        self.mode = self.mode or sorted(CONSISTENCY)[self.seed % 4]
        self.level = self.level or LEVELS[self.seed // 4 % 2]
        self.kind = self.kind or list(KINDS)[self.seed // 8 % len(KINDS)]
        chosen = CHANGES[(self.seed // 8 + self.seed // 48) % len(CHANGES)]
        first = self.mode
        if self.any_mode:
            # Workers end each iteration as they do in sync, which is right in every mode.
            first, self.mode = sorted(CONSISTENCY)[self.seed % 4], "sync"
        if self.mode != "sync" and self.change in ("", SETTINGS, OTHER_OPTIMIZERS):
            self.change = "none"
        self.change = self.change or chosen
        if self.beside is None:
            self.world = World(self.seed, self.faults or (KINDS | RARE_KINDS)[self.kind])
            self.redis, self.ledger = SimRedis(), Ledger()
            self.schedulers = [SimScheduler(self.world, f"scheduler-{i}", self.redis, self.ledger) for i in range(2)]
            self.shards = {
                name: StoppableShard(self.world, name, self.redis, self.schedulers[::turn])
                for name, turn in (("shard-0", 1), ("shard-1", -1), ("shard-2", 1))
            }
        else:
            self.world, self.redis, self.ledger = self.beside.world, self.beside.redis, self.beside.ledger
            self.schedulers, self.shards = self.beside.schedulers, self.beside.shards
        self.prefix = "" if self.beside is None else f"{OTHER} "
        """Of the names of this model's clients."""
        self.reference = Reference(self.optimizer, 1.0 if self.changed else DECAY)
        self.workers, self.restarts = 3, 0
        """Of workers that train, and how often one of them joined again or went back."""
        self.tasks = Tasks() if self.data else None
        assert not self.given or (self.optimizer == "sum" and not self.changed), "a reference begins at 0"
        self.first = FIRST if self.given else 0.0
        self.clocks = DATA_CLOCKS_MAX if self.data else self.clocks
        init = {"kind": "upload" if self.given == "upload" else "zeros"}
        self.spec = ModelSpec.parse(
            {
                "name": MODEL if self.beside is None else OTHER,
                "params": {
                    "w": {"shape": [4 * 160 if self.own_elements else 20], "init": init},
                    "b": {"shape": [4], "init": init},
                },
                "optimizer": self.reference.spec,
                "consistency": CONSISTENCY[first] | ({"quorum": 0.6, "late": self.late} if self.late else {}),
                "partitions": 4,
                "ack": self.level,
                "checkpoint": {"every_minutes": 0, "every_clocks": self.checkpoints},
            }
        )
        self.operator, self.trainers = SimOperator(self), [SimWorker(self, i) for i in range(self.workers)]
        self.runs = [self]
        """One per model."""
        if self.models > 1:
            same = {name: getattr(self, name) for name in ("clocks", "checkpoints", "deaths", "optimizer")}
            self.runs.append(Simulation(self.seed + 5, **same, beside=self))

    @property
    def replay(self) -> str:
        """The command that repeats this run."""
        chosen = {name: value for name in OPTIONS if (value := getattr(self, name))}
        told = [f"--{name}" if value is True else f"--{name} {value}" for name, value in chosen.items()]
        return f"python -m paramserver.testing.simulation --seed {self.seed} {' '.join(told)}"

    def run(self) -> str:
        """Run to the end and return the trace's hash; raises AssertionError if a promise was broken."""
        world = self.world
        for node in (*self.schedulers, self.shards["shard-0"], self.shards["shard-1"]):
            node.start()
        # The third shard joins during training, so partitions move to it.
        world.after(world.rng.uniform(2.0, 20.0), "start shard-2", self.shards["shard-2"].start)
        Trouble(self).begin()
        for run in self.runs:
            world.play(run._create())
        world.run(self.patience_s, lambda: all(run.over for run in self.runs))
        for run in self.runs:
            done = f"{run.finished} workers finished, the operator: {run.operator.over}"
            assert run.over, f"{run.spec.name} was not trained within {self.patience_s} s: {done}"
        for run in self.runs:
            run._check_end()
        for run in [r for r in self.runs if r.change == "puts"]:
            run._check_rest()
        return world.trace

    @property
    def over(self) -> bool:
        """Whether the workers and the operator are done."""
        return self.finished == self.workers and (not self.changed or self.operator.over)

    # --- clients

    def _create(self) -> Script:
        creator, restore = SimClient(self, "creator"), self.given == "restore"
        while True:
            made = yield from creator.ask(lambda r: io.CreateModel(r, self.spec.document(), "nonce", restore))
            if not isinstance(made, PsError):
                break
            yield 0.5
        self.operator.generation = made["generation"]
        data = self.spec.name, DATASET, RANGES, 1, None, None, ASSIGNMENTS[self.seed // 3 % 2], PASSES
        while self.tasks is not None:
            if not isinstance((yield from creator.ask(lambda r: io.RegisterDataset(r, *data))), PsError):
                break
            yield 0.5
        if self.given:
            self.world.play(Uploader(self, f"{self.prefix}uploader").work())
        for trainer in self.trainers:
            self.world.play(trainer.train())
        if self.changed:
            self.world.play(self.operator.work())

    # --- checks

    def observe(self, worker: int, parts: list[PulledPart]) -> None:
        """Check what one worker has just pulled."""
        for p in parts:
            of = self.redis.issued[p.incarnation]
            assert (of.model.name, of.index) == (self.spec.name, p.partition), f"{p.partition} is answered with {of}"
            key = (worker, p.partition, p.incarnation)
            assert p.version >= self.observed.get(key, 0), f"the version of {key} went back"
            self.observed[key] = p.version
            if self.changed:
                self._check_changed(p)
                continue
            value = self.reference.steps(p.state) - self.first
            if self.mode == "sync":
                self.ledger.check_steps(p, value, self.redis.lost)
            else:
                sent = len(self.sent[p.partition])
                assert 0 <= value <= sent, f"partition {p.partition}: {value} of at most {sent} pushes"

    def _check_changed(self, part: PulledPart) -> None:
        """Check a value of a changed model: each commit, flush or push adds one to whatever was there."""
        if self.other_optimizers:
            arrays = part.state.values, *part.state.slots
            assert all(a.min() == a.max() for a in arrays), f"a torn read: {arrays}"
            return
        if self.own_elements:
            off = np.abs(part.state.values[:, None] - _SHARES).min(axis=1)
            assert off.max() < 1e-5, f"partition {part.partition}: element {off.argmax()} is no share of one push"
            generation = self._generation(part)
            foreign = [w for w, of in self.begun.items() if of != generation and part.state.values[element_of(*w)]]
            assert not foreign, f"generation {generation} has pushes of others, (worker, seq) {foreign}"
            return
        # Outside sync, each partition recovers from a shard's death by itself, and a commit decided earlier applies the
        # contributions that are left there, whose mean need not be a whole number.
        modes = self.any_mode or self.change == "flips"
        whole = self.lossless or not modes
        if not whole and self.optimizer != "sum":
            return
        value, sent = self.reference.steps(part.state), len(self.sent.get(part.partition, ()))
        most = sent if modes else ASSIGNED + sent
        assert value.is_integer() or not whole, f"partition {part.partition}: {value} is not a sum of ones"
        assert value <= most, f"partition {part.partition}: {value}, but at most {most} is possible"

    def _check_end(self) -> None:
        found = list(self._final())
        excused = self.operator.mixed or self.redis.times_emptied
        if self.mode == "sync" and self.change == "restores" and not excused:
            values = [self.reference.steps(p.state) for p in found]
            assert len(set(values)) == 1, f"the partitions end in different states: {values}"
        if self.other_optimizers:
            self.ledger.contents.check_alike(self.operator.generation, self.operator.alike)
        for p in found:
            if self.changed:
                self._check_changed(p)
                lost = self._lost(p) if self.own_elements and self.lossless else []
                assert not lost, f"partition {p.partition} lacks (worker, push) {lost}"
                restored = self.operator.restored == self.timeline and not self.other_optimizers
                if restored and (self.lossless or self.level == "applied"):  # there, any loss begins a timeline
                    sums = self.ledger.sums(self.operator.generation, self.timeline)
                    value = self.reference.steps(p.state)
                    assert value == ASSIGNED + sums, f"partition {p.partition}: {value} after {sums} commits"
                continue
            value = self.reference.steps(p.state) - self.first
            if self.mode in ("sync", "buffered"):
                self.ledger.check_steps(p, value, self.redis.lost)
                assert value == (self._last_clock or value), f"{value} after {self.clocks} clocks"
            else:
                least = len(self.acknowledged[p.partition]) if self.lossless else 0
                most = len(self.sent[p.partition])
                assert least <= value <= most, f"partition {p.partition}: {value}, not {least} to {most} applied"
        if self.tasks is not None:
            self.tasks.check(self._read(lambda core: core.read.datasets(self.spec.name)[0]), once=not self.restarts)
        if not self.changed:
            undone = self.ledger.undone(self.operator.generation)
            prompt = self.kind in ("crashes", "moves") and not self.world.faults.store_s  # else storing takes longer
            too_many = self.lossless or (prompt and max(undone.values(), default=0.0) > UNDONE_MAX_S)
            assert not undone or not too_many, f"the model went back behind commits {undone}"
        for (generation, _, clock), listed in self.ledger.commits.items():
            strangers = [c for c in listed if self.epochs.get((c[0], c[1]), generation) != generation]
            assert not strangers, f"commit {clock} of generation {generation} lists workers of others: {strangers}"
        self.world.run(self.patience_s * 3, lambda: not self._cut_pending and not self._leftovers)
        assert not self._cut_pending, "a pending cut will never be stored, and blocks all later cuts"
        assert not self._leftovers, f"Redis keeps what was stored of {self._leftovers}"

    def _check_rest(self) -> None:
        """Assign values to the model, which rests without faults now; they survive a move, and the death of a shard."""
        world, value = self.world, 1000.0
        world.faults = replace(world.faults, until_s=0.0)
        self._rest()
        world.play(self.operator.assign(value))
        world.run(self.patience_s * 4, lambda: self.operator.over)
        world.play(drain(self, world.rng.choice(list(self.shards)), world.rng.uniform(0.0, 9.0)))
        self._rest()
        world.rng.choice(list(self.shards.values())).crash()
        self._rest()
        for p in self._final():
            found = self.reference.steps(p.state)
            assert found == value, f"partition {p.partition} lost what was assigned: {found}"

    def _rest(self) -> None:
        end = self.world.now + REST_S
        self.world.run(end, lambda: self.world.now >= end)

    def _lost(self, part: PulledPart) -> list[tuple[int, int]]:
        """Return the pushes whose iteration has ended but that are not in the partition's values.

        Those that the commit of their clock leaves out are late, as are those of a worker that has just joined.
        """

        def late(worker: int, at: tuple[int, int, int]) -> bool:
            listed = self.ledger.commits.get(at, ())  # empty: it begins a phase, and nobody is late
            return bool(listed) and not any(c[0] == f"{self.spec.name}/w{worker}" and c[3] == at[2] for c in listed)

        own = [w for w, at in self.ended.items() if at[0] == self._generation(part)]
        return [w for w in own if not part.state.values[element_of(*w)] and not late(w[0], self.ended[w])]

    def _generation(self, part: PulledPart) -> int:
        """Generation of the model that a pulled partition belongs to."""
        return self.redis.issued[part.incarnation].model.generation

    @property
    def _leftovers(self) -> set[ModelKey]:
        """Deleted creations of the model of which something is still in Redis."""
        stored = (self.redis.tokens, self.redis.store.kept, self.redis.store.journals)
        kept = {key.model for keys in stored for key in keys if key.model.name == self.spec.name}
        return kept - {ModelKey(self.spec.name, self.operator.generation)}

    @property
    def _cut_pending(self) -> bool:
        """Whether, by the leader's stored state, a cut is still to be stored by some partition."""
        stored = self.redis.state.get(f"clock:{self.spec.name}")
        return stored is None or json.loads(stored)["pending_cut"] is not None

    @property
    def lossless(self) -> bool:
        """Whether no acknowledged push may be lost: no shard membership has ended (moves lose nothing at any level) or,
        above `applied`, Redis was never emptied; and it has lost nothing that no shard had.
        """
        ended = self.redis.memberships_ended and (self.spec.ack == "applied" or self.redis.times_emptied)
        return not ended and not self.redis.lost

    @property
    def _last_clock(self) -> int:
        """The clock that a synchronous model ends at; 0 if unknown.

        At `applied`, a shard's death after the last clock may roll the model back, and no worker is left to go on.
        """
        complete = self.lossless or self.level != "applied"
        return self.clocks if self.mode == "sync" and complete and not self.data else 0

    @property
    def any_mode(self) -> bool:
        """Whether the operator changes the model's mode to any other, or creates it again in another."""
        return self.change in (MODES, RECREATIONS)

    @property
    def other_optimizers(self) -> bool:
        """Whether the operator changes the optimizer, so that only the partitions can be compared with each other."""
        return self.change == OTHER_OPTIMIZERS

    @property
    def own_elements(self) -> bool:
        """Whether each push adds to an element of its own, so that it can be told whatever happens to the model."""
        return self.any_mode and self.optimizer == "sum"

    @property
    def created_again(self) -> bool:
        """Whether the operator deletes the model and creates it again."""
        return self.change == RECREATIONS

    def names_generation(self) -> bool:
        """Whether a push says which creation of the model it is for; where there are several, every other does not."""
        return not self.created_again or self.world.rng.random() < 0.5

    def joined(self, me: Mapping[str, Any]) -> None:
        """Check what a worker has been told about its membership: no epoch of it is of two creations of the model."""
        generation = self.epochs.setdefault((me["worker"], me["epoch"]), me["generation"])
        assert generation == me["generation"], f"{me} joined generation {generation} with the same epoch"

    @property
    def changed(self) -> bool:
        """Whether an operator changes the model, so that its versions say nothing about its values."""
        return self.change != "none"

    def _read(self, read: Callable[[SchedulerCore], Any]) -> Any:
        """What the leader reads."""
        found: list[Any] = []

        def ask() -> Script:
            found.append((yield from SimClient(self, "reader").read("end", read)))

        self.world.play(ask())
        self.world.run(self.patience_s * 2, lambda: bool(found))
        return found[0]

    def _final(self) -> Iterator[PulledPart]:
        """Pull every partition at the end; in runs with an operator, at the clock in the scheduler's document."""
        found: list[list[PulledPart]] = []
        reader = SimClient(self, "reader")

        def read() -> Script:
            if self.changed:
                doc = yield from reader.model()
                self.timeline = doc["timeline"]
                found.append((yield from reader.pull(0, doc["clock"], doc["generation"])))
            else:
                found.append((yield from reader.pull(self._last_clock)))

        while not found or len(found[-1]) < self.spec.partitions:
            count = len(found)
            self.world.play(read())
            self.world.run(self.patience_s * 2, lambda count=count: len(found) > count)  # type: ignore[misc]
            assert len(found) > count, "the end could not be read"
        yield from found[-1]


def main() -> int:
    """Run seeds from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the (first) seed")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds to run")
    for name, settings in OPTIONS.items():
        parser.add_argument(f"--{name}", **settings)
    parser.add_argument("--quiet", action="store_true", help="print only failures")
    args = parser.parse_args()
    failed = 0
    for seed in range(args.seed, args.seed + args.seeds):
        simulation = Simulation(seed, **{name: getattr(args, name) for name in OPTIONS})
        what = f"seed {seed} {simulation.mode} {simulation.level} {simulation.kind} {simulation.change}"
        try:
            trace = simulation.run()
        except Exception as e:  # any exception is a finding
            failed += 1
            print(*simulation.world.log[-30:], sep="\n")
            print(f"FAILED {what}: {type(e).__name__} {e}\nreplay: {simulation.replay}")
        else:
            w = simulation.world
            if not args.quiet:
                print(f"{what}: {w.events} events, {w.now:.1f} s, trace {trace[:12]}")
    print(f"{args.seeds} seeds, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
