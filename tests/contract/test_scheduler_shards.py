"""/shards: a shard is drained while pushes continue, takes its share again, and invalid requests are refused."""

from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually

import paramserver
from paramserver.core.shard.effects import AskWorker
from paramserver.net.credentials import Credentials
from paramserver.types import ModelKey
from paramserver_shard.directory import Directory
from paramserver_shard.link import SchedulerLink
from paramserver_shard.membership import Membership

from .processes import Nodes, leader, nodes, summing_model

pytestmark = pytest.mark.process


def lines(cluster: Nodes) -> dict[str, Any]:
    """The items of GET /shards by name."""
    return {s["name"]: s for s in cluster.get("/shards")["items"]}


def test_a_shard_is_drained_and_taken_back(cluster: Nodes) -> None:
    """A drained shard gives up all partitions, an active one gets its share back, and no push is lost meanwhile."""
    name = summing_model(cluster, "async", 8, partitions=4)
    pushes = 0

    def push() -> None:
        nonlocal pushes
        body = {"model": name, "grads": {"w": [1.0] * 8}, "worker": "me", "epoch": 1, "seq": pushes}
        cluster.post("/push", body, status=200)
        pushes += 1

    assert {s["state"] for s in lines(cluster).values()} == {"active"}
    for state, settled in (("draining", 0), ("active", 2)):
        answer = cluster.call("PUT", "/shards/shard-1", {"state": state}, status=200)
        assert (answer["name"], answer["state"]) == ("shard-1", state)

        def moved(state: str = state, settled: int = settled) -> bool:
            push()
            line = lines(cluster)["shard-1"]
            owned = [p["shard"] for p in cluster.get(f"/models/{name}")["partitions"]]
            return line["state"] == state and not line["moves"] and owned.count("shard-1") == settled

        eventually(moved, within_s=60.0, what=f"the moves of shard-1, {state}")
    push()
    assert cluster.post("/pull", {"model": name})["params"]["w"] == [float(pushes)] * 8


def test_what_cannot_be_is_refused(cluster: Nodes) -> None:
    """Requests with an unknown shard, an unknown state, a missing epoch or an expired one are refused."""
    assert cluster.call("PUT", "/shards/none", {"state": "draining"}, status=404)["code"] == "unknown_node"
    assert cluster.get("/shards/none", status=404)["code"] == "unknown_node"
    assert cluster.call("PUT", "/shards/shard-0", {"state": "resting"}, status=422)["code"] == "invalid_field"
    assert cluster.post("/internal/shards/shard-0/drain", status=400)["code"] == "malformed"
    assert cluster.post("/internal/shards/shard-0/drain?epoch=99", status=409)["code"] == "fenced"
    assert lines(cluster)["shard-0"]["state"] == "active"


async def test_a_shard_asks_about_a_worker(cluster: Nodes) -> None:
    """A shard that asks the scheduler about a worker learns its epoch and generation, and whether it is live."""
    name = summing_model(cluster, "async", 8, partitions=4)
    me = cluster.post(f"/models/{name}/workers", {"name": "w0", "lease_s": 60}, status=201)
    link = SchedulerLink([cluster.url], Credentials())
    nothing: Any = None
    shard = Membership("s", [], link, nothing, Directory("s"), nothing, nothing, nothing, nothing)
    try:
        known = await shard.ask_worker(AskWorker(1, ModelKey(name, 1), me["worker"]))
        other = await shard.ask_worker(AskWorker(2, ModelKey(name, 1), f"{name}/w9"))
    finally:
        await link.aclose()

    assert (known.request, known.epoch, known.live, known.error) == (1, me["epoch"], True, None)
    assert known.generation == me["generation"]
    assert (other.epoch, other.error) == (None, None)


def test_what_a_shard_is_told_names_the_term(cluster: Nodes) -> None:
    """Every answer of the scheduler to a shard, including refusals, names its term."""
    path, term = "/internal/shards/shard-0", cluster.get("/map")["term"]
    epoch = next(s["epoch"] for s in cluster.get("/shards")["items"] if s["name"] == "shard-0")

    assert cluster.call("PUT", path, {"epoch": epoch + 1}, status=409)["term"] == term
    assert cluster.call("PUT", "/internal/shards/none", {"epoch": 1}, status=404)["term"] == term
    assert cluster.get(f"/internal/feed?shard=shard-0&epoch={epoch + 1}", status=409)["term"] == term
    other = {"name": "passing", "addresses": ["http://127.0.0.1:1"]}
    joined = cluster.post("/internal/shards", other, status=201)
    assert cluster.call("PUT", "/internal/shards/passing", {"epoch": joined["epoch"]})["term"] == term
    cluster.call("DELETE", f"/internal/shards/passing?epoch={joined['epoch']}", status=204)


def test_a_shard_of_another_version_does_not_join(cluster: Nodes) -> None:
    """A join that names another version than the leader's is refused with both versions, and changes nothing."""
    before = cluster.get("/map")["map_epoch"]
    body = {"name": "older", "addresses": ["http://127.0.0.1:1"], "version": "0.0.9"}

    refused = cluster.post("/internal/shards", body, status=409)

    assert refused["code"] == "conflict"
    assert f"version 0.0.9, the leading scheduler {paramserver.__version__}" in refused["detail"]
    assert cluster.get("/map")["map_epoch"] == before
    assert "older" not in {s["name"] for s in cluster.get("/shards")["items"]}


def test_a_shard_under_the_address_of_a_scheduler_does_not_join(cluster: Nodes) -> None:
    """A join that gives the scheduler's own URL as an address of the shard is refused, and changes nothing."""
    before = cluster.get("/map")["map_epoch"]
    body = {"name": "mistaken", "addresses": ["http://127.0.0.1:1", cluster.url + "/"]}

    refused = cluster.post("/internal/shards", body, status=422)

    assert refused["code"] == "invalid_field"
    assert f"{cluster.url}/ is the address of a scheduler" in refused["detail"]
    assert cluster.get("/map")["map_epoch"] == before


def test_a_request_that_comes_back_to_a_scheduler_ends_there(tmp_path: Path) -> None:
    """If a shard's address leads to a scheduler, leading or not, what is forwarded there is refused with the reason."""
    with nodes(tmp_path, shards=0, schedulers=2) as cluster:
        first = leader(cluster)
        for index in (first, 1 - first):
            alias = f"http://localhost:{cluster.ports[index]}"  # no scheduler calls itself that
            shard = {"name": "mistaken", "addresses": [alias]}

            for method, path, body in (("POST", "/push", {}), ("GET", "/pull/m/w", None)):
                epoch = cluster.post("/internal/shards", shard, status=201)["epoch"]  # it has no heartbeat
                refused = cluster.call(method, path, body, status=503)
                assert refused["detail"] == "the address of a shard leads to a scheduler instead"
                cluster.call("DELETE", f"/internal/shards/mistaken?epoch={epoch}", status=204)
