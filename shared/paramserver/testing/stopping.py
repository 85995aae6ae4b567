"""A simulated shard that can be asked to stop: it hands its partitions over or stores them, then leaves the cluster."""

from collections.abc import Callable
from typing import Final

from paramserver.core.scheduler import io
from paramserver.core.shard.events import SaveAll
from paramserver.errors import PsError
from paramserver.limits import STOP_S
from paramserver.testing.shards import SimShard
from paramserver.testing.world import Script

HAND_OVER_S: Final = 0.75 * (STOP_S - 5.0)
"""For how long other shards may take over the partitions."""
STORE_S: Final = STOP_S - 5.0
"""By when everything must be stored."""
ASK_S: Final = 1.0
LOOK_S: Final = 0.1


class StoppableShard(SimShard):
    """One shard process, which a signal can end as well as a crash."""

    def start(self) -> None:
        """Start and join, owning nothing."""
        self._stopping = self._closed = False
        super().start()

    @property
    def serving(self) -> bool:
        """Whether it is confirmed, and has not stored its partitions for the last time."""
        return super().serving and not self._closed

    def end_membership(self) -> None:
        """End this membership; one that has stopped serving does not join again."""
        if not self._closed:
            super().end_membership()
            return
        self.epoch = 0

    def stop(self) -> None:
        """End, as on SIGTERM, and start again after a while; all that it has stored or handed over by then counts."""
        if self.up and self.epoch and not self._stopping:
            self._stopping = self.hurried = True
            self.world.play(self._stop(self.world.now), self.send, self.later)

    def _stop(self, began_s: float) -> Script:
        """Do as the service's `Stopping`; but a leader that does not answer is asked to the end."""
        while self.world.now < began_s + HAND_OVER_S:
            answer = yield from self._ask(lambda r, epoch: io.SetShardState(r, self.name, "draining", epoch))
            if answer and not (answer["targets"] and (self._owned or answer["partitions"])):
                break
            yield ASK_S if self._owned else LOOK_S
        self._closed = True
        asked_s, left = began_s, False
        while self.epoch and not left and self.world.now < began_s + STORE_S:
            if not self._unsaved:
                self.redis.left.add((self.name, self.epoch))
                answer = yield from self._ask(lambda r, epoch: io.LeaveShard(r, self.name, epoch, stored=True))
                left = answer is None
            self.handle(SaveAll())
            if self._beyond_cuts and self.world.now >= asked_s + ASK_S:
                asked_s = self.world.now
                yield from self._ask(lambda r, epoch: io.SetShardState(r, self.name, "draining", epoch, cut=True))
            yield LOOK_S
        if not left:
            self.redis.left.discard((self.name, self.epoch))
        self.crash()

    def _ask(self, make: Callable[[int, int], io.Event]) -> Script:
        """Send the scheduler an event of this membership; return its answer, {} if it was refused."""
        epoch = self.epoch
        if not epoch:
            return {}
        answer = yield self.scheduler.ask(self.name, lambda r: make(r, epoch))
        if isinstance(answer, PsError):
            self.switch_scheduler()
            return {}
        return answer

    @property
    def _owned(self) -> int:
        return sum(len(m.partitions) for m in self.core.models.values())

    @property
    def _unsaved(self) -> bool:
        """Whether something is in this process only."""
        return bool(any(True for _ in self.core.unsaved()) or self.journaling or self._beyond_cuts)

    @property
    def _beyond_cuts(self) -> bool:
        """Whether a synchronous model would go back behind what it has here."""
        for model in self.core.models.values():
            here = any(p.by_cuts and p.state is not None for p in model.partitions.values())
            cut = self.cuts.get(model.key)
            if here and model.ready and model.clock > (-1 if cut is None else cut):
                return True
        return False
