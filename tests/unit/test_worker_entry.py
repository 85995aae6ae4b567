"""Which functions a worker runs, how it finds them, and what it is called."""

import socket
from pathlib import Path

import pytest

from paramserver.core.fields import MODEL_NAME
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
    """A prefix allows a module and what lies below it, not one whose name merely begins so."""
    assert entry.is_allowed(name, prefixes) is allowed


def test_an_allowed_entry_is_loaded() -> None:
    """The shipped example is found by its name."""
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
    """The refusal says what is wrong with an entry that is forbidden, missing or no function."""
    with pytest.raises(RequestError, match=says):
        entry.load(name, ["paramserver.examples"])


def test_a_module_that_lacks_something_shows_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry whose module imports what is not there fails with that import's error."""
    (tmp_path / "needs_more.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):
        entry.load("needs_more:train", ["needs_more"])


LONG = "ip-10-0-12-34.a-rather-long-department.an-example-company.internal"
POD = "a-deployment-with-a-name-as-long-as-they-become-7d9f8b6c5-"


@pytest.mark.parametrize("host", ["node7", LONG, POD + "x2x9z", "-a host_", "\u00fc", "", 60 * "n" + "\udcfc"])
def test_a_worker_has_a_name_that_the_pool_allows(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its machine is called; one that needs no change is told by its own name."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)

    assert MODEL_NAME.fullmatch(default_name())
    assert host != "node7" or default_name().startswith("node7-")


def test_pods_whose_names_differ_at_the_end_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is process 1 of its container."""
    names = set()
    for host in (POD + "x2x9z", POD + "k4q7w"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        names.add(default_name())

    assert len(names) == 2
