"""`make compose-test`: check the compose file on a real Docker engine, from the build to the removal.

    python -m tests.compose.check [--write]        --write replaces the table in docs/promises.md

The stack starts, trains, serves a client on this machine, survives the death of a shard, both schedulers, Redis and a
worker, scales to four shards, continues after `down`, and leaves nothing behind.  The project has its own name and
ports, so a stack that is already running is not touched.
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import paramserver as ps

from .stack import BASES, PROJECT, ROOT, Failed, Stack, docker, sizes_mb, until

DOCS = ROOT / "docs" / "promises.md"
BEGIN, END = "<!-- compose -->\n", "<!-- /compose -->\n"
IMAGES = ("paramserver-server", "paramserver-worker-cpu")


class Check:
    """The steps of the check and the figures they measured."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.rows: list[tuple[str, str]] = []
        self._client: ps.Client | None = None
        self.up_s = 0.0

    def note(self, what: str, value: str) -> None:
        """Add a figure to the table and print it."""
        self.rows.append((what, value))
        print(f"{time.strftime('%H:%M:%S')}  {what}: {value}", flush=True)

    @property
    def client(self) -> ps.Client:
        """A client on this machine, connected to the one published address."""
        if self._client is None:
            token = self.stack.compose("exec", "-T", "scheduler-1", "psctl", "token").strip()
            self._client = ps.connect(f"http://127.0.0.1:{self.stack.port}", timeout=60.0, token=token)
        return self._client

    def live(self) -> dict[str, Any]:
        """Return the status of the model whose run is in progress."""
        run = next(r for r in self.client.runs(timeout=2.0) if r["state"] == "running")
        found = {m["name"]: m for m in self.client.status(timeout=2.0)["models"]}
        return dict(found[run["model"]])

    def progress(self) -> tuple[str, int]:
        """Return (model, version) of the run in progress."""
        model = self.live()
        return str(model["name"]), int(model["version"])

    def trains_within(self, what: str, within_s: float = 60.0, updates: int = 20) -> float:
        """Wait until training has made `updates` more updates and return the seconds that took.

        If a new run has begun meanwhile, its updates count from zero.
        """
        seen: list[tuple[str, int]] = []

        def grown() -> bool:
            seen.append(self.progress())
            return seen[-1][1] >= updates + (seen[0][1] if seen[-1][0] == seen[0][0] else 0)

        return until(grown, what, within_s)

    # --- the steps ---

    def comes_up(self) -> None:
        """The images build, and `up --wait` from nothing succeeds, including the one-shot services."""
        began = time.monotonic()
        self.stack.compose("build", timeout_s=3600.0)
        self.note("build", f"{time.monotonic() - began:.0f} s")
        began = time.monotonic()
        self.stack.compose("up", "--detach", "--wait", timeout_s=300.0)
        self.up_s = time.monotonic()
        self.note("`up --wait`, from nothing to all ready", f"{self.up_s - began:.1f} s")
        took = self.trains_within("the first updates")
        self.note("until the first run has 20 updates", f"{took:.1f} s")
        starts = [
            self.stack.logged_after_s("scheduler-1", "scheduler."),
            *(self.stack.logged_after_s("shard", "joined as", i) for i in (1, 2)),
        ]
        self.note(
            "start of a container until it is ready, all at once (scheduler, shards)",
            ", ".join(f"{s:.1f} s" for s in starts),
        )

    def serves_this_machine(self) -> None:
        """A client on the host creates a model, pushes and pulls, although it reaches only one address."""
        model = self.client.create_model("mine", {"w": (1000,)}, optimizer=ps.SGD(lr=1.0), partitions=8)
        with model.worker() as worker:
            began = time.monotonic()
            for _ in range(20):
                worker.pull()
                worker.step({"w": np.ones(1000, np.float32)})
            each_ms = (time.monotonic() - began) / 20 * 1e3
        np.testing.assert_array_equal(model.pull()["w"], np.full(1000, -20.0, np.float32))
        model.delete()
        self.note("pull and push of a client on the host, through 8700", f"{each_ms:.0f} ms")

    def learns(self) -> None:
        """The accuracy that the status page plots reaches 90 %."""

        def accuracy() -> float:
            return float(self.live()["latest"].get("accuracy", (0.0, 0.0))[1])

        until(lambda: accuracy() >= 0.9, "an accuracy of 90 %", 150.0)
        self.note("until 90 % of the test images are recognized", f"{time.monotonic() - self.up_s:.0f} s after `up`")

    def shares_memory(self) -> None:
        """Workers see the sockets of both shards in shared memory, and a shard has mapped memory there."""
        out = self.stack.compose("exec", "-T", "worker", "sh", "-c", "ls /run/shared/*/*/requests | wc -l")
        if int(out) != 2:
            raise Failed(f"workers see {out.strip()} shards in shared memory")
        used = self.stack.compose("exec", "-T", "shard", "sh", "-c", "grep -c /run/shared/ /proc/1/maps || true")
        if not int(used):
            raise Failed("no shard keeps values in the shared memory")

    def survives(self, service: str, index: int = 1) -> None:
        """After SIGKILL of a container's main process, training continues and the engine restarts the container."""
        before = int(self.stack.container(service, index)["RestartCount"])
        at: list[tuple[str, int]] = []

        def trains() -> bool:
            at.append(self.progress())  # raises between two runs
            return True

        until(trains, "a run in progress", 60.0)
        began = time.monotonic()
        self.stack.kill(service, index)
        until(lambda: self.progress() > at[0] or self.progress()[0] != at[0][0], f"training without {service}", 60.0)
        self.trains_within(f"training after the death of {service}")
        took = time.monotonic() - began
        until(lambda: self.stack.restarted(service, index, before), f"the return of {service}-{index}", 60.0)
        seen = ", seen through its own port" if service == "scheduler-1" else ""
        self.note(f"`kill -9` of {service}: training goes on after", f"{took:.1f} s{seen}")
        until(self.is_whole, "everybody alive again", 60.0)

    def is_whole(self) -> bool:
        """Whether every container is running and healthy, and there are as many live shards as shard containers."""
        rows = [r for r in self.stack.containers() if r["Service"] != "secrets"]
        alive = sum(bool(s["alive"]) for s in self.shards())
        well = [r for r in rows if r["State"] == "running" and r.get("Health") in ("", "healthy")]
        return len(well) == len(rows) and alive == len([r for r in rows if r["Service"] == "shard"])

    def shards(self) -> list[dict[str, Any]]:
        """Return the shards as the scheduler lists them."""
        return list(self.client.request("GET", "/shards", timeout=2.0)["items"])

    def scales(self, count: int) -> None:
        """After scaling to `count` shards during training, each has partitions and training continues."""
        began = time.monotonic()
        self.stack.env["SHARDS"] = str(count)
        self.stack.compose("up", "--detach", "--wait", "--no-recreate", timeout_s=120.0)

        def spread() -> bool:
            alive = [s for s in self.shards() if s["alive"]]
            return len(alive) == count and all(s["partitions"] for s in alive) and not any(s["moves"] for s in alive)

        until(spread, f"partitions on {count} shards", 120.0)
        self.note(f"scaled to {count} shards, with partitions on each", f"{time.monotonic() - began:.1f} s")
        self.trains_within(f"training on {count} shards")

    def is_watched(self) -> None:
        """Prometheus scrapes every node with its token, and Grafana has the dashboard."""
        query = ("promtool", "query", "instant", "--format", "json", "http://127.0.0.1:9090", "sum(up)")

        def scraped() -> bool:
            found = json.loads(self.stack.compose("exec", "-T", "prometheus", *query))
            alive = [s for s in self.shards() if s["alive"]]
            return float(found[0]["value"][1]) == 2 + len(alive)

        until(scraped, "a scrape of every node", 90.0)
        url = f"http://127.0.0.1:{self.stack.grafana_port}/api/search"
        until(lambda: b"paramserver" in urllib.request.urlopen(url, timeout=2).read().lower(), "the dashboard", 60.0)

    def goes_on(self) -> None:
        """A run in another mode follows; all services stop cleanly, and `down` and `up` keep the runs and training."""
        until(lambda: len(self.modes()) > 1, "a run in another mode", 200.0)
        before = {r["id"] for r in self.client.runs()}
        began = time.monotonic()
        self.stack.compose("stop", timeout_s=120.0)
        took = time.monotonic() - began
        codes = {
            r["Name"]: r["ExitCode"] for r in self.stack.containers() if r["Service"] not in ("prometheus", "grafana")
        }
        if any(code not in (0, 143) for code in codes.values()):
            raise Failed(f"not everything stopped in good order: {codes}")
        self.note("stop of everything", f"{took:.1f} s")
        self.stack.compose("down", timeout_s=120.0)
        began = time.monotonic()
        self.stack.compose("up", "--detach", "--wait", timeout_s=300.0)
        self.note("`up --wait` on what was kept", f"{time.monotonic() - began:.1f} s")
        self._client = None
        if not before <= {r["id"] for r in self.client.runs()}:
            raise Failed("`down` and `up` lost runs")
        self.trains_within("training after `down` and `up`")

    def starts_alone(self) -> None:
        """Measure how long a node takes to start while nothing trains and no other node starts."""
        self.stack.compose("stop", "series", "worker")
        took: list[str] = []
        for service, said in (("scheduler-2", "scheduler."), ("shard", "joined as")):
            docker("restart", f"{PROJECT}-{service}-1")
            until(partial(self.stack.logged_after_s, service, said), f"the start of {service}-1", 60.0)
            took.append(f"{self.stack.logged_after_s(service, said):.1f} s")
        self.note("start of a container until it is ready, by itself (scheduler, shard)", ", ".join(took))

    def modes(self) -> set[str]:
        """Return the consistency modes of the existing models."""
        models = [self.client.model(name).info() for name in self.client.models()]
        return {str(m["spec"]["consistency"]["mode"]) for m in models}

    def goes(self) -> None:
        """`down -v` leaves no container, volume or network."""
        self.stack.remove()
        if left := self.stack.left():
            raise Failed(f"down -v left {left}")

    def measures_images(self) -> None:
        """Measure the image sizes, and our share of them, since the base may differ from the published one."""
        version = ps.__version__
        for image in IMAGES:
            whole, ours = sizes_mb(f"{image}:{version}", BASES[0])
            self.note(f"image {image}", f"{whole:.0f} MB, {ours:.0f} MB of it above {BASES[0]}")


