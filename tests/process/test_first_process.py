"""Services that are the first process of a container: the system keeps from it every signal that it does not handle."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")
IN_ITS_IMPORTS = """
import os, runpy, sys

class Waiting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":  # everything else that takes its time is imported after it
            print(os.getpid(), flush=True)
            sys.stdin.read()

sys.meta_path.insert(0, Waiting())
runpy.run_module(sys.argv[1], run_name="__main__")
"""


@pytest.fixture(scope="module", autouse=True)
def containers() -> None:
    """Skip where a program cannot be made the first process of a namespace of its own."""
    try:
        subprocess.run([*CONTAINER, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"this system permits no namespaces: {e}")


@pytest.mark.parametrize(
    "service", ["paramserver_scheduler", "paramserver_shard", "paramserver_worker", "paramserver_cli"]
)
def test_the_first_process_of_a_container_ends_when_told_to_while_it_starts(service: str) -> None:
    """A service that gets SIGTERM as process 1, while it is still importing, ends at once with 143."""
    command = [*CONTAINER, sys.executable, "-P", "-c", IN_ITS_IMPORTS, service]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "1\n"
            with open(f"/proc/{started.pid}/task/{started.pid}/children", encoding="ascii") as children:
                (first,) = map(int, children.read().split())
            os.kill(first, signal.SIGTERM)
            assert started.wait(timeout=60) == 128 + signal.SIGTERM
        finally:
            started.kill()


def test_a_thread_of_the_first_process_can_import_the_services() -> None:
    """A program that is process 1 may import the package in any of its threads; signals are its own matter then."""
    program = (
        "import concurrent.futures, importlib\n"
        "with concurrent.futures.ThreadPoolExecutor() as pool:\n"
        "    pool.submit(importlib.import_module, 'paramserver_node').result()"
    )
    done = subprocess.run([*CONTAINER, sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
