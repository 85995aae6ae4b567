"""Every control route of a real scheduler over real sockets: what it accepts, answers and refuses."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from tests.waiting import eventually

from paramserver.wire.frame import MEDIA_TYPE

from .processes import Nodes, nodes, unique

pytestmark = pytest.mark.process

SYNC = {"mode": "sync", "min_workers": 2}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """One scheduler and one shard for the whole module."""
    with nodes(tmp_path_factory.mktemp("nodes")) as running:
        yield running


def make(cluster: Nodes, **more: Any) -> str:
    """Create a model of two numbers; return its name."""
    name = unique("m")
    spec = {"name": name, "params": {"a": {"shape": []}, "b": {"shape": []}}, "optimizer": {"name": "sgd", "lr": 0.5}}
    cluster.post("/models", spec | more, status=201)
    return name


def test_a_model_is_made_once(cluster: Nodes) -> None:
    """Creating a model is 201 with Location, again 200, with another spec 409, with a wrong one 422 and a hint."""
    spec = {"name": unique("m"), "params": {"w": {"shape": [3]}}, "partitions": 2}
    made = cluster.http.post("/models", json=spec)

    assert made.status_code == 201
    assert made.headers["location"] == f"/models/{spec['name']}"
    assert [p["index"] for p in made.json()["partitions"]] == [0, 1]
    assert made.json()["bounds"] == [0, 1, 3]
    assert cluster.post("/models", spec, status=200)["generation"] == made.json()["generation"]
    assert cluster.post("/models", spec | {"partitions": 1}, status=409)["code"] == "model_exists"
    wrong = cluster.post("/models", spec | {"optimiser": {}}, status=422)
    assert wrong["hint"] == "did you mean 'optimizer'?"
    assert cluster.get(f"/models/{spec['name']}")["spec"]["ack"] == "applied"
    assert spec["name"] in [m["name"] for m in cluster.get("/models")["items"]]


def test_lists_come_in_pages(cluster: Nodes) -> None:
    """Lists are paged by `limit` and `after`, and invalid values of these are 400."""
    names = {make(cluster) for _ in range(3)}
    seen: list[str] = []
    path = "/models?limit=2"
    while True:
        page = cluster.get(path)
        assert 1 <= len(page["items"]) <= 2
        seen += [m["name"] for m in page["items"]]
        if page["next"] is None:
            break
        path = f"/models?limit=2&after={page['next']}"

    assert names <= set(seen)
    assert len(seen) == len(set(seen))
    for query in ("limit=0", "limit=x", "limit=-1", "after=1.5", "limit=99999999999999999999"):
        assert cluster.get(f"/models?{query}", status=400)["code"] == "malformed"


def test_a_page_of_large_items_has_fewer(cluster: Nodes) -> None:
    """A page of workers with large states ends before 4 MiB, and the next pages have the others."""
    name = make(cluster)
    for i in range(6):
        joined = cluster.post(f"/models/{name}/workers", {"name": f"w{i}", "lease_s": 60}, status=201)
        state = "x" * 1_000_000
        cluster.call("PUT", f"/models/{name}/workers/{joined['worker']}", {"epoch": joined["epoch"], "state": state})
    seen: list[str] = []
    after = "0"
    while after is not None:
        page = cluster.get(f"/models/{name}/workers?after={after}")
        assert 1 <= len(page["items"]) <= 4
        seen += [w["worker"] for w in page["items"]]
        after = page["next"]

    assert seen == [f"{name}/w{i}" for i in range(6)]


def test_settings_change_and_a_model_goes(cluster: Nodes) -> None:
    """PATCH raises the revision and cannot change what is fixed; DELETE is 204, then 404."""
    name = make(cluster)

    assert cluster.call("PATCH", f"/models/{name}", {"optimizer": {"lr": 0.25}})["revision"] == 1
    assert cluster.get(f"/models/{name}")["spec"]["optimizer"]["lr"] == 0.25
    cluster.call("PATCH", f"/models/{name}", {"partitions": 9}, status=422)
    assert cluster.call("DELETE", f"/models/{name}", status=204) is None
    for method in ("GET", "DELETE"):
        assert cluster.call(method, f"/models/{name}", status=404)["code"] == "unknown_model"


def test_two_workers_train_in_step(cluster: Nodes) -> None:
    """Two workers train in sync mode in plain JSON: one commit applies the mean of both gradients."""
    name = make(cluster, consistency=SYNC)
    joined = [cluster.post(f"/models/{name}/workers", {"name": n, "lease_s": 60}, status=201) for n in ("anna", "ben")]
    assert [(j["worker"], j["epoch"], j["rank"]) for j in joined] == [(f"{name}/anna", 1, 0), (f"{name}/ben", 1, 1)]

    for worker, grads in ((f"{name}/anna", {"a": 1.0, "b": 2.0}), (f"{name}/ben", {"a": 3.0, "b": -2.0})):
        push = {"model": name, "grads": grads, "worker": worker, "epoch": 1, "seq": 1, "clock": 0}
        assert cluster.post("/push", push, status=202)["state"] == "staged"
    alone = cluster.post(f"/models/{name}/clock", {"worker": f"{name}/anna", "epoch": 1, "clock": 1})
    assert (alone["released"], alone["waiting_for"]) == (False, [f"{name}/ben"])
    report = {"worker": f"{name}/ben", "epoch": 1, "clock": 1, "wait_s": 20}
    assert cluster.post(f"/models/{name}/clock", report)["released"] is True
    pulled = cluster.post("/pull", {"model": name, "min_version": 1, "wait_s": 20})

    assert pulled["params"] == {"a": -1.0, "b": 0.0}
    assert pulled["version"] == 1


@pytest.mark.parametrize("slash", ["/", "%2F"])
def test_worker_ids_hold_a_slash(cluster: Nodes, slash: str) -> None:
    """A worker id in a path is accepted with its slash plain or escaped, also before a suffix."""
    name = make(cluster)
    worker = cluster.post(f"/models/{name}/workers", {"name": "w", "above": 6, "lease_s": 60}, status=201)
    assert worker["epoch"] == 7
    path = f"/models/{name}/workers/{name}{slash}w"

    assert cluster.call("PUT", path, {"epoch": 7, "clock": 3, "metrics": {"loss": 0.5}})["state"] == "active"
    assert cluster.get(path)["clock"] == 3
    cluster.post(f"{path}/drain", status=200)
    assert cluster.call("PUT", path, {"epoch": 7})["state"] == "draining"
    assert cluster.call("PUT", path, {"epoch": 6}, status=409)["code"] == "fenced"
    found = cluster.get(f"/internal/models/{name}/worker?worker={name}{slash}w")
    assert (found["epoch"], found["generation"]) == (7, worker["generation"])
    cluster.call("DELETE", f"{path}?epoch=7", status=204)
    assert cluster.get(f"/models/{name}/workers/{name}/nobody", status=404)["code"] == "unknown_worker"


def test_data_is_leased_and_done(cluster: Nodes) -> None:
    """Each range of a dataset is leased to a worker once; when all are done the dataset is finished."""
    name = make(cluster)
    worker = cluster.post(f"/models/{name}/workers", {"lease_s": 60}, status=201)["worker"]
    dataset = {"dataset": "train", "size": 25, "task_size": 10}
    cluster.post(f"/models/{name}/tasks", dataset, status=201)
    cluster.post(f"/models/{name}/tasks", dataset, status=200)
    assert cluster.post(f"/models/{name}/tasks", dataset | {"size": 26}, status=409)["code"] == "conflict"
    ranges = []
    lease = {"worker": worker, "epoch": 1, "dataset": "train"}
    while (answer := cluster.post(f"/models/{name}/tasks/lease", lease))["task"]:
        task = answer["task"]
        ranges.append((task["start"], task["stop"]))
        done = cluster.post(f"/models/{name}/tasks/{task['id']}/done", {"worker": worker, "epoch": 1})
        assert done == {"id": task["id"], "done": True}

    assert ranges == [(0, 10), (10, 20), (20, 25)]
    assert answer["finished"] is True
    assert cluster.get(f"/models/{name}/tasks")["items"][0]["dataset"] == "train"
    assert cluster.post(f"/models/{name}/tasks/lease", lease | {"dataset": "x"}, status=404)["code"] == "unknown_task"


def test_metrics_are_kept_as_series(cluster: Nodes) -> None:
    """Reported metrics come back by name and in order; values that are no numbers are refused."""
    name = make(cluster)
    for i in range(3):
        report = {"metrics": {"loss": 1.0 / (i + 1)}, "clock": i}
        assert cluster.post(f"/models/{name}/metrics", report)["accepted"] == 1
    cluster.post(f"/models/{name}/metrics", {"metrics": {"accuracy": 0.5}})

    items = cluster.get(f"/models/{name}/metrics?name=loss")["items"]
    assert [(s["name"], [p[1] for p in s["points"]]) for s in items] == [("loss", [0, 1, 2])]
    assert len(cluster.get(f"/models/{name}/metrics")["items"]) == 2
    cluster.post(f"/models/{name}/metrics", {"metrics": {"loss": "low"}}, status=422)
    model = next(m for m in cluster.get("/status")["models"] if m["name"] == name)
    last = {metric: value for metric, (_, value) in model["latest"].items()}
    assert last["accuracy"] == 0.5
    assert 1 / 3 <= last["loss"] <= 1


def test_a_run_finds_its_worker(cluster: Nodes) -> None:
    """A pool member gets a place in a run whose entry it allows, and the run ends when the entry returns."""
    name = make(cluster)
    run = cluster.post("/runs", {"model": name, "entry": "paramserver.examples.x:train", "workers": 1}, status=201)
    assert run["state"] == "waiting"
    assert "paramserver-worker" in run["reason"]
    member = cluster.post("/pool", {"allow": ["paramserver.examples"]}, status=201)
    path = f"/pool/{member['member']}"

    given = eventually(lambda: cluster.call("PUT", path, {"epoch": member["epoch"]})["run"])
    assert (given["id"], given["entry"]) == (run["id"], "paramserver.examples.x:train")
    assert cluster.get(f"/runs/{run['id']}")["state"] == "running"
    assert member["member"] in [m["member"] for m in cluster.get("/pool")["items"]]
    done = {"member": member["member"], "epoch": member["epoch"], "error": None}
    assert cluster.post(f"/runs/{run['id']}/places/{given['place']}/done", done)["state"] == "finished"
    assert run["id"] in [r["id"] for r in cluster.get("/runs")["items"]]
    cluster.call("DELETE", path, status=204)
    assert cluster.get("/runs/nothing", status=404)["code"] == "unknown_run"


def test_a_run_is_paused_and_stopped(cluster: Nodes) -> None:
    """PATCH pauses, resumes and stops a run; an unknown state is 422."""
    run = cluster.post("/runs", {"model": make(cluster), "entry": "a.b:c"}, status=201)
    path = f"/runs/{run['id']}"

    assert cluster.call("PATCH", path, {"state": "paused"})["state"] == "paused"
    assert cluster.call("PATCH", path, {"state": "running"})["state"] == "waiting"
    cluster.call("PATCH", path, {"state": "flying"}, status=422)
    assert cluster.call("PATCH", path, {"state": "stopped"})["state"] == "stopped"


def test_the_map_is_waited_for(cluster: Nodes) -> None:
    """`/map?since=` answers when the map is newer, and after `wait_s` at the latest."""
    epoch = cluster.get("/map")["map_epoch"]

    assert cluster.get(f"/map?since={epoch}&wait_s=0")["map_epoch"] == epoch
    make(cluster)
    assert cluster.get(f"/map?since={epoch}&wait_s=20")["map_epoch"] > epoch
    cluster.get("/map?since=x", status=400)


def test_events_tell_everything_then_changes(cluster: Nodes) -> None:
    """Server-sent events begin with the map, continue with changes, and contain no upload tokens."""
    name = unique("m")
    with cluster.http.stream("GET", "/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        assert next(lines) == "event: map"
        spec = {"name": name, "params": {"w": {"shape": [1], "init": {"kind": "upload"}}}}
        token = cluster.post("/models", spec, status=201)["upload_token"]
        for line in lines:
            assert token not in line
            if f'"name":"{name}"' in line:
                break
    assert cluster.get(f"/models/{name}")["state"] == "initializing"


def test_upload_makes_a_model_ready(cluster: Nodes) -> None:
    """Initial values uploaded through the scheduler make the model ready; a wrong token is 409."""
    name = unique("m")
    spec = {"name": name, "params": {"w": {"shape": [2], "init": {"kind": "upload"}}}}
    token = cluster.post("/models", spec, status=201)["upload_token"]
    path = f"/models/{name}/params/w"

    refused = cluster.http.put(path, json=[1.0, 2.0], headers={"X-Upload-Token": "no"})
    assert (refused.status_code, refused.json()["code"]) == (409, "upload_in_progress")
    assert cluster.http.put(path, json=[1.0, 2.0], headers={"X-Upload-Token": token}).status_code == 200
    eventually(lambda: cluster.get(f"/models/{name}")["state"] == "ready")
    assert cluster.post("/pull", {"model": name, "wait_s": 5})["params"] == {"w": [1.0, 2.0]}
    array = cluster.http.get(f"/pull/{name}/w")
    assert array.content.startswith(b"\x93NUMPY")
    again = cluster.http.get(f"/pull/{name}/w", headers={"If-None-Match": array.headers["etag"]})
    assert again.status_code == 304
    head = cluster.http.head(f"/pull/{name}/w")
    assert (head.status_code, head.headers["etag"]) == (200, array.headers["etag"])


def test_a_client_may_choose_the_upload_token(cluster: Nodes) -> None:
    """A request repeated with the token that its client chose is answered alike, with the token; a short one is 422."""
    name, chosen = unique("m"), "0123456789-abc_DEF"
    spec = {"name": name, "params": {"w": {"shape": [2], "init": {"kind": "upload"}}}}

    def create(token: str) -> Any:
        return cluster.http.post("/models", json=spec, headers={"X-Upload-Token": token})

    refused = create(chosen[:15])
    assert (refused.status_code, refused.json()["where"]) == (422, "X-Upload-Token")
    assert create("x" * 129).status_code == 422
    assert create("a space in the token").status_code == 422
    made, other, again = create(chosen), create(chosen[::-1]), create(chosen)
    assert [r.status_code for r in (made, other, again)] == [201, 200, 201]
    assert [r.json().get("upload_token") for r in (made, other, again)] == [chosen, None, chosen]


def test_msgpack_both_ways(cluster: Nodes) -> None:
    """A control route accepts and returns msgpack; byte strings and other media types are refused."""
    name = unique("m")
    kind = {"content-type": "application/msgpack"}
    spec = {"name": name, "params": {"w": {"shape": [2]}}}
    made = cluster.http.post("/models", content=msgpack.packb(spec), headers=kind)

    assert made.status_code == 201
    assert made.headers["content-type"] == "application/msgpack"
    assert msgpack.unpackb(made.content)["name"] == name
    bad = cluster.http.post("/models", content=msgpack.packb({"name": b"x"}), headers=kind)
    assert (bad.status_code, bad.json()["code"]) == (400, "malformed")
    assert cluster.http.post("/models", content="x", headers={"content-type": "text/csv"}).status_code == 415
    assert cluster.http.post("/models", json=spec, headers={"accept": "text/html"}).status_code == 406


def test_a_restore_whose_answer_cannot_be_read_is_refused_before_it_begins(cluster: Nodes) -> None:
    """A restore with an Accept that allows neither JSON nor msgpack is 406, and makes no model."""
    source, target = unique("m"), unique("m")
    cluster.post("/models", {"name": source, "params": {"w": {"shape": [2]}}}, status=201)
    cluster.post(f"/models/{source}/checkpoints", {"name": "mine"}, status=201)

    url, body = f"/models/{source}/restore", {"checkpoint": "mine", "as": target}
    assert cluster.http.post(url, json=body, headers={"accept": "text/html"}).status_code == 406
    assert cluster.get(f"/models/{target}", status=404)["code"] == "unknown_model"


BODIES: list[tuple[str, str, Any]] = [
    ("POST", "/models/{m}/workers", {"name": "x", "rank": 5}),
    ("PUT", "/models/{m}/workers/{m}/w", {"epoch": 1}),
    ("POST", "/models/{m}/clock", {"worker": "{m}/w", "epoch": 1, "clock": 0}),
    ("POST", "/models/{m}/tasks", {"dataset": "d", "size": 10, "task_size": 5}),
    ("POST", "/models/{m}/tasks/lease", {"worker": "{m}/w", "epoch": 1, "dataset": "d"}),
    ("POST", "/models/{m}/tasks/none/done", {"worker": "{m}/w", "epoch": 1}),
    ("POST", "/models/{m}/metrics", {"metrics": {"loss": 1.0}}),
    ("POST", "/models/{m}/restore", {"checkpoint": "none"}),
    (
        "POST",
        "/internal/models/{m}/restored",
        {"generation": 1, "timeline": 0, "version": 3, "workers": {}, "given": [[0, 1]]},
    ),
    ("POST", "/runs", {"model": "{m}", "entry": "a.b:c"}),
    ("PATCH", "/runs/none", {"state": "paused"}),
    ("POST", "/runs/none/places/0/done", {"member": "x", "epoch": 1}),
    ("POST", "/pool", {"allow": ["x"]}),
    ("PUT", "/pool/none", {"epoch": 1}),
    ("POST", "/internal/shards", {"name": "-", "addresses": ["http://127.0.0.1:1"]}),
    ("PUT", "/internal/shards/none", {"epoch": 1}),
]
STRANGE: list[Any] = [None, True, -1, 1 << 63, 1e308, "", "\x00", "../x", [], {}, [[]], [None], {"": None}, "é" * 300]


@pytest.mark.parametrize(("method", "path", "body"), BODIES, ids=[b[1] for b in BODIES])
def test_bad_bodies_are_the_callers_fault(cluster: Nodes, method: str, path: str, body: Any) -> None:
    """A body with any field replaced by a strange value, or with an unknown field, never causes a 5xx."""
    name = make(cluster)
    cluster.post(f"/models/{name}/workers", {"name": "w"}, status=201)
    path = path.replace("{m}", name)
    full = {k: v.replace("{m}", name) if isinstance(v, str) else v for k, v in body.items()}

    for field in full:
        for value in STRANGE:
            answer = cluster.http.request(method, path, json=full | {field: value})
            assert answer.status_code < 500, (field, value, answer.text)
    unknown = cluster.http.request(method, path, json=full | {f"{next(iter(full))}s": 1})
    assert unknown.status_code == 422
    assert "did you mean" in unknown.json()["hint"]
    for raw in (b"", b"[]", b"{", b"[" * 50_000, b"\xff", b'"\\ud800"', b"1e999"):
        answer = cluster.http.request(method, path, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 413, 422) or (raw == b"" and answer.status_code < 500), (raw, answer.text)


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "", ".hidden", "x" * 200, "\x00"])
def test_checkpoint_names_stay_in_their_folder(cluster: Nodes, name: str) -> None:
    """A checkpoint name that is not a single path component is refused."""
    model = make(cluster)

    assert cluster.post(f"/models/{model}/checkpoints", {"name": name}, status=422)["code"] == "invalid_field"
    assert cluster.post(f"/models/{model}/restore", {"checkpoint": name}, status=422)["code"] == "invalid_field"
    assert cluster.post(f"/models/{model}/restore", {"as": name}, status=422)["code"] == "invalid_field"


@pytest.mark.parametrize("name", ["latest", "best"])
def test_a_checkpoint_is_not_called_latest_or_best(cluster: Nodes, name: str) -> None:
    """The names `latest` and `best`, which stand for other checkpoints, are refused for a new one."""
    model = make(cluster)

    refused = cluster.post(f"/models/{model}/checkpoints", {"name": name}, status=422)
    assert (refused["code"], refused["where"]) == ("invalid_field", "name")
    assert cluster.get(f"/models/{model}/checkpoints")["items"] == []


def test_a_checkpoint_is_deleted_and_its_name_is_free(cluster: Nodes) -> None:
    """A checkpoint is deleted with its files, even one of an earlier model whose name is in the way.

    A name that is in use is a mistake of who asks, after which the cluster is well.
    """
    name = make(cluster)
    points, one = f"/models/{name}/checkpoints", f"/models/{name}/checkpoints/mine"
    path = Path(cluster.post(points, {"name": "mine"}, status=201)["path"])
    assert "delete it" in cluster.post(points, {"name": "mine"}, status=409)["hint"]
    cluster.call("DELETE", f"/models/{name}", status=204)
    make(cluster, name=name)

    told = cluster.post(points, {"name": "mine"}, status=409)
    assert (told["code"], str(path) in told["detail"], "delete it" in told["hint"]) == ("conflict", True, True)
    assert [p for p in cluster.get("/status")["cluster"]["problems"] if name in p] == []
    cluster.call("DELETE", one, status=204)
    assert not path.exists()
    assert cluster.post(points, {"name": "mine"}, status=201)["path"] == str(path)
    cluster.call("DELETE", one, status=204)
    assert (path.exists(), cluster.get(points)["items"]) == (False, [])
    assert cluster.call("DELETE", one, status=404)["code"] == "unknown_checkpoint"
    assert cluster.call("DELETE", f"{points}/latest", status=422)["code"] == "invalid_field"
    assert cluster.call("DELETE", "/models/none/checkpoints/x", status=404)["code"] == "unknown_model"


def test_a_flood_of_large_bodies_leaves_room_for_others(cluster: Nodes) -> None:
    """Of too many large bodies of one client the excess gets 429; its small bodies and other clients are served."""
    body = json.dumps({"entry": "a:b", "model": "m", "args": {"x": 100_000 * "y"}})
    head = f"POST /runs HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {4 << 20}\r\n\r\n"
    port = httpx.URL(cluster.url).port

    def told(address: str, content: str) -> int:
        transport = httpx.HTTPTransport(local_address=address)
        with httpx.Client(transport=transport, timeout=20) as http:
            kind = {"content-type": "application/json"}
            return http.post(cluster.url + "/runs", content=content, headers=kind).status_code

    with ExitStack() as stack:
        for _ in range(32):
            flooding = socket.create_connection(("127.0.0.1", port), 30, ("127.0.0.2", 0))
            stack.enter_context(closing(flooding)).sendall(head.encode())
        eventually(lambda: told("127.0.0.2", body) == 429, what="the excess to be refused")
        assert told("127.0.0.2", "{}") == 422
        assert told("127.0.0.1", body) == 404
    eventually(lambda: told("127.0.0.2", body) == 404, what="the flood to be over")


def test_a_part_of_a_checkpoints_file_is_had_by_its_range(cluster: Nodes) -> None:
    """A range of a checkpoint file is 206; an unreadable one is ignored, one beyond the end is 416.

    The conditions of the request come first: a file that the client has is 304, one that it does not want is 412.
    """
    name = make(cluster)
    cluster.post(f"/models/{name}/checkpoints", {"name": "c"}, status=201)
    url = f"/models/{name}/checkpoints/c/model.safetensors"
    known = cluster.http.get(url)
    whole, tag = known.content, known.headers["etag"]
    size = len(whole)

    unchanged = cluster.http.get(url, headers={"if-none-match": f'"x", {tag}', "range": "bytes=0-1"})
    assert (unchanged.status_code, unchanged.headers["etag"], unchanged.content) == (304, tag, b"")
    assert [a.headers["cache-control"] for a in (known, unchanged)] == ["no-cache", "no-cache"]
    other = cluster.http.get(url, headers={"if-match": '"x"'})
    assert (other.status_code, other.json()["code"]) == (412, "precondition_failed")
    for asked, start, stop in (
        ("bytes=2-5", 2, 6), ("BYTES=-4", size - 4, size), (f"bytes={size - 1}-{9**30}", size - 1, size),
        (f"bytes={size}-,0-0", 0, 1), (f"bytes=-{size + 1}", 0, size),
    ):  # fmt: skip
        part = cluster.http.get(url, headers={"range": asked})
        assert (part.status_code, part.content) == (206, whole[start:stop]), asked
        assert part.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
    for asked in ("bytes=a-b", "bytes=5-2", "bytes=", "bytes=-", "bytes=0-1,x", "lines=0-1", "bytes", "bytes=1_0-"):
        answer = cluster.http.get(url, headers={"range": asked})
        assert (answer.status_code, answer.content) == (200, whole), asked
    for asked in (f"bytes={size}-", "bytes=99999-", "bytes=-0", f"bytes={9**30}-"):
        refused = cluster.http.get(url, headers={"range": asked})
        assert (refused.status_code, refused.headers["content-range"]) == (416, f"bytes */{size}")
        assert refused.headers["content-type"] == "application/problem+json"
        assert (refused.json()["code"], refused.json()["size_bytes"]) == ("range_not_satisfiable", size)
        assert cluster.http.get(url, headers={"range": asked, "if-range": '"another"'}).content == whole
    assert cluster.http.get(url, headers={"range": "bytes=0-1,4-5"}).headers["content-type"].startswith("multipart/")


@pytest.mark.parametrize(
    ("method", "path", "unknown"),
    [
        ("GET", "/pull/{m}/a?dtype=float16&min_version=99", "dtype"),
        ("HEAD", "/pull/{m}/a?dtype=float16", ""),
        ("PUT", "/models/{m}/params/a?dtype=float16", "dtype"),
        ("GET", "/models/{m}/metrics?nmae=loss", "nmae"),
        ("GET", "/runs?limit=1&model=zz", "model"),
        ("GET", "/models/{m}?=", ""),
        ("GET", "/map?wait=1", "wait"),
        ("GET", "/status/events?knd=x", "knd"),
        ("POST", "/models/{m}/workers?name=w", "name"),
        ("POST", "/models/{m}/clock?wait_s=1", "wait_s"),
        ("POST", "/push?ack=journaled", "ack"),
        ("POST", "/pull?model={m}", "model"),
    ],
)
def test_query_values_that_nobody_knows_are_refused(cluster: Nodes, method: str, path: str, unknown: str) -> None:
    """An unknown query parameter is refused by scheduler and shard with its name, and nothing is done."""
    name = make(cluster)
    for url in (cluster.url, f"http://127.0.0.1:{cluster.shard_ports['shard-0']}"):
        answer = cluster.http.request(method, url + path.format(m=name), json={} if method in ("POST", "PUT") else None)
        assert answer.status_code == 422, answer.text
        if method != "HEAD":
            told = answer.json()
            assert told["code"] == "invalid_field"
            assert (told["errors"][0] if "errors" in told else told)["where"] == unknown
    assert cluster.get(f"/models/{name}/workers?limit=1&after=0")["items"] == []
    assert cluster.http.get("/livez?verbose").status_code == 200


def test_a_query_parameter_that_is_repeated_is_refused(cluster: Nodes) -> None:
    """A query parameter given twice is refused by scheduler and shard, so that no value is silently preferred."""
    name = make(cluster)
    for url in (cluster.url, f"http://127.0.0.1:{cluster.shard_ports['shard-0']}"):
        for path in ("/models?limit=1&limit=2", f"/models/{name}/metrics?name=loss&name=accuracy"):
            told = cluster.call("GET", url + path, status=422)
            assert told["code"] == "invalid_field"
            assert told["detail"].endswith("is given 2 times")
        told = cluster.call("PUT", f"{url}/models/{name}/params/a?start=0&stop=1&start=0", [9.0], status=422)
        assert (told["code"], told["where"]) == ("invalid_field", "start")
    assert cluster.post("/pull", {"model": name})["params"]["a"] == 0.0


def test_a_field_of_a_request_that_takes_none_is_refused(cluster: Nodes) -> None:
    """A body is refused where a route takes none, as unknown fields are, and nothing is done; an empty one is not."""
    name = make(cluster)
    cluster.post(f"/models/{name}/workers", {"name": "w0", "lease_s": 60}, status=201)
    for path in (f"/models/{name}/evaluations", f"/models/{name}/workers/{name}/w0/drain"):
        refused = cluster.post(path, {"clock": 5}, status=422)
        assert (refused["code"], refused["where"]) == ("invalid_field", "clock")
    assert cluster.get(f"/models/{name}/workers/{name}/w0")["state"] == "active"
    assert cluster.post(f"/models/{name}/evaluations", {}) == cluster.post(f"/models/{name}/evaluations")


def test_unknown_routes_and_methods(cluster: Nodes) -> None:
    """Unknown routes are 404 and unknown methods 405 with Allow, as problem documents."""
    assert cluster.get("/nothing", status=404)["code"] == "not_found"
    assert cluster.call("PUT", "/models", {}, status=405)["code"] == "method_not_allowed"
    allowed = {
        "/models/x": "DELETE, GET, HEAD, PATCH",
        "/runs/x": "GET, HEAD, PATCH",
        "/shards/x": "GET, HEAD, PUT",
        "/map": "GET, HEAD",
        "/pushpull": "POST",
    }
    assert {
        path: cluster.http.request("POST" if path != "/pushpull" else "GET", path).headers["allow"] for path in allowed
    } == allowed
    for url in (cluster.url, f"http://127.0.0.1:{cluster.shard_ports['shard-0']}"):
        told = {path: cluster.http.options(url + path).headers["allow"] for path in allowed}
        assert told == allowed, url


@pytest.mark.parametrize(
    "path", ["/livez", "/version", "/", "/static/page.css", "/docs", "/models", "/runs", "/map", "/status/stream"]
)
def test_head_is_get_without_a_body(cluster: Nodes, path: str) -> None:
    """HEAD of whatever GET returns has its status and headers at once, at scheduler and shard, also of a stream."""
    for url in (cluster.url, f"http://127.0.0.1:{cluster.shard_ports['shard-0']}"):
        with cluster.http.stream("GET", url + path) as got:
            asked = cluster.http.head(url + path)
        assert (asked.status_code, asked.content) == (got.status_code, b"") == (200, b"")
        for name in ("content-type", "content-length"):
            assert asked.headers.get(name) == got.headers.get(name)
        assert cluster.http.head(url + "/models/nobody").status_code == 404


def test_status_describes_the_cluster(cluster: Nodes) -> None:
    """/status describes nodes, models and recent events."""
    name = make(cluster)
    status = cluster.get("/status")

    nodes = [(n["role"], n["state"]) for n in status["nodes"] if n["role"] != "pool"]
    assert nodes == [("scheduler", "active"), ("shard", "active")]
    model = next(m for m in status["models"] if m["name"] == name)
    assert (model["served"], model["mode"], model["lr"]) == (model["partitions"], "async", 0.5)
    assert any(name in e["text"] for e in status["events"])
    assert "paramserver_map_epoch" in cluster.http.get("/metrics").text
    assert cluster.get("/version")["service"] == "scheduler"


def test_every_route_is_described(cluster: Nodes) -> None:
    """OpenAPI has a summary and a success response for each route, and an example for each body but frames."""
    paths = cluster.get("/openapi.json")["paths"]
    assert len(paths) > 25
    for path, methods in paths.items():
        for method, route in methods.items():
            assert route.get("summary"), path
            body = route.get("requestBody", {"content": {}})["content"]
            if body and list(body) != [MEDIA_TYPE]:
                assert body["application/json"]["example"], (method, path)
            if path not in ("/livez", "/readyz", "/version", "/metrics"):
                assert any(code.startswith("2") for code in route["responses"]), (method, path)


def test_a_lost_client_frees_its_place(cluster: Nodes) -> None:
    """A long poll whose client has disconnected does not keep the worker alive."""
    name = make(cluster, consistency=SYNC)
    for worker in ("a", "b"):
        cluster.post(f"/models/{name}/workers", {"name": worker}, status=201)
    report = {"worker": f"{name}/a", "epoch": 1, "clock": 1, "wait_s": 60}

    with pytest.raises(httpx.ReadTimeout):
        cluster.http.post(f"/models/{name}/clock", json=report, timeout=1.0)

    eventually(
        lambda: all(not w["alive"] for w in cluster.get(f"/models/{name}/workers")["items"]),
        what="the lease's end",
    )
