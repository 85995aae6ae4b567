"""Moves of partitions while training goes on: plan them, request releases, give released partitions to their targets.

A move is a release request by this leader (`Owner.release`): the owner suspends the partition, stores its whole state
and reports that; only then does the target get it, under a new token. Release requests are never stored, so they are
gone with their leader, and the owner goes on serving.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from paramserver import limits
from paramserver.core.heartbeat_rows import ReleasedRow
from paramserver.core.scheduler.balance import COPIES, PartitionLoad, ShardLoad, missing_bytes, plan
from paramserver.core.scheduler.cluster import Cluster
from paramserver.core.scheduler.io import SetShardState, StorageChanged
from paramserver.core.scheduler.membership import Shard
from paramserver.core.scheduler.models import Model
from paramserver.core.scheduler.owner import Owner
from paramserver.errors import problem

STATES: Final = ("active", "draining")
SMOOTHING: Final = 0.2
"""Weight of the newest heartbeat in the smoothed load of a partition."""
LINE_SHARE: Final = 0.5
"""What a move has at least of its owner's line to Redis, which carries ordinary snapshots, too."""


class MoveDesk:
    """Planner of moves, and handlers for the events that concern them."""

    def __init__(self, cluster: Cluster) -> None:
        self.c = cluster
        self._loads_due_s = 0.0
        self._blocked = False
        """Whether the last plan found partitions that could not be moved then; each tick has them looked at again."""

    def set_state(self, e: SetShardState, now: float) -> None:
        shard = self.c.shards.get(e.name)
        if e.state not in STATES:
            raise problem("invalid_field", f"state: must be 'active' or 'draining', not {e.state!r:.40}", where="state")
        if e.epoch is not None:
            shard = self.c.joined_shard(e.name, e.epoch)
        elif shard is None or not shard.alive:
            raise problem("unknown_node", f"no shard {e.name!r:.80} is alive", hint="the list of shards names them")
        if e.state == "draining" and not shard.draining and e.epoch is None:
            self._check_memory(shard)
        if e.epoch is not None or e.state == "active":  # one that stops does so also if an operator drains it
            shard.stopping = e.state == "draining"
        if shard.draining != (e.state == "draining"):
            shard.draining = e.state == "draining"
            self.c.save_shard(shard)
            self.c.unbalanced = True
            # Now draining: withdraw the moves to it. Active again: withdraw the moves away from it.
            self._withdraw(m for m in self._moves() if shard.name == (m[1].target if shard.draining else m[1].shard))
        targets = [n for n in self.c.live_shards() if n != e.name and not self.c.shards[n].draining]
        if e.epoch is not None:  # it stops: moves wait for the end of a cut, and so does the last one
            self._hurry_cuts(shard)
        if e.cut:
            self._cut_before_stop(shard)
        self.c.answer(e.request, {**self.c.shard_line(shard, now), "targets": len(targets)})

    def _hurry_cuts(self, shard: Shard) -> None:
        """Have the pending cuts of all sync models on this shard stored outside the budget."""
        for model in self._sync_on(shard):
            if model.cuts.pending is not None and not model.cuts.urgent:
                model.cuts.urgent = True
                self.c.model_changed(model)

    def _cut_before_stop(self, shard: Shard) -> None:
        """Request a cut of each sync model on this shard, which may end without a successor: they resume from it.

        No cut begins while a partition moves, so what has not moved by now stays.
        """
        for model in self._sync_on(shard):
            model.cuts.wanted_now = model.beyond_cut and model.cuts.pending != model.gate.clock
            if model.cuts.wanted_now:
                self._withdraw([m for m in self._moves() if m[0] is model])
            self.c.mark_dirty(model)

    def cut_if_beyond(self, shard: Shard) -> bool:
        """Whether a model would go back behind a commit if this shard left now; if so, request cuts."""
        beyond = any(m.ready and m.beyond_cut for m in self._sync_on(shard))
        if beyond:
            self._cut_before_stop(shard)
        return beyond

    def _sync_on(self, shard: Shard) -> list[Model]:
        return [m for m in self.c.models.values() if m.gate.sync and any(o.shard == shard.name for o in m.owners)]

    def storage(self, e: StorageChanged, now: float) -> None:
        """Withdraw all moves while Redis is away: nothing can be handed over, and suspended ones should be served."""
        self.c.storage_away = bool(e.reason)
        if self.c.storage_away:
            self._withdraw(self._moves())
        self.c.unbalanced = True

    def storage_of(self, shard: Shard, away: bool, now: float) -> None:
        """Withdraw the moves from and to a shard that Redis does not answer; none begins until it does."""
        if away == shard.storage_away:
            return
        shard.storage_away, shard.storage_away_s, self.c.unbalanced = away, now, True
        if away:
            self._withdraw(m for m in self._moves() if shard.name in (m[1].shard, m[1].target))

    def _check_memory(self, shard: Shard) -> None:
        short = missing_bytes(self._partition_loads(0.0), self._shard_loads(), shard.name)
        if short is not None:
            raise problem(
                "not_enough_memory",
                f"the partitions of shard '{shard.name}', and of others that drain, need {short[0]} bytes (their state"
                f" and the version being computed); beside their own, the remaining shards have {short[1]} free",
                hint="add a shard first, or raise the memory limits",
                needed_bytes=short[0],
                free_bytes=short[1],
            )

    # --- planning ---

    def advance(self, now: float) -> None:
        """Begin the moves that are due."""
        loads = now >= self._loads_due_s
        if self.c.storage_away or not (self.c.unbalanced or loads):
            return
        if loads:
            self._loads_due_s = now + limits.BALANCE_INTERVAL_S
        if len(self.c.live_shards()) < 2:
            self.c.unbalanced = self._blocked = False
            return
        partitions = self._partition_loads(now)
        moves = plan(partitions, self._shard_loads(), limits.MOVES_AT_ONCE, by_load=loads)
        for move in moves:
            model = self.c.models[move.key[0]]
            owner = model.owners[move.key[1]]
            owner.target, owner.release, owner.asked_s = move.target, self.c.next_token(), now
            self.c.model_changed(model)
        self.c.unbalanced, self._blocked = bool(moves), not all(p.movable for p in partitions)

    def expire(self, now: float) -> None:
        """Withdraw moves that take too long, and do not move those partitions for `limits.MOVE_S`.

        An owner stores them one after the other, so it has the time for the largest since it released the last one, and
        none is suspended for longer than all at once may take.  Partitions that could not be moved before are planned
        for again.
        """
        self.c.unbalanced = self.c.unbalanced or self._blocked
        moves = [
            (model, owner, self.c.shards[owner.shard], model.held_bytes_of(i))
            for model in self.c.models.values()
            for i, owner in enumerate(model.owners)
            if owner.release and owner.shard is not None
        ]
        largest: dict[str, int] = {}
        for _, _, shard, size in moves:
            largest[shard.name] = max(size, largest.get(shard.name, 0))
        late: list[tuple[Model, Owner]] = []
        for model, owner, shard, _ in moves:
            time_s = limits.MOVE_S + largest[shard.name] / (LINE_SHARE * limits.STORE_PACE_BYTES_PER_S)
            waited_s = now - owner.asked_s
            if min(waited_s, now - shard.released_s) >= time_s or waited_s >= limits.MOVES_AT_ONCE * time_s:
                owner.no_move_before_s = now + limits.MOVE_S
                late.append((model, owner))
        self._withdraw(late)

    def _partition_loads(self, now: float) -> list[PartitionLoad]:
        """Every partition that has an owner, placed where it will be once its move is over."""
        out: list[PartitionLoad] = []
        stopping = {s.name for s in self.c.shards.values() if s.stopping}
        for model in self.c.models.values():
            movable = model.movable and (not model.moves_wait(now) or any(o.shard in stopping for o in model.owners))
            for i, o in enumerate(model.owners):
                if o.shard is not None:
                    free = movable and not o.release and now >= o.no_move_before_s
                    size = model.held_bytes_of(i)
                    out.append(PartitionLoad((model.name, i), o.target or o.shard, size, o.load, free))
        return out

    def _shard_loads(self) -> list[ShardLoad]:
        """The live shards; memory that a move in progress will need counts as used.

        One that Redis does not answer counts as busy with as many moves as it may take part in.
        """
        moves = {n: limits.MOVES_AT_ONCE * self.c.shards[n].storage_away for n in self.c.live_shards()}
        coming = dict.fromkeys(moves, 0)
        for model in self.c.models.values():
            for i, o in enumerate(model.owners):
                if o.release and o.shard in moves and o.target in moves:
                    moves[o.shard] += 1
                    moves[o.target] += 1
                    coming[o.target] += COPIES * model.held_bytes_of(i)
                elif o.from_version is None and o.shard in moves:
                    moves[o.shard] += o.previous is not None
        return [
            ShardLoad(n, self.c.shards[n].draining, None if free is None else free - coming[n], moves[n])
            for n, free in self.c.free_bytes().items()
        ]

    def _moves(self) -> list[tuple[Model, Owner]]:
        return [(m, o) for m in self.c.models.values() for o in m.owners if o.release]

    def _withdraw(self, moves: Iterable[tuple[Model, Owner]]) -> None:
        """Withdraw these moves; owners see that the release request is gone from the model's document."""
        for model, owner in moves:
            if owner.withdraw_move():
                self.c.model_changed(model)
                self.c.unbalanced = True

    # --- reports by shards ---

    def withdraw_moves_to(self, shard: str) -> None:
        """Withdraw the moves to a dead shard."""
        self._withdraw(m for m in self._moves() if m[1].target == shard)

    def released(self, shard: str, rows: Sequence[ReleasedRow], now: float) -> None:
        """Give partitions that their owner has suspended and stored whole to their targets."""
        for row in rows:
            model = self.c.owned(shard, row)
            if model is None:
                continue
            owner = model.owners[row.partition]
            if owner.release != row.release or owner.target is None:
                continue  # The request was withdrawn, so the partition may have changed since.
            previous = (shard, self.c.shards[shard].epoch, owner.token)
            owner.shard, owner.version = owner.target, row.version
            self.c.give_token(model, row.partition, "snapshot")
            owner.previous, owner.handed_lsn = previous, row.lsn
            model.cuts.moved = True
            self.c.place_changed(model)
            self.c.shards[shard].released_s = now

    def loads(self, shard: str, rows: Sequence[Sequence[Any]]) -> None:
        """Update the load, in bytes per second, of that shard's partitions; those not listed have none."""
        reported = {(name, generation, index): float(load) for name, generation, index, load in rows}
        for model in self.c.models.values():
            for i, owner in enumerate(model.owners):
                if owner.shard == shard:
                    new = reported.get((model.name, model.generation, i), 0.0)
                    owner.load = new if owner.load == 0.0 else owner.load + SMOOTHING * (new - owner.load)
