"""Makes the password of a cluster's Redis on first use; afterwards it does nothing.

    redis_password.py --folder DIR --host NAME       writes DIR/redis.conf and DIR/redis-url
    redis_password.py --secret NAME --host NAME      fills these keys of a Kubernetes Secret that is there and empty

`redis.conf` is included by the Redis server; `redis-url` is what PARAMSERVER_REDIS_FILE names.  Only the standard
library is used.
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

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def made(host: str) -> dict[str, str]:
    """The two files' contents, with a new password of 256 random bits."""
    password = secrets.token_urlsafe(32)
    return {"redis.conf": f"requirepass {password}\n", "redis-url": f"redis://:{password}@{host}:6379/0\n"}


def fill_folder(folder: Path, host: str) -> bool:
    """Write the files unless they are there; whether it did."""
    if (folder / "redis-url").is_file():
        return False
    # Redis runs as another user: readable by all who see the folder, which is a volume of Redis and its clients alone.
    for name, text in made(host).items():
        new = folder / f".{name}"
        new.write_text(text, encoding="utf-8")
        new.chmod(0o444)
        new.replace(folder / name)  # redis-url is last: when it is there, both are
    return True


def fill_secret(secret: str, host: str) -> bool:
    """Fill the Secret of this pod's namespace unless it has the keys; whether it did."""
    address = f"{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    namespace = (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    url = f"https://{address}/api/v1/namespaces/{namespace}/secrets/{secret}"
    found = _call("GET", url)
    if (found.get("data") or {}).get("redis-url"):
        return False
    data = {name: base64.b64encode(text.encode()).decode() for name, text in made(host).items()}
    # With the version that was read: of two at the same time, one is refused and its Job looks again.
    _call("PATCH", url, {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"]}, "data": data})
    return True


def _call(method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    headers = {
        "Authorization": f"Bearer {(ACCOUNT / 'token').read_text(encoding='utf-8').strip()}",
        "Content-Type": "application/merge-patch+json",
    }
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=10, context=context) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--folder", type=Path)
    where.add_argument("--secret")
    parser.add_argument("--host", required=True, help="name of the Redis server")
    args = parser.parse_args()
    new = fill_secret(args.secret, args.host) if args.secret else fill_folder(args.folder, args.host)
    sys.stdout.write("made a password for Redis\n" if new else "Redis has its password already\n")


if __name__ == "__main__":
    main()
