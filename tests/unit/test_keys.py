"""`psctl token`, `psctl secret`, and settings whose values are never shown."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paramserver_node import tokens

PSCTL = [sys.executable, "-P", "-m", "paramserver_cli"]


def psctl(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PARAMSERVER_")}
    return subprocess.run([*PSCTL, *words], cwd=folder, env=clean | env, capture_output=True, text=True, timeout=60)


def test_a_secret_is_made_for_its_owner_and_never_overwritten(tmp_path: Path) -> None:
    """`psctl secret FILE` writes one key, readable by its owner only; a second call fails and leaves the file.

    Without a file, it prints a new key.
    """
    file = tmp_path / "secret"

    made, again, printed = (
        psctl(tmp_path, "secret", str(file)),
        psctl(tmp_path, "secret", str(file)),
        psctl(tmp_path, "secret"),
    )

    assert made.returncode == 0, made.stderr
    assert f"PARAMSERVER_SECRET_FILE={file}" in made.stdout
    assert file.stat().st_mode & 0o777 == 0o600
    (key,) = tokens.keys_of(file.read_text())
    assert key.decode() not in made.stdout
    assert again.returncode == 4
    assert "already exists" in again.stderr
    assert tokens.keys_of(printed.stdout) not in ((), (key,))


def test_a_token_is_printed_and_nothing_else(tmp_path: Path) -> None:
    """`psctl token` prints only a valid token, made with the first key of the secret file or state directory."""
    key = tokens.new_key()
    (tmp_path / "secret").write_text(f"{key}\n{tokens.new_key()}\n")
    (tmp_path / ".paramserver").mkdir()
    env = {"PARAMSERVER_SECRET_FILE": str(tmp_path / "secret")}

    admin = psctl(tmp_path, "token", **env).stdout
    worker = psctl(tmp_path, "token", "worker", "--name", "ci", "--days", "1", **env).stdout

    assert tokens.read(admin.strip(), [key.encode()], 0.0) == tokens.Holder("admin", "admin", 0)
    assert admin == psctl(tmp_path, "token", **env).stdout
    found = tokens.read(worker.strip(), [key.encode()], 0.0)
    assert found is not None
    assert (found.role, found.name) == ("worker", "ci")
    assert tokens.read(worker.strip(), [key.encode()], found.expires_at_s) is None
    (tmp_path / "secret").rename(tmp_path / ".paramserver/secret")
    assert psctl(tmp_path, "token").stdout == admin


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["token", "boss"], 4, "reader, worker, node or admin"),
        (["token", "reader", "--name", "a.b"], 4, "name"),
        (["token", "reader", "--days", "-1"], 2, "--days"),
    ],
)
def test_tokens_that_cannot_be_are_refused(tmp_path: Path, words: list[str], code: int, text: str) -> None:
    """An unknown role, a name that would break the token's format, or a negative lifetime is refused."""
    done = psctl(tmp_path, *words, PARAMSERVER_SECRET=tokens.new_key())

    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr


def test_without_a_secret_there_is_no_token(tmp_path: Path) -> None:
    """Without a secret, `psctl token` fails and names the setting; a guessable secret is refused and not shown."""
    none = psctl(tmp_path, "token")
    weak = psctl(tmp_path, "token", PARAMSERVER_SECRET="hunter2")

    assert (none.returncode, none.stdout) == (1, "")
    assert "PARAMSERVER_SECRET_FILE" in none.stderr
    assert weak.returncode == 4
    assert "hunter2" not in weak.stderr


def test_the_settings_that_are_shown_hold_no_secret(tmp_path: Path) -> None:
    """`psctl config` lists secret and token as set, but shows no secret, token or password."""
    secret, token = tokens.new_key(), "ps1.admin.x.0.abc"
    env = {"PARAMSERVER_SECRET": secret, "PARAMSERVER_TOKEN": token, "PARAMSERVER_REDIS": "redis://:hunter2@r:6379/0"}

    for options in ([], ["--json"]):
        shown = psctl(tmp_path, "config", *options, **env).stdout
        assert "PARAMSERVER_SECRET" in shown
        for hidden in (secret, token, "hunter2"):
            assert hidden not in shown
    items = json.loads(shown)["items"]
    assert {i["value"] for i in items if i["name"] in ("secret", "token") and i["value"]} == {"***"}
