"""Shards: joins, reports and deaths; ownership of partitions, completion of cuts, refilling of an emptied Redis."""

from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import Any, Final

from paramserver import limits
from paramserver.core.fields import check_name
from paramserver.core.heartbeat_rows import CutRow, LostRow, ReleasedRow, ServedRow
from paramserver.core.scheduler.cluster import Cluster
from paramserver.core.scheduler.io import JoinShard, LeaveShard, OpenFeed, RedisEmptied, ShardHeartbeat
from paramserver.core.scheduler.membership import Shard, expired
from paramserver.core.scheduler.models import Model
from paramserver.core.scheduler.move_desk import MoveDesk
from paramserver.core.scheduler.owner import Owner
from paramserver.core.scheduler.placement import Placement
from paramserver.core.scheduler.timeline import begin_sync, go_back, reload
from paramserver.core.urls import is_address, is_node_url
from paramserver.errors import problem

ADDRESSES_MAX: Final = 16


class ShardDesk:
    """Handles shard events."""

    def __init__(self, cluster: Cluster, moves: MoveDesk, placement: Placement) -> None:
        self.c = cluster
        self.moves = moves
        self.placement = placement

    def join(self, e: JoinShard, now: float) -> None:
        check_name(e.name, " for a shard")
        addresses = _addresses(e.addresses)
        self._check_redis(e)
        old = self.c.shards.get(e.name)
        if (old is None or not old.alive) and len(self.c.live_shards()) >= limits.SHARDS_MAX:
            raise problem("too_many_requests", f"the cluster has {limits.SHARDS_MAX} shards, which is the limit")
        self.placement.joins(e.name, now)
        epoch = 1 + (old.epoch if old else self.c.shard_floor)
        shard = Shard(e.name, epoch, now, addresses=addresses, version=str(e.version)[:64])
        shard.storage_away, shard.storage_away_s = e.redis_term is None, now
        self.c.shards[e.name] = shard
        self._forget_names()
        if old is not None:
            self.c.fence(e.name, old.epoch)
        self.c.save_shard(shard)
        self.c.map_changed()
        # The older incarnation is dead: withdraw the moves to it and reassign its partitions.
        self.moves.withdraw_moves_to(e.name)
        self.replace(e.name)
        body = {"name": e.name, "epoch": shard.epoch, "lease_s": limits.LEASE_S, "term": self.c.term}
        self.c.answer(e.request, body, 201)

    def _check_redis(self, e: JoinShard) -> None:
        """Raise ConflictError (`conflict`) if the shard's Redis is not the schedulers'."""
        if e.redis_term is not None and (e.redis_term < self.c.term or e.other_leader):  # a leader stores both first
            terms = f"their term is {self.c.term}, its Redis has {e.redis_term or 'none'}"
            if e.other_leader:
                terms += ", of another leader"
            raise problem(
                "conflict",
                f"shard '{e.name}' uses a different Redis than the schedulers: {terms}",
                hint="give it the same PARAMSERVER_REDIS, down to the number of the database",
            )

    def leave(self, e: LeaveShard, now: float) -> None:
        shard = self.c.joined_shard(e.name, e.epoch)
        if e.stored and self.moves.cut_if_beyond(shard):
            self.c.answer(e.request, {"left": False})
            return
        shard.left = True
        self.mark_dead([shard], now)
        self.c.answer(e.request, None, 204)

    def expire(self, now: float) -> None:
        """Declare shards dead whose lease has expired, and stop listing those that have been gone for too long.

        If none is heard of any more, this scheduler may be cut off itself, while Redis lets them serve on: fenced, they
        would stop, and go back to what they have stored.  So it waits longer; nobody could take over anyway.
        """
        live = [s for s in self.c.shards.values() if s.alive]
        cut_off = len(live) > 1 and now - max(s.heard_s for s in live) > 2 * limits.HEARTBEAT_S
        for shard in live:
            shard.lease_s = limits.ALL_SILENT_S if cut_off else limits.LEASE_S
        dead = expired(self.c.shards.values(), now)
        self.placement.dying(dead, now)
        self.mark_dead(dead, now)
        self.placement.advance(now)
        for shard in self.c.shards.values():
            shown_s = limits.SHARD_LEFT_LISTED_S if shard.left else limits.SHARD_DEAD_LISTED_S
            if not shard.alive and shard.listed and now - shard.gone_s >= shown_s:
                shard.listed, shard.metrics = False, {}
                self.c.save_shard(shard)
                self.c.map_changed()

    def mark_dead(self, shards: Sequence[Shard], now: float) -> None:
        """Mark these incarnations as dead: fence them, withdraw moves to them, reassign their partitions."""
        for shard in shards:
            shard.alive, shard.gone_s = False, now
            self.c.save_shard(shard)
            self.c.fence(shard.name, shard.epoch)
            self.c.map_changed()
            self.moves.withdraw_moves_to(shard.name)
        for shard in shards:
            self.replace(shard.name)

    def _forget_names(self) -> None:
        """Forget dead shards beyond the bound, longest gone first; `shard_floor` bars reuse of their epochs."""
        gone = sorted((s for s in self.c.shards.values() if not s.alive), key=lambda s: s.gone_s)
        for shard in gone[: max(0, len(self.c.shards) - limits.SHARD_NAMES_MAX)]:
            self.c.shard_floor = max(self.c.shard_floor, shard.epoch)
            del self.c.shards[shard.name]
            self.c.drop(f"shard:{shard.name}")
            self.c.fence(shard.name, 0)

    def emptied(self, e: RedisEmptied, now: float) -> None:
        """Store everything again from memory, under a new term and new tokens, because Redis has lost all data."""
        self.c.term, self.c.tokens_given = e.term, 0
        for shard in self.c.shards.values():
            epoch = shard.epoch - 1 if shard.alive else shard.epoch
            if epoch:
                self.c.fence(shard.name, epoch)
        for model in self.c.models.values():
            model.cuts.give_up()  # nothing stored of it is left
            by_cuts = model.gate.sync and not model.durable
            if by_cuts:
                # No cut is left.  Until there is a new one, a lost partition is loaded from its newest snapshot.
                model.cuts.none_left()
            in_memory = True
            for i, owner in enumerate(model.owners):
                taken_back = model.partition(i) in e.unseen and self._take_back(owner)
                in_memory &= taken_back or not (owner.shard is None or owner.must_load)
                if owner.shard is not None:
                    self.c.renew_token(model, i)
            if by_cuts and model.ready and not in_memory:
                # What is loaded, or drawn, is of an older clock than what the others have in memory.
                model.source = "snapshot"
                begin_sync(self.c, model)
            self.c.place_changed(model)
        self.c.save_everything()
        self.c.forget_others()

    def _take_back(self, owner: Owner) -> bool:
        """Undo a handover that no shard has been told of: the previous owner still has the partition in memory.

        Returns False, and changes nothing, if there is none that lives.
        """
        name, epoch, token = owner.previous or ("", 0, 0)
        shard = self.c.shards.get(name)
        if shard is None or not shard.alive or shard.epoch != epoch:
            return False
        owner.shard, owner.token, owner.kept_from, owner.handed_lsn = name, token, 0, None
        return True

    def feed(self, e: OpenFeed, now: float) -> None:
        if e.shard is not None:
            self.c.joined_shard(e.shard, e.epoch or 0)
        documents = [
            self.c.map_document(),
            *(self.c.model_document(m, all_commits=True) for m in self.c.models.values()),
        ]
        self.c.answer(e.request, {"documents": documents})

    # --- ownership ---

    def replace(self, gone: str | None) -> None:
        """Take away the partitions of the dead shard `gone`, if given; assign all without an owner to live shards."""
        for model in self.c.models.values():
            lost = [i for i, o in enumerate(model.owners) if gone is not None and o.shard == gone]
            if lost:
                self._lose(model, lost)
        self.placement.place(*self.c.models.values())

    def _lose(self, model: Model, lost: Sequence[int]) -> None:
        """Take these partitions from their dead owner, and decide what state the model continues from.

        If all have to be loaded again, those of shards that Redis does not answer are taken, too: once these had said
        so for long enough, the model would go back again.
        """
        _take([model.owners[i] for i in lost])
        stored = model.initial.were_complete or model.initial.awaits_restore
        if stored and (model.durable or not model.gate.sync):
            model.source = "snapshot"
            model.cuts.give_up()  # with its journal, a partition may start beyond that clock
            self.c.save_clock(model)
        else:
            self._load_again(model)
            unable = self._unable()
            _take(o for o in model.owners if o.shard in unable)
        self.c.place_changed(model)

    def _load_again(self, model: Model) -> None:
        """Begin a timeline on which all partitions are loaded or drawn again."""
        if go_back(self.c, model):
            return  # sync at `applied`: to the newest clock that all partitions have stored (semantics 4)
        if model.ready and model.cuts.lacks_first:
            reload(self.c, model, "snapshot", model.next_phase_clock, opening=True)
            model.cuts.wanted = True
        else:
            self._begin_anew(model)

    def _unable(self) -> set[str]:
        """Names of the live shards that Redis does not answer, if others can load at once what these cannot."""
        live = self.c.live_shards()
        away = {n for n in live if self.c.shards[n].storage_away}
        return set() if self.c.storage_away or self.placement.waits or len(away) == len(live) else away

    def _take_from(self, shard: Shard) -> None:
        """Take from a shard what it can neither load nor hand over, as Redis does not answer it: as if it had died.

        What it serves, or has in memory, stays.  Nothing is taken if no other shard can load it either.
        """
        if shard.name not in self._unable():
            return
        for model in self.c.models.values():
            lost = [i for i, o in enumerate(model.owners) if o.shard == shard.name and o.must_load]
            if lost:
                self._lose(model, lost)
                self.placement.place(model)

    def _begin_anew(self, model: Model) -> None:
        """Restart a model of which nothing is stored: random values are drawn again, others requested or read again."""
        model.initial.lose_all({*model.spec.uploads, *model.spec.files}, len(model.owners))
        self.c.load_files(model)
        # Partitions of a journaled model still load what is stored of them, which must not be ahead of the new clock.
        committed = model.durable and model.gate.sync and model.gate.clock > 0
        clock = model.next_phase_clock if committed else 0
        reload(self.c, model, "init", clock, opening=model.gate.opening)
        self.c.save_model(model)

    # --- reports ---

    def heartbeat(self, e: ShardHeartbeat, now: float) -> None:
        shard = self.c.joined_shard(e.name, e.epoch)
        shard.heard_s = now
        self.placement.heard(e.name)
        shard.metrics = e.metrics
        shard.memory_limit_bytes = e.memory.get("limit_bytes", 0)
        shard.memory_used_bytes = e.memory.get("used_bytes", 0)
        for row in starmap(ServedRow, e.partitions):
            model = self.c.owned(e.name, row)
            if model is not None:
                self._served(model, row, now)
        for cut in starmap(CutRow, e.cuts):
            model = self.c.owned(e.name, cut)
            if model is None or cut.clock != model.cuts.pending:
                continue
            if model.cuts.stored(cut.partition, len(model.owners), now):
                self.c.save_clock(model)
                self.c.model_changed(model)  # once told of it, owners keep this cut until the next is complete
        self.moves.released(e.name, list(starmap(ReleasedRow, e.released)), now)
        self.moves.loads(e.name, e.loads)
        self.moves.storage_of(shard, e.metrics.get("redis_away") is True, now)
        if shard.storage_away and now - shard.storage_away_s >= limits.LEASE_S:
            self._take_from(shard)
        self._lost(e.name, list(starmap(LostRow, e.lost)))
        self.c.answer_now(e.request, {"state": shard.state})

    def _served(self, model: Model, row: ServedRow, now: float) -> None:
        owner = model.owners[row.partition]
        nothing_to_store = row.durable_version >= row.version
        if nothing_to_store or row.durable_version > owner.durable_version or owner.from_version is None:
            owner.stored_s = now
        owner.version, owner.durable_version, owner.kept_from = row.version, row.durable_version, 0
        owner.heard, begins = True, owner.from_version is None
        if begins:
            owner.from_version, owner.previous = row.from_version, None
            self.c.unbalanced = True  # it may be moved now
            self.c.mark_dirty(model)
        if row.revision > model.revision:
            # Redis has lost what the last leader stored, and that leader has ended.  Partitions take no older one.
            model.revision = row.revision + 1
            self.c.save_model(model)
            self.c.model_changed(model)
        if owner.revision != row.revision:
            owner.revision = row.revision
            self.c.mark_dirty(model)
        if row.commits_from > owner.commits_from:
            self.c.mark_dirty(model)  # Its commits may have waited for this.
        owner.commits_from = row.commits_from
        if begins:
            self._check_clock(model, row)
            owner.handed_lsn = None

    def _check_clock(self, model: Model, row: ServedRow) -> None:
        """Go back, or with a journal begin a new sync phase, if a partition starts before the oldest kept commit.

        Part of its state was lost with the data of Redis, so it can never reach the others' clock, and a new phase
        begins with the values there are.  So it does if a new owner does not start from what was handed over: it may
        lack parts that were staged.  A partition stored before the present timeline starts at the timeline's
        beginning.  If nothing of a journaled one is durable, its owner has it in memory since before Redis was emptied,
        or has initial values: the version tells which.
        """
        first = model.commits[0][1].t if model.commits else model.gate.clock
        told = not model.durable or row.commits_from or row.durable_version
        reached = max(row.commits_from, model.began) if told else row.version
        lacks = model.owners[row.partition].handed_lsn not in (None, row.from_lsn)
        if not model.gate.sync or not model.ready or model.gate.opening or (reached >= first and not lacks):
            return
        if go_back(self.c, model):
            self.c.place_changed(model)
        else:
            model.series.outdate()
            begin_sync(self.c, model)

    def _lost(self, shard: str, rows: Sequence[LostRow]) -> None:
        """Request again the values of partitions that were never stored and cannot be drawn.

        Those that have been given up are lost as if their owner had died: the last leader gave them to others, and died
        before Redis lost that.
        In sync at `applied` the whole model begins anew: no other clock is left that it could be of.  With a journal
        the others have what was acknowledged, and a timeline begins with the values there are.
        """
        behind: dict[str, Model] = {}
        for row in rows:
            model, index = self.c.owned(shard, row), row.partition
            if model is not None and row.given_up:
                self._lose(model, [index])
                self.placement.place(model)
                continue
            if model is None or model.owners[index].source == "init":
                continue
            if model.gate.sync:
                if not model.durable or not model.initial.were_complete:
                    self._begin_anew(model)
                    self.c.place_changed(model)
                    continue
                behind[model.name] = model
            restored = model.initial.restored
            names = {p.name for p in model.params_in(index) if restored or p.init.kind in ("upload", "file")}
            model.initial.lose(names, index)
            model.series.outdate()
            self.c.load_files(model)
            self.c.give_token(model, index, "init")
            self.c.save_model(model)
            self.c.place_changed(model)
        for model in behind.values():
            begin_sync(self.c, model)


def _addresses(given: Sequence[Any]) -> tuple[str, ...]:
    """Return the addresses of a shard; raises RequestError (`invalid_field`) unless they are such, a URL first."""
    if not 0 < len(given) <= ADDRESSES_MAX or not all(isinstance(a, str) and len(a) < 256 for a in given):
        raise problem("invalid_field", f"addresses: must be a list of 1 to {ADDRESSES_MAX} URLs", where="addresses")
    wrong = next((a for a in given if not is_address(a)), None)
    if wrong is not None or not is_node_url(given[0]):
        detail = f"addresses: must be like http://HOST:PORT, not {wrong or given[0]!r:.80}"
        raise problem("invalid_field", detail, where="addresses")
    return tuple(given)


def _take(owners: Iterable[Owner]) -> None:
    """Take the partitions from these owners."""
    for owner in owners:
        owner.shard = owner.from_version = None
        owner.withdraw_move()
