"""docs/promises.md names tests that exist, and has a place for every measured figure."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "promises.md").read_text()


def test_every_proof_is_a_test() -> None:
    """Every test file and test function that the page names exists."""
    named = re.findall(r"`(tests/[a-z_/]+\.py)(?:::(test_[a-z0-9_]+))?`", PAGE)

    assert len(named) > 30
    for file, test in named:
        assert (ROOT / file).is_file(), file
        assert not test or f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


def test_every_figure_has_its_place() -> None:
    """The page has the start and end marker of every generated table exactly once."""
    source = (ROOT / "tests/chaos/figures.py").read_text() + (ROOT / "tests/chaos/long.py").read_text()
    figures = {n for names in re.findall(r"for f in \(([a-z, ]+)\)", source) for n in names.split(", ")}

    assert len(figures) >= 7
    for name in figures:
        assert PAGE.count(f"<!-- {name} -->") == PAGE.count(f"<!-- /{name} -->") == 1, name
