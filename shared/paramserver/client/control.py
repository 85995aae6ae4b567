"""Calls other than push and pull: models and their settings, values, data, metrics, checkpoints, runs."""

import time
from collections.abc import Mapping
from contextlib import suppress
from operator import index
from secrets import token_urlsafe
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from paramserver import limits
from paramserver.client.cluster import Cluster, ModelMap, component, model_path
from paramserver.client.uploads import put_values
from paramserver.client.values import values_of
from paramserver.core.fields import whole_number
from paramserver.errors import FencedError, InDoubt, NotFoundError, PsError, combined, problem
from paramserver.net.calls import ATTEMPT_S, Call, Clock, Deadline, Pause, json_of, json_request
from paramserver.net.retry import Backoff, deliver, deliver_json, is_temporary, result_of
from paramserver.types import AnyArray

REMOVE_S: Final = 2.0
"""How long a creation that has failed, or was interrupted, tries to remove what it made."""
REPEATABLE: Final = ("/clock", "/done", "/drain", "/pull")
"""Ends of the paths of POSTs that change nothing if they come again; see `retryable` in docs/errors.md."""


class Point(NamedTuple):
    """One value of a metric, as reported by a worker."""

    time_s: float
    """Seconds since the Unix epoch."""
    clock: int | None
    """Number of iterations the worker had finished."""
    worker: str
    value: float


class Creation:
    """A model that a call makes, for its caller to remove if the call is interrupted: the call itself cannot then."""

    def __init__(self) -> None:
        self.token: Final = token_urlsafe(24)
        """One upload token for all attempts: if an answer is lost, the next one is told that model and upload are ours
        (201)."""
        self.name: str | None = None
        """The model's name while the model may be ours and incomplete."""

    def remove(self, clock: Clock = time.monotonic) -> Call[None]:
        """Delete the model unless it is complete or another client's by now; if that fails, too, leave it."""
        if self.name is not None:
            with suppress(PsError):
                path, headers = model_path(self.name), {"x-upload-token": self.token}
                yield from delete(path, Deadline(clock() + REMOVE_S, clock), headers)
            self.name = None


def create_model(
    cluster: Cluster,
    body: Mapping[str, Any],
    uploads: Mapping[str, AnyArray],
    deadline: Deadline,
    creation: Creation,
    *,
    exist_ok: bool,
) -> Call[ModelMap]:
    """Create a model and upload its initial values; return its map once it can be pulled.

    If the upload fails, the model is removed again; if it is interrupted, the caller does that.  Raises ConflictError
    (`model_exists`) if a model of that name exists with another spec, or with the same one and without `exist_ok`.
    """
    backoff = Backoff(deadline)
    headers = {"x-upload-token": creation.token}
    request = json_request("POST", "/models", body, timeout_s=deadline.attempt_s(), headers=headers)
    while True:
        creation.name = str(body["name"])
        status, doc = yield from deliver(request, deadline, backoff, lambda r: (r.status, json_of(r)))
        if status != 201:
            creation.name = None
        if status == 200 and not exist_ok:
            raise problem("model_exists", f"model '{body['name']}' exists already", hint="pass exist_ok=True to use it")
        if "upload_token" in doc:
            model_map = yield from cluster.store_document(doc, deadline)
            try:
                return (yield from _upload(cluster, model_map, uploads, deadline, creation.token))
            except PsError as e:
                if e.code != "upload_in_progress":
                    yield from creation.remove(deadline.clock)
                raise
        if doc.get("state", "ready") == "ready":
            return (yield from cluster.store_document(doc, deadline))
        # Another client is uploading.  If it gives up, the token goes to the next client that asks.
        if deadline.left_s() <= 0.2:
            detail = f"the first values of model '{body['name']}' are still being uploaded or restored"
            raise problem("initializing", detail)
        yield Pause(0.2)


def _upload(
    cluster: Cluster, model_map: ModelMap, uploads: Mapping[str, AnyArray], deadline: Deadline, token: str
) -> Call[ModelMap]:
    """Upload the initial values, again those that a dying node loses; return the map of the complete model.

    Raises Unavailable (`initializing`) at the deadline.
    """
    name, missing = model_map.name, dict(uploads)
    while True:
        yield from put_values(cluster, model_map, missing, deadline, token)
        doc = yield from fetch(model_path(name), deadline)
        model_map = yield from cluster.store_document(doc, deadline)
        if doc.get("state", "ready") == "ready":
            return model_map
        if deadline.left_s() <= 0.05:
            raise problem("initializing", f"the first values of model '{name}' are not complete")
        yield Pause(0.05)
        missing = {n: uploads[n] for n in doc["missing"] if n in uploads}


