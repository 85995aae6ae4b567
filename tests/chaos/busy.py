"""A cluster under load: models of several modes and levels with two workers each, and the final verdict."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from . import load
from .checkers import Verdict, judge
from .cluster import ChaosCluster
from .history import AFTER_ALL
from .load import Job

WORKERS: Final = 2


@dataclass(frozen=True)
class Kind:
    """Mode and acknowledgement level of one model."""

    mode: Literal["async", "sync"]
    ack: Literal["applied", "journaled", "fsynced"]

    @property
    def name(self) -> str:
        """Name of the model."""
        return f"{self.mode}-{self.ack}"


APPLIED: Final = (Kind("async", "applied"), Kind("sync", "applied"))
JOURNALED: Final = (Kind("async", "journaled"), Kind("sync", "journaled"))
KINDS: Final = (*APPLIED, *JOURNALED)


class Busy:
    """A cluster with models of several kinds under load."""

    def __init__(self, cluster: ChaosCluster, kinds: Sequence[Kind] = KINDS, *, pause_s: float = 0.08) -> None:
        self.cluster, self.kinds = cluster, tuple(kinds)
        for kind in kinds:
            load.create(cluster.client, kind.name, workers=WORKERS, mode=kind.mode, ack=kind.ack)
        self.jobs = [
            # The second pusher of each asynchronous model never joins; its client numbers the pushes.
            [Job(k.name, i, WORKERS, k.mode, joined=k.mode == "sync" or i == 0, pause_s=pause_s) for k in kinds]
            for i in range(WORKERS)
        ]
        for jobs in self.jobs:
            cluster.load(jobs)
        cluster.until_progress()

    def look(self, epoch: int = 0) -> None:
        """Record a pull of every model by a client that is not a worker."""
        for kind in self.kinds:
            self.cluster.look(Job(kind.name, -1, WORKERS, kind.mode), epoch)

    def finish(self) -> None:
        """Stop the load, then record a final pull of every model."""
        self.cluster.stop_load()
        self.look(AFTER_ALL)

    def verdicts(self, *, shards_died: bool) -> dict[Kind, Verdict]:
        """Return the verdict on each model; if no shard died, no level may lose anything."""
        history = self.cluster.history()
        assert history.errors == []
        return {
            k: judge(history.of(k.name), mode=k.mode, durable=k.ack != "applied" or not shards_died) for k in self.kinds
        }

    def assert_kept(self, *, shards_died: bool, acknowledged: int = 20, in_doubt: int = 0) -> None:
        """Fail unless every promise was kept until now, with at least `acknowledged` pushes of each model to judge by.

        `in_doubt` bounds the pushes in doubt of each model, those dropped unless a dead shard took the model back to an
        earlier clock, and the failed pulls and clocks of all models together.
        """
        history = self.cluster.history()
        for kind, verdict in self.verdicts(shards_died=shards_died).items():
            print(f"{kind.name}: {verdict}")
            assert verdict.wrong == [], f"{kind.name}: {verdict}"
            assert verdict.acknowledged >= acknowledged, f"{kind.name} was hardly under load: {verdict}"
            assert verdict.in_doubt <= in_doubt, f"{kind.name}: {verdict}"
            went_back = shards_died and kind == Kind("sync", "applied")
            assert went_back or verdict.dropped <= in_doubt, f"{kind.name}: {verdict}"
        assert len(history.failed_pulls) <= in_doubt, history.failed_pulls[:5]

    def pause(self, who: str, seconds: float) -> None:
        """Suspend a process for `seconds` with SIGSTOP."""
        self.cluster.signal(who, signal.SIGSTOP)
        time.sleep(seconds)
        self.cluster.signal(who, signal.SIGCONT)
