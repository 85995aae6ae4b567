"""deploy/make_secrets.py with folders, and with an HTTPS server that mimics the Kubernetes API."""

import base64
import importlib.util
import json
import re
import shutil
import ssl
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paramserver_node import tokens
from paramserver_node.settings import ShardSettings

SCRIPT = Path(__file__).parents[2] / "deploy/make_secrets.py"
PATH = "/api/v1/namespaces/somewhere/secrets/"


@pytest.fixture
def script(tmp_path: Path) -> ModuleType:
    """Return the script as a module, with a service account in `tmp_path`."""
    spec = importlib.util.spec_from_file_location("make_secrets", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.__dict__["ACCOUNT"] = tmp_path
    (tmp_path / "namespace").write_text("somewhere\n")
    (tmp_path / "token").write_text("the-token\n")
    return module


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield three empty Secrets, served by the two calls of the Kubernetes API that the script makes."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate: apt install openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.crt"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=api"]
    request += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(request, check=True, capture_output=True, timeout=30)
    kept: dict[str, dict[str, Any]] = {
        name: {"metadata": {"name": name, "resourceVersion": "7"}} for name in ("redis", "cluster", "tokens")
    }

    class Api(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            asked = (self.headers["Authorization"], self.headers["Content-Type"])
            secret = kept.get(self.path.removeprefix(PATH), {"metadata": {}})
            version = secret["metadata"].get("resourceVersion")
            given = body.get("metadata", {}).get("resourceVersion", version)
            if version is None or asked != ("Bearer the-token", "application/merge-patch+json"):
                self.send_response(403)
            elif given != version:
                self.send_response(409)
            else:
                secret.update({k: v for k, v in body.items() if k != "metadata"})
                self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(secret).encode())

        do_GET = do_PATCH = answer  # names given by the base class

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_address[1]))
        yield kept
        server.shutdown()
        thread.join()


def test_secrets_are_made_once(tmp_path: Path) -> None:
    """The first call writes every file and the next changes none; password, secret and tokens fit together."""

    def make(place: Path) -> dict[str, str]:
        command = [sys.executable, str(SCRIPT), "folders", "--host", "redis"]
        for kind in ("redis", "cluster", "tokens"):
            (place / kind).mkdir(parents=True, exist_ok=True)
            command += [f"--{kind}", str(place / kind)]
        subprocess.run(command, check=True, capture_output=True, timeout=30)
        return {str(p.relative_to(place)): p.read_text() for p in place.rglob("*") if p.is_file()}

    first, again, other = make(tmp_path / "a"), make(tmp_path / "a"), make(tmp_path / "b")
    env = {"PARAMSERVER_REDIS_FILE": str(tmp_path / "a/redis/redis-url")}
    env["PARAMSERVER_SECRET_FILE"] = str(tmp_path / "a/cluster/secret")
    found = ShardSettings.sources({}, env, tmp_path / "none")

    assert set(first) == {"redis/redis.conf", "redis/redis-url", "cluster/secret", "tokens/worker", "tokens/reader"}
    match = re.fullmatch(r"requirepass ([\w-]{43})\n", first["redis/redis.conf"])
    assert match is not None
    assert found["redis"][0] == f"redis://:{match[1]}@redis:6379/0"
    keys = tokens.keys_of(found["secret"][0])
    for holder in (tokens.Holder("worker", "pool", 0), tokens.Holder("reader", "prometheus", 0)):
        assert tokens.read(first[f"tokens/{holder.role}"], keys, 0.0) == holder
    assert again == first
    assert not set(other.values()) & set(first.values())
    modes = {name: (tmp_path / "a" / name).stat().st_mode & 0o777 for name in first}
    assert {n for n, mode in modes.items() if mode == 0o400} == {"cluster/secret", "tokens/worker"}


def test_tokens_follow_a_secret_that_was_changed(script: ModuleType, tmp_path: Path) -> None:
    """After a new key is put first in the secret, the next run makes new tokens; an existing Redis password stays.

    Once the secret is removed, the next run makes another one, and tokens that no other has made.
    """
    kinds = ("redis", "cluster", "tokens")
    for kind in kinds:
        (tmp_path / kind).mkdir()
    (tmp_path / "redis/redis-url").write_text("redis://:old@redis:6379/0\n")
    place = script.Folders(*(tmp_path / kind for kind in kinds))

    assert script.fill(place, "redis") == ["cluster", "tokens"]
    before = (tmp_path / "tokens/worker").read_text()
    old, new = (tmp_path / "cluster/secret").read_text(), tokens.new_key()
    (tmp_path / "cluster/secret").unlink()
    (tmp_path / "cluster/secret").write_text(f"{new}\n{old}")
    assert script.fill(place, "redis") == ["tokens"]
    assert script.fill(place, "redis") == []

    after = (tmp_path / "tokens/worker").read_text()
    assert tokens.read(after.strip(), [new.encode()], 0.0) is not None
    assert tokens.read(before.strip(), tokens.keys_of(f"{new}\n{old}"), 0.0) is not None

    (tmp_path / "cluster/secret").unlink()
    assert script.fill(place, "redis") == ["cluster", "tokens"]
    newest = tokens.keys_of((tmp_path / "cluster/secret").read_text())
    assert tokens.read(after.strip(), newest, 0.0) is None
    assert tokens.read((tmp_path / "tokens/worker").read_text().strip(), newest, 0.0) is not None


def test_kubernetes_secrets_are_filled_once(script: ModuleType, kept: dict[str, dict[str, Any]]) -> None:
    """Empty Secrets are filled and filled ones stay; lost tokens and passwords are made again."""
    assert script.fill(script.Secrets(), "redis") == ["redis", "cluster", "tokens"]
    filled = json.dumps(kept)
    assert script.fill(script.Secrets(), "redis") == []
    assert json.dumps(kept) == filled
    del kept["tokens"]["data"]
    assert script.fill(script.Secrets(), "redis") == ["tokens"]
    del kept["redis"]["data"]  # as one changes the password
    assert script.fill(script.Secrets(), "redis") == ["redis"]
    assert json.dumps(kept["cluster"]) in filled

    held = {(kind, k): base64.b64decode(v).decode() for kind, s in kept.items() for k, v in s["data"].items()}
    password = held["redis", "redis.conf"].split()[1]
    assert held["redis", "redis-url"] == f"redis://:{password}@redis:6379/0\n"
    keys = tokens.keys_of(held["cluster", "secret"])
    assert tokens.read(held["tokens", "worker"].strip(), keys, 0.0) == tokens.Holder("worker", "pool", 0)


def test_of_two_jobs_at_once_one_gives_way(script: ModuleType, kept: dict[str, dict[str, Any]]) -> None:
    """Writing a Secret that has changed since it was read fails with 409, so that only one of two jobs fills it."""
    place = script.Secrets()
    place.read("redis")
    kept["redis"]["metadata"]["resourceVersion"] = "8"

    with pytest.raises(urllib.error.HTTPError, match="409"):
        place.write("redis", {"redis-url": "x"})
