"""A model, as the blocking client sees it."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paramserver.client import checkpointing, control, transfer
from paramserver.client.arrays import Params
from paramserver.client.calls import Call, Deadline
from paramserver.client.cluster import Cluster, model_path
from paramserver.client.consistency import Consistency
from paramserver.client.control import Point
from paramserver.client.encoding import codec_of
from paramserver.client.frames import PushTerms
from paramserver.client.gradient_arrays import GradientArrays
from paramserver.client.gradients import Grads
from paramserver.client.numbers import PushNumbers
from paramserver.client.optimizers import Optimizer
from paramserver.client.pushed import Pushed
from paramserver.client.spec_builder import patch_document
from paramserver.client.worker import Worker
from paramserver.codecs.codec import Codec
from paramserver.core.fields import check_model_name
from paramserver.core.selection import Names, Ranges
from paramserver.errors import PsError, problem

if TYPE_CHECKING:
    from paramserver.client.client import Client


class Model:
    """One model of the cluster.  Nothing is asked before the first call; safe to share between threads."""

    def __init__(self, client: "Client", name: str, codec: Codec | None = None) -> None:
        self._client = client
        self.name = check_model_name(name)
        self._codec = codec

    def __repr__(self) -> str:
        return f"<Model {self.name!r} at {self._client.url}>"

    def pull(
        self,
        names: Names | None = None,
        *,
        ranges: Ranges | None = None,
        out: Params | None = None,
        dtype: str | None = None,
        min_version: int = 0,
        wait_s: float = 0.0,
        copy: bool = True,
        timeout: float | None = None,
    ) -> Params:
        """The present values, as arrays of the caller's own.

        Args:
            names: parameter names or patterns; None: all.
            ranges: flat element ranges [start, stop) of some parameters, which then come 1-D.
            out: an earlier pull of the same selection, whose memory is used again.
            dtype: "float16", "bfloat16", "float32" or "float64"; None: the parameters' own.
            min_version: the version every partition must have reached, within `wait_s` seconds.
            copy: False for read-only arrays shared by all threads of this client; those at hand are returned without
                asking the cluster if `min_version` is given and they are new enough.

        Raises NotFoundError, ConflictError (`version_not_reached`), Unavailable.
        """
        client = self._client
        options: dict[str, Any] = {"names": names, "ranges": ranges, "dtype": dtype, "min_version": min_version}
        if not copy:
            if out is not None:
                raise problem("invalid_field", "out= and copy=False exclude each other")
            return client.shared.pull(self.name, options, wait_s, client.run, client.deadline(timeout, wait_s))
        call = transfer.pull(
            client.cluster, self.name, client.deadline(timeout, wait_s), out=out, wait_s=wait_s, **options
        )
        return client.run(call)

    def push(
        self,
        grads: Grads,
        *,
        base: Params | None = None,
        weight: float = 1.0,
        ranges: Ranges | None = None,
        dtype: str | None = None,
        codec: str | None = None,
        ack: str | None = None,
        timeout: float | None = None,
    ) -> Pushed:
        """Push a gradient; it is applied exactly once on every partition it touches.

        Args:
            grads: arrays under parameter names, each of its parameter's shape, or one flat vector of the whole model.
            base: the pull that the gradient was computed from; version lag is counted from it.
            weight: factor of the gradient.  A mean is divided by the number of its contributions, not by their weights:
                for one over samples of unequal batches it is own batch / mean batch.
            ranges: flat element ranges; the arrays of those parameters are then 1-D with just these elements.
            dtype: in which the elements travel; None: float16 and bfloat16 as they are, everything else as float32.
            codec: how they travel, instead of a dtype: "fp16", "bf16+zstd", "fp32+lz4" (docs/codecs.md); "int8" and
                "topk" are for workers, which remember what those leave out.
            ack: ask for more than the model's acknowledgement level.

        Raises RequestError listing everything that is wrong with it, before anything is sent; ConflictError
        (`worker_required`) in sync and ssp mode; Unavailable, of which InDoubt says that it may have been applied.
        """
        client = self._client
        terms = {"weight": weight, "ack": ack, "base": base}
        options = {"ranges": ranges, "dtype": dtype, "codec": codec_of(codec, dtype, self._codec)}
        return client.run(
            push_numbered(
                client.cluster, client.numbers(self.name), self.name, client.deadline(timeout), grads, terms, options
            )
        )

    def pushpull(
        self,
        grads: Grads,
        *,
        base: Params | None = None,
        out: Params | None = None,
        weight: float = 1.0,
        ranges: Ranges | None = None,
        dtype: str | None = None,
        codec: str | None = None,
        timeout: float | None = None,
    ) -> Params:
        """Push a gradient and get the values that the model has then, in one round trip."""
        client = self._client
        terms = {"weight": weight, "base": base}
        options = {"ranges": ranges, "dtype": dtype, "codec": codec_of(codec, dtype, self._codec), "out": out}
        return client.run(
            pushpull_numbered(
                client.cluster, client.numbers(self.name), self.name, client.deadline(timeout), grads, terms, options
            )
        )

    def gradients(self, *, timeout: float | None = None) -> GradientArrays:
        """Arrays to compute gradients in: what is pushed from them need not be copied on the shard's own machine.

            grads = model.gradients()
            while training:
                backward(values, out=grads)          # grads["w"][...] = ..., or into grads.flat
                model.push(grads)

        Elsewhere they are plain arrays.  Several can be had, to fill one while another is pushed.
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
        """A worker of this model, to be used in a `with` statement.

        A `name` that was used before takes that worker's place, epoch and state.  `codec` is how its gradients travel
        unless a push says otherwise: "int8", "topk:0.01", "bf16+zstd" (docs/codecs.md).
        """
        return Worker(self._client, self.name, name, rank, timeout, codec_of(codec, None, self._codec))

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
        """Change settings while it trains; in force within a second, in sync at one and the same clock.

        `fields` are single settings of the optimizer, such as `lr=0.05`; `params` changes `lr_scale`, `weight_decay`
        and `trainable` of parameters.
        """
        others = {"evaluate_every": evaluate_every, "checkpoint": checkpoint}
        patch = patch_document(optimizer, consistency, params, others, fields)
        client = self._client
        client.run(control.patch_model(client.cluster, self.name, patch, client.deadline(timeout)))

    def assign(self, values: Mapping[str, Any], *, timeout: float | None = None) -> None:
        """Give parameters new values, each of its parameter's shape; optimizer state stays."""
        self._client.run(control.assign(self._client.cluster, self.name, values, self._client.deadline(timeout)))

    def info(self, *, timeout: float | None = None) -> dict[str, Any]:
        """The model's document: spec, clock, versions and owner of each partition."""
        return dict(self._client.run(control.fetch(model_path(self.name), self._client.deadline(timeout))))

    def delete(self, *, timeout: float | None = None) -> None:
        """Remove the model with its values; checkpoints on disk stay."""
        self._client.run(control.delete_model(self._client.cluster, self.name, self._client.deadline(timeout)))

    def checkpoint(
        self, path: str | os.PathLike[str], *, overwrite: bool = False, timeout: float | None = None
    ) -> dict[str, Any]:
        """Write a checkpoint to a folder of this machine; its manifest.

        Raises ConflictError (`conflict`) if the folder is there and may not be replaced.
        """
        client = self._client
        deadline = client.deadline(timeout)
        return dict(
            client.run(checkpointing.save(client.cluster, self.name, os.fspath(path), deadline, overwrite=overwrite))
        )

    def workers(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """The model's workers, by rank, with clocks and heartbeat ages."""
        return self._listed("workers", timeout)

    def metrics(self, name: str, *, timeout: float | None = None) -> list[Point]:
        """The points of one metric that workers have reported, oldest first: (time_s, clock, worker, value)."""
        return self._client.run(control.metric_points(self.name, name, self._client.deadline(timeout)))

    def add_tasks(
        self,
        dataset: str,
        *,
        size: int | None = None,
        chunk: int | None = None,
        ranges: Sequence[tuple[int, int]] | None = None,
        epochs: int | None = 1,
        uri: str | None = None,
        static: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Register a dataset as ranges that workers lease; the same again changes nothing.

        Either `size` elements in pieces of `chunk`, or `ranges`.  They are worked through `epochs` times (None: for
        ever).  `static`: each range always goes to the same rank.
        """
        body = control.dataset_document(dataset, size, chunk, ranges, uri, epochs, "static" if static else "dynamic")
        self._client.run(control.send("POST", model_path(self.name, "tasks"), body, self._client.deadline(timeout)))

    def tasks(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """The datasets, with how much of each is free, leased and done."""
        return self._listed("tasks", timeout)

    def evaluate(self, *, timeout: float | None = None) -> None:
        """Ask for an evaluation at the present clock, which the next worker that looks makes."""
        path = model_path(self.name, "evaluations")
        self._client.run(control.send("POST", path, None, self._client.deadline(timeout)))

    def save(self, name: str | None = None, *, timeout: float | None = None) -> dict[str, Any]:
        """Have the cluster write a checkpoint below its own state directory; its document."""
        path = model_path(self.name, "checkpoints")
        body = {} if name is None else {"name": name}
        return dict(self._client.run(control.once(path, body, self._client.deadline(timeout))))

    def checkpoints(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """The checkpoints that the cluster keeps of this model."""
        return self._listed("checkpoints", timeout)

    def restore(self, checkpoint: str = "latest", *, timeout: float | None = None) -> None:
        """Set the model to a checkpoint that the cluster keeps: its name, `latest` or `best`."""
        path = model_path(self.name, "restore")
        body = {"checkpoint": checkpoint}
        self._client.run(control.once(path, body, self._client.deadline(timeout)))

    def _listed(self, noun: str, timeout: float | None) -> list[dict[str, Any]]:
        return self._client.run(control.listed(model_path(self.name, noun), self._client.deadline(timeout)))


def push_numbered(
    cluster: Cluster,
    numbers: PushNumbers,
    model: str,
    deadline: Deadline,
    grads: Grads,
    terms: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Call[Pushed]:
    """A push of a sender that joined nothing."""
    push_id = yield from numbers.take(deadline)
    try:
        return (yield from transfer.push(cluster, model, deadline, grads, PushTerms(push_id, **terms), **options))
    except PsError as e:
        raise _with_hint(e) from None
    finally:
        numbers.settle(push_id)


def pushpull_numbered(
    cluster: Cluster,
    numbers: PushNumbers,
    model: str,
    deadline: Deadline,
    grads: Grads,
    terms: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Call[Params]:
    """A pushpull of a sender that joined nothing."""
    push_id = yield from numbers.take(deadline)
    try:
        call = transfer.pushpull(cluster, model, deadline, grads, PushTerms(push_id, **terms), **options)
        _, params = yield from call
        return params
    except PsError as e:
        raise _with_hint(e) from None
    finally:
        numbers.settle(push_id)


def _with_hint(error: PsError) -> PsError:
    if error.code != "worker_required":
        return error
    hint = "with model.worker() as w: w.push(...)"
    return problem(error.code, error.detail, hint=hint, errors=error.errors, **error.members)
