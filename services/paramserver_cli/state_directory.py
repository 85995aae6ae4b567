"""The state directory of a cluster on this machine, and the list of running clusters.

cluster.json      the object that `psctl up --json` prints, with current process ids and without the token
supervisor.json   the supervisor's pid, phase and restarts
plan.json         what the supervisor is to run; SIGUSR1 tells it that the file has changed
logs/NAME.log     output of each process; NAME.log.1 is that of the last start, or from before the log became too long
secret            the secret that tokens are made from, if other machines can reach the cluster
redis/            files of the Redis server; redis.conf has its password, if the nodes require tokens
checkpoints/      checkpoints, written by the scheduler

lock              held (flock) by the supervisor; it tells whether a cluster runs, because the other files may be stale
"""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, BinaryIO, Final, Literal, TypeVar

import psutil

from paramserver import limits
from paramserver.core.scheduler.runs import ALLOWED_BY_DEFAULT

if sys.platform != "win32":
    import fcntl

MODULE = "paramserver_cli.supervisor"

LOG_BYTES_MAX = 64 << 20
"""A log that is longer begins anew."""

Phase = Literal["starting", "ready", "stopping", "stopped", "failed"]


@dataclass(frozen=True)
class Plan:
    """What a supervisor is to run."""

    shards: int = 2
    workers: int = 0
    redis: str | None = None
    """URL of a Redis server that runs already; None: start one."""
    host: str = "127.0.0.1"
    port: int | None = None
    """First port of the block; None: the default block if it is free, else another."""
    scheduler: str | None = None
    """URLs of a running cluster, separated by commas; only workers are started then, for that cluster."""
    allow: list[str] = field(default_factory=lambda: [ALLOWED_BY_DEFAULT])
    """Prefixes of entry points that the workers may run."""
    paths: list[str] = field(default_factory=list)
    """Folders added to the import path of the workers."""
    insecure: bool = False
    """Whether other machines are let in without tokens."""
    schedulers: int = 1
    stop_s: float = limits.STOP_S
    """Time that the shards have to stop, in seconds: that of the environment in which the supervisor is started."""
    appendfsync: str = "everysec"
    """When the Redis that is started has a write on its disk: within two seconds, or (`always`) before it answers."""


@dataclass(frozen=True)
class Cluster:
    """The object that `psctl up --json` prints; the field names are a promise to scripts."""

    scheduler: str
    """URL of the first scheduler; each scheduler answers any request."""
    shards: list[str]
    redis: str
    """URL of Redis, without its password."""
    token: str | None
    """Admin token, if tokens are needed; made only when the object is printed, so that no file holds it."""
    pids: dict[str, list[int | None]]
    """Process ids of `scheduler`, `shards` and `redis`, in the order of the URLs; null while one is restarted."""
    state_dir: str
    schedulers: list[str]
    """The URLs of all schedulers, `scheduler` first."""

    def is_at(self, urls: str) -> bool:
        """Whether one of these URLs, separated by commas, is that of a scheduler of this cluster."""
        return bool({_spelled(u) for u in urls.split(",")} & {_spelled(u) for u in self.schedulers})


def _spelled(url: str) -> str:
    """Normalize a URL for comparison: `localhost` and `[::1]` become 127.0.0.1."""
    return re.sub(r"(?<=://)(localhost|\[::1\])(?=[:/]|$)", "127.0.0.1", url.strip().rstrip("/"))


@dataclass(frozen=True)
class SupervisorState:
    """The state of a supervisor."""

    pid: int
    phase: Phase
    restarts: dict[str, int] = field(default_factory=dict)
    error: str = ""
    """Why the phase is `failed`, or which shards could not store everything."""
    shards_max: int | None = None
    """How many shards its ports have room for; None: not known yet."""


_Document = TypeVar("_Document", Plan, Cluster, SupervisorState)
_NAMES: Final = {Plan: "plan", Cluster: "cluster", SupervisorState: "supervisor"}
"""The names of the JSON files. A field that is added to one needs a default: an earlier version wrote none."""


