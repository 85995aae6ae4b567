"""What containers and Kubernetes are told: files that parse, agree with each other and with the software."""

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

import paramserver
from paramserver_node.settings import PREFIX, SERVICES

ROOT = Path(__file__).parents[2]
PART, COMPONENT = "app.kubernetes.io/part-of", "app.kubernetes.io/component"
ONE_SHOTS = {"secrets", "first-run"}
GRAFANA = ROOT / "deploy" / "grafana"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = read(ROOT / "docker-compose.yml")
    return found


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    """Every document of the folder `k8s`, in the order in which `kubectl apply -f` takes them."""
    paths = sorted((ROOT / "k8s").iterdir())
    assert [p.name for p in paths if not re.fullmatch(r"\d\d-[a-z-]+\.yaml", p.name)] == []
    return [d for p in paths for d in yaml.safe_load_all(p.read_text(encoding="utf-8")) if d is not None]


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod template of each workload, by kind and name."""
    found = {
        f"{d['kind']}/{d['metadata']['name']}": d["spec"]["template"]
        for d in objects
        if "template" in d.get("spec", {})
    }
    assert len(found) >= 6
    return found


def named(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [d for d in objects if d["kind"] == kind and d["metadata"]["name"] == name]
    return found


def own_images(texts: Iterator[str]) -> set[str]:
    return {image for text in texts for image in re.findall(r"\bparamserver-(?:server|worker)[a-z-]*:[\w.-]+", text)}


def test_the_tag_of_every_image_is_the_version() -> None:
    """Compose, the manifests, the Dockerfiles' own lines and the documentation all name this version's images."""
    paths = [
        *(ROOT / "k8s").iterdir(),
        *ROOT.glob("Dockerfile.*"),
        ROOT / "docker-compose.yml",
        ROOT / "docs/operations.md",
    ]

    images = own_images(p.read_text(encoding="utf-8") for p in paths)

    assert {i.partition(":")[0] for i in images} == {
        "paramserver-server",
        "paramserver-worker",
        "paramserver-worker-cpu",
    }
    assert {i.partition(":")[2] for i in images} == {paramserver.__version__}


def test_every_setting_in_an_environment_is_one_that_a_service_knows(
    compose: dict[str, Any], objects: list[dict[str, Any]]
) -> None:
    """A misspelt PARAMSERVER_ variable would be ignored without a word."""
    known = {PREFIX + f.name.upper() for service in SERVICES for f in fields(service)}
    given = {name for s in compose["services"].values() for name in s.get("environment", {})}
    given |= set(named(objects, "ConfigMap", "paramserver")["data"])
    for pod in pods(objects).values():
        given |= {e["name"] for c in pod["spec"]["containers"] for e in c.get("env", [])}

    ours = {name.removesuffix("_FILE") for name in given if name.startswith(PREFIX)}

    assert {"PARAMSERVER_REDIS", "PARAMSERVER_HOST"} <= ours <= known


def test_commands_are_those_that_the_package_installs(compose: dict[str, Any], objects: list[dict[str, Any]]) -> None:
    """What the containers start exists: a script of the package, a file of the image or a module."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    started = [s["command"] for s in compose["services"].values() if own_images(iter([s.get("image", "")]))]
    started += [c.get("args") or c["command"] for pod in pods(objects).values() for c in pod["spec"]["containers"]]

    started = [c[2].rpartition("exec ")[2].split() if c[0] == "sh" else c for c in started]
    ours = {command[0] for command in started} - {"python", "redis-server"}

    assert {"paramserver-scheduler", "paramserver-shard", "paramserver-worker"} == ours <= set(scripts)
    copied = (ROOT / "Dockerfile.server").read_text()
    for command in started:
        if command[1:2] == ["-m"]:
            assert (ROOT / "shared" / command[2].replace(".", "/")).with_suffix(".py").is_file()
        elif command[0] == "python":
            assert f"deploy/{Path(command[1]).name}" in copied


def test_compose_publishes_on_this_machine_only(compose: dict[str, Any]) -> None:
    """What is published has no TLS: each port is bound to 127.0.0.1, Redis has none."""
    ports = {name: s["ports"] for name, s in compose["services"].items() if "ports" in s}

    assert ports == {"scheduler": ["127.0.0.1:${PUBLISHED_PORT:-8700}:8700"], "grafana": ["127.0.0.1:3000:3000"]}
    assert compose["networks"]["storage"] == {"internal": True}
    on_storage = {name for name, s in compose["services"].items() if "storage" in s.get("networks", [])}
    assert on_storage == {"redis", "scheduler", "shard"}


