"""The REST contract of workers, modes, tasks, checkpoints and runs, against each face of a real cluster."""

import itertools
import json
from typing import Any

import pytest
from tests.waiting import eventually

from paramserver.wire.frame import MEDIA_TYPE, PushFrame, PushPart, encode_header

from .processes import Nodes, unique
from .rest import Face

pytestmark = pytest.mark.process

MODES: list[dict[str, Any]] = [
    {"mode": "async"},
    {"mode": "ssp", "staleness": 2},
    {"mode": "sync"},
    {"mode": "buffered", "count": 2, "interval_ms": 200},
]
STATE = {"async": "applied", "ssp": "applied", "sync": "staged", "buffered": "buffered"}


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_a_mode_with_clocks_wants_joined_workers(face: Face, mode: str) -> None:
    """In a mode with clocks only joined workers may push, clock reports are repeatable, and old epochs are fenced."""
    model = face.make(consistency={"mode": mode})
    assert "workers" in face.push(model, {"b": 1.0}, 409)["hint"]
    assert face.push(model, {"b": 1.0}, 409, worker="w", epoch=1, seq=1, clock=0)["code"] == "worker_required"
    worker = face.join(model, "a")

    ident: dict[str, Any] = {"worker": worker, "epoch": 1, "seq": 1, "clock": 0}
    accepted = 202 if mode == "sync" else 200
    assert face.push(model, {"b": 1.0}, accepted, **ident)["state"] == STATE[mode]
    assert face.push(model, {"b": 1.0}, accepted, **ident)["duplicate"] is True
    for _ in range(2):
        done = face.clock(model, worker, 1)
        assert (done["released"], done["clock"], done["min_clock"], done["waiting_for"]) == (True, 1, 1, [])
    face.pull(model, min_clock=1, wait_s=10)  # the shards may hear of the commit later than the worker does
    late = face.push(model, {"b": 1.0}, accepted, **ident | {"seq": 2})
    assert late.get("late", False) is (mode == "sync")
    assert face.clock(model, worker, 1, 409, epoch=2)["code"] == "fenced"
    assert face.clock(model, "nobody", 1, 404)["code"] == "unknown_worker"
    taken = face.call("POST", f"/models/{model}/workers", {"name": "b", "rank": 0}, 409)
    assert taken["code"] == "conflict"


def test_in_ssp_only_the_answer_to_a_report_holds_a_worker_back(face: Face) -> None:
    """A worker that is too far ahead is not released until the slowest one follows, whatever shards still accept."""
    model = face.make(consistency={"mode": "ssp", "staleness": 1})
    ahead, slow = face.join(model, "a"), face.join(model, "b")

    assert face.clock(model, ahead, 1, wait_s=0)["released"]
    told = face.clock(model, ahead, 2, wait_s=0)
    assert (told["released"], told["waiting_for"], told["clock"]) == (False, [slow], 2)
    face.push(model, {"b": 1.0}, worker=ahead, epoch=1, seq=1, clock=2)
    face.clock(model, slow, 1)
    assert face.clock(model, ahead, 2)["released"]


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(range(4), 2)))
def test_a_mode_changes_into_every_other_while_it_runs(rest_cluster: Nodes, before: int, after: int) -> None:
    """A model can change from each mode to each other one while it runs.

    Accepted pushes of finished clocks are kept, and a worker that follows the answers trains on.
    """
    face = Face(rest_cluster, rest_cluster.url, "json")
    model = face.make(consistency=MODES[before])
    worker = face.join(model, "a")
    ident: dict[str, Any] = {"worker": worker, "epoch": 1}
    face.push(model, {"b": 1.0}, 202 if MODES[before]["mode"] in ("sync", "buffered") else 200, clock=0, seq=1, **ident)
    face.clock(model, worker, 1)
    revision = face.call("PATCH", f"/models/{model}", {"consistency": MODES[after]})["revision"]
    assert revision == 1
    seqs = itertools.count(2)
    clock, timeline = 1, 0

    def in_force() -> bool:
        nonlocal clock, timeline
        push = {"model": model, "grads": {"b": 0.0}, "clock": clock, "seq": next(seqs), "timeline": timeline}
        answer = face.raw("POST", "/push", push | ident)
        document = answer.json()
        if answer.status_code == 409:
            assert document["code"] == "rolled_back"
            clock, timeline = document["clock"], document["timeline"]
        return bool(document.get("state") == STATE[MODES[after]["mode"]])

    eventually(in_force, what="the new mode")
    if MODES[after]["mode"] == "sync":
        assert timeline == 1, "entering sync is told to who holds an older clock"
    last = {"clock": clock, "seq": next(seqs), "timeline": timeline}
    face.call("POST", "/push", {"model": model, "grads": {"b": 1.0}} | ident | last, 202 if after > 1 else 200)
    assert face.clock(model, worker, clock + 1, timeline=timeline)["released"]
    # A buffer may average the last push with one of zeros.
    least = 1.25 if MODES[after]["mode"] == "buffered" else 2.0
    eventually(lambda: face.pull(model, names=["b"])["b"] >= least, what="both pushes")


