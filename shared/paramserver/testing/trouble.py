"""What goes wrong in a simulated cluster, other than lost messages and crashes."""

from typing import TYPE_CHECKING, Any, Final

from paramserver.core.scheduler import io
from paramserver.errors import PsError
from paramserver.testing.nodes import Node
from paramserver.testing.workers import SimClient
from paramserver.testing.world import Faults, Script
from paramserver.types import ModelKey, PartitionKey

if TYPE_CHECKING:
    from paramserver.testing.simulation import Simulation

KINDS: Final[dict[str, Faults]] = {
    "crashes": Faults(),
    "moves": Faults(crash=0.0, feed_cut=0.002, drop=0.005, drain=0.15),
    "cuts": Faults(crash=0.0002, cut=0.3, drain=0.05),
    "pauses": Faults(crash=0.0002, pause=0.2, drain=0.05),
    "redis": Faults(crash=0.0003, redis_away=0.15, drain=0.05),
    "emptied": Faults(crash=0.0, drop=0.005, feed_cut=0.002, redis_away=0.05, empty_at_s=12.0, drain=0.05),
}
"""Fault mixes, named by what goes wrong most."""
RARE_KINDS: Final[dict[str, Faults]] = {
    "slow": Faults(compute_s=1.0),
    "feeds": Faults(crash=0.001, feed_cut=0.1),
    "stops": Faults(crash=0.0, feed_cut=0.002, drop=0.005, stop=0.15, drain=0.05),
    "stores": Faults(crash=0.0003, stop=0.03, drain=0.05, store_s=6.0),
    "births": Faults(crash=0.02, down_s=(0.2, 2.0), until_s=25.0, store_s=2.0, drain=0.1),
    "restarts": Faults(crash=0.001, drop=0.005, feed_cut=0.002, drain=0.05, redis_restarts_s=(2.0, 8.0)),
}
"""Fault mixes that are used only if they are asked for."""
ALL_STOP: Final = 0.3
"""Share of the stops in which all shards are told to, so that nobody can take over what they have."""
SETTLED_S: Final = 3.0
"""Within this time after a restart of Redis, what it has lost is stored again."""


class Trouble:
    """Makes trouble once a second."""

    def __init__(self, simulation: "Simulation") -> None:
        self._sim = simulation

    def begin(self) -> None:
        """Begin with it."""
        world = self._sim.world
        world.after(1.0, "trouble", self._inject)
        if world.faults.empty_at_s is not None:
            world.after(world.faults.empty_at_s, "Redis is emptied", self._empty)
        if world.faults.redis_restarts_s is not None:
            world.after(world.rng.uniform(*world.faults.redis_restarts_s), "Redis is copied", self._copy)

    def _inject(self) -> None:
        sim, world, faults = self._sim, self._sim.world, self._sim.world.faults
        nodes: list[Node] = [n for n in (*sim.schedulers, *sim.shards.values()) if n.up]
        if nodes and world.chance(faults.pause):
            world.rng.choice(nodes).pause(world.fault_duration())
        if nodes and world.chance(faults.cut):
            names = [*(n.name for n in nodes), "redis"]
            a, b = world.rng.sample(names, 2)
            world.cuts[a, b] = world.now + world.fault_duration()
        if world.chance(faults.redis_away):
            sim.redis.down = True
            world.after(world.fault_duration(), "Redis is back", self._redis_back)
        if world.chance(faults.drain):
            name = world.rng.choice(list(sim.shards))
            world.play(drain(sim, name, world.fault_duration()))
        if faults.stop and world.chance(faults.stop):
            shards = list(sim.shards.values())
            for shard in shards if world.rng.random() < ALL_STOP else [world.rng.choice(shards)]:
                shard.stop()
        if world.faults_active:
            world.after(1.0, "trouble", self._inject)

    def _redis_back(self) -> None:
        self._sim.redis.down = False

    def _may_lose(self) -> bool:
        """Whether Redis may lose data now.

        What it alone has is lost for good, as it may be (semantics 6), but only of a model in sync at `applied`, which
        begins a timeline then, as it does if the leader does not know yet that a shard has everything.  Where nobody
        else changes its values, each commit of the timeline is one step all the same.
        """
        sim, redis = self._sim, self._sim.redis
        held = {
            (PartitionKey(ModelKey(row.model, row.generation), row.partition), row.token)
            for s in sim.shards.values()
            if s.up
            for row in s.core.partitions()
        }
        in_memory = set(redis.tokens.items()) <= held
        known = in_memory and all(m["served"] for s in sim.schedulers if s.leads for m in s.core.read.models())
        unchanged = not sim.changed and not sim.given and sim.optimizer == "sum" and sim.models == 1
        may = unchanged and sim.mode == "sync" and sim.level == "applied"
        redis.lost |= bool(redis.tokens) and may and not known
        return bool(redis.tokens) and (in_memory or may)

    def _empty(self) -> None:
        if not self._may_lose():
            self._sim.world.after(0.2, "Redis is emptied", self._empty)
            return
        self._sim.redis.empty()
        self._sim.redis.times_emptied += 1

    def _copy(self) -> None:
        world, image = self._sim.world, self._sim.redis.image()
        world.after(world.rng.uniform(0.0, world.faults.lag_s), "Redis restarts", lambda: self._restart(image))

    def _restart(self, image: dict[str, Any]) -> None:
        sim, world = self._sim, self._sim.world
        if not world.faults_active:
            return
        # Decisions of a leader that died since the copy would be in nobody's memory either.
        decided = any(s.leads and s.term == image["term"] == sim.redis.term for s in sim.schedulers)
        if not decided or not self._may_lose():
            world.after(0.2, "Redis is copied", self._copy)
            return
        sim.redis.restart_with(image)
        # What is lost is in memory only, until it is stored again: a death in the meantime may lose it.
        world.calm_until_s = world.now + SETTLED_S
        assert world.faults.redis_restarts_s is not None
        world.after(SETTLED_S + world.rng.uniform(*world.faults.redis_restarts_s), "Redis is copied", self._copy)


def drain(sim: "Simulation", shard: str, seconds: float) -> Script:
    """Drain a shard for a while."""
    operator = SimClient(sim, "operator")
    for state, wait_s in (("draining", seconds), ("active", 0.0)):
        for _ in range(5):
            outcome = yield from operator.ask(lambda r, s=state: io.SetShardState(r, shard, s))
            if not isinstance(outcome, PsError) or not outcome.retryable:
                break
        yield wait_s
