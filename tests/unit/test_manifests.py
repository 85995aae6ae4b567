"""The files for Compose, Kubernetes and monitoring parse, and agree with each other and with the software."""

import importlib.util
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

import paramserver
from paramserver.core.scheduler.runs import is_allowed
from paramserver_cli import runs, series
from paramserver_node.setting_checks import size_bytes
from paramserver_node.settings import PREFIX, SERVICES

from .manifests import GPU, ROOT, named, pods, read

COMPONENT = "app.kubernetes.io/component"
ONE_SHOTS = {"secrets"}
SCHEDULERS = {"scheduler-1", "scheduler-2"}
NODES = {*SCHEDULERS, "shard"}
GRAFANA = ROOT / "deploy" / "grafana"
MONITORING = ROOT / "deploy" / "k8s-monitoring" / "prometheus-operator.yaml"


def own_images(texts: Iterator[str]) -> set[str]:
    return {image for text in texts for image in re.findall(r"\bparamserver-(?:server|worker)[a-z-]*:[\w.-]+", text)}


def test_the_tag_of_every_image_is_the_version() -> None:
    """Compose, the manifests, the Dockerfiles and the documentation name only images of this version."""
    paths = [
        *(ROOT / "k8s").iterdir(),
        *GPU.iterdir(),
        *ROOT.glob("Dockerfile.*"),
        ROOT / "docker-compose.yml",
        ROOT / "docs/operations.md",
        ROOT / "README.md",
    ]

    images = own_images(p.read_text(encoding="utf-8") for p in paths)

    assert {i.partition(":")[0] for i in images} == {
        "paramserver-server",
        "paramserver-worker",
        "paramserver-worker-cpu",
    }
    assert {i.partition(":")[2] for i in images} == {paramserver.__version__}


def test_images_of_others_are_exact_versions(compose: dict[str, Any], objects: list[dict[str, Any]]) -> None:
    """Images of others have an exact version, and Compose and the manifests the same Redis.

    A floating tag may give one node a Redis that cannot read what that of another node has written.
    """
    in_pods = {c["image"] for pod in pods(objects).values() for c in pod["spec"]["containers"]}
    of_others = {i for i in in_pods | {s["image"] for s in compose["services"].values()} if not own_images(iter([i]))}

    assert compose["services"]["redis"]["image"] in in_pods
    assert len(of_others) == 3
    assert [i for i in of_others if not re.fullmatch(r"[\w/-]+:v?\d+\.\d+\.\d+(-alpine)?", i)] == []


def test_every_setting_in_an_environment_is_one_that_a_service_knows(
    compose: dict[str, Any], objects: list[dict[str, Any]]
) -> None:
    """Every PARAMSERVER_ variable is a setting of some service; a misspelled one would be ignored silently."""
    known = {PREFIX + f.name.upper() for service in SERVICES for f in fields(service)}
    given = {name for s in compose["services"].values() for name in s.get("environment", {})}
    given |= set(named(objects, "ConfigMap", "paramserver")["data"])
    for pod in pods(objects).values():
        given |= {e["name"] for c in pod["spec"]["containers"] for e in c.get("env", [])}

    ours = {name.removesuffix("_FILE") for name in given if name.startswith(PREFIX)}

    assert {"PARAMSERVER_REDIS", "PARAMSERVER_HOST"} <= ours <= known


