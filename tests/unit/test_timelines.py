"""New timelines under the same owners: nothing waits for the earlier timeline, and nothing of it counts."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.refusals import refused_with

from paramserver import limits
from paramserver.core.commit import Commit, Contribution
from paramserver.core.scheduler import io
from paramserver.core.shard.events import AssignPart, SetReceived
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError, problem
from paramserver.testing.shard_driver import ShardDriver
from paramserver.types import ModelKey, PushId

from .scheduling import SPEC, Driver, code

WORKER = "run/a"
ROSTER = {WORKER: 1}
SYNC = {"mode": "sync"}


def spec(**fields: Any) -> ModelSpec:
    """Return the spec of a model of one partition of four elements with optimizer `sum`."""
    return ModelSpec.parse(
        {
            "name": "m",
            "params": {"w": {"shape": [4]}},
            "optimizer": {"name": "sum"},
            "consistency": SYNC,
            "partitions": 1,
            **fields,
        }
    )


def listed(clock: int) -> Contribution:
    """Return the worker's contribution to that clock."""
    return Contribution(WORKER, 1, 0, clock)


def stage(driver: ShardDriver, seq: int, clock: int) -> None:
    """Push ones for that clock as the worker."""
    assert driver.view is not None
    driver.submit({0: np.ones(4, np.float32)}, PushId(WORKER, 1, seq), clock=clock, timeline=driver.view.timeline)


def put(driver: ShardDriver, value: float, *, restore: bool = False, timeline: int | None = None) -> int:
    """Assign `value` to all elements; return the request."""
    part, request = AssignPart(0, np.full(4, value, np.float32), "float32", True), driver.request()
    driver.send(SetReceived("m", (part,), restore=restore, timeline=timeline, request=request))
    return request


def durable_clock(driver: ShardDriver) -> int:
    """Return the durable clock that the shard reports to the scheduler."""
    (row,) = driver.core.partitions()
    assert row.commits_from is not None
    return row.commits_from


def test_the_clock_that_is_durable_is_reported_beside_the_version() -> None:
    """A commit raises the durable clock once it is journaled, an assignment does not, and a new owner reports it."""
    driver = ShardDriver()
    view = driver.serve(spec(ack="journaled"), workers=ROSTER)
    driver.eager = False
    driver.commit(0)
    assert durable_clock(driver) == 0
    driver.settle()
    put(driver, 7.0)
    driver.settle()
    assert durable_clock(driver) == 1
    after = ShardDriver(driver.store)
    after.send(replace(view, owned={0: 2}, source="snapshot", clock=1))
    assert durable_clock(after) == 1


# --- in the shard: a timeline begins while its owners stay


def behind(*, ack: str = "applied", eager: bool = True) -> ShardDriver:
    """Return a shard with a push staged for clock 0 and no commit; in the tests a restore then ends at clock 3."""
    driver = ShardDriver()
    driver.serve(spec(ack=ack), workers=ROSTER)
    stage(driver, 1, 0)
    driver.eager = eager
    return driver


def begin(driver: ShardDriver, began: int, clock: int | None = None, **changes: Any) -> None:
    """Send the document of the next timeline, which begins at clock `began`."""
    assert driver.view is not None
    timeline = driver.view.timeline + 1
    driver.send(replace(driver.view, timeline=timeline, began=began, clock=clock or began, commits=(), **changes))


def at(driver: ShardDriver) -> tuple[int, int]:
    """Return (clock, version) of the partition."""
    p = driver.core.models["m"].partitions[0]
    return p.clock, p.version


@pytest.mark.parametrize("ack", ["applied", "journaled"])
def test_who_is_behind_when_a_timeline_begins_begins_with_it(ack: str) -> None:
    """A partition behind the first clock of a new timeline goes to it, and drops what it has staged."""
    driver = behind(ack=ack)
    begin(driver, 3)
    assert driver.core.held_bytes == 0
    stage(driver, 2, 3)
    driver.commit(3, listed(0), listed(3))
    assert (at(driver), driver.values()) == ((4, 4), [0.5] * 4)
    assert driver.resyncs == 0


