"""Long-running jobs: checkpoints, restores, values from files, and deletion of a deleted model's keys in Redis."""

import asyncio
import errno
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from time import monotonic
from typing import Any, Final
from weakref import WeakValueDictionary

from redis.asyncio import Redis
from redis.exceptions import RedisError

from paramserver.checkpoint import Checkpoint
from paramserver.core.layout import Layout
from paramserver.core.optimizer import slot_names
from paramserver.core.partition_state import PartitionState
from paramserver.core.scheduler import io
from paramserver.core.scheduler.checkpoints import ALIASES
from paramserver.core.scheduler.documents import check_states, in_pieces, size_of
from paramserver.core.scheduler.reading import Reading
from paramserver.core.spec import ModelSpec
from paramserver.errors import ConflictError, InDoubt, NotFoundError, PsError, as_problem, problem
from paramserver.types import ModelKey
from paramserver_node.redis import fsync_way
from paramserver_scheduler import checkpoints
from paramserver_scheduler.checkpoints import CheckpointStore
from paramserver_scheduler.history import History
from paramserver_scheduler.other_schedulers import OtherSchedulers
from paramserver_scheduler.runtime import Answer, Runtime
from paramserver_scheduler.shards import Owner, Place, ShardClient

log = logging.getLogger("paramserver.scheduler")

SETTLE_S: Final = 6.0
"""Time after which no shard writes snapshots of a deleted model any more."""
SCAN_COUNT: Final = 1000
SETS_MAX: Final = 4
"""How often a restore sets all values, if each time a death has undone some before the core hears of the end."""
_PARTITION_KEY: Final = re.compile(rb"\{([\w.-]+)\.([0-9]+)/[0-9]+\}:")


