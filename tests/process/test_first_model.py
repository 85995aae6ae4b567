"""The commands in docs/first-model.md work as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]
TEXT = (Path(__file__).parents[2] / "docs" / "first-model.md").read_text()


def test_the_six_steps_run_as_printed(tmp_path: Path) -> None:
    """The page's code blocks, run one after the other in one shell, finish three runs and print the model's shapes."""
    blocks = re.findall(r"<!-- test -->\n```sh\n(.*?)```", TEXT, re.S)
    assert len(blocks) >= 6
    assert len(re.findall(r"^## \d\.", TEXT, re.M)) == 6
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    env.pop("PARAMSERVER_URL", None)
    script = "trap 'psctl down' EXIT\nset -euo pipefail\n" + "\n".join(blocks)

    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=200)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "(64, 10) (10,)" in done.stdout
    assert len(re.findall(r"^run-\d finished", done.stdout, re.M)) == 3
    assert "accuracy" in done.stdout
