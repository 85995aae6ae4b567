"""Results as Markdown tables with medians over the passes, and their insertion into docs/performance.md."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cells import Cell, systems
from benchmarks.machine import ROOT
from benchmarks.meters import median

PAGE = ROOT / "docs" / "performance.md"
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """The combined results of all passes of one system in one cell."""

    cell: str
    system: str
    figures: Mapping[str, float]
    """Median of each figure over the passes."""
    windows: Sequence[float]
    """Rounds per second of each pass; seconds in W4."""
    checks: frozenset[str] = frozenset()
    errors: Sequence[str] = field(default=())

    @property
    def sound(self) -> bool:
        """Whether every pass succeeded and ended with the right values."""
        return bool(self.windows) and not self.errors and not any(c.startswith("WRONG") for c in self.checks)


def summarized(records: Iterable[Record]) -> dict[tuple[str, str], Row]:
    """Return the row of each (cell, system) in these records; records of other kinds are ignored."""
    grouped: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        if "cell" in r:
            grouped.setdefault((r["cell"], r["system"]), []).append(r)
    return {key: _row(*key, found) for key, found in grouped.items()}


def _row(cell: str, system: str, records: Sequence[Record]) -> Row:
    good = [r for r in records if "error" not in r]
    names = [k for k, v in good[0].items() if isinstance(v, int | float) and k != "pass"] if good else []
    figures = {k: median([float(r[k]) for r in good]) for k in names}
    which = "seconds" if cell.startswith("w4") else "rounds_per_s"
    return Row(
        cell,
        system,
        figures,
        [float(r[which]) for r in good],
        frozenset(str(r["check"]) for r in good),
        [str(r["error"]) for r in records if "error" in r],
    )


def number(value: float) -> str:
    """Format a number with about three significant digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; all columns but the first are right-aligned."""
    lines = [list(columns), ["---", *["--:"] * (len(columns) - 1)], *([str(x) for x in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _pair(first: str, second: str) -> Callable[[Mapping[str, float]], str]:
    return lambda f: f"{number(f[first])} / {number(f[second])}"


Column = tuple[str, Callable[[Mapping[str, float]], str]]
TIMES: tuple[Column, ...] = (("p50 / p99 ms", _pair("p50_ms", "p99_ms")),)
COMMON: tuple[Column, ...] = (
    ("others' cores", lambda f: f"{f['other_cores']:.1f}"),
)  # fmt: skip
COLUMNS: dict[str, tuple[Column, ...]] = {
    "W1": (
        ("rounds/s", lambda f: number(f["rounds_per_s"])),
        ("MB/s", lambda f: number(f["mb_per_s"])),
        *TIMES,
        ("CPU s/GB server / worker", _pair("server_s_per_gb", "worker_s_per_gb")),
        ("RSS of model", lambda f: f"{f['held_of_model']:.1f}x"),
        *COMMON,
    ),
    "W3": (
        ("rounds/s", lambda f: number(f["rounds_per_s"])),
        *TIMES,
        ("CPU µs/round server / worker", _pair("server_us_per_round", "worker_us_per_round")),
        *COMMON,
    ),
    "W4": (
        ("seconds", lambda f: number(f["seconds"])),
        ("rounds", lambda f: number(f["rounds"])),
        ("rounds/s", lambda f: number(f["rounds_per_s"])),
        ("CPU µs/round server / worker", _pair("server_us_per_round", "worker_us_per_round")),
        *COMMON,
    ),
}


def cell_table(cell: Cell, rows: Mapping[tuple[str, str], Row]) -> str:
    """Return the table of one cell: its systems in order, with the figures of all passes and the check."""
    columns = COLUMNS[cell.work.kind]
    lines = []
    for name in cell.systems:
        row = rows.get((cell.key, name))
        if row is None:
            continue
        label = systems()[name].label
        if not row.windows:
            lines.append([label, *["-"] * (len(columns) + 1), f"failed: {row.errors[0].strip().splitlines()[-1]:.80}"])
            continue
        shown = [text(row.figures) for _, text in columns]
        failed = [f"{len(row.errors)} failed"] if row.errors else []
        lines.append([label, *shown, " ".join(map(number, row.windows)), ", ".join([*sorted(row.checks), *failed])])
    return table([cell.title, *(title for title, _ in columns), "passes", "check"], lines)


def loaded(file: Path) -> list[dict[str, Any]]:
    """Return the records of a results file, without lines that are no JSON, such as a last line that was cut off."""
    found = []
    for line in file.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def write(name: str, text: str, file: Path = PAGE) -> None:
    """Put text between its marks in the page; raises ValueError if it has no such marks."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    page = file.read_text()
    if begin not in page or end not in page:
        raise ValueError(f"{file} has no place for '{name}'")
    pattern = re.escape(begin) + r".*?" + re.escape(end)
    file.write_text(re.sub(pattern, lambda _: f"{begin}\n{text}\n{end}", page, flags=re.DOTALL))
