"""docs/metrics.md against a live cluster, and the deployed Prometheus and Grafana files against that page."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.waiting import eventually

from paramserver_scheduler.history import UNITS

from .processes import Nodes, unique

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
DASHBOARD = "grafana/dashboards/paramserver.json"
SUFFIXES = ("_bucket", "_count", "_sum")
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")

needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool on PATH and no PROMTOOL=/path/to/it: apt install prometheus brings one"
)


def listed(heading: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Parse the table under a heading of the page: name -> (type or unit, labels)."""
    section = PAGE.split(f"\n{heading}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|([^|]*)\|", section, re.M)
    assert rows, heading
    return {name: (kind.strip(), frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def told(url: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Return what `listed` does for the metrics that a process exports, without the Prometheus client's own."""
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text):
        if family.name.startswith("paramserver_"):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = frozenset(label for s in family.samples for label in s.labels if label != "le")
            found[name] = (family.type, labels)
    return found


@pytest.mark.process
def test_the_page_lists_what_each_process_tells(rest_cluster: Nodes) -> None:
    """docs/metrics.md lists exactly the names, types and labels that a scheduler and a busy shard export."""
    name = unique("metrics")
    spec = {"name": name, "params": {"w": {"shape": [8]}}, "partitions": 2}
    rest_cluster.post("/models", spec, status=201)
    push = {"model": name, "base_version": 0, "grads": {"w": [1.0] * 8}}
    shard = f"http://127.0.0.1:{rest_cluster.shard_ports['shard-0']}"
    for url in (rest_cluster.url, shard):
        for _ in range(2):
            rest_cluster.http.post(f"{url}/push", json=push, headers={"idempotency-key": "again"}).raise_for_status()
        rest_cluster.post(f"{url}/pull", {"model": name}, status=200)
    everywhere = listed("### Every process")

    def leading() -> bool:
        return any(f'model="{name}"' in line for line in httpx.get(f"{rest_cluster.url}/metrics").text.splitlines())

    eventually(leading, what="the model in the scheduler's metrics")
    used = re.compile(r"^paramserver_redis_memory_bytes [1-9]", re.M)
    eventually(lambda: used.search(httpx.get(f"{rest_cluster.url}/metrics").text), what="the memory of Redis")
    live = told(rest_cluster.url)
    assert live == everywhere | _filled(listed("### Scheduler"), live)
    assert told(shard) == everywhere | listed("### Shard")


def _filled(page: dict[str, Any], live: dict[str, Any]) -> dict[str, Any]:
    """The page's rows, without the labels of metrics that have no samples now."""
    return {n: (kind, labels if live.get(n, ("", {}))[1] else frozenset()) for n, (kind, labels) in page.items()}


@pytest.mark.process
def test_the_series_of_a_deleted_model_end(rest_cluster: Nodes) -> None:
    """Scheduler and shards no longer export series of a model that was deleted."""
    name = unique("ended")
    rest_cluster.post("/models", {"name": name, "params": {"w": {"shape": [8]}}}, status=201)
    rest_cluster.post("/push", {"model": name, "grads": {"w": [1.0] * 8}})
    urls = [rest_cluster.url, *(f"http://127.0.0.1:{port}" for port in rest_cluster.shard_ports.values())]

    def naming() -> list[bool]:
        return [f'"{name}"' in httpx.get(f"{url}/metrics").text for url in urls]

    eventually(lambda: naming()[0] and any(naming()[1:]), what="the model's series")
    rest_cluster.call("DELETE", f"/models/{name}", status=204)
    eventually(lambda: not any(naming()), what="the end of the model's series")


@pytest.mark.process
def test_the_bytes_of_all_shards_add_up(rest_cluster: Nodes) -> None:
    """A push and a pull by name, whose parts one shard passes on to the other, count their bytes once."""
    name = unique("bytes")
    rest_cluster.post("/models", {"name": name, "params": {"w": {"shape": [800]}}, "partitions": 4}, status=201)
    urls = [f"http://127.0.0.1:{port}" for port in rest_cluster.shard_ports.values()]
    body = json.dumps({"model": name, "grads": {"w": [0.5] * 800}}).encode()
    kind = {"content-type": "application/json"}
    rest_cluster.http.post(f"{urls[0]}/push", content=body, headers=kind).raise_for_status()
    rest_cluster.post(f"{urls[0]}/pull", {"model": name}, status=200)

    def total(metric: str) -> float:
        lines = [line for url in urls for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines()]
        return sum(float(line.split()[1]) for line in lines if line.startswith(f'{metric}{{model="{name}"}}'))

    # The owner of a part counts its pull once that is sent.
    eventually(lambda: total("paramserver_pulls_total") == 2, what="the pulls at both shards, which have a part each")
    assert total("paramserver_received_bytes_total") == len(body)
    assert total("paramserver_sent_bytes_total") == 4 * 800


def test_the_page_lists_every_series_of_the_status() -> None:
    """docs/metrics.md lists the name and unit of every series of `/status/series`."""
    assert {name: unit for name, (unit, _) in listed("## The status page: `/status/series`").items()} == UNITS


def _asked(text: str) -> set[str]:
    found = set(re.findall(r"\bparamserver_\w+", text))
    return {n.removesuffix(s) for n in found for s in [next((s for s in SUFFIXES if n.endswith(s)), "")]}


def test_dashboard_and_alerts_ask_for_listed_metrics() -> None:
    """Dashboard and alerts query listed metrics only, and each alert says what to do.

    All listed metrics but those in `UNDRAWN` are on the dashboard.
    """
    known = {**listed("### Every process"), **listed("### Shard"), **listed("### Scheduler")}
    board = json.loads((ROOT / "deploy" / DASHBOARD).read_text(encoding="utf-8"))
    queries = [t["expr"] for p in board["panels"] for t in p.get("targets", [])]
    groups = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text(encoding="utf-8"))["groups"]
    rules = [r for g in groups for r in g["rules"]]

    assert len(queries) >= 15
    assert len(rules) >= 8
    for query in [*queries, *(r["expr"] for r in rules)]:
        asked = _asked(query)
        assert asked or "process_" in query or "up{" in query, query
        assert asked <= set(known), query
    assert {m for q in queries for m in _asked(q)} >= set(known) - UNDRAWN
    for rule in rules:
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["do"]
        assert rule["labels"]["severity"] in ("page", "warn")


def test_rates_are_asked_of_counters() -> None:
    """No query takes the rate of a gauge: a version that a rollback lowers would count as one that began at zero."""
    known = {**listed("### Every process"), **listed("### Shard"), **listed("### Scheduler")}
    texts = [(ROOT / "deploy" / name).read_text(encoding="utf-8") for name in ("alerts.yml", DASHBOARD)]
    asked = {_asked(n).pop() for t in texts for n in re.findall(r"\b(?:rate|irate|increase)\((paramserver_\w+)", t)}

    assert asked
    assert {n for n in asked if known[n][0] == "gauge"} == set()


UNDRAWN = {
    "paramserver_map_epoch",
    "paramserver_http_requests_in_flight",
    "paramserver_push_duplicates_total",
    "paramserver_partitions",
    "paramserver_model_partitions",
    "paramserver_model_paused",
    "paramserver_model_durable_version",
    "paramserver_model_durable_behind_seconds",
}
"""Metrics without a dashboard panel."""


@needs_promtool
@pytest.mark.parametrize(
    "line",
    [
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["check", "rules", "alerts.yml"],
        pytest.param(["test", "rules", "alerts_test.yml"], marks=pytest.mark.slow),
    ],
)
def test_promtool_accepts(line: list[str]) -> None:
    """promtool accepts the configuration and the rules, and the alerts pass their unit tests."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *line], cwd=ROOT / "deploy", capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout + done.stderr


def test_every_alert_has_a_test() -> None:
    """The rules' unit tests contain, for each alert, a time when it fires and one when it does not."""
    groups = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text(encoding="utf-8"))["groups"]
    cases = yaml.safe_load((ROOT / "deploy/alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    tests = [t for case in cases for t in case["alert_rule_test"]]

    for name in [r["alert"] for g in groups for r in g["rules"]]:
        fired = [bool(t.get("exp_alerts")) for t in tests if t["alertname"] == name]
        assert {True, False} == set(fired), name
