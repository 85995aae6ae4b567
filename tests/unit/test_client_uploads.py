"""Values that the client sends by name: in how many requests, and what becomes of a creation whose upload fails."""

import asyncio
import gc
import io
import json
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest

import paramserver as ps
from paramserver.client import control, uploads
from paramserver.client.cluster import Cluster, ModelMap
from paramserver.errors import InDoubt, PsError, RequestError, Unavailable, problem
from paramserver.net.calls import Deadline, Outcome, Pause, Request, Response
from paramserver.types import F32

from .sharding import A, Now, answered, drive, refusal, result

Values = dict[str, F32]
DONE = Response(200, {}, b"{}")


def document(values: Values, partitions: int = 1, **members: Any) -> dict[str, Any]:
    """The document of a model `m` with these parameters, all owned by a shard at `A`."""
    params = {n: {"shape": list(v.shape), "init": {"kind": "upload"}} for n, v in values.items()}
    return {
        "name": "m", "generation": 7, "timeline": 0, "clock": 0, "map_epoch": 1, "state": "ready", "missing": [],
        "spec": {"name": "m", "params": params, "partitions": partitions},
        "partitions": [{"index": i, "shard": "a"} for i in range(partitions)],
        "shards": {"a": {"addresses": [A]}},
    } | members  # fmt: skip


def put(cluster: Cluster, values: Values, now: Now, token: str | None = None) -> Any:
    """The call that sends the values, under a map whose shard answers at its own address."""
    answers = Response(200, {}, b"{}")
    model_map = drive(cluster.store_document(document(values), Deadline.after(30, now)), lambda _: answers, now)
    return uploads.put_values(cluster, model_map, values, Deadline.after(30, now), token)


