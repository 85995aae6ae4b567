"""Bugs that are planted into a simulated cluster turn its checkers red."""

from pathlib import Path
from traceback import extract_tb
from typing import Any

import pytest
from msgspec.structs import replace

from paramserver import limits
from paramserver.core.commit import Commit
from paramserver.core.optimizer import initial_slots
from paramserver.core.partition_state import LoadedState, PartitionState
from paramserver.core.scheduler import shard_desk
from paramserver.core.scheduler.cluster import Cluster
from paramserver.core.scheduler.cuts import Cuts
from paramserver.core.scheduler.gate import Gate
from paramserver.core.scheduler.io import CreateModel, ParameterUploaded
from paramserver.core.scheduler.membership import Roster
from paramserver.core.scheduler.model_desk import ModelDesk
from paramserver.core.scheduler.models import Model
from paramserver.core.scheduler.move_desk import MoveDesk
from paramserver.core.scheduler.reading import Reading
from paramserver.core.scheduler.tasks import Dataset, RangeSet
from paramserver.core.scheduler.timeline import go_back, reload
from paramserver.core.settings import spec_from_model_document
from paramserver.core.shard.core import ShardCore
from paramserver.core.shard.durability import Durability
from paramserver.core.shard.effects import LoadPartition, Task, UpdateTask
from paramserver.core.shard.events import TaskResult
from paramserver.core.shard.partition import Partition
from paramserver.core.shard.served_model import ServedModel
from paramserver.core.shard.set_operation import SetOperation
from paramserver.core.shard.settings_operation import SettingsOperation
from paramserver.core.shard.snapshot_plan import SnapshotPlan
from paramserver.core.shard.window import PushMemory
from paramserver.core.spec import ModelSpec
from paramserver.testing import shards
from paramserver.testing.shard_driver import InMemoryStore, perform
from paramserver.testing.simulation import Simulation
from paramserver.testing.storage import SimRedis, Verdict
from paramserver.testing.world import Faults
from paramserver.types import ModelKey

PATIENCE_S = 200.0
"""After three times what the longest runs take, a run with a planted bug hangs."""


