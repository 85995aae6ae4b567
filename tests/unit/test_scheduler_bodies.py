"""The bodies of control requests: the fields they have, and the values that these refuse."""

import math
from typing import Any

import pytest
from tests.refusals import refused_with

from paramserver.core.scheduler import io
from paramserver_scheduler import bodies


@pytest.mark.parametrize(
    ("body", "event"),
    [
        (bodies.JoinWorker, io.JoinWorker),
        (bodies.WorkerHeartbeat, io.WorkerHeartbeat),
        (bodies.Clock, io.ReportClock),
        (bodies.Dataset, io.RegisterDataset),
        (bodies.Lease, io.LeaseTask),
        (bodies.TaskDone, io.TaskDone),
        (bodies.Metrics, io.ReportMetrics),
        (bodies.Run, io.CreateRun),
        (bodies.RunPatch, io.PatchRun),
        (bodies.JoinPool, io.JoinPool),
        (bodies.MemberHeartbeat, io.PoolHeartbeat),
        (bodies.PlaceDone, io.PlaceDone),
        (bodies.JoinShard, io.JoinShard),
        (bodies.ShardHeartbeat, io.ShardHeartbeat),
        (bodies.Uploaded, io.ParameterUploaded),
        (bodies.Restored, io.ModelRestored),
    ],
)
def test_each_field_of_a_body_is_one_of_its_event(body: type[bodies.Body], event: type[io.Event]) -> None:
    """A route passes the core the fields of its body by name, so each must be a field of the event."""
    assert body.model_fields.keys() <= set(event.__struct_fields__)


@pytest.mark.parametrize(
    ("body", "field", "wrong"),
    [
        *[(bodies.JoinWorker, "rank", rank) for rank in (-1, 1 << 31, 1.5, "0", True)],
        *[(bodies.JoinWorker, "above", above) for above in (-1, (1 << 52) + 1)],
        *[(bodies.JoinWorker, "lease_s", lease_s) for lease_s in (1, 1e9, math.nan, 10**400, True)],
        (bodies.ShardHeartbeat, "partitions", [["m", 1, 0, 1, 2, 3, 1, 0, 0]]),
        (bodies.ShardHeartbeat, "partitions", [["m", 1, 0, 1, 2, 3, True, 0, 0, 0]]),
        (bodies.ShardHeartbeat, "partitions", [["m", 1, 0, 1, 2, 3, 1.0, 0, 0, 0]]),
        (bodies.ShardHeartbeat, "partitions", [["m", 1, 0, 1, 2, 3, "1", 0, 0, 0]]),
        (bodies.ShardHeartbeat, "partitions", ["partition"]),
        (bodies.ShardHeartbeat, "cuts", [[5, 1, 0, 1, 2]]),
        (bodies.ShardHeartbeat, "released", [["m", 1, 0, 1, 2, 3]]),
        (bodies.ShardHeartbeat, "lost", [["m", 1, 0, 1]]),
        *[(bodies.ShardHeartbeat, "loads", [["m", 1, 0, load]]) for load in ("much", math.nan, math.inf, True)],
        *[(bodies.ShardHeartbeat, "memory", {"limit_bytes": limit}) for limit in (-1, 0.5, True)],
    ],
)
def test_a_value_that_makes_no_sense_is_refused(body: type[bodies.Body], field: str, wrong: Any) -> None:
    """A field that is out of bounds or of another type is refused as `invalid_field`, and named."""
    sent = {"epoch": 1} if body is bodies.ShardHeartbeat else {}

    with refused_with("invalid_field", match=f"^{field}"):
        bodies.check(body, {**sent, field: wrong})


def test_what_a_shard_says_of_its_partitions_comes_as_lists() -> None:
    """The rows of a heartbeat are lists of a name and of numbers, of which a revision may be -1."""
    rows = {"partitions": [["m", 1, 0, 1 << 33, 7, 5, -1, 0, 0, 0]], "loads": [["m", 1, 0, 2], ["m", 1, 1, 0.5]]}

    body = bodies.check(bodies.ShardHeartbeat, {"epoch": 1, **rows})

    assert [list(row) for row in (*body.partitions, *body.loads)] == [*rows["partitions"], *rows["loads"]]
