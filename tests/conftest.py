"""What holds for every test.

Generated examples have no time limit, and on CI they are the same in every run.  Ctrl-C is heard, also where whoever
started the tests ignores it, as a shell does for what it puts in the background: processes inherit that, and some
tests interrupt theirs.
"""

import os
import signal
from typing import Final

import pytest
from hypothesis import settings

settings.register_profile("paramserver", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("paramserver")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ALONE: Final = ("chaos", "test_browser", "test_scheduler_leader", "test_shard_overload", "test_shard_pace")
"""Tests of how soon something happens between real processes: folders and modules beside which nothing runs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them `alone`."""
    for item in items:
        if item.get_closest_marker("process") and {item.path.parent.name, item.path.stem} & set(ALONE):
            item.add_marker(pytest.mark.alone)