class Jobs:
    """Performs long effects in tasks of the process' task group; each reports its completion by an event, if any."""

    def __init__(
        self,
        runtime: Runtime,
        store: CheckpointStore,
        others: OtherSchedulers,
        shards: ShardClient,
        redis: Redis,
        history: History,
        group: asyncio.TaskGroup,
        name: str,
    ) -> None:
        self._runtime = runtime
        self._store = store
        self.others = others
        self._name = name
        self._shards = shards
        self._redis = redis
        self._history = history
        self._group = group
        self._files: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """(model, checkpoint) -> held by whoever writes, deletes, or reads its files to restore them."""
        self._restoring: set[str] = set()
        """Models that are being restored."""
        self._newest: io.ForgetOthers | None = None
        self._forgetting = asyncio.Lock()
        """Held while keys are looked through, so that of many deletions in a row not each does so."""

    def start(self, effect: io.Effect) -> None:
        """Start the job of an effect without blocking."""
        work: Coroutine[Any, Any, object]
        match effect:
            case io.WriteCheckpoint():
                work = self._write(effect)
            case io.RemoveCheckpoint(model, name, creation):
                work = self._remove(model, name, creation)
            case io.LoadFiles():
                work = self._load_files(effect)
            case io.ForgetOthers():
                self._newest = effect
                work = self._forget(effect)
            case _:
                raise TypeError(f"no job: {effect}")
        self._group.create_task(work)

    async def check_level(self, spec: Any) -> None:
        """Check that Redis supports the `ack` level of a spec.

        Raises RequestError (`not_built`) if `ack` is `fsynced` and Redis cannot confirm that a write is on its disk,
        and Unavailable (`storage_unavailable`) if it does not answer.
        """
        if isinstance(spec, Mapping) and spec.get("ack") == "fsynced":
            await fsync_way(self._redis)

    async def restore(
        self,
        source: str,
        name: str,
        target: str,
        partitions: int | None,
        *,
        exist_ok: bool = True,
        generation: int | None = None,
    ) -> Answer:
        """Restore a checkpoint of model `source` into model `target`, which is created if it does not exist.

        Without `exist_ok`, one that exists is refused unless it is `source`.  Runs to its end even if the client hangs
        up.  Raises PsError; FencedError (`model_replaced`) if `source` exists in another `generation`; InDoubt if this
        scheduler ceases to lead meanwhile.
        """
        run = partial(self._restore, source, name, target, partitions, exist_ok or source == target, generation)
        work = self._group.create_task(self._exclusively(target, run))
        try:
            outcome = await asyncio.shield(work)
        except asyncio.CancelledError:
            if not work.cancelled():
                raise  # the request itself is
            raise _restored_in_part(target, "this scheduler leads no more") from None
        if isinstance(outcome, InDoubt):
            raise _restored_in_part(target, outcome.detail)
        if isinstance(outcome, PsError):
            raise outcome
        return outcome

    async def _exclusively(self, target: str, run: Callable[[], Awaitable[Answer]]) -> Answer | PsError:
        """Restore, unless `target` is being restored; returns errors, because raising one would end the task group."""
        if target in self._restoring:
            return problem("conflict", f"model '{target}' is already being restored")
        self._restoring.add(target)
        try:
            return await run()
        except Exception as e:
            return problem_of(e)
        finally:
            self._restoring.remove(target)

    async def _restore(
        self, source: str, name: str, target: str, partitions: int | None, exist_ok: bool, generation: int | None
    ) -> Answer:
        held = await self._found(source, name, generation)
        workers = await asyncio.to_thread(check_states, held.states_in(target))
        ask = self._runtime.ask
        try:
            # Again: reading the checkpoint has taken a while.
            model: ModelKey | None = self._read.key(target, generation if target == source else None)
        except NotFoundError:
            model = None
        begin: Callable[[int], io.Event]
        if model is None:
            spec = ModelSpec.parse(checkpoints.renamed(held.spec, target, partitions))
            await self.check_level(spec.document())
            begin = partial(io.CreateModel, spec=spec.document(), nonce="", restore=True)
        elif not exist_ok:
            hint = "name another one with as, or set this one to the checkpoint's values with exist_ok"
            raise problem("model_exists", f"model '{target}' exists already", hint=hint)
        else:
            spec = self._read.spec(model)
            if partitions not in (None, spec.partitions):
                raise problem("conflict", f"model '{target}' has {spec.partitions} partitions, which cannot be changed")
            sizes = await asyncio.to_thread(lambda: {worker: size_of(state) for worker, state in workers.items()})
            arrays = slot_names(spec.optimizer)
            begin = partial(io.StartRestore, model=target, sizes=sizes, generation=model.generation, arrays=arrays)
        states = await asyncio.to_thread(checkpoints.partition, held, spec)
        answer: Answer | None = None
        try:
            answer = await ask(begin)
            assert answer.body is not None
            model = key = ModelKey(target, int(answer.body["generation"]))
            # Before the values, which may take minutes: who joins meanwhile is to have the state that belongs to them.
            for piece in in_pieces(workers):  # all at once would take seconds, in which nothing else is decided
                await ask(partial(io.ModelRestored, model=target, generation=key.generation, workers=piece))
            done = await self._set(key, states, slot_names(spec.optimizer), held.version)
        except Exception as e:
            error = problem_of(e)
            # The model stands still, or has no values, until the core hears that the restore has ended.  It may have
            # heard of the beginning even if that was answered 503, and it may not have heard of the end.
            with suppress(NotFoundError):
                self._runtime.send(io.RestoreFinished(0, model or self._read.key(target), error, held.version))
            if answer is not None and self._runtime.stopped is not None:
                raise problem("in_doubt", error.detail) from e
            raise error from e
        return Answer(answer.status, done.body)

    async def _set(
        self, model: ModelKey, states: Sequence[tuple[PartitionState, int]], names: tuple[str, ...], version: int
    ) -> Answer:
        """Set every partition and end the restore; do so again if a death has undone some of it before that end."""
        tries = 0
        while True:
            tries += 1
            places = await self._shards.restore(model, states, names, self._owner(model), self._place(model))
            try:
                end = partial(io.RestoreFinished, model=model, version=version, places=places)
                return await self._runtime.ask(end, changes=True)
            except ConflictError:
                if tries == SETS_MAX:
                    raise

    async def _found(self, model: str, name: str, generation: int | None) -> Checkpoint:
        """Read a checkpoint by name, `latest` or `best`, from another scheduler if only that one has it."""
        holder: str | None = None
        creation: str | None = None
        try:
            self._read.key(model, generation)
            record = self._read.checkpoint(model, name)
            creation = self._read.creation(model)
        except NotFoundError:  # the model or the record is gone: the checkpoints on disk count
            pass
        else:
            name, holder = record["name"], record["scheduler"] or None
        # One of the list may be deleted at any time by the rule of `keep`.
        async with self._alone(model, name) if creation is not None else nullcontext():
            try:
                return await asyncio.to_thread(self._store.read, model, name, creation)
            except NotFoundError:
                if holder == self._name or (creation is None and name in ALIASES):
                    raise
            return await self.others.read(model, name, holder, creation)

    async def delete(self, model: str, name: str) -> None:
        """Delete a checkpoint: one of the model's list, or one of an earlier model, in this scheduler's folder.

        Raises NotFoundError (`unknown_checkpoint`, `unknown_model`); Unavailable, after which it can be deleted again,
        if another scheduler leads by now, or one that may have its files does not answer; ConflictError
        (`disk_refuses`).
        """
        if name in ALIASES:
            raise problem("invalid_field", f"'{name}' stands for another checkpoint", hint="give that one's own name")
        async with self._alone(model, name):
            creation: str | None = None
            try:
                record = self._read.checkpoint(model, name)
                creation = self._read.creation(model)
            except NotFoundError:
                if not await asyncio.to_thread(self._store.exists, model, name):
                    raise
            else:
                if record["scheduler"] not in ("", self._name):
                    self.others.url(record["scheduler"])
            await self._runtime.check_leads()
            try:
                if not await self.others.remove(model, name, creation):
                    raise problem("unavailable", f"another scheduler has not deleted its files of checkpoint '{name}'")
                await self._runtime.check_leads()
                await asyncio.to_thread(self._store.remove, model, name, creation)
            except OSError as e:
                raise problem_of(e) from e
            if creation is not None:
                await self._runtime.ask(lambda n: io.DeleteCheckpoint(n, model, name), changes=True)

    async def prune(self) -> None:
        """Delete here what the rule of `keep` has deleted at the others while this scheduler did not run."""
        names = [m["name"] for m in self._read.models()]
        listed = [(name, self._read.creation(name), self._read.checkpoints(name)) for name in names]
        try:
            await asyncio.to_thread(self._store.prune, listed)
        except Exception as e:
            log.warning("checkpoints.stay %s", problem_of(e))

    def _alone(self, model: str, name: str) -> asyncio.Lock:
        """Return the lock of a checkpoint's files."""
        return self._files.setdefault((model, name), asyncio.Lock())

    async def _write(self, effect: io.WriteCheckpoint) -> None:
        async with self._alone(effect.model.name, effect.name):
            await self._write_files(effect)

    async def _write_files(self, effect: io.WriteCheckpoint) -> None:
        creation = effect.document["creation"]
        try:
            if await asyncio.to_thread(self._store.taken, effect.model.name, effect.name, creation):
                path = self._store.path(effect.model.name, effect.name)
                log.info("checkpoint.name_taken model=%s name=%s", effect.model, effect.name)
                error = checkpoints.of_another(effect.name, path)
                self._runtime.send(io.CheckpointFailed(effect.model, effect.name, error, taken=True))
                return
            partitions = self._read.spec(effect.model).partitions
            held = await self._shards.states(effect.model, partitions, self._owner(effect.model), effect.cut)
            _check_clocks(effect.document, [frame.clock for frame, _ in held])
            self._runtime.send(io.CheckpointRead(effect.model, effect.name))
            versions = [frame.version for frame, _ in held]
            size, at = await asyncio.to_thread(
                self._store.write, effect.model.name, effect.name, effect.document, held, self._confirm_in_thread()
            )
        except Exception as e:
            error = problem_of(e)
            log.warning("checkpoint.failed model=%s name=%s %s", effect.model, effect.name, error)
            what = f"checkpoint {effect.name} of {effect.model.name}: {error}"
            self._history.add(monotonic(), "checkpoint_failed", what, "bad")
            self._runtime.send(io.CheckpointFailed(effect.model, effect.name, error))
        else:
            log.info("checkpoint.written model=%s name=%s bytes=%d", effect.model, effect.name, size)
            self._history.add(
                monotonic(), "checkpoint_written", f"checkpoint {effect.name} of model {effect.model.name}"
            )
            self._runtime.send(
                io.CheckpointWritten(effect.model, effect.name, size, versions, at, self._name, creation)
            )

    def _confirm_in_thread(self) -> Callable[[], None]:
        """Return a function for threads that raises an error if another scheduler leads.

        A job that goes on after a pause must not replace what that one has written under the same name.
        """
        loop = asyncio.get_running_loop()
        return lambda: asyncio.run_coroutine_threadsafe(self._runtime.check_leads(), loop).result()

    async def _remove(self, model: str, name: str, creation: str) -> None:
        async with self._alone(model, name):
            try:
                await self._runtime.check_leads()
            except PsError:  # what the next leader does not list either, it deletes by the rule of `keep`
                return
            try:
                await asyncio.to_thread(self._store.remove, model, name, creation)
            except OSError as e:
                log.warning("checkpoint.stays model=%s name=%s %s", model, name, e)
            await self.others.remove(model, name, creation)

    async def _load_files(self, effect: io.LoadFiles) -> None:
        try:
            layout = Layout(self._read.spec(effect.model))
            values = await asyncio.to_thread(self._store.read_parameters, layout, effect.files)
            frames = checkpoints.assignments(layout, effect.model.generation, values)
            if effect.partitions:
                frames = {i: frames[i] for i in frames.keys() & set(effect.partitions)}
            await self._shards.assign(frames, self._owner(effect.model))
        except Exception as e:
            error = problem_of(e)
            log.warning("files.failed model=%s %s", effect.model, error)
            self._runtime.send(io.FilesLoaded(effect.model, error=error))
        else:
            self._runtime.send(io.FilesLoaded(effect.model, list(effect.files)))

    async def _forget(self, effect: io.ForgetOthers) -> None:
        """Delete these keys twice: the second pass finds what a shard was writing when it heard of a deletion.

        A later effect, which concerns all that this one does, ends it.  So does another leader, which does this itself,
        and may have given a generation again.
        """
        passes = 0
        while passes < 2:
            async with self._forgetting:
                if effect is not self._newest:
                    return
                try:
                    await self._runtime.check_leads()
                except PsError:
                    return
                try:
                    found = self._redis.scan_iter(match="{*/*}:*", count=SCAN_COUNT)
                    keys = [key async for key in found if _concerns(effect, key)]
                    for at in range(0, len(keys), SCAN_COUNT):
                        await self._redis.unlink(*keys[at : at + SCAN_COUNT])
                    passes += 1
                except (RedisError, OSError) as e:
                    log.warning("keys.stay %s", e)
            if passes < 2:
                await asyncio.sleep(SETTLE_S)

    def _owner(self, model: ModelKey) -> Owner:
        return lambda index: self._read.owner(model, index)

    def _place(self, model: ModelKey) -> Place:
        return lambda index: self._read.place(model, index)

    @property
    def _read(self) -> Reading:
        """What the scheduler knows now; another object whenever it begins to lead."""
        return self._runtime.core.read


