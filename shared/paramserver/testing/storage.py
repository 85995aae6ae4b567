"""Redis as the simulation has it: scripts that are done whole or not at all, and a memory that can be lost."""

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from paramserver.core.shard_io import JournalEntry, LoadedState, LoadPartition, StoreSnapshot
from paramserver.errors import problem
from paramserver.testing.shard_driver import SnapshotShelf
from paramserver.types import PartitionKey, Token

LEASE_S = 3.0


class Verdict(Enum):
    """What became of a write under a term or a token."""

    DONE = "done"
    EMPTIED = "emptied"
    FENCED = "fenced"
    GAP = "gap"


class SimRedis:
    """What outlives every process: leases, the scheduler's fields, tokens, fences, snapshots and journals."""

    name = "redis"

    def __init__(self) -> None:
        self.down = False
        self.times_emptied = 0
        self.memberships_ended = False
        """Whether some shard was ever declared dead."""
        self.empty()

    def empty(self) -> None:
        """Everything is lost."""
        self.term = 0
        self.leader = ""
        self.lease_until_s = 0.0
        self.state: dict[str, str] = {}
        self.tokens: dict[PartitionKey, Token] = {}
        self.fences: dict[str, int] = {}
        self.shelf = SnapshotShelf()

    # --- schedulers

    def take(
        self, who: str, seen: int, patient: bool, answered_s: tuple[float, float], now: float
    ) -> tuple[int, dict[str, Any]] | str:
        """The new term and all fields, where nobody leads; else who does.

        `seen` is the highest term that scheduler knows of: a Redis that has none was emptied, and whoever led has it
        all in memory, so it is left to him for a while (`patient`).  A lease that has lapsed is taken by one that has
        had answers all that time (`answered_s`: since when, and when last), one's own at once: its answer was lost.
        """
        since_s, last_s = answered_s
        watched = now - since_s >= 1.5 and now - last_s <= 2.0
        free = self.leader in ("", who) or (watched and now >= self.lease_until_s)
        if not free or (self.term < seen and patient):
            return self.leader
        self.term, self.leader, self.lease_until_s = max(self.term, seen) + 1, who, now + LEASE_S
        return self.term, {k: json.loads(v) for k, v in self.state.items()}

    def renew(self, who: str, term: int, now: float) -> tuple[Verdict, int]:
        """The leader goes on, or learns that another one leads, or that all was lost and is to be written anew."""
        if self.term > term:
            return Verdict.FENCED, self.term
        self.leader, self.lease_until_s = who, now + LEASE_S
        return Verdict.DONE if self.term == term else Verdict.EMPTIED, term

    def write(
        self,
        term: int,
        fields: Mapping[str, Any],
        tokens: Mapping[PartitionKey, Token],
        fences: Mapping[str, int],
        anew: bool,
    ) -> Verdict:
        """One group of decisions; `anew`: it holds everything, for a Redis that was emptied."""
        if anew and term > self.term:
            self.term = term
        if term != self.term:
            return Verdict.FENCED if term < self.term else Verdict.EMPTIED
        for name, value in fields.items():
            self.state.pop(name, None)
            if value is not None:
                self.state[name] = json.dumps(value)
        for key, token in tokens.items():
            assert token >= self.tokens.get(key, 0), f"the owner token of {key} went back"
            self.tokens[key] = token
        self.fences.update(fences)
        self.memberships_ended |= any(fences.values())
        return Verdict.DONE

    # --- shards

    def append(self, key: PartitionKey, token: Token, entries: Sequence[JournalEntry]) -> Verdict:
        """Entries of one partition; those that are there already are passed over."""
        owner = self.tokens.get(key, 0)
        if owner != token:
            return Verdict.FENCED if owner > token else Verdict.EMPTIED
        if entries[0].lsn > self._last(key) + 1:
            return Verdict.GAP
        for entry in entries:
            self.shelf.append(entry)
        return Verdict.DONE

    def _last(self, key: PartitionKey) -> int:
        lsns = [e.lsn for e in self.shelf.journals.get(key, ())[-1:]] + [
            c.lsn for c in self.shelf.kept.get(key, ())[:1]
        ]
        return max(lsns, default=0)

    def save(self, effect: StoreSnapshot, pinned: int | None) -> Verdict:
        """A snapshot, whose manifest is switched by whoever has the token; the cut at clock `pinned` is kept."""
        owner = self.tokens.get(effect.capture.key, 0)
        if owner != effect.capture.token:
            return Verdict.FENCED if owner > effect.capture.token else Verdict.EMPTIED
        self.shelf.save(effect, pinned)
        return Verdict.DONE

    def load(self, effect: LoadPartition) -> LoadedState:
        """A partition's first state; raises CorruptState for a cut that is not there."""
        try:
            return self.shelf.load(effect)
        except KeyError as e:
            raise problem("corrupt_state", f"there is no cut {e}") from e
