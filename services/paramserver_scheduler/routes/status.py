"""/status: what the cluster is doing now, in one JSON document with a schema."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import APIRouter, Request, Response

import paramserver
from paramserver_node.roles import role
from paramserver_scheduler.exchange import Service, respond, service
from paramserver_scheduler.schema import (
    ClusterStatus,
    ModelStatus,
    NodeStatus,
    RunStatus,
    Series,
    Status,
    WorkerStatus,
)

router = APIRouter(tags=["status"])

POINTS: Final = 120
"""Points of a series in a status; each is the mean of as many as that takes."""
RUNS: Final = 20
FORGOTTEN_S: Final = 60.0
"""A dead worker or shard is shown for so long."""


@router.get("/status", responses={200: {"model": Status, "description": "The cluster"}})
@role("reader")
async def status(request: Request) -> Response:
    """Nodes with heartbeat ages, models with versions, clocks, rates and lag, runs, and what happened lately."""
    return respond(request, describe(service(request)).model_dump())


def describe(s: Service) -> Status:
    """The whole status."""
    now = s.now
    found = s.read.status(now)
    shards = [x for x in found["shards"] if x["alive"] or x["heartbeat_age_s"] < FORGOTTEN_S]
    nodes = [
        NodeStatus(
            name="scheduler",
            role="scheduler",
            state="active",
            alive=True,
            addresses=[s.url],
            epoch=found["term"],
            heartbeat_age_s=0.0,
        ),
        *(NodeStatus(role="shard", **{k: v for k, v in x.items() if k != "version"}) for x in shards),
        *(_member(x) for x in found["pool"]),
    ]
    models = [_model(s, m, shards) for m in found["models"]]
    runs = [_run(r) for r in found["runs"][-RUNS:][::-1]]
    problems = _problems(s, shards, models, runs)
    cluster = ClusterStatus(
        state="degraded" if problems else "ok",
        problems=problems,
        version=paramserver.__version__,
        term=found["term"],
        map_epoch=found["map_epoch"],
        uptime_s=now - s.started_s,
        redis="away" if s.runtime.redis_away else "ok",
        now=found["now"],
    )
    return Status(cluster=cluster, nodes=nodes, models=models, runs=runs, events=list(s.history.events))


def _member(x: Mapping[str, Any]) -> NodeStatus:
    return NodeStatus(
        name=x["member"],
        role="pool",
        state="active" if x["run"] else "idle",
        alive=x["alive"],
        addresses=[],
        epoch=x["epoch"],
        heartbeat_age_s=x["heartbeat_age_s"],
        metrics={"run": x["run"], "place": x["place"]},
    )


def _model(s: Service, line: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> ModelStatus:
    name = line["name"]
    document = s.read.model(name)
    optimizer = document["spec"]["optimizer"]
    workers = [w for w in line["workers"] if w["alive"] or w["heartbeat_age_s"] < FORGOTTEN_S]
    lags = [w["metrics"]["lag"] for w in workers if w["alive"] and isinstance(w["metrics"].get("lag"), float)]
    return ModelStatus(
        name=name,
        generation=line["generation"],
        revision=line["revision"],
        timeline=line["timeline"],
        state=line["state"] if line["served"] else "loading",
        mode=line["mode"],
        optimizer=line["optimizer"],
        lr=optimizer.get("lr"),
        parameters=len(document["spec"]["params"]),
        elements=line["size"],
        partitions=line["partitions"],
        served=sum(bool(p["served"]) for p in document["partitions"]),
        version=line["version"],
        durable_version=min((p["durable_version"] for p in document["partitions"]), default=0),
        clock=line["clock"],
        waiting_for=line["waiting_for"],
        updates_per_s=s.history.updates_per_s(name, line["generation"]),
        # A push of the SDK is one request to each shard, so the busiest shard has seen them all.
        pushes_per_s=max((_pushes_per_s(x["metrics"], name) for x in shards if x["alive"]), default=0.0),
        lag=sum(lags) / len(lags) if lags else None,
        workers=[WorkerStatus(**{k: w[k] for k in WorkerStatus.model_fields}) for w in workers],
        series=[_series(x["name"], x["points"]) for x in s.read.metrics(name)],
    )


def _pushes_per_s(metrics: Mapping[str, Any], model: str) -> float:
    """What a shard's heartbeat says about pushes of a model; shards are not believed to send the right types."""
    models = metrics.get("models")
    entry = models.get(model) if isinstance(models, Mapping) else None
    value = entry.get("pushes_per_s") if isinstance(entry, Mapping) else None
    return float(value) if isinstance(value, int | float) else 0.0


def _series(name: str, points: Sequence[Sequence[Any]]) -> Series:
    """The points thinned out: equal groups, each its mean."""
    step = max(1, -(-len(points) // POINTS))
    groups = [points[i : i + step] for i in range(0, len(points), step)]
    thin = [(sum(p[0] for p in g) / len(g), sum(p[3] for p in g) / len(g)) for g in groups]
    return Series(name=name, points=thin, last=thin[-1][1] if thin else None)


def _run(r: Mapping[str, Any]) -> RunStatus:
    places = r["places"]
    return RunStatus(
        id=r["id"],
        name=r["name"],
        model=r["model"],
        state=r["state"],
        reason=r["reason"],
        workers=len(places),
        placed=sum(p["member"] is not None for p in places),
    )


def _problems(
    s: Service, shards: Sequence[Mapping[str, Any]], models: Sequence[ModelStatus], runs: Sequence[RunStatus]
) -> list[str]:
    out: list[str] = []
    if s.runtime.redis_away:
        out.append("Redis does not answer: async training goes on, nothing new can be decided or stored")
    if not any(x["alive"] for x in shards):
        out.append("No shard is alive: start one with paramserver-shard, or a whole cluster with psctl up")
    for m in models:
        if m.served < m.partitions:
            out.append(f"Model {m.name}: {m.partitions - m.served} of {m.partitions} partitions are being loaded")
    out += [f"Run {r.name or r.id}: {r.reason}" for r in runs if r.state == "waiting" and r.reason]
    return out
