"""Checkers: pure functions from a history to the list of its violations, which is empty if there are none.

Each push adds 1.0 to all shared cells of every partition and to its sender's own cell there.  A worker's cell therefore
counts its pushes, a shared cell counts all pushes, and within one version both agree.  A push without an answer may
have been applied at any time after it began, or not at all.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .history import Clock, History, Push, Seen

K = TypeVar("K")


class _Counts:
    """Counts one worker's pushes that had begun, may have been applied, or were acknowledged by a given time."""

    def __init__(self, pushes: Iterable[Push]) -> None:
        possible = [p for p in pushes if p.result != "fail"]
        self._begun = sorted(p.start for p in possible)
        self._over = sorted(p.end for p in possible)
        acked = [p for p in possible if p.result == "ok"]
        self._acked = sorted(p.end for p in acked)
        self._acked_by_start = sorted((p.start, p.end) for p in acked)

    def begun_before(self, t: float) -> int:
        return bisect_left(self._begun, t)

    def acknowledged_by(self, t: float) -> int:
        return bisect_right(self._acked, t)

    def open_between(self, a: float, b: float) -> int:
        """Pushes that may have been applied between `a` and `b`."""
        return bisect_left(self._begun, b) - bisect_left(self._over, a)

    def wholly_between(self, a: float, b: float) -> int:
        """Acknowledged pushes that began after `a` and ended before `b`."""
        at = bisect_left(self._acked_by_start, (a, 0.0))
        return sum(end <= b for _, end in self._acked_by_start[at : bisect_left(self._acked_by_start, (b, 0.0))])


def _by(items: Iterable[Seen], key: Callable[[Seen], K]) -> dict[K, list[Seen]]:
    out: dict[K, list[Seen]] = defaultdict(list)
    for item in items:
        out[key(item)].append(item)
    return out


def _counts(history: History) -> dict[int, _Counts]:
    workers = {p.by for p in history.pushes}
    return {w: _Counts(p for p in history.pushes if p.by == w) for w in workers}


def _where(s: Seen) -> str:
    return f"partition {s.partition} version {s.version} incarnation {s.incarnation} at {s.end:.3f}"


def lost(history: History) -> list[str]:
    """Acknowledged pushes missing from a later pull.  Applies to levels that survive a shard, or if no shard died."""
    counts, out = _counts(history), []
    for s in history.seen:
        for w, c in counts.items():
            acked = c.acknowledged_by(s.start)
            if s.cells[w] < acked:
                out.append(f"{_where(s)}: worker {w} has {acked} acknowledged pushes, its cell says {s.cells[w]:g}")
    return out


def lost_within_incarnations(history: History) -> list[str]:
    """Acknowledged pushes lost within one incarnation, which no level allows."""
    counts, out = _counts(history), []
    for seen in _by(history.seen, lambda s: (s.partition, s.incarnation)).values():
        for a, b in itertools.pairwise(seen):
            for w, c in counts.items():
                must = c.wholly_between(a.end, b.start)
                if b.cells[w] - a.cells[w] < must and b.start >= a.end:
                    out.append(f"{_where(b)}: worker {w} had {must} pushes acknowledged since, its cell rose by less")
    return out


def doubled(history: History) -> list[str]:
    """Cells that count more pushes than were sent, in total or within one incarnation."""
    counts, out = _counts(history), []
    for s in history.seen:
        for w, c in counts.items():
            sent = c.begun_before(s.end)
            if s.cells[w] > sent:
                out.append(f"{_where(s)}: worker {w} has sent {sent} pushes, its cell says {s.cells[w]:g}")
    for seen in _by(history.seen, lambda s: (s.partition, s.incarnation)).values():
        for a, b in itertools.pairwise(seen):
            for w, c in counts.items():
                may = c.open_between(a.start, b.end)
                if b.cells[w] - a.cells[w] > may:
                    out.append(f"{_where(b)}: worker {w}'s cell rose by {b.cells[w] - a.cells[w]:g}, {may} were sent")
    return out


def torn(history: History) -> list[str]:
    """Pulls that show part of an update, and versions seen with two different states."""
    out = []
    for s in history.seen:
        if s.low != s.high:
            out.append(f"{_where(s)}: shared cells from {s.low:g} to {s.high:g}")
        elif sum(s.cells) != s.high:
            out.append(f"{_where(s)}: the workers' cells {s.cells} do not add up to {s.high:g}")
        elif s.high != s.version:
            out.append(f"{_where(s)}: its cells count {s.high:g} updates")
    for seen in _by(history.seen, lambda s: (s.partition, s.incarnation, s.version)).values():
        if len({s.cells for s in seen}) > 1:
            out.append(f"{_where(seen[0])}: seen as {seen[0].cells} and otherwise")
    return out


