"""The benchmarks measure what they claim: order, medians, marks, checks, and real launches, one with a cheat."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from benchmarks import bench, cost, meters, stages, tables, targets
from benchmarks.cells import CELLS, FLOORS, RIVALS, Cell, cell, order, systems
from benchmarks.cost import WAYS
from benchmarks.launch import Failed, figures, launch
from benchmarks.meters import Reading
from benchmarks.systems.bare_socket import BareSocket, SocketClient
from benchmarks.systems.system import Running
from benchmarks.targets import Bound, Limit, Ratio
from benchmarks.workloads import EVALUATE_EVERY, Client, Digits, Parts, Rounds, Window, Work, verdict

from paramserver.types import F32

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
TINY = Work("W1", 1024)


def record(cell: str, system: str, rounds_per_s: float, **more: Any) -> dict[str, Any]:
    """Return the record of a launch in which only the rate matters."""
    window = Window(10, 10 / rounds_per_s, [0.001] * 10)
    still = Reading(0.0, 0.0, 0.0, 0.0)
    found = figures(TINY, [window], still, still, 0, "exact")
    return {"cell": cell, "system": system, "pass": 0, "versions": {}} | found | more


# ---------------------------------------------------------------------------------------------------- meters


def test_processor_time_is_counted_for_the_right_process() -> None:
    """Processor time of this process counts for it and for the machine, but not for an idle process."""
    waits = "print(flush=True); input()"
    idle = subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert idle.stdout is not None
        idle.stdout.readline()  # its start has used processor time
        before, idle_before, busy_before = meters.cpu_s([os.getpid()]), meters.cpu_s([idle.pid]), meters.busy_s()
        deadline = time.monotonic() + 30
        while meters.cpu_s([os.getpid()]) < before + 0.1:
            assert time.monotonic() < deadline
        assert meters.busy_s() - busy_before >= 0.05
        assert meters.cpu_s([idle.pid]) - idle_before < 0.1
    finally:
        idle.communicate(b"\n")
    assert meters.cpu_s([idle.pid]) == 0.0


def test_a_peak_of_memory_can_be_forgotten() -> None:
    """Peak memory includes memory that was freed, until `forget_peaks` resets it."""
    own = [os.getpid()]
    meters.forget_peaks(own)
    before = meters.memory_bytes(own, "VmHWM")
    big = np.ones(8_000_000)
    del big
    assert meters.memory_bytes(own, "VmHWM") > before + 50_000_000
    meters.forget_peaks(own)
    assert meters.memory_bytes(own, "VmHWM") < before + 30_000_000


def test_percentiles_and_medians() -> None:
    """Percentiles use the nearest rank, even medians the mean of the middle two, and both are 0 for no values."""
    values = [float(i) for i in range(1, 101)]
    assert [meters.percentile(values, p) for p in (50, 99, 100)] == [50.0, 99.0, 100.0]
    assert meters.percentile([3.0], 99) == 3.0
    assert meters.median([4.0, 1.0, 3.0, 2.0]) == 2.5
    assert meters.percentile([], 50) == meters.median([]) == 0.0


def test_others_are_what_neither_servers_nor_workers_nor_we_have_used() -> None:
    """Other processes' time is the machine's minus that of servers, workers and the benchmark, and never negative."""
    assert Reading(3.0, 2.0, 0.5, 10.0).others_s(Reading(1.0, 1.0, 0.0, 5.0)) == 1.5
    assert Reading(3.0, 2.0, 0.5, 5.1).others_s(Reading(1.0, 1.0, 0.0, 5.0)) == 0.0


# ---------------------------------------------------------------------------------------------------- cells


def test_passes_are_interleaved() -> None:
    """Each pass runs all systems once and starts with another one; systems in `once` run in the first pass only."""
    found = list(order(["a", "b", "c"], 3, frozenset({"b"})))
    assert found == [(0, "a"), (0, "b"), (0, "c"), (1, "c"), (1, "a"), (2, "c"), (2, "a")]
    assert list(order([], 2)) == []


def test_every_cell_is_of_systems_that_there_are() -> None:
    """Cell keys are unique, and each cell names existing systems, once each, with its slow ones among them.

    All systems that are not ours are rivals or floors.
    """
    assert len({c.key for c in CELLS}) == len(CELLS)
    for c in CELLS:
        assert set(c.systems) <= set(systems())
        assert len(set(c.systems)) == len(c.systems)
        assert c.once <= set(c.systems)
    assert {*RIVALS, *FLOORS} == {k for k in systems() if not k.startswith("ours")}


def test_every_target_is_of_a_cell_that_measures_it() -> None:
    """Each ratio and bound is of systems that its cell measures, and each limit's name occurs in a measurement."""
    for t in (*targets.RATIOS, *targets.BESIDES, *targets.BOUNDS):
        assert t.ours in cell(t.cell).systems
    for r in (*targets.RATIOS, *targets.BESIDES):
        assert r.recorded or set(r.rivals) & set(cell(r.cell).systems)
        assert r.rivals == RIVALS or set(r.rivals) <= set(cell(r.cell).systems)
    source = (ROOT / "benchmarks" / "cost.py").read_text() + (ROOT / "benchmarks" / "bench.py").read_text()
    for limit in targets.LIMITS:
        for_each_way = [limit.name.removesuffix(way) + "{way}" for way, _ in WAYS if limit.name.endswith(way)]
        assert any(f'"{name}"' in source for name in (limit.name, *for_each_way))


