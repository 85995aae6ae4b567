"""docs/rest.md and the code name the same routes, with the same roles."""

import re
from pathlib import Path

from starlette.routing import Route

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
