"""Benchmark paramserver and its alternatives side by side on this machine.

    make bench                                          everything, about an hour on an otherwise idle machine
    make bench ARGS=--quick                             one short pass of everything, about 10 minutes
    make bench ARGS="--only W1"                         W1 W3 W4 W5 cost stages
    make bench ARGS="--cells w1-10mb --systems ours-http2 socket torch-tcp"
    make bench ARGS="--from build/bench.jsonl --write"  write a run's tables, even partial, to docs/performance.md

Systems that are not installed are skipped with a note on what to install.  Each cell is measured in passes; each pass
launches every system once, so a disturbance of the machine affects all of them.  Figures are medians over passes.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks import cost, stages
from benchmarks.cells import CELLS, Cell, order, systems
from benchmarks.kernels import kernel_table
from benchmarks.launch import Failed, launch
from benchmarks.machine import ROOT, about
from benchmarks.tables import cell_table, loaded, summarized, table, write
from benchmarks.targets import in_place, outcomes, target_table

PARTS = ("W1", "W3", "W4", "W5", "cost", "stages")
START_S = 8.0
"""Initial estimate of the time of a launch besides its windows."""


def main() -> None:
    """Measure, or read the results of an earlier run, and print the tables."""
    options = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped and files removed
    if options.source:
        report(loaded(options.source), to_page=options.write)
        return
    chosen = cells_of(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w") as out:
        records = measure(chosen, options, out)
    print(f"the results are in {options.out}", file=sys.stderr)
    report(records, to_page=options.write)


def parsed() -> argparse.Namespace:
    """Return the parsed command line."""
    cells = [c.key for c in CELLS]
    parser = argparse.ArgumentParser(
        prog="make bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--cells", nargs="+", choices=cells, metavar="CELL", help=f"only {', '.join(cells)}")
    parser.add_argument(
        "--systems", nargs="+", choices=list(systems()), metavar="SYSTEM", help=f"only {', '.join(systems())}"
    )
    parser.add_argument("--passes", type=int, default=5, help="launches of each system in each cell")
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="of a timed window, and of the untimed one before it"
    )
    parser.add_argument("--quick", action="store_true", help="one pass of 0.3 seconds: for a look, not for figures")
    parser.add_argument("--out", type=Path, default=Path("build/bench.jsonl"), help="file of the raw results")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="measure nothing: tabulate this file")
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/performance.md")
    options = parser.parse_args()
    if options.quick:
        options.passes, options.seconds = 1, 0.3
    if options.passes < 1 or options.seconds <= 0:
        parser.error("--passes and --seconds must be positive")
    return options


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Return the cells selected on the command line."""
    if options.cells:
        return [c for c in CELLS if c.key in options.cells]
    return [c for c in CELLS if c.work.kind in options.only]


def measure(chosen: Sequence[Cell], options: argparse.Namespace, out: IO[str]) -> list[dict[str, Any]]:
    """Run everything and return the records; each is also written to `out` at once."""
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        records.append(record)
        out.write(json.dumps(record) + "\n")
        out.flush()

    keep({"about": about(), "command": command()})
    able = [n for n, s in systems().items() if not options.systems or n in options.systems]
    for name in list(able):
        if reason := systems()[name].missing():
            able.remove(name)
            print(f"left out: {systems()[name].label.replace('**', '')}: {reason}", file=sys.stderr)
    plan = [(c, i, n) for c in chosen for i, n in order([n for n in c.systems if n in able], options.passes, c.once)]
    for (c, i, name), note in progress(plan, options.seconds):
        note(f"{c.title}: {name}, pass {i + 1} of {1 if name in c.once else options.passes}")
        head = {"cell": c.key, "system": name, "pass": i}
        try:
            keep(head | launch(systems()[name], c.work, options.seconds))
        except Failed as e:
            print(f"{c.key} {name} failed: {e}", file=sys.stderr)
            keep(head | {"error": str(e)})
    if not options.cells and "W5" in options.only:
        print("W5: optimizers against copying memory", file=sys.stderr)
        keep({"kernels": kernels()})
    if not options.cells and "cost" in options.only:
        for name, figures in cost.measured(quick=options.quick):
            keep({"cost": name, "figures": figures})
    if not options.cells and "stages" in options.only:
        print("stages of a round of 10 MB", file=sys.stderr)
        keep({"profile": stages.profile(10.0, 5 if options.quick else 25)})
    return records


