"""Performance targets as data: ratios to rivals of the same run, and limits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cells import RIVALS, cell, systems
from benchmarks.tables import Row, number, table

Rows = Mapping[tuple[str, str], Row]
PS_LITE = {"w1-0.4mb": 1499.0}
"""Rounds per second of C++ ps-lite (upstream 15b8adf, TCP), recorded earlier on another machine with two processors,
not in the same run as ours."""


def rounds(row: Row) -> float:
    return row.figures["rounds_per_s"]


def requests(row: Row) -> float:
    """Return requests per second: a round is a pull and a push."""
    return 2 * row.figures["rounds_per_s"]


def speed(row: Row) -> float:
    return 1 / row.figures["seconds"]


def cpu_s_per_gb(row: Row) -> float:
    return row.figures["server_s_per_gb"] + row.figures["worker_s_per_gb"]


@dataclass(frozen=True)
class Outcome:
    """The result of one target."""

    text: str
    """The target in words."""
    reached: str
    mark: str
    """`pass`, `**MISS**` (noted if the floor misses it, too) or `not measured`."""
    floor: str = ""
    """The floor's figure for the same target."""


@dataclass(frozen=True)
class Ratio:
    """Target: in that cell, ours is at least `least` times the best of some rivals, or a recorded figure."""

    cell: str
    ours: str
    least: float
    rivals: tuple[str, ...] = ()
    recorded: float | None = None
    figure: Callable[[Row], float] = rounds

    def outcome(self, rows: Rows) -> Outcome:
        """Return the outcome of the target."""
        all_of_them = self.rivals == RIVALS
        known = [r for n in self.rivals if (r := rows.get((self.cell, n))) is not None and r.windows]
        whom = "ps-lite (recorded)" if self.recorded else "the best rival" if all_of_them else _label(self.rivals[0])
        text = f"{cell(self.cell).title}: {_label(self.ours)} ≥ {self.least:g}x {whom}"
        own = rows.get((self.cell, self.ours))
        if own is None or not own.windows or (not known and self.recorded is None):
            return Outcome(text, "", "not measured")
        best = max(known, key=self.figure, default=None)
        against = self.figure(best) if best is not None else self.recorded or 0.0
        ratio = self.figure(own) / against
        named = f" ({_label(best.system)})" if best is not None and all_of_them else ""
        floor = _floor(rows, self.cell, self.ours)
        if floor is None or floor is best:
            return Outcome(text, f"{ratio:.2f}x{named}", _mark(ratio >= self.least and own.sound))
        bare = self.figure(floor) / against
        mark = _mark(ratio >= self.least and own.sound, floor=bare >= self.least)
        return Outcome(text, f"{ratio:.2f}x{named}", mark, f"{bare:.2f}x")


