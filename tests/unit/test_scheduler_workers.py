"""Workers in the scheduler: heartbeats, stored state, joins, draining and clock reports."""

from functools import partial
from typing import Any

import pytest
from tests.refusals import refused_with

from paramserver import limits
from paramserver.core.fields import INTEGER_MAX
from paramserver.core.scheduler import io
from paramserver.core.scheduler.cluster import FLOORS_MAX
from paramserver.errors import ConflictError, NotFoundError, PsError, RequestError
from paramserver.limits import CLOCKS_AHEAD_MAX, CLOCKS_AT_ONCE_MAX
from paramserver_scheduler import bodies

from .scheduling import Driver, code


def beat(d: Driver, worker: Any, **fields: Any) -> Any:
    """Send a heartbeat of the worker; return the reply."""
    return d.ask(lambda n: io.WorkerHeartbeat(n, "m", worker["worker"], worker["epoch"], **fields))


@pytest.mark.parametrize("wrong", [{"metrics": {"x" * 65: 1.0}}, {"state": [0] * 30_000}, {"clock": -1}])
def test_a_heartbeat_that_says_something_wrong_is_a_sign_of_life(wrong: dict[str, Any]) -> None:
    """An invalid heartbeat is refused, but renews the worker's lease all the same."""
    d = Driver.with_model()
    a = d.join("a")
    d.wait(4.0)

    with pytest.raises(RequestError) as refused:
        beat(d, a, **wrong)
    assert refused.value.code == "invalid_field"
    assert [refused.value.members["where"]] == list(wrong)
    d.wait(4.0)

    assert d.core.read.worker("m", a["worker"], d.now)["alive"]


def test_a_heartbeat_tells_whether_settings_have_changed_that_workers_go_by() -> None:
    """The answer to a heartbeat has the document's `settings_tag`: another one whenever clients behave differently.

    Each worker then fetches the document, so what changes often, as the learning rate and the live workers, is not in
    it.
    """
    d = Driver.with_model(optimizer={"name": "sgd", "linear_scaling": True})
    a = d.join("a")

    def tag() -> int:
        told = beat(d, a)["settings_tag"]
        assert told == d.core.read.model("m")["settings_tag"]
        return int(told)

    first = tag()
    d.join("b")
    d.ask(lambda n: io.PatchModel(n, "m", {"optimizer": {"lr": 0.25}}))
    assert tag() == first
    tags = {first}
    patches: list[dict[str, Any]] = [
        {"consistency": {"mode": "ssp"}},
        {"optimizer": {"clip_norm": 1.0}},
        {"params": {"w": {"trainable": False}}},
        {"consistency": {"mode": "async"}},
    ]
    for patch in patches:
        d.ask(partial(io.PatchModel, model="m", patch=patch))
        tags.add(tag())
    assert len(tags) == 1 + len(patches)


def test_a_worker_is_told_whether_its_rank_is_the_lowest() -> None:
    """The live worker of the lowest rank is the first one; if it leaves or dies, the next one learns it."""
    d = Driver.with_model()
    b = d.join("b", rank=2)
    a = d.join("a")
    c = d.join("c")
    assert [w["first"] for w in (b, a, c)] == [True, True, False]
    assert [beat(d, w)["first"] for w in (a, b, c)] == [True, False, False]

    d.ask(lambda n: io.LeaveWorker(n, "m", a["worker"], a["epoch"]))
    assert [beat(d, w)["first"] for w in (b, c)] == [False, True]
    for _ in range(3):
        d.wait(2.0)
        last = beat(d, b)["first"]
    assert last is True


def test_shards_are_told_who_is_live_as_soon_as_that_changes() -> None:
    """Each join and each death is published at once: shards drop by it what workers have staged that are gone."""
    d = Driver.with_model()
    a, b = d.join("a"), d.join("b")
    d.ask(lambda n: io.LeaveWorker(n, "m", a["worker"], a["epoch"]))
    told = [doc["workers"] for doc in d.published if doc["type"] == "roster"]
    assert told == [{a["worker"]: [1, 0]}, {a["worker"]: [1, 0], b["worker"]: [1, 1]}, {b["worker"]: [1, 1]}]


