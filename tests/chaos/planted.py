"""A shard with a bug planted in it: `python -m tests.chaos.planted BUG [options of paramserver-shard]`.

The chaos tests must detect each bug; an undetected one would mean that a promise is not checked.
"""

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from paramserver.core.shard.effects import Task, UpdateTask
from paramserver.core.shard.events import Journaled, TaskResult
from paramserver.core.shard.journal import JournalEntry
from paramserver.core.shard.window import PushMemory
from paramserver.types import F32
from paramserver_shard import journal, runtime, snapshot_store
from paramserver_shard.buffers import BufferPool
from paramserver_shard.computing import compute
from paramserver_shard.journal_writer import JournalWriter
from paramserver_shard.main import app
from paramserver_shard.membership import Membership
from paramserver_shard.serving import Serving

EVERY = 7
"""`apply_twice` and `tear` strike only on every seventh pass, because real bugs are intermittent, too."""


def skip_the_window() -> None:
    """Treat every delivery of a push as new."""
    PushMemory.check = lambda *_: None  # type: ignore[method-assign]


def apply_twice() -> None:
    """Apply some updates twice."""
    passes = 0

    def twice(
        tasks: Sequence[Task], pool: BufferPool, outputs: Sequence[F32 | None] | None = None
    ) -> tuple[TaskResult, ...]:
        nonlocal passes
        passes += 1
        results = compute(tasks, pool, outputs)
        if passes % EVERY or not all(isinstance(t, UpdateTask) for t in tasks):
            return results
        again = [replace(t, state=r.state) for t, r in zip(tasks, results, strict=True) if r.state is not None]
        return compute(again, pool)

    vars(runtime)["compute"] = twice


def tear() -> None:
    """Apply only the first half of some updates."""
    passes = 0

    def half(
        tasks: Sequence[Task], pool: BufferPool, outputs: Sequence[F32 | None] | None = None
    ) -> tuple[TaskResult, ...]:
        nonlocal passes
        passes += 1
        results = compute(tasks, pool, outputs)
        for task, result in zip(tasks, results, strict=True):
            if passes % EVERY == 0 and result.state is not None:
                size = result.state.values.size
                result.state.values[size // 2 :] = task.state.values[size // 2 :]
        return results

    vars(runtime)["compute"] = half


def acknowledge_early() -> None:
    """Report entries as journaled 2 s before they are written."""
    write = JournalWriter.add

    def add(self: JournalWriter, entries: Iterable[JournalEntry], fsync: bool) -> None:
        entries = list(entries)
        loop = asyncio.get_running_loop()
        for e in entries:
            loop.call_soon(self._feed, Journaled(e.key, e.token, e.lsn))
        loop.call_later(2.0, write, self, entries, fsync)

    JournalWriter.add = add  # type: ignore[method-assign]


def skip_the_token() -> None:
    """A former owner of a partition keeps writing and serving it, whatever Redis and the schedulers say."""
    for module, name, at in ((journal, "_APPEND", "at"), (snapshot_store, "_SWITCH", "1")):
        script = str(vars(module)[name])
        assert f"owner > ARGV[{at}]" in script
        vars(module)[name] = script.replace(f"owner > ARGV[{at}]", "false").replace(f"owner < ARGV[{at}]", "false")
    Serving.check = lambda self: None  # type: ignore[method-assign]
    Membership._drop_partitions = lambda self: None  # type: ignore[method-assign]
    join = Membership._join

    async def join_once(self: Membership) -> None:
        if self.epoch:
            await asyncio.Event().wait()  # it was fenced, but does not rejoin and keeps its partitions
        await join(self)

    Membership._join = join_once  # type: ignore[method-assign]
    take = Membership._take

    def take_what_suits(self: Membership, document: Mapping[str, Any]) -> None:
        owns = any(view.owned for view in self._views.values())
        loses = document["type"] == "model" and not any(o and o[0] == self.name for o in document["owners"])
        if not owns or (document["type"] != "map" and not loses):
            take(self, document)

    Membership._take = take_what_suits  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (skip_the_window, apply_twice, tear, acknowledge_early, skip_the_token)
}

if __name__ == "__main__":
    BUGS[sys.argv[1]]()
    app(sys.argv[2:])
