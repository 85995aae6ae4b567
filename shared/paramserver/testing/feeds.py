"""A simulated shard's feed: the documents of the scheduler that it follows."""

from typing import TYPE_CHECKING, Any

from paramserver.core.scheduler import io
from paramserver.errors import PsError, problem
from paramserver.testing.schedulers import Document, SimScheduler
from paramserver.testing.world import Answer

if TYPE_CHECKING:
    from paramserver.testing.shards import SimShard

RETRY_S = 0.3
FEED_SILENCE_S = 3.0


class Feed:
    """A shard's feed: its documents arrive in order until it is cut; after `FEED_SILENCE_S` of silence it is replaced.

    Once the shard follows another one, or has crashed, nothing comes of what this one still brings.
    """

    def __init__(self, shard: "SimShard", scheduler: SimScheduler) -> None:
        self._shard, self._scheduler, self._world = shard, scheduler, shard.world
        self._epoch = shard.epoch
        self._arrives_s = self._heard_s = self._world.now
        self._untold = set(shard.views)
        """Models of which it has not brought a document yet."""

    @property
    def followed(self) -> bool:
        return self._shard.up and self._shard.feed is self

    def open(self) -> None:
        shard = self._shard
        shard.send(self._scheduler.call("OpenFeed", shard.name, self._subscribe), self._opened)
        shard.later(1.0, "feed watch", self._watch)

    def _subscribe(self, answer: Answer) -> None:
        """At the scheduler: have every document sent from now on, after those that it answers with."""
        scheduler, name = self._scheduler, self._shard.name
        if not scheduler.leading:
            answer(problem("no_leader", "not this one"))
            return

        def seen(outcome: Any) -> None:
            if not isinstance(outcome, PsError):
                scheduler.feeds[name] = self._sent
                for doc in outcome["documents"]:
                    self._sent(doc)
            answer(outcome)

        scheduler.handle(io.OpenFeed(scheduler.number(seen), name, self._epoch))

    def _opened(self, outcome: Any) -> None:
        if not self.followed or not isinstance(outcome, PsError):
            return
        if outcome.code in ("fenced", "unknown_node"):
            self._shard.end_membership()
        else:
            self._shard.switch_scheduler()
            self._shard.later(RETRY_S, "feed again", lambda: self._shard.follow() if self.followed else None)

    def _sent(self, doc: Document) -> None:
        """At the scheduler: send a document, which arrives after those before it, unless the feed is cut."""
        world, shard, feeds = self._world, self._shard, self._scheduler.feeds
        cut = world.cuts.get((self._scheduler.name, shard.name), 0.0) > world.now
        if not self.followed or cut or world.chance(world.faults.feed_cut):
            if feeds.get(shard.name) == self._sent:
                del feeds[shard.name]
            return
        self._arrives_s = max(self._arrives_s, world.now + world.delay())
        shard.later(self._arrives_s - world.now, f"feed {doc['type']}", lambda: self._take(doc))

    def _take(self, doc: Document) -> None:
        if not self.followed:
            return
        self._heard_s, shard = self._world.now, self._shard
        if doc.get("term", shard.term) < shard.term:
            self._replace()
            return
        shard.term = max(shard.term, doc.get("term", 0))
        if doc["type"] == "model":
            self._untold.discard(doc["name"])
        elif doc["type"] == "ping":  # the first follows the complete state: the others were deleted
            while self._untold:
                view = shard.views[self._untold.pop()]
                shard.take({"type": "gone", "model": view.model.name, "generation": view.model.generation})
        shard.take(doc)

    def _watch(self) -> None:
        if not self.followed:
            return
        if self._world.now - self._heard_s > FEED_SILENCE_S:
            self._replace()
        else:
            self._shard.later(1.0, "feed watch", self._watch)

    def _replace(self) -> None:
        self._shard.switch_scheduler()
        self._shard.follow()
