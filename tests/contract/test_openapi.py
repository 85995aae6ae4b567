"""What `/openapi.json` shows, compared with what the nodes answer."""

import re
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from .processes import Nodes, unique
from .rest import Face

pytestmark = pytest.mark.process

FREE = ("params", "shards", "metrics", "args", "stop", "state", "kept", "memory")
"""Keys of objects whose own keys are names, or up to the user."""
ELSEWHERE = re.compile("/internal/|/events|/status| /metrics|/checkpoints/.*/|/pull/.*/|GET .*/params/")
"""Methods and paths of routes between nodes, streams and files, and of those with a declared schema."""

ANYWHERE = ("cache-control", "connection", "content-length", "content-type", "date", "server", "x-request-id")
"""Headers of answers that no operation declares."""


def asked(model: str, run: str) -> list[tuple[str, str, str, Any]]:
    """Return (method, path of the route, path, body) of requests to all routes that answer in JSON, in a good order."""
    m, w = f"/models/{model}", f"{model}/w0"
    spec = {"name": model, "params": {"w": {"shape": [2]}}, "optimizer": {"name": "sgd"}, "partitions": 1}
    live, member = {"worker": w, "epoch": 1}, {"name": unique("pool"), "allow": ["nothing"]}
    push = {"model": model, "grads": {"w": [1.0, 2.0]}}
    return [
        ("GET", "/livez", "", None),
        ("GET", "/readyz", "", None),
        ("GET", "/version", "", None),
        ("POST", "/models", "", spec),
        ("GET", "/models", "", None),
        ("GET", "/models/{m}", m, None),
        ("PATCH", "/models/{m}", m, {"optimizer": {"lr": 0.5}}),
        ("PUT", "/models/{m}/params/{name}", f"{m}/params/w", [1.0, 2.0]),
        ("POST", "/push", "", push),
        ("POST", "/pull", "", {"model": model}),
        ("POST", "/pushpull", "", push),
        ("POST", "/models/{m}/workers", f"{m}/workers", {"name": "w0", "lease_s": 60}),
        ("GET", "/models/{m}/workers", f"{m}/workers", None),
        ("PUT", "/models/{m}/workers/{w}", f"{m}/workers/{w}", {"epoch": 1, "metrics": {"loss": 0.5}}),
        ("GET", "/models/{m}/workers/{w}", f"{m}/workers/{w}", None),
        ("POST", "/models/{m}/clock", f"{m}/clock", live | {"clock": 1}),
        ("POST", "/models/{m}/tasks", f"{m}/tasks", {"size": 10, "task_size": 5}),
        ("GET", "/models/{m}/tasks", f"{m}/tasks", None),
        ("POST", "/models/{m}/tasks/lease", f"{m}/tasks/lease", live),
        ("POST", "/models/{m}/tasks/{task}/done", f"{m}/tasks/train:0:0/done", live),
        ("POST", "/models/{m}/evaluations", f"{m}/evaluations", None),
        ("POST", "/models/{m}/metrics", f"{m}/metrics", {"metrics": {"loss": 0.5}, "worker": w, "clock": 1}),
        ("GET", "/models/{m}/metrics", f"{m}/metrics", None),
        ("POST", "/models/{m}/checkpoints", f"{m}/checkpoints", {"name": "c"}),
        ("GET", "/models/{m}/checkpoints", f"{m}/checkpoints", None),
        ("POST", "/models/{m}/restore", f"{m}/restore", {"checkpoint": "c"}),
        ("POST", "/models/{m}/workers/{w}/drain", f"{m}/workers/{w}/drain", None),
        ("POST", "/pool", "", member),
        ("POST", "/runs", "", {"model": model, "entry": "nothing:train"}),
        ("PUT", "/pool/{member}", f"/pool/{member['name']}", {"epoch": 1}),
        ("GET", "/pool", "", None),
        ("GET", "/runs", "", None),
        ("GET", "/runs/{run}", f"/runs/{run}", None),
        ("PATCH", "/runs/{run}", f"/runs/{run}", {"stop": {"clocks": 9}}),
        (
            "POST",
            "/runs/{run}/places/{place}/done",
            f"/runs/{run}/places/0/done",
            {"member": member["name"], "epoch": 1},
        ),
        ("GET", "/map", "", None),
        ("GET", "/shards", "", None),
        ("GET", "/shards/{name}", "/shards/shard-0", None),
        ("PUT", "/shards/{name}", "/shards/shard-0", {"state": "active"}),
    ]


def differences(example: Any, real: Any, where: str = "") -> list[str]:
    """Return where an example is shaped unlike a real answer.

    Null and an empty list say nothing about a shape, and FastAPI leaves the nulls of examples out.
    """
    if example is None or real is None:
        return []
    if isinstance(example, dict) and isinstance(real, dict):
        if where.rpartition(".")[2] in FREE:
            pairs = list(zip(example.values(), real.values(), strict=False))
            return [d for a, b in pairs for d in differences(a, b, f"{where}.*.")] if pairs else []
        found = [f"{where}.{k}" for k in example.keys() ^ real.keys() if k in example or real[k] is not None]
        return found + [
            d for k in example.keys() & real.keys() for d in differences(example[k], real[k], f"{where}.{k}")
        ]
    if isinstance(example, list) and isinstance(real, list):
        return differences(example[0], real[0], f"{where}[]") if example and real else []
    numbers = isinstance(example, int | float) and isinstance(real, int | float) and not isinstance(example, bool)
    return [] if type(example) is type(real) or (numbers and not isinstance(real, bool)) else [where]


