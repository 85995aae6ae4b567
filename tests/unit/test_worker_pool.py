"""A member of the worker pool with a scripted scheduler."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import paramserver as ps
from paramserver import limits
from paramserver.errors import AuthError, FencedError, problem
from paramserver.net.calls import Response, error_of
from paramserver_node.unwind import ENDING, Terminated
from paramserver_worker import entry, pool
from paramserver_worker.pool import PoolMember

from .session_node import Node, no
from .sharding import Now, answered


class Over(Exception):
    """Raised when the member reports its place, which ends the test."""


class Scheduler:
    """Gives out one place, then forgets the member and refuses its first attempt to join again."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.joined_again = threading.Event()

    def request(self, method: str, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        self.calls.append(method)
        if path.startswith("/runs/"):
            raise Over
        times = self.calls.count(method)
        if method == "POST":
            if times == 2:
                raise problem("invalid_field", "name: is not allowed any more")
            return {"member": "w", "epoch": times}
        if times == 2:
            raise problem("not_found", "no member 'w'")
        if times > 2:
            self.joined_again.set()
        place = {"id": "r", "place": 0, "entry": "json:dumps", "model": "m"}
        return {"state": "run", "run": place}


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_member_that_may_not_rejoin_keeps_trying_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that is refused as it rejoins goes on working, sending heartbeats and trying to join."""
    scheduler: Any = Scheduler()
    joined: list[bool] = []
    monkeypatch.setattr(limits, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(entry, "run", lambda *_, **__: joined.append(scheduler.joined_again.wait(5.0)))

    with pytest.raises(Over):
        PoolMember(scheduler, "w", ["json"]).work()

    assert joined == [True]


class RefusingScheduler:
    """Gives out one place and then refuses the member's token."""

    def __init__(self) -> None:
        self.refused = threading.Event()
        self.heartbeats = 0

    def request(self, method: str, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        if method == "POST" and path == "/pool":
            return {"member": "w", "epoch": 1}
        self.heartbeats += method == "PUT"
        if self.heartbeats <= 1:
            return {"state": "run", "run": {"id": "r", "place": 0, "entry": "json:dumps", "model": "m"}}
        if self.heartbeats > 2:
            self.refused.set()
        raise problem("unauthorized", "the token is invalid, expired or revoked")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_member_whose_token_is_refused_ends_after_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member whose token is refused works its place to the end, then fails with the refusal instead of retrying."""
    scheduler: Any = RefusingScheduler()
    worked: list[bool] = []
    monkeypatch.setattr(limits, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(entry, "run", lambda *_, **__: worked.append(scheduler.refused.wait(5.0)))

    with pytest.raises(AuthError, match="revoked"):
        PoolMember(scheduler, "w", ["json"]).work()

    assert worked == [True]


class PatientScheduler:
    """Gives out its place again and again, as it does however often a function fails while the shards are away."""

    def __init__(self) -> None:
        self.attempts = 0

    def request(self, method: str, path: str, body: Any = None, **__: Any) -> dict[str, Any]:
        if path == "/pool":
            return {"member": "w", "epoch": 1}
        if path.startswith("/runs/"):
            assert "boom" in body["error"]
            self.attempts += 1
        if self.attempts == 3:
            raise Over
        return {"state": "run", "run": {"id": "r", "place": 0, "entry": "json:dumps", "model": "m"}}


def test_a_function_that_raises_at_once_is_not_called_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two attempts the member pauses: an outage of the shards, in which none counts, may take hours."""
    scheduler: Any = PatientScheduler()
    pauses: list[float] = []

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(entry, "run", fail)
    monkeypatch.setattr("paramserver_worker.pool.time.sleep", pauses.append)

    with pytest.raises(Over):
        PoolMember(scheduler, "w", ["json"]).work()

    assert pauses == [pool.RESTART_PAUSE_S] * 2


class AbsentScheduler:
    """Gives out one place, takes no report of it, and gives the place to another member after the third."""

    def __init__(self, code: str) -> None:
        self.code, self.reports = code, 0

    def request(self, method: str, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        if path == "/pool":
            return {"member": "w", "epoch": 1}
        if path.startswith("/runs/"):
            self.reports += 1
            raise problem(self.code, "the report is not taken", retryable=False)
        if self.reports < 3:
            return {"state": "run", "run": {"id": "r", "place": 0, "entry": "json:dumps", "model": "m"}}
        if threading.current_thread() is threading.main_thread():
            raise Over
        return {"state": "idle", "run": None}


def worked(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Work for this scheduler until it says `Over`; return the calls of its function."""
    calls: list[str] = []
    monkeypatch.setattr(limits, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(pool, "REPORT_PAUSE_S", 0.05)
    monkeypatch.setattr(entry, "run", lambda *_, **__: calls.append("called"))
    with pytest.raises(Over):
        PoolMember(scheduler, "w", ["json"]).work()
    return calls


@pytest.mark.parametrize("code", ["storage_unavailable", "unreachable", "in_doubt"])
def test_a_report_is_repeated_only_while_the_place_is_the_members(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member repeats a report that nobody could take, and asks for work once the place is no longer its own."""
    scheduler = AbsentScheduler(code)
    calls = worked(scheduler, monkeypatch)

    assert scheduler.reports >= 3
    assert calls == ["called"]


class ForgetfulScheduler:
    """Forgets its member before the first report, and gives the place back to it once it has joined again."""

    def __init__(self, code: str) -> None:
        self.code, self.joins, self.reports = code, 0, 0

    def request(self, method: str, path: str, body: Any = None, **__: Any) -> dict[str, Any]:
        if path == "/pool":
            self.joins += 1
            return {"member": "w", "epoch": self.joins}
        self.reports += path.startswith("/runs/")
        if self.reports and body["epoch"] < 2:
            raise problem(self.code, "the lease has expired", epoch=1)
        if self.reports < 2:
            return {"state": "assigned", "run": {"id": "r", "place": 0, "entry": "json:dumps", "model": "m"}}
        if threading.current_thread() is threading.main_thread() and method == "PUT":
            raise Over
        return {"state": "idle", "run": None}


@pytest.mark.parametrize("code", ["fenced", "unknown_worker"])
def test_what_is_done_is_not_done_again_by_a_member_that_has_to_join_again(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member whose lease ended before its report joins again, and reports the place that it is given back."""
    scheduler = ForgetfulScheduler(code)
    calls = worked(scheduler, monkeypatch)

    assert (scheduler.joins, calls) == (2, ["called"])


class AwayScheduler:
    """Is unreachable at one address or the other, but for its fifth heartbeat; the tenth ends the test."""

    def __init__(self) -> None:
        self.heartbeats = 0

    def request(self, method: str, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        if method == "POST":
            return {"member": "w", "epoch": 1}
        self.heartbeats += 1
        if self.heartbeats == 10:
            raise Over
        if self.heartbeats == 5:
            return {"state": "idle", "run": None}
        raise problem("unreachable", f"http://{'ab'[self.heartbeats % 2]} did not answer within 2 s")


def test_an_outage_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """However often a member asks in vain, an outage is two lines of its log: the beginning and the end."""
    monkeypatch.setattr(pool, "IDLE_POLL_S", 0.0)
    scheduler: Any = AwayScheduler()

    with caplog.at_level("INFO", logger="paramserver.worker"), pytest.raises(Over):
        PoolMember(scheduler, "w", ["json"]).work()

    told = [r.getMessage().split()[0] for r in caplog.records]
    assert told == ["pool.joined", "pool.unreachable", "pool.back", "pool.unreachable"]


class ReplacedScheduler:
    """Behind a proxy that answers in its place with this status: a join, heartbeats, and a report, once each."""

    def __init__(self, status: int) -> None:
        self.status, self.page = status, {"join", "idle", "work", "report"}
        self.joins = self.reports = 0

    def request(self, method: str, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        if path == "/pool":
            self._maybe_page("join")
            self.joins += 1
            return {"member": "w", "epoch": self.joins}
        if path.startswith("/runs/"):
            self.reports += 1
            self._maybe_page("report")
            raise Over
        self._maybe_page("idle" if threading.current_thread() is threading.main_thread() else "work")
        return {"state": "run", "run": {"id": "r", "place": 0, "entry": "json:dumps", "model": "m"}}

    def _maybe_page(self, when: str) -> None:
        if when in self.page:
            self.page.remove(when)
            raise error_of(Response(self.status, {}, b"<html>"))


@pytest.mark.parametrize("status", [302, 401, 403, 404, 409])
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_page_in_place_of_the_scheduler_is_an_outage(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a proxy answers for itself, a member neither ends nor joins again for it, and reports its work again."""
    monkeypatch.setattr(pool, "IDLE_POLL_S", 0.0)
    scheduler = ReplacedScheduler(status)

    assert worked(scheduler, monkeypatch) == ["called"]
    assert (scheduler.joins, scheduler.reports) == (1, 2)


class SharedNameScheduler:
    """Gives out one place; then another process has joined under the member's name."""

    def __init__(self, first_join: str = "") -> None:
        self.joins = 0
        self.told_twice = threading.Event()
        self._first_join = first_join
        self._heartbeats = 0

    def request(self, method: str, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        if path == "/pool":
            self.joins += 1
            if self._first_join and self.joins == 1:
                raise problem(self._first_join, "no answer came")
            return {"member": "w", "epoch": self.joins}
        if path.startswith("/runs/"):
            raise problem("fenced", "pool member 'w' is no longer a member", epoch=self.joins + 1)
        self._heartbeats += 1
        if self._heartbeats == 1:
            return {"state": "run", "run": {"id": "r", "place": 0, "entry": "json:dumps", "model": "m"}}
        if self._heartbeats > 3:
            self.told_twice.set()
        raise problem("fenced", "pool member 'w' is no longer a member", epoch=self.joins + 1)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_member_whose_name_another_process_has_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that another process of its name replaces does not replace that one in turn, and says what to do."""
    scheduler: Any = SharedNameScheduler()
    worked: list[bool] = []
    monkeypatch.setattr(limits, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(entry, "run", lambda *_, **__: worked.append(scheduler.told_twice.wait(5.0)))

    with pytest.raises(FencedError, match="another process has joined the pool as 'w'"):
        PoolMember(scheduler, "w", ["json"]).work()

    assert worked == [True]
    assert scheduler.joins == 1


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_function_whose_place_another_process_of_the_name_has_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that works on at a place which went to another process of the name has as long as at any lost one."""
    scheduler: Any = SharedNameScheduler()
    exits: list[int] = []
    ended = threading.Event()

    def end(status: int) -> None:
        exits.append(status)
        ended.set()

    monkeypatch.setattr(limits, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(pool, "STOP_GRACE_S", 0.0)
    monkeypatch.setattr("paramserver_worker.pool.os._exit", end)
    monkeypatch.setattr("paramserver_worker.pool.logging.shutdown", lambda: None)
    monkeypatch.setattr(entry, "run", lambda *_, **__: ended.wait(5.0))

    with pytest.raises(FencedError):
        PoolMember(scheduler, "w", ["json"]).work()

    assert exits[0] == pool.EXIT_OVERSTAYED


@pytest.mark.parametrize(
    ("first_join", "late_s", "joins"), [("in_doubt", 30.0, 3), ("in_doubt", 0.0, 2), ("no_leader", 30.0, 2)]
)
def test_a_member_takes_its_own_late_join_for_no_other_process(
    monkeypatch: pytest.MonkeyPatch, first_join: str, late_s: float, joins: int
) -> None:
    """For a while after a join that may have been done, a higher epoch may be its own: it joins again, once."""
    monkeypatch.setattr(limits, "LATE_JOIN_S", late_s)
    monkeypatch.setattr(limits, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(pool, "REPORT_PAUSE_S", 0.01)
    monkeypatch.setattr(pool, "IDLE_POLL_S", 0.0)
    monkeypatch.setattr(entry, "run", lambda *_, **__: None)
    scheduler: Any = SharedNameScheduler(first_join)

    with pytest.raises(FencedError):
        PoolMember(scheduler, "w", ["json"]).work()

    assert scheduler.joins == joins


def test_a_function_that_ends_as_its_own_child_did_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That no handler exits with, 143 is a status like any other: somebody ended what the function had started."""
    told: list[str] = []

    class Listener(PatientScheduler):
        def request(self, method: str, path: str, body: Any = None, **others: Any) -> dict[str, Any]:
            if path.startswith("/runs/"):
                told.append(body["error"])
                raise Over
            return super().request(method, path, body, **others)

    def train(*_: Any, **__: Any) -> None:
        sys.exit(143)

    scheduler: Any = Listener()
    monkeypatch.setattr(entry, "run", train)
    with pytest.raises(Over):
        PoolMember(scheduler, "w", ["json"]).work()
    assert told == ["json:dumps ended with sys.exit(143)"]


def stop(status: int, number: int, frame: FrameType | None) -> None:
    """Exit with this status: a handler, once it is given that."""
    sys.exit(status)


class Stopped(Exception):
    """What a script raises to leave its loop, wherever it is."""


class Script:
    """Handlers of scripts."""

    def stop(self, *_: Any) -> None:
        """Raise an exception of the script's own."""
        raise Stopped

    def __call__(self, number: int, _: FrameType | None) -> None:
        """The same."""
        raise Stopped


@contextmanager
def handling(handler: Any) -> Iterator[None]:
    """Handle SIGTERM in the block, as careful libraries do."""
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def terminated(handler: Any, how: str) -> None:
    """Be told to end in a function that handles this itself."""
    if how == "set":
        signal.signal(signal.SIGTERM, handler)
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "undone":
        with handling(handler):
            os.kill(os.getpid(), signal.SIGTERM)
    else:
        try:
            terminated(handler, "set")
        except BaseException as e:
            raise RuntimeError("the training has ended") from e


@pytest.mark.parametrize("how", ["set", "undone", "followed"])
@pytest.mark.parametrize(
    "handler",
    [lambda *_: sys.exit(143), partial(stop, 0), Script().stop, Script()],
    ids=["143", "0", "method", "object"],
)
def test_a_function_whose_own_handler_ends_it_ends_its_worker(
    monkeypatch: pytest.MonkeyPatch, handler: Any, how: str
) -> None:
    """A function with a handler as scripts have it leaves its worker one that can be told to end.

    Its exit counted as the function's failure or, with status 0, as its place being done.
    """
    scheduler: Any = PatientScheduler()
    monkeypatch.setattr(entry, "run", lambda *_, **__: terminated(handler, how))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated, match="143"):
        PoolMember(scheduler, "w", ["json"]).work()
    assert scheduler.attempts == 0
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", ENDING)
def test_the_handlers_of_a_function_go_with_it(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """A function's handler that only sets a flag is called for no signal that comes once it has returned."""
    scheduler: Any = Scheduler()
    monkeypatch.setattr(entry, "run", lambda *_, **__: signal.signal(number, lambda *_: None))
    before = signal.getsignal(number)
    with pytest.raises(Over):
        PoolMember(scheduler, "w", ["json"]).work()
    assert signal.getsignal(number) == before


class OccupiedScheduler:
    """Gives out one place, whose rank another worker has while so many workers try to join with it."""

    def __init__(self, refusals: int) -> None:
        node = Node()
        node.script["/models/m/workers"] = [no("conflict", where="rank")] * refusals
        self.client: Any = answered(ps.Client, node)
        self.client.transport = SimpleNamespace(run=lambda call, _=None: self.client.run(call))
        self.model, self.joins = self.client.model, lambda: len(node.bodies("/models/m/workers"))
        self.reports: list[str | None] = []

    def request(self, _: str, path: str, body: Any = None, **__: Any) -> dict[str, Any]:
        if path == "/pool":
            return {"member": "w", "epoch": 1}
        if path.startswith("/runs/"):
            self.reports.append(body["error"])
            raise Over
        place = {"id": "r", "place": 1, "entry": "json:dumps", "model": "m", "worker": "r/w1", "rank": 1, "workers": 2}
        return {"state": "assigned", "run": place}


@pytest.mark.parametrize("lasts", [False, True])
def test_a_rank_that_a_killed_worker_still_has_is_waited_for(lasts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place whose rank is another worker's waits for as long as a lease, then says who is to give way, and how.

    Four joins refused in as many seconds failed the run, with the hint to join without a rank.
    """
    scheduler: Any = OccupiedScheduler(1000 if lasts else 2)
    now, calls = Now(), list[str]()
    began_s = now.s

    def pause(seconds: float) -> None:
        now.s += seconds

    monkeypatch.setattr(entry, "time", SimpleNamespace(monotonic=now, sleep=pause))
    monkeypatch.setattr(entry, "load", lambda *_: lambda worker: calls.append(worker.name))
    with pytest.raises(Over):
        PoolMember(scheduler, "w", ["json"]).work()

    (error,) = scheduler.reports
    if lasts:
        assert "that worker is in no run: end it, or give it a rank of at least 2" in error
        assert (now.s - began_s >= entry.RANK_WAIT_S, calls) == (True, [])
    else:
        assert (error, scheduler.joins(), calls) == (None, 3, ["m/w0"])
