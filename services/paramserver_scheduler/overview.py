"""Builds the status of the whole cluster from the core's state and the newest heartbeats."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Final

import paramserver
from paramserver.core.scheduler.runs import ENDED
from paramserver_scheduler.pause import Pause
from paramserver_scheduler.schema import (
    ClusterStatus,
    ModelStatus,
    NodeStatus,
    RunStatus,
    Status,
    WorkerStatus,
)
from paramserver_scheduler.service import Service

RUNS: Final = 20
"""Newest runs in a status, which also has those before them that have not ended, or did since the last one."""
EVENTS: Final = 100
LACKING_MIN: Final = 16 << 20
"""Shards that lack less memory for the partitions of another are no problem: what a process uses varies by as much."""

Document = Mapping[str, Any]


async def describe(s: Service) -> Status:
    """Return the current status.

    Each model's numbers are of one moment, which may be a little later for the next model.
    """
    now = s.now
    found = s.read.status(now)
    shards = found["shards"]
    nodes = [*_schedulers(s, found["term"]), *map(_shard, shards), *map(_member, found["pool"])]
    moves = {(move["model"], move["partition"]) for x in shards for move in x["moves"]}
    models: list[ModelStatus] = []
    complaints: list[str] = []
    pause = Pause()
    for name in found["models"]:
        await pause()
        line = s.read.model_status(name, s.now)
        if line is None:
            continue
        models.append(_model(s, line, shards, moves))
        if why := line["files_error"]:
            complaints.append(f"Model {name}: a partition was never stored, its initial values cannot be read: {why}")
        if why := line["checkpoint_error"]:
            complaints.append(f"Model {name}: its last checkpoint was not written: {why}")
    clocks = {m.name: m.clock for m in models}
    newest = enumerate(reversed(found["runs"]))
    runs = [_run(r, clocks.get(r["model"])) for i, r in newest if i < RUNS or s.history.goes_on(r)]
    problems = _problems(s, shards, models, runs) + complaints
    cluster = ClusterStatus(
        state="degraded" if problems else "ok",
        problems=problems,
        version=paramserver.__version__,
        term=found["term"],
        map_epoch=found["map_epoch"],
        uptime_s=now - s.started_s,
        redis="away" if s.runtime.redis_away else "ok",
        redis_bytes=s.redis_memory.used_bytes,
        redis_limit_bytes=s.redis_memory.limit_bytes,
        now=found["now"],
        runs_ended=found["runs_ended"],
    )
    events = [e for e, _ in zip(s.history.events, range(EVENTS), strict=False)]
    return Status(cluster=cluster, nodes=nodes, models=models, runs=runs, events=events)


def _schedulers(s: Service, term: int) -> list[NodeStatus]:
    """This scheduler, which leads, and the standbys."""
    usage = s.history.usage
    return [
        NodeStatus(
            name=x.name,
            role="scheduler",
            state="active" if x.url == s.url else "standby",
            alive=True,
            addresses=[x.url],
            epoch=term,
            heartbeat_age_s=0.0 if x.url == s.url else x.age_s,
            cpu_cores=usage.get("cpu_cores") if x.url == s.url else None,
            rss_bytes=usage.get("rss_bytes") if x.url == s.url else None,
        )
        for x in sorted(s.lease.schedulers, key=lambda x: (x.url != s.url, x.name))
    ]


def _shard(x: Document) -> NodeStatus:
    metrics = x["metrics"] if x["alive"] else {}
    return NodeStatus(
        role="shard",
        **{k: v for k, v in x.items() if k in NodeStatus.model_fields},
        cpu_cores=_number(metrics, "cpu_cores"),
        rss_bytes=_number(metrics, "rss_bytes"),
        memory_limit_bytes=x["memory"]["limit_bytes"] or None,
        in_bytes_per_s=_number(metrics, "in_bytes_per_s"),
        out_bytes_per_s=_number(metrics, "out_bytes_per_s"),
    )


def _member(x: Document) -> NodeStatus:
    return NodeStatus(
        name=x["member"],
        role="pool",
        state="active" if x["run"] else "idle",
        alive=x["alive"],
        addresses=[],
        epoch=x["epoch"],
        heartbeat_age_s=x["heartbeat_age_s"],
        cpu_cores=x["metrics"].get("cpu_cores"),
        rss_bytes=x["metrics"].get("rss_bytes"),
        metrics={"run": x["run"], "place": x["place"]},
    )


def _model(s: Service, line: Document, shards: Sequence[Document], moves: Set[tuple[str, int]]) -> ModelStatus:
    name = line["name"]
    partitions = line["partition_lines"]
    reports = [_object(_object(x["metrics"], "models"), name) for x in shards if x["alive"]]
    lags_seen = _lags(reports)
    workers = [_worker(w, lags_seen) for w in line["workers"]]
    lags = [w.lag for w in workers if w.lag is not None and w.alive]
    owners = sorted({p["shard"] for p in partitions} - {None})
    place = {shard: i for i, shard in enumerate(owners)}
    return ModelStatus(
        name=name,
        generation=line["generation"],
        revision=line["revision"],
        timeline=line["timeline"],
        state=line["state"] if line["served"] else "loading",
        mode=line["mode"],
        optimizer=line["optimizer"],
        lr=line["lr"],
        created_s=line["created_s"],
        parameters=line["parameters"],
        elements=line["size"],
        partitions=line["partitions"],
        served=sum(bool(p["served"]) for p in partitions),
        shards=owners,
        owners=[place.get(p["shard"], -1) for p in partitions],
        loading=[p["index"] for p in partitions if not p["served"]],
        moving=[p["index"] for p in partitions if (name, p["index"]) in moves],
        version=line["version"],
        durable_version=min((p["durable_version"] for p in partitions), default=0),
        durable_behind=max((max(0, p["version"] - p["durable_version"]) for p in partitions if p["served"]), default=0),
        durable_behind_s=line["durable_behind_s"],
        clock=line["clock"],
        waiting_for=line["waiting_for"],
        updates_per_s=s.history.updates_per_s(name, line["generation"]),
        # An SDK request goes to every shard concerned, so the busiest shard has seen them all; bytes differ per shard.
        pushes_per_s=_max_over_shards(reports, "pushes_per_s") or 0.0,
        pulls_per_s=_max_over_shards(reports, "pulls_per_s") or 0.0,
        in_bytes_per_s=sum(_number(t, "in_bytes_per_s") or 0.0 for t in reports),
        out_bytes_per_s=sum(_number(t, "out_bytes_per_s") or 0.0 for t in reports),
        push_p50_s=_max_over_shards(reports, "push_p50_s"),
        push_p99_s=_max_over_shards(reports, "push_p99_s"),
        pull_p50_s=_max_over_shards(reports, "pull_p50_s"),
        pull_p99_s=_max_over_shards(reports, "pull_p99_s"),
        lag=sum(lags) / len(lags) if lags else None,
        workers=workers,
        latest=s.read.latest(name),
        not_finite=s.read.not_finite(name),
        values_kept=round(sum(_number(t, "values_kept") or 0.0 for t in reports)),
    )


def _lags(reports: Iterable[Document]) -> dict[str, float]:
    """Each worker's version lag, as the shard with the largest one sees it."""
    seen: dict[str, float] = {}
    for lags in (_object(t, "lag") for t in reports):
        for worker in lags:
            lag = _number(lags, worker)
            if lag is not None:
                seen[worker] = max(lag, seen.get(worker, lag))
    return seen