def progress(plan: Sequence[Any], seconds: float) -> Iterator[tuple[Any, Any]]:
    """Yield each step of the plan with a function that prints a text and the estimated remaining time to stderr."""
    began = time.monotonic()
    for done, step in enumerate(plan):
        each_s = (time.monotonic() - began) / done if done else START_S + 2 * seconds
        left_min = each_s * (len(plan) - done) / 60

        def note(text: str, done: int = done, left_min: float = left_min) -> None:
            print(f"[{done + 1}/{len(plan)}, {left_min:.0f} min left] {text}", file=sys.stderr, flush=True)

        yield step, note


def kernels() -> dict[str, Any]:
    """Run `kernels.py` in a separate process and return its results."""
    program = [sys.executable, "-m", "benchmarks.kernels", "--json"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def command() -> str:
    """Return the command that started this run."""
    words = " ".join(sys.argv[1:])
    return f'make bench ARGS="{words}"' if words else "make bench"


def report(records: Sequence[dict[str, Any]], *, to_page: bool) -> None:
    """Print all tables of these records; `to_page`: also write them to docs/performance.md."""
    rows = summarized(records)
    parts: dict[str, str] = {"machine": machine_text(records)}
    for kind, name in (("W1", "dense"), ("W3", "small"), ("W4", "digits")):
        found = [
            cell_table(c, rows) for c in CELLS if c.work.kind == kind and any((c.key, s) in rows for s in c.systems)
        ]
        if found:
            parts[name] = "\n\n".join(found)
    if profile := next((r["profile"] for r in records if "profile" in r), None):
        parts["profile"] = profile
    if optimizers := next((r["kernels"] for r in records if "kernels" in r), None):
        parts["optimizers"] = kernel_table(optimizers["rows"])
    costs = {r["cost"]: r["figures"] for r in records if "cost" in r}
    if costs:
        parts["cost"] = cost.tables(costs)
    figures = {k: float(v) for found in costs.values() for k, v in found.items() if isinstance(v, int | float)}
    if optimizers:
        adam = sorted((r["elements"], r["ms"] / r["copy_ms"]) for r in optimizers["rows"] if r["name"] == "adam")
        figures |= {"adam_in_cache": adam[0][1], "adam_in_memory": adam[-1][1]}
    found_targets = outcomes(rows, figures, measured_only=not to_page)
    parts["targets"] = target_table(found_targets)
    if besides := in_place(rows):
        parts["in-place"] = table(["the same, gradients in place", "reached"], [[o.text, o.reached] for o in besides])
    for name, text in parts.items():
        print(f"\n{text}")
        if to_page:
            write(name, text)
    missed = sum("MISS" in o.mark for o in found_targets)
    passed = sum(o.mark == "pass" for o in found_targets)
    print(f"\n{passed} targets reached, {missed} missed", file=sys.stderr)


def machine_text(records: Sequence[dict[str, Any]]) -> str:
    """Return command, machine and versions as Markdown."""
    head: dict[str, Any] = next((r for r in records if "about" in r), {"about": {}, "command": "?"})
    versions: dict[str, str] = {}
    for r in records:
        versions |= r.get("versions", {})
    facts = " · ".join(f"{k} {v}" for k, v in (head["about"] | versions).items())
    return f"`{head['command']}`  \n{facts}"


if __name__ == "__main__":
    main()
