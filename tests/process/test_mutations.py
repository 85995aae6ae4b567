"""No input makes a node fail: 1,000 random mutations of valid requests to the public routes of both services."""

import asyncio
import json
import random
import re
import urllib.parse
from collections import Counter
from typing import Any

import httpx
import msgpack
import pytest

from .cluster import Cluster

pytestmark = [pytest.mark.process, pytest.mark.slow]

MUTATIONS = 1000
STOOD_STILL = re.compile('"(unavailable|in_doubt)"|^$')
"""In what a shard answers that got no CPU time for 3 s, in the middle of a push or not; nothing to HEAD."""
SPEC: dict[str, Any] = {
    "name": "fuzz",
    "params": {"w": {"shape": [4, 3]}, "b": {"shape": []}},
    "optimizer": {"name": "adam", "lr": 0.01},
    "consistency": {"mode": "async"},
    "partitions": 3,
}
PUSH: dict[str, Any] = {
    "model": "fuzz",
    "grads": {"w": [[0.1, 0.2, 0.3]] * 4, "b": 0.5},
    "worker": "w0",
    "epoch": 1,
    "seq": 1,
    "clock": 0,
    "base_version": 0,
    "weight": 1.0,
}
SEEDS: list[tuple[str, str, Any]] = [
    ("POST", "/models", SPEC),
    ("GET", "/models", None),
    ("GET", "/models/fuzz", None),
    ("PATCH", "/models/fuzz", {"optimizer": {"lr": 0.05}, "consistency": {"mode": "ssp", "staleness": 2}}),
    ("DELETE", "/models/fuzz2", None),
    ("POST", "/push", PUSH),
    ("POST", "/push", {"model": "fuzz", "grads": {"w": [1.0, 2.0]}, "ranges": {"w": [[0, 2]]}}),
    ("POST", "/pull", {"model": "fuzz", "names": ["w", "b*"], "min_version": 0, "wait_s": 0, "dtype": "float16"}),
    ("POST", "/pull", {"model": "fuzz", "ranges": {"w": [[0, 5], [7, 9]]}}),
    ("POST", "/pushpull", {"model": "fuzz", "grads": {"b": 1.0}, "names": ["b"]}),
    ("GET", "/pull/fuzz/w", None),
    ("HEAD", "/pull/fuzz/w", None),
    ("PUT", "/models/fuzz/params/b", 2.5),
    ("PUT", "/models/fuzz/params/w", [[1, 2, 3]] * 4),
    ("POST", "/models/fuzz/workers", {"name": "f", "above": 3}),
    ("PUT", "/models/fuzz/workers/fuzz/f", {"epoch": 1, "clock": 2, "metrics": {"loss": 0.5}}),
    ("DELETE", "/models/fuzz/workers/fuzz/f", None),
    ("POST", "/models/fuzz/clock", {"worker": "fuzz/f", "epoch": 1, "clock": 1, "wait_s": 0}),
    ("POST", "/models/fuzz/tasks", {"name": "train", "size": 100, "chunk": 10}),
    ("POST", "/models/fuzz/tasks/lease", {"worker": "fuzz/f", "epoch": 1, "dataset": "train"}),
    ("POST", "/models/fuzz/tasks/1/done", {"worker": "fuzz/f", "epoch": 1}),
    ("POST", "/models/fuzz/metrics", {"worker": "fuzz/f", "epoch": 1, "clock": 1, "metrics": {"loss": 0.1}}),
    ("GET", "/models/fuzz/metrics", None),
    ("POST", "/models/fuzz/checkpoints", {}),
    ("GET", "/models/fuzz/checkpoints", None),
    ("POST", "/models/fuzz/evaluations", {}),
    ("POST", "/models/fuzz/workers/fuzz/f/drain", {}),
    ("POST", "/runs/r/places/0/done", {"member": "p", "epoch": 1, "error": None}),
    ("POST", "/models/fuzz/restore", {"checkpoint": "none"}),
    (
        "POST",
        "/runs",
        {"name": "r", "model": "fuzz", "entry": "a.b:c", "args": {}, "workers": 1, "stop": {"clocks": 3}},
    ),
    ("GET", "/runs", None),
    ("GET", "/runs/r", None),
    ("PATCH", "/runs/r", {"state": "paused"}),
    ("POST", "/pool", {"name": "p", "allow": ["paramserver.examples"]}),
    ("POST", "/slots", {"bytes": 65536}),
    ("DELETE", "/slots/b1", None),
    ("PUT", "/shards/none", {"state": "active"}),
    ("PUT", "/pool/p", {"epoch": 1}),
    ("GET", "/map", None),
    ("GET", "/status", None),
]
STRANGE: list[Any] = [
    None, True, False, -1, 0, 2**31, 2**63, 2**64, -(2**70), 1e308, -0.0, 1e-320, "", "a", "\x00",
    "../../etc", "é" * 300, [], {}, [[]], [None], {"": ""}, "NaN", [[1, 2], [3]], [1e39],
    {"dtype": "float32", "shape": [2**40, 2**40], "data": ""},
]  # fmt: skip


