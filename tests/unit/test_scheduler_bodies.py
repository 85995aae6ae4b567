"""The bodies of control requests: the fields they have, and the values that these refuse."""

import pytest

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
