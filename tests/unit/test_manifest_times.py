"""How long Compose and Kubernetes wait for what starts and stops, and what they stop first."""

from typing import Any

import yaml

from paramserver_cli.supervisor import SHARD_SPARE_S

from .manifests import GPU, named, pods

LOADING_S = 900
"""How long Redis or a node may take to load what is stored."""
REDIS_STOP_S = 60
"""How long Redis may take to write the end of its file."""


def test_compose_waits_while_redis_or_a_node_loads(compose: dict[str, Any]) -> None:
    """No service counts as unhealthy, which would end `docker compose up`, before it has had time to load.

    Nor does any have a `start_period`: with one, current engines look for the first time only after 5 s.
    """
    checks = {name: s["healthcheck"] for name, s in compose["services"].items() if "healthcheck" in s}

    assert len(checks) >= 4
    for name, check in checks.items():
        assert int(check["interval"].removesuffix("s")) * check["retries"] >= LOADING_S, name
        assert "start_period" not in check, name


def test_shards_are_killed_only_after_the_time_that_they_have_to_stop(
    compose: dict[str, Any], objects: list[dict[str, Any]]
) -> None:
    """Compose and Kubernetes wait SHARD_SPARE_S longer than the shards' own `stop_s` before they kill them."""
    shard, pod = compose["services"]["shard"], pods(objects)["StatefulSet/shard"]["spec"]
    (variable,) = [e["value"] for e in pod["containers"][0]["env"] if e["name"] == "PARAMSERVER_STOP_S"]

    assert shard["stop_grace_period"] == f"{float(shard['environment']['PARAMSERVER_STOP_S']) + SHARD_SPARE_S:g}s"
    assert pod["terminationGracePeriodSeconds"] == float(variable) + SHARD_SPARE_S


def test_redis_stays_while_a_shard_of_its_node_stops(objects: list[dict[str, Any]]) -> None:
    """A drain stops all pods of a node at once: Redis goes on as long as a shard may store, found under its name.

    A Service names no pod that is being stopped, unless it is told to name those that are not ready.
    """
    redis, shard = (pods(objects)[f"StatefulSet/{name}"]["spec"] for name in ("redis", "shard"))
    (container,) = redis["containers"]
    command, wait_s = container["lifecycle"]["preStop"]["exec"]["command"]

    assert command == "sleep"
    assert int(wait_s) == shard["terminationGracePeriodSeconds"]
    assert redis["terminationGracePeriodSeconds"] >= int(wait_s) + REDIS_STOP_S
    assert named(objects, "Service", "redis")["spec"]["publishNotReadyAddresses"] is True


def test_a_new_gpu_worker_does_not_wait_for_a_gpu_that_the_old_one_holds() -> None:
    """A rollout stops a GPU worker before it starts the next: with a GPU for each, there is none left for one more.

    Nodes with GPUs are often tainted with the name of their resource.
    """
    (worker,) = yaml.safe_load_all((GPU / "workers.yaml").read_text(encoding="utf-8"))
    pod = worker["spec"]["template"]["spec"]
    (resource,) = [name for name in pod["containers"][0]["resources"]["limits"] if name.endswith("/gpu")]

    assert worker["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert {"key": resource, "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