def test_a_report_that_another_has_overtaken_changes_nothing() -> None:
    """A clock is absolute, so a report that arrives after one of a later clock does not set the worker back."""
    d = Driver.with_model()
    a = d.join("a")
    beat(d, a, clock=5)

    assert beat(d, a, clock=3)["min_clock"] == 5
    assert d.core.read.worker("m", a["worker"], d.now)["clock"] == 5


def test_a_workers_state_is_known_after_a_restart() -> None:
    """A worker's state survives a scheduler restart, whether the worker lives on or joins again."""
    d = Driver.with_model()
    beat(d, d.join("a"), state={"epoch": 7})

    d.restart()

    assert d.core.read.workers("m", d.now, kept=True)[0]["kept"] == {"epoch": 7}
    assert d.join("a")["state"] == {"epoch": 7}


def test_a_worker_that_left_in_good_order_is_not_called_dead() -> None:
    """A worker that left is listed as left, one whose lease ran out as dead, also by the next leader."""
    d = Driver()
    d.model()
    a, _, b = d.join("a"), d.join("b"), d.join("c", rank=7)
    d.ask(lambda n: io.LeaveWorker(n, "m", a["worker"], a["epoch"]))
    d.wait(limits.LEASE_S - 1)
    beat(d, b)
    d.wait(2)
    for _ in range(2):
        assert {w["worker"]: w["state"] for w in d.core.read.workers("m", d.now)} == {
            "m/a": "left",
            "m/b": "dead",
            "m/c": "active",
        }
        d.restart()
    d.join("a")
    assert d.core.read.worker("m", "m/a", d.now)["state"] == "active"


def test_the_states_of_all_workers_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that does not fit with all of live workers is refused, also after a restart; a smaller one is kept.

    Those of a deleted model do not count.
    """
    monkeypatch.setattr(limits, "WORKER_STATES_MAX", 100_000)
    d = Driver.with_model()
    d.model(name="other")
    a, b = d.join("a"), d.join("b")
    beat(d, a, state="x" * 60_000)
    for _ in range(2):
        with pytest.raises(RequestError) as refused:
            beat(d, b, state=["x" * 50_000])
        assert (refused.value.code, refused.value.members["where"]) == ("too_large", "state")
        d.restart()
    beat(d, b, state="x" * 30_000)
    beat(d, a, state="x" * 10_000)

    beat(d, b, state=["x" * 50_000])

    d.ask(lambda n: io.DeleteModel(n, "m"))
    c = d.ask(lambda n: io.JoinWorker(n, "other", "c"))
    d.ask(lambda n: io.WorkerHeartbeat(n, "other", c["worker"], c["epoch"], state="x" * 90_000))


def test_states_of_workers_that_are_gone_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a state lacks the room, those of dead workers of any model go, the one unheard of longest first.

    None goes if that is not enough, or for a restore that brings states of its own; nor does what a restore brought.
    """
    monkeypatch.setattr(limits, "WORKER_STATES_MAX", 101_000)
    d = Driver.with_model()
    d.model(name="other")
    d.ask(lambda n: io.ModelRestored(n, "m", 1, workers={"m/r": "x" * 20_000}))
    for name in "cab":
        gone = d.ask(lambda n, w=name: io.JoinWorker(n, "m" if w == "a" else "other", w))  # type: ignore[misc]
        at = gone["worker"].partition("/")[0], gone["worker"], gone["epoch"]
        d.ask(lambda n, w=at: io.WorkerHeartbeat(n, *w, state="x" * 20_000))  # type: ignore[misc]
        d.ask(lambda n, w=at: io.LeaveWorker(n, *w))  # type: ignore[misc]
        d.now += 1.0

    def kept() -> set[str]:
        listed = [w for model in ("m", "other") for w in d.core.read.workers(model, d.now, kept=True)]
        return {w["worker"] for w in listed if w["kept"] is not None}

    new = d.join("new")
    with pytest.raises(RequestError):
        beat(d, new, state="x" * 90_000)
    assert kept() == {"m/r", "m/a", "other/b", "other/c"}
    for size, left in ((40_000, {"m/r", "m/a", "other/b"}), (60_000, {"m/r", "other/b"})):
        beat(d, new, state="x" * size)
        for _ in range(2):
            assert kept() == left | {"m/new"}
            d.restart()
    d.ask(lambda n: io.StartRestore(n, "m", sizes={"m/r": 30_000}))
    assert kept() == {"m/r", "other/b", "m/new"}
    d.ask(lambda n: io.ModelRestored(n, "m", 1, workers={"m/r": "x" * 30_000}))
    assert kept() == {"m/r", "m/new"}


