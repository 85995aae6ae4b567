"""`psctl token`, `psctl secret`, and settings whose values are never shown."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paramserver_cli.main import app
from paramserver_node import tokens


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with no settings in the environment."""
    for name in os.environ:
        if name.startswith("PARAMSERVER_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def psctl(*words: str, **env: str) -> Result:
    """Run psctl in this process."""
    return CliRunner().invoke(app, list(words), env=env)


def test_a_secret_is_made_for_its_owner_and_never_overwritten(folder: Path) -> None:
    """`psctl secret FILE` writes one key, readable by its owner only; a second call fails and leaves the file.

    Without a file, it prints a new key.
    """
    file = folder / "secret"

    made, again, printed = (psctl("secret", str(file)), psctl("secret", str(file)), psctl("secret"))

    assert made.exit_code == 0, made.output
    assert f"PARAMSERVER_SECRET_FILE={file}" in made.stdout
    assert file.stat().st_mode & 0o777 == 0o600
    (key,) = tokens.keys_of(file.read_text())
    assert key.decode() not in made.stdout
    assert again.exit_code == 4
    assert "already exists" in again.stderr
    assert tokens.keys_of(printed.stdout) not in ((), (key,))


def test_a_token_is_printed_and_nothing_else(folder: Path) -> None:
    """`psctl token` prints only a valid token, made with the first key of the secret file or state directory."""
    key = tokens.new_key()
    (folder / "secret").write_text(f"{key}\n{tokens.new_key()}\n")
    (folder / ".paramserver").mkdir()
    env = {"PARAMSERVER_SECRET_FILE": str(folder / "secret")}

    admin = psctl("token", **env).stdout
    worker = psctl("token", "worker", "--name", "ci", "--days", "1", **env).stdout

    assert tokens.read(admin.strip(), [key.encode()], 0.0) == tokens.Holder("admin", "admin", 0)
    assert admin == psctl("token", **env).stdout
    found = tokens.read(worker.strip(), [key.encode()], 0.0)
    assert found is not None
    assert (found.role, found.name) == ("worker", "ci")
    assert tokens.read(worker.strip(), [key.encode()], found.expires_at_s) is None
    (folder / "secret").rename(folder / ".paramserver/secret")
    assert psctl("token").stdout == admin


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["token", "boss"], 4, "reader, worker, node or admin"),
        (["token", "reader", "--name", "a.b"], 4, "name"),
        (["token", "reader", "--days", "-1"], 2, "--days"),
    ],
)
def test_tokens_that_cannot_be_are_refused(folder: Path, words: list[str], code: int, text: str) -> None:
    """An unknown role, a name that would break the token's format, or a negative lifetime is refused."""
    done = psctl(*words, PARAMSERVER_SECRET=tokens.new_key())

    assert (done.exit_code, done.stdout) == (code, "")
    assert text in done.stderr


def test_without_a_secret_there_is_no_token(folder: Path) -> None:
    """Without a secret, `psctl token` fails and names the setting; a guessable secret is refused and not shown."""
    none = psctl("token")
    weak = psctl("token", PARAMSERVER_SECRET="hunter2")

    assert (none.exit_code, none.stdout) == (1, "")
    assert "PARAMSERVER_SECRET_FILE" in none.stderr
    assert weak.exit_code == 4
    assert "hunter2" not in weak.stderr


def test_the_settings_that_are_shown_hold_no_secret(folder: Path) -> None:
    """`psctl config` lists secret and token as set, but shows no secret, token or password."""
    secret, token = tokens.new_key(), "ps1.admin.x.0.abc"
    env = {"PARAMSERVER_SECRET": secret, "PARAMSERVER_TOKEN": token, "PARAMSERVER_REDIS": "redis://:hunter2@r:6379/0"}

    for options in ([], ["--json"]):
        shown = psctl("config", *options, **env).stdout
        assert "PARAMSERVER_SECRET" in shown
        for hidden in (secret, token, "hunter2"):
            assert hidden not in shown
    items = json.loads(shown)["items"]
    assert {i["value"] for i in items if i["name"] in ("secret", "token") and i["value"]} == {"***"}
