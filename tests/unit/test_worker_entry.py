"""Which functions a pool worker runs, how it loads them, and its default name."""

import os
import socket
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paramserver.core.fields import MODEL_NAME
from paramserver.core.scheduler.runs import is_allowed
from paramserver.errors import RequestError
from paramserver.examples import digits
from paramserver_worker import entry
from paramserver_worker.main import default_name


@pytest.mark.parametrize(
    ("name", "prefixes", "allowed"),
    [
        ("a.b:f", ["a"], True),
        ("a.b:f", ["a.b"], True),
        ("a.bc:f", ["a.b"], False),
        ("ab:f", ["a"], False),
        ("a:f", [], False),
        ("os:system", ["paramserver.examples"], False),
    ],
)
def test_prefixes_end_at_dots(name: str, prefixes: list[str], allowed: bool) -> None:
    """A prefix allows a module and its submodules, not one whose name merely starts with the prefix."""
    assert is_allowed(name, prefixes) is allowed


def test_an_allowed_entry_is_loaded() -> None:
    """The entry of the shipped example is loaded by its name."""
    assert entry.load("paramserver.examples.digits:train", ["paramserver.examples"]) is digits.train


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("os:system", "allowed by this worker"),
        ("paramserver.examples.nothing:train", "no module"),
        ("paramserver.examples.digits:nothing", "no function"),
        ("paramserver.examples.digits:TEST_IMAGES", "no function"),
        ("paramserver.examples.digits", "must look like"),
    ],
)
def test_what_cannot_be_run_is_refused(name: str, says: str) -> None:
    """An entry that is not allowed, missing or not a function is refused with what is wrong."""
    with pytest.raises(RequestError, match=says):
        entry.load(name, ["paramserver.examples"])


def test_a_module_that_lacks_something_shows_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry whose module imports a missing module fails with the error of that import."""
    (tmp_path / "needs_more.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):
        entry.load("needs_more:train", ["needs_more"])


@pytest.mark.parametrize("body", ["async def train(worker): pass", "def train(worker): yield"])
def test_a_function_whose_call_runs_nothing_is_refused(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coroutine function or a generator is refused: called as a plain function it would end at once, as if done."""
    module = f"lazy_{len(body)}"
    (tmp_path / f"{module}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RequestError, match="plain function"):
        entry.load(f"{module}:train", [module])


def test_a_wrong_argument_is_refused_before_the_cluster_is_asked() -> None:
    """A value for a name that no argument can have is a usage error, whether or not a cluster answers."""
    words = "paramserver.examples.digits:train --model m --arg batch-size=1 --url http://127.0.0.1:1".split()
    command = [sys.executable, "-P", "-m", "paramserver_worker", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "batch-size" in done.stderr


LONG = "ip-10-0-12-34.a-rather-long-department.an-example-company.internal"
POD = "a-deployment-with-a-name-as-long-as-they-become-7d9f8b6c5-"


@pytest.mark.parametrize("host", ["node7", LONG, POD + "x2x9z", "-a host_", "\u00fc", "", 60 * "n" + "\udcfc"])
def test_a_worker_has_a_name_that_the_pool_allows(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default name is valid for any host name, and starts with one that needs no change."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)

    assert MODEL_NAME.fullmatch(default_name())
    assert host != "node7" or default_name().startswith("node7-")


def test_two_workers_never_have_one_name() -> None:
    """Default names differ even on one host and with one process id, as of two containers in the host's network."""
    assert default_name() != default_name()


@pytest.mark.parametrize(("leaves", "status"), [("returns", 0), ("exits", 3), ("raises", 1)])
def test_a_forked_child_that_leaves_the_function_ends(leaves: str, status: int) -> None:
    """A child that a function forks, and that returns from it, exits or raises, does not go on as the worker.

    It reported the place as done, while its parent was still at work, and became a second member of that name.
    """
    children: list[int] = []
    parent = os.getpid()

    def train(_: object) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads that other tests have left
            child = os.fork()
        if child:
            children.append(child)
        elif leaves == "exits":
            sys.exit(3)
        elif leaves == "raises":
            raise RuntimeError("boom")

    worker: Any = nullcontext(SimpleNamespace())
    worker.run = None
    client: Any = SimpleNamespace(model=lambda _: SimpleNamespace(worker=lambda *_, **__: worker))
    try:
        entry.run(client, train, {}, model="m", place={})
    finally:
        if os.getpid() != parent:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == status