def test_what_a_restore_brings_makes_room_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore brings states in pieces, of workers that have left, too: each stays until its worker has joined."""
    monkeypatch.setattr(limits, "WORKER_STATES_MAX", 61_000)
    d = Driver.with_model()
    d.model(name="other")
    for model, name in (("m", "a"), ("m", "b"), ("other", "c")):
        gone = d.ask(lambda n, m=model, w=name: io.JoinWorker(n, m, w))  # type: ignore[misc]
        at = model, gone["worker"], gone["epoch"]
        d.ask(lambda n, w=at: io.WorkerHeartbeat(n, *w, state="x" * 10_000))  # type: ignore[misc]
        d.ask(lambda n, w=at: io.LeaveWorker(n, *w))  # type: ignore[misc]
        d.now += 1.0

    def sizes() -> list[int]:
        rosters = [d.core._c.models[m].roster for m in ("m", "other")]
        return [w.state_size // 1000 for roster in rosters for w in roster]

    for name in ("m/a", "m/b"):
        d.ask(lambda n, w=name: io.ModelRestored(n, "m", 1, workers={w: "x" * 27_000}))  # type: ignore[misc]
    assert sizes() == [27, 27, 0]
    d.restart()
    new = d.join("new")
    with pytest.raises(RequestError):
        beat(d, new, state="x" * 20_000)
    taken = d.join("a")
    d.ask(lambda n: io.LeaveWorker(n, "m", taken["worker"], taken["epoch"]))
    beat(d, new, state="x" * 20_000)
    assert sizes() == [0, 27, 20, 0]


def test_a_state_counts_as_kept_only_once_it_is_stored() -> None:
    """Answers to heartbeats wait for no store, so a worker is told to send its state again while Redis may lack it."""
    d = Driver.with_model()
    a = d.join("a")

    def kept(state: Any) -> bool:
        beat = d.ask(lambda n: io.WorkerHeartbeat(n, "m", a["worker"], a["epoch"], state=state))
        return bool(beat["state_kept"])

    assert [kept(None), kept({"seen": 1}), kept({"seen": 1})] == [True, False, True]
    d.do(io.StorageChanged("Redis does not answer"))
    assert [kept({"seen": 2}), kept({"seen": 2}), kept(None)] == [False, False, True]
    d.do(io.StorageChanged(""))
    assert kept({"seen": 2})


@pytest.mark.parametrize("shown", ["the state that is kept", "the end of the run"])
def test_a_heartbeat_that_shows_what_may_not_be_stored_waits_for_redis(shown: str) -> None:
    """While Redis hangs and nobody knows it yet, no worker hears of what a new leader would not know.

    All other heartbeats are answered at once, and so are these while Redis is known to be away: they keep leases.
    """
    d = Driver.with_model()
    d.ask(lambda n: io.CreateRun(n, "m", "x:y", stop={"metric": {"name": "loss", "at_most": 0.1}}))
    d.ask(lambda n: io.JoinPool(n, "p", ("x",)))
    w = d.join("run-1/w0")

    def answer(**fields: Any) -> io.Reply:
        (reply,) = [
            effect
            for effect in d.core.handle(io.WorkerHeartbeat(99, "m", w["worker"], w["epoch"], **fields), d.now)
            if isinstance(effect, io.Reply)
        ]
        return reply

    assert not answer(state={"seen": 1}, metrics={"loss": 0.5}).waits
    telling: dict[str, Any] = {"state": {"seen": 1}} if shown == "the state that is kept" else {"metrics": {"loss": 0}}
    told = answer(**telling)
    assert told.waits
    assert isinstance(told.outcome, dict)
    assert told.outcome["state_kept"]
    assert (told.outcome["state"] == "stop") is (shown == "the end of the run")

    d.do(io.StorageChanged("Redis does not answer"))
    told = answer(**telling)
    assert not told.waits
    assert isinstance(told.outcome, dict)
    assert told.outcome["state"] == ("paused" if shown == "the end of the run" else "active")


def test_a_state_that_has_not_changed_is_not_stored_again() -> None:
    """A heartbeat with an unchanged state stores nothing, because a plain client may send it with every heartbeat."""
    d = Driver.with_model()
    a = d.join("a")
    beat(d, a, state={"epoch": 7})

    effects = d.core.handle(io.WorkerHeartbeat(99, "m", a["worker"], 1, state={"epoch": 7}), d.now)

    assert not [e for e in effects if isinstance(e, io.Store)]


def test_a_worker_that_drains_goes_on_to_after_a_restart() -> None:
    """A worker asked to drain still drains after a scheduler restart; once it joins again, it is active."""
    d = Driver.with_model()
    a = d.join("a")
    d.ask(lambda n: io.DrainWorker(n, "m", a["worker"]))

    d.restart()

    assert beat(d, a)["state"] == "draining"
    assert beat(d, d.join("a"))["state"] == "active"


def test_a_model_named_like_an_ended_run_has_workers_of_its_own() -> None:
    """Stopping a run stops the workers of the model it trained, not those of a model named like the run."""
    d = Driver.with_model()
    d.ask(lambda n: io.CreateRun(n, "m", "paramserver.examples.digits:train"))
    theirs = d.join("run-1/w0")
    d.ask(lambda n: io.PatchRun(n, "run-1", state="stopped"))
    d.model(name="run-1")
    own = d.ask(lambda n: io.JoinWorker(n, "run-1"))

    heard = d.ask(lambda n: io.WorkerHeartbeat(n, "run-1", own["worker"], own["epoch"]))

    assert own["worker"] == theirs["worker"]
    assert (heard["state"], beat(d, theirs)["state"]) == ("active", "stop")


def test_a_model_named_like_the_next_run_has_workers_of_its_own() -> None:
    """A run of a model does not get the model's name as its id: workers that join on their own would be its places."""
    d = Driver()
    d.model(name="run-1")
    run = d.ask(lambda n: io.CreateRun(n, "run-1", "paramserver.examples.digits:train"))
    d.ask(lambda n: io.PatchRun(n, run["id"], state="stopped"))
    own = d.ask(lambda n: io.JoinWorker(n, "run-1"))

    heard = d.ask(lambda n: io.WorkerHeartbeat(n, "run-1", own["worker"], own["epoch"]))

    assert (run["id"], heard["state"]) == ("run-2", "active")


