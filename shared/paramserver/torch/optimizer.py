"""`ParameterServerOptimizer`, which a training loop uses in place of a torch optimizer.

The cluster holds the optimizer's state and makes its steps; this class sends gradients and receives parameters.
"""

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from math import nan
from time import monotonic
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch import Tensor

from paramserver.client.arrays import Origin, Params
from paramserver.client.client import Client, connect
from paramserver.client.cluster import ModelMap
from paramserver.client.consistency import Consistency
from paramserver.client.encoding import NO_ENCODING, Encoding
from paramserver.client.iterations import pulling_after
from paramserver.client.model import Model
from paramserver.client.optimizers import Optimizer
from paramserver.client.pushed import Pushed
from paramserver.client.transfer import wire_dtype
from paramserver.client.worker import Worker
from paramserver.codecs.codec import Codec
from paramserver.core.selection import select
from paramserver.errors import AuthError, ConflictError, NotFoundError, PsError, Unavailable, is_foreign, problem
from paramserver.limits import CLIENT_TIMEOUT_S
from paramserver.torch.buffers import GradientBuffers, HostGradients, SideStream
from paramserver.torch.fitting import as_array, as_params, check_fit, named_parameters, other_settings
from paramserver.torch.tables import LazyTables, RowGradients, sparse_rows
from paramserver.wire.tensor import HANDED_OUT

log = logging.getLogger("paramserver")
PULL_CODINGS: Final = ("float32", "float16", "bfloat16")
SETTINGS: Final = frozenset(
    "alpha amsgrad betas centered dampening eps lr_decay maximize momentum nesterov weight_decay".split()
)
"""Fields of a parameter group in torch that are the model's here."""
RATE_S: Final = 1.0
"""How long a step outside sync, which needs no scheduler, tries to send a changed learning rate."""
RATE_AGAIN_S: Final = 10.0
"""After how long a later step tries again, if that failed."""
DONE: Final = "the step is done; get the parameters with opt.pull(). Another step would count its gradient twice"


class ParameterServerOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose state and steps are in a cluster.

    `step()` pushes the gradients, finishes the worker's clock (which in sync and ssp waits for other workers) and pulls
    the parameters.  torch's learning-rate schedulers work with it: the live worker of the lowest rank passes changes
    on to the cluster.

    Args:
        net: a module, or its `named_parameters()`.
        model: a `ps.Model`; a model's URL (`http://localhost:8700/models/demo`); a model's name, at PARAMSERVER_URL; or
            a `ps.Worker` that has joined, such as the one passed to the functions of a run.
        optimizer: used to create the model if it does not exist, e.g. `ps.Adam(lr=1e-3)`.  For an existing model it
            only sets `param_groups[0]["lr"]`, which the first step of the live worker of the lowest rank sends to the
            cluster; if the model's optimizer is another one, the log says so.
        create: whether to create a missing model, with the module's shapes and values.  Of several workers, one
            uploads its values and the others start from them.
        consistency: consistency of a model created here (None: async); if an existing one's differs, the log says so.
        codec: encoding of gradients: "fp32", "fp16", "bf16", "int8", "topk:0.01", each optionally followed by "+zstd"
            or "+lz4"; None: that of the `ps.Model` or `ps.Worker` passed, else "fp32".
        pull_codec: encoding of parameters: "fp32", "fp16" or "bf16"; None: the dtypes of the model.
        lazy_tables: whether the tables of `nn.Embedding(..., sparse=True)`, and of `nn.EmbeddingBag`, are pulled by the
            rows that each forward pass looks up, instead of whole after each step.  Their other rows in the module are
            then old, until `pull()`.
        rank: the worker's rank; None: the lowest free one.
        worker: the id to join under; None: a new one.
        partitions, ack: settings of a model created here.
        timeout: timeout of each request to the cluster, in seconds; waiting for other workers has none.  A `ps.Worker`
            has its own, and its rank and id.

    Raises RequestError listing all differences if the model does not fit the module.  On `close()`, at the end of a
    `with` block and at exit, its worker leaves the cluster, unless it was passed in.  In a notebook use `with`, or name
    the `worker`: the exception that ends a cell keeps the optimizer, and so the worker, alive.
    """

    def __init__(
        self,
        net: Any,
        model: Model | Worker | str,
        optimizer: Optimizer | None = None,
        create: bool = True,
        *,
        consistency: Consistency | str | None = None,
        codec: str | None = None,
        pull_codec: str | None = None,
        lazy_tables: bool = False,
        rank: int | None = None,
        worker: str | None = None,
        partitions: int | None = None,
        ack: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self._params = named_parameters(net)
        self._codec = _encoding_of(model).of_call(codec=codec).codec or Codec.parse("fp32")
        pull = None if pull_codec is None else Codec.parse(pull_codec)
        if self._codec.coding == "float64":
            raise problem("unknown_codec", f"codec '{self._codec.text}' cannot be used here")
        if lazy_tables and self._codec.per_partition:
            raise _of_partitions(self._codec, "lazy_tables")
        if pull and (pull.stage or pull.coding not in PULL_CODINGS):
            raise problem("unknown_codec", f"pull_codec '{pull_codec}' cannot be used here")
        with ExitStack() as stack:
            if isinstance(model, Worker) and (rank, worker, timeout) != (None, None, None):
                raise problem("invalid_field", "rank, worker and timeout are those of the ps.Worker that is passed")
            self._client, name = _resolve_model(model, timeout, stack)
            self._timeout = timeout
            self._model = Model(self._client, name)
            self._create(optimizer if create else None, consistency, partitions, ack)
            model_map = self._map()
            check_fit(self._params, model_map)
            self._warn_of_other_settings(other_settings(model_map.spec, optimizer, consistency))
            if isinstance(model, Worker):
                self._worker = model
            else:
                self._worker = stack.enter_context(Worker(self._client, name, worker, rank, timeout))
            self._rate = model_map.spec.optimizer.lr
            started = getattr(optimizer, "lr", None)
            started = self._rate if started is None else started
            if not self._worker.first:  # of the others only what they change counts, and once they are the first
                self._rate = started
            super().__init__(list(self._params.values()), {"lr": started})
            device = next(iter(self._params.values())).device
            self._buffers: GradientBuffers | HostGradients | None = None
            self._device, self._pull_coding = device, pull.coding if pull else None
            self._tables = LazyTables(net, self._params, weakref.WeakMethod(self._pull_rows)) if lazy_tables else None
            if self._tables is not None:
                stack.callback(self._tables.remove)
            self._allocate_values(model_map)
            self.pull()
            self._leave = stack.pop_all().close
            atexit.register(self._leave)
            self._unclosed = weakref.finalize(self, _leave_in_thread, self._leave)
            self._unclosed.atexit = False
        self._warned_of_ignored = self._may_not_set_rate = False
        self._rate_again_s = 0.0
        """When to try again to send the learning rate, by the monotonic clock; 0: the last attempt succeeded."""
        self.pushed: Pushed | None = None
        """The result of the last push; None before the first."""

    @property
    def worker(self) -> Worker:
        """The worker it trains as, with its rank, clock, `draining`, `report()`, `evaluate()` and `tasks()`."""
        return self._worker

    @property
    def model(self) -> Model:
        """The model it trains."""
        return self._model

    def close(self) -> None:
        """Leave the cluster, unless the worker was passed in; the module keeps its current parameters."""
        if self._unclosed.detach() is not None:
            self._leave()
            atexit.unregister(self._leave)

    def __enter__(self) -> "ParameterServerOptimizer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an optimizer of a cluster cannot be copied or pickled: save its state_dict(), or make another")

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients, finish the clock and pull the parameters; return the closure's loss, if there is one.

        Of a sparse gradient, as of `nn.Embedding(..., sparse=True)`, its rows are pushed; the others keep their state.

        If the model was rolled back to an earlier clock, the push may be dropped (see `pushed.state`); the parameters
        are then those of that clock.  Raises RequestError before anything is sent: `invalid_dtype` for gradients that
        are sparse in another way, `invalid_encoding` for sparse ones with int8 or topk, `invalid_field` if the
        parameter group has a setting besides the rate, which would be ignored, or a lazy table a gradient that is dense
        or of rows that were not pulled since the last step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = {n: p.grad for n, p in self._params.items()}
        sparse = self._sparse(grads)
        self._check_group()
        self._sync_learning_rate()
        dropped = self._push(grads, sparse, float(loss.detach()) if isinstance(loss, Tensor) else loss)
        if self._tables is not None:
            self._tables.pulled.clear()
        with pulling_after(None if dropped else DONE):
            self._pull_values()
        return loss

    def pull(self) -> None:
        """Copy the model's current parameters into the module, without a step; those of lazy tables, too."""
        model_map = self._pull_values()
        if self._tables is not None:
            whole = _Values(model_map.layout, self._dtype, self._device, self._tables.names)
            whole.pull(self._worker, self._params)

    def _pull_values(self) -> ModelMap:
        """Copy what is pulled after each step into the module: everything but lazy tables."""
        model_map = self._checked_map()
        if self._values is not None:
            self._values.pull(self._worker, self._params)
        return model_map

    def _pull_rows(self, name: str, table: Tensor, indices: Tensor) -> None:
        """Copy the rows of a table that are about to be looked up into the module.

        While gradients are recorded each is pulled once in a step, as everything else is.
        """
        assert self._tables is not None
        if table is not self._params[name]:
            return  # that of a replica of the module
        self._checked_map()
        trains = torch.is_grad_enabled()
        rows = self._tables.wanted(name, indices, again=not trains)
        if not rows.size:
            return
        first = self._values is None and not self._tables.pulled
        w, how = self._worker, {"record": trains, "adds": not first}
        held = w._run(w._session.pull(w._deadline(None), rows={name: rows}, dtype=self._dtype, **how))
        with torch.no_grad():
            at = torch.from_numpy(rows).to(table.device)
            table.index_copy_(0, at, torch.from_numpy(held[name]).to(table))
        if trains:
            self._tables.note(name, rows)

    def _sparse(self, grads: Mapping[str, Tensor | None]) -> RowGradients:
        """Return row numbers and gradients of the sparse ones, but of those without rows.

        Raises RequestError for what cannot be sent.
        """
        sparse = sparse_rows(grads)
        if self._tables is not None:
            self._tables.check(grads, sparse)
        if sparse and self._codec.per_partition:
            raise _of_partitions(self._codec, ", ".join(map(repr, sparse)))
        return {n: rows for n, rows in sparse.items() if rows[0].size}

    def _push(self, grads: dict[str, Tensor | None], sparse: RowGradients, loss: float | None) -> bool:
        """Push the gradients and finish the clock; return whether the push was dropped, so that nothing counts."""
        model_map = self._checked_map()
        trainable = {n for n, spec in model_map.layout.by_name.items() if spec.trainable}
        grads = {n: g if g is None or g.layout == torch.strided or n in sparse else None for n, g in grads.items()}
        missing = [n for n, g in grads.items() if g is None and n in trainable]
        present = {n: g for n, g in grads.items() if g is not None}
        self._warn_of_ignored([n for n in present if n not in trainable])
        if not present:
            if loss is not None:
                self._worker.report(loss=loss)
            self._worker.clock()
            return False
        if sparse or (missing and not self._codec.per_partition):  # what has no gradient is left out, keeps its state
            arrays = {n: sparse[n][1] if n in sparse else as_array(g) for n, g in present.items()}
            rows = {n: ids for n, (ids, _) in sparse.items()}
            self.pushed = self._worker.step(arrays, rows=rows, loss=loss, codec=self._codec.text)
        else:
            encoded = self._dense_buffers(model_map).encode(grads)
            self.pushed = self._worker.step(encoded, loss=loss, codec=self._codec.text)
        return self.pushed.state == "dropped"

    def _dense_buffers(self, model_map: ModelMap) -> GradientBuffers | HostGradients:
        """Return buffers for a gradient of the whole model, which pushes of rows do not need."""
        if self._buffers is None and self._device.type == "cpu" and self._codec.text == "fp32":
            self._buffers = HostGradients(self._worker.gradients())
        elif self._buffers is None:
            self._buffers = GradientBuffers(model_map, self._codec, self._device)
        self._buffers.arrange(model_map)
        return self._buffers

    def _warn_of_ignored(self, names: list[str]) -> None:
        """Log a warning, once, that these parameters have gradients which the model ignores."""
        if names and not self._warned_of_ignored:
            self._warned_of_ignored = True
            log.warning(
                "model.ignores_gradients model=%s: not trained, because they were created frozen: %s%s; "
                'opt.model.set(params={%r: {"trainable": True}}) changes that',
                self._model.name,
                ", ".join(repr(n) for n in names[:8]),
                ", ..." if len(names) > 8 else "",
                names[0],
            )

    def _check_group(self) -> None:
        if stray := sorted(SETTINGS & self.param_groups[0].keys()):
            raise problem(
                "invalid_field",
                f"the parameter group has only the learning rate, not {', '.join(stray)}: others are the model's",
                hint=f"opt.model.set({stray[0]}=...), and remove it from opt.param_groups[0]",
            )

    def _sync_learning_rate(self) -> None:
        """If the learning rate has been changed here since it was last sent, and this is the first worker, send it.

        Outside sync a rate that cannot be sent now waits for a later step.
        """
        rate = float(self.param_groups[0]["lr"])
        if rate == self._rate or not self._worker.first or self._may_not_set_rate:
            return
        sync = self._map().spec.consistency.mode == "sync"
        if not sync and monotonic() < self._rate_again_s:
            return
        timeout = self._timeout if sync or (self._timeout or RATE_S) < RATE_S else RATE_S
        try:
            self._model.set(lr=rate, timeout=timeout)
        except PsError as e:
            if isinstance(e, AuthError) and self._worker.rank != 0 and not is_foreign(e):
                self._may_not_set_rate = True  # the worker that could is gone; without it training goes on
                log.warning(
                    "model.rate_stays model=%s: this worker cannot change the learning rate: %s", self._model.name, e
                )
                return
            if not isinstance(e, Unavailable) and not is_foreign(e):
                raise
            self._rate = nan  # it may have been done
            if sync:
                raise
            if not self._rate_again_s:
                detail = "the new learning rate is sent once that works"
                log.warning("model.rate_waits model=%s: %s: %s", self._model.name, detail, e)
            self._rate_again_s = monotonic() + RATE_AGAIN_S
            return
        self._rate, self._rate_again_s = rate, 0.0

    def _create(self, optimizer: Optimizer | None, consistency: Any, partitions: int | None, ack: str | None) -> None:
        """Create the model unless it is there, with its values; without `optimizer`, raise NotFoundError if it is not.

        If its first values are not complete, whoever was sending them may have died: then this process sends its own.
        """
        there = True
        try:
            ready = self._map().document.get("state", "ready") == "ready"
        except NotFoundError as e:
            if e.code != "unknown_model":
                raise
            if optimizer is None:
                hint = "pass an optimizer, such as optimizer=ps.Adam(lr=1e-3), to create it"
                raise problem(e.code, e.detail, hint=hint) from None
            there = ready = False
        if ready or optimizer is None:
            return
        try:
            self._client.create_model(
                self._model.name,
                as_params(self._params),
                optimizer=optimizer,
                consistency=consistency,
                partitions=partitions,
                ack=ack,
                exist_ok=True,
                timeout=self._timeout,
            )
        except ConflictError as e:
            if e.code != "model_exists":  # another worker has created it meanwhile, with other settings
                raise
        except AuthError:
            if not there:
                raise  # else another worker, whose token allows it, may be uploading: the pull waits for that

    def _warn_of_other_settings(self, differences: list[str]) -> None:
        """Log a warning that the model, which existed, was not given the settings that were passed."""
        if differences:
            log.warning(
                "model.differs model=%s: it exists, and its settings stay: %s; model.set(...) changes them",
                self._model.name,
                "; ".join(differences),
            )

    def _checked_map(self) -> ModelMap:
        """Return the model's map; raises RequestError if it was created again and no longer fits the module."""
        model_map = self._map()
        if model_map.generation != self._generation:
            check_fit(self._params, model_map)
            self._allocate_values(model_map)
            self._model = Model(self._client, self._model.name)  # the one there was stands for an earlier creation
        return model_map

    def _allocate_values(self, model_map: ModelMap) -> None:
        """Allocate buffers in this model generation's layout; another generation may order parameters differently."""
        layout, lazy = model_map.layout, self._tables.names if self._tables else ()
        self._dtype, self._generation = wire_dtype(select(layout), self._pull_coding), model_map.generation
        names = [n for n in layout.by_name if n not in lazy]
        self._values = _Values(layout, self._dtype, self._device, names) if names else None

    def _map(self) -> ModelMap:
        client = self._client
        return client.run(client.cluster.map_of(self._model.name, client.deadline(self._timeout)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the learning rate of a `state_dict()`; refuse that of another optimizer with RequestError."""
        if state_dict["state"] or any(SETTINGS & group.keys() for group in state_dict["param_groups"]):
            raise problem(
                "invalid_field",
                "the state is that of another optimizer: moments and settings are in the cluster, and stay",
                hint='opt.param_groups[0]["lr"] = ... takes over its rate',
            )
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a second group with RequestError: a model has one learning rate, and per parameter an `lr_scale`."""
        if self.param_groups:
            raise problem("invalid_field", "a model has a single parameter group", hint="use ps.Param(lr_scale=...)")
        super().add_param_group(param_group)


class _Values:
    """Buffers for some pulled parameters: host memory (pinned for CUDA) and a flat buffer on the device."""

    def __init__(self, layout: Any, dtype: str, device: torch.device, names: Collection[str]) -> None:
        self._dtype, self._names = dtype, names if len(names) < len(layout.by_name) else None
        self._side = SideStream(device)
        self._selection = select(layout, self._names)
        numpy_dtype = HANDED_OUT[dtype]
        kind = torch.from_numpy(np.empty(0, numpy_dtype)).dtype
        self._host = torch.empty(self._selection.size, dtype=kind, device="cpu", pin_memory=self._side.cuda)
        self._flat = torch.empty_like(self._host, device=device) if self._side.cuda else self._host
        at = self._selection.offsets
        self._views = {
            p.name: self._flat[at[i] : at[i + 1]].view(p.shape) for i, p in enumerate(self._selection.params)
        }
        nothing = Origin(layout.spec.name, 0, 0, 0, 0, {})
        self._pulled = Params(self._selection, self._host.numpy(), nothing)

    def pull(self, worker: Worker, params: Mapping[str, Tensor]) -> None:
        """Pull the values, and copy them into the module's parameters."""
        self._pulled = worker.pull(self._names, out=self._pulled, dtype=self._dtype)
        if self._side.cuda:
            with self._side.after_current():
                self._flat.copy_(self._host, non_blocking=True)
            self._side.before_current()
        with torch.no_grad():  # not through `p.data`: a graph that needs the old values must notice
            torch._foreach_copy_([params[n] for n in self._views], list(self._views.values()))
        self._side.wait()  # the next pull overwrites the host memory


def _of_partitions(codec: Codec, rows: str) -> PsError:
    """Return the error for a codec of whole partitions where rows are sent."""
    hint = 'codec="fp16" or "fp32", or sparse=False for the layer'
    return problem("invalid_encoding", f"codec {codec.text} takes whole partitions, not rows: {rows}", hint=hint)


def _leave_in_thread(leave: Callable[[], None]) -> None:
    """Leave the cluster for an optimizer that was not closed, in a thread, which the end of the process waits for.

    Whoever collects it may hold a lock that this takes, or be the thread of heartbeats that this waits for.
    """

    def leave_once() -> None:
        leave()
        atexit.unregister(leave)

    with suppress(RuntimeError):  # no thread can be started: it leaves at exit
        threading.Thread(target=leave_once, name="leaving").start()


def _encoding_of(model: Model | Worker | str) -> Encoding:
    """Return the default encoding of what is pushed through the constructor's `model` argument."""
    if isinstance(model, Worker):
        return model._session.encoding
    return model._encoding if isinstance(model, Model) else NO_ENCODING


def _resolve_model(model: Model | Worker | str, timeout: float | None, stack: ExitStack) -> tuple[Client, str]:
    """Return the client and the name of the model that the constructor's `model` argument denotes."""
    if isinstance(model, Worker):
        return model.client, model.model
    if isinstance(model, Model):
        return model._client, model.name
    if not isinstance(model, str):
        kinds = "a model's URL or name, a ps.Model or a ps.Worker"
        raise problem("invalid_field", f"model must be {kinds}, not {type(model).__name__}")
    base, found, name = model.partition("/models/") if "://" in model else ("", "yes", model)
    if not found or not name or "/" in name:
        raise problem("malformed", f"'{model}' is not a model's URL", hint="http://localhost:8700/models/demo")
    timeout = CLIENT_TIMEOUT_S if timeout is None else timeout
    return stack.enter_context(connect(base or None, timeout=timeout)), name
