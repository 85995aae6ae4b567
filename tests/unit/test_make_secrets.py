"""The script that makes the password of Redis, against files and against an HTTPS server that keeps one Secret."""

import base64
import importlib.util
import json
import re
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paramserver_node.settings import ShardSettings

SCRIPT = Path(__file__).parents[2] / "deploy/redis_password.py"
PATH = "/api/v1/namespaces/somewhere/secrets/redis"


@pytest.fixture
def script(tmp_path: Path) -> ModuleType:
    """The script as a module, with a service account of its own."""
    spec = importlib.util.spec_from_file_location("redis_password", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.__dict__["ACCOUNT"] = tmp_path
    (tmp_path / "namespace").write_text("somewhere\n")
    (tmp_path / "token").write_text("the-token\n")
    return module


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A Secret as `kubectl apply` leaves it, behind the two calls of the Kubernetes API that the script makes."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate: apt install openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.crt"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=api"]
    request += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(request, check=True, capture_output=True, timeout=30)
    kept: dict[str, Any] = {"metadata": {"name": "redis", "resourceVersion": "7"}}

    class Api(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            asked = (self.path, self.headers["Authorization"], self.headers["Content-Type"])
            given = body.get("metadata", {}).get("resourceVersion", kept["metadata"]["resourceVersion"])
            if asked != (PATH, "Bearer the-token", "application/merge-patch+json"):
                self.send_response(403)
            elif given != kept["metadata"]["resourceVersion"]:
                self.send_response(409)
            else:
                kept.update({k: v for k, v in body.items() if k != "metadata"})
                self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(kept).encode())

        do_GET = do_PATCH = answer  # the names are the base class's

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing is logged."""

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


def test_a_password_is_made_once(tmp_path: Path) -> None:
    """The first call writes the file of the server and the URL of its clients, the next leaves them; none is alike."""

    def make(folder: Path) -> dict[str, str]:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, str(SCRIPT), "--folder", str(folder), "--host", "redis"]
        subprocess.run(command, check=True, capture_output=True, timeout=30)
        return {p.name: p.read_text() for p in folder.iterdir()}

    first, again, other = make(tmp_path / "a"), make(tmp_path / "a"), make(tmp_path / "b")
    found = ShardSettings.sources({}, {"PARAMSERVER_REDIS_FILE": str(tmp_path / "a/redis-url")}, tmp_path / "none")

    match = re.fullmatch(r"requirepass ([\w-]{43})\n", first["redis.conf"])
    assert match is not None
    assert found["redis"][0] == f"redis://:{match[1]}@redis:6379/0"
    assert again == first
    assert other["redis.conf"] != first["redis.conf"]


def test_a_secret_is_filled_once(script: ModuleType, secret: dict[str, Any]) -> None:
    """An empty Secret gets both keys; a filled one keeps them."""
    assert script.fill_secret("redis", "redis") is True
    filled = dict(secret["data"])
    assert script.fill_secret("redis", "redis") is False

    assert secret["data"] == filled
    password = base64.b64decode(filled["redis.conf"]).decode().split()[1]
    assert base64.b64decode(filled["redis-url"]).decode() == f"redis://:{password}@redis:6379/0\n"