def test_what_a_restore_sets_too_late_is_refused() -> None:
    """A restore's assignment that names an earlier timeline is refused, and values and staged parts stay.

    This happens if the leader of the restore was replaced and the next one has begun another timeline.
    """
    driver = behind()
    begin(driver, 3)
    stage(driver, 2, 3)
    with pytest.raises(PsError) as refused:
        driver.outcome(put(driver, 7.0, restore=True, timeline=0))
    assert (refused.value.code, refused.value.members["timeline"]) == ("rolled_back", 1)
    driver.commit(3, listed(3))
    assert (at(driver), driver.values()) == ((4, 4), [1.0] * 4)
    driver.outcome(put(driver, 7.0, restore=True, timeline=1))
    assert driver.values() == [7.0] * 4


@pytest.mark.parametrize("ack", ["applied", "journaled"])
def test_a_restore_does_not_wait_for_the_commit_that_would_change_the_optimizer(ack: str) -> None:
    """A restore brings into effect what would change with the next commit: there is none until it has ended.

    The checkpoint's state of the new optimizer then fits, and a new owner finds all of it in the journal.
    """
    driver = behind(ack=ack)
    driver.patch({"optimizer": {"name": "momentum", "lr": 1.0}})
    momentum = np.full(4, 3.0, np.float32)
    part = AssignPart(0, np.full(4, 7.0, np.float32), "float32", True, slots=(momentum,), steps=(5,))
    request = driver.request()
    driver.send(SetReceived("m", (part,), restore=True, request=request))
    driver.outcome(request)
    p = driver.core.models["m"].partitions[0]
    assert p.state is not None
    assert (driver.values(), p.revision, p.state.slots[0].tolist()) == ([7.0] * 4, 2, [3.0] * 4)
    if ack == "journaled":
        assert driver.view is not None
        after = ShardDriver(driver.store)
        after.send(replace(driver.view, owned={0: 2}, source="snapshot"))
        found = after.core.models["m"].partitions[0].state
        assert found is not None
        assert (after.values(), found.slots[0].tolist()) == ([7.0] * 4, [3.0] * 4)


def test_what_a_restore_sets_is_refused_where_a_timeline_begins_before_its_turn() -> None:
    """A restore's assignment queued behind a commit is refused if another timeline begins before its turn."""
    driver = behind(eager=False)
    driver.commit(0, listed(0))
    waiting = put(driver, 7.0, restore=True, timeline=0)
    begin(driver, 3)
    driver.settle()
    with refused_with("rolled_back"):
        driver.outcome(waiting)
    assert driver.values() == [1.0] * 4


def test_a_new_owner_takes_nothing_of_an_older_timeline_from_the_journal() -> None:
    """A new owner drops journaled parts of an older timeline, whether or not its predecessor knew of the new one."""
    for heard in (False, True):
        driver = behind(ack="journaled")
        if heard:
            begin(driver, 3)
        else:
            assert driver.view is not None
            driver.view = replace(driver.view, timeline=1, began=3, clock=3)
        after = ShardDriver(driver.store)
        assert driver.view is not None
        after.send(replace(driver.view, owned={0: 2}, source="snapshot"))
        stage(after, 2, 3)
        after.commit(3, listed(0), listed(3))
        assert (at(after), after.values()) == ((4, 4), [0.5] * 4)


def test_a_commit_that_is_being_computed_when_a_timeline_begins_comes_first() -> None:
    """A commit being computed when a timeline begins is applied and journaled before it, so replay gives the same."""
    driver = behind(ack="journaled", eager=False)
    driver.commit(0, listed(0))
    begin(driver, 3)
    driver.commit(3)
    driver.settle()
    assert (at(driver), driver.values()) == ((4, 4), [1.0] * 4)
    after = ShardDriver(driver.store)
    assert driver.view is not None
    after.send(replace(driver.view, owned={0: 2}, source="snapshot", clock=4))
    assert (at(after), after.values()) == ((4, 4), [1.0] * 4)


