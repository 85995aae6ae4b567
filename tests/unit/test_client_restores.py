"""A client that restores a checkpoint from its own disk, against shards and a scheduler in memory."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from tests.refusals import refused_with

import paramserver as ps
from paramserver import checkpoint
from paramserver.client.checkpointing import restore
from paramserver.client.cluster import Cluster
from paramserver.client.control import Creation
from paramserver.core.spec import ModelSpec
from paramserver.errors import problem
from paramserver.net.calls import Deadline, Outcome, Request, Response
from paramserver.wire.frame import MEDIA_TYPE, PushReply, encode_header

from .session_node import deadline
from .sharding import Now, Shards, answered, drive, result
from .strangers import REPLACED

RESTORED = "/internal/models/m/restored"
SET = "/internal/set/m"
SET_ANSWER = Response(
    200, {"content-type": MEDIA_TYPE}, encode_header(PushReply("applied", False, 0, 0, 7, 0, [(0, 1, 9, 0)]))
)


def restored(
    cluster: Cluster, shards: Shards, folder: Path, limit: int, changes: list[str], spec: ModelSpec | None = None
) -> None:
    """Restore a checkpoint with large states of two workers in place; note the paths of what changes the model.

    The request of that number which brings states is refused.
    """
    spec = spec or shards.spec
    values = {p.name: np.zeros(p.shape, np.float32) for p in spec.params}
    states = {"m/w0": [1], "m/w1": "x" * 300_000}
    checkpoint.write(folder / "c", spec, values, {}, {}, [1] * spec.partitions, states, {})

    def answer(request: Request) -> Outcome:
        if request.path not in (RESTORED, SET):
            return shards(request)
        changes.append(request.path)
        if request.path == SET:
            return SET_ANSWER
        full = changes.count(RESTORED) == limit
        return problem("too_large", "full") if full else Response(200, {}, json.dumps(shards.document()).encode())

    drive(restore(cluster, str(folder / "c"), None, None, deadline(), Creation(), exist_ok=True), answer)


@pytest.mark.parametrize("answer", REPLACED)
def test_a_partition_whose_answer_was_replaced_is_set_again(
    cluster: Cluster, shards: Shards, tmp_path: Path, answer: Response
) -> None:
    """A restore takes nobody's word but a shard's for it that a partition is set."""
    checkpoint.write(tmp_path / "c", shards.spec, {"w": np.zeros((10, 5)), "b": np.zeros(14)}, {}, {}, [1] * 4, {}, {})
    replaced, sets = [answer], list[str | None]()

    def between(request: Request) -> Outcome:
        if request.path == SET:
            sets.append(request.to)
            return replaced.pop() if replaced else SET_ANSWER
        return shards(Request("GET", "/models/m") if request.path == RESTORED else request)

    drive(restore(cluster, str(tmp_path / "c"), None, None, deadline(), Creation(), exist_ok=True), between, Now())
    assert len(sets) == 5


def test_the_workers_states_are_brought_before_the_values(cluster: Cluster, shards: Shards, tmp_path: Path) -> None:
    """Whoever joins during a restore has the state of the values that come; the end is told once all are set."""
    changes: list[str] = []
    restored(cluster, shards, tmp_path, 0, changes)
    assert changes == [RESTORED, RESTORED, SET, SET, SET, SET, RESTORED]


@pytest.mark.parametrize("ever", [True, False])
def test_a_restore_that_a_death_undoes_before_its_end_is_told_sets_again(
    cluster: Cluster, shards: Shards, tmp_path: Path, ever: bool
) -> None:
    """If the scheduler says that values were lost, the client sets those again; at its deadline it gives up."""
    checkpoint.write(tmp_path / "c", shards.spec, {"w": np.zeros((10, 5)), "b": np.zeros(14)}, {}, {}, [1] * 4, {}, {})
    tokens, sets, told, now = [9] * 4, 0, list[list[list[int]]](), Now()

    def answer(request: Request) -> Outcome:
        nonlocal sets
        if request.path == SET:
            sets += 1
            return SET_ANSWER
        if request.path == RESTORED:
            assert request.body is not None
            told.append(json.loads(bytes(request.body))["given"])
            if ever or len(told) == 1:
                tokens[2] += 1
                return problem("conflict", "lost values")
        elif request.path != "/models/m":
            return shards(request)
        document = shards.document()
        for line, token in zip(document["partitions"], tokens, strict=True):
            line["incarnation"] = token
        return Response(200, {}, json.dumps(document).encode())

    call = restore(cluster, str(tmp_path / "c"), None, None, Deadline.after(5.0, now), Creation(), exist_ok=True)
    if ever:
        with refused_with("conflict", match="lost values"):
            drive(call, answer, now)
        return
    assert drive(call, answer, now).generation == shards.generation
    assert (sets, told) == (5, [[[0, 9], [1, 9], [2, 9], [3, 9]], [[0, 9], [1, 9], [2, 10], [3, 9]]])


def test_a_restore_whose_states_do_not_fit_sets_no_value(cluster: Cluster, shards: Shards, tmp_path: Path) -> None:
    """If the scheduler refuses the workers' states, the model keeps its values."""
    changes: list[str] = []
    with refused_with("too_large"):
        restored(cluster, shards, tmp_path, 2, changes)
    assert SET not in changes


