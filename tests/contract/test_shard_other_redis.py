"""A shard that was given the Redis of another cluster."""

from pathlib import Path

import httpx
import pytest
import redis
from tests.waiting import eventually

from paramserver_node import redis_server

from .processes import Nodes, nodes

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.mark.parametrize("later", [0, 3], ids=["same term", "later term"])
def test_a_shard_with_the_redis_of_another_cluster_stays_out(tmp_path: Path, later: int) -> None:
    """A shard whose Redis is another cluster's, of the same or a later term, does not join, and says why."""
    with nodes(tmp_path / "own", shards=0) as own, redis_server.running(tmp_path / "redis") as other_redis:
        other = Nodes(tmp_path, other_redis, 0)
        try:
            with redis.Redis.from_url(other_redis) as connection:
                connection.set("ps:term", later)
            other.start_scheduler()
            own.shard_ports["stray"] = redis_server.free_port()
            own.redis_url = other_redis
            own.start_shard("stray")
            log = own.folder / "stray.log"
            eventually(lambda: "uses a different Redis" in log.read_text(), within_s=60, what="the refusal")
            ready = httpx.get(f"http://127.0.0.1:{own.shard_ports['stray']}/readyz")
            assert (ready.status_code, "conflict" in ready.text) == (503, True)
            assert "stray" not in own.get("/map")["shards"]
        finally:
            other.stop()
