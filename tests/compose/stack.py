"""A separate compose project, driven by the real `docker compose`, and the means to kill its containers."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.servers import free_port

ROOT = Path(__file__).parents[2]
PROJECT = "paramserver-check"
BASES = ("python:3.12-slim",)


class Failed(Exception):
    """A docker command failed, or something the stack promises did not happen."""


def docker(*words: str, env: dict[str, str] | None = None, timeout_s: float = 900.0) -> str:
    """Return the output of a docker command; raises Failed with its error text if it fails."""
    done = subprocess.run(
        ["docker", *words], capture_output=True, text=True, cwd=ROOT, env=os.environ | (env or {}), timeout=timeout_s
    )
    if done.returncode:
        raise Failed(f"docker {' '.join(words)}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def until(probe: Callable[[], Any], what: str, within_s: float) -> float:
    """Return the seconds until `probe` is true; its exceptions count as false.  Raises Failed after `within_s`."""
    began, last = time.monotonic(), None
    while (took := time.monotonic() - began) < within_s:
        try:
            last = probe()
            if last:
                return took
        except Exception as e:
            last = e
        time.sleep(0.1)
    raise Failed(f"{what} did not happen within {within_s:.0f} s; last: {last!r}")


def seconds_of(text: str) -> float:
    """Return the Unix time of an RFC 3339 timestamp in UTC, whose fraction may have nine digits."""
    whole, _, fraction = text.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")


class Stack:
    """The services of `docker-compose.yml` under their own project name and free ports."""

    def __init__(self) -> None:
        self.port, self.grafana_port = free_port(), free_port()
        # These count more than a `.env` of the checkout.
        self.env = {"PUBLISHED_PORT": str(self.port), "GRAFANA_PORT": str(self.grafana_port)}
        self.env |= {"SHARDS": "2", "COMPOSE_PROFILES": ""}

    def compose(self, *words: str, timeout_s: float = 900.0) -> str:
        """Return the output of a compose command for this project."""
        return docker("compose", "-p", PROJECT, *words, env=self.env, timeout_s=timeout_s)

    def container(self, service: str, index: int = 1) -> dict[str, Any]:
        """Return the `docker inspect` document of a container."""
        (found,) = json.loads(docker("inspect", f"{PROJECT}-{service}-{index}"))
        return dict(found)

    def containers(self) -> list[dict[str, Any]]:
        """Return all containers of the project, including stopped ones."""
        lines = self.compose("ps", "--all", "--format", "json").strip().splitlines()
        rows = [json.loads(line) for line in lines]
        return [row for found in rows for row in (found if isinstance(found, list) else [found])]

    def kill(self, service: str, index: int = 1) -> None:
        """SIGKILL the main process directly: after `docker kill` the engine would not restart the container."""
        pid = int(self.container(service, index)["State"]["Pid"])
        try:
            os.kill(pid, signal.SIGKILL)
        except (PermissionError, ProcessLookupError):  # not root, or the engine runs in a virtual machine
            docker("run", "--rm", "--privileged", "--pid", "host", BASES[0], "kill", "-9", str(pid))

    def restarted(self, service: str, index: int, before: int) -> bool:
        """Whether the engine has restarted that container and it is healthy."""
        found = self.container(service, index)
        health = found["State"].get("Health", {}).get("Status", "healthy")
        return int(found["RestartCount"]) > before and found["State"]["Running"] and health == "healthy"

    def logged_after_s(self, service: str, text: str, index: int = 1) -> float:
        """Return the seconds from a container's last start to its first log line with that text; raises Failed."""
        started = seconds_of(self.container(service, index)["State"]["StartedAt"])
        done = subprocess.run(
            ["docker", "logs", "--timestamps", f"{PROJECT}-{service}-{index}"], capture_output=True, text=True
        )
        for line in sorted((done.stdout + done.stderr).splitlines()):
            stamp, _, said = line.partition(" ")
            if text in said and (at := seconds_of(stamp)) >= started:
                return at - started
        raise Failed(f"{service}-{index} never logged {text!r}")

    def remove(self) -> None:
        """Remove all containers, networks and volumes of this project."""
        self.compose("--profile", "gpu", "down", "--volumes", "--remove-orphans", "--timeout", "5")

    def left(self) -> list[str]:
        """Return the ids of the containers, volumes and networks that are left of the project."""
        mine = f"label=com.docker.compose.project={PROJECT}"
        kinds = (("ps", "--all", "--quiet"), ("volume", "ls", "--quiet"), ("network", "ls", "--quiet"))
        return [line for words in kinds for line in docker(*words, "--filter", mine).split()]


def sizes_mb(image: str, base: str) -> tuple[float, float]:
    """Return (size of the image, size that it adds to its base) in MB, uncompressed."""
    whole, below = (int(docker("image", "inspect", "--format", "{{.Size}}", name)) for name in (image, base))
    return whole / 1e6, (whole - below) / 1e6
