"""psctl doctor: checks this machine and a cluster, and says how to fix the problems it finds."""

from __future__ import annotations  # client classes are named, but not imported until used

import importlib.metadata
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import typer
from rich.text import Text

import paramserver as ps
from paramserver.errors import AuthError, InDoubt, PsError, Unreachable
from paramserver.limits import MIB, REDIS_NEARLY_FULL
from paramserver.net.calls import Request, json_bytes
from paramserver.net.retry import result_of
from paramserver_cli import launch, ports
from paramserver_cli.config import Json, Url, cluster_at, connect, redis_url
from paramserver_cli.display import columns, console, print_list
from paramserver_node import redis_server
from paramserver_node.settings import FILE, ShardSettings, unknown_variables

PACKAGES = ("numpy", "numba", "fastapi", "hpack", "uvicorn", "redis", "safetensors")
FILES_MIN = 4096
SHM_MIB_MIN = 64
PROBE_ELEMENTS = 1 << 20
"""Elements per shard of the model used to measure bandwidth: 4 MiB of float32."""
SLOW_MIB_PER_S = 20.0
SHARD_TIMEOUT_S, PULL_TIMEOUT_S = 10.0, 60.0
PULL: Final = {"content-type": "application/json", "accept": "application/msgpack"}
"""Headers of the pull that is measured."""
DELETE_TIMEOUT_S = 3.0
"""Timeout for deleting that model; it is deleted even if its creation failed, because it may exist all the same."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    result: Literal["ok", "warning", "failed"]
    detail: str
    remedy: str = ""


def doctor(
    redis: Annotated[
        str | None,
        typer.Option(
            help="URL of the Redis to check; default: PARAMSERVER_REDIS, else that of a cluster on this machine, else "
            "the embedded one."
        ),
    ] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Check Python, packages, ports, Redis, shared memory, the file limit, versions, and the bandwidth to each shard.

    The bandwidth is that of a model of 4 MiB per shard, which is created for it and deleted again; it takes an admin's
    token. Exit code 1 if something will not work.

        psctl doctor --redis redis://10.0.0.3:6379/0
    """
    chosen = redis_url(redis)
    found, started = (chosen, False) if chosen is not None else running_redis(url)
    findings = [*machine(found, started=started), *cluster(url)]
    if as_json:
        print_list([asdict(f) for f in findings])
    else:
        table = columns("check", "", "found", "what to do")
        colors = {"ok": "green", "warning": "yellow", "failed": "red"}
        for f in findings:
            table.add_row(f.check, Text(f.result, style=colors[f.result]), f.detail, f.remedy)
        console().print(table)
    if any(f.result == "failed" for f in findings):
        raise launch.Failed("something will not work; see above")


def running_redis(url: str | None) -> tuple[str | None, bool]:
    """Return the URL of the Redis of the cluster at `url`, and whether psctl up started it.

    (None, False) if the cluster does not run on this machine under this user.
    """
    found = cluster_at(url)
    if found is None or (plan := found[0].plan()) is None:
        return None, False
    state, cluster = found
    return plan.redis or cluster.redis.replace("***", state.redis_password()), plan.redis is None


def machine(redis: str | None, *, started: bool = False) -> Iterator[Finding]:
    """Run the checks that need no cluster; `started`: psctl up started this Redis, which has no bound of its own."""
    yield Finding("Python", "ok", sys.version.split()[0])
    yield _packages()
    if names := unknown_variables(os.environ):
        yield Finding("variables", "warning", f"without effect: {names}", "docs/settings.md lists all")
    if sys.platform == "win32":
        yield Finding("system", "warning", "Windows runs clients only", "run the cluster under Docker or WSL2")
        return
    busy = [p for p in range(ports.BASE, ports.BASE + 3) if not ports.is_free("127.0.0.1", p)]
    yield Finding(
        "ports",
        "warning" if busy else "ok",
        f"in use: {', '.join(map(str, busy))}" if busy else f"{ports.BASE} to {ports.BASE + 2} are free",
        "psctl up takes others by itself; psctl list shows your clusters" if busy else "",
    )
    yield _redis(redis, started)
    yield _shared_memory(_shared_memory_here())
    yield _file_limit()


def _kernels_are_built() -> bool:
    """Whether the kernels are a compiled library, so that numba is not needed."""
    from paramserver.kernels import prebuilt

    return prebuilt.load() is not None


