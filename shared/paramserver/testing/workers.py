"""A simulated worker: it pushes ones, clock by clock, and repeats each push under its id until it is answered."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec.structs import replace

from paramserver.core.layout import Layout
from paramserver.core.scheduler import io
from paramserver.core.scheduler.core import SchedulerCore
from paramserver.core.shard.effects import PullDone, PulledPart, PushDone
from paramserver.core.shard.events import PullReceived, PushReceived
from paramserver.errors import PsError, problem
from paramserver.testing.shard_driver import push_part
from paramserver.testing.world import Script
from paramserver.types import F32, PushId

if TYPE_CHECKING:
    from paramserver.testing.simulation import Simulation


SEQS_MAX: Final = 40
"""Bound on the pushes of one worker where each has an element of its own."""
DATASET: Final = "data"
DIES: Final = 0.02
"""Probability that a worker dies before a request."""


def element_of(worker: int, seq: int) -> int:
    """Return the index, in each partition, of the element that this push alone adds to."""
    return worker * SEQS_MAX + seq


class SimClient:
    """A client of schedulers and shards; it stays with a scheduler until that does not answer or does not lead."""

    def __init__(self, simulation: "Simulation", name: str) -> None:
        self.sim, self.name = simulation, name
        self._schedulers = list(simulation.schedulers)
        self._map: dict[int, str] = {}
        """Partition -> shard, as last read from a scheduler."""

    def ask(self, make: Any) -> Script:
        """Send an event to the scheduler and return its outcome; `no_leader` and `in_doubt` switch to the other one."""
        return (yield from self._switch_if_not_leading((yield self._schedulers[0].ask(self.name, make))))

    def _switch_if_not_leading(self, outcome: Any) -> Script:
        if isinstance(outcome, PsError) and outcome.code in ("no_leader", "in_doubt"):
            self._schedulers = [*self._schedulers[1:], self._schedulers[0]]
            yield 0.2
        return outcome

    def owners(self, wanted: set[int]) -> Script:
        """Return shard -> partitions for those wanted that have an owner, at least one.  Cached until `failed`.

        It is empty if the model has no such partitions, because it has been created again.
        """
        while True:
            owners: dict[str, list[int]] = {}
            for index in sorted(wanted & self._map.keys()):
                owners.setdefault(self._map[index], []).append(index)
            if owners:
                return owners
            doc = yield from self.model()
            self._map = {p["index"]: p["shard"] for p in doc["partitions"] if p["shard"] is not None}
            if not wanted & {p["index"] for p in doc["partitions"]}:
                return {}
            if not wanted & self._map.keys():
                yield 0.2

    def model(self) -> Script:
        """Return the model's public document."""
        return (yield from self.read("model", lambda core: core.read.model(self.sim.spec.name)))

    def read(self, what: str, read: Callable[[SchedulerCore], Any]) -> Script:
        """Return what a leader reads."""
        while True:
            doc = yield from self._switch_if_not_leading((yield self._schedulers[0].query(self.name, what, read)))
            if not isinstance(doc, PsError):
                return doc
            yield 0.2

    def failed(self) -> Script:
        """Discard the map, which may be stale, after a shard has refused a request."""
        self._map = {}
        yield 0.2

    def pull(self, version: int, clock: int = 0, generation: int | None = None) -> Script:
        """Pull every partition at this version and clock or later; fewer if the model was rolled back behind them.

        `generation`: only of this creation of the model; None: of any, as a plain client does.
        """
        pulled: list[PulledPart] = []
        left = set(range(self.sim.spec.partitions))
        while left and (owners := (yield from self.owners(left))):
            for shard, indices in owners.items():
                done = yield self.sim.shards[shard].ask(
                    self.name,
                    f"pull {indices}",
                    lambda r, i=tuple(indices): PullReceived(
                        self.sim.spec.name,
                        i,
                        generation=generation,
                        min_version=version,
                        min_clock=clock,
                        wait_s=3.0,
                        request=r,
                    ),  # type: ignore[misc]
                )
                if isinstance(done, PullDone):
                    pulled += done.parts
                    left -= set(indices)
                elif (version or clock) and isinstance(done, PsError) and done.code == "version_not_reached":
                    return pulled
                else:
                    yield from self.failed()
        return pulled


class _Died(Exception):
    """Ends a worker's script, as SIGKILL ends its process."""


