"""What /openapi.json says of a scheduler's routes beyond their paths and bodies."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route
from tests.refusals import refused_with

from paramserver.core.heartbeat_rows import CutRow, LostRow, ReleasedRow, ServedRow
from paramserver.core.optimizer_spec import OPTIMIZERS, ScheduleSpec
from paramserver.core.param_spec import InitSpec
from paramserver.core.scheduler import io
from paramserver.core.spec import ConsistencySpec, ModelSpec
from paramserver.wire.frame import MEDIA_TYPE
from paramserver_node import roles
from paramserver_scheduler.app import make_app
from paramserver_scheduler.routes.models import TOKEN_CHARS
from paramserver_scheduler.spec_schema import SPEC

from .scheduling import Driver

APP = make_app()
DOCUMENT = APP.openapi()


def operations() -> list[tuple[str, dict[str, Any]]]:
    """Every operation, with its method and path."""
    return [(f"{m.upper()} {p}", o) for p, operations in DOCUMENT["paths"].items() for m, o in operations.items()]


def test_each_route_has_the_query_parameters_that_it_takes() -> None:
    """The query parameters of an operation are those that its route is marked with; others would be refused."""
    told = {name: [p["name"] for p in o.get("parameters", []) if p["in"] == "query"] for name, o in operations()}
    marked = {
        f"{method} {route.path_format}": list(route.endpoint.paramserver_query)
        for route in roles.routes(APP)
        if isinstance(route, Route) and hasattr(route.endpoint, "paramserver_query")
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert {name: told[name] for name in marked} == marked
    assert told["GET /models/{m}/metrics"] == ["name", "limit", "after"]
    assert told["PUT /models/{m}/params/{name}"] == ["start", "stop"]


def test_parameters_have_the_bounds_that_the_routes_check() -> None:
    """A query parameter or header that must be a number, is bounded, or cannot be left out, says so."""
    told = {name: {p["name"]: p for p in o.get("parameters", [])} for name, o in operations()}
    assert told["GET /models"]["limit"]["schema"]["minimum"] == 1
    assert told["GET /models"]["after"]["schema"]["pattern"] == "^[0-9]{1,16}$"
    assert told["GET /map"]["wait_s"]["schema"]["maximum"] == 60
    assert [n for n, p in told["GET /status/series"].items() if p["required"]] == ["metric"]
    assert told["POST /push"]["Idempotency-Key"]["schema"]["maxLength"] == 256
    assert told["POST /models"]["X-Upload-Token"]["schema"]["pattern"] == f"^{TOKEN_CHARS.pattern}$"


def test_each_route_fails_with_a_problem_document() -> None:
    """Errors are problem documents of one schema, and nowhere those that FastAPI answers by itself."""
    for name, operation in operations():
        content = operation["responses"]["default"]["content"]
        assert content == {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}, name
        assert "422" not in operation["responses"], name
        assert "Retry-After" in operation["responses"]["default"]["headers"], name
    assert "Retry-After" in DOCUMENT["paths"]["/readyz"]["get"]["responses"]["503"]["headers"]
    assert "ValidationError" not in json.dumps(DOCUMENT)


def test_a_parameter_is_a_npy_file_with_conditions() -> None:
    """Reading a parameter answers with a .npy file, 304 or 412, at both of its paths; assigning one takes such."""
    paths = DOCUMENT["paths"]
    for path in ("/pull/{m}/{name}", "/models/{m}/params/{name}"):
        answers = paths[path]["get"]["responses"]
        assert list(answers["200"]["content"]) == ["application/x-npy"]
        assert {"304", "412"} <= answers.keys()
    assign = paths["/models/{m}/params/{name}"]["put"]
    assert {"application/x-npy", "application/octet-stream"} <= assign["requestBody"]["content"].keys()
    assert "412" in assign["responses"]


def test_bodies_name_every_media_type_that_they_may_have() -> None:
    """Pushes and pulls may be frames, which are answered by frames, and partitions are; a model's change is a patch."""
    paths = DOCUMENT["paths"]
    for path in ("/push", "/pull", "/pushpull"):
        operation = paths[path]["post"]
        assert MEDIA_TYPE in operation["requestBody"]["content"]
        assert MEDIA_TYPE in operation["responses"]["200"]["content"]
    partition = paths["/internal/models/{m}/partitions/{index}"]
    assert [list(o["responses"]["200"]["content"]) for o in partition.values()] == [[MEDIA_TYPE]] * 2
    assert list(partition["post"]["requestBody"]["content"]) == [MEDIA_TYPE]
    assert "application/merge-patch+json" in paths["/models/{m}"]["patch"]["requestBody"]["content"]


