"""The machine and the versions that all figures depend on."""

import os
import platform
import subprocess
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]


def about() -> dict[str, str]:
    """Describe the machine and versions."""
    model = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
        memory = Path("/proc/meminfo").read_text().split()[1]
    except OSError:
        memory = "0"
    release = ".".join(platform.release().split(".")[:2])  # without what is of one build
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "cores": str(os.cpu_count()),
        "cpu": model or platform.machine(),
        "memory": f"{int(memory) / 2**20:.0f} GiB",
        "system": f"{platform.system()} {release} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "commit": commit.stdout.strip() or "unknown",
    }
