"""What /openapi.json says of a scheduler's routes beyond their paths and bodies."""

import json
from typing import Any

from starlette.routing import Route

from paramserver_node import roles
from paramserver_scheduler.app import make_app

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


def test_each_route_fails_with_a_problem_document() -> None:
    """Errors are problem documents of one schema, and nowhere those that FastAPI answers by itself."""
    for name, operation in operations():
        content = operation["responses"]["default"]["content"]
        assert content == {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}, name
        assert "422" not in operation["responses"], name
    assert "ValidationError" not in json.dumps(DOCUMENT)


def test_a_parameter_is_a_npy_file_with_conditions() -> None:
    """Reading a parameter answers with a .npy file, 304 or 412, at both of its paths; assigning one takes such."""
    paths = DOCUMENT["paths"]
    for path in ("/pull/{m}/{name}", "/models/{m}/params/{name}"):
        answers = paths[path]["get"]["responses"]
        assert list(answers["200"]["content"]) == ["application/x-npy"]
        assert {"304", "412"} <= answers.keys()
    assign = paths["/models/{m}/params/{name}"]["put"]
    assert "application/x-npy" in assign["requestBody"]["content"]
    assert "412" in assign["responses"]
