"""Checkpoints on the caller's own disk: the partitions of all owners saved to one folder, and restored from it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from paramserver.client.cluster import Cluster, ModelMap, model_path
from paramserver.client.control import Creation, listed
from paramserver.client.frames import push_reply
from paramserver.core.layout import Layout
from paramserver.core.optimizer import slot_names
from paramserver.core.partition_state import PartitionState
from paramserver.errors import ConflictError, NotFoundError, PsError, StaleMapError, problem
from paramserver.net.calls import ATTEMPT_S, Call, Deadline, Pause, Request, Response, foreign, json_request
from paramserver.net.retry import Backoff, deliver_json, is_temporary, result_of
from paramserver.wire.frame import FRAME_HEADERS, MEDIA_TYPE, decode_header, encode_header
from paramserver.wire.state import StateFrame, restore_frame, taken_out

if TYPE_CHECKING:
    from paramserver.checkpoint import Checkpoint

T = TypeVar("T")

AT_ONCE: Final = 8
"""Partitions fetched or set in one round of concurrent requests."""


def save(cluster: Cluster, model: str, path: str, deadline: Deadline, *, overwrite: bool) -> Call[Mapping[str, Any]]:
    """Write a checkpoint of the model to the folder `path`; return its manifest.

    In sync all partitions are of one clock; otherwise each is consistent in itself and the manifest lists their
    versions.
    """
    from paramserver import checkpoint
    from paramserver.core.assembly import gather

    model_map = yield from cluster.fetch_map(model, deadline)
    cut: int | None = None  # None: the current state; if the model moves on meanwhile, read its newest cut
    while True:
        try:
            states = yield from _states(cluster, model_map, cut, deadline)
        except ConflictError:
            if cut is None:
                raise
            states = []  # the next cut has begun, and shards hold only their newest
        clocks = {frame.clock for frame, _ in states}
        if cut is None and model_map.spec.consistency.mode != "sync":
            break
        now = yield from cluster.fetch_map(model, deadline)
        if len(clocks) == 1 and now.spec.consistency.mode == "sync" and now.timeline == model_map.timeline:
            break
        model_map = now
        cut = model_map.document.get("cut") if now.spec.consistency.mode == "sync" else None
        if deadline.left_s() < 0.2:
            hint = "a longer timeout=, or model.save() on the server"
            raise problem("unavailable", "the partitions could not be read at one clock in time", hint=hint)
        yield Pause(0.1)
    workers = yield from listed(model_path(model, "workers"), deadline)
    numbers = [frame.version for frame, _ in states]
    params, slots, steps = gather(model_map.layout, taken_out(states, model_map.spec.optimizer))
    return checkpoint.write(
        path,
        model_map.spec,
        params,
        slots,
        steps,
        numbers,
        {str(w["worker"]): w["kept"] for w in workers if w.get("kept") is not None},
        {"clock": max(clocks), "timeline": model_map.timeline},
        overwrite=overwrite,
    )


def restore(
    cluster: Cluster,
    path: str,
    as_: str | None,
    partitions: int | None,
    deadline: Deadline,
    creation: Creation,
    *,
    exist_ok: bool,
) -> Call[ModelMap]:
    """Create a model from a checkpoint folder; return its map.

    The new model is `initializing` until the restore is complete; if that fails, it is removed again, and if it is
    interrupted, the caller does that.  With `exist_ok`, set an existing model to the checkpoint's values instead,
    whatever its current settings are.
    """
    from paramserver import checkpoint
    from paramserver.core.fields import check_model_name
    from paramserver.core.scheduler.documents import check_states

    found = checkpoint.read(path)
    document = found.spec.document()
    document["name"] = check_model_name(as_ or found.spec.name)
    check_states(found.states_in(document["name"]))
    if partitions is not None:
        document["partitions"] = partitions
    model_map = (yield from _existing_map(cluster, document["name"], deadline)) if exist_ok else None
    if model_map is None:
        creation.name = document["name"]
        try:
            model_map = yield from _create(cluster, document, creation.token, deadline)
        except ConflictError as e:
            creation.name = None
            if e.code != "model_exists":
                raise
            if not exist_ok:
                hint = "as_= names another; exist_ok=True sets it to the checkpoint's values"
                raise problem(e.code, f"model '{document['name']}' exists already", hint=hint) from None
            model_map = yield from cluster.fetch_map(document["name"], deadline)
    elif partitions not in (None, model_map.spec.partitions):
        raise problem(
            "conflict", f"model '{model_map.name}' has {model_map.spec.partitions} partitions, which cannot be changed"
        )
    try:
        return (yield from _set_all(cluster, model_map, found, deadline))
    except PsError:
        yield from creation.remove(deadline.clock)
        raise


def _create(cluster: Cluster, document: Mapping[str, Any], token: str, deadline: Deadline) -> Call[ModelMap]:
    """Create a model that is `initializing` until `_set_all` has ended; return its map."""
    headers = {"x-upload-token": token}
    request = json_request("POST", "/internal/models", document, timeout_s=deadline.attempt_s(), headers=headers)
    return (yield from cluster.store_document((yield from deliver_json(request, deadline)), deadline))


def _set_all(cluster: Cluster, model_map: ModelMap, found: "Checkpoint", deadline: Deadline) -> Call[ModelMap]:
    """Set the model to a checkpoint and tell the scheduler; return its map."""
    from paramserver.core.assembly import scatter, versions
    from paramserver.core.scheduler.documents import in_pieces

    # First: if the checkpoint is of another model, nothing of this one is changed.
    states = scatter(model_map.layout, found.params, found.slots, found.steps, found.spec.optimizer)
    for workers in in_pieces(found.states_in(model_map.name)):  # then: if there is no room for them, no value is set
        yield from _report(model_map, {"workers": workers}, deadline)
    names = slot_names(model_map.layout.spec.optimizer)
    least = versions(model_map.layout, Layout(found.spec), found.versions)
    pending, sent, backoff = list(range(len(states))), dict[int, int](), Backoff(deadline)

    def request_of(at: ModelMap, i: int) -> Request:
        sent[i] = _token(at, i)
        return _set_request(cluster, at, i, states[i], names, least[i], deadline)

    while True:  # again, for what the death of a shard has undone meanwhile
        _, model_map = yield from _from_owners(cluster, model_map, pending, request_of, push_reply, backoff, deadline)
        model_map = yield from _fresh_map(cluster, model_map, deadline)
        pending = [i for i in sent if sent[i] != _token(model_map, i)]
        if pending:
            continue
        end = {"timeline": model_map.timeline, "version": found.version, "given": list(sent.items())}
        try:
            document = yield from _report(model_map, end, deadline)
        except ConflictError as e:
            if e.code != "conflict":
                raise
            yield backoff.pause(e)  # undone after the map was fetched
        else:
            return (yield from cluster.store_document(document, deadline))


def _token(model_map: ModelMap, index: int) -> int:
    """Return the token under which a partition is owned."""
    return int(model_map.document["partitions"][index]["incarnation"])


def _report(model_map: ModelMap, body: Mapping[str, Any], deadline: Deadline) -> Call[Any]:
    """Tell the scheduler workers' states, or that every partition is set; return the model's document."""
    path = f"/internal{model_path(model_map.name, 'restored')}"
    request = json_request("POST", path, {"generation": model_map.generation, **body}, timeout_s=ATTEMPT_S)
    return (yield from deliver_json(request, deadline))


def _existing_map(cluster: Cluster, model: str, deadline: Deadline) -> Call[ModelMap | None]:
    """Return the current map of the model; None if there is no such model."""
    try:
        return (yield from cluster.fetch_map(model, deadline))
    except NotFoundError:
        return None


def _states(
    cluster: Cluster, model_map: ModelMap, cut: int | None, deadline: Deadline
) -> Call[list[tuple[StateFrame, PartitionState]]]:
    """Fetch the whole state of every partition, in order of index."""
    query = f"?generation={model_map.generation}" + (f"&cut={cut}" if cut is not None else "")

    def request_of(at: ModelMap, i: int) -> Request:
        path, to = _way(cluster, at, i, f"/internal/state/{at.name}/{i}")
        timeout_s = deadline.attempt_s()
        return Request("GET", f"{path}{query}", headers={"accept": MEDIA_TYPE}, to=to, timeout_s=timeout_s)

    indices = range(model_map.spec.partitions)
    backoff = Backoff(deadline, reads=True)
    found, _ = yield from _from_owners(cluster, model_map, indices, request_of, _state, backoff, deadline)
    return [found[i] for i in indices]


def _state(response: Response) -> tuple[StateFrame, PartitionState]:
    """Return the partition's state in a 2xx response; raises PsError if it is something else."""
    try:
        frame, offset = decode_header(response.body, StateFrame)
        return frame, frame.read(memoryview(response.body)[offset:])
    except PsError as e:
        raise foreign(response) from e


