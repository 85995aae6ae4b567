"""Entry points (`package.module:function`): check, load and run them."""

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, Final

import paramserver as ps
from paramserver import limits
from paramserver.core.scheduler.runs import is_allowed
from paramserver.errors import ConflictError, problem

Entry = Callable[..., Any]
RANK_WAIT_S: Final = limits.LEASE_S + 1.0
"""How long a place waits for its rank, which a worker that was killed has until its lease ends."""
RANK_POLL_S: Final = 0.5


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

    `place` is the run's document with `worker` (the id to join under), `rank` and `workers`; empty outside a run.
    Raises whatever the function raises, and ConflictError (`conflict`) if a worker from outside the run keeps the rank.
    A child that the function forks ends where it leaves the function.
    """
    with ExitStack() as stack:
        worker = _join(stack, client.model(model), place)
        with _child_ends():
            function(worker, **args)


def _join(stack: ExitStack, model: ps.Model, place: Mapping[str, Any]) -> ps.Worker:
    """Return the worker of a place, which leaves as `stack` ends; see `run`."""
    ends_s = time.monotonic() + RANK_WAIT_S
    while True:
        worker = model.worker(place.get("worker"), rank=place.get("rank"))
        worker.run = place or None
        try:
            return stack.enter_context(worker)
        except ConflictError as e:
            if e.members.get("where") != "rank":
                raise
            if time.monotonic() >= ends_s:
                hint = f"that worker is in no run: end it, or give it a rank of at least {place['workers']}"
                raise e.with_detail(e.detail, hint) from None
        time.sleep(RANK_POLL_S)


@contextmanager
def _child_ends() -> Iterator[None]:
    """End a child forked in the block as it leaves it, with the status of `sys.exit()` or 1: the rest is its parent's.

    It would report the place as done, and go on as a member of the pool.
    """
    parent, status = os.getpid(), 0
    try:
        yield
    except BaseException as e:
        if os.getpid() == parent:
            raise
        if isinstance(e, SystemExit) and (e.code is None or isinstance(e.code, int)):
            status = e.code or 0
        else:
            status = 1
            traceback.print_exc()
    finally:
        if os.getpid() != parent:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(status)