def test_a_restore_whose_values_do_not_fit_sets_no_state(cluster: Cluster, shards: Shards, tmp_path: Path) -> None:
    """A checkpoint with other shapes than the model's is refused before anything of the model is changed."""
    changes: list[str] = []
    with refused_with("invalid_shape"):
        restored(cluster, shards, tmp_path, 0, changes, Shards(w=(10, 6)).spec)
    assert changes == []


def test_a_new_model_whose_restore_fails_is_removed(cluster: Cluster, shards: Shards, tmp_path: Path) -> None:
    """A client that cannot complete a model it has made deletes it, under the token that it was made with."""
    checkpoint.write(tmp_path / "c", shards.spec, {"w": np.zeros((10, 5)), "b": np.zeros(14)}, {}, {}, [1] * 4, {}, {})
    tokens: list[str] = []

    def answer(request: Request) -> Outcome:
        if "x-upload-token" not in request.headers:
            return problem("non_finite", "no") if request.path == SET else shards(request)
        tokens.append(f"{request.method} {request.path} {request.headers['x-upload-token']}")
        return Response(201, {}, json.dumps(shards.document()).encode())

    with refused_with("non_finite"):
        drive(restore(cluster, str(tmp_path / "c"), None, None, deadline(), Creation(), exist_ok=False), answer)
    made, removed = (t.rpartition(" ") for t in tokens)
    assert (made[0], removed[0]) == ("POST /internal/models", "DELETE /models/m")
    assert made[2] == removed[2]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("kind", "own"), [(ps.Client, KeyboardInterrupt), (ps.AsyncClient, asyncio.CancelledError)])
def test_a_new_model_whose_restore_is_interrupted_is_removed(
    shards: Shards, tmp_path: Path, kind: type[ps.Client], own: type[BaseException], in_place: bool
) -> None:
    """If Ctrl-C or a cancelled task ends a restore, the model is deleted if the restore made it; another one is not."""
    checkpoint.write(tmp_path / "c", shards.spec, {"w": np.zeros((10, 5)), "b": np.zeros(14)}, {}, {}, [1] * 4, {}, {})
    made: list[str] = []

    def answer(request: Request) -> Outcome:
        if request.path == SET:
            raise own
        if request.path in (RESTORED, "/models/m") and request.method != "DELETE":
            return shards(Request("GET", "/models/m"))
        if request.path == "/livez":
            return shards(request)
        made.append(f"{request.method} {request.path}")
        return Response(201, {}, json.dumps(shards.document()).encode())

    with pytest.raises(own):
        result(answered(kind, answer).restore(tmp_path / "c", exist_ok=in_place))
    assert made == ([] if in_place else ["POST /internal/models", "DELETE /models/m"])
