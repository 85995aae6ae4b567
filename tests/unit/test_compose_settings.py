"""The settings of the compose file: where they are kept, and how a stack that runs adopts them without a loss."""

import re
from typing import Any

import pytest

from .manifests import ROOT

FILE = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
TYPED = [line for line in (FILE + PAGE).splitlines() if re.match(r"(#  |   ) ", line) and "docker compose" in line]
"""Commands in the comment at the top of the file, and on the page."""


@pytest.mark.parametrize("text", [FILE.partition("\nname:")[0], PAGE], ids=["file", "page"])
def test_each_setting_is_documented(text: str) -> None:
    """The page and the comment at the top of the file have every variable that the file reads, and the profile."""
    read = {name for name in re.findall(r"(?<!\$)\$\{(\w+)", FILE) if not name.startswith("PARAMSERVER_")}

    assert read | {"COMPOSE_PROFILES"} <= set(re.findall(r"\b([A-Z_]+)=", text))


def test_what_later_commands_need_is_no_option_of_one(compose: dict[str, Any]) -> None:
    """No step has a number of shards, a profile or a setting for itself: the next `up`, `stop` or `down` lacked it."""
    assert compose["services"]["shard"]["deploy"] == {"replicas": "${SHARDS:-2}"}
    assert TYPED
    assert [line for line in TYPED if re.search(r"--scale|--profile|[A-Z]=\S+ docker", line)] == []


def test_a_stack_is_stopped_in_turn_before_it_gets_other_settings() -> None:
    """Settings and names of revoked tokens are adopted after a stop: `up` alone stops Redis or schedulers first."""
    turn = "docker compose stop && docker compose up -d"

    assert [text.count(f"   {turn}") for text in (FILE, PAGE)] == [1, 1]
    revoking = [line for line in TYPED if "PARAMSERVER_REVOKED=" in line]
    assert [turn in line for line in revoking] == [True]


def test_what_the_stack_asks_of_itself_goes_by_no_proxy(compose: dict[str, Any]) -> None:
    """Docker's client may give each container a proxy: neither probes nor the stack's own requests are sent there."""
    own = {"localhost", "127.0.0.1", "scheduler-1", "scheduler-2", "prometheus"}
    asking = {n: s for n, s in compose["services"].items() if n not in ("secrets", "redis", "prometheus")}

    assert {"scheduler-1", "shard", "series", "worker", "grafana"} <= asking.keys()
    for name, service in asking.items():
        for variable in ("NO_PROXY", "no_proxy"):
            assert set(service["environment"][variable].split(",")) == own, (name, variable)