def test_a_join_whose_answer_was_lost_leaves_no_worker_behind() -> None:
    """A join repeated with the same `attempt` is the same worker with its rank; another attempt is another worker."""
    d = Driver.with_model()
    lost = d.join(None, rank=0, attempt="x")

    again = d.join(None, rank=0, attempt="x")
    other = d.join(None, attempt="y")

    assert (again["worker"], again["epoch"], again["rank"]) == (lost["worker"], lost["epoch"] + 1, 0)
    assert other["worker"] != lost["worker"]
    assert len(d.core.read.workers("m", d.now)) == 2


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_who_joins_just_after_a_change_of_leader_begins_where_the_others_are(mode: str) -> None:
    """A worker that joins right after a change of leader starts at the others' last stored clock.

    It does not start where they once joined, and need not wait until the new leader has heard from them.
    """
    d = Driver.with_model(consistency={"mode": mode})
    a, b = d.join("a"), d.join("b")
    for t in range(1, 101):
        d.clock(a, t)
        d.clock(b, t)
    d.wait(0.5)

    d.restart()

    assert d.join("c")["clock"] == 100
    assert beat(d, a, clock=101)["min_clock"] == 100


def test_how_far_a_worker_is_ahead_is_counted_from_the_clock_that_is_open() -> None:
    """The limit on clocks ahead counts from the open clock, not from the worker's last report.

    Otherwise a worker could get ahead without bound, report by report.  A repeated report is accepted.
    """
    d = Driver.with_model(consistency={"mode": "sync", "min_workers": 2})
    a, _ = d.join("a"), d.join("b")
    for _ in range(2):
        assert not d.result(d.clock(a, CLOCKS_AHEAD_MAX, wait_s=0.0))["released"]
    assert code(d, d.clock(a, CLOCKS_AHEAD_MAX + 1, wait_s=0.0)) == "invalid_field"


