"""The README's commands and programs work as printed."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps

from .cluster import Cluster

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


def block(name: str, readme: str = "README.md") -> str:
    """The code block that follows `<!-- test: NAME -->`."""
    found = re.search(rf"<!-- test: {name} -->\n```\w*\n(.*?)```", (ROOT / readme).read_text(), re.S)
    assert found, f"{readme} has no block '{name}'"
    return found[1]


def shell(script: str, cluster: Cluster) -> str:
    """Run the script in bash, with the README's address replaced by the cluster's, and return its output.

    Its curl commands are repeated while a node cannot serve, as after a standstill of the machine.
    """
    script = script.replace("http://127.0.0.1:8700", cluster.url).replace(
        "curl -sw", "curl --fail-with-body --retry 9 -sw"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PATH": path, "PARAMSERVER_URL": cluster.url},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def objects(text: str) -> list[dict[str, object]]:
    """The JSON objects in a text, which stand one after the other."""
    decoder, at, found = json.JSONDecoder(), 0, []
    text = text.strip()
    while at < len(text):
        value, end = decoder.raw_decode(text, at)
        found.append(value)
        at = end + len(text[end:]) - len(text[end:].lstrip())
    return found


def test_two_shells_train_two_numbers_with_curl(shared_cluster: Cluster) -> None:
    """The README's curl commands in two shells train a model in sync mode, and both shells get the mean step."""
    shell(block("curl create"), shared_cluster)

    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(lambda n: shell(block(n), shared_cluster), ["curl anna", "curl ben"]))

    for output in outputs:
        joined, pushed, clock, pulled = objects(output)
        assert joined["epoch"] == 1
        assert pushed["state"] == "staged"
        assert clock["released"] is True
        assert pulled["params"] == {"a": -1.0, "b": 0.0}
        assert pulled["version"] == 1


def test_the_python_example_runs_as_printed(shared_cluster: Cluster) -> None:
    """The README's Python program trains and prints the version it reached."""
    env = os.environ | {"PARAMSERVER_URL": shared_cluster.url}
    done = subprocess.run(
        [sys.executable, "-P", "-c", block("python")], capture_output=True, text=True, timeout=100, env=env
    )

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 20


def test_three_lines_of_numpy_read_a_parameter(shared_cluster: Cluster) -> None:
    """The README's NumPy program reads a parameter without the client."""
    with ps.connect(shared_cluster.url) as client:
        wanted = client.create_model("own", {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}).pull()["w"]
    program = block("numpy").replace("http://127.0.0.1:8700", shared_cluster.url).replace("/demo/", "/own/")
    argv = [sys.executable, "-P", "-c", f"{program}\nprint(w.tolist())"]

    def printed() -> str:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(eventually(printed)) == wanted.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_cluster_lines_start_and_stop_one(tmp_path: Path) -> None:
    """The README's `psctl up`, `status` and `down` work as printed, from any folder."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    env.pop("PARAMSERVER_URL", None)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block("cluster")],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env=env,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "shard-1" in done.stdout


def test_the_chinese_readme_is_in_step() -> None:
    """README.zh-CN.md has the same code blocks as README.md, apart from comments, and the same links."""
    blocks = [re.findall(r"```.*?```", (ROOT / n).read_text(), re.S) for n in ("README.md", "README.zh-CN.md")]

    def code(text: str) -> str:
        return re.sub(r"\s*#.*", "", text)

    assert [code(b) for b in blocks[0]] == [code(b) for b in blocks[1]]
    assert len(blocks[0]) >= 5
    links = [set(re.findall(r"\]\(([^)]+)\)", (ROOT / n).read_text())) for n in ("README.md", "README.zh-CN.md")]
    assert links[0] ^ links[1] == {"README.md", "README.zh-CN.md"}