def _worker(w: Document, seen: Mapping[str, float]) -> WorkerStatus:
    lag = seen.get(w["worker"])
    return WorkerStatus(
        **{k: w[k] for k in WorkerStatus.model_fields if k != "lag"},
        lag=_number(w["metrics"], "lag") if lag is None else lag,
    )


def _object(document: Document, name: str) -> Document:
    """The object of that name in a shard's metrics: shards are not trusted to send the right types."""
    value = document.get(name)
    return value if isinstance(value, Mapping) else {}


def _number(document: Document, name: str) -> float | None:
    value = document.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _max_over_shards(reports: Iterable[Document], name: str) -> float | None:
    """The largest value over the shards; None if no shard has one."""
    return max((v for t in reports if (v := _number(t, name)) is not None), default=None)


def _run(r: Document, clock: int | None) -> RunStatus:
    places, stop = r["places"], r["stop"]
    # Of a model whose run has ended, the clocks are a later one's.
    clocks = None if clock is None or r["state"] in ENDED else max(0, clock - r["from_clock"])
    parts = []
    if stop.get("minutes"):
        parts.append(r["ran_s"] / (60 * stop["minutes"]))
    if stop.get("clocks") and clocks is not None:
        parts.append(clocks / stop["clocks"])
    if r["state"] == "finished":
        parts = [1.0]
    return RunStatus(
        **{k: r[k] for k in ("id", "name", "model", "entry", "state", "reason", "error", "created_s", "ran_s", "stop")},
        workers=len(places),
        placed=sum(p["member"] is not None for p in places),
        restarts=sum(p["restarts"] for p in places),
        clocks=clocks,
        progress=min(1.0, max(parts)) if parts else None,
    )


