"""Entry points (`package.module:function`): check, load and run them."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any

import paramserver as ps
from paramserver.core.scheduler.runs import is_allowed
from paramserver.errors import problem

Entry = Callable[..., Any]


def load(entry: str, prefixes: Sequence[str]) -> Entry:
    """Import and return the function that an entry names.

    Raises RequestError (`invalid_field`) if it is malformed, not allowed here, not importable, or not a function.
    """
    module, colon, name = entry.partition(":")
    if not colon or not module or not name:
        raise problem("invalid_field", f"entry '{entry}' must look like package.module:function")
    if not is_allowed(entry, prefixes):
        allowed = ", ".join(prefixes) or "nothing"
        raise problem(
            "invalid_field",
            f"entry '{entry}' is not under a prefix allowed by this worker ({allowed})",
            hint=f"start the worker with --allow {module.partition('.')[0]}",
        )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is None or not (module == e.name or module.startswith(f"{e.name}.")):
            raise  # the module exists but one of its own imports is missing: the traceback shows which
        raise problem(
            "invalid_field",
            f"entry '{entry}': there is no module '{e.name}' here",
            hint="install it where the worker runs, or add its folder to PYTHONPATH",
        ) from None
    function = getattr(found, name, None)
    if not callable(function):
        raise problem("invalid_field", f"entry '{entry}': module '{module}' has no function '{name}'")
    if iscoroutinefunction(function) or isgeneratorfunction(function) or isasyncgenfunction(function):
        hint = "a coroutine can be run in one: asyncio.run(main(...))"
        raise problem("invalid_field", f"entry '{entry}': '{name}' must be a plain function", hint=hint)
    result: Entry = function
    return result


def run(client: ps.Client, function: Entry, args: Mapping[str, Any], *, model: str, place: Mapping[str, Any]) -> None:
    """Join `model` as a worker, call `function(worker, **args)`, leave.

    `place` is the run's document with `worker` (the id to join under) and `rank`; empty outside a run. Raises whatever
    the function raises.
    """
    worker = client.model(model).worker(place.get("worker"), rank=place.get("rank"))
    worker.run = place or None
    with worker:
        function(worker, **args)
