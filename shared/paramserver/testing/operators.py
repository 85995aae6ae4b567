"""A simulated operator, who changes a model during training: restores, assignments, mode changes, new creations."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from paramserver.core.layout import Layout
from paramserver.core.optimizer import slot_count, slot_names
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.core.scheduler import io
from paramserver.core.shard.events import AssignPart, SetReceived
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError
from paramserver.testing.schedulers import SimScheduler
from paramserver.testing.workers import SimClient
from paramserver.testing.world import Script
from paramserver.types import ModelKey

if TYPE_CHECKING:
    from paramserver.testing.simulation import Simulation

ASSIGNED: Final = 7.0
"""The value that restores and assignments write."""
LATER: Final = 40
"""Versions between the checkpoints of successive restores; the first has version 0, of a model never trained."""
REDIS_S: Final = 2.0
"""Longest time that the end of a restore waits for Redis before it is decided."""
ROUNDS: Final = 3
MODE_CHANGES: Final = 6
MODES: Final[tuple[dict[str, Any], ...]] = (
    {"mode": "async"},
    {"mode": "buffered", "count": 2, "interval_ms": 300},
)
OPTIMIZERS: Final[tuple[dict[str, Any], ...]] = (
    {"name": "momentum", "lr": 0.5, "momentum": 0.5},
    {"name": "nesterov", "lr": 0.25, "momentum": 0.75},
    {"name": "adagrad", "lr": 0.5},
    {"name": "rmsprop", "lr": 0.125, "momentum": 0.5},
    {"name": "adam", "lr": 0.5, "betas": [0.5, 0.75]},
    {"name": "adamw", "lr": 0.5, "weight_decay": 0.25},
    {"name": "ftrl", "lr": 0.5},
)
SCHEDULES: Final[tuple[dict[str, Any], ...]] = (
    {"kind": "constant"},
    {"kind": "exponential", "gamma": 0.875},
    {"kind": "cosine", "t_max": 30, "warmup": 4},
)
ANY_MODE: Final = (*MODES, {"mode": "ssp", "staleness": 2, "min_workers": 3}, {"mode": "sync", "min_workers": 3})


class SimOperator(SimClient):
    """Makes one kind of change `ROUNDS` times."""

    def __init__(self, simulation: "Simulation") -> None:
        super().__init__(simulation, f"{simulation.prefix}operator")
        self.layout = Layout(simulation.spec)
        self.restored: int | None = None
        """The timeline that the last restore began; None if a leader died during it, or another timeline began."""
        self.alike = [0]
        """Timelines that began with all partitions alike: the first, and those of complete restores."""
        self.mixed = False
        """Whether the partitions may be in different states (promises): a restore was cut short, or a shard died after
        it, and there was no cut to go back to."""
        self.over = False
        self.value = ASSIGNED
        self.optimizer: OptimizerSpec | None = None
        """The optimizer whose state restores bring; None: that of the reference."""
        self.generation = 0
        """Of the newest creation of the model that was answered."""

    def assign(self, value: float) -> Script:
        """Assign this value to every element, and wait until all shards have confirmed."""
        self.over, self.value = False, value
        yield from self._assign()
        self.over = True

    def work(self) -> Script:
        """Make the changes; in the end the model is in its first mode again, after `modes` in async, and after
        `recreations` in any but buffered."""
        kinds: dict[str, Callable[[int], Script]] = {
            "restores": self._restore,
            "puts": self._put,
            "flips": self._flip,
            "settings": self._change_settings,
            "optimizers": self._change_optimizers,
            "recreations": self._create_again,
        }
        if self.sim.change == "modes":
            yield from self._change_modes()
        else:
            for turn in range(ROUNDS):
                yield self.sim.world.rng.uniform(0.5, 2.0)
                yield from kinds[self.sim.change](turn)
        self.over = True

    def _restore(self, turn: int) -> Script:
        self.restored = None
        begun = yield from self._insist(lambda r: io.StartRestore(r, self.sim.spec.name))
        returns = self._cut() is not None
        key, leader = ModelKey(self.sim.spec.name, self.generation), self._schedulers[0]
        core, ended, places = leader.core, None, dict[int, tuple[int, int]]()
        while begun is not None:  # else the restore began but its answer was lost, so no values are set
            places = yield from self._set(leader, LATER * turn)
            yield self.sim.world.rng.uniform(0.0, REDIS_S)
            ended = yield from self.ask(lambda r, at=places: io.RestoreFinished(r, key, None, LATER * turn, at))
            undone = isinstance(ended, PsError) and ended.code == "conflict"  # by a death, just before
            if not undone or not leader.leading or leader.core is not core:
                break
        checked = places and not isinstance(ended, PsError)
        if ended is None or isinstance(ended, PsError):
            ended = yield from self._insist(lambda r: io.RestoreFinished(r, key, None, LATER * turn))
        begins = 0 if begun is None else ended["timeline"] - begun["timeline"]
        if begins == 1 or (checked and begins > 1):
            self.restored = ended["timeline"]
            self.alike.append(ended["timeline"])
        complete = self.restored is not None
        kept = returns if self.sim.level == "applied" else complete
        self.mixed = not kept or (self.mixed and not complete)

    def _cut(self) -> int | None:
        """The model's newest cut, as stored."""
        stored = self.sim.redis.state.get(f"clock:{self.sim.spec.name}")
        return None if stored is None else json.loads(stored)["cut"]

    def _set(self, leader: SimScheduler, version: int) -> Script:
        """Set all values, as the leader does itself; after a refusal (a new timeline), retry while it still leads.

        Returns where each partition was set, if it does.
        """
        core, key = leader.core, ModelKey(self.sim.spec.name, self.generation)
        while True:
            document = core.read.model(self.sim.spec.name)
            if self.sim.other_optimizers:
                self.optimizer = core._c.models[self.sim.spec.name].spec.optimizer
            self.sim.ledger.restored.add((document["generation"], document["timeline"]))
            places = {i: core.read.place(key, i) for i in range(self.sim.spec.partitions)}
            done = yield from self._assign(timeline=document["timeline"], version=version)
            if not leader.leading or leader.core is not core:
                return {}
            if done:
                return places
            yield 0.2

    def _put(self, turn: int) -> Script:
        yield from self._assign()

    def _flip(self, turn: int) -> Script:
        for rule in (MODES[turn % len(MODES)], self.sim.spec.consistency.document()):
            yield from self._patch({"consistency": rule})
            yield self.sim.world.rng.uniform(0.0, 1.5)

    def _change_settings(self, turn: int) -> Script:
        """Change settings back and forth, so fast that a shard may hear of the last change only."""
        settings: list[dict[str, Any]] = [{"min_workers": 1}, {"min_workers": 2}]
        if self.sim.late:
            settings += [{"late": "drop"}, {"late": "fold"}]
        for setting in settings:
            yield from self._patch({"consistency": setting})
            yield self.sim.world.rng.uniform(0.0, 0.5)

    def _change_optimizers(self, turn: int) -> Script:
        """Change the optimizer, then restore the model or have it leave sync for a while, all within moments."""
        rng = self.sim.world.rng
        yield from self._patch({"optimizer": self._any_optimizer()})
        if rng.random() < 0.6:
            yield rng.uniform(0.0, 0.3)  # a commit may name it
            yield from self._patch({"optimizer": self._any_optimizer()})
            yield from self._restore(turn)
            return
        yield from self._patch({"consistency": MODES[turn % len(MODES)], "optimizer": self._any_optimizer()})
        yield rng.uniform(0.0, 1.5)
        yield from self._patch({"consistency": self.sim.spec.consistency.document()})
        yield rng.choice((0.0, rng.uniform(0.0, 1.0)))
        yield from self._patch({"optimizer": self._any_optimizer()})

    def _any_optimizer(self) -> dict[str, Any]:
        rng = self.sim.world.rng
        return rng.choice(OPTIMIZERS) | {"schedule": rng.choice(SCHEDULES)}

    def _patch(self, change: dict[str, Any]) -> Script:
        yield from self._insist(lambda r: io.PatchModel(r, self.sim.spec.name, change))

    def _change_modes(self) -> Script:
        """Change to any mode, any number of workers' clocks apart; end in `async`, in which nothing waits."""
        rng = self.sim.world.rng
        for left in reversed(range(MODE_CHANGES)):
            yield rng.uniform(0.0, 2.5)
            yield from self._patch({"consistency": rng.choice(ANY_MODE) if left else MODES[0]})
            if self.sim.deaths:
                yield from self._remove_worker()

    def _remove_worker(self) -> Script:
        """End the epoch of any worker, at a moment when partitions may be computing what the change of mode applies."""
        model, rng = self.sim.spec.name, self.sim.world.rng
        yield rng.uniform(0.0, 0.2)
        yield from self.ask(lambda r: io.LeaveWorker(r, model, f"{model}/w{rng.randrange(self.sim.workers)}"))

    def _create_again(self, turn: int) -> Script:
        """Delete the model and create it again as another; in the end in a mode in which no acknowledged push waits."""
        spec, rng = self.sim.spec, self.sim.world.rng
        yield from self._insist(lambda r: io.DeleteModel(r, spec.name))
        yield rng.choice((0.0, rng.uniform(0.0, 2.0)))
        mode = rng.choice(ANY_MODE if turn < ROUNDS - 1 else (MODES[0], *ANY_MODE[2:]))
        change = {"consistency": mode, "partitions": rng.randint(3, 5), "ack": rng.choice(("applied", "journaled"))}
        document = spec.document() | change
        self.sim.spec = ModelSpec.parse(document)
        made = yield from self._insist(lambda r: io.CreateModel(r, document, f"nonce-{turn}"))
        self.generation = made["generation"]

    def _insist(self, make: Callable[[int], io.Event]) -> Script:
        """Send a request until it is answered, and return the answer; None if a restore had already begun or the model
        was already deleted."""
        while True:
            outcome = yield from self.ask(make)
            if not isinstance(outcome, PsError):
                return outcome
            if outcome.code in ("conflict", "unknown_model"):
                return None  # the restore has begun, or the model is deleted; an answer was lost
            # Too little memory there is while shards are away.
            assert outcome.retryable or outcome.code == "not_enough_memory", outcome
            yield 0.2

    def _assign(self, *, timeline: int | None = None, version: int = 0) -> Script:
        """Assign every value of every partition, shard by shard, until all have confirmed; return True.

        With `timeline`, do it as a restore to `version`; return False once the model is on another timeline.
        """
        restore = timeline is not None
        names = None if self.optimizer is None else slot_names(self.optimizer)
        left = set(range(self.sim.spec.partitions))
        while left:
            for shard, indices in (yield from self.owners(left)).items():
                parts = tuple(self._part(i, restore, version) for i in indices)
                done = yield self.sim.shards[shard].ask(
                    self.name,
                    f"set {indices}",
                    lambda r, p=parts: SetReceived(
                        self.sim.spec.name,
                        p,
                        generation=self.generation,
                        restore=restore,
                        timeline=timeline,
                        slot_names=names,
                        request=r,
                    ),  # type: ignore[misc]
                )
                if not isinstance(done, PsError):
                    left -= set(indices)
                elif done.code == "rolled_back":
                    return False
                else:
                    yield from self.failed()
        return True

    def _part(self, index: int, restore: bool, version: int) -> AssignPart:
        """The state after `value` steps, or with `sum` that value; only a restore is sure to have the optimizer's."""
        size, segments = self.layout.partition_size(index), len(self.layout.segments[index])
        element = self.sim.reference.after(int(self.value))
        if self.optimizer is not None:
            element = (self.value, 1.0, 2.0)[: 1 + slot_count(self.optimizer)]
        value, *slots = (np.full(size, x, np.float32) for x in element)
        steps = (int(self.value),) * segments if slots else None
        state = tuple(slots) if slots or restore else None
        return AssignPart(index, value, "float32", True, slots=state, steps=steps, version=max(0, version - 1))