def test_who_missed_that_the_model_was_not_synchronous_for_a_while_begins_with_the_phase() -> None:
    """A partition that missed a phase out of sync begins at the new clock, and the first commit brings new settings."""
    driver = behind()
    begin(driver, 3, spec=spec(optimizer={"name": "sgd", "lr": 1.0}), revision=3)
    stage(driver, 2, 3)
    driver.commit(3, listed(3))
    assert (at(driver), driver.values()) == ((4, 4), [-1.0] * 4)


def test_settings_that_wait_behind_a_commit_are_followed_by_those_of_the_next_phase() -> None:
    """When a model leaves sync and returns during one commit, the partition ends in sync, in the new phase."""
    driver = behind(eager=False)
    driver.commit(0, listed(0))
    driver.patch({"consistency": {"mode": "async"}})
    assert driver.view is not None
    begin(driver, 3, spec=spec(), revision=driver.view.revision + 1)
    driver.settle()
    driver.commit(3)
    driver.settle()
    assert at(driver) == (4, 4)
    assert driver.core.models["m"].partitions[0].spec.consistency.mode == "sync"


def test_a_partition_enters_a_phase_at_its_first_clock_however_late_it_hears_of_it() -> None:
    """A partition enters a phase at its first clock, and requests a resync if it lacks commits of the phase."""
    driver = ShardDriver()
    driver.serve(spec(consistency={"mode": "async"}), workers=ROSTER)
    assert driver.view is not None
    commits = tuple(Commit(t, 1, (), 2, 1, False) for t in (5, 6))
    begin(driver, 3, clock=7, spec=spec(), revision=2)
    driver.send(replace(driver.view, commits=commits))
    assert (at(driver)[0], driver.resyncs) == (3, 1)
    for t in (3, 4):
        driver.commit(t)
    driver.send(replace(driver.view, commits=commits))
    assert at(driver) == (7, 7)


def test_a_push_that_waits_for_a_partition_comes_after_the_settings_of_its_phase() -> None:
    """A push that waits while a partition of an earlier phase is loaded is staged, not applied, in a sync phase."""
    before = ShardDriver()
    view = before.serve(spec(consistency={"mode": "async"}), workers=ROSTER)
    put(before, 0.0)
    before.advance(limits.SNAPSHOT_INTERVAL_S)
    driver = ShardDriver(before.store, eager=False)
    driver.send(replace(view, owned={0: 2}, source="snapshot"))
    begin(driver, 3, spec=spec(), revision=2)
    stage(driver, 1, 3)
    driver.settle()
    driver.commit(3, listed(3), Contribution("run/b", 1, 1, 3))
    driver.settle()
    assert driver.values() == [0.5] * 4


# --- in the scheduler


def restored(d: Driver, version: int = 0) -> None:
    """Start and finish a restore into the live model."""
    d.ask(lambda n: io.StartRestore(n, "m"))
    d.ask(lambda n: io.RestoreFinished(n, ModelKey("m", 1), None, version))


def flip(d: Driver, mode: str) -> None:
    """Change the mode of the model."""
    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"mode": mode}}))


def test_after_a_restore_clocks_go_on_beyond_all_clocks_and_versions() -> None:
    """After a restore clocks begin beyond every earlier clock and version, so the version is the clock again.

    A clock then belongs to one timeline only.
    """
    d = Driver.with_model(consistency=SYNC)
    d.clock(d.join("a"), 1)
    restored(d)
    assert (d.document()["timeline"], d.document()["began"]) == (1, 2)
    d.assigned = 10
    d.beats()
    restored(d)
    assert d.document()["began"] == 13
    assert d.commits()[-1]["t"] == 13


