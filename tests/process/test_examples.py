"""The single-file examples: they are short, and they learn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paramserver import examples

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.mark.parametrize("name", ["async_parameter_server", "sync_parameter_server"])
def test_an_example_learns_and_fits_on_a_page(name: str, tmp_path: Path) -> None:
    """Run as its docstring says, but for a shorter time, an example reaches 70 % accuracy; it has at most 80 lines."""
    module = f"paramserver.examples.{name}"
    argv = [sys.executable, "-P", "-m", module, "--num-workers=2", "--iterations=120"]

    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=150)

    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = [float(a) for a in re.findall(r"accuracy (\S+) %", done.stdout)]
    assert accuracies[-1] >= 70.0
    text = (Path(examples.__file__).parent / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 80
    assert f"python -m {module} --num-workers=4" in text