def test_a_report_that_is_refused_wakes_nobody() -> None:
    """After a refused clock report, a worker without data still does not hold up the barrier."""
    d = Driver.with_model(consistency={"mode": "sync"})
    a, b = d.join("a"), d.join("b")
    d.ask(lambda n: io.RegisterDataset(n, "m", "t", 1, 1, None, None, "dynamic", 1))
    d.lease(a, "t")
    d.lease(b, "t")
    assert code(d, d.clock(b, 1 << 20)) == "invalid_field"
    assert all(d.result(d.clock(a, clock))["released"] for clock in (1, 2, 3))


@pytest.mark.parametrize("wrong", [{"clock": 1 << 20}, {"clock": 1, "since": 2}, {"clock": 1, "timeline": 7}])
def test_a_heartbeat_that_is_refused_leaves_the_state_as_it_was(wrong: dict[str, Any]) -> None:
    """A refused heartbeat does not store the state it carries, because its sender will send it again."""
    d = Driver.with_model(consistency={"mode": "sync"})
    a = d.join("a")
    beat(d, a, state={"epoch": 1})
    with pytest.raises(PsError):
        beat(d, a, state={"epoch": 2}, **wrong)
    assert d.core.read.workers("m", d.now, kept=True)[0]["kept"] == {"epoch": 1}


@pytest.mark.parametrize("bare", [None, "n" * 63])
def test_a_worker_comes_back_under_the_longest_id_that_was_issued(bare: str | None) -> None:
    """Any id that a join returned is the name of a later join, up to 128 characters; bare names have at most 63."""
    model = "m" * 64
    d = Driver.with_model(name=model)

    def join(name: str | None) -> Any:
        return d.ask(lambda n: io.JoinWorker(n, model, name))

    first = join(bare)
    again = join(first["worker"])

    assert (again["worker"], again["epoch"]) == (first["worker"], first["epoch"] + 1)
    for name in ("n" * 64, "m" * 65 + "/" + "n" * 63):
        with pytest.raises(RequestError) as refused:
            join(name)
        assert (refused.value.code, refused.value.members["where"]) == ("invalid_field", "name")


def test_a_join_that_is_refused_takes_no_name() -> None:
    """A refused join uses up no name: the next worker without a name gets the first free one."""
    d = Driver.with_model()
    d.join("a", rank=0)
    with pytest.raises(ConflictError):
        d.join(None, rank=0)
    assert d.join(None)["worker"] == "m/w0"