def test_after_a_restore_the_first_commit_leads_to_the_checkpoints_version() -> None:
    """The first commit after a restore leads to the checkpoint's version, unless the model was beyond it.

    So the schedule continues there; the same holds for a model that is created by the restore.
    """
    d = Driver.with_model(consistency=SYNC)
    restored(d, version=25)
    assert (d.document()["began"], d.commits()[-1]["t"], d.document()["clock"]) == (24, 24, 25)
    restored(d, version=7)
    assert d.document()["began"] == 26
    d.ask(lambda n: io.DeleteModel(n, "m"))
    for version in (25, 1):
        number = d.send(lambda n: io.CreateModel(n, SPEC | {"consistency": SYNC}, "x", restore=True))
        d.beats()
        key = ModelKey("m", d.result(number)["generation"])
        done = d.ask(lambda n, k=key, v=version: io.RestoreFinished(n, k, version=v))  # type: ignore[misc]
        assert (done["timeline"], d.core.read.model("m")["clock"]) == (1, version)
        d.ask(lambda n: io.DeleteModel(n, "m"))


def test_a_client_that_has_set_every_partition_begins_a_timeline_once() -> None:
    """A client's report of a restore begins one timeline in sync: a repeated one, or out of sync, begins none.

    A report for another generation is refused.
    """
    d = Driver.with_model(consistency=SYNC)

    def told(generation: int = 1, timeline: int = 0) -> Any:
        return d.ask(lambda n: io.ModelRestored(n, "m", generation, timeline, 25, given=d.given()))

    assert (told()["timeline"], d.document()["began"], d.commits()[-1]["t"]) == (1, 24, 24)
    assert told()["timeline"] == 1
    with refused_with("model_replaced"):
        told(generation=2)
    flip(d, "async")
    assert told(timeline=1)["timeline"] == 1


def test_the_failure_of_a_restore_that_is_not_under_way_changes_nothing() -> None:
    """A failure reported for a restore that has already finished changes nothing."""
    d = Driver.with_model(consistency=SYNC)
    lost = problem("storage_unavailable", "Redis does not answer")
    restored(d)
    d.send(lambda n: io.RestoreFinished(n, ModelKey("m", 1), lost))
    assert d.document()["timeline"] == 1


def test_where_a_timeline_began_is_known_to_the_next_leader() -> None:
    """The next leader knows at which clock the timeline began."""
    d = Driver.with_model(consistency=SYNC)
    a = d.join("a")
    d.clock(a, 1)
    restored(d)
    d.restart()
    assert d.ask(lambda n: io.OpenFeed(n))["documents"][1]["began"] == 2


def test_a_model_is_synchronous_again_only_when_all_have_taken_the_commits_of_the_phase_before() -> None:
    """Entering sync again is refused with `loading` until all partitions have taken the last phase's commits."""
    d = Driver.with_model(consistency=SYNC)
    d.clock(d.join("a"), 1)
    flip(d, "async")
    with pytest.raises(PsError) as early:
        flip(d, "sync")
    assert (early.value.code, d.document()["timeline"]) == ("loading", 0)
    d.beats()
    flip(d, "sync")
    assert d.document()["timeline"] == 1


def taken_over(d: Driver, version: int, clock: int) -> Any:
    """End shard s1, let s0 load its partitions at that version and clock, and return the model."""
    d.ask(lambda n: io.LeaveShard(n, "s1", d.shards.pop("s1")))
    lost = [(i, p["incarnation"]) for i, p in enumerate(d.core.read.model("m")["partitions"]) if not p["served"]]
    rows = [["m", 1, i, token, version, version, 0, clock, version, 0] for i, token in lost]
    assert rows
    d.ask(lambda n: io.ShardHeartbeat(n, "s0", d.shards["s0"], {}, rows))
    return d.core.read.model("m")


def test_a_new_leader_begins_a_synchronous_phase_once_it_has_heard_the_versions() -> None:
    """The phase begins beyond them; without them it would begin at 0, and the schedule of learning rates with it."""

    def heard(version: int) -> None:
        for owner in d.core._c.models["m"].owners:
            owner.version = version
        d.beats()

    d = Driver.with_model()
    heard(1000)
    d.restart()
    change = {"consistency": {"mode": "sync"}}
    assert code(d, d.send(lambda n: io.PatchModel(n, "m", change))) == "loading"
    assert d.core.read.model("m")["spec"]["consistency"]["mode"] == "async"
    heard(1000)
    assert d.ask(lambda n: io.PatchModel(n, "m", change))["clock"] > 1000


