"""The long chaos runs, `make chaos-long`: `python -m tests.chaos.long WHAT [--write]`.

    kills       100 kills of shards, schedulers and Redis at random times
    cuts        20 network partitions: one node is cut off from one other or from all, in one direction or both
    goodput     ten minutes with a kill every 30 s, compared with ten minutes without

Each fails if the checkers find a violation, and prints its figures as a table; `--write` replaces the table of that
name in docs/promises.md.  `PARAMSERVER_CHAOS_SCALE=0.1` makes each a tenth as long.
"""

import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from .busy import JOURNALED, KINDS, Busy
from .checkers import Verdict
from .cluster import chaos_cluster
from .figures import arguments, shown, table
from .keeper import Plan
from .proxy import Way

SCALE = float(os.environ.get("PARAMSERVER_CHAOS_SCALE", "1"))
SEED = int(os.environ.get("PARAMSERVER_CHAOS_SEED", "1"))
CUT_S = 10.0
KILL_EVERY_S = 30.0
GOODPUT_S = 600.0


def judged(run: Busy, *, in_doubt: int) -> dict[str, Verdict]:
    """Finish a run and return the verdict on each model; fail if the checkers find a violation."""
    run.finish()
    run.assert_kept(shards_died=True, in_doubt=in_doubt)
    return {kind.name: verdict for kind, verdict in run.verdicts(shards_died=True).items()}


def summary(verdicts: dict[str, Verdict]) -> list[list[object]]:
    """Return a table row for each model, with the columns of `COLUMNS`."""
    return [
        [name, v.acknowledged, v.in_doubt, v.pulls, len(v.lost), len(v.doubled), len(v.torn) + len(v.went_back)]
        for name, v in verdicts.items()
    ]


COLUMNS = ["model", "acknowledged", "in doubt", "pulls", "lost", "doubled", "torn or back"]


def kills(folder: Path) -> str:
    """Kill processes at random, sometimes a second before the first has recovered, 100 times in all."""
    rng, count = random.Random(SEED), max(3, round(100 * SCALE))
    with chaos_cluster(folder / "kills", Plan(shards=3, schedulers=2)) as c:
        run = Busy(c, KINDS)
        times, killed = [], 0
        while killed < count:
            began = time.monotonic()
            for _ in range(rng.choice((1, 1, 1, 2))):
                victim = rng.choice(("shard-0", "shard-1", "shard-2", "scheduler-0", "scheduler-1", "redis"))
                c.kill(victim)
                killed += 1
            c.until_healthy(within_s=120.0)
            times.append(time.monotonic() - began)
            time.sleep(rng.uniform(0.0, 3.0))
        verdicts = judged(run, in_doubt=0)
    recovered = f"{statistics.median(times):.1f} s, at most {max(times):.1f} s"
    head = f"{killed} kills; from a kill until every worker had three more pushes acknowledged: {recovered}."
    return f"{head}\n\n{table(COLUMNS, summary(verdicts))}"


def cuts(folder: Path) -> str:
    """Cut random links for ten seconds at a time."""
    rng, count = random.Random(SEED), max(2, round(20 * SCALE))
    with chaos_cluster(folder / "cuts", Plan(shards=3, schedulers=2, proxied=True)) as c:
        run = Busy(c, KINDS)
        times = []
        for i in range(count):
            node = rng.choice(("shard-0", "shard-1", "shard-2", run.cluster.leader()))
            # Every third time the node is cut off from all others, else from one.
            links = c.links(node) if i % 3 == 0 else [rng.choice(c.links(node))]
            way: Way = rng.choice(get_args(Way))
            for link in links:
                c.cut(link, way)
            time.sleep(CUT_S)
            c.heal()
            began = time.monotonic()
            c.until_healthy(within_s=120.0)
            times.append(time.monotonic() - began)
        verdicts = judged(run, in_doubt=count)
    healed = f"{statistics.median(times):.1f} s, at most {max(times):.1f} s"
    head = f"{count} cuts of {CUT_S:g} s; from healing until every worker had three more pushes acknowledged: {healed}."
    return f"{head}\n\n{table(COLUMNS, summary(verdicts))}"


def goodput(folder: Path) -> str:
    """Measure the throughput of the same load without kills and with a kill every 30 s."""
    seconds = GOODPUT_S * SCALE
    rates: dict[bool, dict[str, float]] = {}
    for disturbed in (False, True):
        rng = random.Random(SEED)
        with chaos_cluster(folder / f"goodput-{disturbed}", Plan(shards=3, schedulers=2)) as c:
            run = Busy(c, JOURNALED, pause_s=0.0)
            before, began = c.progress(), time.monotonic()
            while (left_s := began + seconds - time.monotonic()) > 0:
                time.sleep(min(left_s, KILL_EVERY_S))
                if disturbed and left_s > KILL_EVERY_S:
                    victims = ("shard-0", "shard-1", "shard-2", run.cluster.leader(), "redis")
                    c.signal(rng.choice(victims), signal.SIGKILL)
            after, took_s = c.progress(), time.monotonic() - began
            c.until_healthy(within_s=120.0)
            judged(run, in_doubt=0)
        rates[disturbed] = {
            kind.name: sum(after[k] - before[k] for k in after if k[0] == kind.name) / took_s for kind in run.kinds
        }
    rows = [
        [name, f"{calm:.0f}", f"{rates[True][name]:.0f}", f"{100 * rates[True][name] / calm:.0f} %"]
        for name, calm in rates[False].items()
    ]
    head = f"{seconds:g} s each; one process of shards, leader and Redis killed every {KILL_EVERY_S:g} s."
    return f"{head}\n\n{table(['model', 'pushes/s without', 'pushes/s with kills', 'goodput'], rows)}"


RUNS: dict[str, Callable[[Path], str]] = {f.__name__: f for f in (kills, cuts, goodput)}


def main() -> None:
    """Run the runs named on the command line."""
    for name, into_docs in arguments(list(RUNS)):
        scaled = "" if SCALE == 1 else f"PARAMSERVER_CHAOS_SCALE={SCALE:g} "
        shown(name, RUNS, f"{scaled}python -m tests.chaos.long {name}", into_docs=into_docs)


if __name__ == "__main__":
    main()