def test_commands_are_those_that_the_package_installs(compose: dict[str, Any], objects: list[dict[str, Any]]) -> None:
    """Containers start only scripts of the package and files that are copied into the image."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    started = [s["command"] for s in compose["services"].values() if own_images(iter([s.get("image", "")]))]
    started += [c.get("args") or c["command"] for pod in pods(objects).values() for c in pod["spec"]["containers"]]

    started = [c[2].rpartition("exec ")[2].split() if c[0] == "sh" else c for c in started]
    ours = {command[0] for command in started} - {"python", "redis-server"}

    assert {"paramserver-scheduler", "paramserver-shard", "paramserver-worker", "psctl"} == ours <= set(scripts)
    copied = (ROOT / "Dockerfile.server").read_text()
    for command in started:
        for word in command[1:]:
            if word.startswith("/opt/paramserver/deploy/"):
                assert f"deploy/{Path(word).name}" in copied
                assert f"!deploy/{Path(word).name}" in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_series_trains_what_its_workers_allow(compose: dict[str, Any], objects: list[dict[str, Any]]) -> None:
    """psctl accepts the options of each series, which match the number of workers and the entries that they allow."""
    containers = {n: (p, p["spec"]["containers"][0]) for n, p in pods(objects).items()}
    (gpu,) = yaml.safe_load_all((GPU / "workers.yaml").read_text(encoding="utf-8"))
    services, pool = compose["services"], containers["Deployment/worker"][1]["args"]
    for command, workers, allowed in [
        (services["series"]["command"], services["worker"]["deploy"]["replicas"], services["worker"]["command"]),
        (containers["Deployment/series"][1]["args"], named(objects, "Deployment", "worker")["spec"]["replicas"], pool),
        (
            services["series-gpu"]["command"],
            services["worker-gpu"]["deploy"]["replicas"],
            gpu["spec"]["template"]["spec"]["containers"][0]["args"],
        ),
    ]:
        assert command[:3] == ["psctl", "run", "series"]
        group = get_command(runs.app)
        assert isinstance(group, TyperGroup)
        context = group.commands["series"].make_context("series", list(command[3:]))
        options = context.params
        assert options["workers"] == workers
        assert (options["minutes"], options["keep"]) == (2.0, 20)
        assert is_allowed(options["entry"], allowed[2:])
        assert set(options["modes"].split(",")) <= set(series.MODES)
    assert services["worker-gpu"]["command"] == gpu["spec"]["template"]["spec"]["containers"][0]["args"]
    assert not is_allowed(services["series-gpu"]["command"][3], services["worker"]["command"][2:])


def test_the_spec_without_torch_is_that_of_the_network() -> None:
    """`deploy/digits_torch.yaml` lists the parameters of the torch example with their shapes."""
    spec = read(ROOT / "deploy/digits_torch.yaml")
    assert sum(prod(p["shape"]) for p in spec["params"].values()) == 38_282
    if importlib.util.find_spec("torch") is None:
        pytest.skip("the rest needs torch: pip install torch==2.13.0")
    from paramserver.examples.digits_torch import Net

    assert {n: list(p.shape) for n, p in Net().named_parameters()} == {n: p["shape"] for n, p in spec["params"].items()}


def test_compose_publishes_on_this_machine_only(compose: dict[str, Any]) -> None:
    """Compose binds each published port to 127.0.0.1, as there is no TLS, and publishes none of Redis."""
    ports = {name: s["ports"] for name, s in compose["services"].items() if "ports" in s}

    assert ports == {
        "scheduler-1": ["127.0.0.1:${PUBLISHED_PORT:-8700}:8700"],
        "grafana": ["127.0.0.1:${GRAFANA_PORT:-3000}:3000"],
    }
    assert compose["networks"]["storage"] == {"internal": True}
    on_storage = {name for name, s in compose["services"].items() if "storage" in s.get("networks", [])}
    assert on_storage == {"redis", *NODES}


def test_compose_restarts_what_dies_and_waits_for_what_ends(compose: dict[str, Any]) -> None:
    """Compose restarts one-shot containers only on failure, and all others always.

    For a one-shot container another service waits, as otherwise `up --wait` would fail.
    """
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
    assert {n for n, s in services.items() if "healthcheck" in s} == {"redis", *NODES}
    for name in set(services) - {"prometheus", "grafana"}:
        assert "stop_grace_period" in services[name]
        assert services[name]["read_only"] is True
        assert services[name]["security_opt"] == ["no-new-privileges:true"]


def test_logs_of_containers_are_bounded(compose: dict[str, Any]) -> None:
    """Each container's log is rotated: by default the engine keeps every line as long as the container exists."""
    for service in compose["services"].values():
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}


