"""What models of the blocking and the asyncio client share: how their pushes are encoded and numbered, and requests."""

from collections.abc import Callable
from typing import Any, TypeVar

from paramserver.client import control, transfer
from paramserver.client.arrays import Params
from paramserver.client.client_base import ClientBase
from paramserver.client.cluster import model_path
from paramserver.client.encoding import NO_ENCODING
from paramserver.client.frames import PushTerms
from paramserver.client.gradients import Grads
from paramserver.client.rows import Rows
from paramserver.core.fields import check_model_name
from paramserver.core.selection import Ranges
from paramserver.errors import InDoubt, PsError
from paramserver.net.calls import Call
from paramserver.types import DTypeLike

T = TypeVar("T")


class ModelBase:
    """Base class of models."""

    _client: ClientBase

    def __init__(self, client: ClientBase, name: str, codec: str | None = None, generation: int | None = None) -> None:
        self._client = client
        self.name = check_model_name(name)
        self._generation = generation
        """Which creation of the model it stands for: the one that was made with it, or that it first pulled from or
        pushed to; None: none yet.  Requests that change or delete the model name it, as a later one is not meant."""
        self._encoding = NO_ENCODING.of_call(codec=codec)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} at {self._client.url}>"

    def _pull(
        self, out: Params | None, timeout: float | None, *, wait_s: float, copy: bool, **options: Any
    ) -> Call[Params]:
        """See `Model.pull`; `options` are those of `transfer.pull` that are not named here."""
        client, deadline = self._client, self._client.deadline(timeout, wait_s)
        transfer.check_view(out, not copy)
        if copy:
            pulling = transfer.pull(client.cluster, self.name, deadline, out=out, wait_s=wait_s, **options)
        else:
            pulling = client.shared.pull(self.name, deadline, wait_s=wait_s, **options)
        values = yield from pulling
        if self._generation is None:
            self._generation = values.origin.generation
        return values

    def _numbered(
        self,
        send: Callable[..., Call[T]],
        grads: Grads,
        timeout: float | None,
        *,
        codec: str | None,
        dtype: DTypeLike | None,
        ranges: Ranges | None,
        rows: Rows | None,
        **terms: Any,
    ) -> Call[T]:
        """Do `transfer.push` or `transfer.pushpull` under the next number of a sender that has not joined."""
        client, deadline = self._client, self._client.deadline(timeout)
        encoding = self._encoding.of_call(codec=codec, dtype=dtype, ranges=ranges, rows=rows)
        numbers = client.numbers(self.name)
        push_id = yield from numbers.take(deadline)
        try:
            sending = send(client.cluster, self.name, deadline, grads, PushTerms(push_id, **terms), encoding=encoding)
            done = yield from sending
            if self._generation is None:
                self._generation = client.cluster.generation(self.name)
            return done
        except PsError as e:
            if isinstance(e, InDoubt):  # the next call pushes under another number
                raise e.plus(retryable=False) from e
            if e.code != "worker_required":
                raise
            raise e.with_detail(e.detail, "with model.worker() as w: w.push(...)") from None
        finally:
            numbers.settle(push_id)

    def _listed(self, noun: str, timeout: float | None) -> Call[list[Any]]:
        """Return all items of a list of this model."""
        return control.listed(model_path(self.name, noun), self._client.deadline(timeout))

    def _post(self, noun: str, body: Any, timeout: float | None) -> Call[Any]:
        """Send a POST that may be repeated."""
        return control.send("POST", model_path(self.name, noun), body, self._client.deadline(timeout))

    def _save(self, name: str | None, timeout: float | None) -> Call[dict[str, Any]]:
        """See `control.save_checkpoint`."""
        return control.save_checkpoint(self.name, self._generation, name, self._client.deadline(timeout))

    def _restore(
        self, checkpoint: str, into: str | None, partitions: int | None, timeout: float | None, *, exist_ok: bool
    ) -> Call[tuple[str, int]]:
        """See `Model.restore`; return the restored model's name and generation."""
        target = self.name if into is None else check_model_name(into)
        body = {"checkpoint": checkpoint, "as": target, "partitions": partitions, "exist_ok": exist_ok}
        path = control.of_creation(model_path(self.name, "restore"), self._generation)
        doc = yield from control.post_unrepeatable(path, body, self._client.deadline(timeout))
        self._client.cluster.forget(target)  # the model may be another one than that of the name before
        generation = int(doc["generation"])
        if target == self.name:
            self._generation = generation
        return target, generation
