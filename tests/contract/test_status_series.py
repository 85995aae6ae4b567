"""`/status/series`, `/status/events` and `/status/stream` of a real cluster, from the scheduler and from a shard."""

import json
import time
from typing import Any

import httpx
import pytest
from tests.waiting import eventually

from paramserver import limits
from paramserver_scheduler.history import UNITS

from .processes import Nodes, unique

pytestmark = pytest.mark.process

SGD = {"name": "sgd", "lr": 0.1}


class Work:
    """A worker of a model; counts its steps."""

    def __init__(self, cluster: Nodes, model: str) -> None:
        self._cluster, self._model, self.steps = cluster, model, 0
        self._worker = cluster.post(f"/models/{model}/workers", {"name": "a", "lease_s": 600}, status=201)

    def step(self) -> None:
        """Push a gradient, pull the values and report a loss."""
        self.steps += 1
        who = {k: self._worker[k] for k in ("worker", "epoch")}
        push = {"model": self._model, **who, "seq": self.steps, "base_version": self.steps - 1}
        self._cluster.post("/push", {**push, "grads": {"w": [0.5] * 64}})
        self._cluster.post("/pull", {"model": self._model})
        report = {"worker": self._worker["worker"], "metrics": {"loss": 1.0 / self.steps}}
        self._cluster.post(f"/models/{self._model}/metrics", report)


@pytest.fixture(scope="module")
def model(rest_cluster: Nodes) -> str:
    """The name of a model with 64 elements in four partitions."""
    name = unique("watched")
    spec = {"name": name, "params": {"w": {"shape": [64]}}, "optimizer": SGD, "partitions": 4}
    rest_cluster.post("/models", spec, status=201)
    return name


@pytest.fixture(scope="module")
def work(rest_cluster: Nodes, model: str) -> Work:
    """A worker that has made three steps."""
    work = Work(rest_cluster, model)
    for _ in range(3):
        work.step()
    return work


def series(cluster: Nodes, metric: str, status: int = 200, **query: Any) -> Any:
    answer = cluster.http.get("/status/series", params={"metric": metric, **query})
    assert answer.status_code == status, answer.text
    return answer.json()


def values(answer: Any, **labels: str) -> list[float]:
    (item,) = [i for i in answer["items"] if labels.items() <= i["labels"].items()]
    assert len(item["values"]) == answer["count"]
    return [v for v in item["values"] if v is not None]


def test_what_a_model_did_can_be_read_later(rest_cluster: Nodes, model: str, work: Work) -> None:
    """Push rate, push time, traffic, worker lag, reported loss and version of a model have series with units."""
    metrics = "model.pushes_per_s,model.push_p99_s,model.in_bytes_per_s,worker.lag,reported.loss,model.version"

    def told() -> Any:
        work.step()
        answer = series(rest_cluster, metrics, model=model, step=1)
        known = {i["metric"]: [v for v in i["values"] if v is not None] for i in answer["items"]}
        # Between a push and the heartbeat that reports it, the series are incomplete.
        whole = len(known) == 6 and max(known["model.version"], default=0) >= 3
        return answer if whole and max(known["model.pushes_per_s"], default=0) > 0 else None

    answer = eventually(told, what="all six series, with three pushes at least")

    assert {i["metric"]: i["unit"] for i in answer["items"]} == {
        "model.pushes_per_s": "1/s",
        "model.push_p99_s": "s",
        "model.in_bytes_per_s": "B/s",
        "worker.lag": "versions",
        "reported.loss": "",
        "model.version": "versions",
    }
    assert answer["step_s"] == 1
    assert abs(answer["start_s"] + answer["count"] - time.time()) < 15
    by_name = {i["metric"]: {"count": answer["count"], "items": [i]} for i in answer["items"]}
    assert 3 <= max(values(by_name["model.version"], model=model)) <= work.steps
    assert max(values(by_name["model.pushes_per_s"], model=model)) > 0
    assert 0 < max(values(by_name["model.push_p99_s"], model=model)) < 30
    assert 0 <= min(values(by_name["worker.lag"], worker=f"{model}/a"))
    assert max(values(by_name["worker.lag"], worker=f"{model}/a")) <= 2
    assert 0 < min(values(by_name["reported.loss"])) <= 1.0


