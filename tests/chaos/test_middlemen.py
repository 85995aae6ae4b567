"""Proxies between clients and nodes answer for them, lose, cut and repeat: each gradient counts once or not at all.

Clients get errors then, and some pushes stay in doubt, but no value is wrong, and none goes on as if it were right.
"""

import json
import os
from pathlib import Path

import pytest
from tests.servers import free_port
from tests.waiting import eventually

from . import load, middlemen
from .busy import KINDS, WORKERS
from .checkers import Verdict, judge
from .cluster import ChaosCluster, chaos_cluster
from .history import AFTER_ALL
from .keeper import Plan
from .load import Job
from .middlemen import FATES

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

RATE = 0.15
"""Part of the requests that something happens to."""
PUSHES = int(os.environ.get("PARAMSERVER_CHAOS_PUSHES", "30"))
"""Acknowledged pushes of each worker in one test."""
SEED = int(os.environ.get("PARAMSERVER_CHAOS_SEED", "1"))


def run(cluster: ChaosCluster, folder: Path) -> dict[str, int]:
    """Put models of all kinds under load through middlemen, and return how many requests met each fate."""
    ports = [cluster.urls[0].rsplit(":", 1)[1]]
    for shard in cluster.get("/map")["shards"].values():
        ports += [address.rsplit(":", 1)[1] for address in shard["addresses"]]
    targets = {free_port(): int(port) for port in ports}
    between = middlemen.begin(SEED, RATE, targets, folder / "middlemen.log")
    try:
        for kind in KINDS:
            load.create(cluster.client, kind.name, workers=WORKERS, mode=kind.mode, ack=kind.ack)
        jobs = [
            Job(k.name, i, WORKERS, k.mode, joined=k.mode == "sync" or i == 0, timeout_s=10.0, persists=True)
            for k in KINDS
            for i in range(WORKERS)
        ]
        url = f"http://127.0.0.1:{next(iter(targets))}"
        eventually(lambda: cluster.http.get(url + "/livez"), what="the middlemen's start")
        cluster.load(jobs, url)
        cluster.until_progress(PUSHES, within_s=240.0)
        cluster.stop_load()
        for kind in KINDS:
            cluster.look(Job(kind.name, -1, WORKERS, kind.mode), AFTER_ALL)
        met: dict[str, int] = json.loads(between.communicate(timeout=20.0)[0])
        return met
    finally:
        between.kill()
        between.communicate()


def verdicts(cluster: ChaosCluster) -> dict[str, Verdict]:
    """Return the checkers' verdict on each model; no process has died."""
    history = cluster.history()
    assert history.errors == [], history.errors[0]
    return {k.name: judge(history.of(k.name), mode=k.mode, durable=True) for k in KINDS}


def test_nothing_is_lost_doubled_or_torn(tmp_path: Path) -> None:
    """With pages, logins, lost, cut and repeated requests on every way, each push counts as its worker was told."""
    with chaos_cluster(tmp_path / "cluster", Plan(shards=2, proxied=True)) as cluster:
        met = run(cluster, tmp_path)
        print(met)
        for name, verdict in verdicts(cluster).items():
            print(f"{name}: {verdict}")
            assert verdict.wrong == [], f"{name}: {verdict}"
        assert all(met.get(fate) for fate in FATES), met


def test_a_planted_bug_turns_it_red(tmp_path: Path) -> None:
    """A shard that takes each delivery of a push for a new one is found out."""
    with chaos_cluster(tmp_path / "cluster", Plan(shards=2, proxied=True)) as cluster:
        cluster.kill("shard-0", bug="skip_the_window")
        eventually(cluster.healthy, within_s=60.0, what="the restart")
        run(cluster, tmp_path)
        assert any(v.doubled for v in verdicts(cluster).values())
