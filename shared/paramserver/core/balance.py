"""Which partitions should move where: a pure plan over what everybody owns.

What drains goes first, then bytes are levelled, then load.  Every move makes the two shards it concerns strictly more
alike, so plans end: nothing moves to and fro.  A move that is under way counts as done.
"""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

WORTH: Final = 0.05
"""Bytes are levelled further than the rule demands while a move gains this part of a shard's share."""
LOAD_MIN: Final = float(1 << 20)
"""Bytes per second below which a shard counts as idle."""
LOAD_GAIN: Final = 0.8
"""A move for the sake of load must bring the busiest of two shards down to this part of what it has."""
_TRIED: Final = 8
"""Partitions of each shard that are considered for an exchange."""

PieceKey = tuple[str, int]
"""(model, partition)."""


class Piece(Struct, frozen=True):
    """One partition: where it is, or will be once its move is over."""

    key: PieceKey
    shard: str
    bytes: int
    """Values and optimizer state."""
    load: float = 0.0
    """Bytes per second in and out."""
    movable: bool = True


class Place(Struct, frozen=True):
    """One living shard."""

    name: str
    draining: bool = False
    free_bytes: int | None = None
    """Memory it may still take; None: unknown."""
    moves: int = 0
    """Under way, from it or to it."""


class Move(Struct, frozen=True):
    """A partition is to go from one shard to another."""

    key: PieceKey
    source: str
    target: str


def plan(pieces: Iterable[Piece], places: Iterable[Place], at_once: int, *, by_load: bool = False) -> list[Move]:
    """The moves to begin now, with at most `at_once` on each shard together with those under way.

    Bytes: no shard that stays has more than the average and one partition.  Load is looked at only when bytes are
    level, nothing moves, and the caller says that loads are known (`by_load`).
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
    """(needed, free) when the memory of those that stay cannot hold what `leaving` owns; None when it can.

    Also None while the limit of one that stays is unknown, or nobody stays.
    """
    needed = sum(p.bytes for p in pieces if p.shard == leaving)
    free = [p.free_bytes for p in places if p.name != leaving and not p.draining]
    known = [f for f in free if f is not None]
    if not free or len(known) < len(free) or needed <= sum(known):
        return None
    return needed, sum(known)


class _Table:
    """Who has what, as the plan goes on."""

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
        """Bytes that each would have, were they divided evenly among those that stay."""
        return sum(self.bytes.values()) / len(self.staying)

    def can(self, piece: Piece, target: str) -> bool:
        """Whether that move may begin now."""
        free = self.free[target]
        fits = free is None or piece.bytes <= free
        return piece.movable and self.slots[piece.shard] > 0 and self.slots[target] > 0 and fits

    def move(self, piece: Piece, target: str) -> None:
        """Plan it; the piece counts for its target from now on and stays there."""
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

    # --- what drains

    def drain(self) -> None:
        """Everything of a draining shard goes to whoever has least."""
        for name in [n for n in self.places if self.places[n].draining]:
            for piece in list(self.pieces[name]):
                targets = sorted(self.staying, key=lambda n: (self.bytes[n], self.load[n], n))
                target = next((t for t in targets if self.can(piece, t)), None)
                if target is not None:
                    self.move(piece, target)

    # --- bytes

    def level_bytes(self) -> None:
        """From the fullest to the emptiest, as long as it helps."""
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
        """The partition whose move leaves the two most alike; None when none is worth it."""
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
        """Of each model, how many bytes more the first has than the second."""
        over: dict[str, int] = {}
        for name, sign in ((source, 1), (target, -1)):
            for p in self.pieces[name]:
                over[p.key[0]] = over.get(p.key[0], 0) + sign * p.bytes
        return over

    # --- load

    def level_load(self) -> None:
        """One move, or one exchange, from the busiest to the idlest, that leaves bytes level."""
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
        """Whether bytes would not be moved again after this."""
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
