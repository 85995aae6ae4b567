"""A simulated Redis: its scripts are atomic, and its contents can be lost."""

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

from paramserver.core.partition_state import Capture, LoadedState
from paramserver.core.shard.effects import LoadPartition, StoreSnapshot
from paramserver.core.shard.events import ModelView
from paramserver.core.shard.initial import has_assigned_values
from paramserver.core.shard.journal import JournalEntry
from paramserver.core.shard.replay import replay
from paramserver.errors import problem
from paramserver.testing.shard_driver import InMemoryStore, perform
from paramserver.types import ModelKey, PartitionKey, Token

LEASE_S = 3.0
Number = tuple[int, int]
"""Number of a leader's write: (term, count)."""


class Verdict(Enum):
    """Outcome of a write under a term or an owner token."""

    DONE = "done"
    EMPTIED = "emptied"
    FENCED = "fenced"
    GAP = "gap"


_HELD = ("term", "written", "leader", "leader_term", "lease_until_s", "state", "tokens", "fences")
_STORED = ("kept", "cuts", "journals")


def copied(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy whose dicts, and the lists in them, are its own."""

    def copy(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: list(v) if isinstance(v, list) else v for k, v in value.items()}
        return value

    return {name: copy(value) for name, value in held.items()}


class SimRedis:
    """State that outlives every process: the lease, the scheduler's fields, tokens, fences, snapshots and journals."""

    def __init__(self) -> None:
        self.down = False
        self.times_emptied = 0
        self.lost = False
        """Whether it was ever emptied, or went back, while it alone had something of a partition."""
        self.process = 0
        """Number of its process: a shard asks again what a new one still has."""
        self.memberships_ended = False
        """Whether any shard was ever declared dead that had not stored or handed over all it had."""
        self.left: set[tuple[str, int]] = set()
        """(shard, epoch) of those that had, and stopped."""
        self.issued: dict[Token, PartitionKey] = {}
        """What each owner token was ever given for."""
        self.empty()

    def empty(self) -> None:
        """Lose everything."""
        self.term = 0
        self.written: Number = (0, 0)
        """Number of the last write of a leader."""
        self.leader, self.leader_term = "", 0
        self.lease_until_s = 0.0
        self.state: dict[str, str] = {}
        self.tokens: dict[PartitionKey, Token] = {}
        self.fences: dict[str, int] = {}
        self.store = InMemoryStore()

    def image(self) -> dict[str, Any]:
        """Return a copy of all that it holds, as an append-only file does."""
        held = {name: vars(self)[name] for name in _HELD}
        return copied(held) | {"store": copied({name: vars(self.store)[name] for name in _STORED})}

    def restart_with(self, image: Mapping[str, Any]) -> None:
        """Begin a new process that has what the image has."""
        vars(self).update({name: image[name] for name in _HELD})
        vars(self.store).update(image["store"])
        self.process += 1

    # --- schedulers

    def acquire_lease(
        self, who: str, seen: int, patient: bool, answered_s: tuple[float, float, float], now: float
    ) -> tuple[int, dict[str, Any]] | str:
        """Take the lease if it is free, and return (new term, all fields); else return the leader's name.

        `seen` is the highest term that the scheduler knows of.  If Redis has a lower one, it was emptied; the leader
        has everything in memory, so the lease is left to it for a while (`patient`).  An expired lease is taken by a
        scheduler that has had answers for 1.5 s (`answered_s`: since when, when last, and the lease's end then);
        one in its own name is taken at once, because then only the answer was lost.
        """
        since_s, last_s, lease_s = answered_s
        watched = now - since_s >= 1.5 and now - last_s <= 2.0 and self.lease_until_s >= lease_s
        free = self.leader in ("", who) or (watched and now >= self.lease_until_s)
        if not free or (self.term < seen and patient):
            return self.leader
        self.term, self.leader, self.lease_until_s = max(self.term, seen) + 1, who, now + LEASE_S
        self.leader_term = self.term
        return self.term, {k: json.loads(v) for k, v in self.state.items()}

    def renew(self, who: str, term: int, acknowledged: Number, now: float) -> tuple[Verdict, int]:
        """Renew the lease; FENCED: another scheduler leads; EMPTIED: everything must be written again, because all was
        lost, or the write that was acknowledged last."""
        if self.term > term:
            return Verdict.FENCED, self.term
        if (verdict := self._standing(who, term, acknowledged)) is not Verdict.DONE:
            return verdict, term
        self.leader, self.leader_term, self.lease_until_s = who, term, now + LEASE_S
        return Verdict.DONE if self.term == term and self.written >= acknowledged else Verdict.EMPTIED, term

    def _standing(self, who: str, term: int, acknowledged: Number) -> Verdict:
        """Whether another scheduler has the lease, in a newer term or in this one, in which who has written leads."""
        if not self.leader or self.leader == who or self.leader_term < term:
            return Verdict.DONE
        return Verdict.FENCED if self.leader_term > term or acknowledged == (0, 0) else Verdict.EMPTIED

    def write(
        self,
        who: str,
        number: Number,
        acknowledged: Number,
        fields: Mapping[str, Any],
        tokens: Mapping[PartitionKey, Token],
        fences: Mapping[str, int],
        full: bool,
    ) -> Verdict:
        """Write one group of decisions; `full`: it contains the whole state, for a Redis that has lost some of it.

        One that arrives late, after its successor, changes nothing.
        """
        term = number[0]
        if term < self.term:
            return Verdict.FENCED
        if (verdict := self._standing(who, term, acknowledged)) is not Verdict.DONE:
            return verdict
        if full and term > self.term:
            self.term, self.leader, self.leader_term = term, who, term
            self.state, self.written, self.fences = {}, (0, 0), {}
        if term > self.term or self.written < acknowledged:
            return Verdict.EMPTIED
        if self.written >= number:
            return Verdict.DONE
        self.written = number
        for name, value in fields.items():
            self.state.pop(name, None)
            if value is not None:
                self.state[name] = json.dumps(value)
        for key, token in tokens.items():
            assert token >= self.tokens.get(key, 0), f"the owner token of {key} went back"
            assert self.issued.setdefault(token, key) == key, f"a token of {self.issued[token]} is given for {key}"
            self.tokens[key] = token
        self.fences.update(fences)
        self.memberships_ended |= any(epoch and (shard, epoch) not in self.left for shard, epoch in fences.items())
        return Verdict.DONE

    def forget(self, gone: Callable[[ModelKey], bool]) -> bool:
        """Delete all that is stored of the partitions of deleted models; return True."""
        stored: tuple[dict[PartitionKey, Any], ...] = (self.tokens, self.store.kept, self.store.journals)
        for keys in stored:
            for key in [k for k in keys if gone(k.model)]:
                del keys[key]
        for at in [at for at in self.store.cuts if gone(at[0].model)]:
            del self.store.cuts[at]
        return True

    # --- shards

    def append(self, key: PartitionKey, token: Token, entries: Sequence[JournalEntry]) -> Verdict:
        """Append entries to one partition's journal; those already there are skipped."""
        owner = self.tokens.get(key, 0)
        if owner != token:
            return Verdict.FENCED if owner > token else Verdict.EMPTIED
        if entries[0].lsn > self.store.last_lsn(key) + 1:
            return Verdict.GAP
        for entry in entries:
            self.store.append(entry)
        return Verdict.DONE

    def save(self, effect: StoreSnapshot, pinned: int | None, model: ModelView | None) -> Verdict:
        """Store a snapshot, if its token is the owner's; the cut at clock `pinned` is kept.

        Asserts that the journal, where it reaches that far, leads from the snapshot before to this one, unless `model`
        is another one, because the capture's has been deleted.
        """
        owner = self.tokens.get(effect.capture.key, 0)
        if owner != effect.capture.token:
            return Verdict.FENCED if owner > effect.capture.token else Verdict.EMPTIED
        if model is not None and model.model == effect.capture.key.model:
            self._check_replay(effect.capture, model)
        self.store.save(effect, pinned)
        return Verdict.DONE

    def _check_replay(self, capture: Capture, model: ModelView) -> None:
        key = capture.key
        entries = [e for e in self.store.journals.get(key, ()) if e.lsn <= capture.lsn]
        if key not in self.store.kept or not entries or entries[-1].lsn < capture.lsn:
            return
        again = replay(key, LoadedState.of(self.store.kept[key][0]), entries, model.spec, model.layout, perform)
        a, b = (np.array([s.state.values, *s.state.slots]) for s in (again, capture))
        same = np.array_equal(a, b) and again.state.steps == capture.state.steps
        assert same, f"the journal of {key} gives other values"
        assert (again.version, again.memory) == (capture.version, capture.memory), f"the journal of {key} lacks pushes"
        staged, kept = (sorted((h.worker, h.epoch, h.clock, h.seq) for h in s.staged) for s in (again, capture))
        assert staged == kept, f"the journal of {key} stages {staged}, not {kept}"
        sync = capture.settings["consistency"]["mode"] == "sync"
        assert again.clock == capture.clock or not sync, f"the journal of {key} gives clock {again.clock}"

    def load(self, effect: LoadPartition) -> LoadedState:
        """Return the state that a partition starts from.

        Raises CorruptState (`corrupt_state`) for an unknown cut, and for given values that were never stored,
        Unavailable (`storage_unavailable`) while there is no owner token.
        """
        key = effect.key
        if effect.source != "init" or effect.spec.ack != "applied":
            if self.tokens.get(key, 0) < effect.token:
                raise problem("storage_unavailable", "Redis has lost its state")
            stored = self.store.kept.get(key) or self.store.journals.get(key)
            if not stored and effect.source != "init" and has_assigned_values(effect):
                raise problem("corrupt_state", f"{key}: its initial values were never stored", never_stored=True)
        try:
            return self.store.load(effect)
        except KeyError as e:
            raise problem("corrupt_state", f"there is no cut {e}") from e
