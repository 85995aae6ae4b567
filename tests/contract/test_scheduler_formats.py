"""The scheduler's stored state in the formats that this version knows, with a real Redis."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from tests.golden.stored import scheduler

from paramserver.core.scheduler.core import SchedulerCore
from paramserver.core.scheduler.recovery import KINDS
from paramserver_node.redis import connect
from paramserver_scheduler.lease import Lease
from paramserver_scheduler.store import FORMAT, STATE_KEY, StateStore

pytestmark = pytest.mark.process

GOLDEN = Path(__file__).parents[1] / "golden" / "stored"


@pytest.fixture
def plain(redis_url: str) -> Iterator[Redis]:
    """A synchronous client of an empty Redis."""
    with Redis.from_url(redis_url) as client:
        client.flushall()
        yield client


def golden(number: int) -> dict[str, Any]:
    """What a version with this format had stored, by field."""
    documents: dict[str, Any] = json.loads((GOLDEN / f"scheduler-{number}.json").read_text())
    return documents


@pytest.mark.parametrize("number", [1])
async def test_a_stored_state_of_a_known_format_is_read(redis_url: str, plain: Redis, number: int) -> None:
    """A scheduler goes on from the state that one of this format has stored, with a document of every kind."""
    stored = golden(number)
    assert {field.partition(":")[0] for field in stored} == set(KINDS)
    for field, document in stored.items():
        plain.hset(STATE_KEY, field, json.dumps(document))
    async with connect(redis_url) as redis:
        lease = Lease(redis, name="s", place="here", url="http://127.0.0.1:1")
        assert await lease.try_acquire()
        core = SchedulerCore.restore(await StateStore(redis, lease).open(), 0.0, lease.term)

    read = core.read
    assert {m["name"]: (m["state"], m["clock"]) for m in read.models()} == {
        "filled": ("initializing", 0),
        "m": ("ready", 2),
    }
    assert [p["incarnation"] for p in read.model("m")["partitions"]] == [(1 << 32) + 1, (1 << 32) + 2]
    assert [(w["worker"], w["clock"]) for w in read.workers("m", 0.0)] == [("m/a", 2), ("m/b", 2)]
    assert [d["dataset"] for d in read.datasets("m")] == ["train"]
    assert [c["name"] for c in read.checkpoints("m")] == ["mine"]
    assert {name: value for name, (_, value) in read.latest("m").items()} == {"loss": 0.5}
    assert [(r["id"], r["state"]) for r in read.runs()] == [("run-1", "running")]
    assert [m["member"] for m in read.pool(0.0)] == ["p"]


async def test_a_stored_state_of_today_is_what_the_golden_file_says(redis_url: str, plain: Redis) -> None:
    """The documents have the fields of the golden file: another one needs a new format number."""
    assert await scheduler.write(redis_url) == golden(FORMAT)