def test_compose_restarts_what_dies_and_waits_for_what_ends(compose: dict[str, Any]) -> None:
    """One-shot containers are waited for by another service, so that `up --wait` succeeds; the others live on."""
    services = compose["services"]
    completed = {
        name
        for s in services.values()
        if isinstance(s.get("depends_on"), dict)
        for name, how in s["depends_on"].items()
        if how["condition"] == "service_completed_successfully"
    }

    assert completed == ONE_SHOTS
    assert {n for n, s in services.items() if s["restart"] == "on-failure"} == ONE_SHOTS
    assert {n for n, s in services.items() if s["restart"] == "unless-stopped"} == set(services) - ONE_SHOTS
    assert {n for n, s in services.items() if "healthcheck" in s} == {"redis", "scheduler", "shard"}
    assert "replicas" not in services["scheduler"].get("deploy", {})
    for name in ("redis", "scheduler", "shard", "worker"):
        assert "stop_grace_period" in services[name]
        assert services[name]["read_only"] is True


def test_pods_have_no_rights_and_fixed_images(objects: list[dict[str, Any]]) -> None:
    """Every pod meets the restricted standard and takes the image that is there."""
    for name, pod in pods(objects).items():
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False, name  # its SCHEDULER_PORT and the like would look like settings
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for c in spec["containers"]:
            assert c["imagePullPolicy"] == "IfNotPresent", name
            assert c["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert {"cpu", "memory"} == set(c["resources"]["requests"]), name
    accounts = [d for d in objects if d["kind"] == "ServiceAccount"]
    assert accounts
    assert all(a["automountServiceAccountToken"] is False for a in accounts)


def test_selectors_find_pods_and_ports(objects: list[dict[str, Any]]) -> None:
    """Every Service, disruption budget and policy selects a pod that exists; named ports are the containers'."""
    labels = [pod["metadata"]["labels"] for pod in pods(objects).values()]
    seen = 0
    for d in objects:
        spec = d.get("spec", {})
        wanted = spec.get("selector") if d["kind"] == "Service" else spec.get("selector", {}).get("matchLabels")
        if wanted is None or d["kind"] == "Job":
            continue
        seen += 1
        assert any(wanted.items() <= have.items() for have in labels), d["metadata"]
        if d["kind"] == "Service":
            (pod,) = [p for p in pods(objects).values() if wanted.items() <= p["metadata"]["labels"].items()]
            offered = {p["name"]: p["containerPort"] for c in pod["spec"]["containers"] for p in c["ports"]}
            assert {p["targetPort"]: p["port"] for p in spec["ports"]} == offered
    assert seen >= 10


def test_only_scheduler_and_shards_reach_redis(objects: list[dict[str, Any]]) -> None:
    """The policy of Redis names exactly its two clients, and no other policy opens Redis to more."""
    policy = named(objects, "NetworkPolicy", "redis")["spec"]
    others = [d["spec"] for d in objects if d["kind"] == "NetworkPolicy" and d["metadata"]["name"] != "redis"]

    (rule,) = policy["ingress"]
    (peer,) = rule["from"]
    assert policy["podSelector"] == {"matchLabels": {COMPONENT: "redis"}}
    assert peer["podSelector"]["matchExpressions"] == [
        {"key": COMPONENT, "operator": "In", "values": ["scheduler", "shard"]}
    ]
    for other in others:
        (chosen,) = other["podSelector"]["matchExpressions"]
        assert chosen["operator"] == "In"
        assert "redis" not in chosen["values"]


def test_there_is_one_scheduler_and_never_two_at_once(objects: list[dict[str, Any]]) -> None:
    """One active scheduler is what the software supports: the old one is gone before the new one starts."""
    spec = named(objects, "Deployment", "scheduler")["spec"]

    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_nothing_outside_the_cluster_reaches_a_service(objects: list[dict[str, Any]]) -> None:
    """What is served has no TLS: there is no load balancer, no node port, no ingress and no host network."""
    assert {d["spec"].get("type", "ClusterIP") for d in objects if d["kind"] == "Service"} == {"ClusterIP"}
    assert "Ingress" not in {d["kind"] for d in objects}
    assert not any(pod["spec"].get("hostNetwork") for pod in pods(objects).values())


def test_no_file_holds_a_password(compose: dict[str, Any], objects: list[dict[str, Any]]) -> None:
    """The Secrets are empty as applied and Redis reads its password from a file."""
    secrets = [d for d in objects if d["kind"] == "Secret"]

    assert {s["metadata"]["name"] for s in secrets} == {"redis", "cluster", "tokens"}
    assert not any({"data", "stringData"} & set(s) for s in secrets)
    assert "--include" in compose["services"]["redis"]["command"]
    for path in [*(ROOT / "k8s").iterdir(), ROOT / "docker-compose.yml"]:
        assert re.search(r"redis://[^ ]*:[^ ]*@|requirepass|ps1\.", path.read_text(encoding="utf-8")) is None, path.name


def test_the_dashboard_and_the_rules_are_where_they_are_looked_for(compose: dict[str, Any]) -> None:
    """Each panel asks the provisioned data source, the files are mounted, and every job is a service."""
    (source,) = read(GRAFANA / "provisioning/datasources/prometheus.yml")["datasources"]
    (provider,) = read(GRAFANA / "provisioning/dashboards/paramserver.yml")["providers"]
    board = json.loads((GRAFANA / "dashboards/paramserver.json").read_text())

    assert {t["datasource"]["uid"] for p in board["panels"] for t in p.get("targets", [])} == {source["uid"]}
    volumes = compose["services"]["grafana"]["volumes"]
    assert any(v.split(":")[1] == provider["options"]["path"] for v in volumes)
    config = read(ROOT / "deploy/prometheus.yml")
    mounted = {v.split(":")[1] for v in compose["services"]["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{name}" for name in ("prometheus.yml", *config["rule_files"])} <= mounted
    names = [n for j in config["scrape_configs"] for c in j["dns_sd_configs"] for n in c["names"]]
    assert {"scheduler", "shard"} == set(names) <= set(compose["services"])


def files_of(names: dict[str, str], mounts: dict[str, str]) -> set[str]:
    """Which of these files named by PARAMSERVER_..._FILE variables lie in a folder that is mounted."""
    return {path for name, path in names.items() if name.endswith("_FILE") and path.rpartition("/")[0] in mounts}


def test_nodes_have_the_secret_and_workers_a_token(compose: dict[str, Any], objects: list[dict[str, Any]]) -> None:
    """Who makes tokens, and nobody else, mounts the secret; a worker mounts its token; every file named is mounted."""
    of_nodes = {"scheduler", "shard", "first-run"}
    secret, token, redis = "/run/cluster/secret", "/run/tokens/worker", "/run/paramserver/redis-url"
    for name, s in compose["services"].items():
        mounts = {v.split(":")[1]: v.split(":")[0] for v in s.get("volumes", [])}
        named_files = {k: v for k, v in s.get("environment", {}).items() if k.endswith("_FILE")}
        assert files_of(named_files, mounts) == set(named_files.values()), name
        assert (secret in named_files.values()) == (name in of_nodes), name
        assert (mounts.get("/run/cluster") == "secret") == (name in of_nodes | {"secrets"}), name
        assert (mounts.get("/run/tokens") == "tokens") == (name in {"secrets", "worker", "prometheus"}), name
        assert (token in named_files.values()) == (name == "worker"), name
    config = named(objects, "ConfigMap", "paramserver")["data"]
    for name, pod in pods(objects).items():
        (container,) = pod["spec"]["containers"]
        component = name.partition("/")[2]
        env = {e["name"]: e.get("value", "") for e in container.get("env", [])}
        files = {v for k, v in env.items() if k.endswith("_FILE")}
        if component in ("scheduler", "shard"):
            files.add(config["PARAMSERVER_REDIS_FILE"])
        volumes = {v["name"]: v.get("secret") for v in pod["spec"].get("volumes", [])}
        mounted = {
            f"{m['mountPath']}/{item['path']}"
            for m in container.get("volumeMounts", [])
            if (held := volumes.get(m["name"])) is not None
            for item in held["items"]
        }
        wanted = {"worker": {token}, "first-run": {secret}, "scheduler": {secret, redis}, "shard": {secret, redis}}
        assert files == wanted.get(component, set()), name
        assert files <= mounted, name


def test_one_job_fills_every_secret(compose: dict[str, Any], objects: list[dict[str, Any]]) -> None:
    """Only it may speak to the API, about exactly the Secrets there are; Prometheus reads a file that it writes."""
    (rule,) = named(objects, "Role", "make-secrets")["rules"]
    (job,) = [p for n, p in pods(objects).items() if n == "Job/make-secrets"]
    accounts = {n: p["spec"].get("serviceAccountName") for n, p in pods(objects).items()}

    assert set(rule["resourceNames"]) == {d["metadata"]["name"] for d in objects if d["kind"] == "Secret"}
    assert rule["verbs"] == ["get", "patch"]
    assert {n for n, a in accounts.items() if a == "make-secrets"} == {"Job/make-secrets"}
    assert job["spec"]["automountServiceAccountToken"] is True
    jobs = read(ROOT / "deploy/prometheus.yml")["scrape_configs"]
    assert {j["authorization"]["credentials_file"] for j in jobs} == {"/run/tokens/reader"}
    command = compose["services"]["secrets"]["command"]
    folders = dict(zip(command[3::2], command[4::2], strict=True))
    assert folders == {
        "--redis": "/run/paramserver",
        "--cluster": "/run/cluster",
        "--tokens": "/run/tokens",
        "--host": "redis",
    }
