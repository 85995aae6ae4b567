"""The blocking client: connections, the cluster's map, and calls that are not about one model."""

import os
from collections.abc import Mapping
from typing import Any, NoReturn, Self, TypeVar

from paramserver import limits
from paramserver.client import checkpointing, control
from paramserver.client.client_base import ClientBase
from paramserver.client.cluster import ModelMap
from paramserver.client.consistency import Consistency
from paramserver.client.model import Model
from paramserver.client.optimizers import Optimizer
from paramserver.client.spec_builder import ParamLike, model_document
from paramserver.errors import InDoubt, PsError
from paramserver.net.addresses import urls_of
from paramserver.net.calls import Call
from paramserver.net.credentials import Credentials
from paramserver.net.transport import BlockingTransport, check

T = TypeVar("T")
QUICK_CHECK_S = 3.0
"""How long `connect` waits for a first answer."""


class Client(ClientBase):
    """A connection to one cluster; blocking, independent of any event loop, safe to share between threads.

    Takes the arguments of `ps.connect`, which makes one and sees whether the cluster answers; this sends nothing.
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
        self.transport = BlockingTransport(self.urls, Credentials.found(token, ca, os.environ))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self} cannot be pickled, nor can its models and workers: connect in the other process")

    def close(self) -> None:
        """Close all connections, and return slots and leases to shards on this machine."""
        try:
            self.shared.drop()
            self.run(self.cluster.leave())
        finally:  # also if Ctrl-C ends the wait for a shard
            self.transport.close()

    def run(self, call: Call[T]) -> T:
        """Run a call to completion and return its result."""
        return self.transport.run(call)

    def _create(self, call: Call[ModelMap], creation: control.Creation) -> ModelMap:
        """Run a call that makes a model; if it is interrupted or ends in doubt, remove what it may have made."""
        try:
            return self.run(call)
        except BaseException as error:
            if isinstance(error, PsError) and not isinstance(error, InDoubt):
                raise  # the call itself has removed it, or made none
            self.run(creation.remove())
            raise

    def model(self, name: str, *, codec: str | None = None) -> Model:
        """Return a handle for the model of that name; the first call fails if there is none.

        `codec` is the default encoding of gradients pushed to it, such as "int8" or "bf16+zstd" (docs/codecs.md).
        """
        return Model(self, name, codec)

    def create_model(
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
    ) -> Model:
        """Create a model; return it once it can be pulled.

        Args:
            params: for each name an array (the initial values), a shape (zeros), a `Param`, or the JSON object of the
                REST interface.  An integer, or a list or tuple of integers, is a shape: `np.array([1, 2])` is values.
            optimizer: `ps.SGD(lr=0.1)` and the like; None: SGD with torch's defaults.
            consistency: `ps.Async()`, `ps.SSP(3)`, `ps.Sync()`, `ps.Buffered(8)`; None: async.
            partitions: number of partitions; None: chosen by the model's size.
            ack: what each acknowledgement means: "applied" (also None), "journaled" or "fsynced".
            evaluate_every: clocks between evaluations; None: none are requested.
            checkpoint: `{"every_clocks": 1000, "every_minutes": 10, "keep": 3, "metric": "loss", "best": "min"}`, or a
                part of it; `best` is "max" (the default) or "min".
            exist_ok: accept an existing model of that name with exactly this spec; it keeps its values.

        Raises RequestError listing what is wrong with the spec, ConflictError (`model_exists`).
        """
        others = {"partitions": partitions, "ack": ack, "evaluate_every": evaluate_every, "checkpoint": checkpoint}
        body, uploads = model_document(name, params, optimizer, consistency, others)
        creation, deadline = control.Creation(), self.deadline(timeout)
        call = control.create_model(self.cluster, body, uploads, deadline, creation, exist_ok=exist_ok)
        return Model(self, name, generation=self._create(call, creation).generation)

    def models(self, *, timeout: float | None = None) -> list[str]:
        """Return the names of all models."""
        return [str(m["name"]) for m in self.run(control.listed("/models", self.deadline(timeout)))]

    def status(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return `GET /status`: nodes with heartbeat ages, models with versions, clocks, rates and lag."""
        return dict(self.run(control.fetch("/status", self.deadline(timeout))))

    def restore(
        self,
        path: str | os.PathLike[str],
        *,
        as_: str | None = None,
        partitions: int | None = None,
        exist_ok: bool = False,
        timeout: float | None = None,
    ) -> Model:
        """Create a model from a checkpoint folder on this machine, including its optimizer state.

        It is `initializing` until all of it is set; if this process is killed before, restore again with `exist_ok`.

        Args:
            as_: name of the model; None: the name in the checkpoint.
            partitions: number of partitions; None: as in the checkpoint.
            exist_ok: set an existing model with the same parameters to the checkpoint's values, one partition after
                another: a push that arrives meanwhile survives on some of them only.

        Raises NotFoundError (`unknown_checkpoint`), CorruptState, ConflictError (`model_exists`).
        """
        creation, deadline = control.Creation(), self.deadline(timeout)
        call = checkpointing.restore(
            self.cluster, os.fspath(path), as_, partitions, deadline, creation, exist_ok=exist_ok
        )
        made = self._create(call, creation)
        return Model(self, made.name, generation=made.generation)

    def create_run(
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
        """Start a training run of a model with workers of the pool; return the run's document.

        Args:
            entry: "MODULE:FUNC" that each of the `workers` calls with its `Worker`, and with `args` as keywords.
            name: a name for people; None: the run's id.
            stop: what ends the run before every call has returned: `{"clocks": 1000}`, `{"minutes": 10}`, or
                `{"metric": {"name": "loss", "at_most": 0.1}}`; of several, the first that is met.
            evaluate_every: clocks between evaluations; 0: none are requested.
            checkpoint_every: clocks between checkpoints that the cluster keeps; 0: as the model's own settings say.

        A run waits until workers of the pool are free.  Raises NotFoundError (`unknown_model`).
        """
        body = control.run_document(model, entry, name, args, workers, stop, evaluate_every, checkpoint_every)
        return dict(self.run(control.post_unrepeatable("/runs", body, self.deadline(timeout))))

    def runs(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return the runs that the cluster keeps, newest first."""
        return self.run(control.listed("/runs", self.deadline(timeout)))

    def get_run(self, run: str, *, timeout: float | None = None) -> dict[str, Any]:
        """Return one run: its state, its places, and the reason if it failed."""
        return dict(self.run(control.fetch(control.run_path(run), self.deadline(timeout))))

    def set_run(self, run: str, *, timeout: float | None = None, **changes: Any) -> dict[str, Any]:
        """Change a run: `state="paused"|"running"|"stopped"`, `workers=`, `stop=`."""
        return dict(self.run(control.send("PATCH", control.run_path(run), changes, self.deadline(timeout))))

    def request(self, method: str, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        """Return the JSON answer of any control route, with this client's retries and errors.

        A POST that may have been done is not sent again, but raises InDoubt; except one that ends in `/clock`, `/done`,
        `/drain` or `/pull`, which cannot count twice.
        """
        return self.run(control.request(method, path, body, self.deadline(timeout)))


def connect(
    url: str | None = None,
    *,
    timeout: float = limits.CLIENT_TIMEOUT_S,
    token: str | None = None,
    ca: str | os.PathLike[str] | None = None,
) -> Client:
    """Return a client of the cluster at `url`, by default PARAMSERVER_URL, else http://127.0.0.1:8700.

    Args:
        url: address of any node or gateway; several, comma-separated, are tried in turn.
        timeout: default timeout of a call, in seconds.
        token: bearer token; None: PARAMSERVER_TOKEN, or the contents of the file PARAMSERVER_TOKEN_FILE, if set.
        ca: file of PEM certificates to trust in addition to the system's; None: PARAMSERVER_CA, if set.

    Raises Unreachable if no URL answers, RequestError (`malformed`) if one is not a cluster's.
    """
    client = Client(url, timeout=timeout, token=token, ca=ca)
    try:
        check(client.transport, client.urls, min(QUICK_CHECK_S, client.timeout))
    except BaseException:
        client.close()
        raise
    return client
