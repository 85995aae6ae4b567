"""A client that writes a checkpoint to its own disk, against shards and a scheduler in memory."""

from pathlib import Path

import numpy as np
from msgspec.structs import replace

from paramserver.client.checkpointing import save
from paramserver.client.cluster import Cluster
from paramserver.core.spec import ConsistencySpec
from paramserver.net.calls import Outcome, Request, Response
from paramserver.wire.frame import encode_header
from paramserver.wire.state import StateFrame

from .session_node import deadline
from .sharding import Shards, drive


def test_values_are_read_again_if_sync_ends_meanwhile(cluster: Cluster, shards: Shards, tmp_path: Path) -> None:
    """A checkpoint that says sync holds no value of after its end, though partitions keep the clock that they had."""
    shards.spec = replace(shards.spec, consistency=ConsistencySpec("sync"))
    read: list[int] = []

    def answer(request: Request) -> Outcome:
        if request.path == "/models/m/workers":
            return Response(200, {}, b'{"items": []}')
        if not request.path.startswith("/internal/state/m/"):
            return shards(request)
        index = int(request.path.rsplit("/", 1)[1])
        read.append(index)
        if len(read) == 3:  # a shard has heard of it, and applies the next push by itself
            shards.spec = replace(shards.spec, consistency=ConsistencySpec("async"))
            shards.flat += 1.0
        begin, end = shards.layout.bounds[index : index + 2]
        steps = (0,) * len(shards.layout.segments[index])
        frame = StateFrame("m", 7, index, 1, 5, 9, end - begin, 0, steps)
        return Response(200, {}, encode_header(frame) + shards.flat[begin:end].astype(np.float32).tobytes())

    manifest = drive(save(cluster, "m", str(tmp_path / "c"), deadline(), overwrite=False), answer)
    assert manifest["spec"]["consistency"]["mode"] == "async"
    assert sorted(read) == [0, 0, 1, 1, 2, 2, 3, 3]
