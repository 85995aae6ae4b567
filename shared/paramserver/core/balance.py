"""Partition balancing: a pure function from who owns what to the moves to begin.

Draining shards are emptied first, then bytes are balanced, then load.  Every balancing move makes its two shards
strictly more equal, so planning terminates and no partition oscillates.  A move in progress counts as completed.
"""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

WORTH: Final = 0.05
"""Byte moves that the bound of `plan` does not require must narrow a gap by more than this fraction of a share."""
LOAD_MIN: Final = float(1 << 20)
"""Bytes per second below which a shard counts as idle."""
LOAD_GAIN: Final = 0.8
"""A load move must cut the higher load of its two shards to at most this fraction."""
_TRIED: Final = 8
"""Bound on the partitions considered for an exchange.

So many each of the most and the least loaded ones of the busy shard, and of the least loaded ones of the idle shard.
"""

PieceKey = tuple[str, int]
"""(model, partition)."""


class Piece(Struct, frozen=True):
    """One partition and the shard that owns it, or will own it once its move completes."""

    key: PieceKey
    shard: str
    bytes: int
    """Values and optimizer state."""
    load: float = 0.0
    """Bytes per second in and out."""
    movable: bool = True


class Place(Struct, frozen=True):
    """One live shard."""

    name: str
    draining: bool = False
    free_bytes: int | None = None
    """Memory still available to it; None if unknown."""
    moves: int = 0
    """Moves in progress from it or to it."""


class Move(Struct, frozen=True):
    """The decision to move a partition from one shard to another."""

    key: PieceKey
    source: str
    target: str


def plan(pieces: Iterable[Piece], places: Iterable[Place], at_once: int, *, by_load: bool = False) -> list[Move]:
    """Return the moves to begin now; including those in progress, a shard takes part in at most `at_once`.

    Bytes are balanced until no shard that is not draining holds more than the average plus one partition.  Load is
    balanced only if bytes are balanced, nothing moves, and the caller says that loads are known (`by_load`).
    """
    table = _Table(pieces, places, at_once)
    if not table.staying:
        return []
    table.drain()
    table.level_bytes()
    if by_load and not table.moves and table.quiet:
        table.level_load()
    return table.moves


def missing_bytes(pieces: Iterable[Piece], places: Iterable[Place], leaving: str) -> tuple[int, int] | None:
    """Return (needed, free) bytes if the remaining shards cannot hold what `leaving` owns, else None.

    Also None if no shard remains, or the free memory of one that does is unknown.
    """
    needed = sum(p.bytes for p in pieces if p.shard == leaving)
    free = [p.free_bytes for p in places if p.name != leaving and not p.draining]
    known = [f for f in free if f is not None]
    if not free or len(known) < len(free) or needed <= sum(known):
        return None
    return needed, sum(known)