def turns_red(
    mode: str = "",
    level: str = "",
    kind: str = "",
    change: str = "none",
    *,
    first: int = 0,
    within: int = 12,
    says: str = "",
    **settings: Any,
) -> bool:
    """Return whether the checkers fail one of `within` seeds, of which `first` is the first, with what `says` gives.

    The product's own assertions do not count: a bug that they do not catch must be found, too.
    """
    for seed in range(first, first + within):
        try:
            Simulation(seed, mode, level, kind, change, patience_s=PATIENCE_S, **settings).run()
        except AssertionError as error:
            if "testing" in Path(extract_tb(error.__traceback__)[-1].filename).parts and says in str(error):
                return True
    return False


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_forgetting_push_ids_turns_the_checkers_red(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the push memory recognizes no push ids, duplicates count twice and the sums reveal it."""
    monkeypatch.setattr(PushMemory, "check", lambda *_: None)

    assert turns_red(mode, "applied", "crashes")


def test_applying_twice_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update step that is sometimes applied twice is detected."""

    def twice(task: Task) -> TaskResult:
        result = perform(task)
        if result.state is not None and isinstance(task, UpdateTask) and task.state.values[0] == 5.0:
            result.state.values[:] += 1.0
        return result

    monkeypatch.setattr(shards, "perform", twice)

    assert turns_red("sync", within=3)


def test_a_torn_update_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is partly missing in one partition is detected by a pull."""

    def half(task: Task) -> TaskResult:
        result = perform(task)
        if result.state is not None and task.state.values[0] == 5.0:
            result.state.values[0] = 5.0
        return result

    monkeypatch.setattr(shards, "perform", half)

    assert turns_red("async", within=3)


def test_an_acknowledged_push_that_was_not_applied_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """An acknowledged update that leaves the values unchanged is detected if nothing may have been lost."""

    def skipped(task: Task) -> TaskResult:
        result = perform(task)
        if result.state is not None and task.state.values[0] == 5.0:
            result.state.values[:] = task.state.values
        return result

    monkeypatch.setattr(shards, "perform", skipped)

    assert turns_red("async", "applied", within=3, faults=Faults(crash=0.0, drop=0.0))


def test_answering_before_the_journal_is_written_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """At `journaled`, a push acknowledged before it is in the journal is found missing after a crash."""
    monkeypatch.setattr(
        Durability, "acknowledge", lambda self, request, done, partitions, level, now: self._shard.reply(request, done)
    )

    assert turns_red("async", "journaled", "crashes", within=24, faults=Faults(crash=0.004))


def test_a_journal_without_tokens_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the journal accepts entries of former owners, its gaps or the wrong sums are detected."""

    def any_owner(self: SimRedis, key: Any, token: int, entries: Any) -> Verdict:
        for entry in entries:
            self.store.append(entry)
        return Verdict.DONE

    monkeypatch.setattr(SimRedis, "append", any_owner)

    assert turns_red("async", "journaled", first=54, within=48, faults=Faults(crash=0.0, cut=2.0))


def test_handing_over_without_holding_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that keeps applying while it stores its state for a handover is found to lose those pushes."""
    monkeypatch.setattr(Partition, "ready", property(lambda self: self.state is not None))

    assert turns_red("async", "applied", "moves", within=24)


def test_keeping_no_memory_of_old_tokens_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If owners are told to load a snapshot after Redis was emptied, instead of keeping their state, some run fails."""
    give = Cluster.give_token

    monkeypatch.setattr(Cluster, "renew_token", lambda self, model, index: give(self, model, index, "snapshot"))

    assert turns_red("async", "journaled", "emptied", within=6)


def test_not_telling_where_a_timeline_began_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the feed does not say where a timeline began, a shard behind it waits for old commits and the run fails."""
    told = Model.feed_document

    monkeypatch.setattr(Model, "feed_document", lambda self, *args: told(self, *args) | {"began": 0})

    assert turns_red("sync", "applied", "moves", "restores", within=3)


def test_not_giving_up_a_cut_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a cut that was partly stored when Redis was emptied is not given up, it never completes and the run fails."""
    monkeypatch.setattr(Cuts, "give_up", lambda self: None)

    assert turns_red("sync", "journaled", "emptied", first=16, within=30, checkpoints=2)  # 16, 35, 41


def test_loading_the_newest_snapshots_after_a_restore_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If partitions start from their newest snapshots where a restore has no cut yet, they end in different states."""

    def newest(cluster: Cluster, model: Model) -> bool:
        if not model.cuts.skipped:
            return go_back(cluster, model)
        reload(cluster, model, "snapshot", model.next_phase_clock, opening=True)
        return True

    monkeypatch.setattr(shard_desk, "go_back", newest)

    faults = Faults(crash=0.012)
    assert turns_red("sync", "applied", "crashes", "restores", first=137, within=1, faults=faults, says="different")


def test_ending_a_restore_that_a_death_has_undone_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a restore ends though a death has just taken what it set, the model goes on without it and the run fails."""
    finish = ModelDesk.finish_restore
    monkeypatch.setattr(ModelDesk, "finish_restore", lambda self, e, now: finish(self, replace(e, places={}), now))

    faults = Faults(crash=0.012)
    assert turns_red("sync", "applied", "crashes", "restores", first=68, within=1, deaths=True, faults=faults)


def test_listing_clocks_that_were_left_out_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a straggler's report also counts for clocks that the others committed without it, the run fails."""
    report = Gate.report

    monkeypatch.setattr(Gate, "report", lambda self, worker, done, since=None: report(self, worker, done, 0))

    assert turns_red("sync", "applied", within=6, late="fold")


def test_counting_commits_as_durable_by_versions_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If commits are dropped up to the durable version, which an assignment raises above the clock, the run fails."""
    rows = ShardCore.partitions

    monkeypatch.setattr(
        ShardCore, "partitions", lambda self: (r._replace(commits_from=r.durable_version) for r in rows(self))
    )

    assert turns_red("sync", "journaled", "pauses", "puts", within=3)


def test_leaving_before_the_last_commit_is_stored_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a shard that stops leaves although commits would go with it, the run fails."""
    monkeypatch.setattr(MoveDesk, "cut_if_beyond", lambda *_: False)

    assert turns_red("sync", "applied", "stops", first=4, within=1, clocks=20, says="went back behind commits")


def test_stopping_without_storing_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a shard that stops takes nothing for unsaved, pushes that it has acknowledged are found missing."""
    monkeypatch.setattr(ShardCore, "unsaved", lambda _: iter(()))

    assert turns_red("async", "applied", "stops", within=4)


def test_two_snapshots_of_a_partition_at_a_time_turn_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a slow snapshot can be overtaken by a newer one of the same partition, the run fails."""
    monkeypatch.setattr(SnapshotPlan, "_first", lambda self, waiting, other: next(iter(waiting), None))

    assert turns_red("async", "applied", "stores", first=7, within=1, clocks=20, says="applied")


def test_forgetting_what_a_redis_that_went_back_has_lost_turns_the_checkers_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If owners load a snapshot after a return of Redis with older data, instead of keeping their state, it fails."""
    give = Cluster.give_token

    monkeypatch.setattr(Cluster, "renew_token", lambda self, model, index: give(self, model, index, "snapshot"))

    assert turns_red(kind="restarts", within=2, clocks=20)


def test_going_on_without_what_redis_lost_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no timeline begins where Redis lost what no shard had of a partition, one clock has two contents."""
    monkeypatch.setattr(shard_desk, "begin_sync", lambda *_: None)

    assert turns_red("sync", "applied", "restarts", first=62, within=1, clocks=20, says="two contents by the name")


def test_cuts_that_are_too_rare_turn_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a synchronous model is stored once a minute, a death takes it back too far and the run fails."""
    monkeypatch.setattr(limits, "SNAPSHOT_INTERVAL_S", 60.0)

    faults = Faults(crash=0.0015, drop=0.0)
    assert turns_red("sync", "applied", "crashes", first=1, within=2, clocks=60, faults=faults, says="went back behind")


def test_losing_leases_of_data_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a new leader does not know which ranges are leased, some are worked on twice and the run fails."""
    of = Dataset.of

    def without_leases(spec: Any, progress: Any) -> Dataset:
        return of(spec, progress and {**progress, "leases": []})

    monkeypatch.setattr(Dataset, "of", without_leases)

    assert turns_red("ssp", kind="crashes", first=144, within=1, data=True, says="was worked on 2 times")


def test_losing_ranges_of_the_dead_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the ranges of dead workers are never leased again, the data is never finished and the run fails."""
    monkeypatch.setattr(Dataset, "release", lambda *_: False)

    assert turns_red("async", kind="moves", within=1, data=True, deaths=True, says="0 workers finished")


def test_leasing_what_is_done_again_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If what was done of a pass is forgotten when a worker dies, ranges are handed out again and the run fails."""
    release = Dataset.release

    def forgetful(self: Dataset, *args: Any) -> bool:
        if self.complete in self.done:
            self.done[self.complete] = RangeSet()
            self.cursor.clear()
        return release(self, *args)

    monkeypatch.setattr(Dataset, "release", forgetful)

    assert turns_red(within=3, data=True, deaths=True, says="is handed out again")


def test_going_too_far_ahead_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If ssp lets a worker go one iteration further than its bound, the run fails."""
    released = Gate.released

    monkeypatch.setattr(Gate, "released", lambda self, roster: released(self, roster) + 1)

    assert turns_red("ssp", within=12, deaths=True, says="is released 3 ahead of")


def test_an_assignment_that_keeps_the_version_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an assigned value has the version, and so the ETag, of the one before, the run fails."""
    publish = ShardCore.publish_version

    def same(self: ShardCore, partition: Partition, *args: Any) -> None:
        publish(self, partition, *args)
        partition.version -= bool(partition.operations) and isinstance(partition.operations[0], SetOperation)

    monkeypatch.setattr(ShardCore, "publish_version", same)

    assert turns_red("sync", change="puts", within=3, says="has two contents")


def test_entering_sync_with_the_newest_settings_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a partition that enters sync late adopts newer settings than the phase's first commit names, the run fails."""
    start = SettingsOperation.start

    def newest(self: SettingsOperation, *args: Any) -> Any:
        (p,) = self.partitions
        was_sync = p.spec.consistency.mode == "sync"
        tasks = start(self, *args)
        if not was_sync and p.spec.consistency.mode == "sync":
            p.adopt(self.spec, self.revision, self.live_workers)
        return tasks

    monkeypatch.setattr(SettingsOperation, "start", newest)

    assert turns_red("sync", kind="feeds", change="optimizers", within=4, says="is at revision")


def test_taking_newer_settings_away_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a commit that was decided before a restore brings older settings back, partitions differ and the run fails."""
    settings_of = ServedModel.settings_of

    def older(self: ServedModel, commit: Commit, p: Partition) -> tuple[int, ModelSpec]:
        if commit.settings is None or commit.revision >= p.revision:
            return settings_of(self, commit, p)
        return commit.revision, spec_from_model_document(self.spec, commit.settings)

    monkeypatch.setattr(ServedModel, "settings_of", older)

    assert turns_red("sync", kind="stops", change="optimizers", first=729, within=1, says="partitions differ")


def test_believing_an_upload_whose_shard_has_died_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the leader does not compare who has got the first values with who owns the partitions, zeros are trained."""
    uploaded = ModelDesk.uploaded

    def believed(self: ModelDesk, e: ParameterUploaded, now: float) -> None:
        owners = self.c.models[e.model].owners
        uploaded(self, replace(e, given=[(i, o.token) for i, o in enumerate(owners)]), now)

    monkeypatch.setattr(ModelDesk, "uploaded", believed)

    assert turns_red(kind="births", first=73, within=1, given="upload", says="partition 0: -999.0")


def test_losing_the_state_of_the_optimizer_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a partition is loaded without its optimizer's state, its next steps reveal it."""
    load = Partition.load

    def without_slots(self: Partition, loaded: LoadedState) -> None:
        load(self, loaded)
        assert self.state is not None
        slots = initial_slots(self.spec.optimizer, self.state.values)
        self.state = PartitionState(self.state.values, slots, self.state.steps)

    monkeypatch.setattr(Partition, "load", without_slots)

    assert turns_red("async", kind="moves", within=4, optimizer="momentum", says=" steps, not ")


def test_losing_the_step_counts_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an update does not count its step, adam's bias corrections are wrong and the run fails."""

    def uncounted(task: Task) -> TaskResult:
        result = perform(task)
        if result.state is None or not isinstance(task, UpdateTask):
            return result
        return TaskResult(replace(result.state, steps=task.state.steps), result.crc)

    monkeypatch.setattr(shards, "perform", uncounted)

    assert turns_red("sync", within=1, optimizer="adam", says=" steps, not ")


def test_a_schedule_that_begins_again_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the learning rate begins anew where a partition is loaded, the sizes of its steps reveal it."""
    load, rate = Partition.load, Partition.rate
    loaded_at: dict[Partition, int] = {}

    def noted(self: Partition, loaded: LoadedState) -> None:
        load(self, loaded)
        loaded_at[self] = self.version

    def restarted(self: Partition) -> float:
        return rate(self) / self.spec.optimizer.schedule.gamma ** loaded_at.get(self, 0)

    monkeypatch.setattr(Partition, "load", noted)
    monkeypatch.setattr(Partition, "rate", restarted)

    assert turns_red("sync", kind="moves", within=4, optimizer="momentum", says=" steps, not ")


def test_a_change_of_mode_that_resets_the_optimizer_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another mode begins without the optimizer's state, the values no longer fit it and the run fails."""
    adopt = Partition.adopt

    def fresh(self: Partition, spec: ModelSpec, revision: int, live_workers: int) -> bool:
        other = spec.consistency.mode != self.spec.consistency.mode
        adopt(self, spec, revision, live_workers)
        if other and self.state is not None:
            self.fresh_slots()
        return other

    monkeypatch.setattr(Partition, "adopt", fresh)

    assert turns_red(change="modes", within=4, optimizer="momentum", says=" steps, not ")


def test_beginning_again_with_epoch_1_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If workers of a model created again get the epochs of those before, the run fails."""
    monkeypatch.setattr(Cluster, "raise_worker_floor", lambda self, model: None)

    assert turns_red(change="recreations", within=3, says="with the same epoch")


def test_not_telling_what_a_worker_has_joined_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a shard takes a worker of a model that it has not heard of for one of the model before, the run fails."""
    monkeypatch.setattr(Reading, "membership", lambda self, *who: self.worker(*who) | {"generation": None})

    assert turns_red(change="recreations", within=3, faults=Faults(feed_cut=0.1), says="took a push to generation")


def test_a_worker_that_outlives_its_model_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the workers of a deleted model are those of the next one without joining it, the run fails."""
    create = ModelDesk.create

    def with_workers(self: ModelDesk, e: CreateModel, now: float) -> None:
        create(self, e, now)
        model = self.c.models[e.spec["name"]]
        if not model.roster.workers:
            model.roster = rosters.get(model.name, model.roster)
        rosters[model.name] = model.roster

    rosters: dict[str, Roster] = {}
    monkeypatch.setattr(ModelDesk, "create", with_workers)

    assert turns_red(change="recreations", first=23, within=60, says="lists workers of others")


def test_finding_what_is_stored_by_name_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a model created again begins with what is stored of the one before, that one's pushes are found in it."""
    load = InMemoryStore.load

    def by_name(self: InMemoryStore, effect: LoadPartition) -> LoadedState:
        key, size = effect.key, effect.layout.partition_size(effect.key.index)
        named = [k for k in self.kept if (k.model.name, k.index) == (key.model.name, key.index)]
        older = [k for k in named if self.kept[k][0].state.values.size == size]
        return load(self, replace(effect, key=older[0], source="snapshot") if older else effect)

    monkeypatch.setattr(SimRedis, "forget", lambda self, gone: True)
    monkeypatch.setattr(InMemoryStore, "load", by_name)

    assert turns_red(change="recreations", within=12, says="has pushes of others")


def test_keeping_what_a_deleted_model_has_stored_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If what is stored of a deleted model is never deleted, the run fails."""
    monkeypatch.setattr(SimRedis, "forget", lambda self, model: True)

    assert turns_red(change="recreations", within=3, says="Redis keeps")


def test_giving_a_token_twice_turns_the_checkers_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the owner tokens of each model are counted by themselves, two models have the same ones and the run fails."""
    give = Cluster.give_token

    def by_model(self: Cluster, model: Model, index: int, source: Any = None) -> None:
        self.tokens_given = counts.get((self.term, model.key), 0)
        give(self, model, index, source)
        counts[self.term, model.key] = self.tokens_given

    counts: dict[tuple[int, ModelKey], int] = {}
    monkeypatch.setattr(Cluster, "give_token", by_model)

    assert turns_red(within=3, models=2, says="a token of")