def test_who_comes_back_gets_its_rank_again_unless_another_has_it() -> None:
    """A worker that joins again has the rank it had, or, if another worker took that, the lowest free one."""
    d = Driver.with_model()
    a, b = d.join("a"), d.join("b")
    for gone in (a, b):
        d.ask(lambda n, gone=gone: io.LeaveWorker(n, "m", gone["worker"]))  # type: ignore[misc]

    assert d.join("b")["rank"] == 1
    assert d.join("c")["rank"] == 0
    assert d.join("a")["rank"] == 2


def test_who_leaves_is_answered_at_once() -> None:
    """A clock request that a worker has parked is refused as `fenced` when the worker leaves, not at its deadline."""
    d = Driver.with_model(consistency={"mode": "sync", "min_workers": 2})
    a = d.join("a")
    d.join("b")
    parked = d.clock(a, 1)
    assert parked in d.open

    d.ask(lambda n: io.LeaveWorker(n, "m", a["worker"]))

    assert code(d, parked) == "fenced"


def test_epochs_of_workers_that_were_forgotten_are_not_given_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a number of workers, the one that died first is forgotten; if it comes back, its epoch is a higher one.

    A new leader knows of it, too: shards would take an epoch that is given out twice for the earlier incarnation.
    """
    monkeypatch.setattr(limits, "WORKERS_PER_MODEL_MAX", 3)
    d = Driver.with_model()
    d.join("live")
    for name, above in (("a", 6), ("b", 0)):
        d.wait(0.1)
        d.join(name, above=above)
        d.ask(lambda n, name=name: io.LeaveWorker(n, "m", f"m/{name}"))  # type: ignore[misc]
    d.join("c")
    assert {k for k in d.hash if k.startswith("worker:")} == {f"worker:m:m/{name}" for name in ("live", "b", "c")}
    assert len(d.core.read.workers("m", d.now)) == 3

    d.restart()

    assert d.join("a")["epoch"] == 8


def test_a_worker_that_left_cannot_be_asked_to_finish() -> None:
    """Draining a worker that left is refused as no longer live, and one that never joined as not joined."""
    d = Driver.with_model()
    a = d.join("a")
    d.ask(lambda n: io.LeaveWorker(n, "m", a["worker"]))

    with pytest.raises(NotFoundError, match=r"'m/a' is no longer live"):
        d.ask(lambda n: io.DrainWorker(n, "m", a["worker"]))
    with pytest.raises(NotFoundError, match=r"'m/b' has not joined"):
        d.ask(lambda n: io.DrainWorker(n, "m", "m/b"))


def test_a_name_in_place_of_an_id_is_told_what_an_id_is() -> None:
    """A worker is known by the id that its join returned; who sends its name alone is told so."""
    d = Driver.with_model()
    d.join("a")
    with pytest.raises(NotFoundError, match="the id that the join returned") as raised:
        d.core.read.worker("m", "a", d.now)
    assert raised.value.code == "unknown_worker"
    with pytest.raises(NotFoundError, match="the id that the join returned"):
        d.ask(lambda n: io.LeaveWorker(n, "m", "a"))
    with pytest.raises(NotFoundError, match="the id that the join returned"):
        d.ask(lambda n: io.DrainWorker(n, "m", "a"))


def test_a_worker_of_a_deleted_model_is_not_one_of_its_successor() -> None:
    """What the process of a deleted model's worker reports does not count for its successor's worker of the same id.

    Epochs go on from the highest one of the deleted model, also under another leader and on a Redis that was emptied.
    """
    d = Driver.with_model(consistency={"mode": "sync"})
    d.join("b", above=6)
    old = d.join("a", above=4)
    d.join("a")
    d.ask(lambda n: io.DeleteModel(n, "m"))
    d.empty_redis()
    d.restart()
    d.model(consistency={"mode": "sync"})
    with pytest.raises(NotFoundError):
        beat(d, old, clock=40)
    new = d.join("a")

    with pytest.raises(ConflictError) as refused:
        beat(d, old, clock=40)
    d.ask(lambda n: io.LeaveWorker(n, "m", old["worker"], old["epoch"]))

    assert (refused.value.code, refused.value.members["epoch"]) == ("fenced", new["epoch"])
    assert (old["worker"], new["worker"]) == ("m/a", "m/a")
    assert (old["epoch"], new["epoch"]) == (5, 8)
    assert beat(d, new)["state"] == "active"
    assert not d.commits()


def test_no_join_uses_up_the_epochs() -> None:
    """A worker asks for an epoch in the lower half of the range at most, so it can join again, as can later ones."""
    d = Driver.with_model()
    most = bodies.check(bodies.JoinWorker, {"above": INTEGER_MAX // 2}).above
    with refused_with("invalid_field", match="^above"):
        bodies.check(bodies.JoinWorker, {"above": INTEGER_MAX // 2 + 1})
    d.join("a", above=most)
    d.join("a")
    d.ask(lambda n: io.DeleteModel(n, "m"))
    d.model()

    assert d.join("a")["epoch"] == INTEGER_MAX // 2 + 3


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_no_report_uses_up_the_clocks(mode: str) -> None:
    """A clock that is a number of something else, such as nanoseconds, is refused: the model's never goes back.

    Where it stands at the highest number, no worker can report another clock; and in `sync`, versions continue from it.
    """
    d = Driver.with_model(consistency={"mode": mode})
    a = d.join("a")
    assert d.result(d.clock(a, CLOCKS_AT_ONCE_MAX, wait_s=0.0))["clock"] == CLOCKS_AT_ONCE_MAX
    assert code(d, d.clock(a, 2 * CLOCKS_AT_ONCE_MAX + 1, wait_s=0.0)) == "invalid_field"
    with pytest.raises(RequestError, match="clock: must be from 0 to 2199023255552"):
        beat(d, a, clock=1_795_717_361_040_319)
    d.ask(lambda n: io.LeaveWorker(n, "m", a["worker"]))

    assert d.join("b")["clock"] == CLOCKS_AT_ONCE_MAX


def test_the_status_tells_of_the_dead_for_a_minute() -> None:
    """The overview, taken each second, leaves out workers that died long ago: a model remembers thousands of them."""
    d = Driver.with_model()
    for name in ("a", "b"):
        w = d.join(name)
        d.ask(lambda n, w=w: io.LeaveWorker(n, "m", w["worker"]))  # type: ignore[misc]
        d.wait(40.0)
    d.join("c")

    def told() -> list[tuple[str, str]]:
        status = d.core.read.model_status("m", d.now)
        assert status is not None
        return [(w["worker"], w["state"]) for w in status["workers"]]

    for _ in range(2):
        assert told() == [("m/c", "active"), ("m/b", "left")]
        assert [w["worker"] for w in d.core.read.workers("m", d.now)] == ["m/c", "m/a", "m/b"]
        d.restart()  # a new leader knows how long ago it was


def test_epochs_begin_at_one_unless_a_model_of_that_name_was_deleted() -> None:
    """Of so many deleted models that not every name is remembered, the oldest raise the epochs of all others."""
    d = Driver.with_model()
    d.join("a", above=41)
    d.ask(lambda n: io.DeleteModel(n, "m"))
    for i in range(FLOORS_MAX):
        name = f"n{i}"
        d.model(name=name)
        assert d.ask(lambda n, name=name: io.JoinWorker(n, name, "a"))["epoch"] == 1  # type: ignore[misc]
        if i < FLOORS_MAX - 1:
            d.ask(lambda n, name=name: io.DeleteModel(n, name))  # type: ignore[misc]
    d.model()
    assert d.join("a")["epoch"] == 43
    d.ask(lambda n: io.DeleteModel(n, "m"))
    for i in range(FLOORS_MAX, 2 * FLOORS_MAX):
        d.model(name=f"n{i}")
        d.ask(lambda n, i=i: io.DeleteModel(n, f"n{i}"))  # type: ignore[misc]
    d.restart()
    d.model(name="new")
    assert d.ask(lambda n: io.JoinWorker(n, "new", "a"))["epoch"] == 44
