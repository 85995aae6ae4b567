"""docs/rest.md and the code name the same routes, with the same roles, and the same fields of a spec."""

import json
import re
from pathlib import Path
from typing import Any

from starlette.routing import Route

from paramserver.core.optimizer_spec import OPTIMIZERS, OptimizerSpec, ScheduleSpec
from paramserver.core.spec import ConsistencySpec, ModelSpec
from paramserver_node import roles
from paramserver_scheduler.app import make_app

PAGE = (Path(__file__).parents[2] / "docs" / "rest.md").read_text()


def test_the_page_lists_every_route_with_its_role() -> None:
    """The page has each public route of the API exactly once, with the lowest role that may use it."""
    listed = re.findall(r"^\| `([A-Z]+ /\S*)` \| (\w+) \| .+ \|$", PAGE, re.MULTILINE)
    served = {
        f"{method} {re.sub(':path', '', route.path)}": str(roles.role_of(route))
        for route in roles.routes(make_app())
        if isinstance(route, Route) and route.include_in_schema and not route.path.startswith("/internal/")
        for method in route.methods or ()
        if method != "HEAD"
    }

    assert len(listed) == len(set(listed)) > 40
    assert dict(listed) == served


def shown(name: str) -> list[Any]:
    """Return the JSON values of a block of the page."""
    block = re.search(rf"<!-- test: {name} -->\n```json\n(.*?)```", PAGE, re.DOTALL)
    assert block
    return [json.loads(text) for text in re.split(r"\n(?=\{)", block[1].strip())]


def test_the_page_shows_every_field_of_a_spec_with_its_default() -> None:
    """The page has the fields of a model, of each optimizer, schedule and mode, with the defaults of each."""
    (spec,) = shown("spec")
    least = {"name": "demo", "params": {"w": {"shape": [64, 10]}}}
    real = ModelSpec.parse(least).document()
    real["optimizer"], real["consistency"] = {"name": "sgd"}, {"mode": "async"}
    assert spec == real

    (common,) = shown("optimizer")
    kinds = [
        {k: v for k, v in OptimizerSpec.read({"name": name}, "", []).document().items() if k not in common}
        for name in OPTIMIZERS
    ]
    kinds += [ScheduleSpec.read({"kind": kind}, "", []).document() for kind in ScheduleSpec.KINDS]
    kinds += [ConsistencySpec.read({"mode": mode}, "", []).document() for mode in ConsistencySpec.MODES]
    assert shown("kinds") == kinds
    assert common == {k: v for k, v in OptimizerSpec().document().items() if k in common}