class _Table:
    """Which shard has which partitions, updated as moves are planned."""

    def __init__(self, pieces: Iterable[Piece], places: Iterable[Place], at_once: int) -> None:
        self.places = {p.name: p for p in sorted(places, key=lambda p: p.name)}
        self.staying = [p.name for p in self.places.values() if not p.draining]
        self.pieces: dict[str, list[Piece]] = {name: [] for name in self.places}
        for piece in sorted(pieces, key=lambda p: (-p.bytes, p.key)):
            if piece.shard in self.pieces:
                self.pieces[piece.shard].append(piece)
        self.bytes = {n: sum(p.bytes for p in ps) for n, ps in self.pieces.items()}
        self.load = {n: sum(p.load for p in ps) for n, ps in self.pieces.items()}
        self.slots = {n: at_once - p.moves for n, p in self.places.items()}
        self.free = {n: p.free_bytes for n, p in self.places.items()}
        self.quiet = all(p.moves == 0 for p in self.places.values())
        self.moves: list[Move] = []

    @property
    def share(self) -> float:
        """Bytes per shard if all were spread evenly over the shards that are not draining."""
        return sum(self.bytes.values()) / len(self.staying)

    def can(self, piece: Piece, target: str) -> bool:
        """Whether that move can begin now: a movable piece, a free slot on both shards, memory on the target."""
        free = self.free[target]
        fits = free is None or piece.bytes <= free
        return piece.movable and self.slots[piece.shard] > 0 and self.slots[target] > 0 and fits

    def move(self, piece: Piece, target: str) -> None:
        """Plan a move; the piece counts for its target from now on and is not moved again."""
        self.moves.append(Move(piece.key, piece.shard, target))
        self._shift(piece, target, 1)

    def _shift(self, piece: Piece, target: str, slots: int) -> None:
        source = piece.shard
        self.pieces[source] = [p for p in self.pieces[source] if p.key != piece.key]
        self.pieces[target].append(Piece(piece.key, target, piece.bytes, piece.load, movable=False))
        for name, sign in ((source, -1), (target, 1)):
            self.bytes[name] += sign * piece.bytes
            self.load[name] += sign * piece.load
            self.slots[name] -= slots
        free = self.free[target]
        if free is not None:
            self.free[target] = free - piece.bytes

    # --- draining

    def drain(self) -> None:
        """Move every partition of the draining shards to the shard with the fewest bytes that can take it."""
        for name in [n for n in self.places if self.places[n].draining]:
            for piece in list(self.pieces[name]):
                targets = sorted(self.staying, key=lambda n: (self.bytes[n], self.load[n], n))
                target = next((t for t in targets if self.can(piece, t)), None)
                if target is not None:
                    self.move(piece, target)

    # --- bytes

    def level_bytes(self) -> None:
        """Move partitions from the fullest to the emptiest shard until no move is worth it."""
        while (found := self._byte_move()) is not None:
            self.move(*found)

    def _byte_move(self) -> tuple[Piece, str] | None:
        by_bytes = sorted(self.staying, key=lambda n: (self.bytes[n], n))
        for source in reversed(by_bytes):
            if self.slots[source] <= 0 or not self.pieces[source]:
                continue
            for target in by_bytes:
                gap = self.bytes[source] - self.bytes[target]
                if gap <= 0:
                    break
                piece = self._best_for(source, target, gap)
                if piece is not None:
                    return piece, target
        return None

    def _best_for(self, source: str, target: str, gap: int) -> Piece | None:
        """The partition of `source` whose move leaves both shards most equal; None if none is worth moving."""
        if self.slots[target] <= 0:
            return None
        here = [p for p in self.pieces[source] if p.bytes < gap and self.can(p, target)]
        if not here:
            return None
        over = self._models(source, target)
        best = min(here, key=lambda p: (abs(gap - 2 * p.bytes), -over.get(p.key[0], 0), p.key))
        gain = gap - abs(gap - 2 * best.bytes)
        demanded = gap > max(p.bytes for p in self.pieces[source])
        return best if demanded or gain > WORTH * self.share else None

    def _models(self, source: str, target: str) -> dict[str, int]:
        """Bytes of each model that `source` holds in excess of `target`."""
        over: dict[str, int] = {}
        for name, sign in ((source, 1), (target, -1)):
            for p in self.pieces[name]:
                over[p.key[0]] = over.get(p.key[0], 0) + sign * p.bytes
        return over

    # --- load

    def level_load(self) -> None:
        """Plan one move or exchange from the busiest to the idlest shard that keeps bytes balanced."""
        busy, idle = max(self.staying, key=lambda n: self.load[n]), min(self.staying, key=lambda n: self.load[n])
        before = self.load[busy]
        if before < LOAD_MIN or busy == idle:
            return
        mine = sorted((p for p in self.pieces[busy] if p.movable and p.load > 0), key=lambda p: -p.load)
        theirs = sorted((p for p in self.pieces[idle] if p.movable), key=lambda p: p.load)[:_TRIED]
        options: list[tuple[float, int, Piece, Piece | None]] = []
        for i, p in enumerate(mine[:_TRIED] + mine[_TRIED:][-_TRIED:]):
            for back in (None, *theirs):
                gone = p.load - (back.load if back is not None else 0.0)
                after = max(before - gone, self.load[idle] + gone)
                if gone > 0 and after <= LOAD_GAIN * before:
                    options.append((after, i, p, back))
        for _, _, p, back in sorted(options, key=lambda o: (o[0], o[3] is not None, o[1])):
            if self._stays_level(p, idle, back):
                self.move(p, idle)
                if back is not None:
                    self.move(back, busy)
                return

    def _stays_level(self, piece: Piece, target: str, back: Piece | None) -> bool:
        """Whether this move or exchange can begin and makes no further byte move necessary."""
        needed = 1 if back is None else 2
        if min(self.slots[piece.shard], self.slots[target]) < needed or not self.can(piece, target):
            return False
        trial = _Table((), self.places.values(), 1 << 30)
        trial.pieces = {n: list(ps) for n, ps in self.pieces.items()}
        trial.bytes, trial.load, trial.free = dict(self.bytes), dict(self.load), dict.fromkeys(self.free)
        trial._shift(piece, target, 0)
        if back is not None:
            free = self.free[piece.shard]
            if free is not None and back.bytes > free:
                return False
            trial._shift(back, piece.shard, 0)
        trial.pieces = {n: [Piece(p.key, n, p.bytes, p.load) for p in ps] for n, ps in trial.pieces.items()}
        return trial._byte_move() is None
