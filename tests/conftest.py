"""What holds for every test: generated examples have no time limit, and on CI they are the same in every run."""

import os
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings

settings.register_profile("paramserver", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("paramserver")

ALONE: Final = ("chaos", "contract")
"""Folders of tests about how soon something happens between real processes: nothing runs beside them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them `alone`."""
    here = Path(__file__).parent
    for item in items:
        if item.get_closest_marker("process") and item.path.relative_to(here).parts[0] in ALONE:
            item.add_marker(pytest.mark.alone)