def went_back(history: History) -> list[str]:
    """Pulls that show a lower version than an earlier pull of the same incarnation."""
    return [
        f"{_where(s)}: version {highest} had been seen before"
        for seen in _by(history.seen, lambda s: (s.partition, s.incarnation)).values()
        for s, highest in _decreases(seen, lambda s: s.version)
    ]


def stale(history: History) -> list[str]:
    """Pulls answered by an incarnation after its successor had been seen.

    Not part of the verdict: a shard that is cut off may do so for a bounded time.
    """
    return [
        f"{_where(s)}: incarnation {highest} had been seen before"
        for seen in _by(history.seen, lambda s: s.partition).values()
        for s, highest in _decreases(seen, lambda s: s.incarnation)
    ]


def _decreases(seen: Sequence[Seen], number: Callable[[Seen], int]) -> Iterator[tuple[Seen, int]]:
    """Yield each pull that began after others had ended with a higher number, and the highest of these."""
    ended = sorted(seen, key=lambda s: s.end)
    highest, i = -1, 0
    for s in sorted(seen, key=lambda s: s.start):
        while i < len(ended) and ended[i].end <= s.start:
            highest = max(highest, number(ended[i]))
            i += 1
        if number(s) < highest:
            yield s, highest


def apart(history: History) -> list[str]:
    """Members' pulls whose partitions show different commits, and commits that differ between partitions."""
    out = []
    for seen in _by((s for s in history.seen if s.epoch), lambda s: s.pull).values():
        if len({s.version for s in seen}) > 1:
            out.append(f"one pull at {seen[0].end:.3f} has versions {sorted({s.version for s in seen})}")
    for seen in _by(history.seen, lambda s: (s.timeline, s.version)).values():
        if len({s.cells for s in seen}) > 1:
            out.append(f"commit {seen[0].version} differs: {sorted({s.cells for s in seen})}")
    return out


def uncommitted(history: History, *, durable: bool) -> list[str]:
    """Pulls that show an older commit than a worker had already been told of.

    If the level does not survive a shard, the model may go back to an earlier clock under a higher timeline.
    """
    out = []
    told = sorted(history.clocks, key=lambda c: c.end)
    highest: dict[int, int] = defaultdict(int)
    i = 0
    for s in history.seen:
        while i < len(told) and told[i].end <= s.start:
            timeline = 0 if durable else told[i].timeline
            highest[timeline] = max(highest[timeline], told[i].clock)
            i += 1
        committed = highest[0 if durable else s.timeline]
        if s.version < committed:
            out.append(f"{_where(s)}: a worker had been told of commit {committed}")
    timelines = {c.timeline for c in history.clocks} | {s.timeline for s in history.seen}
    if durable and len(timelines) > 1:
        out.append(f"timelines {sorted(timelines)}: the model went back to an earlier clock")
    return out


def overcommitted(history: History) -> list[str]:
    """Pulls of a member that show a commit beyond its own clock, for which it has not pushed yet."""
    out = []
    last: dict[int, Clock] = {}
    events: list[Clock | Seen] = sorted([*history.clocks, *history.seen], key=lambda e: e.start)
    for e in events:
        if isinstance(e, Clock):
            last[e.by] = e
        elif (c := last.get(e.by)) and (c.timeline, c.epoch) == (e.timeline, e.epoch) and e.version > c.clock:
            out.append(f"{_where(e)}: worker {e.by} is at clock {c.clock}")
    return out


@dataclass(frozen=True)
class Verdict:
    """The violations found in the history of one model, and how many operations were checked."""

    acknowledged: int
    in_doubt: int
    dropped: int
    pulls: int
    lost: list[str]
    doubled: list[str]
    torn: list[str]
    went_back: list[str]
    apart: list[str]

    @property
    def wrong(self) -> list[str]:
        """The first five violations of each kind."""
        kinds = ("lost", "doubled", "torn", "went_back", "apart")
        return [f"{kind}: {line}" for kind in kinds for line in getattr(self, kind)[:5]]

    def __str__(self) -> str:
        pushes = f"acknowledged {self.acknowledged}, in doubt {self.in_doubt}, dropped {self.dropped}"
        return "\n".join([f"{pushes}, pulls {self.pulls}", *self.wrong])


def judge(history: History, *, mode: str, durable: bool) -> Verdict:
    """Return the verdict on the records of one model; `durable`: nothing acknowledged may be lost."""
    sync = mode == "sync"
    if sync:
        gone, more = uncommitted(history, durable=durable), overcommitted(history)
    else:
        gone = lost_within_incarnations(history) + (lost(history) if durable else [])
        more = doubled(history)
    return Verdict(
        history.acknowledged(),
        history.in_doubt(),
        history.dropped(),
        len({s.pull for s in history.seen}),
        gone,
        more,
        torn(history),
        went_back(history),
        apart(history) if sync else [],
    )