def test_an_older_timeline_is_told_the_new_one(face: Face) -> None:
    """A push by name with an older timeline gets 409 with the new timeline and the clock to continue from."""
    model = face.make()
    worker = face.join(model, "a")
    face.call("PATCH", f"/models/{model}", {"consistency": {"mode": "sync"}})
    push = {"worker": worker, "epoch": 1, "clock": 0, "timeline": 0}
    eventually(
        lambda: (
            face.raw("POST", "/push", {"model": model, "grads": {"b": face.value(1.0)}, "seq": 1} | push).status_code
            == 409
        )
    )

    told = face.push(model, {"b": 1.0}, 409, seq=2, **push)
    assert (told["code"], told["timeline"]) == ("rolled_back", 1)
    now = push | {"clock": told["clock"], "timeline": 1}
    assert face.push(model, {"b": 1.0}, 202, seq=3, **now)["timeline"] == 1


def test_ranges_of_data_are_shared_out(face: Face) -> None:
    """Static ranges have owners, a task of a worker that left is leased again, and evaluations yield metrics."""
    model = face.make()
    workers = [face.join(model, n) for n in ("a", "b")]
    base = f"/models/{model}"
    static = {"dataset": "s", "ranges": [[0, 5], [5, 9], [9, 12], [12, 20]], "assignment": "static", "uri": "file:///x"}
    face.call("POST", f"{base}/tasks", static, 201)

    def lease(worker: str, dataset: str) -> Any:
        return face.call("POST", f"{base}/tasks/lease", {"worker": worker, "epoch": 1, "dataset": dataset})["task"]

    taken = [(t["start"], t["stop"], t["uri"]) for w in workers * 2 for t in [lease(w, "s")]]
    assert sorted(taken) == [(0, 5, "file:///x"), (5, 9, "file:///x"), (9, 12, "file:///x"), (12, 20, "file:///x")]
    face.call("POST", f"{base}/tasks", {"dataset": "d", "size": 2, "task_size": 1}, 201)
    first = lease(workers[0], "d")
    face.call("DELETE", f"{base}/workers/{workers[0]}", None, 204)
    assert lease(workers[1], "d")["id"] == first["id"]
    done = {"worker": workers[0], "epoch": 1}
    face.refused("POST", f"{base}/tasks/{first['id']}/done", done, 409, "fenced")

    asked = face.call("POST", f"{base}/evaluations", None, 201)["id"]
    assert face.call("PUT", f"{base}/workers/{workers[1]}", {"epoch": 1})["evaluate"]
    assert lease(workers[1], "evaluate") == {"id": asked, "kind": "evaluate", "clock": 0}
    face.call("POST", f"{base}/tasks/{asked}/done", {"worker": workers[1], "epoch": 1, "metrics": {"accuracy": 0.75}})
    series = face.call("GET", f"{base}/metrics?name=accuracy")["items"]
    assert [point[3] for point in series[0]["points"]] == [0.75]
    for path in ("workers", "tasks", "metrics", "checkpoints"):
        assert face.call("GET", f"{base}/{path}?limit=1").keys() == {"items", "next"}
        face.refused("GET", f"/models/nope/{path}", None, 404, "unknown_model")


def test_a_checkpoint_comes_back_into_any_model(face: Face) -> None:
    """A checkpoint is restored into its own model and into another one, with `exist_ok: false` only if that is new."""
    model = face.make()
    face.push(model, {"b": 3.0})
    base = f"/models/{model}"
    assert face.call("POST", f"{base}/checkpoints", {"name": "mine"}, 201)["kept"] is True
    face.refused("POST", f"{base}/checkpoints", {"name": "mine"}, 409, "conflict")
    face.push(model, {"b": 9.0})

    face.call("POST", f"{base}/restore", {"checkpoint": "mine"})
    assert face.pull(model, names=["b"]) == {"b": 3.0}
    face.call("POST", f"{base}/restore", {"checkpoint": "latest", "as": f"{model}-2", "partitions": 3}, 201)
    assert face.pull(f"{model}-2", names=["b"]) == {"b": 3.0}
    assert [c["name"] for c in face.call("GET", f"{base}/checkpoints")["items"]] == ["mine"]
    other = {"as": f"{model}-2", "exist_ok": False}
    face.refused("POST", f"{base}/restore", other, 409, "model_exists")
    face.call("POST", f"{base}/restore", {"as": model, "exist_ok": False})
    face.refused("POST", f"{base}/restore", {"checkpoint": "none"}, 404, "unknown_checkpoint")


