"""Placement: which live shard is given a partition that has no owner, and for which shards that waits."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Final

from paramserver.core.scheduler.balance import COPIES
from paramserver.core.scheduler.cluster import Cluster
from paramserver.core.scheduler.membership import Shard
from paramserver.core.scheduler.models import Model

PARTITION_COST_BYTES: Final = 64 << 10
"""What a partition costs its shard in requests: weighed by their bytes alone, many small models would not spread."""
TOGETHER_S: Final = 30.0
"""Shards that have gone within this time of the last one are expected to come back with the first one that does."""
GATHER_S: Final = 2.0
"""Time that the first shard waits for those before it is given all partitions, which would then move to them."""
GATHER_MAX_S: Final = 60.0
"""The same while those that are back lack the memory: as each loads what it is given, it would be killed for it."""


class Placement:
    """Gives partitions without an owner to live shards, once those that are expected have come."""

    def __init__(self, cluster: Cluster, now: float) -> None:
        self.c = cluster
        self._unheard = set(cluster.live_shards())
        """Shards of the last leader that this one has not heard of yet."""
        self._expected = self._gone_together() if cluster.ownerless_bytes() else set()
        """Shards that have gone together with one that has come back; until they are back, nothing is placed."""
        self._since_s = now
        """Since when they are expected; inf once everything has been placed, also what the last leader left waiting."""

    @property
    def waits(self) -> bool:
        """Whether shards are expected."""
        return bool(self._expected)

    # --- who is expected ---

    def joins(self, name: str, now: float) -> None:
        """When the first shard of a whole cluster joins again, expect the others that have gone with the last one."""
        if not self.c.live_shards():
            self._expected |= self._gone_together()
            self._since_s = now
        self._expected.discard(name)
        self.heard(name)

    def heard(self, name: str) -> None:
        """Note that a shard of the last leader lives."""
        self._unheard.discard(name)

    def dying(self, shards: Iterable[Shard], now: float) -> None:
        """Expect those of these shards, which are about to be declared dead, that this leader has never heard of.

        All may have died with the last leader, and come back one by one, too.  If not, nobody waits for them.
        """
        if unheard := self._unheard & {s.name for s in shards}:
            known = any(s.memory_limit_bytes for s in self.c.shards.values() if s.alive)
            self._expected |= unheard
            self._unheard -= unheard
            self._since_s = min(self._since_s, now - GATHER_S if known else now)

    def advance(self, now: float) -> None:
        """Place everything once no shard is waited for any more."""
        waited_s = now - self._since_s
        over = waited_s >= GATHER_MAX_S or (waited_s >= GATHER_S and (not self._expected or self._have_room()))
        if over and self.c.live_shards():
            self._since_s = inf
            self._expected.clear()
            self.place(*self.c.models.values())

    def _gone_together(self) -> set[str]:
        """Names of the shards that have gone with the last one."""
        gone = [s for s in self.c.shards.values() if not s.alive]
        last_s = max((s.gone_s for s in gone), default=0.0)
        return {s.name for s in gone if last_s - s.gone_s <= TOGETHER_S}

    # --- memory ---

    def _have_room(self) -> bool:
        """Whether the live shards can hold what has no owner, of which each would be given as much as the others."""
        known = [f for f in self._free_bytes() if f is not None]
        return not known or COPIES * self.c.ownerless_bytes() <= len(known) * min(known)

    def _free_bytes(self) -> list[int | None]:
        """Memory of each shard that may be given partitions; None if its limit is unknown."""
        free = self.c.free_bytes()
        return [free[n] for n in self.c.eligible_shards()]

    def spare_bytes(self) -> int | None:
        """Memory that the live shards have for new models; None while that of one is unknown.

        What waits for shards that are expected is to find room as well, if each of these has as much as a live one.
        """
        free = self._free_bytes()
        known = [f for f in free if f is not None]
        if len(known) < len(free):
            return None
        live = sum(known)
        whole = live * (len(known) + len(self._expected)) // max(1, len(known))
        return max(0, min(live, whole - COPIES * self.c.ownerless_bytes()))

    # --- assignment ---

    def place(self, *models: Model, wait: bool = True) -> None:
        """Assign the partitions of these models that have no owner to live shards.

        With `wait`, only if no others are expected: a new model has nothing that those could load.
        """
        if wait and self._expected:
            return
        live = self.c.eligible_shards()
        waiting = [m for m in models if any(o.shard is None for o in m.owners)]
        if not waiting or not live:
            return
        total = dict.fromkeys(live, 0)
        for model in self.c.models.values():
            for i, owner in enumerate(model.owners):
                if owner.shard in total:
                    total[owner.shard] += model.bytes_of(i) + PARTITION_COST_BYTES
        for model in waiting:
            orphans = {i: model.bytes_of(i) for i, o in enumerate(model.owners) if o.shard is None}
            for i, shard in assign(orphans, live, _held(model, live), total).items():
                total[shard] += orphans[i] + PARTITION_COST_BYTES
                owner = model.owners[i]
                owner.shard, previous = shard, owner.previous
                self.c.give_token(model, i)
                owner.previous = previous
            self.c.place_changed(model)


def assign(
    orphans: Mapping[int, int], shards: Iterable[str], held: Mapping[str, int], total: Mapping[str, int]
) -> dict[int, str]:
    """Return the shard for each partition in `orphans` (index -> bytes); empty if there are no shards.

    Greedy, largest partition first, onto the shard that holds the least of the model (Graham 1969, longest processing
    time): starting from nothing, the loads of two shards differ by at most one partition.

    `held`: bytes of this model that each shard has already; `total`: bytes of all models, which breaks ties so that
    many small models spread as well.
    """
    load = {s: (held.get(s, 0), total.get(s, 0)) for s in shards}
    out: dict[int, str] = {}
    if not load:
        return out
    for index in sorted(orphans, key=lambda i: (-orphans[i], i)):
        shard = min(load, key=lambda s: (*load[s], s))
        own, everything = load[shard]
        load[shard] = (own + orphans[index], everything + orphans[index])
        out[index] = shard
    return out


def _held(model: Model, shards: Sequence[str]) -> dict[str, int]:
    """Bytes of the model that each of these shards owns."""
    held = dict.fromkeys(shards, 0)
    for i, owner in enumerate(model.owners):
        if owner.shard in held:
            held[owner.shard] += model.bytes_of(i)
    return held
