"""docs/settings.md and the code name the same settings, with the same defaults."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from paramserver_node.settings import ClientSettings, SchedulerSettings, Settings, ShardSettings, WorkerSettings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
SECTIONS: dict[type[Settings], tuple[str, ...]] = {
    SchedulerSettings: ("Scheduler and shard", "Scheduler"),
    ShardSettings: ("Scheduler and shard", "Shard"),
    WorkerSettings: ("Pool worker",),
    ClientSettings: ("psctl and the Python client",),
}


def listed(section: str) -> dict[str, str]:
    """Return the settings in the table below that heading, each with the text in its column for the default."""
    text = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    table = next(t for t in text if t.startswith(section + "\n"))
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|([^|]*)\| [^|]{5,} \|$", table, re.MULTILINE)
    return {name: default for names, default in rows for name in re.findall(r"\w+", names)}


@pytest.mark.parametrize("settings", SECTIONS)
def test_the_page_lists_every_setting_with_its_default(settings: type[Settings]) -> None:
    """The page lists exactly the settings of the service, each with its default unless that is empty."""
    found = {name: default for section in SECTIONS[settings] for name, default in listed(section).items()}

    assert set(found) == {f.name for f in fields(settings)}
    for f in fields(settings):
        if f.default not in ("", None):
            shown = str(f.default).lower() if isinstance(f.default, bool) else str(f.default)
            assert f"`{shown}`" in found[f.name], f.name
