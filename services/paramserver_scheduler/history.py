"""The recent past, for people: what happened lately, and how fast versions rise.  Kept in memory only."""

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from paramserver.core.reading import Reading
from paramserver_scheduler.schema import EventStatus

EVENTS_MAX: Final = 100
RATE_SAMPLES: Final = 6
"""Rates are over the last five seconds."""


class History:
    """Turns published documents into lines a person can read, and samples of versions into rates."""

    def __init__(self, wall_offset_s: float) -> None:
        self.events: deque[EventStatus] = deque(maxlen=EVENTS_MAX)
        """Newest first."""
        self._wall_offset_s = wall_offset_s
        self._alive: dict[str, bool] = {}
        self._models: dict[str, tuple[int, int, int]] = {}
        self._workers: dict[str, dict[str, int]] = {}
        self._versions: dict[tuple[str, int], deque[tuple[float, int]]] = {}

    def begin(self, read: Reading) -> None:
        """What is there at the start is no news."""
        self._alive = {name: shard["alive"] for name, shard in read.map()["shards"].items()}
        self._models = {m["name"]: (m["generation"], m["revision"], m["timeline"]) for m in read.models()}

    def add(self, now: float, kind: str, text: str) -> None:
        """Note an event of this moment (monotonic seconds); the same again at once only moves the last one's time."""
        if self.events and (self.events[0].kind, self.events[0].text) == (kind, text):
            self.events.popleft()
        self.events.appendleft(EventStatus(at=now + self._wall_offset_s, kind=kind, text=text))

    def note(self, document: Mapping[str, Any], now: float) -> None:
        """Take in a published document."""
        match document["type"]:
            case "map":
                self._note_map(document, now)
            case "model":
                self._note_model(document, now)
            case "roster":
                self._note_roster(document["model"], document["workers"], now)
            case "gone":
                self._models.pop(document["model"], None)
                self._workers.pop(document["model"], None)
                self.add(now, "model_deleted", f"model {document['model']} is deleted")

    def sample(self, read: Reading, now: float) -> None:
        """Remember every model's version, where every owner has said it; due each second."""
        models = {(m["name"], m["generation"]): int(m["version"]) for m in read.models() if m["served"]}
        self._versions = {k: self._versions.get(k, deque(maxlen=RATE_SAMPLES)) for k in models}
        for key, version in models.items():
            self._versions[key].append((now, version))

    def updates_per_s(self, model: str, generation: int) -> float:
        """How fast that model's version rises."""
        samples = self._versions.get((model, generation))
        if not samples or samples[-1][0] <= samples[0][0]:
            return 0.0
        return max(0.0, (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0]))

    def _note_map(self, document: Mapping[str, Any], now: float) -> None:
        alive = {name: bool(shard["alive"]) for name, shard in document["shards"].items()}
        for name, lives in alive.items():
            if lives and not self._alive.get(name, False):
                self.add(now, "shard_joined", f"shard {name} has joined")
            elif not lives and self._alive.get(name, False):
                self.add(now, "shard_dead", f"shard {name} is gone; its partitions go to the others")
        self._alive = alive

    def _note_model(self, document: Mapping[str, Any], now: float) -> None:
        name = document["name"]
        new = (document["generation"], document["revision"], document["timeline"])
        generation, revision, timeline = self._models.get(name, (0, 0, 0))
        if generation != new[0]:
            self.add(now, "model_created", f"model {name} is created")
        else:
            if revision != new[1]:
                self.add(now, "model_changed", f"model {name} has new settings (revision {new[1]})")
            if timeline != new[2]:
                self.add(now, "model_rolled_back", f"model {name} goes on from clock {document['clock']}")
        self._models[name] = new
        self._note_roster(name, document["workers"], now)

    def _note_roster(self, model: str, workers: Mapping[str, Any], now: float) -> None:
        old, new = self._workers.get(model, {}), {w: int(v[0]) for w, v in workers.items()}
        for worker in sorted(new):
            if old.get(worker) != new[worker]:
                self.add(now, "worker_joined", f"worker {worker} works on model {model}")
        for worker in sorted(set(old) - set(new)):
            self.add(now, "worker_gone", f"worker {worker} has left model {model}, or died")
        self._workers[model] = new