def assign(cluster: Cluster, model: str, values: Mapping[str, Any], deadline: Deadline) -> Call[None]:
    """Assign new values to parameters; shapes and numbers are checked before anything is sent."""
    if not isinstance(values, Mapping):
        detail = f"values must map names to arrays, not {type(values).__name__}"
        raise problem("invalid_field", detail, hint='assign({"w": array})')
    model_map = yield from cluster.map_of(model, deadline)
    errors = model_map.spec.unknown([str(name) for name in values if name not in model_map.layout.by_name])
    arrays: dict[str, AnyArray] = {}
    for name, value in values.items():
        spec = model_map.layout.by_name.get(name)
        if spec is None:
            continue
        try:
            array = arrays[name] = values_of(name, value)
        except PsError as e:
            errors.append(e)
            continue
        if array.shape != spec.shape:
            detail = f"'{name}' has shape {list(array.shape)}, the model's is {list(spec.shape)}"
            errors.append(problem("invalid_shape", detail, where=name))
    if errors:
        raise combined(errors)
    yield from put_values(cluster, model_map, arrays, deadline)


def of_creation(path: str, generation: int | None) -> str:
    """Return the path of a request that only concerns this creation of its model; None: whichever there is."""
    return path if generation is None else f"{path}?generation={generation}"


def patch_model(
    cluster: Cluster, model: str, generation: int | None, patch: Mapping[str, Any], deadline: Deadline
) -> Call[None]:
    """Change settings of that creation of a model; the map in the answer becomes the client's."""
    doc = yield from send("PATCH", of_creation(model_path(model), generation), patch, deadline)
    yield from cluster.store_document(doc, deadline)


def delete_model(cluster: Cluster, model: str, generation: int | None, deadline: Deadline) -> Call[None]:
    """Delete that creation of a model; raises like `delete`."""
    cluster.forget(model)
    yield from delete(of_creation(model_path(model), generation), deadline)


def delete(path: str, deadline: Deadline, headers: Mapping[str, str] = MappingProxyType({})) -> Call[None]:
    """Delete what is at a path; if an earlier attempt is in doubt, what is gone or replaced counts as deleted."""
    backoff = Backoff(deadline)
    request = json_request("DELETE", path, timeout_s=deadline.attempt_s(), headers=headers)
    try:
        yield from deliver_json(request, deadline, backoff)
    except (NotFoundError, FencedError):
        if not backoff.in_doubt:
            raise


def run_path(run: str) -> str:
    """Return the path of a run's route."""
    return "/runs/" + component(run, 'run["id"] of what create_run() returns')


def fetch(path: str, deadline: Deadline) -> Call[Any]:
    """Return the JSON value of a GET."""
    return (yield from deliver_json(json_request("GET", path, timeout_s=ATTEMPT_S), deadline))


def request(method: str, path: str, body: Any, deadline: Deadline) -> Call[Any]:
    """Send a request that a caller has put together; see `Client.request`."""
    if not path.startswith("/"):
        raise problem("malformed", f"'{path}' is not a path", hint=f"/{path}")
    if method == "POST" and not path.partition("?")[0].endswith(REPEATABLE):
        return (yield from post_unrepeatable(path, body, deadline))
    return (yield from send(method, path, body, deadline))


def send(method: str, path: str, body: Any, deadline: Deadline) -> Call[Any]:
    """Send a control request, retrying transient failures; return the JSON value of the answer."""
    return (yield from deliver_json(json_request(method, path, body), deadline))


def post_unrepeatable(path: str, body: Any, deadline: Deadline) -> Call[Any]:
    """Send a slow POST that is not idempotent (a checkpoint, a run); return the JSON value of the answer.

    It is not sent again if it may have been executed: raises InDoubt then, or what the node has answered.
    """
    backoff = Backoff(deadline)
    while True:
        (outcome,) = yield [deadline.bound(json_request("POST", path, body))]
        result = result_of(outcome, json_of, reads=False)
        if not isinstance(result, PsError):
            return result
        if not is_temporary(result):
            raise result
        if isinstance(result, InDoubt) or not result.retryable:
            raise backoff.final(result).plus(retryable=False)
        yield backoff.pause(result)


