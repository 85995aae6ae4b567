"""Prometheus metrics of the cluster, made from the newest status; a standby exports only that it does not lead.

So the metrics of a deleted model disappear, and a former leader contradicts nobody.  docs/metrics.md lists the names.
"""

from collections.abc import Iterable, Iterator, Set
from typing import Final

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paramserver_scheduler.schema import ModelStatus, Status

NODE_STATES: Final = ("active", "draining", "left", "dead")
RUN_STATES: Final = ("waiting", "running", "paused", "finished", "failed", "stopped")


class ClusterMetrics(Collector):
    """Prometheus collector that turns the newest status into gauges at each scrape."""

    def __init__(self) -> None:
        self.status: Status | None = None
        """The newest status (see `watch`); None while this scheduler does not lead."""

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering the collector does not call `collect`."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all gauges of the cluster, or only that this scheduler does not lead."""
        status = self.status
        yield _one("paramserver_scheduler_leads", "1 while this scheduler leads", status is not None)
        if status is None:
            return
        cluster = status.cluster
        yield _one("paramserver_scheduler_term", "How often a scheduler has begun to lead on this Redis", cluster.term)
        up = cluster.redis == "ok"
        yield _one("paramserver_scheduler_redis_up", "1 while Redis answers the scheduler and takes its writes", up)
        yield _known("paramserver_redis_memory_bytes", "Memory that Redis uses", cluster.redis_bytes)
        limit = cluster.redis_limit_bytes
        yield _known("paramserver_redis_memory_limit_bytes", "Its maxmemory, at which it refuses writes", limit)
        yield _one("paramserver_problems", "Problems that the status page lists", len(cluster.problems))
        yield _one("paramserver_map_epoch", "Version of the partition map", cluster.map_epoch)
        shards = [n for n in status.nodes if n.role == "shard"]
        states = [(s, sum(n.state == s for n in shards)) for s in NODE_STATES]
        yield _by("paramserver_shards", "Shards by state", "state", states)
        ages = [(n.name, n.heartbeat_age_s) for n in shards if n.alive]
        yield _by("paramserver_shard_heartbeat_age_seconds", "Since a live shard was heard of", "shard", ages)
        pool = sum(n.role == "pool" for n in status.nodes)
        yield _one("paramserver_pool_members", "Worker processes in the pool", pool)
        runs = [(s, sum(r.state == s for r in status.runs)) for s in RUN_STATES]
        yield _by("paramserver_runs", "The newest 20 runs, and all that have not ended, by state", "state", runs)
        ended = CounterMetricFamily(
            "paramserver_runs_ended", "Runs that have ended since this scheduler began to lead", labels=["state"]
        )
        for state, count in cluster.runs_ended.items():
            ended.add_metric([state], count)
        yield ended
        yield from _models(status.models, {r.model for r in status.runs if r.state == "paused"})


def _models(models: list[ModelStatus], paused: Set[str]) -> Iterator[Metric]:
    def each(name: str, text: str, values: Iterable[tuple[ModelStatus, float | None]]) -> Metric:
        return _by(name, text, "model", ((m.name, v) for m, v in values if v is not None))

    yield each("paramserver_model_version", "Lowest version over the partitions", ((m, m.version) for m in models))
    yield each(
        "paramserver_model_durable_version",
        "Lowest version over the partitions that outlives the loss of its shard",
        ((m, m.durable_version) for m in models),
    )
    yield each(
        "paramserver_model_durable_behind_versions",
        "Versions that the loss of a shard would undo, of the partition with most",
        ((m, m.durable_behind) for m in models),
    )
    yield each(
        "paramserver_model_durable_behind_seconds",
        "For how long a partition has had some, without storing any more",
        ((m, m.durable_behind_s) for m in models),
    )
    yield each("paramserver_model_clock", "Clock of a model", ((m, m.clock) for m in models))
    live = ((m, sum(w.alive for w in m.workers)) for m in models)
    yield each("paramserver_model_workers", "Live workers of a model", live)
    resting = ((m, m.name in paused) for m in models)
    yield each("paramserver_model_paused", "1 while the run that trains the model is paused", resting)
    waited = ((m, len(m.waiting_for)) for m in models)
    yield each("paramserver_model_waited_for", "Workers, or joins or a commit, that the others wait for", waited)
    yield each("paramserver_model_lag_versions", "Mean version lag over the workers", ((m, m.lag) for m in models))
    yield each("paramserver_model_partitions", "Partitions of a model", ((m, m.partitions) for m in models))
    loading = ((m, m.partitions - m.served) for m in models)
    yield each("paramserver_model_partitions_loading", "Partitions that no owner serves yet", loading)
    moving = ((m, len(m.moving)) for m in models)
    yield each("paramserver_model_partitions_moving", "Partitions on their way to another shard", moving)


def _one(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _known(name: str, text: str, value: float | None) -> Metric:
    """A metric without a sample while its value is not known."""
    family = GaugeMetricFamily(name, text, labels=())
    if value is not None:
        family.add_metric((), value)
    return family


def _by(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for of, value in values:
        family.add_metric([of], value)
    return family


METRICS: Final = ClusterMetrics()
REGISTRY.register(METRICS)
