"""What a cluster on this machine leaves in its state directory, and which clusters run.

cluster.json      the object that `psctl up --json` prints, with the process ids of now
supervisor.json   who looks after it, how far it is, its workers
plan.json         what it was asked to run; SIGUSR1 tells the supervisor that it was changed
logs/NAME.log     what each process printed
secret            what tokens are made with, where other machines can reach the cluster
redis/            the Redis server's own files
checkpoints/      what the scheduler writes

lock              held (flock) by the supervisor: whether a cluster runs is never read from a file that may be stale
"""

import json
import os
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import psutil

from paramserver.errors import problem

if sys.platform != "win32":
    import fcntl

MODULE = "paramserver_cli.supervisor"

Phase = Literal["starting", "ready", "stopping", "failed"]


@dataclass(frozen=True)
class Plan:
    """What a supervisor is to run."""

    shards: int = 2
    workers: int = 0
    redis: str | None = None
    """URL of a Redis server that somebody else runs; None: start one."""
    host: str = "127.0.0.1"
    port: int | None = None
    """First port of the block; None: the default block if it is free, else another."""
    scheduler: str | None = None
    """URL of a cluster that runs already (several separated by commas): then only workers are started, for it."""
    allow: list[str] = field(default_factory=lambda: ["paramserver.examples"])
    """Prefixes of the entry points that the workers may run."""
    paths: list[str] = field(default_factory=list)
    """Folders from which the workers may import."""
    insecure: bool = False
    """Whether other machines are let in without tokens."""
    schedulers: int = 1


@dataclass(frozen=True)
class Cluster:
    """The object that `psctl up --json` prints; the field names are a promise to scripts."""

    scheduler: str
    """The first one's URL; any of them answers for all."""
    shards: list[str]
    redis: str
    """As it may be shown: without a password."""
    token: str | None
    """An admin's, where tokens are needed; made when it is printed, so that no file holds it."""
    pids: dict[str, list[int | None]]
    """Serving processes of `scheduler`, `shards` and `redis`, in the order of the URLs; null while one is restarted."""
    state_dir: str
    schedulers: list[str]
    """The URLs of all schedulers, `scheduler` first."""

    def is_at(self, urls: str) -> bool:
        """Whether one of these URLs, with commas between them, is a scheduler's of this cluster on this machine."""
        return bool({_spelled(u) for u in urls.split(",")} & {_spelled(u) for u in self.schedulers})


def _spelled(url: str) -> str:
    """A URL with this machine called by one name."""
    return re.sub(r"(?<=://)(localhost|\[::1\])(?=[:/]|$)", "127.0.0.1", url.strip().rstrip("/"))


@dataclass(frozen=True)
class SupervisorState:
    """How far a supervisor is."""

    pid: int
    phase: Phase
    workers: dict[str, int | None] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    error: str = ""
    """Why the phase is `failed`, or why the plan was not followed."""


class StateDir:
    """The files of one cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.logs = self.path / "logs"

        self.secret_file = self.path / "secret"

    def secret(self) -> str:
        """The cluster's secret; empty where it has none of its own."""
        try:
            return self.secret_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def log(self, name: str) -> Path:
        """The log of one process."""
        return self.logs / f"{name}.log"

    def write(self, document: Plan | Cluster | SupervisorState) -> None:
        """Write one of the files, as a whole or not at all."""
        name = {Plan: "plan", Cluster: "cluster", SupervisorState: "supervisor"}[type(document)]
        text = json.dumps(asdict(document), indent=2)
        temporary = self.path / f".{name}.{os.getpid()}"
        # A plan may hold the password of a Redis.
        with open(temporary, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            out.write(text + "\n")
        temporary.replace(self.path / f"{name}.json")

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            value = json.loads((self.path / f"{name}.json").read_text())
        except FileNotFoundError:
            return None
        if not isinstance(value, dict):
            raise problem("corrupt_state", f"{self.path / name}.json is not an object")
        return value

    def plan(self) -> Plan | None:
        """What was asked for; None if nothing ever was."""
        value = self._read("plan")
        return None if value is None else Plan(**value)

    def cluster(self) -> Cluster | None:
        """The cluster as last written; None before one was ready."""
        value = self._read("cluster")
        # One that an earlier version keeps running has one scheduler.
        return None if value is None else Cluster(**{"schedulers": [value.get("scheduler")], **value})

    def supervisor(self) -> SupervisorState | None:
        """The supervisor's state as last written."""
        value = self._read("supervisor")
        return None if value is None else SupervisorState(**value)

    def lock(self) -> IO[str] | None:
        """The lock that a supervisor holds while it runs, made ours; None if another holds it."""
        if sys.platform == "win32":
            return None
        self.logs.mkdir(parents=True, exist_ok=True)
        lock = (self.path / "lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return None
        return lock

    def is_running(self) -> bool:
        """Whether a supervisor looks after this directory now."""
        if sys.platform == "win32" or not (self.path / "lock").exists():
            return False
        lock = self.lock()
        if lock is not None:
            lock.close()
        return lock is None

    def forget(self) -> None:
        """Remove what described an earlier run of the cluster; its data and logs stay."""
        for name in ("cluster", "supervisor"):
            (self.path / f"{name}.json").unlink(missing_ok=True)

    def tail(self, name: str, lines: int = 20) -> str:
        """The last lines of one log."""
        try:
            with self.log(name).open("rb") as f:
                f.seek(max(0, f.seek(0, os.SEEK_END) - 200 * lines))
                return "\n".join(f.read().decode(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""


def running() -> list[StateDir]:
    """The state directories of this user's clusters that run, by path."""
    found: set[Path] = set()
    for process in psutil.process_iter(["cmdline", "uids"]):
        argv, uids = process.info["cmdline"] or [], process.info["uids"]
        if MODULE in argv[:-1] and (not uids or uids.real == os.getuid()):
            found.add(Path(argv[argv.index(MODULE) + 1]))
    return [state for state in map(StateDir, sorted(found)) if state.is_running()]
