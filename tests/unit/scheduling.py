"""A driver for `SchedulerCore`: performs its effects, keeps its replies, acts as the shards, and can be killed."""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from paramserver.core.scheduler import io
from paramserver.core.scheduler.core import SchedulerCore
from paramserver.errors import PsError
from paramserver.types import PartitionKey, Token

SPEC: dict[str, Any] = {"name": "m", "params": {"w": {"shape": [64]}}, "partitions": 4}
EIGHT = {"partitions": 8}
EPOCH_S = 1e9
"""Unix time minus the driver's `now`."""


class Driver:
    """A scheduler with a dict as its Redis and these shards, on a clock that `wait` advances."""

    def __init__(self, *shards: str) -> None:
        self.now, self.term = 100.0, 1
        self.hash: dict[str, str] = {}
        self.tokens: dict[str, int] = {}
        self.fences: dict[str, int] = {}
        self.replies: dict[int, Any] = {}
        self.statuses: dict[int, int] = {}
        self.published: list[Any] = []
        self.work: list[io.Effect] = []
        """Effects that the driver does not perform, as a service would: checkpoints, files, deletions."""
        self.numbers = itertools.count(1)
        self.open: dict[int, io.Event] = {}
        self.shards: dict[str, int] = {}
        """Epochs of the shards that send heartbeats, by name."""
        self.durable = True
        """Whether heartbeats report every served version as durable."""
        self.assigned = 0
        """How far assignments have raised the versions above the clock, in sync."""
        self.stand: dict[int, int] = {}
        """Clocks of the partitions that are behind, in sync."""
        self.began: dict[tuple[PartitionKey, Token], int] = {}
        """The version with which the shard that has a partition under that token began."""
        self.lsns: dict[int, int] = {}
        """The last command's number in what is loaded and handed over of a partition, if not 0."""
        self.core = SchedulerCore.restore({}, self.now, self.term, EPOCH_S + self.now)
        self.core._c.generations = 0  # so that tests can name them: 1, 2, ...
        for name in shards:
            self.shard(name)

    @classmethod
    def with_model(cls, **spec: Any) -> "Driver":
        """Return a scheduler whose model is served; see `model`."""
        driver = cls()
        driver.model(**spec)
        return driver

    def send(self, make: Callable[[int], io.Event], perform: int | None = None) -> int:
        """Send a request and return its number; with `perform`, the process dies after that many effects."""
        number = next(self.numbers)
        event = make(number)
        self.open[number] = event
        self.do(event, perform)
        return number

    def do(self, event: io.Event, perform: int | None = None) -> None:
        """Handle an event and perform its effects; `perform` as for `send`."""
        for effect in self.core.handle(event, self.now)[:perform]:
            self._perform(effect)
        if perform is not None:
            self.restart()

    def _perform(self, effect: io.Effect) -> None:
        if isinstance(effect, io.Store):
            for name, doc in effect.fields.items():
                if doc is None:
                    self.hash.pop(name, None)
                else:
                    self.hash[name] = json.dumps(doc, allow_nan=False)
            for key, token in effect.tokens:
                assert token > self.tokens.get(str(key), 0), "owner tokens only grow"
                self.tokens[str(key)] = token
            for shard, epoch in effect.fences:
                assert epoch == 0 or epoch >= self.fences.get(shard, 0), "fences only rise"
                self.fences[shard] = epoch
        elif isinstance(effect, io.Publish):
            json.dumps(effect.document, allow_nan=False)
            if effect.document["type"] == "commit":
                name = f"commit:{effect.document['model']}:{effect.document['t']}"
                stored = json.loads(self.hash[name]) | {"asks": effect.document["asks"]}
                assert stored == effect.document, "stored before it is published"
            self.published.append(effect.document)
        elif isinstance(effect, io.Reply):
            assert self.open.pop(effect.request, None) is not None, "every request is answered once"
            self.replies[effect.request], self.statuses[effect.request] = effect.outcome, effect.status
        else:
            self.work.append(effect)

    def restart(self) -> None:
        """Replace the core by a new one on the same Redis, as after a kill -9."""
        self.term += 1
        self.open.clear()
        documents = {k: json.loads(v) for k, v in self.hash.items()}
        self.core = SchedulerCore.restore(documents, self.now, self.term, EPOCH_S + self.now)
        # The shards reconnect, and their feeds begin with all documents.
        seen = [(c["generation"], c["timeline"], c["t"]) for c in self.commits()]
        for model in self.ask(lambda n: io.OpenFeed(n))["documents"][1:]:
            self.published += [c for c in model["commits"] if (c["generation"], c["timeline"], c["t"]) not in seen]

    def ask(self, make: Callable[[int], io.Event]) -> Any:
        """Send a request and return its reply, which must come at once; raises the error if it is refused."""
        number = self.send(make)
        assert number in self.replies, f"{self.open.get(number)} is not answered"
        return self.result(number)

    def result(self, number: int) -> Any:
        """Return the reply to a request; raises the error if it was refused."""
        outcome = self.replies[number]
        if isinstance(outcome, PsError):
            raise outcome
        return outcome

    # --- a cluster ---

    def shard(self, name: str) -> None:
        """Let a shard join, or rejoin after a restart, and send its first heartbeat."""
        body = self.ask(lambda n: io.JoinShard(n, name, [f"http://{name}:1"], redis_term=self.term))
        self.shards[name] = body["epoch"]
        self.beat(name)

    def beat(
        self,
        name: str,
        stored: bool = True,
        releases: bool = True,
        metrics: dict[str, Any] | None = None,
        **fields: Any,
    ) -> str:
        """Send a heartbeat of a shard that serves all its partitions; return the shard's state from the reply.

        By default it has stored all pending cuts, and holds and has stored the partitions that it is to hand over.
        """
        partitions, cuts = [], []
        released: list[Any] = []
        for model in self.core._c.models.values():
            for i, o in enumerate(model.owners):
                if o.shard == name:
                    row = [model.name, model.generation, i, o.token]
                    clock = self.stand.get(i, model.gate.clock) if model.gate.sync else 0
                    version = clock + self.assigned if model.gate.sync else o.version
                    durable = (version, clock) if self.durable else (0, 0)
                    lsn = self.lsns.get(i, 0)
                    began = self.began.setdefault((model.partition(i), o.token), version)
                    partitions.append([*row, version, durable[0], model.revision, durable[1], began, lsn])
                    if o.release and releases:
                        released.append([*row, version, o.release, lsn])
                    if model.cuts.pending is not None and stored:
                        cuts.append([*row, model.cuts.pending])
        epoch = self.shards[name]
        fields = {"released": released} | fields
        beat = self.ask(lambda n: io.ShardHeartbeat(n, name, epoch, metrics or {}, partitions, cuts, **fields))
        return str(beat["state"])

    def beats(self) -> None:
        """Send a heartbeat of every shard."""
        for name in self.shards:
            self.beat(name)

    def empty_redis(self, unseen: Sequence[int] = ()) -> None:
        """Delete everything in Redis; the scheduler notices and begins a new term.

        No shard was told of the newest tokens of model m's `unseen` partitions.
        """
        self.hash.clear()
        self.tokens.clear()
        self.fences.clear()
        self.term += 1
        self.do(io.RedisEmptied(self.term, [self.core._c.models["m"].partition(i) for i in unseen]))

    def owners(self, model: str = "m") -> list[str | None]:
        """Return the owner of each partition."""
        return [p["shard"] for p in self.core.read.model(model)["partitions"]]

    def document(self, model: str = "m") -> Any:
        """Return the newest published document of a model."""
        return next(d for d in reversed(self.published) if d["type"] == "model" and d["name"] == model)

    def wait(self, seconds: float, shards: bool = True) -> None:
        """Advance the clock, with a tick and (if `shards`) heartbeats of all shards every 0.5 s."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            if shards:
                self.beats()
            self.do(io.Tick())

    def model(self, **fields: Any) -> Any:
        """Create model m, by default with four partitions, on two shards; return the reply."""
        for name in ("s0", "s1"):
            if name not in self.shards:
                self.shard(name)
        number = self.send(lambda n: io.CreateModel(n, SPEC | fields, "secret"))
        self.beats()
        self.beats()  # in sync, the first values are stored as a cut once all partitions are served
        return self.result(number)

    def given(self) -> list[list[int]]:
        """[index, owner token] of each partition of model m: what a shard reports once all have taken a value."""
        return [[i, o.token] for i, o in enumerate(self.core._c.models["m"].owners)]

    def join(self, name: str | None, **fields: Any) -> Any:
        """Let a worker join model m; return the reply."""
        return self.ask(lambda n: io.JoinWorker(n, "m", name, **fields))

    def clock(self, worker: Any, clock: int, wait_s: float = 10.0) -> int:
        """Report a worker's clock; return the request's number."""
        return self.send(lambda n: io.ReportClock(n, "m", worker["worker"], worker["epoch"], clock, None, wait_s))

    def clock_of(self, worker: Any, clock: int, perform: int | None = None) -> int:
        """Report a clock as a client that knows timelines does; `perform` and the returned number as for `send`."""
        w, e, t = worker["worker"], worker["epoch"], worker["timeline"]
        return self.send(lambda n: io.ReportClock(n, "m", w, e, clock, t, 60.0), perform)

    def lease(self, worker: Any, dataset: str, wait_s: float = 0.0) -> int:
        """Request a task for a worker; return the request's number."""
        return self.send(lambda n: io.LeaseTask(n, "m", worker["worker"], worker["epoch"], dataset, wait_s))

    def commits(self) -> list[Any]:
        """Return the published commits, in order."""
        return [d for d in self.published if d["type"] == "commit"]


def beyond_its_cut(after_s: float = 0.1, **spec: Any) -> tuple[Driver, Any]:
    """Return a driver whose sync model reached clock 2 `after_s` after its cut at clock 1, and the model's worker."""
    d = Driver.with_model(consistency={"mode": "sync"}, **spec)
    a = d.join("a")
    d.clock(a, 1)
    d.beats()
    d.now += after_s
    d.clock(a, 2)
    return d, a


def release_numbers(d: Driver) -> dict[int, int]:
    """Return the release numbers in the newest published document of model m, by partition."""
    owners = d.document()["owners"]
    return {i: o[2]["release"] for i, o in enumerate(owners) if len(o) > 2 and "release" in o[2]}


def row(d: Driver, index: int, number: int) -> list[Any]:
    """Return a heartbeat's `released` row, sent by an owner that has stored the whole partition."""
    model = d.core.read.model("m")
    return ["m", model["generation"], index, model["partitions"][index]["incarnation"], 7, number, d.lsns.get(index, 0)]


def code(d: Driver, number: int) -> str:
    """Return the code of the error that a request was refused with."""
    outcome = d.replies[number]
    assert isinstance(outcome, PsError), outcome
    return outcome.code