# ---------------------------------------------------------------------------------------------------- workloads


class Loopback:
    """A system within the process that applies pushes to an array, except for every `lose`th one."""

    fused, pairs = False, 1

    def __init__(self, work: Work, lose: int = 0) -> None:
        self.values, self._rate, self._lose, self._count = work.initial(), np.float32(work.rate), lose, 0
        self.pulled = self.values

    def pull(self) -> Parts:
        self.pulled = self.values.copy()
        return [self.pulled]

    def push(self, gradient: F32) -> None:
        self._count += 1
        if not self._lose or self._count % self._lose:
            self.values -= self._rate * gradient

    def exchange(self, gradient: F32) -> Parts:
        self.push(gradient)
        return self.pull()

    def close(self) -> None:
        pass


@dataclass
class Flag:
    """An unshared stand-in for a `Synchronized` value."""

    value: int = 0


def rounds(work: Work, client: Client) -> Rounds:
    return Rounds(work, client, 0, cast("Synchronized[int]", Flag()))


def test_a_window_is_checked_to_the_last_bit() -> None:
    """The check is exact if every push was applied, and reports a lost push, a wrong element and a short vector."""
    honest = Loopback(TINY)
    loop = rounds(TINY, honest)
    window = loop.run(0.02, warm=False)
    assert loop.done == window.rounds == len(window.round_s) > 0
    assert verdict(TINY, honest.pull(), loop.done) == "exact"
    honest.values[17] += 2.0**-10
    assert verdict(TINY, honest.pull(), loop.done).startswith("WRONG: 1 of 1024")
    assert verdict(TINY, [honest.values[:-1]], loop.done).startswith("WRONG")

    cheat = Loopback(TINY, lose=3)
    loop = rounds(TINY, cheat)
    while loop.done < 3:
        loop.run(0.01, warm=False)
    assert verdict(TINY, cheat.pull(), loop.done).startswith("WRONG: 1024 of 1024")


def test_sync_counts_one_step_for_the_gradients_of_all() -> None:
    """In sync mode, the check expects one step for each mean of all workers' gradients."""
    work = Work("W1", 4, workers=2, mode="sync")
    values = [np.full(4, -3 * work.rate, np.float32)]
    assert verdict(work, values, 6) == "exact"
    assert verdict(work, values, 3).startswith("WRONG")


def test_workers_in_sync_leave_in_the_same_round() -> None:
    """In sync mode, rank 0 chooses a round that no worker can have passed, and all workers stop after it."""
    flag = cast("Synchronized[int]", Flag())
    work = Work("W1", 4, workers=1, mode="sync")
    first = Rounds(work, Loopback(work), 0, flag).run(0.0, warm=False)
    assert flag.value == first.rounds == 3
    assert Rounds(work, Loopback(work), 1, flag).run(0.0, warm=False).rounds == 3