def own_headers(answer: httpx.Response) -> set[str]:
    """Return the names of an answer's headers without those that any answer may have."""
    return {name for name in answer.headers if name not in ANYWHERE}


def declared(told: dict[str, Any]) -> set[str]:
    """Return the names of the headers that a documented answer has."""
    return {name.lower() for name in told.get("headers", {})}


def wrong(document: dict[str, Any], schema: dict[str, Any], value: Any) -> list[str]:
    """Return what is wrong with a value by a schema of an OpenAPI document."""
    checker = Draft202012Validator({**schema, "components": document["components"]})
    return [f"{error.json_path}: {error.message}" for error in checker.iter_errors(value)]


def test_every_answer_is_as_its_schema_and_example_say(rest_cluster: Nodes) -> None:
    """Every JSON route has a schema of its answer, and an example with the fields and types of a real one."""
    face = Face(rest_cluster, rest_cluster.url, "json")
    model, run = unique("m"), ""
    document = face.http.get(face.url + "/openapi.json").json()
    requests = asked(model, "RUN")
    routes = {(method.upper(), path) for path, ops in document["paths"].items() for method in ops}
    json_routes = {(m, p) for m, p in routes if m != "DELETE" and not ELSEWHERE.search(f"{m} {p}")}
    assert {(method, route) for method, route, _, _ in requests} == json_routes

    for method, route, path, body in requests:
        answer = face.raw(method, (path or route).replace("RUN", run), body)
        assert answer.status_code < 300, (method, route, answer.text)
        operation = document["paths"][route][method.lower()]
        told = operation["responses"][str(answer.status_code)]
        content = told["content"]["application/json"]
        assert own_headers(answer) == declared(told), (method, route)
        if route == "/runs" and method == "POST":
            run = answer.json()["id"]
        assert "example" in content, (method, route)
        assert not differences(content["example"], answer.json()), (method, route, answer.json())
        assert not wrong(document, content["schema"], answer.json()), (method, route)


def test_the_schemas_of_pushes_and_pulls_hold_for_real_ones(rest_cluster: Nodes) -> None:
    """The schemas of pushes and pulls hold for real ones and for the examples, and name the fields a shard knows."""
    face = Face(rest_cluster, rest_cluster.url, "json")
    document = face.http.get(face.url + "/openapi.json").json()
    model = face.make()
    bodies = {
        "/push": {"model": model, "grads": {"b": 1.0}, "worker": "w", "epoch": 1, "seq": 1, "weight": 0.5},
        "/pull": {"model": model, "names": ["w", "b"], "min_version": 0, "wait_s": 1, "dtype": "float16"},
        "/pushpull": {"model": model, "grads": {"w": [[1.0] * 3] * 2}, "base_version": 0, "ack": "applied"},
    }
    for path, body in bodies.items():
        operation = document["paths"][path]["post"]
        asked, told = operation["requestBody"]["content"], operation["responses"]["200"]["content"]
        schema, answered = asked["application/json"]["schema"], told["application/json"]["schema"]
        assert not wrong(document, schema, body)
        assert not wrong(document, answered, face.call("POST", path, body))
        assert not wrong(document, schema, asked["application/json"]["example"])
        assert not wrong(document, answered, told["application/json"]["example"])
        hint = face.refused("POST", path, body | {"zzz": 1}, 422, "invalid_field")["hint"]
        assert hint == f"known fields: {', '.join(sorted(schema['properties']))}"


def test_a_parameter_comes_with_the_headers_that_its_route_declares(rest_cluster: Nodes) -> None:
    """A parameter, and the answer that it is unchanged, have the headers with its version that the document names."""
    face = Face(rest_cluster, rest_cluster.url, "json")
    answers = face.http.get(face.url + "/openapi.json").json()["paths"]["/pull/{m}/{name}"]["get"]["responses"]
    url = f"{face.url}/pull/{face.make()}/b"
    first = face.http.get(url)
    second = face.http.get(url, headers={"if-none-match": first.headers["etag"]})
    assert (first.status_code, second.status_code) == (200, 304)
    for answer in (first, second):
        assert "etag" in own_headers(answer)
        assert own_headers(answer) == declared(answers[str(answer.status_code)])


@pytest.mark.parametrize("node", ["scheduler", "shard"])
def test_errors_are_of_the_schema_that_every_route_names(rest_cluster: Nodes, node: str) -> None:
    """Every operation names the schema of its errors, and real ones of each node hold to it."""
    shard_url = f"http://127.0.0.1:{rest_cluster.shard_ports['shard-0']}"
    face = Face(rest_cluster, rest_cluster.url if node == "scheduler" else shard_url, "json")
    document = face.http.get(face.url + "/openapi.json").json()
    named = [o["responses"]["default"]["content"] for p in document["paths"].values() for o in p.values()]
    schema = {"$ref": "#/components/schemas/Problem"}
    assert named == [{"application/problem+json": {"schema": schema}}] * len(named)

    for method, path in (("GET", "/models/none"), ("POST", "/push"), ("GET", "/pull/none/w"), ("GET", "/livez/no")):
        refused = face.raw(method, path, {"zzz": 1, "yyy": 2} if method == "POST" else None)
        assert refused.headers["content-type"] == "application/problem+json"
        assert not wrong(document, schema, refused.json()), refused.json()
