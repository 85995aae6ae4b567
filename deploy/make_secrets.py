"""Makes the secrets of a cluster on first use; afterwards it only sees to it that the tokens fit the secret.

    make_secrets.py folders --redis DIR --cluster DIR --tokens DIR --host NAME       writes files
    make_secrets.py kubernetes --host NAME                  fills the Secrets `redis`, `cluster` and `tokens`

redis    `redis.conf`, which the Redis server includes, and `redis-url`, which PARAMSERVER_REDIS_FILE names
cluster  `secret`, which PARAMSERVER_SECRET_FILE of every node names
tokens   `worker` and `reader`: tokens made with that secret, for PARAMSERVER_TOKEN_FILE and for Prometheus
"""

import argparse
import base64
import json
import os
import secrets
import ssl
import sys
import urllib.request
from pathlib import Path
from typing import Any

from paramserver_node import tokens

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
Keep = dict[str, str]
"""Contents by file name, or by key of a Secret."""


def redis_files(host: str) -> Keep:
    """A new password of 256 random bits, as the server and as its clients want it."""
    password = secrets.token_urlsafe(32)
    return {"redis.conf": f"requirepass {password}\n", "redis-url": f"redis://:{password}@{host}:6379/0\n"}


def token_files(secret: str) -> Keep:
    """The tokens of those who are no nodes; no other token has their names unless somebody asks for it.

    Without a newline, which a Prometheus operator would put into a header.
    """
    key = tokens.keys_of(secret)[0]
    return {"worker": tokens.make(key, "worker", tokens.POOL), "reader": tokens.make(key, "reader", "prometheus")}


class Folders:
    """Secrets as files, each kind in a folder of its own, so that each container sees only what it needs."""

    def __init__(self, redis: Path, cluster: Path, tokens: Path) -> None:
        self._folders = {"redis": redis, "cluster": cluster, "tokens": tokens}

    def read(self, kind: str) -> Keep:
        """What is there."""
        return {p.name: p.read_text(encoding="utf-8") for p in self._folders[kind].iterdir() if p.name[0] != "."}

    def write(self, kind: str, files: Keep) -> None:
        """Each file as a whole or not at all."""
        for name, text in files.items():
            new = self._folders[kind] / f".{name}"
            new.unlink(missing_ok=True)
            new.write_text(text, encoding="utf-8")
            # Redis and Prometheus run as other users; who sees their folder may read what is for them.
            new.chmod(0o400 if name in ("secret", "worker") else 0o444)
            new.replace(self._folders[kind] / name)


class Secrets:
    """Secrets of this pod's namespace, which are there, empty at first."""

    def __init__(self) -> None:
        address = f"{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
        namespace = (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
        self._url = f"https://{address}/api/v1/namespaces/{namespace}/secrets/"
        self._versions: dict[str, str] = {}

    def read(self, kind: str) -> Keep:
        """What is there."""
        found = self._call("GET", kind)
        self._versions[kind] = found["metadata"]["resourceVersion"]
        return {name: base64.b64decode(text).decode() for name, text in (found.get("data") or {}).items()}

    def write(self, kind: str, files: Keep) -> None:
        """With the version that was read: of two at the same time, one is refused and its Job looks again."""
        data = {name: base64.b64encode(text.encode()).decode() for name, text in files.items()}
        self._call("PATCH", kind, {"metadata": {"resourceVersion": self._versions[kind]}, "data": data})

    def _call(self, method: str, kind: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text(encoding='utf-8').strip()}",
            "Content-Type": "application/merge-patch+json",
        }
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + kind, data, headers, method=method)
        context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
        with urllib.request.urlopen(request, timeout=10, context=context) as response:
            answer: dict[str, Any] = json.load(response)
        return answer


def fill(place: Folders | Secrets, host: str) -> list[str]:
    """Make what is missing; the kinds that were written."""
    done: list[str] = []
    if "redis-url" not in place.read("redis"):
        place.write("redis", redis_files(host))
        done.append("redis")
    secret = place.read("cluster").get("secret", "")
    if not secret.strip():
        secret = f"{tokens.new_key()}\n"
        place.write("cluster", {"secret": secret})
        done.append("cluster")
    wanted = token_files(secret)
    if place.read("tokens") != wanted:
        place.write("tokens", wanted)
        done.append("tokens")
    return done


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ways = parser.add_subparsers(dest="way", required=True)
    folders, kubernetes = ways.add_parser("folders"), ways.add_parser("kubernetes")
    for kind in ("redis", "cluster", "tokens"):
        folders.add_argument(f"--{kind}", type=Path, required=True)
    for way in (folders, kubernetes):
        way.add_argument("--host", required=True, help="name of the Redis server")
    args = parser.parse_args()
    place = Secrets() if args.way == "kubernetes" else Folders(args.redis, args.cluster, args.tokens)
    done = fill(place, args.host)
    sys.stdout.write(f"made: {', '.join(done)}\n" if done else "everything is there already\n")


if __name__ == "__main__":
    main()