def _from_owners(
    cluster: Cluster,
    model_map: ModelMap,
    indices: Sequence[int],
    request_of: Callable[[ModelMap, int], Request],
    read: Callable[[Response], T],
    backoff: Backoff,
    deadline: Deadline,
) -> Call[tuple[dict[int, T], ModelMap]]:
    """Send each of these partitions' requests to its owner.

    Return what `read` makes of their 2xx responses, and the map to use then.
    """
    found: dict[int, T] = {}
    pending = list(indices)
    while pending:
        now, again = pending[:AT_ONCE], list[int]()
        failure: PsError | None = None
        outcomes = yield [request_of(model_map, i) for i in now]
        for i, outcome in zip(now, outcomes, strict=True):
            result = result_of(outcome, read, reads=backoff.reads)
            if not isinstance(result, PsError):
                found[i] = result
            elif isinstance(result, StaleMapError) or is_temporary(result):
                again.append(i)
                failure = result
            else:
                raise backoff.refusal(result)
        if failure is not None:
            yield backoff.pause(failure)
            model_map = yield from _fresh_map(cluster, model_map, deadline)
        pending = again + pending[AT_ONCE:]
    return found, model_map


def _way(cluster: Cluster, model_map: ModelMap, index: int, path: str) -> tuple[str, str | None]:
    """Return the path of a request about a partition, and where to send it: to its owner, whose `path` is given.

    If the owner cannot be reached from here, the URL's node passes the request on, and has a path of its own for it.
    """
    to = cluster.route(model_map, index)
    return (path if to is not None else f"/internal{model_path(model_map.name, 'partitions', str(index))}"), to


def _fresh_map(cluster: Cluster, model_map: ModelMap, deadline: Deadline) -> Call[ModelMap]:
    """Return the present map of the same creation of the model."""
    fresh = yield from cluster.fetch_map(model_map.name, deadline)
    if fresh.generation != model_map.generation:
        raise problem("model_replaced", f"model '{model_map.name}' was deleted and created again")
    return fresh


def _set_request(
    cluster: Cluster,
    model_map: ModelMap,
    index: int,
    state: PartitionState,
    names: tuple[str, ...],
    version: int,
    deadline: Deadline,
) -> Request:
    frame, arrays = restore_frame(model_map.name, model_map.generation, index, state, names, version)
    head = encode_header(frame)
    body = np.concatenate([np.frombuffer(head, np.uint8), *(np.ascontiguousarray(a).view(np.uint8) for a in arrays)])
    path, to = _way(cluster, model_map, index, f"/internal/set/{model_map.name}")
    return Request("POST", path, body.data, FRAME_HEADERS, to, timeout_s=deadline.attempt_s())
