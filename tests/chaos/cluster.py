"""A cluster under test, as a test uses it: its keeper, load, fault injection and health checks."""

import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import redis
from tests.waiting import eventually

import paramserver as ps

from . import load
from .history import History, Recorder, read
from .keeper import Plan, words
from .load import Job
from .proxy import Way


class ChaosCluster:
    """Redis, schedulers and shards under a keeper, with the faults that a test injects; every fault is recorded."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.records = folder / "history"
        self._keeper = subprocess.Popen(
            words(folder / "nodes", plan), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=load.ROOT, text=True
        )
        self._loads: list[subprocess.Popen[bytes]] = []
        self._begun = 0
        self._jobs: list[Job] = []
        self._read: dict[Path, int] = {}
        """Bytes of each history file that `progress` has read."""
        self._acknowledged: Counter[tuple[str, int]] = Counter()
        self.recorder = Recorder(self.records / "nemesis.jsonl")
        first = self._answer()
        self.redis_port: int = first["redis_port"]
        self.urls: list[str] = first["schedulers"]
        self.url = ",".join(self.urls)
        self.shard_urls: list[str] = first["shards"]
        self.http = httpx.Client(timeout=10.0, trust_env=False)
        self.client: ps.Client
        """The test's own client; set once the cluster has started."""

    # --- the keeper

    def _answer(self) -> Any:
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        assert line, f"the keeper has ended with {self._keeper.poll()}"
        return json.loads(line)

    def order(self, do: str, **what: Any) -> Any:
        """Send an order to the keeper and return its answer; fail if it is refused."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self._keeper.stdin.flush()
        answer = self._answer()
        assert "error" not in answer, answer
        return answer["ok"]

    def process(self, name: str) -> Mapping[str, Any]:
        """Return pid and deaths of one process."""
        found: Mapping[str, Any] = self.order("status")["processes"][name]
        return found

    # --- faults

    def signal(self, who: str, number: signal.Signals, **how: Any) -> None:
        """Send a signal to a process.

        `hold` prevents its restart until `start`.  `env` lists environment variables for each of its next starts, and
        `bug` names a bug planted in its next start.
        """
        self.recorder.fault(f"{number.name} {who} {how or ''}")
        self.order("signal", who=who, signal=int(number), **how)

    def kill(self, who: str, **how: Any) -> None:
        """Send SIGKILL and wait until the process is dead; it is restarted unless `hold`."""
        before = len(self.process(who)["deaths"])
        self.signal(who, signal.SIGKILL, **how)
        self.end_of(who, before, within_s=30.0)

    def end_of(self, who: str, after: int, within_s: float) -> int:
        """Wait until a process has died more than `after` times and return the exit status of that death."""

        def codes() -> list[int]:
            return [code for _, code in self.process(who)["deaths"]][after:]

        return eventually(codes, within_s=within_s, what=f"the end of {who}")[0]

    def start(self, who: str) -> None:
        """Start a process whose restart was held back."""
        self.recorder.fault(f"start {who}")
        self.order("start", who=who)

    def cut(self, link: str, way: Way = "both") -> None:
        """Hold the bytes of a link, or of one direction of it."""
        self.recorder.fault(f"cut {link} {way}")
        self.order("cut", link=link, way=way)

    def lose(self, link: str) -> None:
        """Lose the connections that a link has now, without a word to either end."""
        self.recorder.fault(f"lose {link}")
        self.order("lose", link=link)

    def delay(self, link: str, seconds: float) -> None:
        """Delay every chunk on a link by `seconds`."""
        self.recorder.fault(f"delay {link} {seconds}")
        self.order("delay", link=link, seconds=seconds)

    def reset(self, link: str) -> None:
        """Reset the connections of a link; new ones are carried."""
        self.recorder.fault(f"reset {link}")
        self.order("reset", link=link)

    def heal(self) -> None:
        """Let all links forward everything again."""
        self.recorder.fault("heal all")
        self.order("heal")

    def links(self, of: str) -> list[str]:
        """Return the names of all links that start or end at that node."""
        return [name for name in self.order("status")["links"] if of in name.split(">")]

    # --- health

    def leader(self) -> str:
        """Return the name of the leading scheduler."""
        if len(self.urls) == 1:
            return "scheduler-0"

        def held() -> bytes | None:
            with redis.Redis(port=self.redis_port, socket_timeout=2.0) as connection:
                try:
                    found: bytes | None = connection.get("ps:leader")
                except redis.RedisError:  # Redis may be restarting
                    return None
                return found

        document = eventually(held, what="a leader")
        port = json.loads(document or "")["place"].rsplit(":", 1)[1]
        return f"scheduler-{self.urls.index(f'http://127.0.0.1:{port}')}"

    def get(self, path: str) -> Any:
        """Return the JSON answer of the first scheduler that answers with success."""
        last: Exception = AssertionError("no scheduler")
        for url in self.urls:
            try:
                answer = self.http.get(url + path)
                answer.raise_for_status()
                return answer.json()
            except httpx.HTTPError as e:
                last = e
        raise last

    def owned(self, shard: str) -> list[tuple[str, int]]:
        """Return the (model, partition) pairs that the scheduler assigns to a shard."""
        out = []
        for name in self.client.models(timeout=10.0):
            out += [(name, p["index"]) for p in self.get(f"/models/{name}")["partitions"] if p["shard"] == shard]
        return out

    def healthy(self) -> bool:
        """Whether every node is ready, every shard alive, and every model can be pulled."""
        for url in (*self.urls, *self.shard_urls):
            if self.http.get(url + "/readyz").status_code != 200:
                return False
        shards = self.get("/map")["shards"]
        if len(shards) < self.plan.shards or not all(s["alive"] for s in shards.values()):
            return False
        for model in self.client.models(timeout=5.0):
            self.client.model(model).pull(timeout=5.0)
        return True

    def until_healthy(self, within_s: float = 60.0) -> None:
        """Wait for `healthy`, and then for progress of every worker."""
        eventually(self.healthy, within_s=within_s, what="the cluster's recovery")
        self.until_progress(within_s=within_s)

    def until_progress(self, more: int = 3, within_s: float = 60.0, mode: str = "") -> None:
        """Wait until each worker of each model (of that mode) has `more` further pushes acknowledged."""
        before = {k: n for k, n in self.progress().items() if k[0].startswith(mode)}
        eventually(
            lambda: all(self.progress()[k] >= n + more for k, n in before.items()),
            within_s=within_s,
            what=f"{more} more pushes of every worker ({before} until then)",
        )

    def progress(self) -> dict[tuple[str, int], int]:
        """Return the acknowledged pushes of each (model, worker)."""
        for path in self.records.glob("load-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines = file.read().split(b"\n")[:-1]
                self._read[path] = self._read.get(path, 0) + sum(map(len, lines)) + len(lines)
            for record in map(json.loads, lines):
                assert record["op"] != "error", record
                if record.get("result") == "ok":
                    self._acknowledged[record["model"], record["by"]] += 1
        return {(job.model, job.worker): self._acknowledged[job.model, job.worker] for job in self._jobs}

    # --- load

    def load(self, jobs: Sequence[Job], url: str = "") -> None:
        """Start a load process with these jobs; `url`: by which it reaches the cluster, if not directly."""
        self._jobs += jobs
        self._begun += 1
        self._loads.append(load.begin(self.records / f"load-{self._begun}.jsonl", url or self.url, jobs))

    def kill_load(self, index: int) -> None:
        """SIGKILL a load process in the middle of its work; no other process takes over its jobs."""
        self.recorder.fault(f"SIGKILL load {index}")
        process = self._loads.pop(index)
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()

    def stop_load(self, within_s: float = 120.0) -> None:
        """Stop all load processes; fail if one hangs or has died."""
        for process in self._loads:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._loads:
            assert process.wait(within_s) == 0, (self.records / "load.log").read_text()
        self._loads.clear()
        self._jobs.clear()

    def history(self) -> History:
        """Return everything recorded until now."""
        return read(self.records)

    def look(self, job: Job, epoch: int = 0) -> None:
        """Record a pull of a model by a client that is not one of its workers."""
        start, model = time.monotonic(), self.client.model(job.model)
        values = model.pull(timeout=60.0)
        outsider = Job(job.model, -1, job.workers, job.mode)
        load.write_pull(self.recorder, outsider, start, values, load.bounds_of(self.client, job.model), epoch)

    # --- the end

    def close(self) -> None:
        """Stop the load and the keeper, and thereby all nodes."""
        for process in self._loads:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self.http.close()
        if hasattr(self, "client"):
            self.client.close()
        self.recorder.close()
        for pipe in (self._keeper.stdin, self._keeper.stdout):
            assert pipe is not None
            pipe.close()
        self._keeper.wait(30)

    def logs(self, last: int = 3000) -> str:
        """Return the end of each process's log."""
        files = sorted([*(self.folder / "nodes").glob("*.log"), *self.records.glob("*.log")])
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-last:]}" for f in files)


@contextmanager
def chaos_cluster(folder: Path, plan: Plan) -> Iterator[ChaosCluster]:
    """Yield a healthy cluster, which is stopped at the end of the block; its logs are printed if the block fails."""
    running = ChaosCluster(folder, plan)
    try:
        eventually(lambda: running.get("/livez"), within_s=60.0, what="the scheduler's start")
        running.client = ps.connect(running.url, timeout=60.0)
        eventually(running.healthy, within_s=60.0, what="the start")
        yield running
    except BaseException:
        print(running.logs())
        raise
    finally:
        running.close()