def test_two_schedulers_are_the_same_but_for_their_names(compose: dict[str, Any]) -> None:
    """Shards and clients have both schedulers' URLs; each scheduler advertises its name, and they share checkpoints."""
    services = compose["services"]
    urls = ",".join(f"http://{name}:8700" for name in sorted(SCHEDULERS))
    for name in SCHEDULERS:
        environment = services[name]["environment"]
        assert environment["PARAMSERVER_ADVERTISE"] == f"http://{name}:8700"
        assert environment["PARAMSERVER_NAME"] == services[name]["hostname"] == name
        assert "checkpoints:/var/lib/paramserver" in services[name]["volumes"]
    assert services["shard"]["environment"]["PARAMSERVER_SCHEDULER"] == urls
    for name in ("worker", "worker-gpu", "series", "series-gpu"):
        assert services[name]["environment"]["PARAMSERVER_URL"] == urls


def test_shards_and_workers_share_memory_by_path_and_user(compose: dict[str, Any]) -> None:
    """Shards and workers mount one tmpfs volume at the same path, owned by the user of both images."""
    services = compose["services"]
    for name in ("shard", "worker", "worker-gpu"):
        (mount,) = [v for v in services[name]["volumes"] if v.startswith("shared-memory:")]
        assert mount == "shared-memory:/run/shared", name
    assert services["shard"]["environment"]["PARAMSERVER_SHARED_MEMORY"] == "/run/shared"
    options = compose["volumes"]["shared-memory"]["driver_opts"]
    assert options["type"] == "tmpfs"
    for file in ("Dockerfile.server", "Dockerfile.worker"):
        (uid,) = re.findall(r"^USER (\d+):\d+$", (ROOT / file).read_text(), re.MULTILINE)
        assert f"uid={uid}" in options["o"]


def test_pods_have_no_rights_and_fixed_images(objects: list[dict[str, Any]]) -> None:
    """Every pod meets the `restricted` security standard, pulls only missing images and requests CPU and memory."""
    for name, pod in pods(objects).items():
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False, name  # else SCHEDULER_PORT and the like would look like settings
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
    """Every Service, disruption budget and policy selects a pod that exists; a Service has its containers' ports."""
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
    """The network policy of Redis admits only schedulers and shards, and no other policy selects Redis."""
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


