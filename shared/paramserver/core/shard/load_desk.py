"""Loading of partitions: the state their owner begins with, and what follows from it at once."""

from typing import TYPE_CHECKING

from paramserver.core.shard.effects import Report
from paramserver.core.shard.events import LoadFailed, PartitionLoaded
from paramserver.core.shard.operation import record_settings_change
from paramserver.core.shard.partition import LOAD_AGAIN_S, NO_REVISION
from paramserver.core.shard.request_desk import RequestDesk
from paramserver.core.shard.timers import Timers
from paramserver.errors import CorruptState, PsError

if TYPE_CHECKING:
    from paramserver.core.shard.core import ShardCore

_AGAIN_S_MAX = 60.0
"""Longest time until corrupt state is read again: reading it takes as long as loading it, and hardly ever helps."""


class LoadDesk:
    """Handles load results and retries failed loads."""

    def __init__(self, shard: "ShardCore", timers: Timers, requests: RequestDesk) -> None:
        self._shard = shard
        self._timers = timers
        self._requests = requests

    def loaded(self, event: PartitionLoaded, now: float) -> None:
        model, p = self._shard.find(event.key, event.token)
        if model is None or p is None or p.state is not None:
            return
        loaded, cut = event.loaded, isinstance(p.source, int)
        try:
            p.load(loaded)
        except PsError as error:
            self.failed(LoadFailed(event.key, event.token, error), now)
            return
        p.live_workers = model.live_workers
        if model.sync:
            # Workers of staged parts joined before this shard got the partition: those that the roster lacks are gone.
            model.departed |= {slot[:2] for slot in p.staged if model.workers.get(slot[0]) != slot[1]}
        self._shard.held_bytes += p.held_bytes
        if cut and loaded.stored:
            p.cut_stored = p.clock
        elif model.sync and p.spec.consistency.mode != "sync":
            p.clock = model.view.began  # where it enters sync, once what it has buffered is applied
        elif loaded.settings is None or p.spec.consistency.mode != "sync":
            p.clock = p.clock if p.clock in model.commits else model.clock
        if loaded.settings is None and p.clock in model.commits:
            p.revision = NO_REVISION  # that commit brings the settings, which may be older than those known here
        if p.level and loaded.settings is None:
            p.fresh_slots()  # by the settings journaled next; they may have changed since loading began
            record_settings_change(self._shard, p, now, fresh=True)
        if model.ready and not loaded.stored:
            self._shard.plan.initialized(p)
        elif loaded.replayed_bytes:
            self._shard.plan.changed(p, now)
        elif not cut and model.at_cut(p):
            self._shard.plan.cut(p)  # the stored one may lack values assigned to the owner before
        if p.buffered:
            p.flush_at = now + p.spec.consistency.interval_ms / 1000.0
            self._shard.flush_by(p, p.flush_at, now)
        self._shard.resume(model, p, now)
        self._shard.perform(Report())

    def failed(self, event: LoadFailed, now: float) -> None:
        model, p = self._shard.find(event.key, event.token)
        if model is None or p is None or p.state is not None:
            return
        self._requests.refuse(model, p, event.error)
        p.load_error = event.error.plus()  # without its traceback, which refers to what was read
        # Of values that were never stored the scheduler is told, which sees to others.
        lasting = isinstance(event.error, CorruptState) and "never_stored" not in event.error.members
        after_s = p.load_again_s if lasting else LOAD_AGAIN_S
        p.load_again_s = min(2 * after_s, _AGAIN_S_MAX) if lasting else LOAD_AGAIN_S

        def again(at: float) -> None:
            if self._shard.find(p.key, p.token)[1] is p and p.state is None:
                self._shard.perform(model.loading_of(p))

        self._timers.at(now + after_s, again)