def _packages() -> Finding:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            if name != "numba" or not _kernels_are_built():
                missing.append(name)
    if missing:
        return Finding(
            "packages", "failed", f"missing: {', '.join(missing)}", "in a checkout: pip install --upgrade '.[server]'"
        )
    return Finding("packages", "ok", f"paramserver {ps.__version__}, {', '.join(found)}")


def _redis(url: str | None, started: bool) -> Finding:
    if url is None:
        try:
            return Finding("Redis", "ok", f"will start {redis_server.find_binary()}")
        except PsError as e:
            return Finding("Redis", "failed", e.detail, e.hint)
    parts = urlsplit(url)
    at = parts.path if parts.scheme == "unix" else f"{parts.hostname or '127.0.0.1'}:{parts.port or 6379}"
    import redis

    from paramserver_node.redis import memory_of

    try:
        with redis.Redis.from_url(url, socket_timeout=3.0, socket_connect_timeout=3.0) as client:
            info: dict[str, Any] = client.info()
    except redis.RedisError as e:
        remedy = "check that it runs, the URL, the password and the firewall"
        return Finding("Redis", "failed", f"{at}: {e}", remedy)
    policy = str(info.get("maxmemory_policy", "?"))  # CONFIG GET has it, too, but not for everybody at managed ones
    detail = f"{at} version {info['redis_version']}, {policy}"
    if refuses := _why_redis_refuses(info):
        return Finding("Redis", "failed", f"{detail}, {refuses[0]}: it refuses writes", refuses[1])
    if policy not in ("noeviction", "?"):
        remedy = "CONFIG SET maxmemory-policy noeviction, and in its redis.conf: evicted state is lost state"
        return Finding("Redis", "failed", detail, remedy)
    held, most = memory_of(info)
    if 0 < most * REDIS_NEARLY_FULL <= held:
        full = f"{'full' if held >= most else 'nearly full'}: {held / MIB:.1f} of {most / MIB:.1f} MiB"
        remedy = (
            "CONFIG SET maxmemory to more, and in its redis.conf, or delete models: full, it refuses writes, and "
            "nothing is durable"
        )
        return Finding("Redis", "failed" if held >= most else "warning", f"{detail}, {full}", remedy)
    if not info.get("aof_enabled"):
        remedy = (
            "appendonly yes in its redis.conf or on its command line, and CONFIG SET appendonly yes now: set only now, "
            "the next start ignores the file and starts empty"
        )
        return Finding("Redis", "warning", f"{detail}, no append-only file", remedy)
    if info.get("maxmemory") == 0 and not started:
        remedy = (
            "CONFIG SET maxmemory, and in its redis.conf, half of what it may take: full, it then refuses writes and "
            "is not killed"
        )
        return Finding("Redis", "warning", f"{detail}, no maxmemory", remedy)
    return Finding("Redis", "ok", detail)


def _why_redis_refuses(info: dict[str, Any]) -> tuple[str, str] | None:
    """Return why a Redis with this INFO refuses every write though not full, and what to do; None if it does not."""
    if info.get("role") == "slave":
        return "a replica", "give the URL of the primary, or make it one: REPLICAOF NO ONE"
    if info.get("loading"):
        return "still loading its data", "wait until it has, and run psctl doctor again"
    if info.get("aof_enabled") and info.get("aof_last_write_status", "ok") != "ok":
        return "cannot write its append-only file", "make room on its disk; its log says more"
    return None


def _shared_memory_here() -> str:
    """Return the folder that shards started here use."""
    return str(ShardSettings.sources({}, os.environ, Path.cwd() / FILE)["shared_memory"][0])


