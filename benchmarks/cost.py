"""Costs of a push besides its own bytes, and memory of a shard, measured on our own cluster.

Latencies are medians of pushes of 1 KB, measured in turns with the pushes they are compared with.
"""

import multiprocessing as mp
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from benchmarks.meters import forget_peaks, median, memory_bytes, percentile
from benchmarks.systems.bare_socket import BareSocket
from benchmarks.systems.ours import Way, cluster
from benchmarks.systems.process import child
from benchmarks.tables import number, table
from benchmarks.workloads import Client, Work

import paramserver as ps

SMALL = 256
WORKERS = (1, 10, 100, 1000)
PARTITIONS = (8, 64, 512, 4096)
CONNECTIONS = 1000
TURNS = 5
BIG_ELEMENTS = 16 << 20
"""64 MiB."""
HELD_ELEMENTS = 10_000_000
WAYS: tuple[tuple[Way, str], ...] = (("same-host", "same host"), ("http2", "HTTP/2"))
Figures = dict[str, Any]


def measured(*, quick: bool) -> Iterator[tuple[str, Figures]]:
    """Yield (name, figures) of each measurement; the figures of a failed one are its `error`."""
    for name, measure in MEASUREMENTS.items():
        print(f"cost: {name}", file=sys.stderr, flush=True)
        try:
            yield name, measure(quick)
        except Exception as e:
            traceback.print_exc()
            yield name, {"error": f"{type(e).__name__}: {e}"}


@contextmanager
def connected(way: Way) -> Iterator[tuple[ps.Client, dict[str, Any]]]:
    """Yield a client of a new cluster with one shard, and the output of `psctl up`."""
    with cluster(way, 1) as found, ps.connect(found["scheduler"], token=found.get("token")) as client:
        yield client, found


def taken_us(call: Callable[[], object], times: int) -> list[float]:
    """Return the microseconds of each call."""
    out = []
    for _ in range(times):
        at = time.perf_counter()
        call()
        out.append(1e6 * (time.perf_counter() - at))
    return out


def in_turns(calls: Sequence[Callable[[], object]], times: int) -> list[float]:
    """Return the median microseconds of each call, measured in turns after a warm-up."""
    every: list[list[float]] = [[] for _ in calls]
    for call in calls:
        taken_us(call, 20)
    for _ in range(TURNS):
        for call, found in zip(calls, every, strict=True):
            found += taken_us(call, times)
    return [median(found) for found in every]


def small_model(client: ps.Client, name: str) -> ps.Model:
    return client.create_model(name, {"w": (SMALL,)}, optimizer=ps.SGD(lr=2.0**-10))


Prepare = Callable[[ps.Client, Mapping[str, Any], int, ExitStack], Callable[[], object]]
"""Set up `count` of something in a cluster and return the call to be timed."""


def by_count(counts: Sequence[int], times: int, prepare: Prepare) -> Figures:
    """Time the call for each count, each in its own cluster; the clusters run at the same time and take turns."""
    with ExitStack() as stack:
        calls = []
        for count in counts:
            client, found = stack.enter_context(connected("http2"))
            calls.append(prepare(client, found, count, stack))
        return {"counts": list(counts), "us": in_turns(calls, times)}


def workers(quick: bool) -> Figures:
    """Time a push to a model with more and more workers that have pushed once and are idle since."""
    ones = np.ones(SMALL, np.float32)

    def prepare(client: ps.Client, found: Mapping[str, Any], count: int, stack: ExitStack) -> Callable[[], object]:
        model = small_model(client, "workers")
        for i in range(count):
            joined = client.request("POST", "/models/workers/workers", {"name": f"w{i}", "lease_s": 600})
            body = {"model": model.name, "grads": {"w": ones.tolist()}, "seq": 1, "clock": 0}
            client.request("POST", "/push", body | {"worker": joined["worker"], "epoch": joined["epoch"]})
        return partial(model.push, ones)

    figures = by_count(WORKERS, 20 if quick else 200, prepare)
    return figures | {"workers_ratio": figures["us"][-1] / figures["us"][0]}


