"""Partition balancing: a pure function from who owns what to the moves to begin.

Draining shards are emptied first, then bytes are balanced, then load.  Every balancing move makes its two shards
strictly more equal, so planning terminates and no partition oscillates.  A move in progress counts as completed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct

MIN_GAIN: Final = 0.05
"""Byte moves that the bound of `plan` does not require must narrow a gap by more than this fraction of a share."""
LOAD_MIN: Final = float(1 << 20)
"""Bytes per second below which a shard counts as idle."""
LOAD_GAIN: Final = 0.8
"""A load move must cut the higher load of its two shards to at most this fraction."""
COPIES: Final = 2
"""Memory that a partition needs on another shard, in states: an update writes the new version beside the old one."""
_CANDIDATES_MAX: Final = 8
"""Bound on the partitions considered for an exchange.

So many each of the most and the least loaded ones of the busy shard, and of the least loaded ones of the idle shard.
"""

PartitionName = tuple[str, int]
"""(model, partition)."""


class PartitionLoad(Struct, frozen=True):
    """One partition and the shard that owns it, or will own it once its move completes."""

    key: PartitionName
    shard: str
    bytes: int
    """Values and optimizer state."""
    load: float = 0.0
    """Bytes per second in and out."""
    movable: bool = True


class ShardLoad(Struct, frozen=True):
    """One live shard."""

    name: str
    draining: bool = False
    free_bytes: int | None = None
    """Memory still available to it; None if unknown."""
    moves: int = 0
    """Moves in progress from it or to it."""


class Move(Struct, frozen=True):
    """The decision to move a partition from one shard to another."""

    key: PartitionName
    source: str
    target: str


def plan(
    partitions: Iterable[PartitionLoad], shards: Iterable[ShardLoad], at_once: int, *, by_load: bool = False
) -> list[Move]:
    """Return the moves to begin now; including those in progress, a shard takes part in at most `at_once`.

    Bytes are balanced until no shard that is not draining holds more than the average plus one partition.  Load is
    balanced only if bytes are balanced, nothing moves, and the caller says that loads are known (`by_load`).
    """
    table = _Table(partitions, shards, at_once)
    if not table.staying:
        return []
    table.drain()
    table.level_bytes()
    if by_load and not table.moves and table.nothing_moves:
        table.level_load()
    return table.moves


def missing_bytes(
    partitions: Iterable[PartitionLoad], shards: Iterable[ShardLoad], leaving: str
) -> tuple[int, int] | None:
    """Return (needed, free) bytes if the remaining shards cannot hold what `leaving` owns, and those that drain.

    None if they can, if no shard remains, or the free memory of one that does is unknown.
    """
    shards = list(shards)
    going = {leaving, *(s.name for s in shards if s.draining)}
    return _missing(sum(p.bytes for p in partitions if p.shard in going), shards, leaving)


def worst_loss(held: Mapping[str, int], shards: Sequence[ShardLoad]) -> tuple[int, int] | None:
    """Return `missing_bytes` of the shard that the others could least take the place of; `held`: bytes of each.

    None if they could take the place of any one.
    """
    # Of all free memory, that of a shard that drains, or is lost itself, does not count.
    counted = {s.name: s.free_bytes or 0 for s in shards if not s.draining}
    lost = [s.name for s in shards if len(counted) > (s.name in counted)]
    worst = max(lost, key=lambda n: COPIES * held[n] + counted[n] if n in counted else 0, default=None)
    going = {worst, *(s.name for s in shards if s.draining)}
    return None if worst is None else _missing(sum(held[n] for n in going if n is not None), shards, worst)


def _missing(held: int, shards: Iterable[ShardLoad], leaving: str) -> tuple[int, int] | None:
    needed = COPIES * held
    free = [p.free_bytes for p in shards if p.name != leaving and not p.draining]
    known = [f for f in free if f is not None]
    if not free or len(known) < len(free) or needed <= sum(known):
        return None
    return needed, sum(known)


class _Table:
    """Which shard has which partitions, updated as moves are planned."""

    def __init__(self, partitions: Iterable[PartitionLoad], shards: Iterable[ShardLoad], at_once: int) -> None:
        self.shards = {p.name: p for p in sorted(shards, key=lambda p: p.name)}
        self.staying = [p.name for p in self.shards.values() if not p.draining]
        self.partitions: dict[str, list[PartitionLoad]] = {name: [] for name in self.shards}
        for partition in sorted(partitions, key=lambda p: (-p.bytes, p.key)):
            if partition.shard in self.partitions:
                self.partitions[partition.shard].append(partition)
        self.bytes = {n: sum(p.bytes for p in ps) for n, ps in self.partitions.items()}
        self.load = {n: sum(p.load for p in ps) for n, ps in self.partitions.items()}
        self.slots = {n: at_once - p.moves for n, p in self.shards.items()}
        self.free = {n: p.free_bytes for n, p in self.shards.items()}
        self.nothing_moves = all(p.moves == 0 for p in self.shards.values())
        self.moves: list[Move] = []

    @property
    def share(self) -> float:
        """Bytes per shard if all were spread evenly over the shards that are not draining."""
        return sum(self.bytes.values()) / len(self.staying)

    def can_move(self, partition: PartitionLoad, target: str) -> bool:
        """Whether that move can begin now: a movable partition, a free slot on both shards, memory on the target."""
        free = self.free[target]
        fits = free is None or COPIES * partition.bytes <= free
        return partition.movable and self.slots[partition.shard] > 0 and self.slots[target] > 0 and fits

    def move(self, partition: PartitionLoad, target: str) -> None:
        """Plan a move; the partition counts for its target from now on and is not moved again."""
        self.moves.append(Move(partition.key, partition.shard, target))
        self._shift(partition, target, 1)

    def _shift(self, partition: PartitionLoad, target: str, slots: int) -> None:
        source = partition.shard
        self.partitions[source] = [p for p in self.partitions[source] if p.key != partition.key]
        self.partitions[target].append(
            PartitionLoad(partition.key, target, partition.bytes, partition.load, movable=False)
        )
        for name, sign in ((source, -1), (target, 1)):
            self.bytes[name] += sign * partition.bytes
            self.load[name] += sign * partition.load
            self.slots[name] -= slots
        free = self.free[target]
        if free is not None:
            self.free[target] = free - COPIES * partition.bytes

    # --- draining

    def drain(self) -> None:
        """Move every partition of the draining shards to the shard with the fewest bytes that can take it."""
        for name in [n for n in self.shards if self.shards[n].draining]:
            for partition in list(self.partitions[name]):
                targets = sorted(self.staying, key=lambda n: (self.bytes[n], self.load[n], n))
                target = next((t for t in targets if self.can_move(partition, t)), None)
                if target is not None:
                    self.move(partition, target)

    # --- bytes

    def level_bytes(self) -> None:
        """Move partitions from the fullest to the emptiest shard until no move is worth it."""
        while (found := self._byte_move()) is not None:
            self.move(*found)

    def _byte_move(self) -> tuple[PartitionLoad, str] | None:
        by_bytes = sorted(self.staying, key=lambda n: (self.bytes[n], n))
        for source in reversed(by_bytes):
            if self.slots[source] <= 0 or not self.partitions[source]:
                continue
            for target in by_bytes:
                gap = self.bytes[source] - self.bytes[target]
                if gap <= 0:
                    break
                partition = self._best_for(source, target, gap)
                if partition is not None:
                    return partition, target
        return None

    def _best_for(self, source: str, target: str, gap: int) -> PartitionLoad | None:
        """The partition of `source` whose move leaves both shards most equal; None if none is worth moving."""
        if self.slots[target] <= 0:
            return None
        candidates = [p for p in self.partitions[source] if p.bytes < gap and self.can_move(p, target)]
        if not candidates:
            return None
        excess = self._excess_by_model(source, target)
        best = min(candidates, key=lambda p: (abs(gap - 2 * p.bytes), -excess.get(p.key[0], 0), p.key))
        gain = gap - abs(gap - 2 * best.bytes)
        demanded = gap > max(p.bytes for p in self.partitions[source])
        return best if demanded or gain > MIN_GAIN * self.share else None

    def _excess_by_model(self, source: str, target: str) -> dict[str, int]:
        """Bytes of each model that `source` holds in excess of `target`."""
        excess: dict[str, int] = {}
        for name, sign in ((source, 1), (target, -1)):
            for p in self.partitions[name]:
                excess[p.key[0]] = excess.get(p.key[0], 0) + sign * p.bytes
        return excess

    # --- load

    def level_load(self) -> None:
        """Plan one move or exchange from the busiest to the idlest shard that keeps bytes balanced."""
        busy, idle = max(self.staying, key=lambda n: self.load[n]), min(self.staying, key=lambda n: self.load[n])
        before = self.load[busy]
        if before < LOAD_MIN or busy == idle:
            return
        mine = sorted((p for p in self.partitions[busy] if p.movable and p.load > 0), key=lambda p: -p.load)
        theirs = sorted((p for p in self.partitions[idle] if p.movable), key=lambda p: p.load)[:_CANDIDATES_MAX]
        options: list[tuple[float, int, PartitionLoad, PartitionLoad | None]] = []
        for i, p in enumerate(mine[:_CANDIDATES_MAX] + mine[_CANDIDATES_MAX:][-_CANDIDATES_MAX:]):
            for back in (None, *theirs):
                shed = p.load - (back.load if back is not None else 0.0)
                after = max(before - shed, self.load[idle] + shed)
                if shed > 0 and after <= LOAD_GAIN * before:
                    options.append((after, i, p, back))
        for _, _, p, back in sorted(options, key=lambda o: (o[0], o[3] is not None, o[1])):
            if self._stays_level(p, idle, back):
                self.move(p, idle)
                if back is not None:
                    self.move(back, busy)
                return

    def _stays_level(self, partition: PartitionLoad, target: str, back: PartitionLoad | None) -> bool:
        """Whether this move or exchange can begin and makes no further byte move necessary."""
        needed = 1 if back is None else 2
        if min(self.slots[partition.shard], self.slots[target]) < needed or not self.can_move(partition, target):
            return False
        trial = _Table((), self.shards.values(), 1 << 30)
        trial.partitions = {n: list(ps) for n, ps in self.partitions.items()}
        trial.bytes, trial.free = dict(self.bytes), dict.fromkeys(self.free)
        trial._shift(partition, target, 0)
        if back is not None:
            free = self.free[partition.shard]
            if free is not None and COPIES * back.bytes > free:
                return False
            trial._shift(back, partition.shard, 0)
        trial.partitions = {
            n: [PartitionLoad(p.key, n, p.bytes, p.load) for p in ps] for n, ps in trial.partitions.items()
        }
        return trial._byte_move() is None