def test_a_run_that_keeps_raising_fails_with_its_traceback(face: Face) -> None:
    """A run without workers says how to start some; after three restarts it fails with the last traceback."""
    model = face.make()
    entry = f"{unique('pkg').replace('-', '_')}.mod:train"
    run = face.call("POST", "/runs", {"model": model, "entry": entry, "stop": {"clocks": 9}}, 201)
    assert run["state"] == "waiting"
    assert "paramserver-worker" in run["reason"]
    assert face.raw("GET", f"/runs/{run['id']}").status_code == 200
    member = face.call("POST", "/pool", {"allow": [entry.split(".")[0]]}, 201)
    beat, path = {"epoch": member["epoch"]}, f"/pool/{member['member']}"
    states = []
    for number in range(4):
        place = eventually(lambda: face.call("PUT", path, beat)["run"], what="a place")["place"]
        raised = {"member": member["member"], "epoch": member["epoch"], "error": f"Traceback {number}"}
        states.append(face.call("POST", f"/runs/{run['id']}/places/{place}/done", raised))

    assert [s["state"] for s in states] == ["running"] * 3 + ["failed"]
    assert states[-1]["reason"].endswith("Traceback 3")
    face.refused("PATCH", f"/runs/{run['id']}", {"state": "running"}, 409, "conflict")
    face.call("DELETE", path, None, 204)


def test_a_model_made_anew_is_another(face: Face, rest_cluster: Nodes) -> None:
    """After a model is deleted every node answers 404, and after it is created again, with the new values."""
    model = face.make()
    spec = {"name": model, "params": {"b": {"shape": []}}, "optimizer": {"name": "sum"}}
    other = Face(rest_cluster, f"http://127.0.0.1:{rest_cluster.shard_ports['shard-0']}", "json")
    for _ in range(2):
        face.push(model, {"b": 1.0})
        assert other.pull(model, names=["b"]) == {"b": 1.0}
        face.call("DELETE", f"/models/{model}", None, 204)
        for node in (face, other):
            node.refused("POST", "/pull", {"model": model}, 404, "unknown_model")
        made = face.raw("POST", "/models", spec)
        assert (made.status_code, made.headers["location"]) == (201, f"/models/{model}")
        assert other.pull(model) == {"b": 0.0}


@pytest.mark.parametrize("shard", ["shard-0", "shard-1"])
def test_a_map_epoch_is_answered_with_the_newer_one(rest_cluster: Nodes, shard: str) -> None:
    """A frame with a map epoch that reaches the wrong owner gets 421 with the epoch to wait for."""
    face = Face(rest_cluster, f"http://127.0.0.1:{rest_cluster.shard_ports[shard]}", "json")
    model = face.make()
    document = face.call("GET", f"/models/{model}")
    foreign = next(p["index"] for p in document["partitions"] if p["shard"] != shard)
    size = document["bounds"][foreign + 1] - document["bounds"][foreign]
    frame = encode_header(PushFrame(model, [PushPart(foreign, None, None)], map_epoch=0)) + bytes(4 * size)

    answer = face.http.post(f"{face.url}/push", content=frame, headers={"content-type": MEDIA_TYPE})
    assert (answer.status_code, answer.json()["code"]) == (421, "wrong_owner")
    assert answer.json()["map_epoch"] >= 1


def test_every_node_answers_for_itself_and_the_cluster(face: Face) -> None:
    """Every node serves probes, metrics, status and OpenAPI with an example for each request body but bare frames."""
    for path in ("/livez", "/readyz", "/version", "/metrics", "/", "/docs", "/docs/swagger-ui-bundle.js"):
        assert face.http.get(face.url + path).status_code == 200, path
    assert face.http.get(face.url + "/docs/__init__.py").status_code == 404

    def told_of_all() -> bool:
        ages = {n["name"]: n["heartbeat_age_s"] for n in face.call("GET", "/status")["nodes"] if n["role"] != "pool"}
        return ages.keys() >= {"scheduler", "shard-0", "shard-1"} and max(ages.values()) < 5

    eventually(told_of_all, what="a status with recent heartbeats of all nodes")
    assert "paramserver_http_requests_total" in face.http.get(face.url + "/metrics").text
    document = face.http.get(face.url + "/openapi.json").json()
    refs = {word.split('"')[0] for word in json.dumps(document).split('"$ref": "')[1:]}
    assert refs <= {f"#/components/schemas/{n}" for n in document.get("components", {}).get("schemas", {})}
    bodies = [o["requestBody"] for p in document["paths"].values() for o in p.values() if "requestBody" in o]
    assert bodies
    for body in bodies:
        if set(body["content"]) == {MEDIA_TYPE}:
            continue
        assert body["content"]["application/json"]["example"]
        assert "application/msgpack" in body["content"]