def steps(check: Check) -> list[Callable[[], None]]:
    """Return the steps in order."""
    return [
        check.comes_up,
        check.shares_memory,
        check.serves_this_machine,
        check.learns,
        lambda: check.survives("shard", 1),
        lambda: check.survives("scheduler-2"),
        lambda: check.survives("scheduler-1"),
        lambda: check.survives("redis"),
        lambda: check.survives("worker", 1),
        lambda: check.scales(4),
        check.is_watched,
        lambda: check.scales(2),
        check.goes_on,
        check.starts_alone,
        check.goes,
        check.measures_images,
    ]


@contextmanager
def stack() -> Any:
    """Yield the compose project, removed at the end; if a step fails, its containers and last logs are printed."""
    found = Stack()
    if found.left():
        raise Failed(f"a project {PROJECT} is there already: docker compose -p {PROJECT} down -v")
    try:
        yield found
    except BaseException:
        print(found.compose("ps", "--all"), found.compose("logs", "--no-color", "--tail", "25"), sep="\n", flush=True)
        raise
    finally:
        found.remove()


def main() -> int:
    """Run all steps and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the table in docs/promises.md")
    into_docs: bool = parser.parse_args().write
    try:
        engine = docker("version", "--format", "{{.Server.Version}}").strip()
        compose = docker("compose", "version", "--short").strip()
    except (OSError, Failed, subprocess.TimeoutExpired) as e:
        print(f"needs a Docker engine with compose: {e}", file=sys.stderr)
        return 2
    with stack() as found:
        check = Check(found)
        for step in steps(check):
            step()
    lines = ["| what | measured |", "|---|---|", *(f"| {what} | {value} |" for what, value in check.rows)]
    text = "\n".join(lines) + f"\n\n`make compose-test`, Docker Engine {engine}, compose {compose}, 2 cores.\n"
    print(f"\n{text}")
    if into_docs:
        write(DOCS, text)
    return 0


def write(path: Path, text: str) -> None:
    """Replace the text between the marks; raises Failed if there are none."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise Failed(f"{path} has no place for it, between {BEGIN.strip()} and {END.strip()}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