def _shared_memory_of(shards: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the folders of this machine that shards of a cluster use, by their addresses in its status."""
    sockets = [Path(a.removeprefix("unix://")) for n in shards for a in n["addresses"] if a.startswith("unix://")]
    return sorted({str(s.parents[2]) for s in sockets if s.exists()})


def _shared_memory(folder: str) -> Finding:
    if sys.platform != "linux" or not folder:
        return Finding("shared memory", "ok", "not used on this system" if folder else "turned off")
    if not Path(folder).is_dir():
        return Finding(folder, "warning", "does not exist", "mount a tmpfs there, or docker run --shm-size 1g")
    free_mib = shutil.disk_usage(folder).free >> 20
    if free_mib < SHM_MIB_MIN:
        return Finding(folder, "warning", f"{free_mib} MiB free", "docker run --shm-size 1g, or remove old files")
    return Finding(folder, "ok", f"{free_mib} MiB free")


def _file_limit() -> Finding:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES_MIN:
        return Finding("open files", "warning", f"limit {soft}", f"ulimit -n {FILES_MIN}: a connection is a file")
    return Finding("open files", "ok", f"limit {soft}")


def cluster(url: str | None) -> Iterator[Finding]:
    """Run the checks of the cluster at `url`; if it cannot be reached, that is the only finding."""
    try:
        client = connect(url, timeout_s=10.0)
    except PsError as e:
        yield Finding("cluster", "warning", e.detail, e.hint or "psctl up starts one")
        return
    try:
        status = client.status()
    except PsError as e:
        yield Finding("cluster", "failed", e.detail, e.hint or "psctl logs scheduler says why")
        return
    state, theirs = status["cluster"]["state"], status["cluster"]["version"]
    yield Finding(
        "cluster",
        "ok" if state == "ok" else "warning",
        f"{state} at {client.url}",
        "; ".join(status["cluster"]["problems"]),
    )
    same = theirs == ps.__version__
    yield Finding(
        "versions",
        "ok" if same else "warning",
        f"cluster {theirs}, here {ps.__version__}",
        "" if same else f"check out version {theirs} and install that, or upgrade the cluster",
    )
    shards = [n for n in status["nodes"] if n["role"] == "shard" and n["alive"]]
    for folder in _shared_memory_of(shards):
        if folder != _shared_memory_here():
            yield _shared_memory(folder)
    if not shards:
        yield Finding("shards", "failed", "none is alive", "psctl logs shard-0 says why; psctl up starts some")
        return
    try:
        yield from _bandwidth(client, len(shards))
    except AuthError as e:
        remedy = "psctl token makes an admin's token; without one, all else works that yours allows"
        yield Finding("bandwidth", "warning", f"not measured: {e.detail}", remedy)
    except PsError as e:
        yield Finding("bandwidth", "failed", e.detail, e.hint or "psctl logs says why")


def _bandwidth(client: ps.Client, shards: int) -> Iterator[Finding]:
    """Measure a pull from each shard directly, with a model that is created for this and deleted afterwards."""
    name = f"psctl-doctor-{os.getpid()}-{socket.gethostname()}"[:64].rstrip("._-")
    model = client.model(name)
    try:
        client.create_model(name, {"probe": (shards * PROBE_ELEMENTS,)}, partitions=shards)
        document = model.info()
        bounds = document["bounds"]
        for part in document["partitions"]:
            shard, span = part["shard"], [bounds[part["index"]], bounds[part["index"] + 1]]
            addresses = [a for a in document["shards"][shard]["addresses"] if a.startswith("http")]
            body = {"model": name, "ranges": {"probe": [span]}}
            yield _measure(client, shard, addresses, body, 4 * (span[1] - span[0]))
    finally:
        with suppress(PsError):
            model.delete(timeout=DELETE_TIMEOUT_S)


def _measure(client: ps.Client, shard: str, addresses: list[str], body: dict[str, Any], size: int) -> Finding:
    unreached: list[str] = []
    for address in addresses:
        asked = Request("GET", "/livez", to=address, timeout_s=SHARD_TIMEOUT_S)
        pull = Request("POST", "/pull", json_bytes(body), PULL, address, timeout_s=PULL_TIMEOUT_S)
        try:
            _timed(client, asked)  # connects
            latency_s, pull_s = _timed(client, asked), _timed(client, pull)
        except (Unreachable, InDoubt) as e:
            unreached.append(e.detail)
            continue
        except PsError as e:  # it is reached, but does not serve: it has no contact, or is full
            remedy = "run psctl status, and psctl doctor again in a few seconds" if e.retryable else e.hint
            return Finding(shard, "warning", f"{address} answered {e.status}: {e.detail}", remedy)
        rate = size / pull_s / MIB
        detail = f"{rate:.0f} MiB/s, {1000 * latency_s:.1f} ms at {address}"
        if rate < SLOW_MIB_PER_S:
            return Finding(shard, "warning", detail, 'push with dtype="bfloat16" to halve the bytes, or move closer')
        return Finding(shard, "ok", detail)
    remedy = "all traffic goes through the scheduler: open the port, or start the shard with --advertise"
    return Finding(shard, "warning", "; ".join(unreached), remedy)


def _timed(client: ps.Client, request: Request) -> float:
    """Return how long a request takes, in seconds; raises the PsError of one that is refused or not answered."""
    began_s = time.perf_counter()
    (outcome,) = client.transport.perform([request])
    took_s = time.perf_counter() - began_s
    if isinstance(result := result_of(outcome, lambda response: response, reads=True), PsError):
        raise result
    return took_s