def test_requests_name_their_headers_and_the_token() -> None:
    """The API page offers the token and the headers that the routes read; all of them are optional."""
    assert DOCUMENT["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    assert DOCUMENT["security"] == [{}, {"token": []}]
    told = {name: [p["name"] for p in o.get("parameters", []) if p["in"] == "header"] for name, o in operations()}
    conditions = ["If-Match", "If-None-Match"]
    assert {name: headers for name, headers in told.items() if headers} == {
        "POST /models": ["X-Upload-Token"],
        "DELETE /models/{m}": ["X-Upload-Token"],
        "POST /push": ["Idempotency-Key"],
        "POST /pushpull": ["Idempotency-Key"],
        "GET /pull/{m}/{name}": conditions,
        "GET /models/{m}/params/{name}": conditions,
        "PUT /models/{m}/params/{name}": [*conditions, "X-Upload-Token"],
        "GET /models/{m}/checkpoints/{name}/{file}": [*conditions, "Range"],
    }


def test_every_successful_status_is_named() -> None:
    """A creation that finds what it would make answers 200; a file may come in part, or be unchanged."""
    paths = DOCUMENT["paths"]
    for path in ("/models", "/models/{m}/tasks"):
        assert {"200", "201"} <= paths[path]["post"]["responses"].keys()
    assert {"200", "206", "304"} <= paths["/models/{m}/checkpoints/{name}/{file}"]["get"]["responses"].keys()


def test_the_rows_of_a_shards_heartbeat_are_those_that_the_core_takes() -> None:
    """The example is a heartbeat that the core accepts, and the descriptions name as many values as each row has."""
    body = DOCUMENT["paths"]["/internal/shards/{name}"]["put"]["requestBody"]["content"]["application/json"]
    fields = body["schema"]["properties"]
    rows: dict[str, Any] = {"partitions": ServedRow, "cuts": CutRow, "released": ReleasedRow, "lost": LostRow}
    for name, row in rows.items():
        assert len(fields[name]["description"].split(",")) == len(row._fields), name

    Driver("s0").ask(lambda n: io.ShardHeartbeat(n, "s0", **body["example"]))


def spec(**fields: Any) -> dict[str, Any]:
    """What the core makes of a request with these fields."""
    return ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}, **fields}).document()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", ConsistencySpec.MODES)
def test_the_schema_of_a_spec_has_the_fields_of_each_kind(optimizer: str, mode: str) -> None:
    """A whole spec of each optimizer and mode satisfies the schema, and one with a field too much does not."""
    checker = Draft202012Validator(SPEC)
    whole = spec(optimizer={"name": optimizer}, consistency={"mode": mode})
    checker.validate(whole)
    for part in ("optimizer", "consistency"):
        assert not checker.is_valid({**whole, part: {**whole[part], "zzz": 1}})
    assert not checker.is_valid(whole | {"zzz": 1})


@pytest.mark.parametrize("kind", InitSpec.KINDS)
@pytest.mark.parametrize(
    "schedule",
    [{"kind": "step", "step_size": 3}, {"kind": "exponential", "gamma": 0.5}, {"kind": "cosine", "t_max": 9}],
)
def test_the_schema_of_a_spec_has_each_schedule_and_initializer(kind: str, schedule: dict[str, Any]) -> None:
    """A whole spec of each initializer and schedule satisfies the schema; one without a kind is of the first."""
    init = {"kind": kind, **({"path": "w.safetensors"} if kind == "file" else {})}
    whole = spec(params={"w": {"shape": [4], "init": init}}, optimizer={"schedule": schedule})
    checker = Draft202012Validator(SPEC)
    checker.validate(whole)
    assert not checker.is_valid({**whole, "params": {"w": {"shape": [4], "init": {**init, "zzz": 1}}}})
    assert not checker.is_valid({**whole, "optimizer": {"momentum": 0.5}})  # as sgd, the first, has none


@pytest.mark.parametrize("kind", [*InitSpec.KINDS, *ScheduleSpec.KINDS])
def test_the_schema_of_a_spec_requires_the_fields_of_a_kind_that_have_no_default(kind: str) -> None:
    """Of an initializer or schedule with its kind alone, schema and core say the same; their defaults are the same."""
    part: dict[str, Any] = {"kind": kind}
    asked: dict[str, Any] = {"name": "m", "params": {"w": {"shape": [2, 3]}}}
    if kind in InitSpec.KINDS:
        asked["params"]["w"]["init"] = part
        told = SPEC["properties"]["params"]["additionalProperties"]["properties"]["init"]
    else:
        asked["optimizer"] = {"schedule": part}
        told = SPEC["properties"]["optimizer"]["anyOf"][0]["properties"]["schedule"]
    (variant,) = [v for v in told["anyOf"] if v["properties"]["kind"]["const"] == kind]
    lacking = set(variant["required"]) - {"kind"}
    assert Draft202012Validator(SPEC).is_valid(asked) == (not lacking)
    if lacking:
        with refused_with("invalid_field", match="is required"):
            ModelSpec.parse(asked)
        part |= {name: "a.safetensors" if name == "path" else 2 for name in lacking}
    document = ModelSpec.parse(asked).document()
    read = document["params"]["w"]["init"] if kind in InitSpec.KINDS else document["optimizer"]["schedule"]
    assert read == part | {name: s["default"] for name, s in variant["properties"].items() if "default" in s}
