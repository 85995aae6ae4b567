"""The figures of docs/promises.md, measured on real processes: `python -m tests.chaos.figures WHAT [--write]`.

    recovery    from the kill of a shard to the next acknowledged push, by the bytes of a partition
    takeover    from the kill of the leading scheduler to its successor's first answer
    levels      throughput of `journaled` and `fsynced` relative to `applied`
    window      memory of the push memory for each worker and partition
    all         all of the above

Each prints a Markdown table; `--write` replaces the table of that name in docs/promises.md.
"""

import argparse
import gc
import os
import platform
import statistics
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import redis
from benchmarks.tables import write
from tests.waiting import eventually

import paramserver as ps
from paramserver.core.shard.window import PushMemory
from paramserver.limits import MIB
from paramserver.types import PushId

from .cluster import ChaosCluster, chaos_cluster
from .keeper import Plan
from .load import ROOT

PROMISES = ROOT / "docs" / "promises.md"
REPEATS = 5


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def spread(times_s: Sequence[float]) -> str:
    """Return median and maximum of some times as text."""
    return f"{statistics.median(times_s):.1f} s, at most {max(times_s):.1f} s"


def waited_s(push: Callable[[], Any]) -> float:
    """Return the seconds that one call took."""
    began = time.monotonic()
    push()
    return time.monotonic() - began


def recovery(folder: Path) -> str:
    """Measure the time from the kill of a partition's owner to the end of the next push."""
    rows = []
    for size_mib in (1, 16, 64):
        row: list[Any] = [f"{size_mib} MiB"]
        for ack, restart in (("applied", True), ("journaled", True), ("journaled", False)):
            with chaos_cluster(folder / f"{size_mib}-{ack}-{restart}", Plan(shards=2)) as c:
                size = size_mib * MIB // 4
                model = c.client.create_model("m", {"w": (size,)}, optimizer=ps.Sum(), partitions=1, ack=ack)
                ones = {"w": np.ones(size, np.float32)}
                times = []
                for _ in range(REPEATS):
                    for _ in range(3):
                        model.push(ones)
                    (owner,) = {p["shard"] for p in c.get("/models/m")["partitions"]}
                    c.kill(owner, hold=not restart)
                    times.append(waited_s(lambda m=model, g=ones: m.push(g, timeout=120.0)))  # type: ignore[misc]
                    if not restart:
                        c.start(owner)
                    eventually(c.healthy, within_s=90.0, what="the shard's return")
                row.append(spread(times))
        rows.append(row)
    columns = ["partition", "`applied`, shard restarted", "`journaled`, shard restarted", "`journaled`, taken over"]
    return table(columns, rows)


def takeover(folder: Path) -> str:
    """Measure the time from the kill of the leader to the standby's first successful answer."""
    times = []
    with chaos_cluster(folder / "takeover", Plan(shards=1, schedulers=2)) as c:
        for _ in range(2 * REPEATS):
            leader = c.leader()
            url = c.urls[1 - int(leader[-1])]
            c.kill(leader, hold=True)
            # A standby forwards requests to the leader, so there is an answer once there is one.
            times.append(waited_s(lambda u=url: eventually(lambda: c.http.get(u + "/map").is_success)))  # type: ignore[misc]
            c.start(leader)
            eventually(c.healthy, within_s=60.0, what="the return of the one that was killed")
    return table(["kills", "until another leads"], [[len(times), spread(times)]])


def levels(folder: Path, seconds: float = 10.0) -> str:
    """Measure the throughput of four clients that push as fast as they can, at each level in turn."""
    rows = []
    with chaos_cluster(folder / "levels", Plan(shards=2)) as c:
        for size in (16 * 1024, 4 * MIB):
            rates: dict[str, float] = {}
            for ack in ("applied", "journaled", "fsynced"):
                name = f"{ack}-{size}"
                with redis.Redis(port=c.redis_port) as connection:  # which cannot offer `fsynced` otherwise
                    connection.config_set("appendfsync", "always" if ack == "fsynced" else "everysec")
                model = c.client.create_model(name, {"w": (size // 4,)}, optimizer=ps.SGD(), partitions=8, ack=ack)
                rates[ack] = rate(c, name, size, seconds)
                model.delete()
            rows += [
                [f"{size // 1024} KiB", ack, f"{r:.0f}", f"{r * size / MIB:.0f}", f"{100 * r / rates['applied']:.0f} %"]
                for ack, r in rates.items()
            ]
    return table(["gradient", "level", "pushes/s", "MiB/s", "of `applied`"], rows)


def rate(c: ChaosCluster, model: str, size: int, seconds: float, senders: int = 4) -> float:
    """Return the total pushes per second of several senders."""
    done = [0] * senders
    gradient = {"w": np.full(size // 4, 1e-3, np.float32)}
    stop = threading.Event()

    def send(i: int) -> None:
        with ps.connect(c.url, timeout=60.0) as client:
            while not stop.is_set():
                client.model(model).push(gradient)
                done[i] += 1

    threads = [threading.Thread(target=send, args=(i,), daemon=True) for i in range(senders)]
    for t in threads:
        t.start()
    eventually(lambda: min(done) > 5, what="the first pushes")
    before, began = sum(done), time.monotonic()
    stop.wait(seconds)
    after, ended = sum(done), time.monotonic()
    stop.set()
    for t in threads:
        t.join(60)
    return (after - before) / (ended - began)


def window(folder: Path) -> str:
    """Measure the memory per worker and partition, by the number of remembered pushes."""
    rows = []
    for seqs in (1, 4, 16, 64):
        workers = 1000
        gc.collect()
        tracemalloc.start()
        memory = PushMemory()
        for w in range(workers):
            for seq in range(1, seqs + 1):
                memory.record(PushId(f"run-0000/w{w}", 1, seq), None, 1 << 60, 1_000_000 + seq)
        exported = memory.export()  # windows keep that, until they change
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        stored = len(msgpack.packb(exported))
        rows.append([seqs, round(used / workers), round(stored / workers)])
    return table(["pushes remembered", "bytes in memory", "bytes in a snapshot"], rows)


FIGURES: dict[str, Callable[[Path], str]] = {f.__name__: f for f in (recovery, takeover, levels, window)}


def machine() -> str:
    """Describe the machine that the figures were measured on."""
    cores = f"{os.cpu_count()} cores, {platform.machine()}"
    return f"{cores}, Python {platform.python_version()}, everything on one machine"


def shown(name: str, figures: dict[str, Callable[[Path], str]], command: str, *, into_docs: bool) -> None:
    """Measure and print one figure; `into_docs`: also write it to docs/promises.md."""
    with tempfile.TemporaryDirectory(prefix="paramserver-") as folder:
        text = f"{figures[name](Path(folder))}\n\n`{command}`, {machine()}."
    print(f"{name}\n\n{text}\n", flush=True)
    if into_docs:
        write(name, text, PROMISES)


def arguments(names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield (name, whether to write it to the docs) of each figure named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=[*names, "all"])
    parser.add_argument("--write", action="store_true", help="replace the table in docs/promises.md")
    given = parser.parse_args()
    for name in names if given.what == "all" else [given.what]:
        yield name, given.write


def main() -> None:
    """Measure the figures named on the command line."""
    for name, into_docs in arguments(list(FIGURES)):
        shown(name, FIGURES, f"python -m tests.chaos.figures {name}", into_docs=into_docs)


if __name__ == "__main__":
    main()
