"""Error feedback: whatever becomes of a worker's pushes, no residual is lost or sent twice."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.decoding import decode_partition

from paramserver.client import transfer
from paramserver.client.cluster import Cluster
from paramserver.client.encoding import Draft, Encoding, Feedback
from paramserver.codecs.codec import Codec
from paramserver.core.spec import ModelSpec
from paramserver.errors import InDoubt, PsError, Unavailable
from paramserver.net.calls import Deadline, Outcome, Request, Response
from paramserver.types import F32
from paramserver.wire.frame import MEDIA_TYPE, PullReply, PushFrame, PushReply, decode_header, encode_header

from .sharding import A, Now, Shards, drive, refusal, terms

CODEC = Codec.parse("int8")


class Decoding(Shards):
    """Two shards that decode pushes and add them up in `arrived`; `says` can refuse a push or drop it as late."""

    def __init__(self, mode: str, codec: Codec) -> None:
        super().__init__()
        self.coding = codec.coding
        self.spec = ModelSpec.parse({**self.spec.document(), "consistency": {"mode": mode}})
        self.arrived = np.zeros(self.layout.size, np.float64)
        self.says: Callable[[Request], Outcome | bool] = lambda _: False
        """Returns an outcome that replaces the usual one, or whether the push is late."""

    def frame(self, request: Request, data: bytes) -> Outcome:
        """Answer a push, or a pushpull whose reply holds no values, so that these are still to be pulled."""
        said = self.says(request)
        if not isinstance(said, bool):
            return said
        frame, at = decode_header(data, PushFrame)
        for part, (size, _) in zip(frame.parts, frame.sizes, strict=True):
            lo, hi = self.layout.bounds[part.partition : part.partition + 2]
            if not said:
                body = np.frombuffer(data, np.uint8, size, at).copy()  # aligned, as in a shard
                self.arrived[lo:hi] += decode_partition(self.coding, body, hi - lo)
            at += size
        state = "staged" if self.spec.consistency.mode == "sync" else "applied"
        done = PushReply(state, False, 1, 0, 9, 0, [(p.partition, 1, 9, 0) for p in frame.parts], late=said)
        if request.path == "/push":
            return Response(200, {"content-type": MEDIA_TYPE}, encode_header(done))
        assert request.sink is not None
        request.sink.begin()
        request.sink.feed(memoryview(encode_header(PullReply("m", 7, 0, 1, 9, "float32", [], done))))
        request.sink.end()
        return Response(200, {"content-type": MEDIA_TYPE})


class Sender:
    """A worker that pushes gradients, and its error-feedback memory."""

    def __init__(self, mode: str = "async", codec: Codec = CODEC) -> None:
        self.shards, self.now, self.cluster = Decoding(mode, codec), Now(), Cluster(("http://given:1",))
        self.codec = codec
        self.memory = Feedback()
        self.wanted = np.zeros(64, np.float64)
        self.seq = 0

    def push(self, seed: int, way: str = "push", counts: Any = True) -> Any:
        """Push one random gradient; the elements that `counts` selects are expected to arrive sooner or later."""
        gradient = np.random.default_rng(seed).standard_normal(64, dtype=np.float32)
        self.wanted += np.where(counts, gradient, 0.0)
        self.seq += 1
        call: Any = transfer.push if way == "push" else transfer.exchange
        how: Any = {} if way == "push" else {"commit_wait_s": 1.0}
        content, codec = self.content(gradient)
        options: Any = {"encoding": Encoding(codec, feedback=self.memory)}
        calling = call(self.cluster, "m", Deadline.after(5, self.now), content, terms(self.seq, **how), **options)
        done = drive(calling, self.shards, self.now)
        return done if way == "push" else done[0]

    def content(self, gradient: F32) -> tuple[Any, Codec | None]:
        """Return the content to push for a gradient, and the codec still to be applied to it."""
        return gradient, self.codec

    def left(self) -> Any:
        """Return the residual of each element: what encoding has left out so far."""
        draft, left, bounds = Draft(self.memory), np.zeros(64), self.shards.layout.bounds
        for i in range(4):
            residual, _ = draft.arrays(7, i, bounds[i + 1] - bounds[i])
            if residual is not None:
                left[bounds[i] : bounds[i + 1]] = residual
        draft.give_back()
        return left

    def check(self) -> None:
        """Assert that what has arrived and the residuals add up to what was expected to arrive."""
        left = self.left()
        np.testing.assert_allclose(self.shards.arrived + left, self.wanted, atol=1e-5)


@pytest.mark.parametrize("way", ["push", "exchange"])
def test_a_push_that_was_too_late_leaves_the_memory_as_it_was(way: str) -> None:
    """A push dropped as late (`late: drop`) loses no residual: those it carried go with the next push."""
    sender = Sender("sync")
    sender.push(0, way)
    sender.shards.says = lambda request: request.to == A  # B does not know of the commit yet
    before = sender.shards.arrived.copy()
    assert sender.push(1, way, counts=False).late
    sender.shards.arrived = before  # B drops what it has staged at the commit
    sender.shards.says = lambda _: False
    sender.push(2, way)

    sender.check()


@pytest.mark.parametrize("way", ["push", "exchange"])
@pytest.mark.parametrize(("outcome", "error"), [("fenced", InDoubt), ("unavailable", Unavailable)])
def test_a_push_that_one_shard_alone_takes_is_sent_once_there(way: str, outcome: str, error: type[PsError]) -> None:
    """If only one shard accepts a push, the next push repeats only the residuals that were meant for the other."""
    sender = Sender()
    there = np.repeat([True, False, True, False], np.diff(sender.shards.layout.bounds))
    sender.push(0, way)
    sender.shards.says = lambda request: request.to != A and refusal(outcome)
    with pytest.raises(error):
        sender.push(1, way, counts=there)
    sender.shards.says = lambda _: False
    sender.push(2, way)

    sender.check()


@pytest.mark.parametrize("dtype", ["float64", "float16", ">f4"])
def test_a_gradient_of_another_type_is_encoded_by_its_values(dtype: str) -> None:
    """A gradient that is not float32 as the encoder reads it is converted first, by a codec of whole partitions too."""
    sender = Sender()
    gradient = np.linspace(-2.0, 2.0, 64).astype(np.float16)
    calling = transfer.push(
        sender.cluster,
        "m",
        Deadline.after(5, sender.now),
        gradient.astype(dtype),
        terms(1),
        encoding=Encoding(CODEC, feedback=sender.memory),
    )
    drive(calling, sender.shards, sender.now)
    sender.wanted += gradient

    sender.check()
