"""Event handlers for models: create, patch, fill with initial values, restore, delete."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final

from paramserver import limits
from paramserver.core.optimizer import slot_count, slot_names
from paramserver.core.scheduler.balance import COPIES
from paramserver.core.scheduler.cluster import Cluster
from paramserver.core.scheduler.documents import check_states, size_of
from paramserver.core.scheduler.initial_values import RESTORED, InitialValues
from paramserver.core.scheduler.io import (
    CreateModel,
    DeleteModel,
    FilesLoaded,
    ModelRestored,
    ParameterUploaded,
    PatchModel,
    RestoreFinished,
    StartRestore,
)
from paramserver.core.scheduler.membership import Worker
from paramserver.core.scheduler.models import Model
from paramserver.core.scheduler.owner import Owner
from paramserver.core.scheduler.placement import Placement
from paramserver.core.scheduler.run_desk import RunDesk
from paramserver.core.scheduler.timeline import begin_sync, go_back, place
from paramserver.core.scheduler.waiter import Waiter
from paramserver.core.selection import select
from paramserver.core.spec import ModelSpec, differences
from paramserver.errors import PsError, problem, validating
from paramserver.types import ModelKey

DIFFERENCES_MAX: Final = 4
"""Of the differences between two specs, how many an error tells."""
FILES_AGAIN_S: Final = 10.0
"""Delay before the files of a model that was complete are read again after an error."""


class ModelDesk:
    """Handlers for the events that concern models."""

    def __init__(self, cluster: Cluster, placement: Placement, runs: RunDesk) -> None:
        self.c = cluster
        self.placement = placement
        self.runs = runs

    def create(self, e: CreateModel, now: float) -> None:
        with validating():
            spec = (ModelSpec.parse if e.restore else ModelSpec.asked)(e.spec)
        model = self.c.models.get(spec.name)
        if model is not None:
            self._create_again(e, spec, model, now)
            return
        if not self.c.live_shards():
            raise problem(
                "no_shards",
                "no shard is alive to own the model's partitions",
                hint="start one with 'paramserver-shard', or a whole cluster with 'psctl up'",
            )
        if len(self.c.models) >= limits.MODELS_MAX:
            detail = f"the cluster has {limits.MODELS_MAX} models, which is the limit"
            raise problem("conflict", detail, hint="delete one that is not needed")
        self._check_memory(spec, 1 + slot_count(spec.optimizer))
        self.c.generations += 1
        self.c.save_cluster()
        model = Model(spec, spec.document(), self.c.generations, now + self.c.wall_offset_s)
        model.owners = [Owner() for _ in range(spec.partitions)]
        model.checkpoints.last_s = now
        model.roster.floor = self.c.worker_floors.get(spec.name, self.c.worker_floor)
        missing = {RESTORED} if e.restore else {*spec.uploads, *spec.files}
        initial = model.initial = InitialValues(e.nonce, e.restore, missing)
        token = None
        if e.restore:
            initial.upload_token = e.nonce or None  # a client that gives up deletes the model with it
        elif spec.uploads:
            token = e.nonce
            initial.take_token(token, now)
        self.c.models[spec.name] = model
        self.c.save_model(model)
        self.c.save_clock(model)
        self.placement.place(model, wait=False)
        self.c.load_files(model)
        self._park(model, e.request, 201, token, now)

    def _check_memory(self, spec: ModelSpec, copies: int) -> None:
        """Check that the shards have memory for `copies` more float32 values per element of the model.

        Raises ConflictError (`not_enough_memory`) if not: accepted anyway, the model would kill one shard after
        another. Nothing is checked while the free memory of a shard is unknown.
        """
        needed, left = COPIES * 4 * spec.size * copies, self.placement.spare_bytes()
        if left is not None and needed > left:
            raise problem(
                "not_enough_memory",
                f"model '{spec.name}' with {spec.optimizer.name} needs {needed} more bytes (its state and the version"
                f" being computed); beside the models that they have, the shards have {left} free",
                hint="add shards, or raise their memory limits (memory_limit)",
                needed_bytes=needed,
                free_bytes=left,
            )

    def _create_again(self, e: CreateModel, spec: ModelSpec, model: Model, now: float) -> None:
        document = spec.document()
        if "partitions" not in e.spec:  # the default may change between releases, and the client named none
            document["partitions"] = model.created["partitions"]
        initial = model.initial
        other = e.restore and (not e.nonce or e.nonce != initial.creator)
        if other or document != model.created:
            how = "" if other else f" with another spec: {_first(differences(model.created, document))}"
            hint = "choose another name, change the model's settings, or delete it first"
            raise problem("model_exists", f"model '{spec.name}' exists{how}", hint=hint)
        token = None
        mine = e.nonce == initial.upload_token  # the answer that granted it may have been lost
        uploads = set() if initial.restored else initial.missing - spec.files.keys()  # beside restored values, none fit
        if uploads and (mine or now >= initial.upload_until_s):
            token = e.nonce
            initial.take_token(token, now)
            if not mine:
                if not initial.lost:  # what another client sent does not count: values of two clients are never mixed
                    initial.missing |= set(model.spec.uploads)
                    initial.given.clear()
                    self.c.drop_filled(model)
                self.c.save_model(model)
                self.c.model_changed(model)
        self._park(model, e.request, 201 if e.nonce == initial.creator else 200, token, now)

    def _park(self, model: Model, request: int, status: int, token: str | None, now: float) -> None:
        deadline = now + limits.CLIENT_TIMEOUT_S
        self.c.park(model.creators, Waiter(request, deadline, status=status, token=token), now)
        self.c.mark_dirty(model)

    def advance(self, model: Model, now: float) -> None:
        """Answer create requests once the model is served or their deadline passes; read its files again when due."""
        if now >= model.initial.read_at_s:
            self.c.load_files(model)
        if not model.creators:
            return
        complete = model.served and (model.initial.restored or not model.spec.files.keys() & model.initial.missing)
        for w in list(model.creators):
            if complete:
                body = self.c.public(model)
                if w.token is not None:
                    body["upload_token"] = w.token
                self.c.answer(w.request, body, w.status)
            elif now >= w.deadline_s:
                self.c.answer(w.request, _not_served(model, created=w.status == 201))
            else:
                continue
            model.creators.remove(w)

    def patch(self, e: PatchModel, now: float) -> None:
        model = self.c.model(e.model, e.generation)
        with validating():
            spec = model.spec.patched(e.patch)
        if spec != model.spec:
            restored = model.restoring or model.initial.awaits_restore
            if restored and slot_names(spec.optimizer) != slot_names(model.spec.optimizer):
                # The shards would take the arrays that the restore brings for those of the new optimizer.
                hint = "change its optimizer once that has ended"
                raise problem("conflict", f"model '{model.name}' is being restored", hint=hint)
            more = slot_count(spec.optimizer) - slot_count(model.spec.optimizer)
            if more > 0:
                self._check_memory(spec, more)
            was_sync = model.gate.sync
            if spec.consistency.mode == "sync" and not was_sync and (model.ending_sync or model.unheard):
                why = "are still leaving the previous synchronous phase" if model.ending_sync else "are not served yet"
                detail = f"some partitions of model '{model.name}' {why}"
                raise problem("loading", detail, hint="send the same request again")
            model.spec = spec
            model.revision += 1
            if was_sync and spec.consistency.mode != "sync":
                model.cuts.leave_sync()
                model.gate.opening = False
                model.left_sync = model.revision
                model.checkpoints.void_current()
            model.gate.change(spec.consistency, model.roster)
            self.c.save_model(model)
            self.c.save_clock(model)
            self.c.model_changed(model)
            if model.gate.sync and not was_sync:
                # The first commit sets every partition's version to the clock, and versions never fall, so the phase
                # begins at a clock beyond all of them.
                begin_sync(self.c, model)
        self.c.answer(e.request, self.c.public(model))

    def delete(self, e: DeleteModel, now: float) -> None:
        model = self.c.model(e.model, e.generation)
        if e.upload_token not in (None, model.initial.upload_token):
            raise problem("upload_in_progress", f"model '{model.name}' is complete, or another client is uploading it")
        self.remove(model, problem("unknown_model", f"model '{model.name}' was deleted"), now)
        self.c.answer(e.request, None, 204)

    def remove(self, model: Model, why: PsError, now: float) -> None:
        """Delete the model and answer all requests that wait for it with `why`."""
        for w in model.waiters():
            self.c.answer(w.request, why)
        for pending in model.checkpoints.pending:
            for request in pending.requests:
                self.c.answer(request, why)
        del self.c.models[model.name]
        self.c.raise_worker_floor(model)
        self.c.drop_filled(model)
        for prefix in ("model", "place", "clock", "series"):
            self.c.drop(f"{prefix}:{model.name}")
        for _, commit in model.commits:
            self.c.drop(f"commit:{model.name}:{commit.t}")
        for worker in model.roster:
            self.c.drop(f"worker:{model.name}:{worker.name}")
        for dataset in model.datasets:
            self.c.drop_dataset(model, dataset)
        for record in model.checkpoints.records:
            # The files stay: a checkpoint outlives its model.
            self.c.drop(f"checkpoint:{model.name}:{record}")
        self.c.map_changed()
        self.c.publish(model.gone_document())
        self.c.forget_others()
        self.runs.model_gone(model.name, now)

    # --- initial values ---

    def uploaded(self, e: ParameterUploaded, now: float) -> None:
        model = self.c.model(e.model)
        initial = model.initial
        if e.name not in model.layout.by_name:
            raise problem("unknown_parameter", f"model '{model.name}' has no parameter {e.name!r:.80}")
        if initial.missing:  # else it is complete, by this value perhaps: the answer was lost, or it is one of several
            if e.token is not None and e.token != initial.upload_token:
                raise problem("upload_in_progress", f"another client is uploading the values of model '{model.name}'")
            given = initial.given.setdefault(e.name, {}) if e.partial else {}
            given.update({row[0]: row[1] for row in e.given if len(row) == 2})
            touched = {part.partition for part in select(model.layout, e.name).parts}
            wanted = touched & initial.lost if initial.lost else touched
            lacking = [i for i in wanted if given.get(i) != model.owners[i].token]
            if lacking and not e.partial:
                # Lost after the shard had chosen where to send these values, or while this report was on its way.
                raise problem(
                    "initializing",
                    f"some partitions of model '{model.name}' have lost their values of '{e.name}' in the meantime",
                    hint="send the same request again",
                )
            initial.extend_upload(now)
            if not lacking:
                initial.given.pop(e.name, None)
                self._filled(model, {e.name})
        self.c.answer(e.request, None, 204)  # not what is still missing: with thousands, a long list each time

    def _filled(self, model: Model, names: set[str]) -> None:
        if not names & model.initial.missing:
            return
        model.initial.fill(names)
        if model.ready:
            self.c.save_model(model)
        else:
            self.c.save_filled(model, names)
        if model.initial.were_complete:  # else this concerns no shard, and there may be thousands of uploads
            self.c.model_changed(model)

    def files_loaded(self, e: FilesLoaded, now: float) -> None:
        model = self.c.of_key(e.model)
        if model is None:
            return
        if model.initial.end_reading():
            self.c.load_files(model)
        elif e.error is None:
            self._filled(model, set(e.names))
        elif model.initial.lost:
            # The other partitions hold trained values, worth more than these files: keep the model and retry later.
            model.initial.read_at_s, model.initial.files_error = now + FILES_AGAIN_S, e.error.detail
        elif not model.ready:
            self.remove(model, e.error, now)

    # --- restores ---

    def start_restore(self, e: StartRestore, now: float) -> None:
        model = self.c.model(e.model, e.generation)
        if model.restoring:
            raise problem("conflict", f"model '{model.name}' is already being restored")
        if e.arrays not in (None, slot_names(model.spec.optimizer)):
            raise problem("conflict", f"the optimizer of '{model.name}' was just changed", hint="restore it again")
        if model.checkpoints.reading_current:
            # A restore leaves the partitions' clocks as they are, so the clock could not tell which partitions the
            # checkpoint had read before it and which after.
            raise problem(
                "conflict",
                f"checkpoint '{model.checkpoints.pending[0].written}' of model '{model.name}' is being read",
                hint="restore once it is written",
            )
        with validating():
            self.c.check_room(*_states(model, e.sizes))  # before any value is set
        model.restoring = True
        for owner in model.owners:
            if owner.withdraw_move():
                self.c.model_changed(model)
        if model.cuts.pending is not None:
            # A shard that has yet to reach its clock may do so after it has set the checkpoint's values.
            model.cuts.give_up()
            self.c.save_clock(model)
            self.c.model_changed(model)
        self.c.save_model(model)
        self.c.answer(e.request, self.c.public(model))

    def finish_restore(self, e: RestoreFinished, now: float) -> None:
        model = self.c.of_key(e.model)
        if model is None:
            raise problem("unknown_model", f"model '{e.model.name}' was deleted")
        if e.error is not None and not model.restoring and not model.initial.awaits_restore:
            raise e.error  # that restore never began, or has already ended
        if e.error is None and any(place(model, i) != at for i, at in e.places.items()):
            raise _values_lost(model)
        if e.error is not None and model.initial.awaits_restore and not model.initial.creator:
            self.remove(model, e.error, now)
        else:
            model.restoring = False
            model.series.outdate()
            self.c.save_model(model)
            if e.error is None or not model.initial.awaits_restore:  # else the client that is creating it goes on
                self._end_restore(model, e.version, failed=e.error is not None)
        self.c.answer(e.request, e.error if e.error is not None else self.c.public(model))

    def _end_restore(self, model: Model, version: int, *, failed: bool = False) -> None:
        """Make the model complete, unless it has `failed`; in sync begin a timeline.

        If it has failed, only some values may be set: where there is a cut, the model goes back to the one before.
        """
        # In a model that never had values no partition has reached or staged for any clock, so clock 0 is unused.
        first = model.initial.awaits_restore and not model.gate.clock
        if not failed:
            self._filled(model, set(model.initial.missing))
        if model.gate.sync and failed and go_back(self.c, model):
            self.c.place_changed(model)
        elif model.gate.sync:
            # Also after a partial failure: the values are then not those of any clock of the old timeline.
            begin_sync(self.c, model, max(0 if first else model.next_phase_clock, version - 1))

    def end_orphaned_restores(self, now: float) -> None:
        """Remove the models that the last leader was creating from a checkpoint: nobody sets their values any more.

        A client that creates one itself has a token for it, and may go on with its restore.
        """
        why = problem("unknown_model", "the scheduler that was restoring this model has ended")
        for model in [m for m in self.c.models.values() if m.initial.awaits_restore and not m.initial.creator]:
            self.remove(model, why, now)

    def restored(self, e: ModelRestored, now: float) -> None:
        model = self.c.created(ModelKey(e.model, e.generation))
        with validating():
            states = check_states(e.workers)
            self.c.make_room(*_states(model, {name: size_of(state) for name, state in states.items()}))
        for name, state in states.items():
            worker = model.roster.store_state(name, state, now)
            if worker is not None:
                self.c.save_worker(model, worker)
        if e.timeline is not None:
            model.series.outdate()
            if not model.ready or model.gate.sync:  # else the report ends nothing
                self._end_reported(model, e)
        self.c.answer(e.request, self.c.public(model))

    def _end_reported(self, model: Model, e: ModelRestored) -> None:
        """End a restore by a client, unless its report is a repeated one.

        Raises ConflictError (`conflict`) if what the client has set is gone, or may be: it looks for what to set again.
        That is nothing if a repeated report comes to another leader, and all if Redis was emptied in between.
        """
        given = {row[0]: row[1] for row in e.given}
        gone = [given.get(i) != place(model, i)[1] for i in range(len(model.owners))]
        if model.timeline == e.timeline:
            lost = any(gone)
        else:
            # What has begun the timeline may have taken some of the values, unless it was the end of this restore.
            ended = e.timeline == model.timeline - 1 and model.timeline == model.restore_began
            # Then other tokens are those of partitions that have moved, if not all are others.
            lost = not ended or all(gone) or not model.ready
        if lost:
            raise _values_lost(model)
        if model.timeline == e.timeline:
            self._end_restore(model, e.version)
            if model.timeline != e.timeline:
                model.restore_began = model.timeline


def _states(model: Model, sizes: Mapping[str, int]) -> tuple[int, set[Worker]]:
    """By how much states of these sizes, by worker, are larger than those they replace, and whose those are."""
    replaced = {worker for name in sizes if (worker := model.roster.workers.get(name)) is not None}
    return sum(sizes.values()) - sum([worker.state_size for worker in replaced]), replaced


def _first(found: Iterable[str]) -> str:
    """Return the first few of these differences as one text."""
    told = list(islice(found, DIFFERENCES_MAX + 1))
    return "; ".join(told[:DIFFERENCES_MAX]) + ("; ..." if told[DIFFERENCES_MAX:] else "")


def _values_lost(model: Model) -> PsError:
    """Return the error for the end of a restore that a death has undone meanwhile."""
    detail = f"model '{model.name}' lost values while it was being restored"
    return problem("conflict", detail, hint="restore it again")


def _not_served(model: Model, *, created: bool) -> PsError:
    """Return the error for a create request at its deadline; `created`: the request made the model."""
    detail, hint = f"model '{model.name}' is not served yet", "send the same request again"
    return problem("loading", detail, hint=hint, created=created)