def _problems(
    s: Service, shards: Sequence[Document], models: Sequence[ModelStatus], runs: Sequence[RunStatus]
) -> list[str]:
    """What is wrong with the cluster, in words."""
    out: list[str] = []
    degraded: dict[str, list[str]] = {}
    if s.runtime.redis_away:
        out.append(f"{s.runtime.redis_away}: async training continues, but nothing new can be decided or stored")
    out += [why for why in (s.redis_memory.problem, s.redis_file.problem) if why]
    alive = any(x["alive"] for x in shards)
    if not alive:
        out.append("No shard is alive: start one with paramserver-shard, or a whole cluster with psctl up")
    for x in shards:
        if x["state"] == "dead":
            others = "; its partitions go to the others" if alive else ""
            age_s = x["heartbeat_age_s"]
            age = f"{age_s:.0f} s" if age_s < 120 else f"{age_s / 60:.0f} min"
            out.append(f"Shard {x['name']} is dead, its last heartbeat was {age} ago{others}; its log says why")
        if x["alive"] and isinstance(why := x["metrics"].get("degraded"), str):
            degraded.setdefault(why[:300], []).append(x["name"])
        if x["alive"] and x["version"] not in ("", paramserver.__version__):
            why = f"version {x['version']}, the leading scheduler {paramserver.__version__}: upgrade all nodes together"
            degraded.setdefault(why, []).append(x["name"])
    for why, names in degraded.items():
        which = f"Shard {names[0]}" if len(names) == 1 else f"Shards {', '.join(names)}"
        out.append(f"{which}: {why}")
    for m in models:
        if m.served < m.partitions:
            out.append(f"Model {m.name}: {m.partitions - m.served} of {m.partitions} partitions are being loaded")
        if m.values_kept:
            out.append(
                f"Model {m.name}: {m.values_kept} results that are NaN or infinite were discarded by their partitions,"
                " while others may have taken the step: lower the learning rate, or clip"
            )
    out += [f"Run {r.name or r.id}: {r.reason}" for r in runs if r.state == "waiting" and r.reason]
    needed, free = s.read.missing_after_loss() or (0, 0)
    if needed - free >= LACKING_MIN:
        out.append(
            f"The shards lack the memory to take the place of one that is lost ({needed >> 20} MiB needed,"
            f" {free >> 20} MiB free), and may be killed for it: add a shard, or raise their memory_limit"
        )
    return out
