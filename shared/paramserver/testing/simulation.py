"""A whole cluster in one process on virtual time: real cores, seeded faults, exact sums.

    python -m paramserver.testing.simulation --seed 17 --mode sync     # one run, with the end of its trace if it fails

Every worker pushes ones for a fixed number of clocks into a model whose optimizer adds them up, so the values count
what was applied: in sync each commit adds exactly one; otherwise every push adds one, and none may be counted twice.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paramserver.core import scheduler_io as io
from paramserver.core import shard_io as sio
from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError
from paramserver.testing.nodes import SimRedis, SimScheduler, SimShard
from paramserver.testing.shard_driver import push_part
from paramserver.testing.world import Faults, Script, World
from paramserver.types import PushId

MODEL = "count"
CONSISTENCY: dict[str, dict[str, Any]] = {
    "async": {"mode": "async"},
    "ssp": {"mode": "ssp", "staleness": 2, "min_workers": 3},
    "sync": {"mode": "sync", "min_workers": 3},
    "buffered": {"mode": "buffered", "count": 3, "interval_ms": 500},
}
PATIENCE_S = 600.0


@dataclass
class Simulation:
    """One run: its nodes, its workers, and what was promised to them."""

    seed: int
    mode: str = "sync"
    clocks: int = 12
    workers: int = 3
    shards: int = 2
    shard_crashes: bool = True
    faults: Faults | None = None
    world: World = field(init=False)
    finished: int = 0
    acknowledged: dict[int, set[PushId]] = field(default_factory=dict)
    """Per partition, pushes with an answer."""
    sent: dict[int, set[PushId]] = field(default_factory=dict)
    """Per partition, pushes that were sent; one whose sender was fenced may be applied without an answer."""
    observed: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """(worker, partition, incarnation) -> version last pulled: it never goes back."""

    def __post_init__(self) -> None:
        self.world = World(self.seed, self.faults)
        self.redis = SimRedis()
        self.scheduler = SimScheduler(self.world, self.redis)
        self.spec = ModelSpec.parse(
            {
                "name": MODEL,
                "params": {"w": {"shape": [20]}, "b": {"shape": [4]}},
                "optimizer": {"name": "sum"},
                "consistency": CONSISTENCY[self.mode],
                "partitions": 4,
            }
        )
        self.layout = Layout(self.spec)
        self.nodes = {
            f"shard-{i}": SimShard(self.world, f"shard-{i}", self.redis, self.scheduler, crashes=self.shard_crashes)
            for i in range(self.shards)
        }

    def run(self) -> str:
        """Run to the end; the hash of the trace.  Raises AssertionError when a promise was broken."""
        self.scheduler.start()
        for shard in self.nodes.values():
            shard.start()
        self.world.play(self._create())
        self.world.run(PATIENCE_S, lambda: self.finished == self.workers)
        assert self.finished == self.workers, f"only {self.finished} workers finished within {PATIENCE_S} s"
        self._check_end()
        return self.world.trace

    # --- clients

    def _create(self) -> Script:
        while True:
            made = yield self.scheduler.ask(lambda r: io.CreateModel(r, self.spec.document(), "nonce"))
            if not isinstance(made, PsError):
                break
            yield 0.5
        for i in range(self.workers):
            self.world.play(self._worker(i))

    def _worker(self, index: int) -> Script:
        seq = 0
        while True:
            me = yield self.scheduler.ask(lambda r: io.JoinWorker(r, MODEL, f"w{index}"))
            if isinstance(me, PsError):
                yield 0.3
                continue
            clock, timeline = int(me["clock"]), int(me["timeline"])
            beating = _Heartbeat(self, me["worker"], me["epoch"])
            rejoin = False
            while clock < self.clocks and not rejoin:
                seq += 1
                outcome = yield from self._push(PushId(me["worker"], me["epoch"], seq), clock, timeline)
                if outcome is None:
                    outcome = yield from self._report(me, clock + 1, timeline)
                beating.clock, beating.timeline = clock + 1, timeline
                if isinstance(outcome, PsError):
                    if outcome.code == "rolled_back":
                        clock, timeline = int(outcome.members["clock"]), int(outcome.members["timeline"])
                    else:
                        rejoin = True
                else:
                    clock += 1
                    pulled = yield from self._pull(clock if self.mode == "sync" else 0)
                    self._observe(index, pulled)
            beating.over = True
            if not rejoin:
                break
        self.finished += 1

    def _push(self, push_id: PushId, clock: int, timeline: int) -> Script:
        """One push of ones to every partition, the same id until each has answered; None, or why it cannot be."""
        left = set(range(self.spec.partitions))
        while left:
            for shard, indices in (yield from self._owners(left)).items():
                sizes = {i: self.layout.partition_size(i) for i in indices}
                parts = tuple(push_part(i, np.ones(n, np.float32), n) for i, n in sizes.items())
                for i in indices:
                    self.sent.setdefault(i, set()).add(push_id)
                done = yield self.nodes[shard].ask(
                    f"push {push_id} {indices}",
                    lambda r, parts=parts: sio.PushReceived(  # type: ignore[misc]
                        r, MODEL, parts, timeline=timeline, push_id=push_id, clock=clock
                    ),
                )
                if isinstance(done, sio.PushDone):
                    left -= set(indices)
                    for i in indices:
                        self.acknowledged.setdefault(i, set()).add(push_id)
                elif isinstance(done, PsError) and not done.retryable:
                    return done
                elif isinstance(done, PsError):
                    yield 0.2
        return None

    def _owners(self, wanted: set[int]) -> Script:
        while True:
            doc = yield self.scheduler.model(MODEL)
            if not isinstance(doc, PsError):
                owners: dict[str, list[int]] = {}
                for p in doc["partitions"]:
                    if p["index"] in wanted and p["shard"] is not None:
                        owners.setdefault(p["shard"], []).append(p["index"])
                if owners:
                    return owners
            yield 0.2

    def _report(self, me: Any, clock: int, timeline: int) -> Script:
        while True:
            answer = yield self.scheduler.ask(
                lambda r: io.ReportClock(r, MODEL, me["worker"], me["epoch"], clock, timeline, wait_s=5.0)
            )
            if isinstance(answer, PsError):
                if not answer.retryable:
                    return answer
                yield 0.2
            elif answer["released"]:
                return answer

    def _pull(self, version: int) -> Script:
        pulled: list[sio.PulledPart] = []
        left = set(range(self.spec.partitions))
        while left:
            for shard, indices in (yield from self._owners(left)).items():
                done = yield self.nodes[shard].ask(
                    f"pull {indices}",
                    lambda r, i=tuple(indices): sio.PullReceived(r, MODEL, i, min_version=version, wait_s=3.0),  # type: ignore[misc]
                )
                if isinstance(done, sio.PullDone):
                    pulled += done.parts
                    left -= set(indices)
                elif self.mode == "sync" and isinstance(done, PsError) and done.code == "version_not_reached":
                    return pulled  # a recovery took the model back to an earlier clock
                else:
                    yield 0.2
        return pulled

    # --- checkers

    def _observe(self, worker: int, parts: list[sio.PulledPart]) -> None:
        for p in parts:
            values = p.state.values
            assert values.min() == values.max(), f"a torn read of partition {p.partition}: {values}"
            key = (worker, p.partition, p.incarnation)
            assert p.version >= self.observed.get(key, 0), f"the version of {key} went back"
            self.observed[key] = p.version
            if self.mode == "sync":
                assert values[0] == p.version, f"partition {p.partition}: {values[0]} after {p.version} commits"
            else:
                sent = len(self.sent[p.partition])
                assert values[0] <= sent, f"partition {p.partition}: {values[0]} of at most {sent} pushes"

    def _check_end(self) -> None:
        for p in self._final():
            value = float(p.state.values[0])
            assert p.state.values.min() == p.state.values.max()
            if self.mode == "sync":
                assert value == self.clocks, f"partition {p.partition} ends at {value} after {self.clocks} clocks"
            elif self.mode == "buffered":
                assert value == p.version
            else:
                least = len(self.acknowledged[p.partition]) if self.lossless else 0
                most = len(self.sent[p.partition])
                assert least <= value <= most, f"partition {p.partition}: {value}, not {least} to {most} applied"

    @property
    def lossless(self) -> bool:
        """Whether no ownership ended, so that `applied` may not have lost anything."""
        counters = [token & 0xFFFFFFFF for token in self.redis.tokens.values()]
        return max(counters) <= self.spec.partitions

    def _final(self) -> Iterator[sio.PulledPart]:
        found: list[list[sio.PulledPart]] = []

        def read() -> Script:
            found.append((yield from self._pull(self.clocks if self.mode == "sync" else 0)))

        while not found or len(found[-1]) < self.spec.partitions:
            count = len(found)
            self.world.play(read())
            self.world.run(PATIENCE_S * 2, lambda count=count: len(found) > count)  # type: ignore[misc]
            assert len(found) > count, "the end could not be read"
        yield from found[-1]


class _Heartbeat:
    """A worker's heartbeats, each second until it leaves."""

    def __init__(self, simulation: Simulation, worker: str, epoch: int) -> None:
        self.over = False
        self.clock: int | None = None
        self.timeline: int | None = None
        self._simulation, self._worker, self._epoch = simulation, worker, epoch
        simulation.world.play(self._beat())

    def _beat(self) -> Script:
        while not self.over:
            yield self._simulation.scheduler.ask(lambda r: io.WorkerHeartbeat(r, MODEL, self._worker, self._epoch))
            yield 1.0


def main() -> int:
    """Run seeds from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the (first) seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds from there")
    parser.add_argument("--mode", choices=[*CONSISTENCY, "all"], default="all")
    args = parser.parse_args()
    modes = list(CONSISTENCY) if args.mode == "all" else [args.mode]
    failed = 0
    for seed in range(args.seed, args.seed + args.seeds):
        for mode in modes:
            simulation = Simulation(seed, mode)
            try:
                trace = simulation.run()
            except AssertionError as e:
                failed += 1
                print(*simulation.world.log[-30:], sep="\n")
                print(f"FAILED {e}\nreplay: python -m paramserver.testing.simulation --seed {seed} --mode {mode}")
            else:
                w = simulation.world
                print(f"seed {seed} {mode}: {w.events} events, {w.now:.1f} s, trace {trace[:12]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