def test_small_values_are_sent_at_the_same_time(now: Now, cluster: Cluster) -> None:
    """Values go in few rounds, a large one alone; what fails for a moment is sent again, but not to its owner."""
    values = {f"p{i}": np.full(2, i, np.float32) for i in range(40)}
    values |= {"large": np.zeros(uploads.AT_ONCE_BYTES // 4, np.float32)}
    rounds: list[list[str]] = []
    direct: list[str] = []
    failing = {"p3", "large"}

    def answer(request: Request) -> Outcome:
        name = request.path.rpartition("/")[2]
        rounds[-1].append(name)
        if request.to == A:
            direct.append(name)
        if name in failing:
            failing.remove(name)
            return refusal("unavailable")
        return DONE

    call = put(cluster, values, now, "secret")
    effect = next(call)
    with suppress(StopIteration):
        while True:
            if not isinstance(effect, Pause):
                rounds.append([])
            effect = call.send([] if isinstance(effect, Pause) else [answer(r) for r in effect])

    small = [f"p{i}" for i in range(40)]
    assert rounds == [small[:32], ["p3", *small[32:]], ["large"], ["large"]]
    assert direct == [*small, "large"]


def test_tiny_values_are_uploaded_whatever_numpy_is_told(now: Now, cluster: Cluster) -> None:
    """Values too small for float32 are sent as zeros, also after `np.seterr(all="raise")`."""
    tiny: Any = np.full(2, 1e-300)
    sent = list[Any]()

    def answer(request: Request) -> Outcome:
        sent.append(np.load(io.BytesIO(request.body or b"")).tolist())
        return DONE

    with np.errstate(all="raise"):
        drive(put(cluster, {"w": tiny}, now), answer, now)
    assert sent == [[0.0, 0.0]]


def test_an_upload_that_its_deadline_ends_says_how_far_it_came(now: Now, cluster: Cluster) -> None:
    """When time runs out between rounds, the error counts what was sent, not only the short time of the last round."""
    values = {f"p{i}": np.zeros(2, np.float32) for i in range(100)}

    def answer(request: Request) -> Outcome:
        now.s += 0.4  # for each parameter: 25 s for the first two rounds
        return DONE if now.s < 126.0 else problem("in_doubt", "no answer within 0.2 s")

    with pytest.raises(InDoubt, match=r"no answer within 0.2 s.*64 of 100 parameters were confirmed") as e:
        drive(put(cluster, values, now), answer, now)
    assert "timeout=" in e.value.hint


def test_a_value_that_is_refused_ends_the_upload(now: Now, cluster: Cluster) -> None:
    """A refusal is raised at once, with the parameters and the reasons of all that were refused."""
    values = {n: np.zeros(1, np.float32) for n in "abc"}
    refused = {"a": refusal("invalid_shape"), "b": DONE, "c": refusal("invalid_shape", "'c' is wrong")}
    with pytest.raises(RequestError, match=r"^'a': said the shard; 'c' is wrong$"):
        drive(put(cluster, values, now), lambda r: refused[r.path[-1]])


def test_an_upload_left_to_the_garbage_collector_says_nothing(now: Now, cluster: Cluster) -> None:
    """A request for an upload can be collected at any time (Python 3.13 warned of a file that is still read)."""
    call = put(cluster, {"a": np.zeros(4, np.float32)}, now)
    cycle: list[Any] = [next(call)]
    cycle.append(cycle)
    call.close()
    del cycle, call
    gc.collect()


class Server:
    """A scheduler and its shards that take the first values of one new model."""

    def __init__(self, values: Values, partitions: int) -> None:
        self.values, self.partitions = values, partitions
        self.got = {n: np.full(v.size, np.nan, np.float32) for n, v in values.items()}
        self.log: list[str] = []
        self.refuse: Callable[[Request], Outcome | None] = lambda _: None
        self.here, self.token = False, ""

    @property
    def complete(self) -> bool:
        """Whether all values have come."""
        return not any(np.isnan(v).any() for v in self.got.values())

    def __call__(self, request: Request) -> Outcome:
        path = urlsplit(request.path)
        if path.path == "/livez":
            return problem("unreachable", "no")
        self.log.append(f"{request.method} {request.path}")
        refused = self.refuse(request)
        if refused is not None:
            return refused
        if request.method == "PUT":
            assert request.body is not None
            sent, name = np.load(io.BytesIO(bytes(request.body))), path.path.rpartition("/")[2]
            assert sent.nbytes <= 256
            query = dict(parse_qsl(path.query))
            self.got[name][int(query.get("start", 0)) : int(query.get("stop", sent.size))] = sent.reshape(-1)
            return DONE
        missing = sorted(n for n, v in self.got.items() if np.isnan(v).any())
        if request.method == "DELETE":
            if request.headers["x-upload-token"] != self.token or self.complete:
                return refusal("upload_in_progress")
            self.here = False
            return Response(204, {})
        state = "initializing" if missing else "ready"
        body = document(self.values, self.partitions, state=state, missing=missing)
        if request.method == "POST":
            self.here, self.token = True, request.headers["x-upload-token"]
            return Response(201, {}, json.dumps(body | {"upload_token": self.token}).encode())
        return Response(200, {}, json.dumps(body).encode())

    def create(self, cluster: Cluster, now: Now) -> ModelMap:
        """Create the model and upload its values."""
        spec = document(self.values, self.partitions)["spec"]
        call = control.create_model(
            cluster, spec, self.values, Deadline.after(30, now), control.Creation(), exist_ok=False
        )
        return drive(call, self, now)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server for a parameter as large as a partition may be, and for a larger one that is not contiguous."""
    monkeypatch.setattr(uploads, "PARTITION_BYTES_MAX", 256)
    large = np.arange(240, dtype=np.float32).reshape(12, 20).T
    return Server({"small": np.ones((8, 8), np.float32), "large": large}, partitions=5)


def test_a_parameter_larger_than_a_partition_may_be_is_sent_in_ranges(
    now: Now, cluster: Cluster, server: Server
) -> None:
    """A larger parameter goes partition by partition, so that no request is larger than a partition may be."""
    model_map = server.create(cluster, now)

    assert {n: v.tolist() for n, v in server.got.items()} == {n: v.ravel().tolist() for n, v in server.values.items()}
    begin, end = model_map.layout.offsets["large"]
    cuts = [begin, *(b for b in model_map.layout.bounds if begin < b < end), end]
    ranges = [f"?start={a - begin}&stop={b - begin}" for a, b in pairwise(cuts)]
    puts = [line for line in server.log if line.startswith("PUT")]
    assert puts == ["PUT /models/m/params/small", *(f"PUT /models/m/params/large{r}" for r in ranges)]


def test_values_that_are_lost_during_an_upload_are_sent_again(now: Now, cluster: Cluster, server: Server) -> None:
    """If a shard dies while the first values are uploaded, those that the model lacks again are uploaded again."""

    def lose(request: Request) -> Outcome | None:
        if request.method == "GET":
            server.got["small"][:] = np.nan
            server.refuse = lambda _: None
        return None

    server.refuse = lose
    server.create(cluster, now)

    assert server.log.count("PUT /models/m/params/small") == 2
    assert np.array_equal(server.got["small"], np.ones(64))


@pytest.mark.parametrize(("code", "raised"), [("not_built", RequestError), ("storage_unavailable", Unavailable)])
def test_a_creation_whose_upload_fails_leaves_nothing_behind(
    now: Now, cluster: Cluster, server: Server, code: str, raised: type[PsError]
) -> None:
    """If values are refused, or time runs out, the new model is deleted, so that its name is free."""
    server.refuse = lambda r: refusal(code) if "/params/large" in r.path else None

    with pytest.raises(raised, match="said the shard"):
        server.create(cluster, now)

    assert not server.here
    assert server.log[-1] == "DELETE /models/m"


@pytest.mark.parametrize("kind", [ps.Client, ps.AsyncClient])
def test_a_creation_that_ends_in_doubt_leaves_nothing_behind(
    server: Server, kind: type[ps.Client] | type[ps.AsyncClient]
) -> None:
    """If the answer to the creation itself does not come in time, the model that may have been made is deleted."""

    def lost(request: Request) -> Outcome | None:
        if request.method != "POST":
            return None
        server.here, server.token = True, request.headers["x-upload-token"]
        return problem("in_doubt", "no answer within 1 s")

    server.refuse = lost
    with pytest.raises(InDoubt):
        result(answered(kind, server).create_model("m", server.values, partitions=5, timeout=0.5))

    assert not server.here


@pytest.mark.parametrize(
    ("kind", "own"),
    [(ps.Client, KeyboardInterrupt), (ps.AsyncClient, asyncio.CancelledError), (ps.Client, MemoryError)],
)
def test_a_creation_that_is_interrupted_leaves_nothing_behind(
    server: Server, kind: type[ps.Client], own: type[BaseException]
) -> None:
    """If Ctrl-C, a cancelled task or an error of Python's ends an upload, the new model is deleted."""

    def interrupt(request: Request) -> Outcome | None:
        if "/params/large" in request.path:
            raise own
        return None

    server.refuse = interrupt
    with pytest.raises(own):
        result(answered(kind, server).create_model("m", server.values, partitions=5))

    assert not server.here


def test_a_removal_that_is_interrupted_is_made_again() -> None:
    """Whoever is interrupted as it removes what it made has not removed it: the caller's removal is still made."""
    creation = control.Creation()
    creation.name = "m"
    own = creation.remove()
    next(own)
    own.close()

    (request,) = next(creation.remove())  # type: ignore[misc]
    assert (request.method, request.path) == ("DELETE", "/models/m")


@pytest.mark.parametrize(("code", "token"), [("upload_in_progress", None), ("not_built", ""), ("not_built", "b")])
def test_a_model_that_may_be_anothers_is_not_deleted(
    now: Now, cluster: Cluster, server: Server, code: str, token: str | None
) -> None:
    """After a failed upload a model stays if another client uploads its values, told or not, or all have come."""

    def refuse(request: Request) -> Outcome | None:
        if request.method != "PUT":
            return None
        server.token = server.token if token is None else token
        return refusal(code)

    server.refuse = refuse
    with pytest.raises(PsError):
        server.create(cluster, now)

    assert server.here