def test_who_takes_over_before_the_first_commit_of_a_timeline_begins_no_other_one() -> None:
    """A takeover of a journaled model before a timeline's first commit begins no other timeline.

    What others have staged in it was acknowledged, and a partition that is behind begins with it.
    """
    d = Driver.with_model(consistency=SYNC, ack="journaled")
    d.clock(d.join("a"), 1)
    d.beats()
    restored(d)
    d.durable = False
    d.beats()
    assert (d.document()["began"], d.document()["clock"]) == (2, 3)
    assert taken_over(d, 1, 1)["timeline"] == 1


def test_what_redis_lost_of_a_partition_is_told_by_its_clock_and_not_by_its_version() -> None:
    """A takeover at an older clock begins a new timeline, even if assignments raised the version beyond it.

    The commits that the partition lacks are stored nowhere, so it would wait for ever.
    """
    d = Driver()
    d.assigned = 10
    d.model(consistency=SYNC, ack="journaled")
    a = d.join("a")
    for t in (1, 2, 3):
        d.clock(a, t)
        d.beats()
    assert taken_over(d, 11, 1)["timeline"] == 1


def lost_with_its_owner(ack: str) -> Driver:
    """Return a driver whose uploaded model, at clock 3, has lost what s1 had: Redis was emptied, and s1 died."""
    d = Driver("s0", "s1")
    params = {"w": {"shape": [64], "init": {"kind": "upload"}}}
    model = {"name": "m", "params": params, "partitions": 4, "consistency": SYNC, "ack": ack}
    d.send(lambda n: io.CreateModel(n, model, "secret"))
    d.beats()
    d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "secret", d.given()))
    d.beats()
    a = d.join("a")
    for t in (1, 2, 3):
        d.clock(a, t)
    d.empty_redis()
    mine = [i for i, shard in enumerate(d.owners()) if shard == "s1"]
    assert mine == [1, 3]
    d.ask(lambda n: io.LeaveShard(n, "s1", d.shards.pop("s1")))
    d.beat("s0", stored=False, lost=[["m", 1, i, d.given()[i][1], False] for i in mine])
    return d


def test_what_a_journaled_model_has_lost_is_uploaded_again_and_the_rest_stays_as_it_is() -> None:
    """The others keep what was acknowledged; the new timeline begins beyond their clocks, once all have values."""
    before = 2 << 32  # the tokens of the term that the emptied Redis has begun
    d = lost_with_its_owner("journaled")
    document, owners = d.document(), d.core._c.models["m"].owners

    assert (document["state"], document["upload"]["lost"], document["timeline"]) == ("initializing", [1, 3], 1)
    assert document["began"] == document["clock"] == 4
    assert [o.source for o in owners] == ["snapshot", "init", "snapshot", "init"]
    assert [o.token - before for o in owners[::2]] == [1, 3], "their owner goes on with what it has in memory"

    number = d.send(lambda n: io.CreateModel(n, document["spec"], "again"))
    d.beats()
    assert d.result(number)["upload_token"] == "again"
    d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "again", [d.given()[i] for i in (1, 3)]))
    d.beats()
    assert (d.document()["state"], d.document()["upload"]) == ("ready", None)
    assert (d.commits()[-1]["t"], d.commits()[-1]["contributions"]) == (4, [])


def test_a_model_at_applied_that_has_lost_values_begins_anew_as_a_whole() -> None:
    """Without a cut or a journal, the first values are the only ones of one clock."""
    document = lost_with_its_owner("applied").document()

    assert (document["state"], document["upload"]["lost"]) == ("initializing", [0, 1, 2, 3])
    assert (document["source"], document["clock"]) == ("init", 0)


def test_a_model_that_begins_anew_does_so_if_redis_loses_that() -> None:
    """What Redis has still of a partition that has not begun is of an ended timeline, and perhaps of a later clock."""
    d = lost_with_its_owner("applied")

    for source in ("init", "init", "snapshot"):
        if source == "snapshot":
            d.beat("s0", stored=False)  # it has begun
        d.empty_redis()
        assert {options["source"] for _, _, options in d.document()["owners"]} == {source}