def save_checkpoint(model: str, generation: int | None, name: str | None, deadline: Deadline) -> Call[dict[str, Any]]:
    """Have the cluster write a checkpoint of that creation of a model; return its document.

    Raises like `post_unrepeatable`.
    """
    path = of_creation(model_path(model, "checkpoints"), generation)
    try:
        return dict((yield from post_unrepeatable(path, {} if name is None else {"name": name}, deadline)))
    except InDoubt as e:
        hint = "it may be being written still: look with model.checkpoints(), or give it a longer timeout="
        raise problem(e.code, e.detail, hint=hint, retryable=False, **e.members) from None


def listed(path: str, deadline: Deadline) -> Call[list[Any]]:
    """Return all items of a paginated list."""
    items: list[Any] = []
    after: str | None = None
    while True:
        query = f"{'&' if '?' in path else '?'}after={quote(after, safe='')}" if after is not None else ""
        doc = yield from fetch(path + query, deadline)
        items += doc["items"]
        after = doc.get("next")
        if after is None:
            return items


def metric_points(model: str, name: str | None, deadline: Deadline) -> Call[dict[str, list[Point]]]:
    """Return the points, oldest first, of each metric that workers have reported, or only of the one of that name."""
    if name is not None and not isinstance(name, str):
        raise problem("invalid_field", f"the name of a metric is text, not {name!r:.40}", where="name")
    query = "" if name is None else f"?name={quote(name, safe='')}"
    series = yield from listed(model_path(model, "metrics") + query, deadline)
    return {str(s["name"]): [Point(float(t), c, str(w), float(v)) for t, c, w, v in s["points"]] for s in series}


def dataset_document(
    dataset: str,
    size: int | None,
    task_size: int | None,
    ranges: Any,
    uri: str | None,
    passes: int | None,
    assignment: str,
) -> dict[str, Any]:
    """Return the body that registers a dataset.  Raises RequestError (`invalid_field`) naming the caller's argument."""
    passes = None if passes is None else whole_number("passes", passes, 1)
    body: dict[str, Any] = {"dataset": dataset, "passes": passes, "assignment": assignment}
    if ranges is not None:
        if size is not None or task_size is not None:
            raise problem("invalid_field", "give either ranges=, or size= and task_size=", where="ranges")
        try:
            body["ranges"] = [[index(start), index(stop)] for start, stop in ranges]
        except (TypeError, ValueError):
            detail = f"ranges: must be pairs (start, stop) of integers, not {ranges!r:.60}"
            raise problem("invalid_field", detail, hint="ranges=[(0, 1000), (1000, 1500)]", where="ranges") from None
    if size is not None:
        body["size"] = whole_number("size", size, 1)
    if task_size is not None:
        body["task_size"] = whole_number("task_size", task_size, 1)
        if size is not None and -(-body["size"] // body["task_size"]) > limits.TASKS_PER_DATASET_MAX:
            detail = f"task_size: {task_size} would make more than {limits.TASKS_PER_DATASET_MAX} tasks"
            raise problem("invalid_field", detail, where="task_size")
    if uri is not None:
        body["uri"] = uri
    return body


def run_document(
    model: str,
    entry: str,
    name: str | None,
    args: Mapping[str, Any] | None,
    workers: int,
    stop: Mapping[str, Any] | None,
    evaluate_every: int,
    checkpoint_every: int,
) -> dict[str, Any]:
    """Return the body that starts a run.

    Raises RequestError (`invalid_field`) if `entry` is no text, or `args` or `stop` no mapping.
    """
    if not isinstance(entry, str):
        detail = f"entry: names a function that the workers import, 'package.module:function'; it is not {entry!r:.60}"
        raise problem("invalid_field", detail, where="entry")
    for field, value in (("args", args), ("stop", stop)):
        if value is not None and not isinstance(value, Mapping):
            raise problem("invalid_field", f"{field}: must be an object, not {value!r:.60}", where=field)
    body: dict[str, Any] = {
        "model": model,
        "entry": entry,
        "args": dict(args or {}),
        "workers": workers,
        "stop": dict(stop or {}),
        "evaluate_every": evaluate_every,
        "checkpoint_every": checkpoint_every,
    }
    if name is not None:
        body["name"] = name
    return body