def test_nodes_of_kubernetes_have_addresses_time_and_probes(objects: list[dict[str, Any]]) -> None:
    """All nodes know both schedulers by name, and their probes allow time for recovery."""
    config = named(objects, "ConfigMap", "paramserver")["data"]
    scheduler = named(objects, "StatefulSet", "scheduler")["spec"]
    urls = [f"http://scheduler-{i}.{scheduler['serviceName']}:8700" for i in range(scheduler["replicas"])]
    assert len(urls) == 2
    assert config["PARAMSERVER_SCHEDULER"] == config["PARAMSERVER_URL"] == ",".join(urls)
    assert named(objects, "Service", scheduler["serviceName"])["spec"]["clusterIP"] == "None"
    for name in ("scheduler", "shard"):
        pod = pods(objects)[f"StatefulSet/{name}"]["spec"]
        (container,) = pod["containers"]
        paths = {k: container[k]["httpGet"]["path"] for k in ("startupProbe", "readinessProbe", "livenessProbe")}
        assert paths == {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
        env = {e["name"]: e.get("value") for e in container["env"]}
        assert env["PARAMSERVER_ADVERTISE"].startswith("http://$(PARAMSERVER_NAME).")
    budgets = {d["metadata"]["name"]: d["spec"] for d in objects if d["kind"] == "PodDisruptionBudget"}
    assert budgets.keys() >= {"scheduler", "shard"}
    # By default a pod that is not ready, such as one that crashes again and again, keeps its node from being drained.
    assert {b["unhealthyPodEvictionPolicy"] for b in budgets.values()} == {"AlwaysAllow"}


def memory_of(pod: dict[str, Any], kind: str) -> int:
    """Return what a pod's only container `requests` or `limits`, in bytes."""
    (container,) = pod["spec"]["containers"]
    text: str = container["resources"][kind]["memory"]
    return int(text[:-2]) << {"Mi": 20, "Gi": 30}[text[-2:]]


def memory_limit(objects: list[dict[str, Any]], name: str) -> int:
    return memory_of(pods(objects)[f"StatefulSet/{name}"], "limits")


def after(option: str, words: list[str]) -> str:
    return words[words.index(option) + 1]


def test_a_full_redis_refuses_before_it_is_killed(compose: dict[str, Any], objects: list[dict[str, Any]]) -> None:
    """Redis uses at most half of its pod's memory, as an AOF rewrite may copy all of it, and as much in Compose."""
    (container,) = pods(objects)["StatefulSet/redis"]["spec"]["containers"]
    text = after("--maxmemory", container["args"])
    assert text.endswith("gb")  # to Redis, 1gb is 1024^3 bytes
    assert int(text.removesuffix("gb")) << 30 == memory_limit(objects, "redis") // 2
    assert after("--maxmemory", compose["services"]["redis"]["command"]) == f"${{REDIS_MAXMEMORY:-{text}}}"
    for words in (container["args"], compose["services"]["redis"]["command"]):
        assert after("--maxmemory-policy", words) == "noeviction"


def test_what_holds_state_has_its_memory_reserved(compose: dict[str, Any], objects: list[dict[str, Any]]) -> None:
    """Redis and shards request their memory limit, or a full node would evict them first.

    A shard in Compose has the limit of a pod, not the whole machine's memory, and the documentation has the sum of what
    the manifests request.
    """
    for name in ("redis", "shard"):
        assert memory_of(pods(objects)[f"StatefulSet/{name}"], "requests") == memory_limit(objects, name)
    setting = compose["services"]["shard"]["environment"]["PARAMSERVER_MEMORY_LIMIT"]
    default = setting.removeprefix("${SHARD_MEMORY:-").removesuffix("}")
    assert size_bytes(default) == memory_limit(objects, "shard")
    whole = sum(
        memory_of(pod, "requests") * named(objects, *name.split("/"))["spec"].get("replicas", 1)
        for name, pod in pods(objects).items()
    )
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    assert f"request {whole / (1 << 30):.1f} GiB of memory" in " ".join(text.split())


def test_applying_the_manifests_again_does_not_start_the_example(objects: list[dict[str, Any]]) -> None:
    """The Deployment `series` gives no number of replicas, so that `kubectl apply` leaves it at 0 where it was."""
    assert "replicas" not in named(objects, "Deployment", "series")["spec"]


def test_a_redis_by_hand_is_started_as_the_manifests_start_theirs(objects: list[dict[str, Any]]) -> None:
    """Documented `redis-server` commands have the memory and persistence options of the manifests, and no password."""
    (container,) = pods(objects)["StatefulSet/redis"]["spec"]["containers"]
    rules = {"--maxmemory", "--maxmemory-policy", "--appendonly"}
    ours = {a: b for a, b in pairwise(container["args"]) if a in rules}
    pages = [p.read_text(encoding="utf-8") for p in (ROOT / "docs").glob("*.md")]
    typed = [line for page in pages for line in page.splitlines() if line.startswith("    redis-server ")]

    assert typed
    for words in map(shlex.split, typed):
        assert {a: b for a, b in pairwise(words) if a in rules} == ours
        assert "--requirepass" not in words


def test_a_scheduler_has_memory_for_every_checkpoint_that_redis_has_room_for(objects: list[dict[str, Any]]) -> None:
    """A scheduler's memory holds twice the largest model state, as the leader needs to write a checkpoint.

    The largest state is a sixth of the memory of Redis.
    """
    state = memory_limit(objects, "redis") // 6

    assert memory_limit(objects, "scheduler") >= 2 * state + (300 << 20)


def test_what_the_operations_page_stops_and_makes_exists(objects: list[dict[str, Any]]) -> None:
    """Workloads and labels of documented kubectl commands exist; each kind stops after those that need it, and waits.

    The claim that a restore makes is that of the StatefulSet of Redis.
    """
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    lines = [line.strip().partition(" #")[0].rstrip() for line in page.splitlines() if line.startswith("    ")]
    there = {f"{d['kind'].lower()}/{d['metadata']['name']}" for d in objects} | {"deployment/worker-gpu"}
    components = {name.partition("/")[2] for name in there}
    for line in lines:
        found = re.findall(r"(?:statefulset|deployment|job)[ /][a-z][\w-]*", line)
        assert {name.replace(" ", "/") for name in found} <= there
        for chosen in re.findall(r"app\.kubernetes\.io/component(?:=| in \()([\w,-]+)", line):
            assert set(chosen.split(",")) <= components

    stopped = [re.split(r"scale \w+ |--replicas", line)[1].strip() for line in lines if line.endswith("--replicas 0")]
    waited = [line.partition("component")[2] for line in lines if "--for=delete pod" in line]
    assert stopped[1:] == ["--all", "shard", "scheduler", "redis"]  # the first stops only the example
    assert [re.findall(r"worker|shard|scheduler|redis", text)[0] for text in waited] == ["worker", *stopped[2:]]
    made = [yaml.safe_load(text) for text in re.findall(r"<<'END'\n(.*?)\n    END\n", page, re.DOTALL)]
    (template,) = named(objects, "StatefulSet", "redis")["spec"]["volumeClaimTemplates"]
    name = f"{template['metadata']['name']}-redis-0"
    assert [made[0]["spec"]["source"]["persistentVolumeClaimName"], made[1]["metadata"]["name"]] == [name, name]
    source = made[1]["spec"].pop("dataSource")
    assert (source["kind"], source["name"]) == (made[0]["kind"], made[0]["metadata"]["name"])
    assert made[1]["spec"] == template["spec"]


def test_nothing_outside_the_cluster_reaches_a_service(objects: list[dict[str, Any]]) -> None:
    """There is no load balancer, node port, ingress or host network, because nothing is served with TLS."""
    assert {d["spec"].get("type", "ClusterIP") for d in objects if d["kind"] == "Service"} == {"ClusterIP"}
    assert "Ingress" not in {d["kind"] for d in objects}
    assert not any(pod["spec"].get("hostNetwork") for pod in pods(objects).values())


def test_no_file_holds_a_password(compose: dict[str, Any], objects: list[dict[str, Any]]) -> None:
    """Secrets are empty as applied, Redis includes a file for its password, and no file shows a password or token."""
    secrets = [d for d in objects if d["kind"] == "Secret"]

    assert {s["metadata"]["name"] for s in secrets} == {"redis", "cluster", "tokens"}
    assert not any({"data", "stringData"} & set(s) for s in secrets)
    assert "--include" in compose["services"]["redis"]["command"]
    for path in [*(ROOT / "k8s").iterdir(), ROOT / "docker-compose.yml"]:
        assert re.search(r"redis://[^ ]*:[^ ]*@|requirepass|ps1\.", path.read_text(encoding="utf-8")) is None, path.name


def test_the_dashboard_and_the_rules_are_where_they_are_looked_for(compose: dict[str, Any]) -> None:
    """Panels query the provisioned data source, dashboard and rules are mounted, and every scrape job is a service."""
    (source,) = read(GRAFANA / "provisioning/datasources/prometheus.yml")["datasources"]
    (provider,) = read(GRAFANA / "provisioning/dashboards/paramserver.yml")["providers"]
    board = json.loads((GRAFANA / "dashboards/paramserver.json").read_text())

    assert {t["datasource"]["uid"] for p in board["panels"] for t in p.get("targets", [])} == {source["uid"]}
    volumes = compose["services"]["grafana"]["volumes"]
    assert any(v.split(":")[1] == provider["options"]["path"] for v in volumes)
    config = read(ROOT / "deploy/prometheus.yml")
    mounted = {v.split(":")[1] for v in compose["services"]["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{name}" for name in ("prometheus.yml", *config["rule_files"])} <= mounted
    scheduler, shard = config["scrape_configs"]
    targets = {t.partition(":")[0] for c in scheduler["static_configs"] for t in c["targets"]}
    names = {n for c in shard["dns_sd_configs"] for n in c["names"]}
    assert (scheduler["job_name"], shard["job_name"]) == ("scheduler", "shard")  # the alerts ask for these
    assert SCHEDULERS == targets, "one that has stopped stays a target, though its name is no longer known"
    assert NODES - SCHEDULERS == names
    assert targets | names <= set(compose["services"])


def test_prometheus_of_another_namespace_reaches_every_node_with_a_token_that_exists(
    objects: list[dict[str, Any]],
) -> None:
    """PodMonitor and policy select the pods of schedulers and shards and their port; Secret, key and jobs exist."""
    monitor, policy = yaml.safe_load_all(MONITORING.read_text(encoding="utf-8"))
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    credentials = endpoint["authorization"]["credentials"]
    ((rule,), (chosen,)) = policy["spec"]["ingress"], monitor["spec"]["selector"]["matchExpressions"]
    api = named(objects, "NetworkPolicy", "api")["spec"]
    found = [p for p in pods(objects).values() if p["metadata"]["labels"][chosen["key"]] in chosen["values"]]

    assert {d["metadata"]["namespace"] for d in (monitor, policy)} == {"paramserver"}
    assert [p["metadata"]["labels"][monitor["spec"]["jobLabel"]] for p in found] == ["scheduler", "shard"]
    assert {p["name"] for pod in found for c in pod["spec"]["containers"] for p in c["ports"]} == {endpoint["port"]}
    assert credentials == {"name": "tokens", "key": "reader"}
    assert named(objects, "Secret", credentials["name"])
    assert policy["spec"]["podSelector"] == api["podSelector"] == monitor["spec"]["selector"]
    assert rule["ports"] == api["ingress"][0]["ports"]


def test_the_documented_command_makes_a_rule_of_the_alerts() -> None:
    """The command in docs/operations.md gives the Prometheus operator the alerts as they are."""
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    (head=.*\n.*alerts\.yml\)) \| kubectl apply -f -$", page, re.MULTILINE)

    made = yaml.safe_load(subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, check=True).stdout)

    assert (made["apiVersion"], made["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert made["spec"] == read(ROOT / "deploy/alerts.yml")


def files_of(names: dict[str, str], mounts: dict[str, str]) -> set[str]:
    """Return those files named by PARAMSERVER_..._FILE variables that are in a mounted folder."""
    return {path for name, path in names.items() if name.endswith("_FILE") and path.rpartition("/")[0] in mounts}


def test_nodes_have_the_secret_and_workers_a_token(compose: dict[str, Any], objects: list[dict[str, Any]]) -> None:
    """Only nodes, series and the container that makes it mount the secret; workers mount a token, not the secret.

    Every file that a container's environment names is mounted.  In Compose all nodes take the names of revoked tokens.
    """
    of_nodes = NODES | {"series", "series-gpu"}
    of_workers = {"worker", "worker-gpu"}
    secret, token, redis = "/run/cluster/secret", "/run/tokens/worker", "/run/paramserver/redis-url"
    for name, s in compose["services"].items():
        mounts = {v.split(":")[1]: v.split(":")[0] for v in s.get("volumes", [])}
        named_files = {k: v for k, v in s.get("environment", {}).items() if k.endswith("_FILE")}
        assert files_of(named_files, mounts) == set(named_files.values()), name
        assert (secret in named_files.values()) == (name in of_nodes), name
        assert (mounts.get("/run/cluster") == "secret") == (name in of_nodes | {"secrets"}), name
        assert (mounts.get("/run/tokens") == "tokens") == (name in of_workers | {"secrets", "prometheus"}), name
        assert (token in named_files.values()) == (name in of_workers), name
        assert ("PARAMSERVER_REVOKED" in s.get("environment", {})) == (name in NODES), name
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
        wanted = {"worker": {token}, "series": {secret}, "scheduler": {secret, redis}, "shard": {secret, redis}}
        assert files == wanted.get(component, set()), name
        assert files <= mounted, name


def test_one_job_fills_every_secret(compose: dict[str, Any], objects: list[dict[str, Any]]) -> None:
    """Only the make-secrets job may use the API, for exactly these Secrets; Prometheus reads a token that it writes.

    A pod of it that failed stays with its log, which says why: restarted in place it would go with the last attempt.
    """
    (rule,) = named(objects, "Role", "make-secrets")["rules"]
    (job,) = [p for n, p in pods(objects).items() if n == "Job/make-secrets"]
    accounts = {n: p["spec"].get("serviceAccountName") for n, p in pods(objects).items()}

    assert set(rule["resourceNames"]) == {d["metadata"]["name"] for d in objects if d["kind"] == "Secret"}
    assert rule["verbs"] == ["get", "patch"]
    assert {n for n, a in accounts.items() if a == "make-secrets"} == {"Job/make-secrets"}
    assert job["spec"]["automountServiceAccountToken"] is True
    assert job["spec"]["restartPolicy"] == "Never"
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
