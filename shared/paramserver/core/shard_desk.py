"""Shards come, report and go: who owns what, which cuts are complete, and what a death brings about."""

from collections.abc import Sequence
from typing import Any, Final

from paramserver import limits
from paramserver.core.cluster import Cluster
from paramserver.core.fields import MODEL_NAME
from paramserver.core.membership import Shard, current, expired
from paramserver.core.models import RESTORED, Model
from paramserver.core.placement import assign
from paramserver.core.scheduler_io import JoinShard, LeaveShard, LoadFiles, OpenFeed, ShardHeartbeat
from paramserver.core.timeline import restart
from paramserver.errors import problem

ADDRESSES_MAX: Final = 16


class ShardDesk:
    """Handles the events of shards."""

    def __init__(self, cluster: Cluster) -> None:
        self.c = cluster

    def join(self, e: JoinShard, now: float) -> None:
        if not isinstance(e.name, str) or not MODEL_NAME.fullmatch(e.name):
            raise problem("invalid_field", f"name: {e.name!r:.80} is not allowed for a shard", where="name")
        addresses = tuple(e.addresses)
        if not 0 < len(addresses) <= ADDRESSES_MAX or not all(isinstance(a, str) and len(a) < 256 for a in addresses):
            raise problem("invalid_field", "addresses: must be a list of 1 to 16 URLs", where="addresses")
        old = self.c.shards.get(e.name)
        if old is None and len(self.c.shards) >= limits.SHARDS_MAX:
            raise problem("too_many_requests", f"the cluster has {limits.SHARDS_MAX} shards, which is the bound")
        shard = Shard(e.name, old.epoch + 1 if old else 1, now, addresses=addresses, version=str(e.version)[:64])
        self.c.shards[e.name] = shard
        self.c.save_shard(shard)
        self.c.map_changed()
        # Whatever the name's older holder owned died with it.
        self.replace(e.name, now)
        body = {"name": e.name, "epoch": shard.epoch, "lease_s": limits.LEASE_S, "term": self.c.term}
        self.c.answer(e.request, body, 201)

    def leave(self, e: LeaveShard, now: float) -> None:
        shard = current(self.c.shards.get(e.name), e.epoch, f"shard {e.name!r:.80}", "unknown_node")
        self.bury(shard, now)
        self.c.answer(e.request, None, 204)

    def expire(self, now: float) -> None:
        """Shards whose lease has run out."""
        for shard in expired(self.c.shards.values(), now):
            self.bury(shard, now)

    def bury(self, shard: Shard, now: float) -> None:
        """That incarnation is dead."""
        shard.alive = False
        self.c.save_shard(shard)
        self.c.map_changed()
        self.replace(shard.name, now)

    def feed(self, e: OpenFeed, now: float) -> None:
        if e.shard is not None:
            current(self.c.shards.get(e.shard), e.epoch or 0, f"shard {e.shard!r:.80}", "unknown_node")
        documents = [self.c.map_document(), *(m.feed_document(all_commits=True) for m in self.c.models.values())]
        self.c.answer(e.request, {"documents": documents})

    # --- ownership ---

    def replace(self, gone: str | None, now: float) -> None:
        """Partitions of that shard's older incarnation, and those without an owner, get one if a shard is alive."""
        for model in self.c.models.values():
            lost = [i for i, o in enumerate(model.owners) if gone is not None and o.shard == gone]
            if lost:
                self._lose(model, lost)
            self.place(model)

    def _lose(self, model: Model, lost: Sequence[int]) -> None:
        """The shard that owned these has died."""
        for i in lost:
            model.owners[i].shard = None
        if not model.gate.sync and (model.ready or RESTORED in model.missing):
            model.source = "snapshot"
        elif model.ready and model.cut is not None:
            # sync at `applied`: every partition goes back to the newest clock that all have stored (semantics 4).
            self._new_timeline(model, {"cut": model.cut}, model.cut)
        elif model.ready and model.switched:
            self._new_timeline(model, "snapshot", model.gate.clock)
            model.cut_wanted = True
        else:
            self._begin_anew(model)
        self.c.place_changed(model)

    def _begin_anew(self, model: Model) -> None:
        """Nothing of it is stored yet: drawn values are drawn again, uploaded ones are asked for again."""
        model.missing = {p.name for p in model.spec.params if p.init.kind in ("upload", "file")}
        model.missing |= {RESTORED} if model.restored else set()
        model.upload_until_s = 0.0
        files = {p.name: p.init.path for p in model.spec.params if p.init.kind == "file"}
        if files and not model.restored:
            self.c.perform(LoadFiles(model.key, files))
        self._new_timeline(model, "init", 0)
        self.c.save_model(model)

    def _new_timeline(self, model: Model, source: Any, clock: int) -> None:
        """All partitions start from `source` at that clock, under new tokens."""
        model.source = source
        restart(self.c, model, clock)
        for i, owner in enumerate(model.owners):
            if owner.shard is not None:
                self.c.give_token(model, i)

    def place(self, model: Model) -> None:
        """Gives partitions without an owner to the living shards."""
        live = self.c.live_shards()
        orphans = {i: model.bytes_of(i) for i, o in enumerate(model.owners) if o.shard is None}
        if not orphans or not live:
            return
        held = dict.fromkeys(live, 0)
        total = dict.fromkeys(live, 0)
        for m in self.c.models.values():
            for i, o in enumerate(m.owners):
                if o.shard in total:
                    total[o.shard] += m.bytes_of(i)
                    if m is model:
                        held[o.shard] += m.bytes_of(i)
        for i, shard in assign(orphans, live, held, total).items():
            model.owners[i].shard = shard
            self.c.give_token(model, i)
        self.c.place_changed(model)

    # --- reports ---

    def heartbeat(self, e: ShardHeartbeat, now: float) -> None:
        shard = current(self.c.shards.get(e.name), e.epoch, f"shard {e.name!r:.80}", "unknown_node")
        rows = [_row(r, 6, "partitions") for r in e.partitions]
        cuts = [_row(r, 5, "cuts") for r in e.cuts]
        shard.heard_s = now
        shard.metrics = e.metrics
        for name, generation, index, token, version, durable in rows:
            model = self._owned(e.name, name, generation, index, token)
            if model is not None:
                owner = model.owners[index]
                owner.version, owner.durable_version = version, durable
                if owner.from_version is None:
                    owner.from_version = version
                    self.c.touch(model)
        for name, generation, index, token, clock in cuts:
            model = self._owned(e.name, name, generation, index, token)
            if model is not None and clock == model.pending_cut:
                model.cut_seen.add(index)
                if len(model.cut_seen) == len(model.owners):
                    model.cut, model.pending_cut = clock, None
                    model.cut_seen.clear()
                    model.switched = False
                    self.c.save_clock(model)
                    self.c.touch(model)
        self.c.answer_now(e.request, {"state": "active"})

    def _owned(self, shard: str, name: Any, generation: int, index: int, token: int) -> Model | None:
        """The model, if that shard owns that partition of it under that token."""
        model = self.c.of_key(str(name), generation)
        if model is None or not 0 <= index < len(model.owners):
            return None
        owner = model.owners[index]
        return model if owner.shard == shard and owner.token == token else None


def _row(row: Any, length: int, where: str) -> tuple[Any, ...]:
    if (
        not isinstance(row, Sequence)
        or len(row) != length
        or not isinstance(row[0], str)
        or not all(isinstance(n, int) and not isinstance(n, bool) for n in row[1:])
    ):
        raise problem("invalid_field", f"{where}: each must be a list of {length} values", where=where)
    return tuple(row)
