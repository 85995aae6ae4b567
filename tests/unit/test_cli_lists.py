"""Lists that psctl reads from a cluster, which come in pages."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from paramserver_cli.main import app

MODELS = [{"name": f"m{i}", "state": "ready", "version": i, "mode": "async"} for i in range(3)]
SHARDS = [
    {"name": f"shard-{i}", "alive": True, "state": "active", "partitions": 0, "bytes": 0, "moves": []} for i in range(3)
]
LISTS: dict[str, list[dict[str, Any]]] = {"/models": MODELS, "/shards": SHARDS}

RUNS: dict[str, dict[str, Any]] = {
    "/runs/run-1": {
        "id": "run-1",
        "state": "running",
        "error": "worker 1: ValueError: no data",
        "places": [{"place": i, "restarts": i} for i in range(3)],
    }
}


class Paged(BaseHTTPRequestHandler):
    """A scheduler whose pages have one item, as if that were large."""

    def do_GET(self) -> None:
        """Answer one page of a list, and anything else with an empty object."""
        at = urlsplit(self.path)
        start = int(parse_qs(at.query).get("after", ["0"])[0])
        items = LISTS.get(at.path)
        page: dict[str, Any] = {}
        if at.path in RUNS:
            page = RUNS[at.path]
        if items is not None:
            page = {"items": items[start : start + 1], "next": str(start + 1) if start + 1 < len(items) else None}
        body = json.dumps(page).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    """A running scheduler's URL."""
    with HTTPServer(("127.0.0.1", 0), Paged) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_all_models_are_listed(url: str) -> None:
    """`psctl models` prints the models of all pages, and as JSON one list without a next page."""
    plain = CliRunner().invoke(app, ["models", "--url", url])
    assert [line.split()[0] for line in plain.stdout.splitlines()] == ["m0", "m1", "m2"]
    found = CliRunner().invoke(app, ["models", "--json", "--url", url])
    assert json.loads(found.stdout) == {"items": MODELS, "next": None}


def test_that_there_is_no_model_yet_is_no_line_of_the_list(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`psctl models` of a cluster without models prints nothing on stdout, and on stderr how to make one."""
    monkeypatch.setitem(LISTS, "/models", [])
    found = CliRunner().invoke(app, ["models", "--url", url])
    assert (found.stdout, "psctl create" in found.stderr) == ("", True)


def test_all_shards_count(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`psctl scale` counts the shards of all pages: three are three, and nobody is told to start one."""
    monkeypatch.setattr("paramserver_cli.moves.QUIET_S", 0.0)
    done = CliRunner().invoke(app, ["scale", "shards", "3", "--url", url, "--timeout", "1"])
    assert (done.exit_code, done.stdout) == (0, "3 shards\n")


@pytest.mark.parametrize(
    ("state", "reason", "shown"),
    [
        ("running", "", True),
        ("finished", "the limit of 9 clocks was reached", True),
        ("failed", "the process of worker 0 died 5 times", True),
        ("failed", "worker 1 raised an exception:\nValueError: no data\n", False),
    ],
)
def test_the_exceptions_that_a_run_has_survived_are_shown(
    url: str, monkeypatch: pytest.MonkeyPatch, state: str, reason: str, shown: bool
) -> None:
    """`psctl run show` says how often functions were called again, and what was raised last if the reason does not."""
    monkeypatch.setitem(RUNS, "/runs/run-1", RUNS["/runs/run-1"] | {"state": state, "reason": reason})
    lines = CliRunner().invoke(app, ["run", "show", "run-1", "--url", url]).stdout.splitlines()
    assert lines[:2] == ["id       run-1", f"state    {state}"]
    assert "restarts 3" in lines
    assert ("error    worker 1: ValueError: no data" in lines) == shown