@dataclass(frozen=True)
class Bound:
    """Target: a figure of ours is at least, or at most, `bound`."""

    cell: str
    ours: str
    bound: float
    unit: str
    figure: Callable[[Row], float]
    at_most: bool = False

    def outcome(self, rows: Rows) -> Outcome:
        """Return the outcome of the target."""
        sign = "≤" if self.at_most else "≥"
        text = f"{cell(self.cell).title}: {_label(self.ours)} {sign} {self.bound:,g} {self.unit}"
        row = rows.get((self.cell, self.ours))
        if row is None or not row.windows:
            return Outcome(text, "", "not measured")
        value, floor = self.figure(row), _floor(rows, self.cell, self.ours)
        good = self._holds(value) and row.sound
        if floor is None:
            return Outcome(text, number(value), _mark(good))
        bare = self.figure(floor)
        return Outcome(text, number(value), _mark(good, floor=self._holds(bare)), number(bare))

    def _holds(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


@dataclass(frozen=True)
class Limit:
    """Target: a figure of `cost.py` or `kernels.py` is at most `bound`."""

    name: str
    text: str
    bound: float

    def outcome(self, figures: Mapping[str, float]) -> Outcome:
        """Return the outcome of the target."""
        value = figures.get(self.name)
        if value is None:
            return Outcome(self.text, "", "not measured")
        return Outcome(self.text, f"{value:.2f}", _mark(value <= self.bound))


def _mark(good: bool, *, floor: bool = True) -> str:
    """Return the mark of a target; `floor`: whether the floor reaches it."""
    return "pass" if good else "**MISS**" if floor else "**MISS**, the floor too"


def _floor(rows: Rows, cell: str, ours: str) -> Row | None:
    """Return the row of the bare transfer over the same transport; None if it was not measured."""
    row = rows.get((cell, FLOOR_OF.get(ours, "")))
    return row if row is not None and row.windows else None


def _label(system: str) -> str:
    return systems()[system].label.replace("**", "")


HOST, HTTP, IN_PLACE = "ours-same-host", "ours-http2", "ours-in-place"
FLOOR_OF = {HOST: "memory", HTTP: "socket"}
RATIOS = (
    Ratio("w1-10mb", HOST, 2.5, RIVALS),
    Ratio("w1-10mb", HTTP, 0.85, ("socket",)),
    Ratio("w1-10mb", HTTP, 0.8, ("torch-tcp",)),
    Ratio("w1-10mb", HTTP, 4, ("grpc",)),
    Ratio("w1-10mb-k2", HOST, 4, RIVALS),
    Ratio("w1-10mb-k2", HTTP, 1, ("torch-tcp",)),
    Ratio("w1-100mb", HOST, 2.5, ("ray",)),
    Ratio("w1-100mb", HTTP, 0.9, ("socket",)),
    Ratio("w1-100mb", HTTP, 1.5, ("torch-tcp",)),
    Ratio("w1-100mb", HTTP, 8, ("grpc",)),
    Ratio("w1-0.4mb", HOST, 2, RIVALS),
    Ratio("w1-0.4mb", HOST, 1, recorded=PS_LITE["w1-0.4mb"]),
    Ratio("w1-0.4mb", HTTP, 1.2, ("torch-tcp",)),
    Ratio("w1-10mb-sync", HOST, 3, RIVALS),
    Ratio("w1-10mb-sync", HTTP, 0.8, ("torch",)),
    Ratio("w4-async", HOST, 1, RIVALS, figure=speed),
    Ratio("w4-sync", HOST, 1, RIVALS, figure=speed),
)
BESIDES = (
    Ratio("w1-10mb", IN_PLACE, 2.5, RIVALS),
    Ratio("w1-10mb-k2", IN_PLACE, 4, RIVALS),
    Ratio("w1-100mb", IN_PLACE, 2.5, ("ray",)),
    Ratio("w1-10mb-sync", IN_PLACE, 3, RIVALS),
)
"""The same ratios for gradients computed in a shared-memory slot.  These are not targets."""
BOUNDS = (
    Bound("w1-10mb", HOST, 0.13, "CPU s/GB, both sides", cpu_s_per_gb, at_most=True),
    Bound("w1-10mb", HTTP, 0.75, "CPU s/GB, both sides", cpu_s_per_gb, at_most=True),
    Bound("w3-k1", "ours-http2-fused", 2000, "rounds/s", rounds),
    Bound("w3-k8", "ours-http2-fused", 5000, "rounds/s", rounds),
    Bound("w3-streams", HTTP, 6000, "requests/s", requests),
)
LIMITS = (
    Limit("rss_one_push_same-host", "shard RSS with one push in flight, same host ≤ 2.5x the model (SGD)", 2.5),
    Limit("rss_one_push_http2", "the same, HTTP/2", 2.5),
    Limit("rss_more_pushes_same-host", "each further push in flight, same host ≤ 1x the model more", 1.0),
    Limit("rss_more_pushes_http2", "the same, HTTP/2", 1.0),
    Limit("rss_growth", "shard RSS after 10,000 rounds ≤ 1.02x that before", 1.02),
    Limit("workers_ratio", "cost of a push with 1,000 workers ≤ 1.2x that with 1", 1.2),
    Limit("connections_ratio", "cost of a push with 1,000 idle connections ≤ 1.2x that with none", 1.2),
    Limit("partitions_ratio", "cost of a push with 4,096 partitions it does not touch ≤ 1.2x that with 8", 1.2),
    Limit("small_p99_ratio", "p99 of a 1 KB call beside 64 MiB transfers, HTTP/2 ≤ 3x idle", 3.0),
    Limit("adam_in_memory", "Adam, 100 MB: ≤ 1.3x the time of its memory traffic at memcpy speed", 1.3),
    Limit("adam_in_cache", "Adam, arrays of 4 MiB: the same", 1.3),
)


def outcomes(rows: Rows, figures: Mapping[str, float], *, measured_only: bool = False) -> Sequence[Outcome]:
    """Return the outcome of every target; `measured_only`: without those that were not measured."""
    every = [t.outcome(rows) for t in (*RATIOS, *BOUNDS)] + [t.outcome(figures) for t in LIMITS]
    return [o for o in every if o.mark != "not measured" or not measured_only]


def in_place(rows: Rows) -> Sequence[Outcome]:
    """Return the measured ratios for gradients computed in a shared-memory slot."""
    return [o for o in (t.outcome(rows) for t in BESIDES) if o.mark != "not measured"]


def target_table(found: Sequence[Outcome]) -> str:
    """Return the outcomes as a Markdown table."""
    return table(["target", "reached", "the floor", ""], [[o.text, o.reached, o.floor, o.mark] for o in found])
