"""Configuration of all tests.

Hypothesis examples have no deadline, and on CI they are the same in every run. SIGINT raises KeyboardInterrupt even
where the parent process ignores it, as a shell does for background jobs, and SIGHUP ends child processes also under
nohup: they inherit an ignored signal, and some tests interrupt theirs.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings

from paramserver.client.membership import Membership

settings.register_profile("paramserver", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("paramserver")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)  # unlike an ignored one, not inherited

ALONE: Final = ("test_crash_points", "test_fencing", "test_kills", "test_scheduler_leader", "test_storage_loss")
"""Modules whose tests measure how soon real processes react: no other test runs beside them."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import other modules where only the tests of `ALONE` are asked for."""
    other = collection_path.match("test_*.py") and collection_path.stem not in ALONE
    return True if other and config.option.markexpr == "alone" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the process tests of `ALONE` with `alone`, and put the simulation first."""
    for item in items:
        if item.path.stem in ALONE and item.get_closest_marker("process"):
            item.add_marker(pytest.mark.alone)
    items.sort(key=lambda item: item.path.parent.name != "simulation")


@pytest.fixture(autouse=True)
def long_leases(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers of a process test's own process ask for a longer lease than the usual 5 s.

    On a crowded machine the process may stand still for as long; what a worker pushes then is dropped or in doubt, as
    the rules say, and no sum is what a test expects.
    """
    introduction = Membership._introduction
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("process"):
            patch.setattr(Membership, "_introduction", lambda worker: introduction(worker) | {"lease_s": 30.0})
        yield