def test_the_digits_are_learned_and_not_while_it_warms_up() -> None:
    """The shared gradient code of W4 reaches 95 % and stops there; the untimed window leaves the values unchanged."""
    work = Work("W4", Digits.size)
    client = Loopback(work)
    loop = rounds(work, client)
    loop.run(0.02, warm=True)
    assert (client.values == work.initial()).all()
    window = loop.run(0.0, warm=False)
    assert window.accuracy >= 0.95
    assert window.rounds % EVALUATE_EVERY == 0
    assert window.accuracy == Digits.accuracy(client.pulled)


# ---------------------------------------------------------------------------------------------------- tables


def test_rows_are_medians_of_the_passes() -> None:
    """A row has the median of each figure and the rate of every pass; one wrong or failed pass makes it unsound."""
    key = ("w1-10mb", "socket")
    passes = [record(*key, r) for r in (30.0, 10.0, 20.0)]
    row = tables.summarized(passes)[key]
    assert row.figures["rounds_per_s"] == 20.0
    assert list(row.windows) == [30.0, 10.0, 20.0]
    assert row.sound
    assert not tables.summarized([*passes, record(*key, 20.0, check="WRONG: 1")])[key].sound
    failed = {"cell": key[0], "system": key[1], "pass": 3, "error": "Traceback\nValueError: no"}
    assert not tables.summarized([*passes, failed])[key].sound

    text = tables.cell_table(cell("w1-10mb"), tables.summarized([*passes, failed]))
    assert "| bare TCP loop | 20.0 |" in text
    assert "30.0 10.0 20.0 | exact, 1 failed |" in text
    assert "failed: ValueError: no" in tables.cell_table(cell("w1-10mb"), tables.summarized([failed]))


