"""The blocking client: connections, the cluster's map, and what is not about one model."""

import os
import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeVar

from paramserver import limits
from paramserver.client import checkpointing, control
from paramserver.client.calls import Call, Deadline, seconds
from paramserver.client.cluster import Cluster, urls_of
from paramserver.client.consistency import Consistency
from paramserver.client.credentials import Credentials
from paramserver.client.encoding import codec_of
from paramserver.client.forks import in_child
from paramserver.client.model import Model
from paramserver.client.numbers import PushNumbers, private_numbers
from paramserver.client.optimizers import Optimizer
from paramserver.client.shared_arrays import SharedArrays
from paramserver.client.spec_builder import ParamLike, model_document
from paramserver.client.transport import BlockingTransport, check

T = TypeVar("T")
QUICK_CHECK_S = 3.0
"""How long `connect` waits for a first sign of life."""


class Client:
    """A connection to one cluster; blocking, independent of any event loop, safe to share between threads."""

    def __init__(self, urls: tuple[str, ...], timeout: float, credentials: Credentials) -> None:
        self.urls = urls
        self.timeout = seconds(timeout)
        """Seconds that a call may take unless it says otherwise."""
        self.credentials = credentials
        """What it shows the nodes, and whose certificates it believes."""
        self.cluster = Cluster(urls)
        self.shared = SharedArrays(self.cluster)
        self.transport = BlockingTransport(urls, credentials)
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._numbers = defaultdict[str, PushNumbers](private_numbers)

    @property
    def url(self) -> str:
        """The first URL it was given."""
        return self.urls[0]

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {', '.join(self.urls)}>"

    def close(self) -> None:
        """Close all connections, and give back what shards on this machine lent."""
        self.shared.drop()
        self.run(self.cluster.leave())
        self.transport.close()

    def run(self, call: Call[T]) -> T:
        """Drive a call to its result."""
        return self.transport.run(call)

    def deadline(self, timeout: float | None, wait_s: float = 0.0) -> Deadline:
        """When a call of that timeout ends; without one, waiting that was asked for comes on top."""
        return Deadline.after(self.timeout + seconds(wait_s, "wait_s") if timeout is None else timeout)

    def numbers(self, model: str) -> PushNumbers:
        """The push numbers of this client for a model; a forked child gets its own."""
        with self._lock:
            return self._numbers[model]

    def model(self, name: str, *, codec: str | None = None) -> Model:
        """The model of that name; whether there is one shows at the first call.

        `codec` is how gradients travel to it unless a push says otherwise: "int8", "bf16+zstd" (docs/codecs.md).
        """
        return Model(self, name, codec_of(codec, None, None))

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
        """Create a model and return it when it can be pulled.

        Args:
            params: for each name an array (the first values), a shape (zeros), a `Param`, or the JSON object of the
                REST interface.
            optimizer: `ps.SGD(lr=0.1)` and the like; None: SGD with torch's defaults.
            consistency: `ps.Async()`, `ps.SSP(3)`, `ps.Sync()`, `ps.Buffered(8)`; None: async.
            partitions: into how many it is cut; None: by its size.
            exist_ok: a model of that name with this very spec is fine, and keeps its values.

        Raises RequestError listing what is wrong with the spec, ConflictError (`model_exists`).
        """
        others = {"partitions": partitions, "ack": ack, "evaluate_every": evaluate_every, "checkpoint": checkpoint}
        body, uploads = model_document(name, params, optimizer, consistency, others)
        self.run(control.create_model(self.cluster, body, uploads, self.deadline(timeout), exist_ok=exist_ok))
        return Model(self, name)

    def models(self, *, timeout: float | None = None) -> list[str]:
        """The names of all models."""
        return [str(m["name"]) for m in self.run(control.listed("/models", self.deadline(timeout)))]

    def status(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Nodes with heartbeat ages, models with versions, clocks, rates and lag: what `GET /status` answers."""
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
        """Make a model from a checkpoint folder of this machine, with its optimizer state.

        Args:
            as_: the model's name; None: the one it had.
            partitions: into how many it is cut; None: as it was.
            exist_ok: a model of that name with the same parameters is set to the checkpoint's values, partition after
                partition: a push that comes meanwhile is in some of them only.

        Raises NotFoundError (`unknown_checkpoint`), CorruptState, ConflictError (`model_exists`).
        """
        call = checkpointing.restore(
            self.cluster, os.fspath(path), as_, partitions, self.deadline(timeout), exist_ok=exist_ok
        )
        return Model(self, self.run(call).name)

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
        """Start one training of a model with workers of the pool; the run's document."""
        body = control.run_document(model, entry, name, args, workers, stop, evaluate_every, checkpoint_every)
        return dict(self.run(control.once("/runs", body, self.deadline(timeout))))

    def runs(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """The runs that are kept, newest first."""
        return self.run(control.listed("/runs", self.deadline(timeout)))

    def get_run(self, run: str, *, timeout: float | None = None) -> dict[str, Any]:
        """One run: its state, its places, and why it failed if it did."""
        return dict(self.run(control.fetch(f"/runs/{run}", self.deadline(timeout))))

    def set_run(self, run: str, *, timeout: float | None = None, **changes: Any) -> dict[str, Any]:
        """Change a run: `state="paused"|"running"|"stopped"`, `workers=`, `stop=`."""
        return dict(self.run(control.send("PATCH", f"/runs/{run}", changes, self.deadline(timeout))))

    def request(self, method: str, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        """The JSON answer of any control route, with this client's retries and errors."""
        return self.run(control.send(method, path, body, self.deadline(timeout)))


def connect(
    url: str | None = None,
    timeout: float = limits.CLIENT_TIMEOUT_S,
    token: str | None = None,
    ca: str | os.PathLike[str] | None = None,
) -> Client:
    """A client of the cluster at `url`, else PARAMSERVER_URL, else http://127.0.0.1:8700.

    Args:
        url: the address of any node or gateway; several, comma-separated, are tried in turn.
        timeout: seconds that a call may take unless it says otherwise.
        token: sent as a bearer token; None: PARAMSERVER_TOKEN, or what the file PARAMSERVER_TOKEN_FILE holds, if set.
        ca: file of certificates (PEM) that are trusted besides the system's; None: PARAMSERVER_CA, if set.

    Raises Unreachable if nobody answers there.
    """
    urls = urls_of(url, os.environ)
    client = Client(urls, timeout, Credentials.found(token, ca, os.environ))
    try:
        check(client.transport, urls, min(QUICK_CHECK_S, client.timeout))
    except BaseException:
        client.close()
        raise
    return client
