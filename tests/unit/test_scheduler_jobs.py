"""What a job that fails leaves: an answer to who waits for it, and a scheduler that goes on."""

import asyncio
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from paramserver.core import scheduler_io as io
from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError
from paramserver.types import ModelKey
from paramserver_scheduler.checkpoints import CheckpointStore, assignments
from paramserver_scheduler.jobs import Jobs
from paramserver_scheduler.shards import ShardClient

from .scheduling import SPEC, Driver

FROM_FILE: dict[str, Any] = {"w": {"shape": [64], "init": {"kind": "file", "path": "first.safetensors"}}}


async def performed(d: Driver, state_dir: Path, shards: Any) -> None:
    """All jobs that the core has asked for run to their ends, which it hears of."""
    runtime: Any = SimpleNamespace(core=d.core, send=d.do)
    unused: Any = Mock()
    async with asyncio.TaskGroup() as group:
        jobs = Jobs(runtime, CheckpointStore(state_dir), unused, shards, unused, unused, group, "s")
        for effect in d.work:
            jobs.start(effect)
        d.work.clear()


@pytest.mark.asyncio
@pytest.mark.parametrize("work", ["checkpoint", "files"])
async def test_a_bug_in_a_job_ends_the_job_alone(tmp_path: Path, work: str) -> None:
    """Who waits is told that we have a bug, and the other tasks of the scheduler go on."""
    d = Driver()
    shards = Mock(states=Mock(side_effect=ZeroDivisionError), assign=Mock(side_effect=ZeroDivisionError))
    if work == "checkpoint":
        d.model()
        asked = d.send(lambda n: io.RequestCheckpoint(n, "m"))
    else:
        (tmp_path / "first.safetensors").write_bytes(tensor_file("F32", 4))
        d.shard("s0")
        asked = d.send(lambda n: io.CreateModel(n, SPEC | {"params": FROM_FILE}, "x"))

    await performed(d, tmp_path, shards)

    with pytest.raises(PsError) as told:
        d.result(asked)
    assert told.value.code == "internal"


def tensor_file(dtype: str, item_bytes: int) -> bytes:
    """A safetensors file with 64 zeros `w` in that dtype."""
    head = json.dumps({"w": {"dtype": dtype, "shape": [64], "data_offsets": [0, 64 * item_bytes]}}).encode()
    return struct.pack("<Q", len(head)) + head + bytes(64 * item_bytes)


@pytest.mark.parametrize(("dtype", "item_bytes"), [("F8_E4M3", 1), ("BF16", 2)])
def test_a_dtype_that_numpy_lacks_is_refused(tmp_path: Path, dtype: str, item_bytes: int) -> None:
    """A file with such a tensor is the fault of who named it as first values."""
    (tmp_path / "first.safetensors").write_bytes(tensor_file(dtype, item_bytes))
    layout = Layout(ModelSpec.parse(SPEC | {"params": FROM_FILE}))

    with pytest.raises(PsError, match=r"first\.safetensors") as refused:
        CheckpointStore(tmp_path).read_parameters(layout, {"w": "first.safetensors"})
    assert refused.value.code == "invalid_field"


@pytest.mark.asyncio
async def test_an_address_that_is_none_is_a_shard_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that joined under an unparsable address is waited for like one that is away."""
    monkeypatch.setattr("paramserver_scheduler.shards.PATIENCE_S", 0.0)
    (tmp_path / "first.safetensors").write_bytes(tensor_file("F32", 4))
    layout = Layout(ModelSpec.parse(SPEC | {"params": FROM_FILE}))
    values = CheckpointStore(tmp_path).read_parameters(layout, {"w": "first.safetensors"})
    shards = ShardClient()

    with pytest.raises(PsError) as failed:
        await shards.states(ModelKey("m", 1), 2, lambda index: "http://shard:port", None)
    assert failed.value.code == "unavailable"
    with pytest.raises(PsError) as failed:
        await shards.assign(assignments(layout, 1, values), lambda index: "http://shard:port")
    assert failed.value.code == "unavailable"
    await shards.aclose()