@pytest.mark.parametrize("restarts", [False, True])
def test_sync_is_not_entered_again_while_a_partition_has_yet_to_leave_it(restarts: bool) -> None:
    """A phase without a commit is also left by every partition before the next begins.

    What workers have staged for its clock 0 is applied then; a partition that went straight to the next would drop it.
    """
    d = Driver()
    d.model(consistency=SYNC, partitions=2)
    d.clock(d.join("a"), 0)
    for changed in ({"mode": "async"}, {"mode": "ssp", "staleness": 1}):
        d.ask(lambda n, rule=changed: io.PatchModel(n, "m", {"consistency": rule}))  # type: ignore[misc]
    d.beat("s0")
    if restarts:
        d.restart()
    again = {"consistency": SYNC}
    with pytest.raises(PsError, match="still leaving the previous synchronous phase") as refused:
        d.ask(lambda n: io.PatchModel(n, "m", again))
    assert (refused.value.code, refused.value.retryable) == ("loading", True)
    d.beats()
    d.ask(lambda n: io.PatchModel(n, "m", {"optimizer": {"lr": 0.5}}))
    assert d.ask(lambda n: io.PatchModel(n, "m", again))["spec"]["consistency"]["mode"] == "sync"


def counting(**consistency: Any) -> tuple[Driver, Any]:
    """Return a scheduler whose model has done three clocks of a run of five, and the run's worker."""
    d = Driver.with_model(consistency=consistency)
    before = d.join("before")
    for clock in (1, 2):
        d.clock(before, clock)
        d.beats()
    d.ask(lambda n: io.LeaveWorker(n, "m", before["worker"], None))
    d.ask(lambda n: io.CreateRun(n, "m", "examples:train", stop={"clocks": 5}))
    d.ask(lambda n: io.JoinPool(n, "p", ["examples"]))
    worker = d.join("run-1/w0")
    for clock in (3, 4, 5):
        d.clock(worker, clock)
        d.beats()
    return d, worker


def clocks_until_its_end(d: Driver, worker: Any, restarts: bool = False) -> int:
    """Return the number of clocks that the worker does until its run is finished."""
    d.wait(0.5)
    d.beats()
    clocks, clock = 0, int(d.core.read.model("m")["clock"])
    worker["timeline"] = d.core.read.model("m")["timeline"]
    while d.core.read.run("run-1")["state"] == "running":
        if restarts:
            d.restart()
            d.beats()
        clocks += 1
        d.clock_of(worker, clock + clocks)
        d.beats()
    return clocks


def become_synchronous(d: Driver) -> None:
    """Make the model synchronous, whose partitions are at version 1000."""
    for owner in d.core._c.models["m"].owners:
        owner.version = 1000
    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": SYNC}))


def restore(d: Driver) -> None:
    """Restore a checkpoint of version 1000."""
    model = d.core.read.model("m")
    d.ask(lambda n: io.ModelRestored(n, "m", model["generation"], model["timeline"], 1000, given=d.given()))


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("mode", "jump"), [("async", become_synchronous), ("sync", restore)])
def test_a_run_does_not_count_clocks_that_a_timeline_skips(mode: str, jump: Any, restarts: bool) -> None:
    """A run of five clocks that has done three does two more, though a new timeline begins at a far higher clock."""
    d, worker = counting(mode=mode)
    jump(d)
    assert clocks_until_its_end(d, worker, restarts) == 2
    assert d.core.read.model("m")["clock"] > 1000


def test_a_run_counts_from_where_a_rollback_has_led() -> None:
    """A run whose model goes back to a clock before its beginning does all of its clocks, and no others."""
    d, worker = counting(mode="sync")
    assert d.core.read.model("m")["cut"] == 1
    d.shard("s0")
    assert d.core.read.model("m")["clock"] == 1
    assert clocks_until_its_end(d, worker) == 5
