"""numba's cache of the compiled loops: one of other source is not used, and none is needed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import paramserver

pytestmark = pytest.mark.slow


def ran(program: str, root: Path, cache: Path) -> str:
    """Return what a program prints that imports the package under `root`, with numba's cache in the folder `cache`."""
    env = os.environ | {"PYTHONPATH": str(root), "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-P", "-c", program], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.timeout(300)
def test_code_cached_by_an_earlier_version_is_not_run(tmp_path: Path) -> None:
    """After an upgrade that changes only what an entry point calls, the new code runs, not the cached earlier one."""
    program = """
import numpy as np
from paramserver.kernels import codes, compiled
print(compiled.finite(np.ones(64, np.float32).view(np.uint8), codes.F32_CODE))
"""
    source = Path(paramserver.__file__).parent
    shutil.copytree(source, tmp_path / "paramserver", ignore=shutil.ignore_patterns("__pycache__"))
    assert ran(program, tmp_path, tmp_path / "cache") == "True"

    called = tmp_path / "paramserver" / "kernels" / "loads.py"
    text = called.read_text()
    called.write_text(text.replace(".view(np.uint32) & ABS_BITS)", ".view(np.uint32) | ABS_BITS)"))
    assert called.read_text() != text
    assert ran(program, tmp_path, tmp_path / "cache") == "False"


@pytest.mark.timeout(300)
def test_a_full_disk_costs_the_cache_and_nothing_else(tmp_path: Path) -> None:
    """Loops are compiled where the cache cannot be written; a shard's start and a worker's push ended with OSError."""
    program = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
import numpy as np
from paramserver.kernels import elements, sockets
sockets.warm_up()
print(elements.encoder("float32")(np.ones(64, np.float32), np.empty(64, np.uint32)))
"""
    assert ran(program, Path(paramserver.__file__).parents[1], tmp_path) == "64.0"
