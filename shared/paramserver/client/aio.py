"""The asyncio client: the same calls and names as the blocking one, awaited.

The arguments are documented in `Client`, `Model` and `Worker`; only differences are noted here.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar, overload

from paramserver import limits
from paramserver.client import checkpointing, control, transfer
from paramserver.client.aio_worker import AsyncWorker
from paramserver.client.arrays import Params
from paramserver.client.client_base import ClientBase
from paramserver.client.cluster import ModelMap, model_path
from paramserver.client.consistency import Consistency
from paramserver.client.control import Point
from paramserver.client.gradient_arrays import GradientArrays
from paramserver.client.gradients import Grads
from paramserver.client.model_base import ModelBase
from paramserver.client.optimizers import Optimizer
from paramserver.client.pushed import Pushed
from paramserver.client.rows import Rows
from paramserver.client.spec_builder import ParamLike, model_document, patch_document
from paramserver.core.selection import Names, Ranges
from paramserver.errors import InDoubt, PsError
from paramserver.net.addresses import urls_of
from paramserver.net.calls import Call
from paramserver.net.credentials import Credentials
from paramserver.net.transport import AsyncTransport
from paramserver.types import DTypeLike

T = TypeVar("T")


class AsyncClient(ClientBase):
    """A connection to one cluster, for one event loop; close it, or use it in `async with`.

    Sends nothing before the first call.  Takes the arguments of `ps.connect`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        timeout: float = limits.CLIENT_TIMEOUT_S,
        token: str | None = None,
        ca: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(urls_of(url, os.environ), timeout)
        self.transport = AsyncTransport(self.urls, Credentials.found(token, ca, os.environ))

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self} cannot be pickled, nor can its models and workers: make another in the other process")

    async def close(self) -> None:
        """Close all connections, and return slots and leases to shards on this machine."""
        try:
            self.shared.drop()
            await self.run(self.cluster.leave())
        finally:  # also if this task is cancelled
            await self.transport.close()

    async def run(self, call: Call[T]) -> T:
        """Run a call to completion and return its result."""
        return await self.transport.run(call)

    async def _create(self, call: Call[ModelMap], creation: control.Creation) -> ModelMap:
        """Run a call that makes a model; if it is interrupted or ends in doubt, remove what it may have made."""
        try:
            return await self.run(call)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, PsError) and not isinstance(error, InDoubt):
                raise  # the call itself has removed it, or made none
            await self.run(creation.remove())
            raise

    def model(self, name: str, *, codec: str | None = None) -> "AsyncModel":
        """Return a handle for the model of that name; the first call fails if there is none."""
        return AsyncModel(self, name, codec)

    async def create_model(
        self,
        name: str,
        params: Mapping[str, ParamLike],
        *,
        optimizer: Optimizer | Mapping[str, Any] | str | None = None,
        consistency: Consistency | Mapping[str, Any] | str | None = None,
        partitions: int | None = None,
        ack: str | None = None,
        evaluate_every: int | None = None,
        checkpoint: Mapping[str, Any] | None = None,
        exist_ok: bool = False,
        timeout: float | None = None,
    ) -> "AsyncModel":
        """See `Client.create_model`."""
        others = {"partitions": partitions, "ack": ack, "evaluate_every": evaluate_every, "checkpoint": checkpoint}
        body, uploads = model_document(name, params, optimizer, consistency, others)
        creation, deadline = control.Creation(), self.deadline(timeout)
        call = control.create_model(self.cluster, body, uploads, deadline, creation, exist_ok=exist_ok)
        return AsyncModel(self, name, generation=(await self._create(call, creation)).generation)

    async def models(self, *, timeout: float | None = None) -> list[str]:
        """Return the names of all models."""
        return [str(m["name"]) for m in await self.run(control.listed("/models", self.deadline(timeout)))]

    async def status(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the answer of `GET /status`."""
        return dict(await self.run(control.fetch("/status", self.deadline(timeout))))

    async def restore(
        self,
        path: str | os.PathLike[str],
        *,
        as_: str | None = None,
        partitions: int | None = None,
        exist_ok: bool = False,
        timeout: float | None = None,
    ) -> "AsyncModel":
        """See `Client.restore`."""
        creation, deadline = control.Creation(), self.deadline(timeout)
        call = checkpointing.restore(
            self.cluster, os.fspath(path), as_, partitions, deadline, creation, exist_ok=exist_ok
        )
        made = await self._create(call, creation)
        return AsyncModel(self, made.name, generation=made.generation)

    async def create_run(
        self,
        model: str,
        entry: str,
        *,
        name: str | None = None,
        args: Mapping[str, Any] | None = None,
        workers: int = 1,
        stop: Mapping[str, Any] | None = None,
        evaluate_every: int = 0,
        checkpoint_every: int = 0,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """See `Client.create_run`."""
        body = control.run_document(model, entry, name, args, workers, stop, evaluate_every, checkpoint_every)
        return dict(await self.run(control.post_unrepeatable("/runs", body, self.deadline(timeout))))

    async def runs(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return the runs that the cluster keeps, newest first."""
        return await self.run(control.listed("/runs", self.deadline(timeout)))

    async def get_run(self, run: str, *, timeout: float | None = None) -> dict[str, Any]:
        """Return one run: its state, its places, and the reason if it failed."""
        return dict(await self.run(control.fetch(control.run_path(run), self.deadline(timeout))))

    async def set_run(self, run: str, *, timeout: float | None = None, **changes: Any) -> dict[str, Any]:
        """See `Client.set_run`."""
        return dict(await self.run(control.send("PATCH", control.run_path(run), changes, self.deadline(timeout))))

    async def request(self, method: str, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        """See `Client.request`."""
        return await self.run(control.request(method, path, body, self.deadline(timeout)))


class AsyncModel(ModelBase):
    """One model of the cluster."""

    _client: AsyncClient

    async def pull(
        self,
        names: Names | None = None,
        *,
        ranges: Ranges | None = None,
        rows: Rows | None = None,
        out: Params | None = None,
        dtype: DTypeLike | None = None,
        min_version: int = 0,
        wait_s: float = 0.0,
        copy: bool = True,
        timeout: float | None = None,
    ) -> Params:
        """See `Model.pull`."""
        options: dict[str, Any] = {"names": names, "ranges": ranges, "rows": rows, "dtype": dtype}
        return await self._client.run(
            self._pull(out, timeout, wait_s=wait_s, copy=copy, min_version=min_version, **options)
        )

    async def gradients(self, *, timeout: float | None = None) -> GradientArrays:
        """See `Model.gradients`."""
        client = self._client
        return await client.run(client.cluster.gradients(self.name, client.deadline(timeout)))

    async def push(
        self,
        grads: Grads,
        *,
        base: Params | None = None,
        weight: float = 1.0,
        ranges: Ranges | None = None,
        rows: Rows | None = None,
        dtype: DTypeLike | None = None,
        codec: str | None = None,
        ack: str | None = None,
        timeout: float | None = None,
    ) -> Pushed:
        """See `Model.push`; the arrays must not be changed before it returns."""
        how: dict[str, Any] = {"codec": codec, "dtype": dtype, "ranges": ranges, "rows": rows}
        return await self._client.run(
            self._numbered(transfer.push, grads, timeout, **how, weight=weight, ack=ack, base=base)
        )

    async def pushpull(
        self,
        grads: Grads,
        *,
        base: Params | None = None,
        out: Params | None = None,
        weight: float = 1.0,
        ranges: Ranges | None = None,
        rows: Rows | None = None,
        dtype: DTypeLike | None = None,
        codec: str | None = None,
        ack: str | None = None,
        timeout: float | None = None,
    ) -> Params:
        """See `Model.pushpull`."""
        how: dict[str, Any] = {"codec": codec, "dtype": dtype, "ranges": ranges, "rows": rows}
        send = partial(transfer.pushpull, out=out)
        _, params = await self._client.run(
            self._numbered(send, grads, timeout, **how, weight=weight, ack=ack, base=base)
        )
        return params

    def worker(
        self,
        name: str | None = None,
        *,
        rank: int | None = None,
        codec: str | None = None,
        timeout: float | None = None,
    ) -> AsyncWorker:
        """Return a worker of this model, to be used in an `async with` statement."""
        return AsyncWorker(self._client, self.name, name, rank, timeout, self._encoding.of_call(codec=codec).codec)

    async def set(
        self,
        *,
        optimizer: Optimizer | Mapping[str, Any] | str | None = None,
        consistency: Consistency | Mapping[str, Any] | str | None = None,
        params: Mapping[str, Mapping[str, Any]] | None = None,
        evaluate_every: int | None = None,
        checkpoint: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> None:
        """See `Model.set`."""
        others = {"evaluate_every": evaluate_every, "checkpoint": checkpoint}
        patch = patch_document(optimizer, consistency, params, others, fields)
        c = self._client
        await c.run(control.patch_model(c.cluster, self.name, self._generation, patch, c.deadline(timeout)))

    async def assign(self, values: Mapping[str, Any], *, timeout: float | None = None) -> None:
        """See `Model.assign`."""
        await self._client.run(control.assign(self._client.cluster, self.name, values, self._client.deadline(timeout)))

    async def info(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the model's document."""
        return dict(await self._client.run(control.fetch(model_path(self.name), self._client.deadline(timeout))))

    async def delete(self, *, timeout: float | None = None) -> None:
        """See `Model.delete`."""
        c = self._client
        await c.run(control.delete_model(c.cluster, self.name, self._generation, c.deadline(timeout)))

    async def checkpoint(
        self, path: str | os.PathLike[str], *, overwrite: bool = False, timeout: float | None = None
    ) -> dict[str, Any]:
        """See `Model.checkpoint`."""
        c = self._client
        call = checkpointing.save(c.cluster, self.name, os.fspath(path), c.deadline(timeout), overwrite=overwrite)
        return dict(await c.run(call))

    async def workers(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return the model's workers, by rank."""
        return await self._client.run(self._listed("workers", timeout))

    @overload
    async def metrics(self, name: str, *, timeout: float | None = None) -> list[Point]: ...
    @overload
    async def metrics(self, name: None = None, *, timeout: float | None = None) -> dict[str, list[Point]]: ...
    async def metrics(
        self, name: str | None = None, *, timeout: float | None = None
    ) -> list[Point] | dict[str, list[Point]]:
        """See `Model.metrics`."""
        found = await self._client.run(control.metric_points(self.name, name, self._client.deadline(timeout)))
        return found if name is None else found.get(name, [])

    async def add_tasks(
        self,
        dataset: str,
        *,
        size: int | None = None,
        task_size: int | None = None,
        ranges: Sequence[tuple[int, int]] | None = None,
        passes: int | None = 1,
        uri: str | None = None,
        static: bool = False,
        timeout: float | None = None,
    ) -> None:
        """See `Model.add_tasks`."""
        body = control.dataset_document(
            dataset, size, task_size, ranges, uri, passes, "static" if static else "dynamic"
        )
        await self._client.run(self._post("tasks", body, timeout))

    async def tasks(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """See `Model.tasks`."""
        return await self._client.run(self._listed("tasks", timeout))

    async def delete_tasks(self, dataset: str, *, timeout: float | None = None) -> None:
        """See `Model.delete_tasks`."""
        await self._client.run(control.delete(model_path(self.name, "tasks", dataset), self._client.deadline(timeout)))

    async def evaluate(self, *, timeout: float | None = None) -> None:
        """Request an evaluation at the current clock."""
        await self._client.run(self._post("evaluations", None, timeout))

    async def save(self, name: str | None = None, *, timeout: float | None = None) -> dict[str, Any]:
        """Have the cluster write a checkpoint below its own state directory; return its document."""
        return await self._client.run(self._save(name, timeout))

    async def checkpoints(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return the checkpoints that the cluster keeps of this model."""
        return await self._client.run(self._listed("checkpoints", timeout))

    async def delete_checkpoint(self, name: str, *, timeout: float | None = None) -> None:
        """See `Model.delete_checkpoint`."""
        path = model_path(self.name, "checkpoints", name)
        await self._client.run(control.delete(path, self._client.deadline(timeout)))

    async def restore(
        self,
        checkpoint: str = "latest",
        *,
        as_: str | None = None,
        partitions: int | None = None,
        exist_ok: bool = False,
        timeout: float | None = None,
    ) -> "AsyncModel":
        """See `Model.restore`."""
        restoring = self._restore(checkpoint, as_, partitions, timeout, exist_ok=exist_ok)
        name, generation = await self._client.run(restoring)
        return self if name == self.name else AsyncModel(self._client, name, generation=generation)