def partitions(quick: bool) -> Figures:
    """Time a push to one partition of a model with more and more partitions."""
    width = 64
    ones = {"w": np.ones(width, np.float32)}

    def prepare(client: ps.Client, found: Mapping[str, Any], count: int, stack: ExitStack) -> Callable[[], object]:
        params = {"w": (count * width,)}
        model = client.create_model("partitions", params, optimizer=ps.SGD(lr=2.0**-10), partitions=count)
        return partial(model.push, ones, ranges={"w": [(0, width)]})

    figures = by_count(PARTITIONS, 20 if quick else 200, prepare)
    return figures | {"partitions_ratio": figures["us"][-1] / figures["us"][0]}


def connections(quick: bool) -> Figures:
    """Time a push without and with many connections to the shard that have made one request and are idle since."""
    ones = np.ones(SMALL, np.float32)

    def prepare(client: ps.Client, found: Mapping[str, Any], count: int, stack: ExitStack) -> Callable[[], object]:
        address = urlsplit(found["shards"][0])
        for _ in range(count):
            s = stack.enter_context(socket.create_connection((address.hostname or "", address.port or 0), 10.0))
            s.sendall(b"GET /livez HTTP/1.1\r\nHost: bench\r\n\r\n")
            if b" 200 " not in s.recv(4096):
                raise RuntimeError("the shard did not answer a connection")
        return partial(small_model(client, "connections").push, ones)

    figures = by_count((0, CONNECTIONS), 20 if quick else 200, prepare)
    return figures | {"connections_ratio": figures["us"][-1] / figures["us"][0]}


def transfer_on(url: str, token: str | None) -> None:
    """Pull and push 64 MiB until the process is killed."""
    with ps.connect(url, token=token) as client:
        model, ones = client.model("big"), np.ones(BIG_ELEMENTS, np.float32)
        values = model.pull()
        while True:
            model.push(ones)
            values = model.pull(out=values)


def bare_transfer_on(connect: Callable[[Work, int], Client], work: Work, rounds: "Synchronized[int]") -> None:
    """Do the same over plain sockets until the process is killed, and count the rounds in `rounds`."""
    client, ones = connect(work, 0), np.ones(work.elements, np.float32)
    while True:
        client.push(ones)
        client.pull()
        rounds.value += 1


def small_calls(quick: bool) -> Figures:
    """Time pulls of 1 KB on an idle system, and beside a process that pulls and pushes 64 MiB."""
    seconds = 1.0 if quick else 6.0
    out: Figures = {"rows": []}
    for way, label in WAYS:
        with connected(way) as (client, found):
            model = small_model(client, "small")
            client.create_model("big", {"w": (BIG_ELEMENTS,)}, optimizer=ps.SGD(lr=2.0**-10))
            pull, moved = partial(model.pull, out=model.pull()), partial(_version, client.model("big"))
            transfer = partial(transfer_on, found["scheduler"], found.get("token"))
            out["rows"].append([label, *_beside(pull, transfer, moved, seconds)])
    out["small_p99_ratio"] = out["rows"][-1][-1]
    small, big, floor = Work("W3", SMALL), Work("W1", BIG_ELEMENTS), BareSocket()
    rounds: Synchronized[int] = mp.get_context("spawn").Value("q", 0)
    with floor.start(small) as one, floor.start(big) as other:
        bare = partial(bare_transfer_on, other.connect, big, rounds)
        out["rows"].append([floor.label, *_beside(one.connect(small, 0).pull, bare, lambda: rounds.value, seconds)])
    return out


def _beside(
    pull: Callable[[], object], transfer: Callable[[], None], moved: Callable[[], int], seconds: float
) -> list[float]:
    """Return p50 and p99 of a pull in milliseconds, idle and beside `transfer`, and the ratio of the two p99.

    `transfer` runs in a process of its own; `moved` returns its number of rounds.
    """
    idle, first = _taken_ms(pull, seconds), moved()
    with child(transfer):
        _wait(lambda: moved() >= first + 2)
        beside = _taken_ms(pull, seconds)
    p99 = percentile(idle, 99), percentile(beside, 99)
    return [percentile(idle, 50), p99[0], percentile(beside, 50), p99[1], p99[1] / p99[0]]


def _taken_ms(call: Callable[[], object], seconds: float) -> list[float]:
    end = time.perf_counter() + seconds
    out: list[float] = []
    while time.perf_counter() < end:
        out += taken_us(call, 20)
    return [us / 1e3 for us in out]


def _version(model: ps.Model) -> int:
    return model.pull(ranges={"w": [(0, 1)]}).version