class SimWorker(SimClient):
    """Trains the model up to the last clock."""

    def __init__(self, simulation: "Simulation", index: int) -> None:
        super().__init__(simulation, f"{simulation.prefix}worker-{index}")
        self.index = index
        self.seq = 0
        self.member: tuple[str, int] = ("", 0)
        """(worker, epoch) that it last joined as."""
        self.reported = 0
        """The iterations that it has reported as done, or that its join told it."""

    def train(self) -> Script:
        """Join and train; rejoin when fenced, until the last clock is done."""
        sim = self.sim
        while True:
            me = yield from self.ask(lambda r: io.JoinWorker(r, sim.spec.name, f"w{self.index}"))
            if isinstance(me, PsError):
                yield 0.3
                continue
            sim.joined(me)
            self.member, self.reported = (me["worker"], me["epoch"]), int(me["clock"])
            beating = _Heartbeat(self, me)
            sim.world.play(beating.beat())
            try:
                over = yield from self._work(me, beating)
            except _Died:
                beating.over, over = True, False
                yield sim.world.fault_duration()
            beating.over = True
            if over:
                break
            self.sim.restarts += 1
        if sim.tasks is not None:  # the others have ranges left, perhaps, and would wait for its lease to end
            yield from self.ask(lambda r: io.LeaveWorker(r, sim.spec.name, me["worker"], me["epoch"]))
        sim.finished += 1

    def _work(self, me: Any, beating: "_Heartbeat") -> Script:
        """Train clock by clock; return False if the worker has to join again."""
        sync, operator, task = self.sim.mode == "sync", self.sim.operator, None
        clock, timeline, generation = int(me["clock"]), int(me["timeline"]), int(me["generation"])
        since, self.layout = clock, Layout(self.sim.spec)
        while clock < self.sim.clocks and (not self.sim.own_elements or self.seq < SEQS_MAX - 1):
            if self.sim.tasks is not None:
                leased = yield from self._lease(me)
                if isinstance(leased, PsError):
                    return False
                if (task := leased["task"]) is None:
                    break
                if leased["timeline"] == timeline and leased["clock"] > clock:
                    since = clock = int(leased["clock"])  # the others have not waited for this one meanwhile
                    beating.at = clock, timeline, since
            self.seq += 1
            ends = sync and self.sim.world.chance(0.7)
            push_id = PushId(me["worker"], me["epoch"], self.seq)
            self.sim.begun[self.index, self.seq] = generation
            outcome = yield from self._push(push_id, generation, clock, timeline, ends)
            if not isinstance(outcome, PsError):
                if outcome and (yield from self._released(outcome)):
                    outcome = {"clock": clock + 1}
                else:
                    outcome = yield from self._report(me, clock + 1, timeline, since)
            if isinstance(outcome, PsError):
                if outcome.code != "rolled_back":
                    return False
                self.sim.restarts += 1
                clock, timeline = int(outcome.members["clock"]), int(outcome.members["timeline"])
                since = clock
                if self.sim.any_mode:  # else it perhaps loses its lease, which is to be seen, too
                    beating.at = clock, timeline, since
                continue
            self.sim.ended[self.index, self.seq] = (generation, timeline, clock)
            before, clock = clock, max(clock + 1, int(outcome["clock"])) if sync else clock + 1
            since = since if clock == before + 1 else clock
            beating.at = clock, timeline, since
            self.sim.observe(self.index, (yield from self.pull(clock if sync else 0)))
            if self.sim.tasks is not None and not (yield from self._task_done(me, task)):
                return False
            if self.sim.any_mode:
                yield self.sim.world.rng.uniform(0.0, 0.6)
        while self.sim.created_again and not operator.over and operator.generation == generation:
            yield 0.5
        return operator.generation == generation

    def _lease(self, me: Any) -> Script:
        """Lease the next range of the data; return the answer once it has one, or all data is done, or an error."""
        wanted: tuple[Any, ...] = (self.sim.spec.name, me["worker"], me["epoch"], DATASET, 3.0, ())
        while True:
            self._may_die()
            asked_s = self.sim.world.now
            answer = yield from self.ask(lambda r: io.LeaseTask(r, *wanted))
            if isinstance(answer, PsError):
                if not answer.retryable:
                    return answer
                yield 0.2
            elif answer["task"] is not None or answer["finished"]:
                if answer["task"] is not None and self.sim.tasks is not None:
                    self.sim.tasks.leased(answer["task"], asked_s)
                return answer

    def _task_done(self, me: Any, task: Any) -> Script:
        """Report a range as done; return False if the worker has to join again."""
        assert self.sim.tasks is not None
        self.sim.tasks.worked_on(task)
        while True:
            self._may_die()
            done = yield from self.ask(
                lambda r: io.TaskDone(r, self.sim.spec.name, me["worker"], me["epoch"], task["id"])
            )
            if not isinstance(done, PsError):
                self.sim.tasks.done(task, self.sim.world.now)
                return True
            if not done.retryable:
                return False
            yield 0.2

    def _gradient(self, seq: int, size: int) -> F32:
        """Ones; with own elements, a one in the element that only this push has, for means hide how many there were."""
        if not self.sim.own_elements:
            return np.ones(size, np.float32)
        gradient = np.zeros(size, np.float32)
        gradient[element_of(self.index, seq)] = 1.0
        return gradient

    def _push(self, push_id: PushId, generation: int, clock: int, timeline: int, ends: bool) -> Script:
        """Push ones to every partition, under one id until all have answered; return the error that ended it, if any.

        With `ends`, the first attempt is marked as the iteration's last push if it covers all partitions, and if all of
        its requests succeed they are returned, as (shard, push); else none.  Retries are not marked, because the
        reports of two attempts cannot be combined.
        """
        of, on = (generation, timeline) if self.sim.names_generation() else (None, None)  # as a plain client does
        left = set(range(self.layout.spec.partitions))
        ending: list[tuple[str, PushReceived]] = []
        while left:
            owners = yield from self.owners(left)
            if not owners:
                return problem("model_replaced", "no shard will ever take the rest")
            ends = ends and sum(map(len, owners.values())) == self.layout.spec.partitions
            for shard, indices in owners.items():
                sizes = {i: self.layout.partition_size(i) for i in indices}
                parts = tuple(push_part(i, self._gradient(push_id.seq, n), n) for i, n in sizes.items())
                for i in indices:
                    self.sim.sent.setdefault(i, set()).add(push_id)
                push = PushReceived(self.sim.spec.name, parts, generation=of, timeline=on, push_id=push_id, clock=clock)
                what, make = f"push {push_id.seq} {indices}", lambda r, push=push: replace(push, request=r)
                node = self.sim.shards[shard]
                self._may_die()
                if ends:
                    done = yield node.ask_last_push(self.name, what, make, len(owners))
                else:
                    done = yield node.ask(self.name, what, make)
                if isinstance(done, PushDone):
                    assert done.model.generation == generation, f"{done.model} took a push to generation {generation}"
                    left -= set(indices)
                    if ends:
                        ending.append((shard, replace(push, generation=generation, timeline=done.timeline)))
                    for i in indices:
                        self.sim.acknowledged.setdefault(i, set()).add(push_id)
                elif not done.retryable:
                    return done
                else:
                    yield from self.failed()
            if left:
                ending.clear()  # by the time the rest is accepted, no request waits for the commit any more
            ends = False
        return ending

    def _released(self, pushes: list[tuple[str, PushReceived]]) -> Script:
        """Whether all shards say that the push's clock is over; what they return then is checked like a pull."""
        pulled: list[PulledPart] = []
        for shard, push in pushes:
            self._may_die()
            done = yield self.sim.shards[shard].ask_commit(self.name, push, 2.0)
            if not isinstance(done, PullDone):
                return False
            one = {p.version - 1 for p in done.parts} == {push.clock}
            assert one or self.sim.changed, "another commit than the one awaited"
            pulled += done.parts
        self.sim.observe(self.index, pulled)
        return len(pulled) == self.layout.spec.partitions

    def _may_die(self) -> None:
        if self.sim.deaths and self.sim.world.chance(DIES):
            raise _Died

    def _report(self, me: Any, clock: int, timeline: int, since: int) -> Script:
        model, self.reported = self.sim.spec.name, max(self.reported, clock)
        while True:
            self._may_die()
            answer = yield from self.ask(
                lambda r: io.ReportClock(r, model, me["worker"], me["epoch"], clock, timeline, 3.0, since)
            )
            if isinstance(answer, PsError):
                if not answer.retryable:
                    return answer
                yield 0.2
            elif answer["released"]:
                self._check_ahead(clock)
                return answer

    def _check_ahead(self, clock: int) -> None:
        """Assert that a worker that goes on after so many iterations leaves no live one further behind than it may."""
        rule = self.sim.spec.consistency
        if rule.mode != "ssp" or self.sim.any_mode or self.sim.change == "flips" or self.sim.tasks is not None:
            return  # another mode may release it; who has rested for lack of data is further on than it has reported
        rosters = [s.core._c.models[self.sim.spec.name].roster.workers for s in self.sim.schedulers if s.leads]
        for other in self.sim.trainers:
            name, epoch = other.member
            known = [roster.get(name) for roster in rosters]
            counted = known and all(w is not None and w.alive and not w.resting and w.epoch == epoch for w in known)
            behind = clock - other.reported
            assert not counted or behind <= rule.staleness, f"{self.name} is released {behind} ahead of {other.name}"


class _Heartbeat:
    """A worker's heartbeats, one per second until `over`."""

    def __init__(self, worker: SimWorker, me: Any) -> None:
        self.over = False
        self.at: tuple[int | None, int | None, int | None] = (None, None, None)
        """(clock, timeline, since) to tell; None: nothing yet."""
        self._client = SimClient(worker.sim, worker.name)
        self._me = me

    def beat(self) -> Script:
        """Send heartbeats until `over` is set."""
        worker, epoch, model = self._me["worker"], self._me["epoch"], self._client.sim.spec.name
        while not self.over:
            yield from self._client.ask(
                lambda r: io.WorkerHeartbeat(r, model, worker, epoch, *self.at[:2], since=self.at[2])
            )
            yield 1.0
