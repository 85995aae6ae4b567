"""Displays of a training: live at a terminal, a plain line every few seconds elsewhere."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite, isnan
from typing import Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from paramserver_cli.training import Sample, Training

PLAIN_EVERY_S = 5.0
CHART_WIDTH = 64
NOT_FINITE = "NaN or inf"
"""What stands for a metric whose newest value is no finite number."""
_BARS = "▁▂▃▄▅▆▇█"

Show = Callable[[Training], None]
"""Shows the newest sample of a training; called after each one."""


def at_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def console() -> Console:
    """Return a console for tables: as wide as the terminal, or 200 columns if there is none, so that paths fit.

    It prints text as it is: an error such as `[/data] is missing` is no markup.
    """
    return Console(width=None if at_terminal() else 200, markup=False, emoji=False)


def columns(*titles: str | Column) -> Table:
    """Return an empty table; what is too wide for a column, such as a path, is continued below, and not cut off."""
    return Table(*(Column(t, overflow="fold") if isinstance(t, str) else t for t in titles), box=None)


def print_list(items: Sequence[Any]) -> None:
    """Print a list as JSON, in the form that lists have in the REST API, on one page."""
    typer.echo(json.dumps({"items": items, "next": None}))


def redraws(console: Console) -> bool:
    """Whether this console is a terminal that can redraw lines; at a dumb one, as in Emacs, a `Live` shows nothing."""
    return console.file.isatty() and console.is_terminal and not console.is_dumb_terminal


def last_line(reason: str) -> str:
    """Return the last line of why a run has ended: of a traceback, the error."""
    return (reason.strip().splitlines() or [""])[-1]


@contextmanager
def display(page: str) -> Iterator[Show]:
    """Show a training: drawn anew at a terminal that can redraw lines, else as a line every five seconds.

    `page` is the status page's address.
    """
    if not redraws(console()):
        printed_s = float("-inf")

        def print_line(training: Training) -> None:
            nonlocal printed_s
            if (now := time.monotonic()) - printed_s >= PLAIN_EVERY_S:
                printed_s = now
                typer.echo(plain_line(training))

        yield print_line
        return
    with Live(console=console(), refresh_per_second=8, transient=True) as live:
        yield lambda training: live.update(picture(training, page))


def plain_line(training: Training) -> str:
    """Return a line like `sync   15 s  loss 0.412  accuracy 93.1 %  88 pushes/s  lag 1.2  clocks 210 211 210 209`."""
    head = f"{training.title:5} {training.elapsed_s:4.0f} s"
    s = training.last
    if training.error:
        return f"{head}  waiting: {training.error}"
    if s is None or not s.workers:
        return f"{head}  {training.held or 'waiting for workers'}"
    clocks = " ".join(str(w.clock) for w in s.workers)
    return f"{head}  {numbers(s)}  clocks {clocks}" + (f"  {training.held}" if training.held else "")


def numbers(s: Sample) -> str:
    """Return loss, accuracy, push rate and lag as one line; unknown ones are left out."""
    parts = [] if s.loss is None else [f"loss {fixed(s.loss)}"]
    if s.accuracy is not None:
        parts.append(f"accuracy {percent(s.accuracy)}")
    parts.append(f"{s.pushes_per_s:4.0f} pushes/s")
    if s.lag is not None:
        parts.append(f"lag {s.lag:.1f}")
    return "  ".join(parts)


def fixed(value: float) -> str:
    """Return a number with three decimals."""
    return f"{value:.3f}" if isfinite(value) else NOT_FINITE


def percent(value: float) -> str:
    """Return a fraction in percent; a number above 1 is in percent already."""
    return f"{value if value > 1 else 100 * value:.1f} %" if isfinite(value) else NOT_FINITE


def sparkline(values: Sequence[float | None], low: float, high: float) -> str:
    """Return the values as bars, sampled to at most `CHART_WIDTH` characters; None and NaN give a blank."""
    if len(values) > CHART_WIDTH:
        values = [values[i * len(values) // CHART_WIDTH] for i in range(CHART_WIDTH)]
    span = (high - low) or 1.0
    top = len(_BARS) - 1
    known = (None if v is None or isnan(v) else v for v in values)
    return "".join(" " if v is None else _BARS[max(0, min(top, round((v - low) / span * top)))] for v in known)


def natural(name: str) -> list[Any]:
    """Return a sort key that puts shard-10 after shard-9."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", name)]


def picture(training: Training, page: str) -> Panel:
    """Return a panel with curves, numbers and a line per worker."""
    s = training.last
    head = Text(f"{training.elapsed_s:5.1f} s   status page {page}", style="bold")
    if s is None:
        return Panel(Group(head, Text(training.error or training.held or "waiting for workers")), title=training.model)
    losses = [x.loss for x in training.samples]
    known = [x for x in losses if x is not None and not isnan(x)]
    top = max(known, default=1.0)
    curves = Table.grid(padding=(0, 1))
    curves.add_row("accuracy", Text(sparkline([x.accuracy for x in training.samples], 0.5, 1.0), style="green"))
    curves.add_row("loss", Text(sparkline(losses, 0.0, top), style="yellow"))
    table = Table("worker", "clock", "loss", "lag", "heartbeat", "", box=None)
    for w in s.workers:
        table.add_row(
            w.name,
            str(w.clock),
            "-" if w.loss is None else fixed(w.loss),
            "-" if w.lag is None else f"{w.lag:.0f}",
            f"{w.heartbeat_age_s:.1f} s",
            "" if w.state == "active" else w.state,
        )
    line = Text(f"{numbers(s)}   version {s.version}   clock {s.clock}")
    if training.error or training.held:
        line = Text(training.error, style="red") if training.error else Text(training.held, style="yellow")
    return Panel(Group(head, Text(), curves, Text(), line, Text(), table), title=training.model)