def test_every_metric_of_the_list_can_be_asked_for(rest_cluster: Nodes, model: str) -> None:
    """Every metric of `UNITS` can be queried, and those of nodes and of the cluster have values of the last seconds."""
    names = list(UNITS)

    def told() -> Any:
        answer = series(rest_cluster, ",".join(names))
        nodes = {i["labels"]["node"] for i in answer["items"] if i["metric"] == "node.rss_bytes"}
        whole = len({i["metric"] for i in answer["items"]}) > 12 and {"shard-0", "shard-1"} < nodes
        return answer if whole else None

    answer: Any = eventually(told, what="a second's record of all nodes")

    assert {i["metric"] for i in answer["items"]} <= set(names)
    rss = series(rest_cluster, "node.rss_bytes", node="shard-0")
    assert min(values(rss, node="shard-0")) > 10 << 20
    span: dict[str, Any] = {"from": time.time() - 60, "step": 1}
    shards = values(series(rest_cluster, "cluster.shards", **span))
    assert max(shards) == 2


@pytest.mark.parametrize(
    "query",
    [
        {"metric": ""},
        {"metric": "no.such"},
        {"metric": ",".join(["model.lag"] * 33)},
        {"metric": "model.lag", "step": "x"},
        {"metric": "model.lag", "step": str(limits.STATUS_SPAN_S_MAX + 1)},
        {"metric": "model.lag", "from": "-1"},
        {"metric": "model.lag", "from": "nan"},
        {"metric": "model.lag", "from": "200", "to": "100"},
    ],
)
def test_a_wrong_question_is_refused(rest_cluster: Nodes, query: dict[str, str]) -> None:
    """An unknown metric, an invalid number or a reversed time span gets 400; an unknown query parameter gets 422."""
    answer = rest_cluster.http.get("/status/series", params=query)

    assert (answer.status_code, answer.json()["code"]) == (400, "malformed")
    assert answer.json()["detail"]
    unknown = rest_cluster.http.get("/status/series", params={"metric": "model.lag", "form": "100"})
    assert (unknown.status_code, unknown.json()["where"]) == (422, "form")


def test_a_model_that_is_not_there_has_no_reports(rest_cluster: Nodes) -> None:
    """Series of an unknown model are answered with 404, so that a misspelled name does not look like missing data."""
    assert series(rest_cluster, "reported.loss", status=404, model="no-such-model")["code"] == "unknown_model"


def test_events_can_be_chosen(rest_cluster: Nodes, model: str) -> None:
    """Events can be filtered by kind and start time and limited in number; the newest comes first."""
    created = rest_cluster.get("/status/events?kind=model_created")["items"]
    assert any(model in e["text"] for e in created)
    assert {e["kind"] for e in created} == {"model_created"}
    all_of_them = rest_cluster.get("/status/events?limit=500")["items"]
    assert [e["at"] for e in all_of_them] == sorted((e["at"] for e in all_of_them), reverse=True)
    newest = all_of_them[0]["at"]
    assert rest_cluster.get(f"/status/events?from={newest + 1000}")["items"] == []
    assert len(rest_cluster.get("/status/events?limit=1")["items"]) == 1
    assert rest_cluster.get("/status/events?limit=0", status=400)["code"] == "malformed"


def test_the_stream_tells_every_second_from_any_node(rest_cluster: Nodes, model: str, work: Work) -> None:
    """Scheduler and shard send the status as server-sent events, each newer than the last, without the series."""
    shard = f"http://127.0.0.1:{rest_cluster.shard_ports['shard-0']}"
    for url in (rest_cluster.url, shard):
        seen: list[Any] = []
        watched: Any = {"version": 0}
        with httpx.stream("GET", f"{url}/status/stream", timeout=30.0) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    seen.append(json.loads(line.removeprefix("data: ")))
                    watched = next((m for m in seen[-1]["models"] if m["name"] == model), watched)
                # The newest version is told with the next heartbeats of the shards.
                if (len(seen) >= 3 and watched["version"] >= work.steps) or len(seen) == 20:
                    break
        times = [s["cluster"]["now"] for s in seen]
        assert times == sorted(set(times))
        assert watched["version"] == work.steps
        assert watched["latest"]["loss"][1] <= 1.0
        assert sorted(watched["shards"]) == ["shard-0", "shard-1"]
        assert len(watched["owners"]) == watched["partitions"] == 4
        assert set(watched["owners"]) == {0, 1}
