"""The files for Compose and Kubernetes, as the tests of their content read them."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
GPU = ROOT / "deploy" / "k8s-gpu"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def compose_file() -> dict[str, Any]:
    found: dict[str, Any] = read(ROOT / "docker-compose.yml")
    return found


def applied() -> list[dict[str, Any]]:
    """Return every document of the folder `k8s`, in the order in which `kubectl apply -f` applies them."""
    paths = sorted((ROOT / "k8s").iterdir())
    assert [p.name for p in paths if not re.fullmatch(r"\d\d-[a-z-]+\.yaml", p.name)] == []
    return [d for p in paths for d in yaml.safe_load_all(p.read_text(encoding="utf-8")) if d is not None]


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the pod template of each workload, by kind and name."""
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
