"""Recovery of the scheduler's state from its stored documents, with all that a killed one had told anyone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from paramserver.core.commit import Commit
from paramserver.core.scheduler.checkpoints import Record
from paramserver.core.scheduler.cluster import STORED, Cluster
from paramserver.core.scheduler.membership import Member, Shard, Worker
from paramserver.core.scheduler.models import Model
from paramserver.core.scheduler.runs import Run
from paramserver.core.scheduler.series import Series
from paramserver.core.scheduler.tasks import Dataset
from paramserver.core.scheduler.timeline import begin_sync, go_back
from paramserver.errors import problem

KINDS: Final = tuple(
    "cluster shard model filled place clock commit worker dataset tasks checkpoint series run member".split()
)
HINT: Final = "start the version that wrote it, which still can; docs/operations.md, Upgrade"


def restore(documents: Mapping[str, Mapping[str, Any]], now: float, term: int, unix_s: float, new_id: str) -> Cluster:
    """Rebuild the cluster from these fields of `ps:state`; everyone who was alive gets one full lease.

    `new_id` becomes the id of a cluster that has none yet.  One that begins with nothing stored numbers its models'
    generations from the present time on: what is left of an earlier cluster, here or at a client, has lower ones.
    Raises CorruptState (`corrupt_state`) for fields that this version does not know or cannot read.
    """
    groups: dict[str, dict[str, Mapping[str, Any]]] = {k: {} for k in KINDS}
    for name, doc in documents.items():
        kind, _, rest = name.partition(":")
        if kind not in groups:
            raise problem("corrupt_state", f"field {name!r:.80} of the stored state has an unknown kind", hint=HINT)
        groups[kind][rest] = doc
    c = Cluster(term, unix_s - now)
    try:
        _fill(c, groups, now, new_id)
        if not documents:
            c.generations = int(unix_s * 1000)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        raise problem("corrupt_state", f"the stored state cannot be read: {type(e).__name__}: {e}", hint=HINT) from e
    return c


def _fill(c: Cluster, groups: Mapping[str, Mapping[str, Mapping[str, Any]]], now: float, new_id: str) -> None:
    cluster = groups["cluster"].get("", {})
    for name in STORED:
        setattr(c, name, cluster.get(name, getattr(c, name)))
    c.worker_floors = dict(c.worker_floors)
    if not c.id and new_id:
        c.id = new_id
        c.save_cluster()
    for name, doc in groups["shard"].items():
        c.shards[name] = Shard.of(name, doc, now, c.wall_offset_s)
    for name, doc in groups["model"].items():
        c.models[name] = Model.of(doc, groups["place"][name], groups["clock"][name], now)
    for model, parameter, _ in _of_models(c, groups["filled"]):
        model.initial.filled.add(parameter)
        model.initial.missing.discard(parameter)
    for model, name, doc in _of_models(c, groups["worker"]):
        worker = model.roster.workers[name] = Worker.of(name, doc, now, c.wall_offset_s)
        _set_clock(worker, model, groups["clock"][model.name]["late"].get(name))
    for model, _, doc in sorted(_of_models(c, groups["commit"]), key=lambda found: found[2]["t"]):
        model.commits.append((now, Commit.of(doc)))
    for model, dataset, doc in _of_models(c, groups["dataset"]):
        model.datasets[dataset] = Dataset.of(doc, groups["tasks"][f"{model.name}:{dataset}"])
    for model, record, doc in _of_models(c, groups["checkpoint"]):
        model.checkpoints.records[record] = Record.of(doc)
    for name, doc in groups["series"].items():
        c.models[name].series = Series.of(doc)
    for id_, doc in sorted(groups["run"].items(), key=lambda run: int(run[0].removeprefix("run-"))):
        c.runs[id_] = Run.of(doc, now)
    for name, doc in groups["member"].items():
        c.members[name] = Member.of(name, doc, now)
    c.forget_others()
    for model in c.models.values():
        _resume(c, model)


def _of_models(
    c: Cluster, documents: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[Model, str, Mapping[str, Any]]]:
    """Yield (model, rest of the name, document) of documents whose names begin with that of their model."""
    for name, doc in documents.items():
        model, _, rest = name.partition(":")
        yield c.models[model], rest, doc


def _set_clock(worker: Worker, model: Model, late: Sequence[Any] | None) -> None:
    if late is not None and late[0] == worker.epoch:
        _, worker.done, worker.granted, worker.pending = late
    else:
        # In sync, clocks it had finished beyond the open one are in no commit, or belong to an old timeline; it reports
        # them again. In other modes the model's clock is the slowest worker's, and the stored clock of a worker is the
        # one at which it joined, perhaps on a timeline that went further than this one.
        stale = model.gate.sync or worker.timeline != model.timeline
        clock = model.gate.clock if stale else max(worker.done, model.gate.clock)
        worker.done = worker.granted = clock
        worker.left_out = None


def _resume(c: Cluster, model: Model) -> None:
    """Restart or end what the previous process left unfinished."""
    c.load_files(model)
    if newest := model.checkpoints.find("latest", model.spec.checkpoint):
        model.checkpoints.last_version = min(newest.versions, default=0)
    if model.restoring:
        # Nobody will finish that restore.  In sync the model goes back to the cut before it; without one, as in the
        # other modes, the values that are set stay, and sync goes on from them.
        model.restoring = False
        c.save_model(model)
        if model.gate.sync and go_back(c, model):
            c.place_changed(model)
        elif model.gate.sync:
            begin_sync(c, model)
    c.model_changed(model)