def _wait(probe: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not probe():
        if time.monotonic() > deadline:
            raise RuntimeError("the transfers did not begin")
        time.sleep(0.05)  # the other process does not signal its progress, and a probe may be a request


def memory(quick: bool) -> Figures:
    """Measure the peak memory of a shard, in sizes of the model, while one and while two clients push continuously."""
    rounds = 3 if quick else 10
    out: Figures = {"rows": []}
    for way, label in WAYS:
        with connected(way) as (client, found):
            pids = [int(p) for p in found["pids"]["shards"]]
            base = memory_bytes(pids, "VmRSS")
            client.create_model("held", {"w": (HELD_ELEMENTS,)}, optimizer=ps.SGD(lr=2.0**-10))
            peaks = []
            for count in (1, 2):
                forget_peaks(pids)
                _push_together(found, count, rounds)
                peaks.append((memory_bytes(pids, "VmHWM") - base) / (4 * HELD_ELEMENTS))
        out["rows"].append([label, *peaks])
        out[f"rss_one_push_{way}"] = peaks[0]
        out[f"rss_more_pushes_{way}"] = peaks[1] - peaks[0]
    return out


def _push_together(found: Mapping[str, Any], count: int, rounds: int) -> None:
    ones = np.ones(HELD_ELEMENTS, np.float32)
    failed: list[Exception] = []

    def push() -> None:
        try:
            with ps.connect(found["scheduler"], token=found.get("token")) as client:
                for _ in range(rounds):
                    client.model("held").push(ones)
        except Exception as e:
            failed.append(e)

    threads = [threading.Thread(target=push) for _ in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise failed[0]


def growth(quick: bool) -> Figures:
    """Measure the memory of a shard after 1,000 rounds of pulling and pushing 0.4 MB, and after 10,000 more."""
    first, then = (50, 200) if quick else (1000, 10_000)
    ones = np.ones(100_000, np.float32)
    out: Figures = {"rows": [], "rounds": [first, first + then]}
    for way, label in WAYS:
        with connected(way) as (client, found):
            pids = [int(p) for p in found["pids"]["shards"]]
            model = client.create_model("growth", {"w": (ones.size,)}, optimizer=ps.SGD(lr=2.0**-10))
            held = []
            values = model.pull()
            for rounds in (first, then):
                for _ in range(rounds):
                    values = model.pull(out=values)
                    model.push(ones)
                held.append(memory_bytes(pids, "VmRSS") / 2**20)
        out["rows"].append([label, *held])
    out["rss_growth"] = max(row[2] / row[1] for row in out["rows"])
    return out


MEASUREMENTS: dict[str, Callable[[bool], Figures]] = {
    f.__name__: f for f in (workers, connections, partitions, small_calls, memory, growth)
}
TITLES = {
    "workers": "workers that have pushed once",
    "connections": "idle connections to the shard",
    "partitions": "partitions of the model",
}


def tables(found: Mapping[str, Figures]) -> str:
    """Return all measurements as Markdown tables."""
    out = []
    for name, figures in found.items():
        if "error" in figures:
            out.append(f"{name}: failed: {figures['error']}")
        elif name in TITLES:
            first = figures["us"][0]
            lines = [
                [f"{n:,}", number(us), f"{us / first:.2f}"]
                for n, us in zip(figures["counts"], figures["us"], strict=True)
            ]
            out.append(table([TITLES[name], "a push of 1 KB or less, µs", "of the first"], lines))
        elif name == "small_calls":
            columns = ["a pull of 1 KB, ms", "idle p50", "p99", "beside 64 MiB transfers p50", "p99", "p99 of idle"]
            out.append(table(columns, [[row[0], *map(number, row[1:])] for row in figures["rows"]]))
        elif name == "memory":
            lines = [[label, f"{one:.2f}x", f"{two:.2f}x"] for label, one, two in figures["rows"]]
            out.append(table(["peak RSS of the shard over the model (40 MB)", "1 push in flight", "2"], lines))
        else:
            columns = ["RSS of the shard, MiB", *(f"after {n:,} rounds" for n in figures["rounds"]), "of before"]
            lines = [[label, f"{a:.1f}", f"{b:.1f}", f"{b / a:.3f}"] for label, a, b in figures["rows"]]
            out.append(table(columns, lines))
    return "\n\n".join(out)
