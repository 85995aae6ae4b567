"""A model of the blocking client."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from paramserver.client import checkpointing, control, transfer
from paramserver.client.arrays import Params
from paramserver.client.cluster import model_path
from paramserver.client.consistency import Consistency
from paramserver.client.control import Point
from paramserver.client.gradient_arrays import GradientArrays
from paramserver.client.gradients import Grads
from paramserver.client.model_base import ModelBase
from paramserver.client.optimizers import Optimizer
from paramserver.client.pushed import Pushed
from paramserver.client.rows import Rows
from paramserver.client.spec_builder import patch_document
from paramserver.client.worker import Worker
from paramserver.core.selection import Names, Ranges
from paramserver.types import DTypeLike

if TYPE_CHECKING:
    from paramserver.client.client import Client


class Model(ModelBase):
    """One model of the cluster.  Sends nothing before the first call; safe to share between threads."""

    _client: "Client"

    def pull(
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
        """Pull the current values, as arrays that the caller owns.

        Args:
            names: parameter names or patterns; None: all.
            ranges: flat element ranges [start, stop) of some parameters, whose arrays are then 1-D.
            rows: row numbers of some parameters, in any order and as often as wanted, whose arrays have these rows.
            out: an earlier pull of the same selection, whose memory is reused.
            dtype: "float16", "bfloat16", "float32" or "float64", or NumPy's own; None: the parameters' own.
            min_version: the version every partition must have reached, within `wait_s` seconds and before the timeout.
            copy: False for read-only arrays; with `min_version` all threads of this client share them: if those of an
                earlier such pull are new enough, they are returned without a request.

        Raises NotFoundError, ConflictError (`version_not_reached`), Unavailable.
        """
        options: dict[str, Any] = {"names": names, "ranges": ranges, "rows": rows, "dtype": dtype}
        return self._client.run(self._pull(out, timeout, wait_s=wait_s, copy=copy, min_version=min_version, **options))

    def push(
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
        """Push a gradient; it is applied exactly once on every partition it touches.

        Args:
            grads: arrays by parameter name, each of its parameter's shape, or one flat vector of the whole model.
            base: the pull that the gradient was computed from; the version lag is counted from it.
            weight: factor of the gradient.  Means are divided by the number of contributions, not by the sum of their
                weights: for a mean over samples of unequal batches, use own batch size / mean batch size.
            ranges: flat element ranges; the arrays of those parameters are then 1-D and hold only these elements.
            rows: row numbers, in any order; the arrays of those parameters hold only these rows.  The gradients of a
                row that is named more than once are added up, in float32 and in their order.
            dtype: dtype in which the elements are sent; None: float16 and bfloat16 as they are, all others as float32.
            codec: encoding in which they are sent, instead of a dtype: "fp16", "bf16+zstd", "fp32+lz4"
                (docs/codecs.md); "int8" and "topk" are for workers, which add what these leave out to the next push.
            ack: a higher acknowledgement level than the model's own: "journaled" or "fsynced"; refused in sync mode.

        Raises RequestError listing everything that is wrong, before anything is sent; ConflictError (`worker_required`)
        in sync and ssp mode; Unavailable, or its subclass InDoubt if the push may have been applied.
        """
        how: dict[str, Any] = {"codec": codec, "dtype": dtype, "ranges": ranges, "rows": rows}
        return self._client.run(self._numbered(transfer.push, grads, timeout, **how, weight=weight, ack=ack, base=base))

    def pushpull(
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
        """Push a gradient and return the values after it, in one round trip if the gradient covers the whole model.

        The arguments are those of `push`; `out` is an earlier pull of the whole model, whose memory is reused.  Raises
        what `push` raises, InDoubt also if the push was accepted and the values did not come.
        """
        how: dict[str, Any] = {"codec": codec, "dtype": dtype, "ranges": ranges, "rows": rows}
        send = partial(transfer.pushpull, out=out)
        _, params = self._client.run(self._numbered(send, grads, timeout, **how, weight=weight, ack=ack, base=base))
        return params

    def gradients(self, *, timeout: float | None = None) -> GradientArrays:
        """Return arrays to compute gradients in; on the shard's own machine, pushing them needs no copy.

            grads = model.gradients()
            while training:
                backward(values, out=grads)          # grads["w"][...] = ..., or into grads.flat
                model.push(grads)

        Elsewhere they are plain arrays.  Each call returns new ones, so one set can be filled while another is pushed.
        """
        client = self._client
        return client.run(client.cluster.gradients(self.name, client.deadline(timeout)))

    def worker(
        self,
        name: str | None = None,
        *,
        rank: int | None = None,
        codec: str | None = None,
        timeout: float | None = None,
    ) -> Worker:
        """Return a worker of this model, to be used in a `with` statement.

        A `name` that was used before takes over that worker's place and state, under a higher epoch.  `codec` encodes
        its gradients unless a push names another: "int8", "topk:0.01", "bf16+zstd" (docs/codecs.md).
        """
        return Worker(self._client, self.name, name, rank, timeout, self._encoding.of_call(codec=codec).codec)

    def set(
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
        """Change settings during training; they take effect within a second, in sync at the same clock everywhere.

        `fields` are single settings of the optimizer, such as `lr=0.05`; `params` changes `lr_scale`, `weight_decay`
        and `trainable` of parameters.
        """
        others = {"evaluate_every": evaluate_every, "checkpoint": checkpoint}
        patch = patch_document(optimizer, consistency, params, others, fields)
        client = self._client
        deadline = client.deadline(timeout)
        client.run(control.patch_model(client.cluster, self.name, self._generation, patch, deadline))

    def assign(self, values: Mapping[str, Any], *, timeout: float | None = None) -> None:
        """Set parameters to new values, each of its parameter's shape; optimizer state is kept.

        Parameters change one after another; one of more than 64 MiB, partition by partition.
        """
        self._client.run(control.assign(self._client.cluster, self.name, values, self._client.deadline(timeout)))

    def info(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the model's document: spec, clock, and the version and owner of each partition."""
        return dict(self._client.run(control.fetch(model_path(self.name), self._client.deadline(timeout))))

    def delete(self, *, timeout: float | None = None) -> None:
        """Delete the model with its values; checkpoints on disk are kept.

        Raises FencedError (`model_replaced`) if this object made the model, or pulled from it or pushed to it, and it
        was deleted and created again since.  So do `set`, `save` and `restore`.
        """
        client, deadline = self._client, self._client.deadline(timeout)
        client.run(control.delete_model(client.cluster, self.name, self._generation, deadline))

    def checkpoint(
        self, path: str | os.PathLike[str], *, overwrite: bool = False, timeout: float | None = None
    ) -> dict[str, Any]:
        """Write a checkpoint to a folder on this machine and return its manifest.

        Raises ConflictError (`conflict`) if the folder exists and may not be replaced.
        """
        client = self._client
        deadline = client.deadline(timeout)
        return dict(
            client.run(checkpointing.save(client.cluster, self.name, os.fspath(path), deadline, overwrite=overwrite))
        )

    def workers(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return the model's workers, by rank, with clocks and heartbeat ages."""
        return self._client.run(self._listed("workers", timeout))

    @overload
    def metrics(self, name: str, *, timeout: float | None = None) -> list[Point]: ...
    @overload
    def metrics(self, name: None = None, *, timeout: float | None = None) -> dict[str, list[Point]]: ...
    def metrics(self, name: str | None = None, *, timeout: float | None = None) -> list[Point] | dict[str, list[Point]]:
        """Return the reported points of one metric, oldest first: (time_s, clock, worker, value); None: of all by name.

        A metric that no worker has reported has none.
        """
        found = self._client.run(control.metric_points(self.name, name, self._client.deadline(timeout)))
        return found if name is None else found.get(name, [])

    def add_tasks(
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
        """Register a dataset as ranges that workers lease; repeating the same call changes nothing.

        Give either `size` elements in ranges of `task_size` (None: in at most 64 equal ranges), or `ranges`.  They are
        handed out `passes` times (None: without end).  `static`: range i goes to live worker i modulo
        their number, in order of rank, so always to the same one as long as none joins or leaves.

        A dataset that is finished stays finished, also for later runs: `delete_tasks` first, to go through it again.

        Raises ConflictError (`conflict`) if the name has another dataset, or there is no room for one more.
        """
        body = control.dataset_document(
            dataset, size, task_size, ranges, uri, passes, "static" if static else "dynamic"
        )
        self._client.run(self._post("tasks", body, timeout))

    def tasks(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return the datasets: how many ranges each has (`tasks`), and how many are leased, and done in all passes."""
        return self._client.run(self._listed("tasks", timeout))

    def delete_tasks(self, dataset: str, *, timeout: float | None = None) -> None:
        """Delete a dataset with its progress, finished or not; workers that go on with it get NotFoundError.

        Raises NotFoundError (`unknown_task`) if there is none of that name.
        """
        self._client.run(control.delete(model_path(self.name, "tasks", dataset), self._client.deadline(timeout)))

    def evaluate(self, *, timeout: float | None = None) -> None:
        """Request an evaluation at the current clock; the next worker that checks for one performs it."""
        self._client.run(self._post("evaluations", None, timeout))

    def save(self, name: str | None = None, *, timeout: float | None = None) -> dict[str, Any]:
        """Have the cluster write a checkpoint below its own state directory; return its document.

        One with a `name` is never removed automatically; one without is, once it is neither among the newest `keep`
        without names (see `checkpoint=` of `create_model`) nor the best of them.

        Raises ConflictError (`conflict`) while the name is in use; `delete_checkpoint` frees it.
        """
        return self._client.run(self._save(name, timeout))

    def checkpoints(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return the checkpoints of this model that the cluster keeps."""
        return self._client.run(self._listed("checkpoints", timeout))

    def delete_checkpoint(self, name: str, *, timeout: float | None = None) -> None:
        """Delete a checkpoint that the cluster keeps, also one of an earlier model of this name.

        Raises NotFoundError (`unknown_checkpoint`), Unavailable if a scheduler that has its files does not run.
        """
        self._client.run(control.delete(model_path(self.name, "checkpoints", name), self._client.deadline(timeout)))

    def restore(
        self,
        checkpoint: str = "latest",
        *,
        as_: str | None = None,
        partitions: int | None = None,
        exist_ok: bool = False,
        timeout: float | None = None,
    ) -> "Model":
        """Restore a checkpoint that the cluster keeps, by its name, `latest` or `best`; return the restored model.

        Args:
            as_: name of another model, which is created; None: this one is set to the checkpoint's values.
            partitions: number of partitions of a model that is created; None: as in the checkpoint.
            exist_ok: set the model that `as_` names to the checkpoint's values if it exists.

        Raises NotFoundError (`unknown_checkpoint`), ConflictError (`model_exists`).
        """
        restoring = self._restore(checkpoint, as_, partitions, timeout, exist_ok=exist_ok)
        name, generation = self._client.run(restoring)
        return self if name == self.name else Model(self._client, name, generation=generation)
