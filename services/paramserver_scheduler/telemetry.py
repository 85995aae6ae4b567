"""What a scheduler tells Prometheus, set once a second from what it knows."""

from typing import Final

from prometheus_client import Gauge

from paramserver.core.reading import Reading

TERM: Final = Gauge("paramserver_scheduler_term", "How often a scheduler has started on this Redis")
MAP_EPOCH: Final = Gauge("paramserver_map_epoch", "Version of the partition map")
REDIS: Final = Gauge("paramserver_scheduler_redis_up", "1 while Redis answers the scheduler")
SHARDS: Final = Gauge("paramserver_shards", "Shards by whether they are alive", ["state"])
POOL: Final = Gauge("paramserver_pool_members", "Worker processes in the pool")
RUNS: Final = Gauge("paramserver_runs", "Runs by state", ["state"])
VERSION: Final = Gauge("paramserver_model_version", "Lowest version over the partitions of a model", ["model"])
CLOCK: Final = Gauge("paramserver_model_clock", "Clock of a model", ["model"])
WORKERS: Final = Gauge("paramserver_model_workers", "Live workers of a model", ["model"])


def update(read: Reading, now: float, *, redis_away: bool) -> None:
    """Set every gauge; `now` is monotonic."""
    TERM.set(read.term)
    MAP_EPOCH.set(read.map()["map_epoch"])
    REDIS.set(0 if redis_away else 1)
    shards = read.shards(now)
    SHARDS.labels("alive").set(sum(s["alive"] for s in shards))
    SHARDS.labels("dead").set(sum(not s["alive"] for s in shards))
    POOL.set(len(read.pool(now)))
    for gauge in (RUNS, VERSION, CLOCK, WORKERS):
        gauge.clear()  # of what is gone, nothing stays
    for run in read.runs():
        RUNS.labels(run["state"]).inc()
    for model in read.models():
        VERSION.labels(model["name"]).set(model["version"])
        CLOCK.labels(model["name"]).set(model["clock"])
        WORKERS.labels(model["name"]).set(model["live_workers"])