class StateDir:
    """The files of one cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.logs = self.path / "logs"
        self.secret_file = self.path / "secret"
        self._redis_config = self.path / "redis" / "redis.conf"

    def make(self) -> None:
        """Create it if it is missing, for this user only: a log has the link to the status page."""
        if not self.path.exists():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.logs.mkdir(mode=0o700, exist_ok=True)

    def secret(self) -> str:
        """Return the cluster's secret; empty if it has none of its own."""
        try:
            return self.secret_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def write_redis_password(self, password: str) -> Path:
        """Write the password of the Redis server, for this user only, and return the file, which the server reads."""
        with open(self._redis_config, "w", encoding="utf-8", opener=_private) as out:
            out.write(f"requirepass {password}\n")
        return self._redis_config

    def redis_password(self) -> str:
        """Return the password of the Redis server; empty if it has none."""
        try:
            return self._redis_config.read_text(encoding="utf-8").split()[1]
        except FileNotFoundError:
            return ""

    def log(self, name: str) -> Path:
        """Return the path of one process's log."""
        return self.logs / f"{name}.log"

    def write(self, document: Plan | Cluster | SupervisorState) -> None:
        """Write one of the JSON files atomically."""
        name = _NAMES[type(document)]
        text = json.dumps(asdict(document), indent=2)
        temporary = self.path / f".{name}.{os.getpid()}"
        # Readable by this user only: a plan may hold a Redis password.
        with open(temporary, "w", encoding="utf-8", opener=_private) as out:
            out.write(text + "\n")
            if isinstance(document, Plan):  # the others are of no use after a power cut
                out.flush()
                os.fsync(out.fileno())
        temporary.replace(self.path / f"{name}.json")

    def _read(self, kind: type[_Document]) -> _Document | None:
        try:
            value = json.loads((self.path / f"{_NAMES[kind]}.json").read_text())
        except FileNotFoundError:
            return None
        if not isinstance(value, dict):
            raise ValueError(f"{value!r:.40} is not an object")
        # A running cluster may be of another version than psctl: what that wrote besides is nothing to this one.
        return kind(**{f.name: value[f.name] for f in fields(kind) if f.name in value})

    def plan(self) -> Plan | None:
        """Return the plan; None if none was ever written.  Raises ValueError if the file is broken."""
        return self._read(Plan)

    def take_back_plan(self, last: Plan | None) -> None:
        """Put the plan of before a start that has failed in place of its own, if no other start has begun.

        None: there was none.
        """
        if (lock := self.lock()) is None:
            return
        with lock:
            if last is not None:
                self.write(last)
            else:
                (self.path / "plan.json").unlink(missing_ok=True)

    def cluster(self) -> Cluster | None:
        """Return the cluster as last written; None before it is ready."""
        return self._read(Cluster)

    def supervisor(self) -> SupervisorState | None:
        """Return the supervisor's state as last written; None if there is none."""
        return self._read(SupervisorState)

    def lock(self) -> IO[str] | None:
        """Take the lock that a supervisor holds while it runs; None if another process holds it, and on Windows."""
        if sys.platform == "win32":
            return None
        self.make()
        return try_lock(self.path / "lock")

    def is_locked_by(self, lock: int) -> bool:
        """Whether that open file is still the lock here: somebody may have removed the directory, and made another."""
        try:
            return os.path.samestat(os.fstat(lock), (self.path / "lock").stat())
        except FileNotFoundError:
            return False
        except OSError:  # not known, as while a network drive is away
            return True

    def is_running(self) -> bool:
        """Whether a supervisor runs for this directory now."""
        if sys.platform == "win32" or not (self.path / "lock").exists():
            return False
        lock = self.lock()
        if lock is not None:
            lock.close()
        return lock is None

    def remove_run_files(self) -> None:
        """Remove the files that describe an earlier run of the cluster; data and logs stay."""
        for name in ("cluster", "supervisor"):
            (self.path / f"{name}.json").unlink(missing_ok=True)

    def discard(self, *, keep_logs: bool) -> None:
        """Remove it; with `keep_logs` all but the logs, if it has any."""
        kept = keep_logs and self.logs.exists()
        for path in [p for p in self.path.iterdir() if p != self.logs] if kept else [self.path]:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def bound_logs(self) -> None:
        """Move what a log longer than LOG_BYTES_MAX holds to `NAME.log.1`; its process appends, and so begins anew."""
        for log in self.logs.glob("*.log"):
            if log.stat().st_size > LOG_BYTES_MAX:
                with suppress(OSError):  # a full disk needs the room most
                    shutil.copyfile(log, log.with_suffix(".log.1"))
                os.truncate(log, 0)

    def mark_used(self) -> None:
        """Mark all files here as just read: whoever tidies temporary folders goes by age."""
        for folder, _, names in os.walk(self.path):
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                with suppress(OSError):  # it may just have been moved
                    os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))

    def tail(self, name: str, lines: int = 20) -> str:
        """Return the last lines of one log; empty if there is none."""
        try:
            with self.log(name).open("rb") as log:
                return "\n".join(last_lines(log, lines))
        except FileNotFoundError:
            return ""


def try_lock(file: Path) -> IO[str] | None:
    """Lock a file until it is closed, and return it; None if another process holds the lock.

    Raises OSError where files cannot be locked, as on some network drives.
    """
    lock = file.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError as e:
        lock.close()
        raise OSError(e.errno, f"cannot be locked: {e.strerror}", str(file)) from None
    return lock


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def last_lines(log: BinaryIO, lines: int) -> list[str]:
    """Return the last lines of a log, which is then at its end."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - 200 * lines))
    return log.read().decode(errors="replace").splitlines()[-lines:]


def new_lines(log: BinaryIO) -> Iterator[str]:
    """Yield the lines that an open log has got since it was last read, all of them if it has begun anew."""
    if log.tell() > os.fstat(log.fileno()).st_size:
        log.seek(0)
    for line in log:
        yield line.decode(errors="replace").rstrip("\n")


def running() -> list[StateDir]:
    """Return the state directories of this user's running clusters, sorted by path; none on Windows."""
    if sys.platform == "win32":
        return []
    found: set[Path] = set()
    for process in psutil.process_iter(["cmdline", "uids"]):
        argv, uids = process.info["cmdline"] or [], process.info["uids"]
        if MODULE in argv[:-1] and (not uids or uids.real == os.getuid()):
            found.add(Path(argv[argv.index(MODULE) + 1]))
    return [state for state in map(StateDir, sorted(found)) if state.is_running()]