def mutate(rng: random.Random, value: Any) -> Any:
    """A copy of the value with one member or item dropped, added, or replaced by a value from `STRANGE`."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        changed = dict(value)
        match rng.randrange(5):
            case 0:
                del changed[key]
            case 1:
                changed[key + rng.choice(["", "s", "\u2603", " "])] = rng.choice(STRANGE)
            case _:
                changed[key] = mutate(rng, value[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.85:
        index = rng.randrange(len(value))
        return [*value[:index], mutate(rng, value[index]), *value[index + rng.randrange(2) :]]
    return rng.choice(STRANGE)


def request(rng: random.Random) -> dict[str, Any]:
    """A random request with a mutated body, and sometimes an odd path, encoding or header, as arguments for httpx."""
    method, path, body = rng.choice(SEEDS)
    for _ in range(rng.randrange(1, 4)):
        body = mutate(rng, body) if body is not None else body
    if rng.random() < 0.2:
        parts = path.split("/")
        parts[rng.randrange(1, len(parts))] = rng.choice(
            ["", "..", "%2F", "%00", "%ff", "x" * 400, "\u00e9", "-", "0", "%"]
        )
        path = urllib.parse.quote("/".join(parts), safe="/%")
    headers = {"content-type": "application/json"}
    if body is None and method in ("GET", "HEAD", "DELETE"):
        content = b""
    elif rng.random() < 0.3:
        headers["content-type"] = "application/msgpack"
        try:
            content = msgpack.packb(body)
        except (OverflowError, ValueError):
            content = b"\xc1"
    else:
        content = json.dumps(body).encode()
    if content and rng.random() < 0.25:
        at = rng.randrange(len(content))
        content = rng.choice(
            [
                content[:at],
                content + b"}",
                content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :],
                b"[" * 50_000,
            ]
        )
    if rng.random() < 0.1:
        name = rng.choice(["accept", "content-type", "if-none-match", "idempotency-key", "x-request-id"])
        headers[name] = rng.choice(
            ["", "*/*", "text/html", "application/vnd.paramserver.frame", "x" * 3000, '"', "a,b;q=z"]
        )
    return {"method": method, "url": path, "content": content, "headers": headers}


async def bombard(urls: list[str], requests: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any], str]]:
    """Send the requests to the nodes in turn, sixteen at once; return (status, request, text), with 0 for a timeout."""
    results: list[tuple[int, dict[str, Any], str]] = []
    gate = asyncio.Semaphore(16)
    async with httpx.AsyncClient(timeout=20.0) as client:

        async def one(i: int, r: dict[str, Any]) -> None:
            async with gate:
                url = urls[i % len(urls)] + r["url"]
                for _ in range(100):
                    try:
                        response = await client.request(r["method"], url, content=r["content"], headers=r["headers"])
                    except httpx.ReadTimeout:
                        results.append((0, r, "waits"))  # a mutated wait_s may be long
                        return
                    # A shard that got no CPU time for 3 s is 503 until it is confirmed again: it is asked again.
                    if response.status_code != 503 or not STOOD_STILL.search(response.text):
                        break
                    await asyncio.sleep(0.1)
                results.append((response.status_code, r, response.text[:500]))

        await asyncio.gather(*(one(i, r) for i, r in enumerate(requests)))
    return results


def test_no_mutation_of_any_request_gives_a_server_error(shared_cluster: Cluster) -> None:
    """1,000 mutated requests to scheduler and shards get no status of 500 or above, and the nodes still serve."""
    rng = random.Random(20261121)
    urls = [shared_cluster.url, *shared_cluster.shards]
    assert httpx.post(f"{urls[0]}/models", json=SPEC, timeout=30).status_code in (200, 201)

    results = asyncio.run(bombard(urls, [request(rng) for _ in range(MUTATIONS)]))

    counts = Counter(status for status, _, _ in results)
    failed = [(s, r, t) for s, r, t in results if s >= 500]
    assert not failed, f"{len(failed)} of {len(results)}: {failed[:5]}"
    assert counts[200] + counts[201] > 50, f"hardly any request was understood: {counts}"
    assert sum(counts[s] for s in (400, 404, 409, 413, 415, 422)) > MUTATIONS // 3, counts
    assert counts[0] < MUTATIONS // 50, "too many requests wait"
    for url in urls:
        assert httpx.get(f"{url}/livez", timeout=20).status_code == 200
        model = httpx.get(f"{url}/models/fuzz", timeout=20)
        assert model.status_code in (200, 404)


def test_every_public_route_is_among_the_seeds(shared_cluster: Cluster) -> None:
    """Each public POST, PUT and PATCH route of the OpenAPI document is reached by one of the `SEEDS`."""
    templates = set()
    for path, methods in httpx.get(f"{shared_cluster.url}/openapi.json", timeout=10).json()["paths"].items():
        if not path.startswith("/internal"):
            templates |= {(m.upper(), path) for m in methods if m in ("post", "put", "patch")}
    assert len(templates) > 12

    def reaches(method: str, template: str) -> bool:
        pattern = re.sub(r"\{[^}]*\}", ".+", template)
        return any(m == method and re.fullmatch(pattern, path) for m, path, _ in SEEDS)

    assert not {t for t in templates if not reaches(*t)}