def test_a_broken_off_run_can_be_tabulated(tmp_path: Path) -> None:
    """A results file whose last line was cut off is read without that line."""
    file = tmp_path / "bench.jsonl"
    line = json.dumps(record("w1-10mb", "socket", 10.0))
    file.write_text(line + "\n" + line[: len(line) // 2])
    assert len(tables.loaded(file)) == 1


def test_text_goes_between_its_marks(tmp_path: Path) -> None:
    """Only the text between the marks is replaced; a page without the marks is refused."""
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- dense -->\nold\n<!-- /dense -->\nb\n")
    tables.write("dense", r"new \1", page)
    assert page.read_text() == "a\n<!-- dense -->\nnew \\1\n<!-- /dense -->\nb\n"
    with pytest.raises(ValueError, match="small"):
        tables.write("small", "new", page)


def test_the_page_has_a_place_for_every_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/performance.md has the marks of everything that a whole run writes, exactly once each."""
    text = PAGE.read_text()
    copy = tmp_path / "performance.md"
    copy.write_text(text)
    written: list[str] = []

    def noted(name: str, text: str) -> None:
        written.append(name)
        tables.write(name, text, copy)

    monkeypatch.setattr(bench, "write", noted)
    kernels = {"rows": [{"name": "adam", "elements": 4, "ms": 1.0, "copy_ms": 0.5, "gb_per_s": 2.0, "of_copy": 0.5}]}
    whole = [record(c.key, s, 5.0) for c in CELLS for s in c.systems]
    costs = [
        {"cost": "workers", "figures": {"counts": [1, 1000], "us": [100.0, 110.0], "workers_ratio": 1.1}},
        {"cost": "growth", "figures": {"error": "ValueError: no"}},
    ]
    bench.report([{"about": {}, "command": "make bench"}, *whole, {"kernels": kernels}, *costs], to_page=True)
    assert set(written) == {"machine", "dense", "small", "digits", "optimizers", "cost", "targets", "in-place"}
    for name in (*written, "profile"):
        assert text.count(f"<!-- {name} -->") == text.count(f"<!-- /{name} -->") == 1
    shown = copy.read_text()
    assert "| W1 dense round, 10 MB, 1 worker: ours, same host ≥ 2.5x the best rival | 1.00x" in shown
    assert "2.00 |  | **MISS**" in shown
    assert "missed" in capsys.readouterr().err


def test_the_page_begins_with_figures_of_its_tables() -> None:
    """The table at the top of docs/performance.md has the rounds per second of the tables below, for each system."""
    head, _, below = PAGE.read_text().partition("\n## ")
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in head.splitlines() if line.startswith("|")]
    systems, figures = rows[0][1:], rows[2:]

    assert len(figures) >= 6
    for cell_name, *shown in figures:
        (table,) = re.findall(rf"^\| W\d [a-z ]+, {cell_name} \|.*\n\|.*\n((?:\|.*\n)+)", below, re.M)
        measured = dict(re.findall(r"^\| (.*?) \| ([\d.,]+) \|", table.replace("**", ""), re.M))
        assert shown == [measured.get(s, "") for s in systems]


def test_costs_are_shown() -> None:
    """The cost tables accept the figures of all measurements and show them with their ratios."""
    found: dict[str, dict[str, Any]] = {
        "workers": {"counts": [1, 1000], "us": [100.0, 150.0]},
        "connections": {"counts": [0, 1000], "us": [100.0, 150.0]},
        "partitions": {"counts": [8, 4096], "us": [100.0, 150.0]},
        "small_calls": {"rows": [["HTTP/2", 1.0, 2.0, 3.0, 4.0, 2.0]]},
        "memory": {"rows": [["HTTP/2", 2.1, 3.0]]},
        "growth": {"rows": [["HTTP/2", 100.0, 101.0]], "rounds": [1000, 11000]},
    }
    assert set(found) == set(cost.MEASUREMENTS)
    text = cost.tables(found)
    assert text.count("| 1,000 | 150 | 1.50 |") == 2
    assert "2.10x | 3.00x" in text
    assert "100.0 | 101.0 | 1.010" in text


# ---------------------------------------------------------------------------------------------------- targets


def summary(rates: dict[str, float], cell: str = "w1-10mb", **more: Any) -> targets.Rows:
    return tables.summarized([record(cell, s, r, **more) for s, r in rates.items()])


def test_a_ratio_is_to_the_best_rival() -> None:
    """A ratio is to the best rival, which is named and is not a floor; with one side missing it is not measured."""
    t = Ratio("w1-10mb", "ours-same-host", 2.5, RIVALS)
    rates = {"ours-same-host": 300.0, "torch": 100.0, "ray": 120.0, "memory": 1000.0}
    met = t.outcome(summary(rates))
    assert (met.reached, met.mark) == ("2.50x (Ray actors)", "pass")
    assert t.outcome(summary(rates | {"ray": 121.0})).mark == "**MISS**"
    assert t.outcome(summary({"ours-same-host": 300.0})).mark == "not measured"
    assert t.outcome(summary({"torch": 300.0})).mark == "not measured"


def test_the_floor_stands_beside_what_was_reached() -> None:
    """The floor's ratio to the same rival, or its own figure, is shown beside ours, unless the floor is the rival."""
    rates = {"ours-same-host": 200.0, "ours-http2": 90.0, "torch": 100.0, "memory": 220.0, "socket": 110.0}
    rows = summary(rates)
    beyond = Ratio("w1-10mb", "ours-same-host", 2.5, RIVALS).outcome(rows)
    assert (beyond.floor, beyond.mark) == ("2.20x", "**MISS**, the floor too")
    assert Ratio("w1-10mb", "ours-same-host", 2.1, RIVALS).outcome(rows).mark == "**MISS**"
    assert Ratio("w1-10mb", "ours-http2", 0.8, ("torch",)).outcome(rows).floor == "1.10x"
    assert Ratio("w1-10mb", "ours-http2", 0.85, ("socket",)).outcome(rows).floor == ""
    few = Bound("w1-10mb", "ours-http2", 111, "rounds/s", targets.rounds).outcome(rows)
    assert (few.floor, few.mark) == ("110", "**MISS**, the floor too")
    assert Bound("w1-10mb", "ours-http2", 90, "rounds/s", targets.rounds).outcome(rows).mark == "pass"
    assert Ratio("w1-10mb", "ours-same-host", 2.5, RIVALS).outcome(summary({"torch": 1.0})).floor == ""


def test_a_lost_update_turns_a_target_red() -> None:
    """A target is missed, however high the rate, if a pass was not exact."""
    t = Ratio("w1-10mb", "ours-same-host", 2.5, RIVALS)
    rates = {"ours-same-host": 900.0, "torch": 100.0}
    assert t.outcome(summary(rates)).mark == "pass"
    assert t.outcome(summary(rates, check="WRONG: 1 of 4")).mark == "**MISS**"


def test_bounds_recorded_figures_and_limits() -> None:
    """A recorded figure can replace a rival, bounds hold in their direction, and limits are upper bounds."""
    recorded = Ratio("w1-0.4mb", "ours-same-host", 1, recorded=1499.0)
    assert recorded.outcome(summary({"ours-same-host": 1499.0}, "w1-0.4mb")).mark == "pass"
    assert recorded.outcome(summary({"ours-same-host": 1490.0}, "w1-0.4mb")).mark == "**MISS**"
    rows = summary({"ours-http2": 100.0}, "w3-streams")
    assert Bound("w3-streams", "ours-http2", 200, "requests/s", targets.requests).outcome(rows).mark == "pass"
    assert Bound("w3-streams", "ours-http2", 201, "requests/s", targets.requests).outcome(rows).mark == "**MISS**"
    cheap = Bound("w3-streams", "ours-http2", 0.1, "s/GB", targets.cpu_s_per_gb, at_most=True)
    assert cheap.outcome(rows).mark == "pass"
    limit = Limit("x", "x at most 2", 2.0)
    assert [limit.outcome({"x": v}).mark for v in (2.0, 2.1)] == ["pass", "**MISS**"]
    assert limit.outcome({}).mark == "not measured"


# ---------------------------------------------------------------------------------------------------- real runs


class Cheat(SocketClient):
    """A client that reports every fifth push as applied without sending it."""

    count = 0

    def push(self, gradient: F32) -> None:
        self.count += 1
        if self.count % 5:
            super().push(gradient)


def broken(work: Work, rank: int) -> Client:
    """Fail to make a client."""
    raise ValueError("planted")


class Planted(BareSocket):
    """The bare-socket floor, with clients that cheat or fail."""

    def __init__(self, broken: bool) -> None:
        self._broken = broken

    @contextmanager
    def start(self, work: Work) -> Iterator[Running]:
        with super().start(work) as found:
            connect: Any = broken if self._broken else partial(Cheat, **found.connect.keywords)  # type: ignore[attr-defined]
            yield Running(found.servers, found.base_bytes, connect)


@pytest.mark.process
def test_a_system_that_loses_updates_is_found_out() -> None:
    """A real launch, with processes and sockets, reports lost pushes, and fails with a failing client's error."""
    assert str(launch(Planted(broken=False), TINY, 0.1)["check"]).startswith("WRONG: 1024 of 1024")
    with pytest.raises(Failed, match="planted"):
        launch(Planted(broken=True), Work("W1", 1024, workers=2), 0.1)


@pytest.mark.process
def test_the_stages_of_a_round_are_told() -> None:
    """The profile has a line with a positive time for every pass over the bytes and every transport."""
    lines = stages.profile(1.0, 1).splitlines()
    assert len(lines) == 11
    assert sum("over HTTP/2, p" in line for line in lines) == 2
    assert all(float(line.split("|")[4]) > 0 for line in lines[2:])


@pytest.mark.process
def test_ours_and_the_floor_run_a_cell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A 4 KB cell is measured end to end with ours and the floors, all exact, and gives a table."""
    names = [n for n in ("ours-same-host", "ours-http2", *FLOORS) if not systems()[n].missing()]
    small = Cell("w1-10mb", "W1 dense round, 4 KB", TINY, tuple(names))
    records = [
        launch(systems()[n], TINY, 0.1) | {"cell": small.key, "system": n, "pass": i} for i, n in order(names, 1)
    ]
    for r in records:
        assert r["check"] == "exact"
        assert r["rounds"] > 0
        assert 0 < r["p50_ms"] <= r["p99_ms"]
    monkeypatch.setattr(bench, "CELLS", (small,))
    bench.report(records, to_page=False)
    shown: Sequence[str] = capsys.readouterr().out.splitlines()
    assert sum("| exact |" in line for line in shown) == len(names)
