"""Recovery of the scheduler's state from its stored documents, with all that a killed one had told anyone."""

from collections.abc import Mapping
from typing import Any, Final

from paramserver.core.checkpoints import Record
from paramserver.core.cluster import Cluster
from paramserver.core.gate import Commit
from paramserver.core.membership import Member, Shard, Worker
from paramserver.core.models import Model
from paramserver.core.runs import Run
from paramserver.core.series import Series
from paramserver.core.tasks import Dataset
from paramserver.core.timeline import begin_sync
from paramserver.errors import problem
from paramserver.types import ModelKey

KINDS: Final = tuple(
    "cluster shard model filled place clock commit worker dataset tasks checkpoint series run member gone".split()
)


def restore(documents: Mapping[str, Mapping[str, Any]], now: float, term: int, unix_s: float) -> Cluster:
    """Rebuild the cluster from these fields of `ps:state`; everyone who was alive gets one full lease.

    Raises CorruptState (`corrupt_state`) for fields that this version does not know or cannot read.
    """
    groups: dict[str, dict[str, Mapping[str, Any]]] = {k: {} for k in KINDS}
    for name, doc in documents.items():
        kind, _, rest = name.partition(":")
        if kind not in groups:
            raise problem("corrupt_state", f"field {name!r:.80} of the stored state has an unknown kind")
        groups[kind][rest] = doc
    c = Cluster(term, unix_s - now)
    try:
        _fill(c, groups, now)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        raise problem("corrupt_state", f"the stored state cannot be read: {type(e).__name__}: {e}") from e
    return c


def _fill(c: Cluster, groups: Mapping[str, Mapping[str, Mapping[str, Any]]], now: float) -> None:
    cluster = groups["cluster"].get("", {})
    c.map_epoch, c.generations = cluster.get("map_epoch", 0), cluster.get("generations", 0)
    c.shard_floor, c.member_floor = cluster.get("shard_floor", 0), cluster.get("member_floor", 0)
    c.run_count, c.member_count = cluster.get("run_count", 0), cluster.get("member_count", 0)
    for name, doc in groups["shard"].items():
        shard = Shard(name, doc["epoch"], now, doc["alive"], tuple(doc["addresses"]), doc["version"])
        shard.draining, shard.left = doc.get("draining", False), doc.get("left", False)
        shard.gone_s, shard.listed = now, doc.get("listed", True)
        c.shards[name] = shard
    for name, doc in groups["model"].items():
        c.models[name] = Model.of(doc, groups["place"][name], groups["clock"][name], now)
    for name in groups["filled"]:
        model_name, _, parameter = name.partition(":")
        c.models[model_name].filled.add(parameter)
        c.models[model_name].missing.discard(parameter)
    for name, doc in groups["worker"].items():
        model_name, _, worker = name.partition(":")
        model = c.models[model_name]
        # In sync, clocks it had finished beyond the open one are in no commit, or belong to an old timeline; it reports
        # them again. In other modes the model's clock is the slowest worker's, and the stored clock of a worker is the
        # one at which it joined.
        done = granted = model.gate.clock if model.gate.sync else max(doc["clock"], model.gate.clock)
        pending: list[int] = []
        late = groups["clock"][model_name].get("late", {}).get(worker)
        if late is not None and late[0] == doc["epoch"]:
            _, done, granted, pending = late
        found = model.roster.workers[worker] = Worker(
            worker, doc["epoch"], now, doc["alive"], doc["rank"], done, pending, granted=granted,
            # So that a plain client that has not been told of a rollback yet will be.
            timeline=doc["timeline"], lease_s=doc["lease_s"], draining=doc.get("draining", False),
        )  # fmt: skip
        found.keep(doc["state"])
    commits: dict[str, list[Commit]] = {}
    for name, doc in groups["commit"].items():
        commits.setdefault(name.partition(":")[0], []).append(Commit.of(doc))
    for name, records in commits.items():
        c.models[name].commits.extend((now, r) for r in sorted(records, key=lambda r: r.t))
        if "began" not in groups["clock"][name]:
            c.models[name].began = min(r.t for r in records)  # Partitions before that cannot catch up any more.
    for name, doc in groups["dataset"].items():
        model_name, _, dataset = name.partition(":")
        c.models[model_name].datasets[dataset] = Dataset.of(doc, groups["tasks"].get(name))
    for name, doc in groups["checkpoint"].items():
        model_name, _, record = name.partition(":")
        c.models[model_name].checkpoints.records[record] = Record.of(doc)
    for name, doc in groups["series"].items():
        c.models[name].series = Series.of(doc)
    for id_, doc in sorted(groups["run"].items(), key=lambda r: r[1]["created_s"]):
        c.runs[id_] = Run.of(doc, now)
    for name, doc in groups["member"].items():
        place = (doc["place"][0], doc["place"][1]) if doc["place"] else None
        c.members[name] = Member(name, doc["epoch"], now, doc["alive"], tuple(doc["allow"]), place)
    for doc in groups["gone"].values():
        c.forget_model(ModelKey(doc["model"], doc["generation"]), doc["partitions"])
    for model in c.models.values():
        _resume(c, model)


def _resume(c: Cluster, model: Model) -> None:
    """Restart or end what the previous process left unfinished."""
    c.load_files(model)
    if model.restoring:
        # Nobody will finish that restore: the values it has set stay, and sync goes on from them.
        model.restoring = False
        c.save_model(model)
        if model.gate.sync:
            begin_sync(c, model)
    c.model_changed(model)
