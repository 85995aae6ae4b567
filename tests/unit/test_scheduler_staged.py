"""The scheduler's core when shards report a worker's clock for it, with the push that ends an iteration."""

from typing import Any

import pytest

from paramserver.core.scheduler import io
from paramserver.limits import CLOCKS_AHEAD_MAX

from .scheduling import Driver

SYNC: dict[str, Any] = {"consistency": {"mode": "sync"}}


def told(
    d: Driver, worker: Any, shard: str, *, clock: int = 1, seq: int = 1, shards: int = 2, other: Any = None
) -> None:
    """Report that the shard has staged its part of the push that ends the worker's iteration."""
    model = d.core.read.model("m")
    said = {
        "shard": shard,
        "shard_epoch": d.shards[shard],
        "model": "m",
        "generation": model["generation"],
        "worker": worker["worker"],
        "epoch": worker["epoch"],
        "seq": seq,
        "clock": clock,
        "timeline": model["timeline"],
        "shards": shards,
    }
    d.do(io.ClockStaged(**said | (other or {})))


def test_a_clock_counts_when_every_shard_of_its_push_has_told_it() -> None:
    """A clock counts once every shard of its last push has reported it, without a report by the worker."""
    d = Driver.with_model(**SYNC)
    a = d.join("a")

    told(d, a, "s0")
    told(d, a, "s0")
    assert d.commits() == []
    told(d, a, "s1")

    assert [(c["t"], c["contributions"]) for c in d.commits()] == [(0, [["m/a", 1, 0, 0]])]
    told(d, a, "s0", clock=2, seq=2, shards=1)
    assert [c["t"] for c in d.commits()] == [0, 1]


def test_what_is_too_far_ahead_is_not_counted() -> None:
    """A shard's report of a clock more than CLOCKS_AHEAD_MAX ahead is ignored, as no request waits for a refusal."""
    d = Driver.with_model(consistency={"mode": "sync", "min_workers": 2})
    a, _ = d.join("a"), d.join("b")
    d.clock(a, CLOCKS_AHEAD_MAX, wait_s=0.0)

    told(d, a, "s0", clock=CLOCKS_AHEAD_MAX + 1, shards=1)

    assert d.core.read.worker("m", "m/a", d.now)["clock"] == CLOCKS_AHEAD_MAX


def test_it_waits_for_the_others_as_any_report() -> None:
    """A commit waits for all workers, and lists those that reported themselves and those for which a shard did."""
    d = Driver.with_model(**SYNC)
    a, b = d.join("a"), d.join("b")

    told(d, a, "s0", shards=1)
    assert d.commits() == []
    waiting = d.clock(b, 1)

    assert [c[0] for c in d.commits()[0]["contributions"]] == ["m/a", "m/b"]
    assert d.result(waiting)["released"]


def test_parts_of_two_pushes_do_not_make_one() -> None:
    """Reports for two pushes of a clock do not add up: a shard with the first may lack the one that replaced it."""
    d = Driver.with_model(**SYNC)
    a = d.join("a")

    told(d, a, "s0", seq=1)
    told(d, a, "s1", seq=2)
    assert d.commits() == []
    told(d, a, "s0", seq=2)

    assert len(d.commits()) == 1


@pytest.mark.parametrize(
    "other",
    [{"shard_epoch": 9}, {"generation": 9}, {"timeline": 9}, {"epoch": 9}, {"worker": "m/z"}, {"clock": 2},
     {"clock": 0}, {"model": "z"}, {"shard": "s9"}],
)  # fmt: skip
def test_what_is_not_of_the_present_is_left_alone(other: dict[str, Any]) -> None:
    """A report from or for another incarnation, or with another timeline or clock than the present ones, is ignored."""
    d = Driver.with_model(**SYNC)
    a = d.join("a")

    told(d, a, "s0", shards=1, other=other)

    assert d.commits() == []


def test_a_shard_that_was_given_up_reports_nothing_any_more() -> None:
    """A report by a dead shard is ignored: its partitions have a new owner, which does not have what it has staged."""
    d = Driver.with_model(**SYNC, ack="journaled")
    a = d.join("a")
    epoch = d.shards["s1"]
    for _ in range(8):
        d.now += 1
        d.beat("s0")
        d.ask(lambda n: io.WorkerHeartbeat(n, "m", a["worker"], a["epoch"]))
        d.do(io.Tick())

    told(d, a, "s1", shards=1, other={"shard_epoch": epoch})

    assert d.commits() == []


def test_modes_without_clocks_leave_it_alone() -> None:
    """A shard's report of a clock changes nothing in a model that is not in sync."""
    d = Driver.with_model()
    a = d.join("a")

    told(d, a, "s0", shards=1)

    assert d.core.read.worker("m", a["worker"], d.now)["clock"] == 0


def test_a_commit_says_that_workers_are_to_ask() -> None:
    """While an evaluation waits or a worker drains, commits have `asks` set: workers report clocks themselves."""
    d = Driver.with_model(**SYNC)
    a, b = d.join("a"), d.join("b")

    def step(clock: int) -> bool:
        for w in (a, b):
            told(d, w, "s0", clock=clock, seq=clock, shards=1)
        return bool(d.commits()[-1]["asks"])

    assert not step(1)
    d.ask(lambda n: io.RequestEvaluation(n, "m"))
    assert step(2)
    task = d.result(d.lease(a, "evaluate"))["task"]
    d.ask(lambda n: io.TaskDone(n, "m", a["worker"], a["epoch"], task["id"], {"accuracy": 1.0}))
    assert not step(3)
    d.ask(lambda n: io.DrainWorker(n, "m", b["worker"]))
    assert step(4)
