"""A client that writes a checkpoint to its own disk, against shards and a scheduler in memory."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tests.refusals import refused_with

from paramserver.client.checkpointing import save
from paramserver.client.cluster import Cluster
from paramserver.client.control import save_checkpoint
from paramserver.core.spec import ConsistencySpec
from paramserver.errors import InDoubt, PsError, problem
from paramserver.net.calls import Outcome, Request, Response
from paramserver.wire.frame import encode_header
from paramserver.wire.state import StateFrame

from .session_node import deadline
from .sharding import Shards, drive, refusal


def index_of(request: Request) -> int:
    """The partition whose state is asked for."""
    return int(request.path.split("/")[4].partition("?")[0])


def state_of(shards: Shards, index: int, *, clock: int, generation: int = 7) -> Response:
    """A shard's answer: the values of that partition."""
    begin, end = shards.layout.bounds[index : index + 2]
    steps = (0,) * len(shards.layout.segments[index])
    frame = StateFrame("m", generation, index, 1, clock, end - begin, 0, steps, ())
    return Response(200, {}, encode_header(frame) + shards.flat[begin:end].astype(np.float32).tobytes())


def test_a_cut_that_is_no_longer_held_is_followed_by_the_next(cluster: Cluster, shards: Shards, tmp_path: Path) -> None:
    """Shards hold their newest cut only: if one has begun meanwhile, the checkpoint is of that one."""
    shards.spec = replace(shards.spec, consistency=ConsistencySpec("sync"))
    document, asked, held = shards.document, list[str](), [5, 6]
    shards.document = lambda: {**document(), "cut": held[0]}  # type: ignore[method-assign]

    def answer(request: Request) -> Outcome:
        if request.path == "/models/m/workers":
            return Response(200, {}, b'{"items": []}')
        if not request.path.startswith("/internal/state/m/"):
            return shards(request)
        asked.append(request.path)
        if "cut=" not in request.path:
            return state_of(shards, index_of(request), clock=7 + len(asked))
        if request.path.endswith("cut=5"):
            held[0] = 6
            return refusal("conflict", "the partition does not hold the cut of clock 5")
        return state_of(shards, index_of(request), clock=6)

    manifest = drive(save(cluster, "m", str(tmp_path / "c"), deadline(), overwrite=False), answer)
    assert manifest["clock"] == 6
    assert {path.partition("cut=")[2] for path in asked} == {"", "5", "6"}


def test_a_checkpoint_is_of_one_creation_of_the_model(cluster: Cluster, shards: Shards, tmp_path: Path) -> None:
    """Each partition is asked for by the generation of the first, so that no other model's values come between."""
    asked: list[str] = []

    def answer(request: Request) -> Outcome:
        if request.path.startswith("/internal/state/m/"):
            asked.append(request.path)
            return refusal("model_replaced")
        return shards(request)

    with refused_with("model_replaced"):
        drive(save(cluster, "m", str(tmp_path / "c"), deadline(), overwrite=False), answer)
    assert all("generation=7" in path for path in asked)


def test_a_page_is_no_partition(cluster: Cluster, shards: Shards, tmp_path: Path) -> None:
    """A save fails if somebody else answers for a partition, and says what they answered."""

    def answer(request: Request) -> Outcome:
        page = Response(200, {"content-type": "text/html"}, b"<html>Sorry</html>")
        return page if request.path.startswith("/internal/state/m/1") else shards_of(request)

    def shards_of(request: Request) -> Outcome:
        return state_of(shards, index_of(request), clock=7) if "/state/" in request.path else shards(request)

    with pytest.raises(PsError, match="HTTP 200: '<html>Sorry"):
        drive(save(cluster, "m", str(tmp_path / "c"), deadline(), overwrite=False), answer)


def test_values_are_read_again_if_sync_ends_meanwhile(cluster: Cluster, shards: Shards, tmp_path: Path) -> None:
    """A checkpoint that says sync holds no value of after its end, though partitions keep the clock that they had."""
    shards.spec = replace(shards.spec, consistency=ConsistencySpec("sync"))
    read: list[int] = []

    def answer(request: Request) -> Outcome:
        if request.path == "/models/m/workers":
            return Response(200, {}, b'{"items": []}')
        if not request.path.startswith("/internal/state/m/"):
            return shards(request)
        index = index_of(request)
        read.append(index)
        if len(read) == 3:  # a shard has heard of it, and applies the next push by itself
            shards.spec = replace(shards.spec, consistency=ConsistencySpec("async"))
            shards.flat += 1.0
        return state_of(shards, index, clock=5)

    manifest = drive(save(cluster, "m", str(tmp_path / "c"), deadline(), overwrite=False), answer)
    assert manifest["spec"]["consistency"]["mode"] == "async"
    assert sorted(read) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_checkpoint_that_takes_longer_than_the_timeout_says_where_to_look() -> None:
    """After a timeout the cluster may be writing the checkpoint still: the error says so, and is not retryable."""
    silent = problem("in_doubt", "http://a:1 did not answer within 30 s")

    with pytest.raises(InDoubt, match="did not answer within 30 s") as e:
        drive(save_checkpoint("m", 1, "mine", deadline()), lambda _: silent)

    assert "model.checkpoints()" in e.value.hint
    assert not e.value.retryable
