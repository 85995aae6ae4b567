"""A whole cluster in one process on virtual time: real cores, seeded faults, exact sums.

    python -m paramserver.testing.simulation --seed 17     # one run, with the end of its trace if it fails

Two schedulers, three shards, three workers, one Redis.  Every worker pushes ones for a fixed number of clocks to a
model whose optimizer adds them up, so the values count what was applied: in sync, each commit adds exactly one;
otherwise each push adds one, and none may be counted twice.  In some of the synchronous runs, an operator restores the
model, assigns values or changes its mode during training.  Mode, level, faults and operator are derived from the seed
unless given.  With `--change modes`, each push adds to an element of its own, and the operator changes to any mode;
with `--deaths` as well, he also removes workers right after that.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from paramserver.core import scheduler_io as io
from paramserver.core.shard_effects import PulledPart
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError
from paramserver.testing.nodes import Node
from paramserver.testing.operators import ASSIGNED, SimOperator
from paramserver.testing.schedulers import Ledger, SimScheduler
from paramserver.testing.shards import SimShard
from paramserver.testing.storage import SimRedis
from paramserver.testing.workers import SimClient, SimWorker, element_of
from paramserver.testing.world import Faults, Script, World
from paramserver.types import ModelKey, PartitionKey, PushId

MODEL: Final = "count"
CONSISTENCY: Final[dict[str, dict[str, Any]]] = {
    "async": {"mode": "async"},
    "ssp": {"mode": "ssp", "staleness": 2, "min_workers": 3},
    "sync": {"mode": "sync", "min_workers": 3},
    "buffered": {"mode": "buffered", "count": 3, "interval_ms": 500},
}
LEVELS: Final = ("applied", "journaled")
CLOCKS: Final = 8
"""Iterations of each worker."""
KINDS: Final[dict[str, Faults]] = {
    "crashes": Faults(),
    "moves": Faults(crash=0.0, feed_cut=0.002, drop=0.005, drain=0.15),
    "cuts": Faults(crash=0.0002, cut=0.3, drain=0.05),
    "pauses": Faults(crash=0.0002, pause=0.2, drain=0.05),
    "redis": Faults(crash=0.0003, redis_away=0.15, drain=0.05),
    "emptied": Faults(crash=0.0, drop=0.005, feed_cut=0.002, redis_away=0.05, empty_at_s=12.0, drain=0.05),
}
"""Fault mixes, named by what goes wrong most."""
RARE_KINDS: Final[dict[str, Faults]] = {"slow": Faults(compute_s=1.0), "feeds": Faults(crash=0.001, feed_cut=0.1)}
"""Fault mixes that are used only if they are asked for."""
CHANGES: Final = ("none", "restores", "puts", "flips")
"""What an operator does to a synchronous model, chosen by the seed."""
MODES: Final = "modes"
"""A change that is made only if it is asked for: the model goes from any mode to any other, again and again."""
SETTINGS: Final = "settings"
"""A change that is made only if it is asked for: another setting of the synchronous mode."""
REST_S: Final = 20.0
"""Longer than the lease of a dead shard, the rest before a cut, and the storing of it together."""
_SHARES: Final = np.array([0.0, *(1 / n for n in range(1, 25))], np.float32)
"""What one push can add to its element: nothing yet, or its share in the mean of so many."""


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
    world: World = field(init=False)
    finished: int = 0
    acknowledged: dict[int, set[PushId]] = field(default_factory=dict)
    """Pushes acknowledged, by partition."""
    sent: dict[int, set[PushId]] = field(default_factory=dict)
    """Pushes sent, by partition; one whose sender was fenced may be applied without an answer."""
    observed: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """(worker, partition, incarnation) -> version last pulled, which must never decrease."""
    ended: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(worker, seq) -> (timeline, clock) of the pushes whose iteration has ended: they count, unless they were late."""
    timeline: int = 0
    """The model's final timeline, in runs with an operator."""

    def __post_init__(self) -> None:
        self.mode = self.mode or sorted(CONSISTENCY)[self.seed % 4]
        self.level = self.level or LEVELS[self.seed // 4 % 2]
        self.kind = self.kind or list(KINDS)[self.seed // 8 % len(KINDS)]
        chosen = CHANGES[(self.seed // 8 + self.seed // 48) % len(CHANGES)]
        first = self.mode
        if self.own_elements:
            # Workers end each iteration as they do in sync, which is right in every mode.
            first, self.mode = sorted(CONSISTENCY)[self.seed % 4], "sync"
        self.change = (self.change or chosen) if self.mode == "sync" else "none"
        self.world = World(self.seed, self.faults or (KINDS | RARE_KINDS)[self.kind])
        self.redis = SimRedis()
        self.ledger = Ledger()
        self.schedulers = [SimScheduler(self.world, f"scheduler-{i}", self.redis, self.ledger) for i in range(2)]
        self.shards = {
            name: SimShard(self.world, name, self.redis, self.schedulers[::turn])
            for name, turn in (("shard-0", 1), ("shard-1", -1), ("shard-2", 1))
        }
        self.workers = 3
        self.spec = ModelSpec.parse(
            {
                "name": MODEL,
                "params": {"w": {"shape": [4 * 160 if self.own_elements else 20]}, "b": {"shape": [4]}},
                "optimizer": {"name": "sum"},
                "consistency": CONSISTENCY[first] | ({"quorum": 0.6, "late": self.late} if self.late else {}),
                "partitions": 4,
                "ack": self.level,
                "checkpoint": {"every_minutes": 0, "every_clocks": self.checkpoints},
            }
        )
        self.operator = SimOperator(self)

    @property
    def replay(self) -> str:
        """The command that repeats this run."""
        chosen = f"--mode {self.mode} --level {self.level} --kind {self.kind} --change {self.change}"
        chosen += f" --clocks {self.clocks} --checkpoints {self.checkpoints}"
        chosen += f" --late {self.late}" if self.late else ""
        chosen += " --deaths" if self.deaths else ""
        return f"python -m paramserver.testing.simulation --seed {self.seed} {chosen}"

    def run(self) -> str:
        """Run to the end and return the trace's hash; raises AssertionError if a promise was broken."""
        world = self.world
        for node in (*self.schedulers, self.shards["shard-0"], self.shards["shard-1"]):
            node.start()
        # The third shard joins during training, so partitions move to it.
        world.after(world.rng.uniform(2.0, 20.0), "start shard-2", self.shards["shard-2"].start)
        world.after(1.0, "trouble", self._inject_faults)
        if world.faults.empty_at_s is not None:
            world.after(world.faults.empty_at_s, "Redis is emptied", self._empty)
        world.play(self._create())
        world.run(self.patience_s, lambda: self.finished == self.workers and (not self.changed or self.operator.over))
        assert self.finished == self.workers, f"only {self.finished} workers finished within {self.patience_s} s"
        assert not self.changed or self.operator.over, f"the operator was not done within {self.patience_s} s"
        self._check_end()
        if self.change == "puts":
            self._check_rest()
        return world.trace

    # --- faults other than lost messages and crashes

    def _inject_faults(self) -> None:
        world, faults = self.world, self.world.faults
        nodes: list[Node] = [n for n in (*self.schedulers, *self.shards.values()) if n.up]
        if nodes and world.chance(faults.pause):
            world.rng.choice(nodes).pause(world.fault_duration())
        if nodes and world.chance(faults.cut):
            names = [*(n.name for n in nodes), "redis"]
            a, b = world.rng.sample(names, 2)
            world.cuts[a, b] = world.now + world.fault_duration()
        if world.chance(faults.redis_away):
            self.redis.down = True
            world.after(world.fault_duration(), "Redis is back", self._redis_back)
        if world.chance(faults.drain):
            name = world.rng.choice(list(self.shards))
            world.play(self._drain(name, world.fault_duration()))
        if world.faults_active:
            world.after(1.0, "trouble", self._inject_faults)

    def _redis_back(self) -> None:
        self.redis.down = False

    def _empty(self) -> None:
        held = {
            (PartitionKey(ModelKey(row.model, row.generation), row.partition), row.token)
            for s in self.shards.values()
            if s.up
            for row in s.core.partitions()
        }
        if not self.redis.tokens or not set(self.redis.tokens.items()) <= held:
            # State that no shard has in memory right now would be lost, which is allowed (semantics 6): try later.
            self.world.after(0.2, "Redis is emptied", self._empty)
            return
        self.redis.empty()
        self.redis.times_emptied += 1

    def _drain(self, shard: str, seconds: float) -> Script:
        operator = SimClient(self, "operator")
        for state, wait_s in (("draining", seconds), ("active", 0.0)):
            for _ in range(5):
                outcome = yield from operator.ask(lambda r, s=state: io.SetShardState(r, shard, s))
                if not isinstance(outcome, PsError) or not outcome.retryable:
                    break
            yield wait_s

    # --- clients

    def _create(self) -> Script:
        creator = SimClient(self, "creator")
        while True:
            made = yield from creator.ask(lambda r: io.CreateModel(r, self.spec.document(), "nonce"))
            if not isinstance(made, PsError):
                break
            yield 0.5
        for i in range(self.workers):
            self.world.play(SimWorker(self, i).train())
        if self.changed:
            self.world.play(self.operator.work())

    # --- checks

    def observe(self, worker: int, parts: list[PulledPart]) -> None:
        """Check what one worker has just pulled."""
        for p in parts:
            values = p.state.values
            if not self.own_elements:
                assert values.min() == values.max(), f"a torn read of partition {p.partition}: {values}"
            key = (worker, p.partition, p.incarnation)
            assert p.version >= self.observed.get(key, 0), f"the version of {key} went back"
            self.observed[key] = p.version
            if self.changed:
                self._check_changed(p)
            elif self.mode == "sync":
                assert values[0] == p.version, f"partition {p.partition}: {values[0]} after {p.version} commits"
            else:
                sent = len(self.sent[p.partition])
                assert values[0] <= sent, f"partition {p.partition}: {values[0]} of at most {sent} pushes"

    def _check_changed(self, part: PulledPart) -> None:
        """Check a value of a changed model: each commit, flush or push adds one to whatever was there."""
        if self.own_elements:
            off = np.abs(part.state.values[:, None] - _SHARES).min(axis=1)
            assert off.max() < 1e-5, f"partition {part.partition}: element {off.argmax()} is no share of one push"
            return
        value, sent = float(part.state.values[0]), len(self.sent.get(part.partition, ()))
        most = sent if self.change == "flips" else ASSIGNED + sent
        # Outside sync, each partition recovers from a shard's death by itself, and a commit decided earlier applies the
        # contributions that are left there, whose mean need not be a whole number.
        whole = self.lossless or self.change != "flips"
        assert value.is_integer() or not whole, f"partition {part.partition}: {value} is not a sum of ones"
        assert value <= most, f"partition {part.partition}: {value}, but at most {most} is possible"

    def _check_end(self) -> None:
        for p in self._final():
            value = float(p.state.values[0])
            assert self.own_elements or p.state.values.min() == p.state.values.max()
            if self.changed:
                self._check_changed(p)
                lost = self._lost(p) if self.own_elements and self.lossless else []
                assert not lost, f"partition {p.partition} lacks (worker, push) {lost}"
                if self.operator.restored == self.timeline and self.lossless:
                    sums = self.ledger.sums(self.timeline)
                    assert value == ASSIGNED + sums, f"partition {p.partition}: {value} after {sums} commits"
            elif self.mode in ("sync", "buffered"):
                assert value == p.version, f"partition {p.partition} ends at {value} in version {p.version}"
                assert value == (self._last_clock or value), f"{value} after {self.clocks} clocks"
            else:
                least = len(self.acknowledged[p.partition]) if self.lossless else 0
                most = len(self.sent[p.partition])
                assert least <= value <= most, f"partition {p.partition}: {value}, not {least} to {most} applied"
        self.world.run(self.patience_s * 3, lambda: not self._cut_pending)
        assert not self._cut_pending, "a pending cut will never be stored, and blocks all later cuts"

    def _check_rest(self) -> None:
        """Assign values to the model, which rests without faults now; they survive a move, and the death of a shard."""
        world, value = self.world, 1000.0
        world.faults = replace(world.faults, until_s=0.0)
        self._rest()
        world.play(self.operator.assign(value))
        world.run(self.patience_s * 4, lambda: self.operator.over)
        world.play(self._drain(world.rng.choice(list(self.shards)), world.rng.uniform(0.0, 9.0)))
        self._rest()
        world.rng.choice(list(self.shards.values())).crash()
        self._rest()
        for p in self._final():
            assert (p.state.values == value).all(), f"partition {p.partition} lost what was assigned: {p.state.values}"

    def _rest(self) -> None:
        end = self.world.now + REST_S
        self.world.run(end, lambda: self.world.now >= end)

    def _lost(self, part: PulledPart) -> list[tuple[int, int]]:
        """Return the pushes whose iteration has ended but that are not in the partition's values.

        Those that the commit of their clock leaves out are late, as are those of a worker that has just joined.
        """

        def late(worker: int, timeline: int, clock: int) -> bool:
            listed = self.ledger.commits.get((1, timeline, clock), ())  # empty: it begins a phase, and nobody is late
            return bool(listed) and not any(c[0] == f"{MODEL}/w{worker}" and c[3] == clock for c in listed)

        missing = [w for w in self.ended if not part.state.values[element_of(*w)]]
        return [w for w in missing if not late(w[0], *self.ended[w])]

    @property
    def _cut_pending(self) -> bool:
        """Whether, by the leader's stored state, a cut is still to be stored by some partition."""
        stored = self.redis.state.get(f"clock:{MODEL}")
        return stored is None or json.loads(stored)["pending_cut"] is not None

    @property
    def lossless(self) -> bool:
        """Whether no acknowledged push may be lost: no shard membership has ended (moves lose nothing at any level) or,
        above `applied`, Redis was never emptied.
        """
        return not self.redis.memberships_ended or (self.level != "applied" and not self.redis.times_emptied)

    @property
    def _last_clock(self) -> int:
        """The clock that a synchronous model ends at; 0 if unknown.

        At `applied`, a shard's death after the last clock may roll the model back, and no worker is left to go on.
        """
        complete = self.lossless or self.level != "applied"
        return self.clocks if self.mode == "sync" and complete else 0

    @property
    def own_elements(self) -> bool:
        """Whether each push adds to an element of its own, as the model changes between modes."""
        return self.change == MODES

    @property
    def changed(self) -> bool:
        """Whether an operator changes the model, so that its versions say nothing about its values."""
        return self.change != "none"

    def _final(self) -> Iterator[PulledPart]:
        """Pull every partition at the end; in runs with an operator, at the clock in the scheduler's document."""
        found: list[list[PulledPart]] = []
        reader = SimClient(self, "reader")

        def read() -> Script:
            if self.changed:
                doc = yield from reader.model()
                self.timeline = doc["timeline"]
                found.append((yield from reader.pull(0, doc["clock"])))
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
    override = "override the seed's choice"
    late = "with --mode sync: policy for late reports, with a quorum of two of the three workers"
    parser.add_argument("--mode", choices=sorted(CONSISTENCY), default="", help=override)
    parser.add_argument("--level", choices=LEVELS, default="", help=override)
    parser.add_argument("--kind", choices=[*KINDS, *RARE_KINDS], default="", help=override)
    parser.add_argument("--change", choices=(*CHANGES, MODES, SETTINGS), default="", help=override)
    parser.add_argument("--clocks", type=int, default=CLOCKS, help="iterations of each worker")
    parser.add_argument("--checkpoints", type=int, default=0, help="clocks between checkpoints; 0: none")
    parser.add_argument("--late", choices=["fold", "drop"], default="", help=late)
    parser.add_argument("--deaths", action="store_true", help="workers die, too")
    parser.add_argument("--quiet", action="store_true", help="print only failures")
    args = parser.parse_args()
    failed = 0
    for seed in range(args.seed, args.seed + args.seeds):
        chosen = (args.mode, args.level, args.kind, args.change, args.clocks, args.checkpoints, args.late, args.deaths)
        simulation = Simulation(seed, *chosen)
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