def _concerns(effect: io.ForgetOthers, key: bytes) -> bool:
    """Whether this Redis key is one of a partition of a model that is gone."""
    found = _PARTITION_KEY.match(key)
    return found is not None and effect.concerns(ModelKey(found[1].decode(), int(found[2])))


def _check_clocks(document: Mapping[str, Any], clocks: Sequence[int]) -> None:
    """Raise ConflictError if partitions of a synchronous model were read at another clock than the checkpoint's.

    A rollback or a restore may have happened while they were read.
    """
    wanted, mode = document["clock"], document["spec"]["consistency"]["mode"]
    if mode == "sync" and any(clock != wanted for clock in clocks):
        raise problem(
            "conflict",
            f"partitions were read at clocks {min(clocks)} to {max(clocks)}, not at clock {wanted}",
            hint="request another checkpoint",
        )


def _restored_in_part(model: str, why: str) -> PsError:
    detail = f"{why}, and model '{model}' may be restored in part"
    return problem("in_doubt", detail, hint="restore it again", retryable=False)


def problem_of(error: Exception) -> PsError:
    """Return the error to report for a job that failed.

    A job decides nothing, so its failure leaves nothing inconsistent: a bug ends the job, not the scheduler.
    """
    if isinstance(error, OSError):
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return problem("unavailable", f"the scheduler has no free file descriptors: {error}")
        return problem("disk_refuses", f"the scheduler cannot write or read its disk: {error}")
    if not isinstance(error, PsError):
        log.error("job.bug", exc_info=error)
    return as_problem(error)
